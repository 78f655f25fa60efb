"""A script with the one changed import of before 0.1, `import agentrl_cli.lightning as agl`."""

from __future__ import annotations

import sys

import pytest

import agentrl_cli.plugins.lightning as now


def test_the_package_and_the_modules_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if f"{one}.".startswith("agentrl_cli.lightning.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(
        FutureWarning, match="agentrl_cli.lightning is now agentrl_cli.plugins.lightning"
    ):
        import agentrl_cli.lightning as agl  # type: ignore[import-untyped]
    from agentrl_cli.lightning.store import InMemoryLightningStore  # type: ignore[import-untyped]
    from agentrl_cli.lightning.tracer.agentops import (  # type: ignore[import-untyped]
        AgentOpsTracer,
    )

    assert agl.Trainer is now.Trainer and agl.rollout is now.rollout
    assert AgentOpsTracer is now.AgentOpsTracer
    assert InMemoryLightningStore is now.InMemoryLightningStore
