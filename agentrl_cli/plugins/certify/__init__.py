"""The certificate of a deployed model: stored contexts of a run replayed through it, and faults named."""

OFFERS = {
    "commands": {
        "certify": (
            "Look",
            f"{__name__}.command:command",
            "Whether a deployed model is the one that was trained",
        )
    },
    "examples": {
        "certify": (
            "agentrl certify best trained",
            "agentrl certify RUN@best NAME@http://host:8080/v1 --json",
        )
    },
    "policies": {"llama_cpp": f"{__name__}.subjects:LlamaPolicy"},
}
