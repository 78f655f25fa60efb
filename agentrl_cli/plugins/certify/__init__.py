"""The certificate of a deployed model: stored contexts of a run replayed through it, and faults named."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.certify"
OFFERS = {
    "commands": {
        "certify": (
            "Look",
            f"{HERE}.command:command",
            "Whether a deployed model is the one that was trained",
        )
    },
    "examples": {
        "certify": (
            "agentrl certify best trained",
            "agentrl certify RUN@best NAME@http://host:8080/v1 --json",
        )
    },
    "policies": {"llama_cpp": f"{HERE}.subjects:LlamaPolicy"},
}
