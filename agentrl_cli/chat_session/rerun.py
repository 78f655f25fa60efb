"""Run a stored episode's tool calls again, compare and grade them, and continue from its first turns.

The effects of a call are compared, too: files of the sandbox session and tables of a database, before and after.
"""

from __future__ import annotations

import difflib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from agentrl_cli.envs.tool_env import AssistantTurn, Env, Step, ToolEnv, as_env_error
from agentrl_cli.errors import UsageError
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.learning.advantages import episode_advantage, grpo
from agentrl_cli.learning.estimator_inputs import AdvantageInput
from agentrl_cli.rollout.loop import LoopAttempt
from agentrl_cli.rollout.world import run_reset, run_step
from agentrl_cli.types import (
    Episode,
    Message,
    StopReason,
    Task,
    Tokens,
    ToolResult,
    Turn,
    group_pairs,
)

CUT_MARK = "[… "
"""Start of the mark in a truncated observation (rollout.cut_text)."""
MOST = 200
"""Files that are looked at, and rows of a table."""
LARGEST = 1 << 16
"""Bytes of a file that is read; of a larger one only its size is compared."""
SHOWN = 20
"""Lines of a difference that are kept."""
BY_PERSON = "by_person"
"""The metric of a result that a person gave in a tool's place: its call was not run, and is not run again."""

World = Mapping[str, list[str]]
"""Files and tables by name, as lines."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """One recorded call, or one turn sent to the simulated user, and its answer now."""

    call: int
    """Its number in the episode, from 1; 0 for a turn sent to the simulated user (`name` is `user`)."""
    turn: int
    """The assistant turn that made it."""
    name: str
    arguments: Mapping[str, Any] | None
    before: ToolResult | None
    """None if the episode ended before an answer was stored."""
    after: ToolResult
    changed: tuple[str, ...] = ()
    """Files and tables that the calls of its turn changed, as lines; with the last call of the turn."""

    @property
    def same(self) -> bool:
        """Whether the answer is the recorded one, as far as that was stored."""
        return self.before is not None and same_answer(self.before, self.after)

    @property
    def diverged(self) -> str:
        """`diverged at call n (name, turn)`; empty if the answer is the recorded one."""
        place = (
            f"call {self.call} ({self.name}, turn {self.turn})"
            if self.call
            else f"turn {self.turn} (the user)"
        )
        return "" if self.same else f"diverged at {place}"

    def diff(self) -> list[str]:
        """Return the lines of a unified diff of the two texts, without headers; empty if they are equal."""
        if self.before is None or self.same:
            return []
        return diff_lines(self.before.text.splitlines(), self.after.text.splitlines(), 1)


def diff_lines(before: Sequence[str], after: Sequence[str], around: int) -> list[str]:
    """Return the lines of a unified diff without headers, with so many equal ones around them."""
    lines = list(difflib.unified_diff(before, after, lineterm="", n=around))
    return [line for line in lines[2:] if not line.startswith("@@")]


def same_answer(before: ToolResult, after: ToolResult) -> bool:
    """Whether two answers agree in class of failure and text; for a truncated one, in the text that is left."""
    if before.error != after.error:
        return False
    if not before.truncated or CUT_MARK not in before.text:
        return before.text == after.text and before.images == after.images
    head, _, rest = before.text.partition(CUT_MARK)
    tail = rest.partition("]")[2]
    return after.text.startswith(head) and after.text.endswith(tail)


class ReplayResult(NamedTuple):
    """The result of running an episode's turns again."""

    reruns: list[Rerun]
    earned: float | None
    """Sum of the environment's step rewards; None without any."""


async def rerun_calls(
    episode: Episode, env: Env, until: int | None = None, *, changes: bool = False
) -> ReplayResult:
    """Run the assistant turns before turn `until` (None: all) again, in order, in an env that was reset.

    Of an episode that branches those of all branches, as they were made; see `chain_to` for those of one. Calls that a
    person refused or answered in a chat are not run: their results stay as they are.

    Tool calls are run; a turn without one is sent to the simulated user or environment. Afterwards the environment is
    in the state that the conversation left. `changes`: with the files and tables that the calls of each turn change.
    Raises EnvError.
    """
    out: list[Rerun] = []
    earned: float | None = None
    said = calls = 0
    parents = episode.parents
    for place, turn in enumerate(episode.turns):
        if turn.role != "assistant" or (until is not None and turn.index >= until):
            continue
        answers = next(
            (episode.turns[n] for n, parent in enumerate(parents) if parent == place), None
        )
        # A turn that was cut off got no answer, and its calls were not run; nor were those that a chat left open.
        whole = turn.stop_reason in (None, StopReason.STOP, StopReason.STOP_STRING)
        whole = whole and (answers is not None or not turn.calls or episode.kind != "chat")
        if whole and (turn.calls or env.talks):
            before = await read_world(env) if changes and turn.calls else {}
            text = str(turn.messages[0].get("content") or "") if turn.messages else ""
            step = await _run_others(env, AssistantTurn(text, turn.calls, said), answers)
            earned = earned if step.reward is None else (earned or 0.0) + step.reward
            out += _again(turn, step, answers, calls)
            if changes and turn.calls and out:
                effects = compare_worlds(before, await read_world(env))
                out[-1] = replace(out[-1], changed=tuple(effects))
            calls += len(turn.calls)
        said += 1
    return ReplayResult(out, earned)


async def open_world(env: Env, task: Task) -> list[Message]:
    """Reset an environment. Returns its first messages. Exceptions of the task's code become EnvError."""
    try:
        return await run_reset(env, task)
    except Exception as error:
        raise as_env_error(error) from error


async def step_of(env: Env, turn: AssistantTurn) -> Step:
    """Return the environment's step after a turn. Exceptions of the task's code become EnvError."""
    try:
        return await run_step(env, turn)
    except Exception as error:
        raise as_env_error(error) from error


async def _run_others(env: Env, turn: AssistantTurn, answers: Turn | None) -> Step:
    """Return the step after a turn, in which results that a person gave are in the place of their calls."""
    kept = answers.results if answers is not None else ()
    known = [*kept, *[None] * (len(turn.calls) - len(kept))]
    given = [one if one is not None and BY_PERSON in one.metrics else None for one in known]
    run = tuple(call for call, one in zip(turn.calls, given, strict=False) if one is None)
    if answers is not None and turn.calls and not run:
        env.heard(turn, answers.messages)
        return Step(results=kept)
    step = await step_of(env, replace(turn, calls=run))
    return replace(step, results=place_results(given, results_of(step))) if run else step


def place_results(
    given: Sequence[ToolResult | None], ran: Sequence[ToolResult]
) -> tuple[ToolResult, ...]:
    """Return the results of a turn's calls: those that a person gave, and for each None the next that ran."""
    left = iter(ran)
    return tuple(next(left, ToolResult("")) if one is None else one for one in given)


def results_of(step: Step) -> tuple[ToolResult, ...]:
    """Return a step's tool results, made from its messages if it has only those."""
    texts = [
        str(message.get("content") or "") for message in step.messages if message["role"] == "tool"
    ]
    return step.results or tuple(ToolResult(text) for text in texts)


def _again(turn: Turn, step: Step, answers: Turn | None, calls: int) -> list[Rerun]:
    """Return the reruns of a turn's calls, or of its text to the simulated user; `calls`: those before it."""
    before: Sequence[ToolResult] = ()
    if answers is not None and answers.role == ("tool" if turn.calls else "user"):
        texts = [str(message.get("content") or "") for message in answers.messages]
        before = answers.results or [ToolResult(text) for text in texts]
    if turn.calls:
        known = [*before, *[None] * len(turn.calls)]
        return [
            Rerun(calls + n + 1, turn.index, call.name, call.arguments, known[n], result)
            for n, (call, result) in enumerate(zip(turn.calls, results_of(step), strict=False))
        ]
    now = [
        str(message.get("content") or "") for message in step.messages if message["role"] == "user"
    ]
    after = ToolResult("\n".join(now), error=None if now else "silent")
    said = next(iter(before), None)
    return [Rerun(0, turn.index, "user", None, said, after)] if now or said else []


async def read_world(env: Env) -> World:
    """Return the files and tables that an environment holds now; none of one that keeps its state elsewhere."""
    found: dict[str, list[str]] = {}
    if not isinstance(env, ToolEnv):
        return found
    if env.context.session_factory is not None:
        session = await env.context.session()
        for entry in [one for one in await session.list() if one.kind == "file"][:MOST]:
            if entry.size > LARGEST:
                found[entry.path] = [f"{entry.size:,} bytes"]
            else:
                text = (await session.read(entry.path)).decode("utf-8", "replace")
                found[entry.path] = text.splitlines()
    for value in env.context.state.values():
        if isinstance(value, sqlite3.Connection):
            found |= await in_thread(read_tables, value)
    return found


def read_tables(connection: sqlite3.Connection) -> World:
    """Return the first rows of every table."""
    names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    found: dict[str, list[str]] = {}
    for (name,) in connection.execute(names).fetchall():
        quoted = '"' + name.replace('"', '""') + '"'
        with closing(connection.execute(f"SELECT * FROM {quoted} LIMIT {MOST}")) as rows:
            found[f"table {name}"] = [" | ".join(map(str, row)) for row in rows]
    return found


def compare_worlds(before: World, after: World) -> Iterator[str]:
    """Yield `new NAME`, `deleted NAME` or `changed NAME`, each with the lines that differ."""
    for name in sorted({**before, **after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        yield f"{'new' if old is None else 'deleted' if new is None else 'changed'} {name}"
        kept = diff_lines(old or [], new or [], 0)
        yield from kept[:SHOWN]
        if len(kept) > SHOWN:
            yield f"… {len(kept) - SHOWN} more lines differ"


def mark_diverged(turns: Sequence[Turn], reruns: Sequence[Rerun]) -> list[Turn]:
    """Return the turns, marked if their answers differ in the rerun.

    The mark is `metrics["diverged"]` on the result of a call, `diverged` on a message of a user or environment, or on
    a turn that got no answer. The text stays the recorded one, which the tokens spell; the flag DIVERGED reads the
    marks.
    """
    changed = group_pairs((item.turn, not item.same) for item in reruns)
    out: list[Turn] = []
    for place, turn in enumerate(turns):
        before = turns[place - 1] if place else None
        after = turns[place + 1] if place + 1 < len(turns) else None
        asked = changed.get(before.index, []) if before and before.role == "assistant" else []
        heard = [] if turn.results else asked
        if turn.role == "assistant":
            alone = after is None or after.role == "assistant"
            heard = changed.get(turn.index, []) if alone else []
        results = []
        for n, result in enumerate(turn.results):
            metrics = {k: v for k, v in result.metrics.items() if k != "diverged"}
            if n < len(asked) and asked[n]:
                metrics["diverged"] = 1.0
            results.append(replace(result, metrics=metrics))
        out.append(replace(turn, results=tuple(results), diverged=any(heard)))
    return out


async def resume(attempt: LoopAttempt, chain: Episode, turn: int) -> ReplayResult:
    """Put an attempt after the turns of a stored chain before turn `turn`, and its world into their state.

    Token ids are the stored ones; results whose calls answer otherwise now are marked. Raises UsageError if it is not
    the model's turn there.
    """
    turns, parts = turns_before(chain, turn)
    await open_world(attempt.env, attempt.job.task)
    world = await rerun_calls(chain, attempt.env, until=turn)
    attempt.transcript.restore(mark_diverged(turns, world.reruns), parts)
    attempt.transcript.guard.tools = attempt.env.schemas
    return world


def chain_to(episode: Episode, turn: int) -> tuple[Episode, int, tuple[int, ...]]:
    """Return the branch on which a turn lies as an episode, the turn's index there, and the index of each of its turns
    here.

    Of an episode with one branch itself. A turn on several branches is taken on the first; the turn after the last is
    the next of its branch.
    """
    if episode.linear or not 0 <= turn <= len(episode.turns):
        return episode, turn, tuple(range(len(episode.turns)))
    branch = next((one for one in episode.sequences if turn in one.turns), episode.sequences[-1])
    return episode.chain(branch), (*branch.turns, turn).index(turn), branch.turns


def turns_before(episode: Episode, turn: int) -> tuple[list[Turn], list[Tokens]]:
    """Return the turns before turn `turn` of a chain with their tokens: ids, origins and numbers as stored.

    Raises UsageError if the turn is out of range, or not the model's.
    """
    kept = [item for item in episode.turns if item.index < turn]
    if not kept or turn > len(episode.turns):
        last = max(len(episode.turns) - 1, 1)
        raise UsageError(
            f"Cannot continue from turn {turn}.", hint=f"Choose a turn from 1 to {last}."
        )
    if turn < len(episode.turns) and episode.turns[turn].role != "assistant":
        places = ", ".join(str(item.index) for item in episode.turns if item.role == "assistant")
        raise UsageError(
            f"Turn {turn} is not the model's.", hint=f"The model's turns: {places or 'none'}."
        )
    return kept, [episode.tokens.slice(item.start, item.end) for item in kept]


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return the GRPO advantages of one group's rewards; zeros if all are equal."""
    n = len(rewards)
    x = AdvantageInput(np.asarray(rewards, np.float64), np.zeros(n, np.int64), np.ones(n, np.int64))
    return [float(value) for value in episode_advantage(grpo(x))]
