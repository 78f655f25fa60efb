"""The built-in agent loop: the state machine of an episode, and what is appended at each turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from agentrl_cli.chat.images import pictured
from agentrl_cli.chat.parse import foreign_parser
from agentrl_cli.chat.tool_choice import forced_text
from agentrl_cli.chat.truncate import fit_results
from agentrl_cli.envs.tool_env import AssistantTurn, Step
from agentrl_cli.policies.protocols import MessagePolicy
from agentrl_cli.rollout.attempt import Attempt
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.job import Job, seed_of
from agentrl_cli.rollout.world import run_reset, run_step
from agentrl_cli.tasks import Pack
from agentrl_cli.types import AgentState, Generation, Message, Origin, Outcome, StopReason, Tokens
from agentrl_cli.types.content import images_of

MIN_ROOM = 8
"""An assistant turn with less room than this many tokens is not begun."""


class LoopAttempt(Attempt):
    """An episode that the built-in loop makes: the model's turns and the environment's answers alternate."""

    def __init__(self, context: RolloutContext, pack: Pack, job: Job) -> None:
        super().__init__(context, pack, job)
        self.parsed = AssistantTurn("")

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
        chat, given = self.context.chat, await run_reset(self.env, self.job.task)
        text.messages, images = pictured(given, (), chat.images, self.pack.dir)
        text.guard.tools = self.env.schemas
        prompt = chat.prompt(text.messages, self.env.schemas)
        if self.limits.response_tokens is not None:
            self.most = min(self.most, len(prompt.ids) + self.limits.response_tokens)
        if len(prompt.ids) + MIN_ROOM > self.most:
            self.cut = Outcome.TOO_LONG
            seen = sum(part["tokens"] for message in text.messages for part in images_of(message))
            of = (
                f" ({seen} of them for {len(images)} image{'s'[: len(images) != 1]})"
                if images
                else ""
            )
            self.reason = (
                f"the prompt of {len(prompt.ids)} tokens{of} does not fit into {self.most}"
                " (max_tokens or context)"
            )
        text.extend(prompt, text.messages, images=images)
        return AgentState.TERMINATED if self.cut else AgentState.GENERATING

    async def _generate(self) -> AgentState:
        text, done = self.transcript, self.transcript.answers
        if done >= self.limits.max_turns:
            self.cut = Outcome.TRUNCATED_TURNS
            return AgentState.TERMINATED
        chat = self.context.chat
        choice = self.job.task.data.get("tool_choice") if done == 0 else None
        forced = (
            chat.tokenizer.encode(forced_text(chat, self.env.schemas, choice)) if choice else []
        )
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
        sampling = replace(
            sampling, max_new_tokens=min(sampling.max_new_tokens, room)
        )  # a hook may ask for more
        policy, episode_id, group = self.context.policy, text.episode.id, self.job.group_id or ""
        if isinstance(policy, MessagePolicy):
            policy.observe(episode_id, text.messages, self.env.schemas)
        started = time.time()
        with self.clock.paused():
            generation = await policy.generate(
                episode_id, [*text.ids, *forced], sampling, group=group, images=tuple(text.images)
            )
        return self._answered(generation, forced, started, done)

    def _answered(
        self, generation: Generation, forced: Sequence[int], started: float, number: int
    ) -> AgentState:
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
        if (
            not self.foreign
            and self.env.schemas
            and all(call.arguments is None for call in parsed.calls)
        ):
            self.foreign = foreign_parser(
                chat.decode(tokens.ids.tolist()), parsed, chat.parser, self.env.schemas
            )
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
        in_results = chat.images is None or chat.shows_images
        shown, images = pictured(
            step.messages, step.results, chat.images, self.pack.dir, in_results=in_results
        )
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
        text.extend(delta, messages, results, reward=step.reward, images=images)
        return AgentState.TERMINATED if step.terminated or self.cut else AgentState.GENERATING

    def _check(self, new: Sequence[Message], delta_ids: Sequence[int]) -> None:
        """The drift guard at a turn boundary: structural drift ends an episode that would be skipped for it."""
        lost = self.transcript.check(new, delta_ids)
        if (
            lost is not None
            and self.job.kind == "train"
            and self.context.config.drift.structural == "skip"
        ):
            self.cut = Outcome.DRIFT
            self.reason = (
                f"structural drift: the template writes {lost.expected[:40]!r}"
                f" where {lost.got[:40]!r} was appended"
            )
