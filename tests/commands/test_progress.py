"""Progress where stderr is not a terminal."""

import time

import pytest

from agentrl_cli.commands.progress import Progress


def test_the_time_left_is_that_of_the_steps_made_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress("sft", 4_000) as bar:
        bar.done = 1_000  # a resumed training begins further on
        now = 60.0
        bar.advance("loss 0.5")
        now = 120.0
        bar.advance("loss 0.4")
    monkeypatch.undo()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "sft 1001/4000 loss 0.5  ETA 49 h 59 min"
    assert second == "sft 1002/4000 loss 0.4  ETA 49 h 58 min"
