"""A conversation with a policy and its tools, where a person may act as user, model or tool.

Not here: what a conversation is made of (conversation.py), how a person says what they want (chat.py), how it looks
(tui/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.analysis.whatif import (
    ReplayResult,
    chain_to,
    marked,
    opened,
    rescore,
    results_of,
    step_of,
    turns_before,
    was_cut,
)
from agentrl_cli.envs.tool_env import AssistantTurn
from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.servers.chat_session.conversation import Answer, Approve, Conversation, Emit
from agentrl_cli.types import Episode, Message, Origin, RewardPart, StopReason, Tokens, ToolCall, ToolResult

__all__ = ["SETTINGS", "Answer", "Approve", "Emit", "Session"]

LONGEST_NOTE = 500
"""Characters of a call by hand, with its result, in the saved episode's note."""
SETTINGS = ("max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p")
"""What a chat may change of its sampling."""


@dataclass
class Session(Conversation):
    """What a person, or a what-if, does in a conversation."""

    async def begin(self, prompt: Sequence[Message]) -> None:
        """Prepares the world. `prompt` opens the conversation; where it ends with a user message the model answers.

        A task's own prompt is what its world opens with, a tool's view of the episode's state included.
        """
        said = await opened(self.env, self.task)
        self._opening = said if list(prompt) == list(self.task.prompt) else list(prompt)
        if prompt and prompt[-1].get("role") == "user":
            messages, self._opening = self._opening, []
            self._open(messages)
            await self.reply()

    async def resume(self, episode: Episode, turn: int, *, there: ReplayResult | None = None) -> ReplayResult:
        """Begins with the turns of a stored episode before turn `turn`; its tool calls are run again for their effects.

        Token ids are the stored ones; results whose calls answer otherwise now are marked. `there`: the world has gone
        there before, and nothing is run. Raises UsageError where the model is not to speak there.
        Of an episode that branches, the turns before it are those on its path.
        """
        episode, turn, self.places = chain_to(episode, turn)
        if there is None:
            await opened(self.env, self.task)
        else:
            self._went(there)
        self.turns, self.parts = turns_before(episode, turn)
        self.messages = [message for item in self.turns for message in item.messages]
        world = there or await self._rerun(episode, turn)
        self.turns = marked(self.turns, world.reruns)
        self.parent = episode.with_(turns=(*self.turns, *episode.turns[len(self.turns) :]))  # see `branch`
        for item, part in zip(self.turns, self.parts, strict=True):
            self.emit({"ev": "turn", "turn": item, "tokens": part})
        return world

    async def user(self, text: str) -> None:
        """A user message, then the model's answer, tools and all."""
        if self.turns and not self._waits_for_world:
            raise UsageError("It is the model's turn.", hint="/retry lets it answer, /as-model answers in its place.")
        self._marks.append(len(self.turns))
        message: Message = {"role": "user", "content": text}
        if not self.turns:
            opening = list(self._opening)
            if opening and opening[-1].get("role") == "user":  # a tool's words on the state: one message with the text
                message["content"] = f"{opening.pop()['content']}\n\n{text}"
            self._open([*opening, message])
        else:
            self.env.heard(self._last_said, [message])
            self._extend([message])
        self.over = False
        await self.reply()

    async def ask_user(self) -> None:
        """Has the world answer the model's last turn once, where it talks; then the model goes on."""
        if not self.env.talks:
            raise UsageError("There is no simulated user here.", hint="A pack with one, and `agentrl chat --task ID`.")
        if not self._waits_for_world or self.turns[-1].calls:
            raise UsageError("It is not the user's turn.")
        self._marks.append(len(self.turns))
        if await self._world(self._last_said):
            await self.reply()

    async def reply(self) -> None:
        """Lets the model speak until nobody answers it by itself, or `max_turns` is reached."""
        for _ in range(self.max_turns):
            generation, forced = await self._sample()
            parsed = self._said(generation, forced)
            if not parsed.calls and not (self.simulate and self.env.talks):
                return
            if was_cut(generation.stop_reason):
                if parsed.calls:
                    self.emit({"ev": "note", "text": "the turn was cut off, so its calls are not run: /retry, /set"})
                return
            if not await (self._run_tools(parsed) if parsed.calls else self._world(parsed)):
                return
        self.emit({"ev": "note", "text": f"stopped after {self.max_turns} turns; say something to go on"})

    async def as_model(self, text: str) -> None:
        """The person writes the assistant turn; its calls are run, then the model goes on."""
        if self._waits_for_world:
            await self._back_to("user")  # the model has answered already: in its place
        if not self.turns:
            raise UsageError("It is the user's turn.", hint="Say something first.")
        self._marks.append(len(self.turns))
        ids = self.chat.assistant_ids(text, self.env.schemas)
        tokens = Tokens.given(ids, [Origin.FORCED] * len(ids))
        parsed = self.chat.parse(ids, self.env.schemas, turn=self._answers)
        self._turn("assistant", (parsed.message,), tokens, calls=parsed.calls, stop_reason=StopReason.STOP)
        self.messages.append(parsed.message)
        if parsed.calls and await self._run_tools(AssistantTurn(parsed.content, parsed.calls, self._answers)):
            await self.reply()

    async def as_tool(self, text: str) -> None:
        """The person answers the calls of the last assistant turn, then the model goes on."""
        await self._back_to("assistant", calls=True)
        last = self.turns[-1] if self.turns else None
        if last is None or last.role != "assistant" or not last.calls:
            raise UsageError("No tool call waits for an answer.", hint="/undo goes back to one; --approve asks first.")
        self._marks.append(len(self.turns))
        self._answer(last.calls, tuple(ToolResult(text) for _ in last.calls))
        await self.reply()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a tool by hand, in the state that the conversation left; the model does not see it, `save` keeps it."""
        known = [str(schema["function"]["name"]) for schema in self.env.schemas]
        if name not in known:
            raise NotFound.of("tool", name, known)
        calls = (ToolCall("by_hand", name, arguments, ""),)
        results = results_of(await step_of(self.env, AssistantTurn("", calls, self._answers)))
        result = results[0] if results else ToolResult("")
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        said = " ".join((result.error or "", *result.text.split())).strip()
        self.by_hand.append((len(self.turns), f"{name}({given}) → {said}"[:LONGEST_NOTE].replace("\n", " ")))
        return result

    async def retry(self) -> None:
        """Takes the model's last answer back and lets it answer again, with another seed.

        Where it is the model's turn already, after `resume` for instance, nothing is taken back.
        """
        if self.turns and not self._waits_for_world:
            self._tries += 1
            self._marks.append(len(self.turns))
            await self.reply()
            return
        keep = len(self.turns)
        while keep and self.turns[keep - 1].role != "user":
            keep -= 1
        if not keep:
            raise UsageError("There is nothing to answer yet.")
        await self._cut(keep)
        self._tries += 1
        await self.reply()

    async def undo(self) -> int:
        """Takes back everything since the last thing the person did; returns the number of turns left.

        The world goes back, too; what a tool did outside the sandbox stays done, and a note says so.
        """
        if not self._marks:
            raise UsageError("There is nothing to take back.")
        await self._cut(self._marks.pop())
        return len(self.turns)

    async def score(self) -> tuple[RewardPart, ...]:
        """The reward parts of pack and world for the conversation so far. Raises UsageError without a task."""
        if not self.task.data or not self.rewards:
            raise UsageError("There is nothing to score by: this chat has no task.", hint="`agentrl chat --task ID`.")
        self.reward_parts = await rescore(
            self.episode(), self.rewards, self.env, self.task, sandboxed=self.sandboxed, weights=self.weights,
            earned=self.earned, decode=self.chat.tokenizer.plain,
        )  # fmt: skip
        return self.reward_parts

    def give(self, value: float) -> tuple[RewardPart, ...]:
        """The person's own score, the primary part."""
        self.reward_parts = (RewardPart("person", value, 1.0, primary=True, detail="given in chat"),)
        return self.reward_parts
