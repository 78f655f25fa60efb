"""Queries over a store: a regular expression over the texts of episodes, and read-only SQL."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.errors import UsageError
from agentrl_cli.store.codec import loads
from agentrl_cli.store.connection import connect
from agentrl_cli.store.file import StoreFile
from agentrl_cli.store.filters import compile_filter
from agentrl_cli.store.sqlite_errors import map_errors
from agentrl_cli.types import Message

_PRAGMAS = {
    "application_id",
    "compile_options",
    "data_version",
    "foreign_key_list",
    "index_info",
    "index_list",
    "page_count",
    "page_size",
    "table_info",
    "table_list",
    "table_xinfo",
    "user_version",
}
_FILE_AT_FAULT = {
    *(
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    ),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL),
}
LONGEST = 1 << 28
"""Most bytes of a value: one expression could produce gigabytes."""
_ERRORS = (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError)
"""Errors of a statement: ValueError for a NUL character, MemoryError for a value that is too large."""


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
    store: StoreFile,
    pattern: str,
    *,
    filter: str = "",
    run: str | None = None,
    role: str | None = None,
    ignore_case: bool = False,
) -> Iterator[Hit]:
    """Yield matching lines, the newest episodes first. Raises UsageError for a bad pattern or filter."""
    try:
        regex = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f"The pattern cannot be read: {error}.",
            hint="Quote it, and escape ( [ . * + ? with \\.",
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


def _hits(store: StoreFile, sql: str, params: list[Any], regex: re.Pattern[str]) -> Iterator[Hit]:
    store.flush()
    # Its own connection: the caller uses the store between rows.
    with closing(connect(store.path, readonly=True)) as conn, map_errors(store.path):
        for episode, turn, role, messages in conn.execute(sql, params):
            for line in message_lines(loads(messages)):
                if match := regex.search(line):
                    yield Hit(episode, turn, role, line, match.start(), match.end())


def message_lines(messages: list[Message]) -> Iterator[str]:
    """Yield the lines of text of messages, tool calls included."""
    for message in messages:
        for text in message_texts(message):
            yield from text.splitlines()


def message_texts(message: Message) -> Iterator[str]:
    """Yield thinking, content and calls of a message as texts."""
    for name in ("reasoning_content", "content"):
        content = message.get(name)
        for part in content if isinstance(content, list) else [{"text": content}]:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else {}
        yield f"{function.get('name', '')} {function.get('arguments', '')}"


def run_query(
    path: Path, sql: str, params: Sequence[Any] = (), *, timeout: float | None = None
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Return the column names, and the rows as they come; the connection closes with the iterator.

    Raises:
        UsageError: the SQL has an error, wants to write, or took longer than `timeout` seconds.
        StoreError: the file cannot be read.
    """
    conn = connect(path, readonly=True)
    conn.set_authorizer(_authorize)
    conn.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
    if timeout is not None:
        end = time.monotonic() + timeout
        conn.set_progress_handler(lambda: time.monotonic() > end, 100_000)
    rows = _execute(conn, path, sql, params)
    return next(rows), rows


def _execute(
    conn: sqlite3.Connection, path: Path, sql: str, params: Sequence[Any]
) -> Iterator[Any]:
    """Yield the column names, then the rows; the connection closes with the iterator."""
    try:
        with closing(conn), map_errors(path):
            cursor = conn.execute(sql, params)
            yield [item[0] for item in cursor.description or ()]
            yield from cursor
    except _ERRORS as error:
        raise _usage(error) from error


def _usage(error: Exception) -> Exception:
    """Return a UsageError for a mistake in the SQL; the error itself if the file is at fault."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    text = str(error)
    refused = code in (sqlite3.SQLITE_AUTH, sqlite3.SQLITE_READONLY)
    if refused or "authorized" in text or "prohibited" in text:
        return UsageError(
            "--sql only reads: SELECT, WITH, and PRAGMAs that read.",
            hint="`agentrl db` changes a store.",
        )
    if code == sqlite3.SQLITE_INTERRUPT:
        return UsageError(
            "The query took too long and was stopped.",
            hint="Add a LIMIT, or give a longer --timeout.",
        )
    if code in _FILE_AT_FAULT:
        return error
    hint = "`agentrl ls --schema` prints the tables and their columns."
    return UsageError(f"SQL: {text or 'a value needs more memory than there is'}", hint=hint)


def _authorize(
    action: int, first: str | None, second: str | None, base: str | None, trigger: str | None
) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE):
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION:
        bad = {"load_extension", "writefile", "readfile", "edit", "fts3_tokenizer"}
        return sqlite3.SQLITE_DENY if (second or "").lower() in bad else sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA:
        ask = (first or "").lower() in _PRAGMAS and (
            second is None or (first or "").lower().endswith(("info", "list"))
        )
        return sqlite3.SQLITE_OK if ask else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_DENY


def schema(path: Path) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return (table or view, its name, [(column, type)]) of the whole store, tables first."""
    sql = (
        "SELECT type, name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite%'"
        " AND name NOT LIKE '\\_%' ESCAPE '\\' ORDER BY type, rowid"
    )
    with closing(connect(path, readonly=True)) as conn, map_errors(path):
        return [
            (
                kind,
                name,
                conn.execute(f'SELECT name, type FROM pragma_table_info("{name}")').fetchall(),
            )
            for kind, name in conn.execute(sql).fetchall()
        ]
