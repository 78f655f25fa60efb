"""Searching the text of episodes with a regular expression."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import UsageError
from agentrl_cli.store.codec import loads
from agentrl_cli.store.connection import connect, mapped
from agentrl_cli.store.filters import compile_filter
from agentrl_cli.types import Message

if TYPE_CHECKING:
    from agentrl_cli.store import Store


@dataclass(frozen=True, slots=True)
class Hit:
    """One line that matches: `start..end` is the match inside `line`."""

    episode_id: str
    turn: int
    role: str
    line: str
    start: int
    end: int


def grep(
    store: Store,
    pattern: str,
    *,
    filter: str = "",
    run: str | None = None,
    role: str | None = None,
    ignore_case: bool = False,
) -> Iterator[Hit]:
    """Matching lines, the newest episodes first, as they are found. Raises UsageError for a bad pattern or filter."""
    try:
        regex = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f"The pattern cannot be read: {error}.", hint="Quote it, and escape ( [ . * + ? with \\."
        ) from error
    where, params = compile_filter(filter)
    terms = [f"({where})"]
    for column, value in (("e.run_id", run), ("t.role", role)):
        if value is not None:
            terms.append(f"{column}=?")
            params = [*params, value]
    sql = (
        "SELECT t.episode_id, t.idx, t.role, t.messages FROM episodes e CROSS JOIN turns t ON t.episode_id=e.id"
        f" WHERE {' AND '.join(terms)} ORDER BY e.started DESC, e.rowid DESC, t.idx"
    )
    return _hits(store, sql, params, regex)


def _hits(store: Store, sql: str, params: list[Any], regex: re.Pattern[str]) -> Iterator[Hit]:
    store.flush()
    conn = connect(store.path, readonly=True)  # its own connection: rows come while the caller goes on using the store
    try:
        with mapped(store.path):
            for episode, turn, role, messages in conn.execute(sql, params):
                for line in message_lines(loads(messages)):
                    match = regex.search(line)
                    if match:
                        yield Hit(episode, turn, role, line, match.start(), match.end())
    finally:
        conn.close()


def message_lines(messages: list[Message]) -> Iterator[str]:
    """The lines of text of messages, the calls that an assistant message made included."""
    for message in messages:
        for text in message_texts(message):
            yield from text.splitlines()


def message_texts(message: Message) -> Iterator[str]:
    """Content, thinking and calls of a message as texts."""
    for name in ("reasoning_content", "content"):
        content = message.get(name)
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else {}
        yield f"{function.get('name', '')} {function.get('arguments', '')}"
