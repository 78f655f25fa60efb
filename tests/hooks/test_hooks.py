"""Hooks are called in order, with the arguments they name; what fails is logged, what hangs is named or ends."""

import asyncio
import json
import logging
import math
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_cli import Config, Episode, Pack, Reward, RewardPart, ScriptedPolicy, Task
from agentrl_cli.envs.tool_env import Env, Step
from agentrl_cli.errors import ConfigError, EnvError, NotFound, StoreError
from agentrl_cli.evaluate import EvalResult
from agentrl_cli.hooks import Hook, HookList, load_hooks
from agentrl_cli.hooks.base import EVENTS
from agentrl_cli.hooks.loggers import Logger, finite, flat, nest
from agentrl_cli.hooks.waits import Watchman, waiting, waits
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.parts import open_parts
from agentrl_cli.store import RunRow, Store
from tests.helpers.chat import BYTES, CHAT
from tests.helpers.train import trainer_of

TASK = Task("t1", "p", "f", "train", ())
EPISODE = Episode("e1", "t1")


class Recorder(Hook):
    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name

    def on_step_start(self, run: Any, step: int) -> None:
        self.seen.append(f"{self.name} step {step}")

    async def on_update(self, metrics: Mapping[str, float], step: int) -> None:
        self.seen.append(f"{self.name} update {metrics['loss']}")


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

    class Everything:
        def on_rollout_end(self, **facts: Any) -> None:
            seen.append(facts)

    run, hooks = RunRow(id="1", name="a"), HookList([Short(), Named(), Positional(), Everything()])
    assert await hooks.rollout_end(EPISODE, TASK, context="c", run=run) == []
    await hooks.call("on_eval", result=None, step=4)
    facts = {"rollout": EPISODE, "task": TASK, "context": "c", "run": run}
    assert seen == [("e1", "t1"), ("c", "e1"), ("e1", "t1"), facts, 4]
    assert [name for name in vars(Hook) if name.startswith("on_")] == list(EVENTS)
    assert [event for event, names in EVENTS.items() if "run" not in names] == []


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

    hooks = HookList([Broken(), Recorder(seen, "a"), Recorder(seen, "b")])
    with caplog.at_level(logging.ERROR, logger="agentrl.hooks"):
        await hooks.call("on_step_start", run=None, step=1)
    await hooks.call("on_update", metrics={"loss": 0.5}, step=1)
    await hooks.call("on_run_end", run=None, error=None)
    assert seen == ["a step 1", "b step 1", "a update 0.5", "b update 0.5"]
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


async def test_hooks_by_name_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def on_run_start(self, run): run.append('mine')\n"
    )
    run: list[str] = []
    await load_hooks(["mine.py:Mine"], base=tmp_path).call("on_run_start", run=run)
    assert run == ["mine"]
    with pytest.raises(NotFound, match="No hook named 'jsonk'"):
        load_hooks(["jsonk"])


# Seconds of silence after which the watchman of these tests reports.
SOON = 0.1


class Hang:
    """Holds whatever runs into it until the watchman's first line begins as expected."""

    def __init__(self, expected: str = "") -> None:
        self.expected = expected
        self.line = ""
        self.named = threading.Event()

    def report(self, lines: Sequence[str]) -> None:
        if lines and lines[0].startswith(self.expected):
            self.line = lines[0]
            self.named.set()

    def hold(self, *_: Any, **__: Any) -> float:
        self.named.wait()
        return 1.0

    async def wait(self, *_: Any, **__: Any) -> float:
        return await asyncio.to_thread(self.hold)

    async def rollout(self, *, tools: Sequence[Any] = (), reward: Any = None, **parts: Any) -> None:
        """Play an episode with such parts, which ends once the hang was named."""
        rewards = [Reward("graded", reward or (lambda episode, ctx: 1.0), primary=True)]
        pack = Pack.of("hung", [{"prompt": "?"}], rewards, tools=tools)
        pack = replace(pack, module=parts.pop("module", None))
        call = CHAT.parser.example("look", {"place": "Oslo"})
        policy = parts.pop("policy", None) or ScriptedPolicy([call, "5"] if tools else ["5"], BYTES)
        rollout = Rollout(policy, CHAT, {"hung": pack}, Config(), **parts)
        with Watchman(self.report, SOON):
            episode = await rollout.episode(Job(pack.tasks("train")[0], 1))
        assert not waits()
        assert self.line.startswith(f"{self.expected} of episode {episode.id}, since ")


@pytest.mark.parametrize("kind", ["thread", "task", "the event loop itself"])
async def test_a_tool_is_named_with_its_arguments(kind: str) -> None:
    hang = Hang('the tool look {"place": "Oslo"}')

    def look(place: str) -> str:
        """Look.

        Args:
            place: Where.
        """
        return str(hang.hold())

    async def look_async(place: str) -> str:
        """Look.

        Args:
            place: Where.
        """
        return str(hang.hold() if kind.startswith("the") else await hang.wait())

    look_async.__name__ = "look"
    await hang.rollout(tools=[look if kind == "thread" else look_async])


@pytest.mark.parametrize("part", ["hold", "wait"])
async def test_a_grader_is_named(part: str) -> None:
    hang = Hang("the grader graded")

    async def graded(episode: Any, ctx: Any) -> float:
        return await hang.wait()

    reward = graded if part == "wait" else lambda episode, ctx: hang.hold()
    await hang.rollout(reward=reward)


@pytest.mark.parametrize("part", ["reset", "step", "closing"])
async def test_an_environment_is_named(part: str) -> None:
    hang = Hang("the closing" if part == "closing" else f"the environment's {part}")

    class World(Env):
        async def reset(self, task: Any) -> Any:
            return [*task.prompt] if part != "reset" else [*task.prompt][: int(await hang.wait())]

        async def step(self, turn: Any) -> Step:
            return Step(reward=1.0 if part != "step" else await hang.wait(), terminated=True)

        async def close(self) -> None:
            if part == "closing":
                await hang.wait()

    await hang.rollout(module=SimpleNamespace(make_env=lambda task: World()))


async def test_a_hook_and_a_model_are_named() -> None:
    hang, other = Hang("the hook Slow.on_trace_start"), Hang("the model, which samples turn 0")

    class Slow:
        async def on_trace_start(self, task: Any) -> None:
            await hang.wait()

    await hang.rollout(hooks=HookList([Slow()]))

    class Silent(ScriptedPolicy):
        async def generate(self, *args: Any, **named: Any) -> Any:
            await other.wait()
            return await super().generate(*args, **named)

    await other.rollout(policy=Silent(["5"], BYTES))


def test_a_lock_is_named_and_a_signal_prints_all(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    hang = Hang(f"the lock of {path}, which another process holds, since ")
    Store.open(path).close()
    conn = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def release() -> None:
        hang.hold()
        conn.rollback()

    with Store.open(path) as store, Watchman(hang.report, SOON), closing(conn) as other:
        other.execute("BEGIN IMMEDIATE")
        threading.Thread(target=release).start()
        with store.transaction():
            pass
    assert hang.line
    printed: list[Sequence[str]] = []
    with Watchman(printed.append), waiting("one"), waiting("part of one"), waiting("another", "e1"):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [line.partition(", since")[0] for line in printed[0]] == ["another of episode e1"]


async def test_a_run_says_what_it_waits_for(tmp_path: Path, model: Path) -> None:
    parts = {"update": "the update of step 1", "state": "the disk, for the checkpoint"}
    narrated = {part: threading.Event() for part in parts}
    async with trainer_of(tmp_path, model, train={"steps": 1}) as trainer:
        lines: list[str] = []

        def narrate(text: str) -> None:
            lines.append(text)
            for part, wanted in parts.items():
                if text.startswith(f"waiting for {wanted}"):
                    narrated[part].set()

        def slow(part: str, made: Any, *args: Any, **named: Any) -> Any:
            narrated[part].wait()
            return made(*args, **named)

        trainer.quiet, trainer.reporter.narrate = SOON, narrate
        for part in parts:
            made = getattr(trainer.learner, part)
            setattr(trainer.learner, part, partial(slow, part, made))
        run = await trainer.train()
        trainer.store.flush()
        said = [
            e["data"]["lines"]
            for e in trainer.store.journal.events(run.id)
            if e["kind"] == "waiting"
        ]
        for wanted in parts.values():
            assert any(found and found[0].startswith(wanted) for found in said)
        trainer.reporter.waits([f"{wanted}, since 12:00:00 (31 s)"])
        trainer.reporter.waits([])
        assert lines[-1] == f"the training continues; it waited for {wanted}"
        trainer.reporter.waits([])  # SIGUSR1 while nothing is waited for
        assert lines[-1] == "the training continues"
        # An earlier write that failed in the background is for the run, not for the thread that watches it.
        trainer.store.postpone(StoreError("the disk is full"))
        trainer.reporter.waits([])
        with pytest.raises(StoreError, match="the disk is full"):
            trainer.store.journal.add_log(run.id, "info", "the run's next line")


# --- loggers ---


RUN = RunRow(
    "id1",
    "name-1",
    config={"train": {"lr": 0.1, "optimizer": {"betas": [0.9, 0.95]}}, "seed": 3, "rewards": {}},
)
METRICS: dict[str, Any] = {
    "reward": 0.5,
    "facts/skipped:no_signal": 8.0,
    "loss": math.nan,
    "word": "no",
    "yes": True,
}


class Result:
    """What an evaluation hands over."""

    pass_rate = 0.25

    def report(self) -> dict[str, Any]:
        return {"splits": {"test": {"tool_rate": 0.5, "families": {}}}}


def drive(logger: Logger, run: RunRow, error: BaseException | None = None) -> None:
    """A run of two steps with an evaluation, as the trainer calls it."""
    logger.on_run_start(run)
    logger.on_update(METRICS, 1)
    logger.on_eval(Result(), 1)
    logger.on_update({"reward": 0.75}, 2)
    logger.on_run_end(run, error)


def run_in(folder: Path) -> RunRow:
    return RunRow(RUN.id, RUN.name, dir=str(folder), config=RUN.config)


def test_numbers_and_flat_settings() -> None:
    assert finite(METRICS) == {"reward": 0.5, "facts/skipped:no_signal": 8.0}
    assert flat(RUN.config) == {
        "train.lr": 0.1,
        "train.optimizer.betas": [0.9, 0.95],
        "seed": 3,
        "rewards": {},
    }
    for gaps, listed in ((False, {"2": 1, "10": 2}), (True, [1, 2])):
        assert nest({"a.2": 1, "a.10": 2, "b.1": 3, "b.0": 4, "c": 5, "c.d": 6}, gaps=gaps) == {
            "a": listed,
            "b": [4, 3],
            "c": {"d": 6},
        }
    assert nest({"a": {0: 1, 1: 2}}) == {"a": {0: 1, 1: 2}}, "only names of attributes make a list"


class Broken(Logger):
    name = "broken"

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        raise ConnectionError("no server")

    def close(self, error: BaseException | None) -> None:
        raise ConnectionError("still none")


class NeverOpen(Logger):
    name = "closed"

    def open(self, run: Any) -> None:
        raise PermissionError("no key")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        raise AssertionError("it was never opened")


class Hanging(Logger):
    name = "hanging"

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self.go.wait()


async def test_a_logger_that_fails_or_cannot_be_made_never_stops_a_run(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(
        "class Unmade:\n    def __init__(self):\n        raise RuntimeError('no account')\n"
        "class Good:\n    seen = []\n    def on_update(self, metrics, step):\n        self.seen.append(step)\n"
    )
    with caplog.at_level(logging.WARNING, "agentrl.hooks"):
        hooks = load_hooks([], tmp_path, loggers=["mine.py:Unmade", "mine.py:Good"]).hooks
        loggers = [*hooks, Broken(), NeverOpen()]
        async with trainer_of(tmp_path / "p", model, loggers, train={"steps": 2}) as trainer:
            run = await trainer.train()
            assert (run.status, run.step) == ("finished", 2)
            assert len(trainer.store.runs.steps(run.id)) == 2
    (good,) = hooks
    assert type(good).__name__ == "Good" and vars(type(good))["seen"] == [1, 2]
    reported = [record.getMessage() for record in caplog.records if record.name == "agentrl.hooks"]
    assert len(reported) == 3, "each is reported once"
    assert "mine.py:Unmade cannot be created (RuntimeError: no account)" in caplog.text
    assert "broken failed (ConnectionError: no server)" in caplog.text
    assert "closed failed (PermissionError: no key)" in caplog.text


class Slow(Logger):
    """Takes longer for all of a run's writes than it is given for one."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        time.sleep(0.15)
        self.steps.append(step)

    def close(self, error: BaseException | None) -> None:
        self.steps.append(-1)


async def test_a_slow_logger_is_caught_up_within_the_configured_patience(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"from {__name__} import Slow\n")
    config = Config(logger_seconds=0.5)
    async with open_parts(config, tmp_path, packs=[], loggers=["mine.py:Slow"]) as parts:
        (slow,) = [hook for hook in parts.hooks.hooks if isinstance(hook, Slow)]
        assert slow.patience == 0.5
        slow.on_run_start(RUN)
        for step in range(1, 7):
            slow.on_update({"reward": 1.0}, step)
        slow.on_run_end(RUN, None)
    assert slow.steps == [1, 2, 3, 4, 5, 6, -1] and slow.failed == ""


def test_a_hanging_logger_holds_nothing_up() -> None:
    logger = Hanging()
    logger.patience = 0.2
    drive(logger, RUN)
    assert "abandoned" in logger.failed
    logger.go.set()


# --- limits on time: what others take of the machine does not count, and what hangs ends ---
