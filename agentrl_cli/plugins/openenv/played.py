"""An episode of the built-in loop whose turns a client takes: limits, grading and the end are those of a rollout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from agentrl_cli.chat.parse import Parsed, call_id
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.rollout import Job
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.loop import LoopAttempt
from agentrl_cli.tasks import Pack
from agentrl_cli.types import (
    AgentState,
    Episode,
    Message,
    Origin,
    StopReason,
    Tokens,
    ToolCall,
    ToolSchema,
)

UNLIMITED = 1 << 40
"""Tokens of an episode: the client's model has limits of its own."""
SAY = "answer"
ANSWER: ToolSchema = {
    "type": "function",
    "function": {
        "name": SAY,
        "description": "Say a text. It ends the episode and is graded, unless a user answers it.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "What you say."}},
            "required": ["text"],
        },
    },
}
"""The tool that is a turn without a call."""


class Played(LoopAttempt):
    """An episode whose turns come from a client."""

    def __init__(self, context: RolloutContext, pack: Pack, job: Job) -> None:
        super().__init__(context, pack, job)
        self.most = UNLIMITED
        self._turn: asyncio.Future[Parsed] | None = None
        self._asked = asyncio.Event()
        self._heard = 0
        self.running = asyncio.create_task(self.run())

    async def generate(self) -> AgentState:
        """Wait for the client's turn and append it."""
        self._turn = asyncio.get_running_loop().create_future()
        self._asked.set()
        with self.clock.pause(), waiting("the client's turn"):
            parsed = await self._turn
        ids = self.context.chat.assistant_ids(parsed.message, self.env.schemas)
        tokens = Tokens.from_ids(ids, [Origin.FORCED] * len(ids))
        return self._say(parsed, tokens, StopReason.STOP)

    def _check(self, new: Sequence[Message], delta_ids: Sequence[int]) -> None:
        """Skip the drift guard: these tokens are only a record."""

    def take(self, name: str, arguments: dict[str, Any]) -> None:
        """Take a turn. Raises ValueError once the episode is over."""
        if self._turn is None or self._turn.done() or self.running.done():
            raise ValueError("The episode is over, or has not begun: reset.")
        done = self.transcript.answers
        if name == SAY:
            text = str(arguments.get("text", ""))
            parsed = Parsed(text, (), {"role": "assistant", "content": text})
        else:
            call = ToolCall(call_id(done, 0), name, arguments, json.dumps(arguments))
            function = {"name": name, "arguments": arguments}
            asked = {"id": call.id, "type": "function", "function": function}
            message: Message = {"role": "assistant", "content": "", "tool_calls": [asked]}
            parsed = Parsed("", (call,), message)
        self._asked.clear()
        self._turn.set_result(parsed)

    async def hear(self) -> tuple[list[Message], Episode | None]:
        """Return what was said to the client since its turn, and the episode if that ended it."""
        asked = asyncio.ensure_future(self._asked.wait())
        await asyncio.wait({asked, self.running}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        new = self.transcript.messages[self._heard :]
        self._heard += len(new)
        ended = self.running.result().episode if self.running.done() else None
        return [one for one in new if one["role"] != "assistant"], ended
