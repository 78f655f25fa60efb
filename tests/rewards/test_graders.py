"""Graders, tools, hooks and worlds that answer nothing, never answer, or would end the process."""

import asyncio
import contextlib
import gc
import json
import signal
import sqlite3
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentrl_cli
from agentrl_cli import Config, Pack, ScriptedPolicy, Store
from agentrl_cli.envs.tool_env import Env, Step
from agentrl_cli.errors import EnvError
from agentrl_cli.hooks import Hook, HookList
from agentrl_cli.hooks.threads import contain, in_thread, thread_metrics
from agentrl_cli.rewards import Reward, RewardContext, score
from agentrl_cli.rewards.calls import _match_calls, _same
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.tools import ToolContext, as_tool
from agentrl_cli.tools.search import SearchTool
from agentrl_cli.tools.sql import SqlTool
from agentrl_cli.types import Episode, Message, Outcome, RewardPart, Task
from tests.helpers.chat import BYTES, CHAT
from tests.helpers.cli import Cli
from tests.helpers.processes import soon
from tests.helpers.train import (
    TASK_PY,
    after_training,
    episodes_of,
    settings,
    write_pack,
    write_project,
)

CALL = '<tool_call>\n{"name": "act", "arguments": {}}\n</tool_call>'


class Skipped(BaseException):
    """As a test framework's `skip()` raises it."""


ENDINGS = {
    "SystemExit: 3": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "Skipped: no": Skipped("no"),
    "CancelledError": None,
}


def right(episode: Episode, ctx: Any) -> float:
    return 1.0


def rollout_of(
    *rewards: Reward, tools: tuple[Any, ...] = (), hooks: tuple[object, ...] = (), **limits: Any
) -> tuple[Rollout, list[Job]]:
    made = rewards or (Reward("right", right),)
    pack = Pack.of("p", [{"prompt": "Go."}], made, tools=tools)
    config = Config.model_validate({"rollout": {"max_tokens": 2000, **limits}})
    replies = [CALL, "done"] if tools else ["done"]
    rollout = Rollout(
        ScriptedPolicy(replies, BYTES), CHAT, {"p": pack}, config, hooks=HookList(hooks)
    )
    return rollout, [Job(pack.tasks("train")[0], seed=n, sample=n) for n in range(6)]


def in_world(rollout: Rollout, world: type[Env]) -> Rollout:
    module: Any = SimpleNamespace(make_env=lambda task: world())
    return rollout.with_(packs={"p": replace(rollout.context.packs["p"], module=module)})


def ends(words: str, *, later: bool) -> Callable[..., Any]:
    def end(sample: int) -> float:
        if sample == 1:
            raise ENDINGS[words] or asyncio.CancelledError()
        return 1.0

    async def coroutine(episode: Episode, ctx: Any) -> float:
        await asyncio.sleep(0)
        return end(episode.sample)

    return coroutine if later else lambda episode, ctx: end(episode.sample)


# --- what is not graded ----------------------------------------------------------------------------------------------


async def test_a_primary_reward_of_none_is_masked_counted_and_reported(
    tmp_path: Path, model: Path
) -> None:
    code = TASK_PY.replace(
        "    said =", "    if episode.sample == 1:\n        return None\n    said =", 1
    )
    write_pack(tmp_path, code=code)
    async with after_training(tmp_path, model, algo={"drop_zero_variance": False}) as (
        trainer,
        run,
    ):
        store = trainer.store
        found = episodes_of(store, run)
        nothing = [e for e in found if e.sample == 1]
        assert {(e.outcome, e.fact, e.reward, e.advantage) for e in nothing} == {
            (Outcome.UNGRADED, "skipped:ungraded", None, None)
        }
        assert "'even' is None" in nothing[0].error and [
            p.name for p in nothing[0].reward_parts
        ] == ["length"]
        assert {e.fact for e in found if e.sample != 1} == {"trained"}
        step = store.runs.steps(run.id)[0]
        rest = [e.graded_reward for e in found if e.sample != 1 and e.step == 1]
        assert step["ungraded/even"] == 2 and step["reward"] == pytest.approx(sum(rest) / len(rest))
        alert = next(a for a in store.journal.alerts(run.id) if a["name"] == "ungraded")
    assert alert["value"] == 2 and "(even of 2)" in alert["text"]


async def test_another_part_that_is_none_is_left_out_with_its_weight() -> None:
    parts = (
        Reward("right", right, primary=True),
        Reward("style", lambda episode, ctx: None, weight=0.5),
    )
    rollout, jobs = rollout_of(*parts)
    (episode,) = await rollout.run(jobs[:1])
    assert (episode.outcome, episode.reward, len(episode.reward_parts)) == (Outcome.SOLVED, 1.0, 1)


# --- what would end the process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("words", ENDINGS)
async def test_a_grader_that_ends_the_process_masks_its_episode(words: str, later: bool) -> None:
    rollout, jobs = rollout_of(Reward("judge", ends(words, later=later)))
    found = await rollout.run(jobs)
    assert [e.outcome for e in found] == [Outcome.SOLVED, Outcome.ENV_ERROR, *[Outcome.SOLVED] * 4]
    assert f"The reward 'judge' raised {words}" in found[1].error and found[1].reward is None


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("words", ENDINGS)
async def test_a_tool_that_ends_the_process_masks_its_episode(words: str, later: bool) -> None:
    def act() -> str:
        """Act."""
        raise ENDINGS[words] or asyncio.CancelledError()

    async def acts() -> str:
        """Act."""
        await asyncio.sleep(0)
        return act()

    acts.__name__ = "act"
    rollout, jobs = rollout_of(tools=(acts if later else act,))
    (episode,) = await rollout.run(jobs[:1])
    assert episode.outcome is Outcome.ENV_ERROR and f"The tool act raised {words}" in episode.error


@pytest.mark.parametrize("words", ["SystemExit: 3", "KeyboardInterrupt", "Skipped: no"])
async def test_a_grader_s_task_that_ends_the_process_masks_its_episode(words: str) -> None:
    """asyncio lets SystemExit and KeyboardInterrupt of a task out of the event loop: the run ended without a word."""
    end = ends(words, later=True)
    forgotten: list[asyncio.Task[float]] = []

    async def grade(episode: Episode, ctx: Any) -> float:
        forgotten.append(asyncio.create_task(end(episode, ctx)))
        (value,) = await asyncio.gather(asyncio.create_task(end(episode, ctx)))
        return float(value)

    rollout, jobs = rollout_of(Reward("judge", grade))
    found = await rollout.run(jobs)
    assert [e.outcome for e in found] == [Outcome.SOLVED, Outcome.ENV_ERROR, *[Outcome.SOLVED] * 4]
    assert f"The reward 'judge' raised {words}" in found[1].error
    assert len(await asyncio.gather(*forgotten, return_exceptions=True)) == 6


def test_a_ctrl_c_of_the_user_is_not_the_code_s_own() -> None:
    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        for one in (signal.default_int_handler, handler):
            signal.signal(signal.SIGINT, one)
            with pytest.raises(KeyboardInterrupt), contain("The code"):
                signal.raise_signal(signal.SIGINT)
        with (
            pytest.raises(EnvError, match="The code raised KeyboardInterrupt"),
            contain("The code"),
        ):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


# --- what takes too long ---------------------------------------------------------------------------------------------


async def test_graders_that_sleep_hold_neither_the_others_nor_the_loop() -> None:
    all_wait, let = threading.Barrier(12), threading.Event()

    def slow(episode: Episode, ctx: Any) -> float:
        if all_wait.wait() == 0:
            loop.call_soon_threadsafe(let.set)
        let.wait()
        return 1.0

    loop = asyncio.get_running_loop()
    rollout, jobs = rollout_of(Reward("slow", slow))
    assert len(jobs) == 6
    assert {e.outcome for e in await rollout.run([*jobs, *jobs])} == {Outcome.SOLVED}


async def test_a_deadline_cuts_off_whatever_hangs() -> None:
    let = threading.Event()

    class Stuck(Hook):
        def on_rollout_end(self, rollout: Episode, task: Task) -> None:
            let.wait()

    class World(Env):
        def reset(self, task: Task) -> list[Message]:  # type: ignore[override]
            let.wait()
            return list(task.prompt)

        async def step(self, turn: Any) -> Step:
            return Step(terminated=True)

    try:
        by_reward, jobs = rollout_of(Reward("slow", lambda episode, ctx: let.wait(), timeout=0.2))
        (episode,) = await by_reward.run(jobs[:1])
        assert (
            episode.outcome is Outcome.ENV_ERROR
            and "'slow' took longer than 0.2 s" in episode.error
        )
        grader, _ = rollout_of(Reward("slow", lambda episode, ctx: let.wait()), episode_timeout=0.3)
        hook, _ = rollout_of(hooks=(Stuck(),), episode_timeout=0.3)
        world, _ = rollout_of(episode_timeout=0.3)
        world = in_world(world, World)
        for rollout in (grader, hook, world):
            (episode,) = await rollout.run(jobs[:1])
            assert episode.outcome is Outcome.TIMEOUT and episode.reward is None
        assert thread_metrics() == {"threads/abandoned": 4.0}
    finally:
        let.set()


async def test_an_exception_from_a_thread_frees_what_its_frames_hold() -> None:
    """At once, not at the next garbage collection: a socket that a tool was reading from, for instance."""

    class Held:
        pass

    def fails() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise ValueError("no")

    seen: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await in_thread(fails)
        assert await soon(lambda: seen[0]() is None)  # its thread is idle again
    finally:
        gc.enable()


async def test_a_world_of_plain_functions_runs_in_a_thread() -> None:
    seen: list[int] = []

    class World(Env):
        def reset(self, task: Task) -> list[Message]:  # type: ignore[override]
            seen.append(threading.get_ident())
            return list(task.prompt)

        def step(self, turn: Any) -> Step:  # type: ignore[override]
            seen.append(threading.get_ident())
            return Step(reward=1.0, terminated=True)

    rollout, jobs = rollout_of()
    rollout = in_world(rollout, World)
    (episode,) = await rollout.run(jobs[:1])
    assert (
        episode.outcome is Outcome.SOLVED and len(seen) == 2 and threading.get_ident() not in seen
    )
    assert RewardPart("env", 1.0, 0.0) in episode.reward_parts


async def test_a_grader_that_needs_the_main_thread_gets_it() -> None:
    """`signal.alarm` is how other projects' graders bound their time."""

    def alarmed(episode: Episode, ctx: Any) -> float:
        before = signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.signal(signal.SIGALRM, before)
        return 1.0

    (part,) = await score(
        Episode("e", "t"),
        [Reward("alarmed", alarmed)],
        RewardContext(Task("t", "p", "", "", ()), ""),
    )
    assert part.value == 1.0


# --- tools and commands ----------------------------------------------------------------------------------------------


async def test_an_object_without_a_text_form_is_an_error() -> None:
    class Plain:
        pass

    class Said:
        def __str__(self) -> str:
            return "said"

    def give() -> Any:
        """Give."""
        return values.pop(0)

    values: list[Any] = [Plain(), [Plain()], iter("ab"), Said(), {"n": Said()}]
    answers = [await as_tool(give).call(ToolContext(), {}) for _ in range(5)]
    for answer in answers[:3]:
        assert (
            answer.error == "exception"
            and "has no text form" in answer.text
            and "0x" not in answer.text
        )
    assert [answer.text for answer in answers[3:]] == ['"said"', '{"n": "said"}']


def test_a_rollout_and_an_eval_of_which_nothing_is_graded_fail(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    write_pack(
        tmp_path,
        code="def even(episode, ctx):\n    return None\n\n\nREWARDS = {'even': even, 'length': even}\n",
    )
    write_project(tmp_path, model, eval={"k": 1, "limit": 2})
    cli("rollout", "-n", "2", code=1, said="No episode could be graded (of 2)")
    cli("eval", code=1, said="No attempt could be graded (of 2)")
    with Store.open(tmp_path / "runs" / "agentrl.db", readonly=True) as store:
        assert {row.reward for row in store.episodes.rows(store.episodes.ids("", "time"))} == {None}
    (tmp_path / "data" / "train.jsonl").write_text("")
    cli("rollout", "-n", "2", code=2, said="No tasks in split train")


def test_a_script_s_stdout_is_its_own(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = {"group_size": 2, "prompts_per_step": 1, "max_new_tokens": 4}
    config = Config.model_validate(settings(model, rollout=short, train={"steps": 1}))
    pack = Pack.of("p", [{"prompt": "Go."}], [Reward("n", lambda e, ctx: float(e.sample))])
    agentrl_cli.train(config, packs=[pack], project=tmp_path)
    out, err = capfd.readouterr()
    assert out == "" and "step 1/1" in err


async def test_a_database_larger_than_its_memory_is_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "large.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE t AS SELECT 1 AS n, zeroblob(3000000) AS padding")
    before = path.stat().st_mtime_ns
    tool = SqlTool(str(path), memory_mb=1)
    state = await tool.create(ToolContext())
    assert (await tool.call(state, {"query": "SELECT n FROM t"})).text == "n\n1"
    for query in ("UPDATE t SET n = 2", "CREATE TEMP TABLE u (a)", "ATTACH ':memory:' AS x"):
        assert (await tool.call(state, {"query": query})).error == "refused"
    await tool.release(state)
    assert path.stat().st_mtime_ns == before and [item.name for item in tmp_path.iterdir()] == [
        "large.db"
    ]
    with pytest.raises(Exception, match="database or disk is full") as caught:
        await SqlTool(str(path), memory_mb=1, writable=True).create(ToolContext())
    assert "memory_mb" in str(getattr(caught.value, "hint", ""))


async def test_search_finds_chinese_japanese_and_korean(tmp_path: Path) -> None:
    texts = [
        "土星最大的卫星是土卫六。",
        "秘鲁的河流很多。",
        "東京は日本の首都です。",
        "서울은 한국의 수도이다.",
        "The moon Titan.",
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tool = SearchTool("c.jsonl").at(tmp_path)
    state = await tool.create(ToolContext())
    for query, number in (
        ("土星的卫星", 0),
        ("秘鲁有哪些河流", 1),
        ("日本の首都", 2),
        ("한국의 수도", 3),
        ("titan moon", 4),
    ):
        found = await tool.call(state, {"query": query, "top_k": 1})
        assert texts[number] in found.text, query
    assert "No passage" in (await tool.call(state, {"query": "zebra 飞机"})).text


def test_calls_are_matched_each_with_its_own_and_texts_are_not_lists() -> None:
    assert _match_calls([[0, 1], [0]]) == {0: 1, 1: 0} and _match_calls([[0], [0]]) == {0: 0}
    assert not _same(["N", "Y"], "NY") and not _same(["5"], "5") and _same([1, "a"], [1.0, "A"])
