"""Environments: tools as the world, a simulated user, an Env of one's own, and what must be freed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_cli import Config, ScriptedPolicy, load_pack
from agentrl_cli.envs.tool_env import AssistantTurn, ToolEnv
from agentrl_cli.errors import EnvError, SandboxFault
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tools import Tool, as_tool
from agentrl_cli.types import (
    Message,
    Outcome,
    RewardPart,
    Task,
    ToolCall,
    ToolResult,
)
from tests.envs.test_worlds import answer, asked, turn
from tests.helpers.chat import BYTES, CHAT, add, schema

TASK = Task("t", "p", "f", "train", ({"role": "user", "content": "Hi."},), {"answer": "5"})


@asynccontextmanager
async def opened(*tools: Any, task: Task = TASK, **more: Any) -> AsyncIterator[ToolEnv]:
    env = ToolEnv([as_tool(tool) for tool in tools], **more)
    assert await env.reset(task) == list(task.prompt)
    yield env
    await env.close()


async def test_tools_run_at_the_same_time() -> None:
    together = asyncio.Barrier(3)

    async def wait() -> str:
        """Wait until as many are called at once as may be."""
        await together.wait()
        return "waited"

    async with opened(wait, max_parallel_calls=3) as env:
        step = await env.step(turn(*(ToolCall(f"c{n}", "wait", {}, "") for n in range(4))))
    assert [r.error for r in step.results] == [None, None, None, "too_many_calls"]


class Opened(Tool):
    """A tool that says what happens to it."""

    def __init__(self, name: str, seen: list[str], broken: bool = False) -> None:
        self.schema = schema(name, {})
        self.name, self.seen, self.broken = name, seen, broken

    async def create(self, ctx: Any) -> str:
        self.seen.append(f"create {self.name}")
        return self.name

    async def execute(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(state, done=self.name == "done")

    async def reward(self, state: Any) -> float | None:
        return None if self.name == "silent" else 0.5

    async def release(self, state: Any) -> None:
        self.seen.append(f"release {self.name}")
        if self.broken:
            raise RuntimeError("it does not close")


async def test_where_the_sandbox_fails_the_other_calls_end_before_the_session_is_closed() -> None:
    done: list[str] = []

    async def broken() -> str:
        """Break."""
        raise SandboxFault("the worker died")

    async def slow() -> None:
        """Take a while."""
        await asyncio.sleep(0.05)
        done.append("b")

    async with opened(broken, slow) as env:
        with pytest.raises(SandboxFault, match="died"):
            await env.step(turn(asked("broken"), asked("slow")))
        assert done == ["b"]


async def test_a_tool_can_end_the_episode_and_have_an_opinion() -> None:
    seen: list[str] = []
    async with opened(Opened("done", seen), Opened("silent", seen)) as env:
        step = await env.step(turn(asked("silent"), asked("done")))
        assert step.terminated and [result.text for result in step.results] == ["silent", "done"]
        assert await env.rewards() == (RewardPart("tool:done", 0.5, 0.0),)
    assert seen == ["create done", "create silent", "release done", "release silent"]


async def test_one_that_does_not_close_does_not_keep_the_others() -> None:
    seen: list[str] = []
    with pytest.raises(EnvError, match="it does not close"):
        async with opened(Opened("a", seen, broken=True), Opened("b", seen)):
            pass
    assert seen[-2:] == ["release a", "release b"]


class Session:
    """Stands where a sandbox session would be."""

    def __init__(self, ok: bool = True) -> None:
        self.ok, self.cells, self.opens, self.closed = ok, list[str](), 0, 0
        self.history = self.cells

    async def open(self) -> "Session":
        self.opens += 1
        return self

    async def cell(self, code: str) -> Any:
        self.cells.append(code)
        return SimpleNamespace(ok=self.ok, text=lambda: "NameError: nope")

    async def close(self) -> None:
        self.closed += 1


async def test_the_session_is_opened_once_and_late_with_the_set_up_in_it() -> None:
    session = Session()
    async with opened(add, open_session=session.open, setup="x = 1") as env:
        await env.step(turn(asked("add", a=1, b=1)))
        assert session.opens == 0  # not needed
        first, second = await asyncio.gather(env.context.session(), env.context.session())
        assert first is second is session and session.cells == ["x = 1"]
    assert (session.opens, session.closed) == (1, 1)
    failing = Session(ok=False)
    async with opened(open_session=failing.open, setup="nope") as env:
        with pytest.raises(EnvError, match="NameError: nope"):
            await env.context.session()
        assert failing.closed == 1


async def test_a_session_whose_set_up_is_cut_off_is_closed() -> None:
    begun = asyncio.Event()

    class Hung(Session):
        async def cell(self, code: str) -> Any:
            begun.set()
            await asyncio.Event().wait()

    session = Hung()
    async with opened(open_session=session.open, setup="loop()") as env:
        opening = asyncio.ensure_future(env.context.session())
        await begun.wait()
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled() and session.closed == 1


class Patient:
    """A user who says no twice."""

    def __init__(self) -> None:
        self.heard: list[list[Message]] = []
        self.stopped = 0

    async def start(self, task: Task) -> None: ...

    async def reply(self, messages: Sequence[Message]) -> tuple[str | None, float | None]:
        self.heard.append([dict(message) for message in messages])
        return ("No.", 0.25) if len(self.heard) < 3 else (None, 0.5)

    async def stop(self) -> None:
        self.stopped += 1


async def test_a_simulated_user_is_asked_when_no_tool_is_called() -> None:
    user = Patient()
    async with opened(add, interaction=user) as env:
        assert env.schemas[0]["function"]["name"] == "add"
        called = await env.step(turn(asked("add", a=1, b=2)))
        answer = {"role": "tool", "tool_call_id": "c-add", "name": "add", "content": "3"}
        assert (called.messages, called.terminated, called.reward) == ([answer], False, None)
        steps = [await env.step(turn(content=f"{n}")) for n in range(3)]
        (part,) = await env.rewards()
    assert (part.name, part.value, part.weight) == ("interaction", 1.0, 0.0)
    assert [step.terminated for step in steps] == [False, False, True]
    assert list(steps[0].messages) == [{"role": "user", "content": "No."}]
    said = [(message["role"], message["content"]) for message in user.heard[-1]]
    assert said == [
        *(("user", "Hi."), ("assistant", ""), ("tool", "3"), ("assistant", "0"), ("user", "No.")),
        *(("assistant", "1"), ("user", "No."), ("assistant", "2")),
    ]
    assert user.stopped == 1


GUESS_PACK = """\
from agentrl_cli.envs.tool_env import Env, Step


class Guess(Env):
    closed = 0

    async def reset(self, task):
        self.tries, self.context = 0, "a name like one of ToolEnv's"
        return [{"role": "user", "content": "Guess a digit."}]

    async def step(self, turn):
        self.tries += 1
        right = turn.content.strip() == "7"
        if right or self.tries == 3:
            return Step(reward=float(right), terminated=True, truncated=not right)
        return Step([{"role": "user", "content": "No. Again."}], reward=-0.1)

    async def close(self):
        Guess.closed += 1


def make_env(task):
    if task.data.get("broken"):
        raise KeyError("no such world")
    return Guess()


def right(episode, ctx):
    return float(ctx.final_text == "7")


REWARDS = {"right": right}
"""


def guess_rollout(tmp_path: Path, replies: list[str]) -> tuple[Rollout, Job]:
    (tmp_path / "data").mkdir()
    (tmp_path / "task.yaml").write_text(
        "{name: guess, sandbox: false, rewards: {right: {primary: true}}}"
    )
    (tmp_path / "task.py").write_text(GUESS_PACK)
    (tmp_path / "data" / "train.jsonl").write_text('{"id": "a", "prompt": "p"}\n')
    pack, config = load_pack(str(tmp_path)), Config.model_validate({"rewards": {"env": 1.0}})
    rollout = Rollout(ScriptedPolicy(replies, BYTES), CHAT, {"guess": pack}, config)
    return rollout, Job(pack.tasks("train")[0], 0)


async def test_an_env_of_a_pack(tmp_path: Path) -> None:
    rollout, job = guess_rollout(tmp_path, ["3", "7"])
    episode = await rollout.episode(job)
    assert [turn.role for turn in episode.turns] == ["user", "assistant", "user", "assistant"]
    # What its steps gave adds up to the part `env`, which counts as the configuration says.
    assert episode.outcome is Outcome.SOLVED and episode.reward == pytest.approx(1.0 + 0.9)
    assert rollout.context.packs["guess"].module.Guess.closed == 1


async def test_an_env_may_cut_an_episode_off_and_one_that_cannot_be_made_is_an_env_error(
    tmp_path: Path,
) -> None:
    rollout, job = guess_rollout(tmp_path, ["1", "2", "3"])
    cut = await rollout.episode(job)
    assert cut.outcome is Outcome.TRUNCATED_TURNS and cut.reward == pytest.approx(-0.2)
    broken = replace(job, task=replace(job.task, data={"broken": True}))
    episode = await rollout.episode(broken)
    assert episode.outcome is Outcome.ENV_ERROR and "no such world" in episode.error


ASKED = Task("pack/1", "pack", "", "train", ({"role": "user", "content": "?"},))


def send() -> str:
    """Send something to someone outside."""
    return "sent"


class User(Patient):
    """As many others: it cannot be taken back."""

    async def reply(self, messages: Sequence[Message]) -> tuple[str | None, float | None]:
        return "Go on.", 1.0


@pytest.mark.parametrize("keep", [4, 0])
async def test_an_environment_rolls_back_to_before_a_turn(sandbox: Sandbox, keep: int) -> None:
    tools, opens = "run_python bash files submit calculator".split(), sandbox.session
    given: dict[str, Any] = {"task": ASKED, "open_session": partial(opens, keep=keep)}
    async with opened(*tools, setup="x = 0", **given) as env:
        await answer(env, 0, "calculator", expression="1 + 1")
        assert await answer(env, 1, "run_python", code="x += 1; x") == "1"
        await answer(env, 2, "bash", command="echo a > f")
        await answer(env, 3, "submit", answer="first")
        await answer(env, 3, "files", action="write", path="g", text="b")
        assert env.context.state == {"answer": "first"}

        assert await env.back(3) == () and env.context.state == {}
        assert await answer(env, 3, "bash", command="ls; cat f") == "f\na"
        assert await env.back(2) == ()
        listed = await answer(env, 2, "run_python", code="import os; x, os.listdir('.')")
        assert listed == "(1, ['.shm', '.tmp'])"
        assert await env.back(0) == ()  # before the session was opened: its set-up stays
        assert await answer(env, 0, "run_python", code="x") == "0" and await env.back(5) == ()


async def test_what_cannot_be_taken_back_is_said() -> None:
    async with opened(send, "calculator", task=ASKED, interaction=User()) as env:
        await env.step(AssistantTurn("hello", (), 0))
        await answer(env, 1, "send")
        await answer(env, 2, "calculator", expression="2")
        assert [(part.name, part.value) for part in await env.rewards()] == [("interaction", 1.0)]
        notes = [await env.back(turn) for turn in (2, 1, 0)]
        user = ("what the simulated user did stays done",)
        assert notes == [(), ("what send did stays done",), user] and await env.rewards() == ()
