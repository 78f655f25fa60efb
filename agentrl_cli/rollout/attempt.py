"""One episode: the state machine, what is appended at each turn, its end and its score.

Sampled ids are appended as they are and never encoded again; what the environment answers is appended as the chat
template's delta. An infrastructure error (sandbox, grader, hook) ends the episode as an error that is never scored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from agentrl_cli.chat.images import pictured
from agentrl_cli.chat.parse import foreign_parser
from agentrl_cli.chat.tool_choice import forced_text
from agentrl_cli.chat.truncate import fit_results
from agentrl_cli.envs.tool_env import AssistantTurn, Env, Step, fault_of
from agentrl_cli.errors import BadAnswer, EnvError, PolicyError, StoreError
from agentrl_cli.policies.protocols import MessagePolicy
from agentrl_cli.rewards import RewardContext, finite, score
from agentrl_cli.rollout.context import Attempted, RolloutContext
from agentrl_cli.rollout.job import Job, seed_of
from agentrl_cli.rollout.transcript import Transcript
from agentrl_cli.rollout.world import run_reset, run_step
from agentrl_cli.tasks import Pack
from agentrl_cli.threads import contained
from agentrl_cli.types import (
    AgentState,
    Episode,
    Generation,
    Message,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Tokens,
    new_id,
)

MIN_ROOM = 8
"""An assistant turn with less room than this many tokens is not begun."""
CLOSING = 30.0
"""Seconds that freeing an episode's tools and session may take."""
UNGRADABLE = (Outcome.TOO_LONG, *(outcome for outcome in Outcome if outcome.is_error))
"""Outcomes that explain by themselves why nothing was graded."""


class Attempt:
    """One episode being made: by the built-in loop, unless a subclass overrides `play`."""

    def __init__(self, context: RolloutContext, pack: Pack, job: Job) -> None:
        self.context = context
        self.pack = pack
        self.job = job
        self.limits = context.config.rollout
        self.most = min(self.limits.max_tokens, context.policy.context_length)
        """Tokens that the episode may have."""
        self.timeout = self.limits.episode_timeout
        """Seconds that it may take, grading included."""
        self.env = Env()
        self.cut: Outcome | None = None
        """The limit that ended the episode, if one did."""
        self.reason = ""
        """Why it did, for people."""
        self.earned: float | None = None
        """Rewards of the environment's steps."""
        self.parsed = AssistantTurn("")
        self.foreign = ""
        episode = new_episode(job, context.policy.weights_version)
        self.transcript = Transcript(episode, context.chat, context.store)

    # --- the life of an episode --------------------------------------------------------------------------------------

    async def run(self) -> Attempted:
        """Make the episode and store it.

        Raises PolicyError if the model fails and CancelledError if the run is stopped; the episode is stored as
        `cancelled` first.
        """
        self.transcript.start(self.job.task.split)
        failed: PolicyError | None = None
        try:
            outcome, error, rewards = await self._outcome()
        except PolicyError as problem:
            failed, outcome, error, rewards = problem, Outcome.CANCELLED, problem.message, ()
        ended = self.transcript.finish(outcome, error, rewards)
        if failed is not None or outcome is Outcome.CANCELLED:
            raise failed or asyncio.CancelledError
        return Attempted(ended, self.transcript.drift, self.transcript.guard_seconds, self.foreign)

    async def _outcome(self) -> tuple[Outcome, str, tuple[RewardPart, ...]]:
        """Loop, score, close. Returns (outcome, error, reward parts)."""
        deadline = asyncio.timeout(self.timeout)
        problem: Exception | None = None
        try:
            try:
                async with deadline:
                    await self._trace()
                    rewards = await self._score()
            finally:
                problem = await self._close()
        except asyncio.CancelledError:
            return Outcome.CANCELLED, "the run was stopped", ()
        except BadAnswer as error:  # of a server: it fails this episode, not the run
            return Outcome.ENV_ERROR, error.message, ()
        except (PolicyError, StoreError):
            raise
        except Exception as error:  # noqa: BLE001 - a failed episode is a row; a task's code may raise anything
            if isinstance(error, TimeoutError) and deadline.expired():
                return Outcome.TIMEOUT, f"the episode took longer than {self.timeout:g} s", ()
            return (*fault_of(error), ())
        if problem is not None:
            return (*fault_of(problem), ())
        return self._judgement(rewards)

    def _judgement(self, rewards: tuple[RewardPart, ...]) -> tuple[Outcome, str, tuple[RewardPart, ...]]:
        """The outcome by the primary part, unless a limit ended the episode before anything could be graded."""
        if self.cut in UNGRADABLE:
            return self.cut, self.reason, rewards
        primary = next((part.value for part in rewards if part.primary), None)
        if primary is None:
            text = f"The primary reward {self.pack.primary!r} is None: it does not apply to this episode."
            return Outcome.UNGRADED, text, rewards
        if primary >= 1.0:
            return Outcome.SOLVED, "", rewards
        return self.cut or Outcome.FAILED, self.reason, rewards

    async def _trace(self) -> None:
        event = {"task": self.job.task, "run": self.context.run}
        await self.context.hooks.call("on_rollout_start", **event)
        await self.context.hooks.call("on_trace_start", **event)
        await self.play()
        await self.context.hooks.call("on_trace_end", rollout=self.transcript.so_far(), **event)

    async def play(self) -> None:
        """The state machine. Leaves the episode in `transcript`, and in `cut` and `reason` what ended it early."""
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            self.transcript.live(state, self.parsed.content)
            match state:
                case AgentState.PENDING:
                    state = await self._begin()
                case AgentState.GENERATING:
                    state = await self._generate()
                case AgentState.PROCESSING_TOOLS | AgentState.INTERACTING:
                    state = self._observe(await run_step(self.env, self.parsed))

    async def _begin(self) -> AgentState:
        text = self.transcript
        self.env = await self.context.make_env(self.pack, self.job)
        text.messages = await run_reset(self.env, self.job.task)
        text.guard.tools = self.env.schemas
        prompt = self.context.chat.prompt(text.messages, self.env.schemas)
        if self.limits.response_tokens is not None:
            self.most = min(self.most, len(prompt.ids) + self.limits.response_tokens)
        if len(prompt.ids) + MIN_ROOM > self.most:
            self.cut = Outcome.TOO_LONG
            self.reason = (
                f"the prompt of {len(prompt.ids)} tokens does not fit into {self.most} (max_tokens or context)"
            )
        text.extend(prompt, text.messages)
        return AgentState.TERMINATED if self.cut else AgentState.GENERATING

    async def _generate(self) -> AgentState:
        text, done = self.transcript, self.transcript.answers
        if done >= self.limits.max_turns:
            self.cut = Outcome.TRUNCATED_TURNS
            return AgentState.TERMINATED
        chat = self.context.chat
        choice = self.job.task.data.get("tool_choice") if done == 0 else None
        forced = chat.tokenizer.encode(forced_text(chat, self.env.schemas, choice)) if choice else []
        room = self.most - len(text.ids) - len(forced)
        if room < MIN_ROOM:
            self.cut = Outcome.TRUNCATED_TOKENS
            return AgentState.TERMINATED
        sampling = self.limits.sampling(
            temperature=self.context.temperature,
            max_new_tokens=min(self.limits.max_new_tokens, room),
            stop_ids=chat.stop_ids,
            seed=seed_of(self.job.seed, "turn", done),
            slot=self.job.slot,
            bad_ids=self.context.bad_ids,
        )
        hooked = {"task": self.job.task, "turn": done, "run": self.context.run}
        sampling = await self.context.hooks.sampling(sampling, **hooked)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))  # a hook may ask for more
        policy, episode_id, group = self.context.policy, text.episode.id, self.job.group_id or ""
        if isinstance(policy, MessagePolicy):
            policy.observe(episode_id, text.messages, self.env.schemas)
        started = time.time()
        generation = await policy.generate(
            episode_id, [*text.ids, *forced], sampling, group=group, images=tuple(text.images)
        )
        return self._answered(generation, forced, started, done)

    def _answered(self, generation: Generation, forced: Sequence[int], started: float, number: int) -> AgentState:
        """Append the sampled turn after its forced prefix and parse it. Returns the next state."""
        chat, text = self.context.chat, self.transcript
        parsed = chat.parse([*forced, *generation.ids.tolist()], self.env.schemas, turn=number)
        closing = chat.close_turn(generation.stop_reason, generation.ids.tolist())
        given = [Tokens.given(ids, [Origin.FORCED] * len(ids)) for ids in (forced, closing)]
        tokens = Tokens.concat([given[0], Tokens.sampled(generation), given[1]])
        text.turn(
            "assistant",
            (parsed.message,),
            tokens,
            calls=parsed.calls,
            stop_reason=generation.stop_reason,
            weights_version=generation.weights_version,
            started=started,
            seconds=generation.seconds,
        )
        text.messages.append(parsed.message)
        self.parsed = AssistantTurn(parsed.content, parsed.calls, number)
        if not self.foreign and self.env.schemas and all(call.arguments is None for call in parsed.calls):
            self.foreign = foreign_parser(chat.decode(tokens.ids.tolist()), parsed, chat.parser, self.env.schemas)
        if generation.stop_reason not in (StopReason.STOP, StopReason.STOP_STRING):
            self.cut = Outcome.TRUNCATED_TOKENS
            return AgentState.TERMINATED
        return AgentState.PROCESSING_TOOLS if parsed.calls else AgentState.INTERACTING

    def _observe(self, step: Step) -> AgentState:
        """Append the environment's answer as the template's delta."""
        if step.reward is not None:
            self.earned = (self.earned or 0.0) + step.reward
        if step.truncated:
            self.cut = Outcome.TRUNCATED_TURNS
        if not step.messages:
            self.transcript.reward_last(step.reward)
            return AgentState.TERMINATED
        chat, text = self.context.chat, self.transcript
        room = self.most - len(text.ids)
        shown, images = pictured(step.messages, step.results, chat.images)
        messages, results, delta = fit_results(
            chat,
            shown,
            step.results,
            lambda new: chat.extend(text.messages, new, self.env.schemas, last_id=text.ids[-1]),
            limit=self.limits.max_observation_tokens,
            side=self.limits.truncate_side,
            room=room - MIN_ROOM,
            shrink=self.limits.overflow == "truncate_observation",
        )
        if len(delta) > room - MIN_ROOM and not step.terminated:
            self.cut = Outcome.TRUNCATED_TOKENS
        if len(delta) > room:  # stored for people; the model does not see it
            text.turn(str(messages[0]["role"]), tuple(messages), Tokens.empty(), results=results)
            return AgentState.TERMINATED
        self._check(messages, delta.ids)
        text.messages += messages
        text.images += images
        text.extend(delta, messages, results, reward=step.reward)
        return AgentState.TERMINATED if step.terminated or self.cut else AgentState.GENERATING

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _check(self, new: Sequence[Message], delta_ids: Sequence[int]) -> None:
        """The drift guard at a turn boundary: structural drift ends an episode that would be skipped for it."""
        lost = self.transcript.check(new, delta_ids)
        if lost is not None and self.job.kind == "train" and self.context.config.drift.structural == "skip":
            self.cut = Outcome.DRIFT
            self.reason = (
                f"structural drift: the template writes {lost.expected[:40]!r} where {lost.got[:40]!r} was appended"
            )

    async def _score(self) -> tuple[RewardPart, ...]:
        """Reward parts of the pack, the environment and the hooks, in this order."""
        if self.cut in UNGRADABLE:
            return ()
        episode = self.transcript.so_far()
        turns = episode.turns if episode.linear else episode.chain(episode.main).turns
        answers = [turn.messages[0].get("content") or "" for turn in turns if turn.role == "assistant"]
        world = getattr(self.env, "context", None)
        session = world.session if world is not None and self.context.sandbox is not None else None
        state = world.state if world is not None else {}
        plain = self.context.chat.tokenizer.plain
        ctx = RewardContext(self.job.task, answers[-1] if answers else "", session, state, decode=plain)
        weights = self.context.config.rewards
        parts = list(await self.parts(episode, ctx))
        with contained("The environment"):
            parts += await self.env.rewards()
        if self.earned is not None:
            parts.append(RewardPart("env", self.earned, 0.0))
        episode = episode.with_(reward_parts=tuple(parts))
        parts += await self.context.hooks.rollout_end(episode, self.job.task, run=self.context.run, context=ctx)
        return tuple(finite(replace(part, weight=weights.get(part.name, part.weight))) for part in parts)

    async def parts(self, episode: Episode, ctx: RewardContext) -> tuple[RewardPart, ...]:
        """The reward parts of the pack."""
        return await score(episode, self.pack.reweighted(self.context.config.rewards), ctx)

    async def _close(self) -> Exception | None:
        """Free everything. Returns what went wrong with that: it must not hide what ended the episode."""
        try:
            await self.context.policy.release(self.transcript.episode.id)
            async with asyncio.timeout(CLOSING):
                with contained("Closing the episode"):
                    await asyncio.shield(self.env.close())
        except TimeoutError:
            return EnvError(f"Closing the episode took longer than {CLOSING:g} s.")
        except Exception as error:  # noqa: BLE001 - returned: the caller decides whether a worse error hides it
            return error
        return None


def new_episode(job: Job, weights_version: str) -> Episode:
    """An episode without turns, which starts now."""
    task = job.task
    return Episode(
        id=new_id(),
        task_id=task.id,
        pack=task.pack,
        family=task.family,
        run_id=job.run_id,
        step=job.step,
        group_id=job.group_id,
        sample=job.sample,
        seed=job.seed,
        kind=job.kind,
        weights_version=weights_version,
        started=time.time(),
    )
