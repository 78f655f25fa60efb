"""The built-in agent loop: the state machine of an episode, and the tokens that each state appends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl_cli.chat.images import place_images
from agentrl_cli.chat.parse import Parsed, foreign_parser
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.chat.truncate import fit_results
from agentrl_cli.config.rollout import MIN_ROOM
from agentrl_cli.envs.tool_env import AssistantTurn, Step
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.policies.protocols import MessagePolicy
from agentrl_cli.rollout.attempt import Attempt
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.job import Job, seed_of
from agentrl_cli.rollout.world import run_reset, run_step
from agentrl_cli.tasks import Pack
from agentrl_cli.types import (
    AgentState,
    Generation,
    Message,
    Origin,
    Outcome,
    Sampling,
    StopReason,
    Tokens,
)
from agentrl_cli.types.content import images_of


class LoopAttempt(Attempt):
    """An episode that the built-in loop makes: the model's turns and the environment's answers alternate."""

    def __init__(self, context: RolloutContext, pack: Pack, job: Job) -> None:
        super().__init__(context, pack, job)
        self.parsed = AssistantTurn("")

    async def play(self) -> None:
        """Run the state machine. Leaves the episode in `transcript`, and in `cut` and `reason` what ended it early."""
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            self.transcript.live(state, self.parsed.content)
            match state:
                case AgentState.PENDING:
                    state = await self.begin()
                case AgentState.GENERATING if self.transcript.answers >= self.max_turns:
                    self.cut = Outcome.TRUNCATED_TURNS
                    state = AgentState.TERMINATED
                case AgentState.GENERATING:
                    state = await self.generate()
                case AgentState.PROCESSING_TOOLS | AgentState.INTERACTING:
                    state = self.observe(await run_step(self.env, self.parsed))

    async def begin(self) -> AgentState:
        """Make the environment and append its first messages."""
        self.env = await self.context.make_env(self.pack, self.job)
        return self.open(await run_reset(self.env, self.job.task))

    def open(self, given: Sequence[Message]) -> AgentState:
        """Append the messages that the episode opens with, unless they are too long."""
        text, chat = self.transcript, self.context.chat
        text.messages, images = place_images(given, (), chat.images, self.pack.dir)
        text.guard.tools = self.env.schemas
        prompt = chat.prompt(text.messages, self.env.schemas)
        self.limit_response(len(prompt.ids))
        if len(prompt.ids) + MIN_ROOM > self.most:
            self.cut = Outcome.TOO_LONG
            seen = sum(part["tokens"] for message in text.messages for part in images_of(message))
            of = (
                f" ({seen} of them for {len(images)} image{'s'[: len(images) != 1]})"
                if images
                else ""
            )
            source = self.limit_source()
            self.reason = f"the prompt of {len(prompt.ids)} tokens{of} does not fit into {self.most}, {source}"
            if source == "rollout.max_tokens":
                kind = " (a token of this model is a byte)" * isinstance(
                    chat.tokenizer, ByteTokenizer
                )
                self.reason += f"{kind}; more: --set rollout.max_tokens={2 * len(prompt.ids)}"
        text.extend(prompt, text.messages, images=images)
        return AgentState.TERMINATED if self.cut else AgentState.GENERATING

    def limit_response(self, prompt: int) -> None:
        """Apply `rollout.response_tokens` after a prompt of so many tokens."""
        if self.limits.response_tokens is not None:
            self.most = min(self.most, prompt + self.limits.response_tokens)

    async def generate(self) -> AgentState:
        """Sample the model's turn and append it."""
        text, done, chat = self.transcript, self.transcript.answers, self.context.chat
        # Of the first turn alone: an episode whose every turn must call never ends.
        choice = self.job.task.data.get("tool_choice") if done == 0 else None
        forced = chat.tokenizer.encode(chat.syntax.forced_text(self.env.schemas, choice))
        room = self.most - len(text.ids) - len(forced)
        if room < MIN_ROOM:
            self.cut = Outcome.TRUNCATED_TOKENS
            return AgentState.TERMINATED
        sampling = self.limits.sampling(
            temperature=self.context.temperature,
            max_new_tokens=min(self.limits.max_new_tokens, room),
            stop_ids=chat.stop_ids,
            seed=self.turn_seed(done),
            slot=self.job.slot,
            bad_ids=self.context.bad_ids,
        )
        hooked = {"task": self.job.task, "turn": done, "run": self.context.run}
        sampling = await self.context.hooks.sampling(sampling, **hooked)
        sampling = replace(
            sampling, max_new_tokens=min(sampling.max_new_tokens, room)
        )  # a hook may ask for more
        policy = self.context.policy
        more = () if choice in (None, "auto") else (choice,)
        if isinstance(policy, MessagePolicy) and policy.observe(
            text.episode.id, text.messages, self.env.schemas, *more
        ):
            forced = []
        started = time.time()
        with self.clock.pause(), waiting(f"the model, which samples turn {done}"):
            generation = await self.sample([*text.ids, *forced], sampling)
        return self._append_answer(generation, forced, started, done)

    def turn_seed(self, done: int) -> int:
        """Return the seed of the turn after so many of the model's."""
        return seed_of(self.job.seed, "turn", done)

    async def sample(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue a context with the policy."""
        key, group = self.transcript.episode.id, self.job.group_id or ""
        images = tuple(self.transcript.images)
        return await self.context.policy.generate(key, ids, sampling, group=group, images=images)

    def _append_answer(
        self, generation: Generation, forced: Sequence[int], started: float, number: int
    ) -> AgentState:
        """Append the sampled turn after its forced prefix and parse it. Returns the next state."""
        chat = self.context.chat
        parsed = chat.parse([*forced, *generation.ids.tolist()], self.env.schemas, turn=number)
        closing = chat.close_turn(generation.stop_reason, generation.ids.tolist())
        given = [Tokens.from_ids(ids, [Origin.FORCED] * len(ids)) for ids in (forced, closing)]
        tokens = Tokens.concat([given[0], Tokens.from_generation(generation), given[1]])
        state = self._say(
            parsed,
            tokens,
            generation.stop_reason,
            weights_version=generation.weights_version,
            started=started,
            seconds=generation.seconds,
        )
        if (
            not self.foreign
            and self.env.schemas
            and all(call.arguments is None for call in parsed.calls)
        ):
            self.foreign = foreign_parser(
                chat.decode(tokens.ids.tolist()), parsed, chat.parser, self.env.schemas
            )
        return state

    def write(self, text: str) -> AgentState:
        """Append a turn that a person wrote in the model's place: FORCED, and never trained."""
        chat, number = self.context.chat, self.transcript.answers
        ids = chat.assistant_ids(text, self.env.schemas)
        parsed = chat.parse(ids, self.env.schemas, turn=number)
        return self._say(parsed, Tokens.from_ids(ids, [Origin.FORCED] * len(ids)), StopReason.STOP)

    def _say(self, parsed: Parsed, tokens: Tokens, stop: StopReason, **facts: Any) -> AgentState:
        """Append an assistant turn. Returns the next state: a turn that was cut off is not answered."""
        text = self.transcript
        self.parsed = AssistantTurn(parsed.content, parsed.calls, text.answers)
        facts |= {"calls": parsed.calls, "stop_reason": stop}
        text.turn("assistant", (parsed.message,), tokens, **facts)
        text.messages.append(parsed.message)
        if stop not in (StopReason.STOP, StopReason.STOP_STRING):
            self.cut = Outcome.TRUNCATED_TOKENS
            return AgentState.TERMINATED
        return AgentState.PROCESSING_TOOLS if parsed.calls else AgentState.INTERACTING

    def observe(self, step: Step) -> AgentState:
        """Append the environment's answer as the template's delta."""
        if step.truncated:
            self.cut = Outcome.TRUNCATED_TURNS
        if not step.messages:
            self.transcript.reward_last(step.reward)
            return AgentState.TERMINATED
        chat, text = self.context.chat, self.transcript
        room = self.most - len(text.ids)
        in_results = chat.images is None or chat.shows_images
        shown, images = place_images(
            step.messages, step.results, chat.images, self.pack.dir, in_results=in_results
        )
        messages, results, delta = fit_results(
            chat,
            shown,
            step.results,
            lambda new: chat.extend(text.messages, new, self.env.schemas, last_id=text.ids[-1]),
            limit=self.limits.observation.tokens,
            side=self.limits.observation.cut,
            room=room - MIN_ROOM,
            shrink=self.limits.observation.overflow == "truncate_observation",
        )
        if len(delta) > room - MIN_ROOM and not step.terminated:
            self.cut = Outcome.TRUNCATED_TOKENS
        if len(delta) > room:  # stored for people; the model does not see it
            role, facts = str(messages[0]["role"]), {"results": results, "reward": step.reward}
            text.turn(role, tuple(messages), Tokens.empty(), **facts)
            return AgentState.TERMINATED
        self._check(messages, delta.ids)
        text.messages += messages
        text.extend(delta, messages, results, reward=step.reward, images=images)
        return AgentState.TERMINATED if step.terminated or self.cut else AgentState.GENERATING

    def _check(self, new: Sequence[Message], delta_ids: Sequence[int]) -> None:
        """The drift guard at a turn boundary: structural drift ends an episode that would be skipped for it."""
        lost = self.transcript.check(new, delta_ids)
        if lost is not None and self.job.kind == "train" and self.context.config.algo.skip.drift:
            self.cut = Outcome.DRIFT
            self.reason = (
                f"structural drift: the template writes {lost.expected[:40]!r}"
                f" where {lost.got[:40]!r} was appended"
            )
