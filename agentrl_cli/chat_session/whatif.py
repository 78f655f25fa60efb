"""The child process of what-ifs: JSON lines on stdout, the model and its tools behind them.

    python -m agentrl_cli.chat_session.whatif --db FILE --episode ID --rerun
    python -m agentrl_cli.chat_session.whatif --db FILE --episode ID --turn 2 --samples 4 [--model RUN@best] …

Events: `ready`; for `--rerun` one `rerun` per recorded call and a `rewards`; for a re-roll one `child` per stored
episode, and one `diverged` per recorded call whose result differs when run again; then `done`. An error is one
`fatal`, and the exit status gives its kind. Only this protocol reaches stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TextIO

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat_session.agents import rerun_agent, sample_agent
from agentrl_cli.chat_session.child import (
    PART,
    SHARED,
    fatal,
    fields_of,
    parse,
    protocol_stdout,
    write_event,
)
from agentrl_cli.chat_session.open import (
    Past,
    check_tokenizer,
    open_past,
    open_policy,
    reachable,
)
from agentrl_cli.chat_session.rerun import (
    ReplayResult,
    Rerun,
    advantages,
    chain_to,
    open_world,
    rerun_calls,
    resume,
    turns_before,
)
from agentrl_cli.envs.tool_env import as_env_error
from agentrl_cli.errors import AgentRLError, EnvError
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.rewards import score
from agentrl_cli.rollout import Job, Rollout, seed_of
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.loop import LoopAttempt
from agentrl_cli.rollout.world import make_env, reward_context, weigh, world_parts
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.types import AgentState, Episode, Outcome, RewardPart, new_id


class Continued(LoopAttempt):
    """An attempt that begins with the turns of a stored episode before turn `turn`, or with a person's text there."""

    world: ReplayResult | None = None
    """The answers of the recorded calls this time."""

    def __init__(
        self, context: RolloutContext, past: Past, job: Job, turn: int, edit: str | None
    ) -> None:
        super().__init__(context, past.pack, job)
        self.chain, self.at, self.places = chain_to(past.episode, turn)
        self.past, self.edit = past, edit
        said = [turn for turn in self.chain.turns[: self.at] if turn.stop_reason is not None]
        self.max_turns = max(self.max_turns, len(said) + 1 + (edit is not None))
        self.prompt = said[0].start if said else self.chain.turns[self.at - 1].end

    async def begin(self) -> AgentState:
        # the environment must begin as it did then; only the sampling has a seed of its own
        job = replace(self.job, seed=self.past.episode.seed)
        self.env = await self.context.make_env(self.pack, job)
        self.world = await resume(self, self.chain, self.at)
        self.limit_response(self.prompt)
        return AgentState.GENERATING if self.edit is None else self.write(self.edit)

    def turn_seed(self, done: int) -> int:
        """Return the seed of a turn, as a chat's."""
        return seed_of(self.job.seed, done, 0)


class Reroll(Rollout):
    """A rollout whose episodes begin with the turns of a stored one, its agent's or the built-in loop's."""

    def __init__(
        self, request: WhatIf, policy: Policy, chat: Chat, sandbox: Sandbox | None
    ) -> None:
        self.request, self.past = request, request.past
        packs = {self.past.pack.name: self.past.pack}
        more = request.given.temperature
        super().__init__(policy, chat, packs, self.past.config, sandbox=sandbox, temperature=more)

    async def episode(self, job: Job) -> Episode:
        """Sample and grade one episode from the turn on."""
        past, given = self.past, self.request.given
        if past.pack.agent is not None:
            return await sample_agent(past, given, self.context, job)
        attempt = Continued(self.context, past, job, given.turn, given.edit)
        episode = (await attempt.run()).episode
        for item in attempt.world.reruns if attempt.world is not None else ():
            self.request.diverge(replace(item, turn=attempt.places[item.turn]))
        return episode.with_(parent_id=past.episode.id, parent_turn=given.turn)


class WhatIf:
    """One request: an episode, the change to try on it, and a writer for events."""

    def __init__(self, given: argparse.Namespace, past: Past, out: TextIO) -> None:
        self.given = given
        self.past = past
        self.out = out
        self.diverged: set[tuple[int, int]] = set()
        """(turn, call) of divergent calls before a re-roll that were already reported."""

    def emit(self, ev: str, **fields: Any) -> None:
        """Write one event."""
        write_event(self.out, {"ev": ev, **fields})

    async def run(self) -> None:
        """Run the calls again, or re-roll."""
        past, given = self.past, self.given
        again, agent = given.rerun or given.verify, past.pack.agent is not None
        async with contextlib.AsyncExitStack() as stack:
            sandbox, note, policy = None, "", None
            if past.pack.sandbox:
                sandbox = await stack.enter_async_context(await Sandbox.open(past.config.sandbox))
                note = sandbox.warning
            if agent or not again:
                await reachable(given.model, past.config)
                policy, chat = open_policy(
                    given.model,
                    past.config,
                    past.db,
                    base=past.base,
                    script=given.script,
                    past=past,
                )
                stack.push_async_callback(policy.close)
                check_tokenizer(past, chat)
            if again:
                self.emit("ready", model="", weights="", note=note)
                if policy is not None:
                    self.compare(*await rerun_agent(past, policy, chat, sandbox))
                    return
                try:
                    await self.rerun(sandbox)
                except Exception as error:  # from the code of the task
                    raise as_env_error(error) from error
                return
            assert policy is not None
            model, weights = given.model or past.config.model.name, policy.weights_version
            sampled = past.row.weights_version
            self.emit("ready", model=model, weights=weights, note=note, sampled_by=sampled)
            self.emit("from", **child_object(past.episode))
            await self.reroll(policy, chat, sandbox)

    async def rerun(self, sandbox: Sandbox | None) -> None:
        """Run every recorded call again; then compute the rewards and the advantage they would give."""
        past, episode, parts = self.past, self.past.episode, tuple[RewardPart, ...]()
        env = await make_env(past.config.rollout, past.pack, Job(past.task, episode.seed), sandbox)
        try:
            await open_world(env, past.task)
            reruns, earned = await rerun_calls(episode, env, changes=True)
            if not self.given.verify:
                context = reward_context(
                    episode, past.task, env, sandboxed=sandbox is not None, decode=past.decode
                )
                found = await score(episode, past.pack.rewards, context)
                found += tuple(await world_parts(env, earned))
                parts = weigh(found, past.config.rewards)
        finally:
            await env.close()
        self.compare(reruns, parts)

    def compare(self, reruns: Sequence[Rerun], parts: Sequence[RewardPart]) -> None:
        """Write each call's answer now, and the rewards and the advantage that this would give."""
        episode = self.past.episode
        for item in reruns:
            self.emit("rerun", **rerun_object(item))
        if self.given.verify:
            return
        graded = any(part.primary for part in parts)
        if graded:
            parts = [*parts, *self._of_hooks({part.name for part in parts})]
        total = sum(part.value * part.weight for part in parts) if graded else None
        siblings = [row for row in self.past.siblings if row.id != episode.id]
        others = [row.reward for row in siblings if row.reward is not None]

        def advantage(own: float | None) -> float | None:
            # alone in its group it would be 0 at any reward
            return advantages([own, *others])[0] if others and own is not None else None

        after = advantage(total)
        same, child = all(item.same for item in reruns), ""
        if same and graded and total != episode.reward:
            child = self._keep_rescored(tuple(parts), after)
        self.emit(
            "rewards",
            before=[
                fields_of(part, (*PART, "primary", "fakeable")) for part in episode.reward_parts
            ],
            after=[fields_of(part, (*PART, "primary", "fakeable")) for part in parts],
            total_before=episode.reward,
            total_after=total,
            # by the same estimator, whatever the run's was
            advantage_before=advantage(episode.reward),
            advantage_after=after,
            same=same,
            episode=child,
        )

    def _of_hooks(self, again: Collection[str]) -> Iterator[RewardPart]:
        """Yield the stored parts of hooks and of the length: only a training computes them, by the same tokens."""
        own = {"env", "interaction", *again, *(reward.name for reward in self.past.pack.rewards)}
        for part in self.past.episode.reward_parts:
            if not (part.primary or part.name in own or part.name.startswith("tool:")):
                yield part

    def _keep_rescored(self, parts: tuple[RewardPart, ...], advantage: float | None) -> str:
        """Store a child with the new rewards; only if no call diverged, since its tokens are the old ones."""
        episode, now = self.past.episode, time.time()
        outcome = Outcome.FAILED
        if episode.outcome in (Outcome.TRUNCATED_TURNS, Outcome.TRUNCATED_TOKENS):
            outcome = episode.outcome
        if next(part.value for part in parts if part.primary) >= 1.0:
            outcome = Outcome.SOLVED
        child = episode.with_(
            id=new_id(), kind="whatif", parent_id=episode.id, parent_turn=len(episode.turns),
            reward_parts=parts, group_id=f"whatif-{new_id()}", sample=0, fact="",
            advantage=advantage, outcome=outcome, started=now, ended=now,
        )  # fmt: skip
        self.past.keep([child])
        return child.id

    async def reroll(self, policy: Policy, chat: Chat, sandbox: Sandbox | None) -> None:
        """Sample `samples` episodes from the turn on, and store them with their advantages.

        Raises EnvError if every one of them is an error.
        """
        past, given, old = self.past, self.given, self.past.episode
        turns_before(*chain_to(old, given.turn)[:2])  # raises for a wrong turn, before any sampling
        group = f"whatif-{new_id()}"
        jobs = [
            Job(
                past.task,
                seed_of(given.seed, "whatif", n),
                n,
                group,
                old.step,
                old.run_id,
                "whatif",
            )
            for n in range(max(given.samples, 1))
        ]

        children = await Reroll(self, policy, chat, sandbox).run(
            jobs, lambda done: self.emit("progress", sample=done.sample, reward=done.reward)
        )
        if all(child.outcome is not None and child.outcome.is_error for child in children):
            raise EnvError(children[0].error)
        graded = [child for child in children if child.graded]
        found = advantages([child.graded_reward for child in graded])
        values = {child.id: value for child, value in zip(graded, found, strict=True)}
        children = [replace(child, advantage=values.get(child.id)) for child in children]
        past.keep(children)
        for child in children:
            self.emit("child", **child_object(child))

    def diverge(self, item: Rerun) -> None:
        """Report once that a recorded call answers otherwise now."""
        if not item.same and (item.turn, item.call) not in self.diverged:
            self.diverged.add((item.turn, item.call))
            self.emit("diverged", **rerun_object(item))


def rerun_object(item: Rerun) -> dict[str, Any]:
    """Return a call that was run again, as JSON."""
    before = item.before
    changed = {"changed": item.changed} if item.changed else {}
    return (
        fields_of(item, ("call", "turn", "name", "arguments", "same", "diverged"))
        | changed
        | {
            "before": None if before is None else before.text,
            "after": item.after.text,
            "error_before": None if before is None else before.error,
            "error_after": item.after.error,
            "diff": item.diff(),
            "seconds": item.after.seconds,
        }
    )


def child_object(child: Episode) -> dict[str, Any]:
    """Return a stored child, as JSON; one that ended before its first turn has no text."""
    last = child.turns[-1].messages[-1:] if child.turns else ()
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
        "text": "".join(str(message.get("content") or "") for message in last),
    }


ARGUMENTS = SHARED | {
    "--episode": {"required": True},
    "--rerun": {"action": "store_true"},
    "--verify": {"action": "store_true", "help": "only the calls; scores and stores nothing"},
    "--samples": {"type": int, "default": 1},
    "--edit": {},
}


async def run(argv: Sequence[str], out: TextIO) -> int:
    """Run the child. Returns the exit status."""
    given = parse("whatif", ARGUMENTS, argv)
    try:
        await WhatIf(given, open_past(given), out).run()
    except AgentRLError as error:
        return fatal(out, error)
    write_event(out, {"ev": "done"})
    return 0


def main() -> int:
    """Run the child on this process's stdout."""
    return asyncio.run(run(sys.argv[1:], protocol_stdout()))


if __name__ == "__main__":
    sys.exit(main())
