"""An agent.py that `agentrl init --from inspect:…` wrote before 0.1."""

from __future__ import annotations

import pytest

from agentrl_cli.errors import EnvError
from agentrl_cli.plugins.inspect.agent import Inspect
from agentrl_cli.types import Task


def test_foreign_asks_the_plugin_of_that_name() -> None:
    with pytest.warns(FutureWarning) as warned:
        from agentrl_cli.compat.programs import Foreign  # type: ignore[import-untyped]
    said = "Foreign is now agentrl_cli.agents.programs.open_program"
    assert any(said in str(one.message) for one in warned)
    found = Foreign("inspect", "evals", task="gsm8k", options={"a": 1}, score="match")
    assert isinstance(found, Inspect)
    with pytest.raises(EnvError, match="has no `sample`"):
        found.solve(Task(id="1", pack="", family="", split="", prompt=[]), "", "", "").send(None)
