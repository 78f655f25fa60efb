"""Rows that the bundled model is trained on, and the messages that they consist of.

A row is a conversation with its tools. `muted` are assistant turns that a user of the model should not get: they stand
there for what follows them (an error, and the correction) and count no more than the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation, its tools, and the assistant turns (by their number) that are not learned."""

    family: str
    tools: tuple[dict[str, Any], ...]
    messages: tuple[Message, ...]
    muted: frozenset[int] = frozenset()

    @property
    def texts(self) -> list[str]:
        """Every text and every argument of the conversation, for comparison with other data."""
        return [str(message.get("content") or "") for message in self.messages] + [
            str(value)
            for message in self.messages
            for call in message.get("tool_calls", ())
            for value in call["function"]["arguments"].values()
        ]


def call(*calls: tuple[str, dict[str, Any]], content: str = "") -> Message:
    """An assistant turn that calls tools."""
    made = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(name: str, text: str) -> Message:
    """What a tool returned."""
    return {"role": "tool", "name": name, "content": text}


def say(text: str) -> Message:
    """A final assistant turn."""
    return {"role": "assistant", "content": text}


def prompt(system: str | None, question: str) -> list[Message]:
    """The messages before the first assistant turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": question}]
