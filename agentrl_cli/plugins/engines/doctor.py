"""The check of a vLLM server in `agentrl doctor`."""

from __future__ import annotations

from agentrl_cli.config.remote import RemoteConfig
from agentrl_cli.doctor import Check
from agentrl_cli.doctor.machine import check_server, find_version
from agentrl_cli.plugins.engines.wires import TESTED_VLLM, VLLM


def check_vllm(remote: RemoteConfig) -> Check:
    """Return whether the server answers, and whether this environment's vLLM is the tested release."""
    check, found = check_server(remote, VLLM.start), find_version("vllm")  # it may run elsewhere
    if check.status != "ok" or not found or found.startswith(f"{TESTED_VLLM}."):
        return check
    detail = f"{check.detail}; vLLM {found} is installed here, tested is {TESTED_VLLM}"
    return Check("server", "warn", detail, "pip install 'agentrl-cli[vllm]'")
