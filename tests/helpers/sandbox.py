"""A sandbox for a test, or a skip with the reason where none of the wanted level starts."""

from typing import Any

import pytest

from agentrl_cli.config import SandboxConfig
from agentrl_cli.config.models import LimitsConfig
from agentrl_cli.errors import SandboxUnavailable
from agentrl_cli.sandbox import Sandbox


async def open_sandbox(**settings: Any) -> Sandbox:
    limits = {name: settings.pop(name) for name in {*settings} & {*LimitsConfig.model_fields}}
    try:
        return await Sandbox.open(SandboxConfig.model_validate({**settings, "limits": limits}))
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
