"""Planted hangs: each is named by what has not come back, with its episode and arguments, and then goes on."""

import asyncio
import os
import signal
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.envs.tool_env import Env, Step
from agentrl_cli.hooks import HookList
from agentrl_cli.hooks.waits import Watchman, waiting, waits
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rewards import Reward
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack
from tests.helpers.train import trainer_of

BYTES = ByteTokenizer()
CHAT = Chat(BYTES)
SOON = 0.1
"""Seconds of silence after which the watchman of these tests reports."""


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
    """Another process writes: its lock is named, although it holds the thread."""
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


@pytest.mark.parametrize("part", ["update", "checkpoint"])
async def test_a_run_says_what_it_waits_for(part: str, tmp_path: Path, model: Path) -> None:
    """In its log and its store, where watch and ls read it, until it goes on."""
    narrated = threading.Event()
    wanted = "the update of step 1" if part == "update" else "the disk, for the checkpoint"
    async with trainer_of(tmp_path, model, train={"steps": 1}) as trainer:
        lines: list[str] = []

        def narrate(text: str) -> None:
            lines.append(text)
            if text.startswith(f"waiting for {wanted}"):
                narrated.set()

        trainer.quiet, trainer.reporter.narrate = SOON, narrate
        name = "update" if part == "update" else "state"
        made = getattr(trainer.learner, name)

        def slow(*args: Any, **named: Any) -> Any:
            narrated.wait()
            return made(*args, **named)

        setattr(trainer.learner, name, slow)
        run = await trainer.train()
        assert narrated.is_set()
        trainer.store.flush()
        said = [
            e["data"]["lines"]
            for e in trainer.store.journal.events(run.id)
            if e["kind"] == "waiting"
        ]
        assert any(found and found[0].startswith(wanted) for found in said)
