"""Hooks are called in order, with the arguments they name; what fails is logged, or masks an episode."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import ConfigError, EnvError, NotFound
from agentrl_cli.evaluate import EvalResult
from agentrl_cli.hooks import Hook, HookList, load_hooks
from agentrl_cli.hooks.base import EVENTS
from agentrl_cli.rewards import RewardContext
from agentrl_cli.store import RunRow
from agentrl_cli.types import Episode, RewardPart, Task

TASK = Task("t1", "p", "f", "train", ())
EPISODE = Episode("e1", "t1")


class Recorder(Hook):
    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name

    def on_step_start(self, run: Any, step: int) -> None:
        self.seen.append(f"{self.name} step {step}")

    async def on_update(self, metrics: Mapping[str, float], step: int) -> None:
        self.seen.append(f"{self.name} update {metrics['loss']}")


def test_the_base_class_has_every_event() -> None:
    assert [name for name in vars(Hook) if name.startswith("on_")] == list(EVENTS)


async def test_sync_and_async_methods_in_order() -> None:
    seen: list[str] = []
    hooks = HookList([Recorder(seen, "a"), Recorder(seen, "b")])
    await hooks.call("on_step_start", run=None, step=3)
    await hooks.call("on_update", metrics={"loss": 0.5}, step=3)
    await hooks.call("on_run_end", run=None, error=None)
    assert seen == ["a step 3", "b step 3", "a update 0.5", "b update 0.5"]


async def test_any_class_and_any_subset_of_arguments() -> None:
    seen: list[Any] = []

    class Short:
        def on_rollout_end(self, rollout: Episode, task: Task) -> None:
            seen.append((rollout.id, task.id))

        def on_eval(self, step: int) -> None:
            seen.append(step)

    class Named:
        async def on_rollout_end(self, *, context: Any, episode: Episode) -> None:
            seen.append((context, episode.id))

    class Positional:
        def on_rollout_end(self, r: Episode, t: Task) -> None:
            seen.append((r.id, t.id))

    hooks = HookList([Short(), Named(), Positional()])
    assert await hooks.rollout_end(EPISODE, TASK, context="c") == []
    await hooks.call("on_eval", result=None, step=4)
    assert seen == [("e1", "t1"), ("c", "e1"), ("e1", "t1"), 4]


def test_arguments_that_do_not_exist_are_refused_at_once() -> None:
    class Wrong:
        def on_eval(self, *, banana: int) -> None: ...

    with pytest.raises(ConfigError, match=r"Wrong\.on_eval wants \(banana\)") as caught:
        HookList([Wrong()])
    assert "result, step, run" in caught.value.hint


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (None, []),
        (1, [RewardPart("hook:Giver", 1.0)]),
        ({"a": 2, "b": 0.5}, [RewardPart("a", 2.0), RewardPart("b", 0.5)]),
        (RewardPart("c", 1.0, weight=0.0), [RewardPart("c", 1.0, weight=0.0)]),
        ([RewardPart("c", 1.0), {"d": 1}], [RewardPart("c", 1.0), RewardPart("d", 1.0)]),
        ("good", None),
        (object(), None),
    ],
)
async def test_what_a_hook_may_return(answer: object, parts: list[RewardPart] | None) -> None:
    class Giver(Hook):
        def on_rollout_end(self, rollout: Episode, task: Task) -> object:
            return answer

    hooks = HookList([Giver()])
    if parts is not None:
        assert await hooks.rollout_end(EPISODE, TASK) == parts
        return
    with pytest.raises(EnvError, match=r"Giver\.on_rollout_end raised TypeError"):
        await hooks.rollout_end(EPISODE, TASK)


async def test_failures_are_logged_except_at_rollout_end(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    class Broken(Hook):
        def on_rollout_end(self, rollout: Episode, task: Task) -> None:
            raise KeyError("lost")

        async def on_step_start(self, run: Any, step: int) -> None:
            raise ValueError("no")

    hooks = HookList([Broken(), Recorder(seen, "after")])
    with caplog.at_level(logging.ERROR, logger="agentrl.hooks"):
        await hooks.call("on_step_start", run=None, step=1)
    assert seen == ["after step 1"]
    assert "Broken.on_step_start failed" in caplog.text and "ValueError: no" in caplog.text
    with pytest.raises(EnvError, match="KeyError: 'lost'"):
        await hooks.rollout_end(EPISODE, TASK)


async def test_the_jsonl_logger_writes_plain_json(tmp_path: Path) -> None:
    hooks = load_hooks(["jsonl"])
    await hooks.call("on_run_start", run=RunRow(id="1", name="a", dir=str(tmp_path)))
    await hooks.call("on_update", metrics={"loss": 0.25, "kl": float("nan")}, step=1)
    await hooks.call("on_eval", result=EvalResult("fox@1", 1, 0, 1.0, True, ()), step=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 1, "loss": 0.25, "kl": None}
    assert (lines[1]["step"], lines[1]["eval"]["name"]) == (2, "fox@1")
    assert "attempts" not in lines[1]["eval"]


@pytest.mark.parametrize("run", [None, RunRow(id="1", name="a")])
async def test_the_jsonl_logger_without_a_folder_writes_nothing(
    run: RunRow | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    hooks = load_hooks(["jsonl"])
    await hooks.call("on_run_start", run=run)
    await hooks.call("on_update", metrics={"loss": 0.25}, step=1)
    assert list(tmp_path.iterdir()) == [] and not caplog.records


async def test_every_event_has_the_run_and_the_end_of_a_rollout_its_context() -> None:
    assert [event for event, names in EVENTS.items() if "run" not in names] == []
    seen: list[Any] = []

    class Everything:
        def on_rollout_end(self, **facts: Any) -> None:
            seen.append(facts)

    run, context = RunRow(id="1", name="a"), RewardContext(TASK, "42")
    await HookList([Everything()]).rollout_end(EPISODE, TASK, context=context, run=run)
    assert seen == [{"rollout": EPISODE, "task": TASK, "context": context, "run": run}]


async def test_hooks_by_name_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def on_run_start(self, run): run.append('mine')\n"
    )
    run: list[str] = []
    await load_hooks(["mine.py:Mine"], base=tmp_path).call("on_run_start", run=run)
    assert run == ["mine"]
    with pytest.raises(NotFound, match="No hook named 'jsonk'"):
        load_hooks(["jsonk"])
