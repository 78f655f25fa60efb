"""The child process of what-ifs: JSON lines on stdout, the model and its tools behind them.

    python -m agentrl_cli.servers.chat_session.whatif --db FILE --episode ID --rerun
    python -m agentrl_cli.servers.chat_session.whatif --db FILE --episode ID --turn 2 --samples 4 [--model RUN@best] …

Events: `ready`; for `--rerun` one `rerun` per recorded call and a `rewards`; for a re-roll one `child` per stored
episode, and one `diverged` per recorded call whose result differs when run again; then `done`. An error is one
`fatal`, and the exit status gives its kind. Only this protocol reaches stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from agentrl_cli.analysis.whatif import (
    ReplayResult,
    Rerun,
    advantages,
    chain_to,
    opened,
    rerun_calls,
    rescore,
    was_cut,
)
from agentrl_cli.chat.render import Chat
from agentrl_cli.envs.tool_env import Env
from agentrl_cli.errors import AgentRLError, UsageError
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.rollout import seed_of
from agentrl_cli.rollout.flags import flag_names
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.servers.chat_session.agents import rerun_agent, sample_agent
from agentrl_cli.servers.chat_session.open import (
    Past,
    check_tokenizer,
    make_env,
    open_past,
    open_policy,
    reachable,
)
from agentrl_cli.servers.chat_session.session import Session
from agentrl_cli.types import Episode, Outcome, RewardPart, new_id

PARALLEL = 16
"""Maximum number of concurrent samples."""


class Slot:
    """Runs samples in sequence: its environment is built once and rolled back to the turn between them."""

    env: Env | None = None
    world: ReplayResult | None = None
    """The result of replaying the episode's first turns here."""


class WhatIf:
    """One request: an episode, what to try with it, and a writer for events."""

    def __init__(self, given: argparse.Namespace, past: Past, out: TextIO) -> None:
        self.given = given
        self.past = past
        self.out = out
        self.diverged: set[tuple[int, int]] = set()
        """(turn, call) of divergent calls before a re-roll that were already reported."""

    def emit(self, event: dict[str, Any]) -> None:
        """Writes one event."""
        self.out.write(json.dumps(event, ensure_ascii=False, default=str) + "\n")
        self.out.flush()

    async def run(self) -> None:
        """Runs the calls again, or re-rolls."""
        past, agent = self.past, self.past.pack.agent is not None
        sandbox = await _sandbox(past)
        try:
            if not agent and (self.given.rerun or self.given.verify):
                self.emit({"ev": "ready", "model": "", "weights": "", "note": _warning(sandbox)})
                await self.rerun(sandbox)
                return
            await reachable(self.given.model, past.config)
            policy, chat = open_policy(
                self.given.model,
                past.config,
                past.db,
                base=past.base,
                script=self.given.script,
                past=past,
            )
            try:
                check_tokenizer(past, chat)
                if self.given.rerun or self.given.verify:
                    self.emit(
                        {"ev": "ready", "model": "", "weights": "", "note": _warning(sandbox)}
                    )
                    self.compare(*await rerun_agent(past, policy, chat, sandbox))
                    return
                model = self.given.model or past.config.model.name
                first = {
                    "model": model,
                    "weights": policy.weights_version,
                    "note": _warning(sandbox),
                }
                first["sampled_by"] = past.row.weights_version
                self.emit({"ev": "ready", **first})
                self.emit({"ev": "from", **child_object(past.episode)})
                await self.reroll(policy, chat, sandbox)
            finally:
                await policy.close()
        finally:
            if sandbox is not None:
                await sandbox.close()

    async def rerun(self, sandbox: Sandbox | None) -> None:
        """Runs every recorded call again; then computes the rewards and the advantage they would give."""
        past, episode = self.past, self.past.episode
        env = make_env(past.config, past.pack, past.task, sandbox, episode.seed)
        try:
            await opened(env, past.task)
            reruns, earned, _ = await rerun_calls(episode, env)
            parts: Sequence[RewardPart] = () if self.given.verify else await rescore(
                episode, past.pack.rewards, env, past.task, sandboxed=sandbox is not None,
                weights=past.config.rewards, earned=earned, decode=past.decode,
            )  # fmt: skip
        finally:
            await env.close()
        self.compare(reruns, parts)

    def compare(self, reruns: Sequence[Rerun], parts: Sequence[RewardPart]) -> None:
        """Writes what each call answered now, and the rewards and the advantage that this would give."""
        past, episode = self.past, self.past.episode
        for item in reruns:
            self.emit({"ev": "rerun", **rerun_object(item)})
        if self.given.verify:
            return
        total = sum(part.value * part.weight for part in parts)
        rewards = [total if row.id == episode.id else row.reward for row in past.siblings]
        graded = [value for value in rewards if value is not None]
        place = [
            row.id for row in past.siblings if row.reward is not None or row.id == episode.id
        ].index(episode.id)
        after = advantages(graded)[place] if len(graded) > 1 else None
        same = all(item.same for item in reruns)
        child = (
            self._keep_rescored(parts, after) if same and parts and total != episode.reward else ""
        )
        self.emit(
            {
                "ev": "rewards",
                "before": [_part(part) for part in episode.reward_parts],
                "after": [_part(part) for part in parts],
                "total_before": episode.reward,
                "total_after": total,
                "advantage_before": episode.advantage,
                "advantage_after": after,
                "same": same,
                "episode": child,
            }
        )

    def _keep_rescored(self, parts: Sequence[RewardPart], advantage: float | None) -> str:
        """Stores a child with the new rewards; only if no call diverged, since its tokens are the old ones."""
        episode = self.past.episode
        over = episode.outcome not in (Outcome.TRUNCATED_TURNS, Outcome.TRUNCATED_TOKENS)
        outcome = _outcome(episode, parts, over=over)
        child = episode.with_(
            id=new_id(), kind="whatif", parent_id=episode.id, parent_turn=len(episode.turns), reward_parts=tuple(parts),
            group_id=f"whatif-{new_id()}", sample=0, fact="", advantage=advantage, outcome=outcome,
            started=time.time(), ended=time.time(),
        )  # fmt: skip
        self.past.keep([child])
        return child.id

    async def reroll(self, policy: Policy, chat: Chat, sandbox: Sandbox | None) -> None:
        """Samples `samples` episodes from the turn on, at most PARALLEL at once; stores them with their advantages."""
        number, group = max(self.given.samples, 1), f"whatif-{new_id()}"
        slots: asyncio.Queue[Slot] = asyncio.Queue()
        for _ in range(min(number, PARALLEL)):
            slots.put_nowait(Slot())

        async def one(sample: int) -> Episode:
            slot = await slots.get()
            try:
                if self.past.pack.agent is not None:
                    episode = await sample_agent(
                        self.past, self.given, policy, chat, sandbox, group, sample
                    )
                else:
                    episode = await self.sample(policy, chat, sandbox, group, sample, slot)
            finally:
                slots.put_nowait(slot)
            self.emit({"ev": "progress", "sample": sample, "reward": episode.reward})
            return episode

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(n)) for n in range(number)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[
                0
            ] from errors  # the first is the cause; the others follow from it
        finally:
            while not slots.empty():
                if (env := slots.get_nowait().env) is not None:
                    await env.close()
        children = [task.result() for task in running]
        graded = [child for child in children if child.graded]
        values = dict(
            zip([c.id for c in graded], advantages([c.graded_reward for c in graded]), strict=True)
        )
        children = [replace(child, advantage=values.get(child.id)) for child in children]
        self.past.keep(children)
        for child in children:
            self.emit({"ev": "child", **child_object(child)})

    async def sample(
        self,
        policy: Policy,
        chat: Chat,
        sandbox: Sandbox | None,
        group: str,
        sample: int,
        slot: Slot,
    ) -> Episode:
        """Samples and grades one episode from the turn on."""
        given, past = self.given, self.past
        limits = past.config.rollout
        seed = seed_of(given.seed, "whatif", sample)
        env = slot.env or make_env(
            past.config, past.pack, past.task, sandbox, past.episode.seed, keep=limits.max_turns
        )
        slot.env = env
        temperature = limits.temperature if given.temperature is None else given.temperature
        chain, at, places = chain_to(past.episode, given.turn)
        said = sum(turn.role == "assistant" and turn.index < at for turn in chain.turns)
        session = Session(
            policy, chat, env, lambda event: None, past.task, past.pack.rewards, past.config.rewards,
            kind="whatif", sample=sample,
            sampling=limits.sampling(temperature=temperature, seed=seed),
            max_turns=max(limits.max_turns - said, 1), most=limits.max_tokens, sandboxed=sandbox is not None,
            group_id=group, folder=past.pack.dir,
        )  # fmt: skip
        try:
            slot.world = await session.resume(past.episode, given.turn, there=slot.world)
            for item in slot.world.reruns:
                if not item.same and (item.turn, item.call) not in self.diverged:
                    self.diverged.add((item.turn, item.call))
                    self.emit(
                        {"ev": "diverged", **rerun_object(replace(item, turn=places[item.turn]))}
                    )
            try:
                await (session.as_model(given.edit) if given.edit is not None else session.reply())
            except UsageError:
                if len(session.turns) <= at:  # there was no room at all
                    raise
            episode = session.episode()
            parts = await rescore(
                episode, past.pack.rewards, env, past.task, sandboxed=sandbox is not None,
                weights=past.config.rewards, earned=session.earned, decode=past.decode,
            )  # fmt: skip
            if await env.back(said):  # cannot roll back: the next sample gets a new environment
                slot.env = slot.world = None
        except BaseException:
            slot.env = slot.world = None
            raise
        finally:
            await policy.release(session.id)
            if slot.env is None:
                await env.close()
        outcome = _outcome(episode, parts, over=session.over)
        ended = episode.with_(reward_parts=parts, outcome=outcome, ended=time.time())
        return ended.with_(flags=flag_names(ended, []))


def _outcome(episode: Episode, parts: Sequence[RewardPart], *, over: bool) -> Outcome:
    """Return the outcome: solved, failed, or the limit that cut it off. `over`: the environment ended it."""
    primary = next((part.value for part in parts if part.primary), None)
    if primary is not None and primary >= 1.0:
        return Outcome.SOLVED
    said = [turn for turn in episode.turns if turn.role == "assistant"]
    if said and was_cut(said[-1].stop_reason):
        return Outcome.TRUNCATED_TOKENS
    if episode.turns[-1].role != "assistant" and not over:
        return Outcome.TRUNCATED_TURNS
    return Outcome.FAILED


def rerun_object(item: Rerun) -> dict[str, Any]:
    """Return a call that was run again, as JSON."""
    return {
        "call": item.call,
        "turn": item.turn,
        "name": item.name,
        "arguments": item.arguments,
        "before": None if item.before is None else item.before.text,
        "after": item.after.text,
        "error_before": None if item.before is None else item.before.error,
        "error_after": item.after.error,
        "same": item.same,
        "diverged": item.diverged,
        "diff": item.diff(),
        "seconds": item.after.seconds,
    }


def child_object(child: Episode) -> dict[str, Any]:
    """Return a stored child, as JSON."""
    return {
        "episode": child.id,
        "sample": child.sample,
        "seed": child.seed,
        "outcome": str(child.outcome),
        "reward": child.reward,
        "advantage": child.advantage,
        "turns": len(child.turns),
        "tokens": child.trained_tokens,
        "flags": list(child.flags),
        "text": str(child.turns[-1].messages[-1].get("content") or "")
        if child.turns[-1].messages
        else "",
    }


def _part(part: RewardPart) -> dict[str, Any]:
    return {
        "name": part.name,
        "value": part.value,
        "weight": part.weight,
        "primary": part.primary,
        "detail": part.detail,
        "fakeable": part.fakeable,
    }


async def _sandbox(past: Past) -> Sandbox | None:
    from agentrl_cli.sandbox import Sandbox

    return await Sandbox.open(past.config.sandbox) if past.pack.sandbox else None


def _warning(sandbox: Sandbox | None) -> str:
    return sandbox.warning if sandbox is not None else ""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the child's own arguments; users run `agentrl replay EP --whatif ASKED`."""
    parser = argparse.ArgumentParser(
        prog="agentrl_cli.servers.chat_session.whatif", description=__doc__
    )
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--episode", required=True)
    parser.add_argument("--rerun", action="store_true")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="with --rerun: only the calls; scores and stores nothing",
    )
    parser.add_argument("--turn", type=int, default=0)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--model")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--edit")
    parser.add_argument("--project", type=Path)
    parser.add_argument(
        "--script", type=Path, help="replies of the scripted model, a JSON list of texts"
    )
    given = list(argv)
    if "--edit" in given[:-1]:  # its text may begin with a minus
        at = given.index("--edit")
        given[at : at + 2] = [f"--edit={given[at + 1]}"]
    return parser.parse_args(given)


async def run(argv: Sequence[str], out: TextIO) -> int:
    """Runs the child. Returns the exit status."""

    def tell(event: dict[str, Any]) -> None:
        out.write(json.dumps(event, ensure_ascii=False, default=str) + "\n")
        out.flush()

    given = parse_arguments(argv)
    try:
        await WhatIf(given, open_past(given), out).run()
    except AgentRLError as error:
        tell({"ev": "fatal", "message": error.message, "hint": error.hint, "code": error.exit_code})
        return error.exit_code
    tell({"ev": "done"})
    return 0


def main() -> int:
    """Entry point: keeps stdout for the protocol."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return asyncio.run(run(sys.argv[1:], out))


if __name__ == "__main__":
    sys.exit(main())
