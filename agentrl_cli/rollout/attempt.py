"""One episode: the state machine, what is appended at each turn, its end and its score.

What the model sampled is appended as ids and never encoded again; what the world answers is appended as the chat
template's delta. A fault of ours (sandbox, grader, hook) ends the episode as an error that is never scored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentrl_cli.chat.drift import Drift, worst
from agentrl_cli.chat.drift_guard import DriftGuard
from agentrl_cli.chat.images import pictured
from agentrl_cli.chat.tool_choice import forced_text
from agentrl_cli.chat.truncate import fit_results
from agentrl_cli.envs.tool_env import AssistantTurn, Env, Step, fault_of
from agentrl_cli.errors import BadAnswer, EnvError, PolicyError, StoreError
from agentrl_cli.rewards import RewardContext, finite, score
from agentrl_cli.rollout.flags import flag_names
from agentrl_cli.rollout.job import Job, seed_of
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
    ToolResult,
    Turn,
    new_id,
)

if TYPE_CHECKING:
    from agentrl_cli.rollout.run import Rollout

MIN_ROOM = 8  # an assistant turn with less room than this is not begun
CLOSING = 30.0  # seconds that freeing an episode's tools and session may take
UNSEEN = (Outcome.TOO_LONG, Outcome.DRIFT)
"""Outcomes that say by themselves why nothing was graded."""


@dataclass
class Attempt:
    """One episode being made."""

    rollout: Rollout
    pack: Pack
    job: Job
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    parts: list[Tokens] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    """Images in the context, in order."""
    cut: Outcome | None = None
    """Which limit ended the episode, if one did."""

    def __post_init__(self) -> None:
        job, policy = self.job, self.rollout.policy
        self.limits = self.rollout.config.rollout
        self.most = min(self.limits.max_tokens, policy.context_length)
        self.env = Env()
        self.guard = DriftGuard(self.rollout.chat)
        self.earned: float | None = None  # rewards of the world's steps
        self.why = ""
        self.parsed = AssistantTurn("")
        self.episode = Episode(
            id=new_id(),
            task_id=job.task.id,
            pack=job.task.pack,
            family=job.task.family,
            run_id=job.run_id,
            step=job.step,
            group_id=job.group_id,
            sample=job.sample,
            seed=job.seed,
            kind=job.kind,
            weights_version=policy.weights_version,
            started=time.time(),
        )

    # --- the life of an episode --------------------------------------------------------------------------------------

    async def run(self) -> Episode:
        store, job = self.rollout.store, self.job
        if store is not None:
            store.episodes.start(self.episode, split=job.task.split, tokenizer=self.rollout.chat.tokenizer.hash)
        failed: PolicyError | None = None
        try:
            outcome, error, rewards = await self._outcome()
        except PolicyError as problem:
            failed, outcome, error, rewards = problem, Outcome.CANCELLED, problem.message, ()
        ended = self._finished(outcome, error, rewards)
        self._drifted(self._late)  # before its end: whatever kills this process, an episode that has ended is whole
        if store is not None:
            store.episodes.finish(ended, later=True)
            self.rollout.commit_soon()
        if failed is not None or outcome is Outcome.CANCELLED:
            raise failed or asyncio.CancelledError
        return ended

    async def _outcome(self) -> tuple[Outcome, str, tuple[RewardPart, ...]]:
        """Loop, score, close; what happened as (outcome, error, reward parts)."""
        deadline = asyncio.timeout(self.limits.episode_timeout)
        problem: Exception | None = None
        try:
            try:
                async with deadline:
                    await self._loop()
                    rewards = await self._score()
            finally:
                problem = await self._close()
        except asyncio.CancelledError:
            return Outcome.CANCELLED, "the run was stopped", ()
        except BadAnswer as error:  # of a server: this episode's fault, not the run's
            return Outcome.ENV_ERROR, error.message, ()
        except (PolicyError, StoreError):
            raise
        except Exception as error:  # noqa: BLE001 - a failed episode is a row; whatever its task's code raised
            if isinstance(error, TimeoutError) and deadline.expired():
                return Outcome.TIMEOUT, f"the episode took longer than {self.limits.episode_timeout:g} s", ()
            return (*fault_of(error), ())
        if problem is not None:
            return (*fault_of(problem), ())
        return self._judgement(rewards)

    def _judgement(self, rewards: tuple[RewardPart, ...]) -> tuple[Outcome, str, tuple[RewardPart, ...]]:
        """What the primary part says of the episode, unless a limit ended it before anything could be graded."""
        if self.cut in UNSEEN:
            return self.cut, self.why, rewards
        primary = next((part.value for part in rewards if part.primary), None)
        if primary is None:
            text = f"The primary reward {self.pack.primary!r} is None: it does not apply to this episode."
            return Outcome.UNGRADED, text, rewards
        if primary >= 1.0:
            return Outcome.SOLVED, "", rewards
        return self.cut or Outcome.FAILED, self.why, rewards

    async def _loop(self) -> None:
        """The state machine."""
        facts = {"task": self.job.task, "run": self.rollout.run_row}
        await self.rollout.hooks.call("on_rollout_start", **facts)
        await self.rollout.hooks.call("on_trace_start", **facts)
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            self._live(state)
            match state:
                case AgentState.PENDING:
                    state = await self._begin()
                case AgentState.GENERATING:
                    state = await self._generate()
                case AgentState.PROCESSING_TOOLS | AgentState.INTERACTING:
                    state = self._observe(await run_step(self.env, self.parsed))
        await self.rollout.hooks.call("on_trace_end", rollout=self._so_far(), **facts)

    async def _begin(self) -> AgentState:
        self.env = await self.rollout.make_env(self.pack, self.job)
        self.messages = await run_reset(self.env, self.job.task)
        self.guard.tools = self.env.schemas
        prompt = self.rollout.chat.prompt(self.messages, self.env.schemas)
        if self.limits.response_tokens is not None:
            self.most = min(self.most, len(prompt.ids) + self.limits.response_tokens)
        if len(prompt.ids) + MIN_ROOM > self.most:
            self.cut = Outcome.TOO_LONG
            self.why = f"the prompt of {len(prompt.ids)} tokens does not fit into {self.most} (max_tokens or context)"
        self._append(prompt, self.messages)
        return AgentState.TERMINATED if self.cut else AgentState.GENERATING

    async def _generate(self) -> AgentState:
        done = sum(turn.role == "assistant" for turn in self.turns)
        if done >= self.limits.max_turns:
            self.cut = Outcome.TRUNCATED_TURNS
            return AgentState.TERMINATED
        chat = self.rollout.chat
        choice = self.job.task.data.get("tool_choice") if done == 0 else None
        forced = chat.tokenizer.encode(forced_text(chat, self.env.schemas, choice)) if choice else []
        room = self.most - len(self.ids) - len(forced)
        if room < MIN_ROOM:
            self.cut = Outcome.TRUNCATED_TOKENS
            return AgentState.TERMINATED
        sampling = self.limits.sampling(
            temperature=self.rollout.temperature,
            max_new_tokens=min(self.limits.max_new_tokens, room),
            stop_ids=chat.stop_ids,
            seed=seed_of(self.job.seed, "turn", done),
            slot=self.job.slot,
            bad_ids=self.rollout.bad_ids,
        )
        hooked = {"task": self.job.task, "turn": done, "run": self.rollout.run_row}
        sampling = await self.rollout.hooks.sampling(sampling, **hooked)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))  # a hook may ask for more
        observe = getattr(self.rollout.policy, "observe", None)
        if observe is not None:  # a server that renders the messages itself
            observe(self.episode.id, self.messages, self.env.schemas)
        started = time.time()
        seen: dict[str, Any] = {"images": tuple(self.images)} if self.images else {}
        generation = await self.rollout.policy.generate(
            self.episode.id, [*self.ids, *forced], sampling, group=self.job.group_id or "", **seen
        )
        return self._said(generation, forced, started, done)

    def _said(self, generation: Generation, forced: Sequence[int], started: float, number: int) -> AgentState:
        """Append what the model sampled after a forced beginning, read it, and say what comes next."""
        chat = self.rollout.chat
        parsed = chat.parse([*forced, *generation.ids.tolist()], self.env.schemas, turn=number)
        closing = chat.close_turn(generation.stop_reason, generation.ids.tolist())
        given = [Tokens.given(ids, [Origin.FORCED] * len(ids)) for ids in (forced, closing)]
        tokens = Tokens.concat([given[0], Tokens.sampled(generation), given[1]])
        facts: dict[str, Any] = {"stop_reason": generation.stop_reason, "weights_version": generation.weights_version}
        facts |= {"started": started, "seconds": generation.seconds}
        self._turn("assistant", (parsed.message,), tokens, calls=parsed.calls, **facts)
        self.messages.append(parsed.message)
        self.parsed = AssistantTurn(parsed.content, parsed.calls, number)
        self.rollout.note_foreign(tokens.ids.tolist(), parsed, self.env.schemas)
        if generation.stop_reason not in (StopReason.STOP, StopReason.STOP_STRING):
            self.cut = Outcome.TRUNCATED_TOKENS
            return AgentState.TERMINATED
        return AgentState.PROCESSING_TOOLS if parsed.calls else AgentState.INTERACTING

    def _observe(self, step: Step) -> AgentState:
        """Append the world's answer as the template's delta."""
        if step.reward is not None:
            self.earned = (self.earned or 0.0) + step.reward
        if step.truncated:
            self.cut = Outcome.TRUNCATED_TURNS
        if not step.messages:
            self._judged(step.reward)
            return AgentState.TERMINATED
        chat, room = self.rollout.chat, self.most - len(self.ids)
        shown, images = pictured(step.messages, step.results, chat.images)
        messages, results, delta = fit_results(
            chat,
            shown,
            step.results,
            lambda new: chat.extend(self.messages, new, self.env.schemas, last_id=self.ids[-1]),
            limit=self.limits.max_observation_tokens,
            side=self.limits.truncate_side,
            room=room - MIN_ROOM,
            shrink=self.limits.overflow == "truncate_observation",
        )
        if len(delta) > room - MIN_ROOM and not step.terminated:
            self.cut = Outcome.TRUNCATED_TOKENS
        if len(delta) > room:  # what was answered is kept for people; the model never sees it
            self._turn(str(messages[0]["role"]), tuple(messages), Tokens.empty(), results=results)
            return AgentState.TERMINATED
        self._check(messages, delta.ids)
        self.messages += messages
        self.images += images
        self._append(delta, messages, results, reward=step.reward)
        return AgentState.TERMINATED if step.terminated or self.cut else AgentState.GENERATING

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _append(
        self,
        rendered: Any,
        messages: Sequence[Message],
        results: tuple[ToolResult, ...] = (),
        reward: float | None = None,
    ) -> None:
        """Rendered messages as turns, one for each run of messages of one role; `reward` comes with the last."""
        left = len(messages)
        for role, own, tokens in rendered.by_role(messages):
            left -= len(own)
            facts: dict[str, Any] = {"results": results} if role == "tool" else {}
            self._turn(role, own, tokens, **facts, reward=None if left else reward)

    def _turn(self, role: str, messages: tuple[Message, ...], tokens: Tokens, **facts: Any) -> None:
        start = len(self.ids)
        turn = Turn(len(self.turns), role, messages, start, start + len(tokens), **{"started": time.time(), **facts})
        self.turns.append(turn)
        self.parts.append(tokens)
        self.ids += tokens.ids.tolist()
        if self.rollout.store is not None:
            self.rollout.store.episodes.add_turn(self.episode.id, turn, tokens, later=True)

    def _judged(self, reward: float | None) -> None:
        """A reward with no message: it stays with the turn that it is for."""
        if reward is not None and self.turns:
            self.turns[-1] = replace(self.turns[-1], reward=reward)
            if self.rollout.store is not None:
                self.rollout.store.episodes.add_turn(self.episode.id, self.turns[-1], self.parts[-1], later=True)

    def _check(self, new: Sequence[Message], delta_ids: Sequence[int]) -> None:
        """The drift guard at a turn boundary; what it finds is stored at once."""
        turn = self.turns[-1]
        started = time.perf_counter()
        found = self.guard.turn(self.ids[turn.start :], delta_ids, [turn.messages[0], *new], turn.index, turn.start)
        self.rollout.guard_seconds += time.perf_counter() - started
        self._drifted(found)
        lost = next((drift for drift in found if drift.kind == "structural"), None)
        if lost is not None and self.job.kind == "train" and self.rollout.config.drift.structural == "skip":
            self.cut = Outcome.DRIFT
            self.why = (
                f"structural drift: the template writes {lost.expected[:40]!r} where {lost.got[:40]!r} was appended"
            )

    def _drifted(self, found: Sequence[Drift]) -> None:
        if self.rollout.store is not None:
            for drift in found:
                self.rollout.store.marks.add_drift(self.episode.id, **drift.row)
        if self.guard.found:
            self.rollout.drift[self.episode.id] = worst(self.guard.found)

    def _live(self, state: AgentState) -> None:
        if self.rollout.store is not None:
            done = sum(turn.role == "assistant" for turn in self.turns)
            self.rollout.store.live.set(self.episode.id, state, done, self.parsed.content)

    def _so_far(self) -> Episode:
        return self.episode.with_(turns=tuple(self.turns), tokens=Tokens.concat(self.parts))

    async def _score(self) -> tuple[RewardPart, ...]:
        """Reward parts of the pack, the world and the hooks, in this order."""
        if self.cut in UNSEEN:
            return ()
        said = [turn.messages[0].get("content") or "" for turn in self.turns if turn.role == "assistant"]
        context = getattr(self.env, "context", None)
        session = context.session if context is not None and self.rollout.sandbox is not None else None
        state = context.state if context is not None else {}
        plain = self.rollout.chat.tokenizer.plain
        ctx = RewardContext(self.job.task, said[-1] if said else "", session, state, decode=plain)
        weights = self.rollout.config.rewards
        episode = self._so_far()
        parts = list(await score(episode, self.pack.reweighted(weights), ctx))
        with contained("The environment"):
            parts += await self.env.rewards()
        if self.earned is not None:
            parts.append(RewardPart("env", self.earned, 0.0))
        episode = episode.with_(reward_parts=tuple(parts))
        parts += await self.rollout.hooks.rollout_end(episode, self.job.task, run=self.rollout.run_row, context=ctx)
        return tuple(finite(replace(part, weight=weights.get(part.name, part.weight))) for part in parts)

    async def _close(self) -> Exception | None:
        """Free everything, whatever happened; what went wrong with that does not hide what ended the episode."""
        try:
            await self.rollout.policy.release(self.episode.id)
            async with asyncio.timeout(CLOSING):
                with contained("Closing the episode"):
                    await asyncio.shield(self.env.close())
        except TimeoutError:
            return EnvError(f"Closing the episode took longer than {CLOSING:g} s.")
        except Exception as error:  # noqa: BLE001 - handed back: the caller knows whether anything worse happened
            return error
        return None

    def _finished(self, outcome: Outcome, error: str, rewards: tuple[RewardPart, ...]) -> Episode:
        """The episode with its end; the whole conversation is compared with the template's rendering once."""
        ended = self._so_far().with_(outcome=outcome, error=error, reward_parts=rewards, ended=time.time())
        started = time.perf_counter()
        self._late = [] if outcome.is_error else self.guard.end(ended)
        self.rollout.guard_seconds += time.perf_counter() - started
        return ended.with_(flags=flag_names(ended, [drift.kind for drift in self.guard.found]))
