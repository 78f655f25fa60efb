"""Read-only SQL on a store, for `agentrl query`: opened for reading, and an authorizer lets nothing else by."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.errors import UsageError
from agentrl_cli.store.connection import connect, mapped

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
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
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB),
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL),
}
LONGEST = 1 << 28
"""Bytes of a value: one expression can ask for gigabytes."""
_ERRORS = (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError)
"""What a statement can raise: ValueError for a NUL character, MemoryError for a value beyond this machine."""
_FORBIDDEN_FUNCTIONS = {"load_extension", "writefile", "readfile", "edit", "fts3_tokenizer"}


def run_query(
    path: Path, sql: str, params: Sequence[Any] = (), *, timeout: float | None = None
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Column names, and the rows as they come; the connection closes with the iterator.

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
    try:
        with mapped(path):
            cursor = _run(conn, sql, params)
    except BaseException:
        conn.close()
        raise
    names = [item[0] for item in cursor.description or ()]
    return names, _rows(conn, cursor, path)


def _run(conn: sqlite3.Connection, sql: str, params: Sequence[Any]) -> sqlite3.Cursor:
    try:
        return conn.execute(sql, params)
    except _ERRORS as error:
        raise _usage(error) from error


def _rows(conn: sqlite3.Connection, cursor: sqlite3.Cursor, path: Path) -> Iterator[tuple[Any, ...]]:
    try:
        with mapped(path):
            yield from cursor
    except _ERRORS as error:
        raise _usage(error) from error
    finally:
        conn.close()


def _usage(error: Exception) -> Exception:
    """A UsageError for what the user wrote; the error itself where the file is at fault."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    text = str(error)
    if code == sqlite3.SQLITE_AUTH or "authorized" in text or "prohibited" in text:
        return UsageError(
            "`query` only reads: SELECT, WITH, and PRAGMAs that tell.", hint="`agentrl db` has what changes a store."
        )
    if code == sqlite3.SQLITE_INTERRUPT:
        return UsageError("The query took too long and was stopped.", hint="Add a LIMIT, or give a longer --timeout.")
    if code == sqlite3.SQLITE_READONLY:
        return UsageError("`query` only reads.")
    if code in _FILE_AT_FAULT:
        return error
    hint = "`agentrl query --schema` prints the tables and their columns."
    return UsageError(f"SQL: {text or 'a value needs more memory than there is'}", hint=hint)


def _authorize(action: int, first: str | None, second: str | None, base: str | None, trigger: str | None) -> int:
    if action in _ALLOWED:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION:
        bad = (second or "").lower() in _FORBIDDEN_FUNCTIONS
        return sqlite3.SQLITE_DENY if bad else sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA:
        ask = (first or "").lower() in _PRAGMAS and (second is None or (first or "").lower().endswith(("info", "list")))
        return sqlite3.SQLITE_OK if ask else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_DENY


def schema(path: Path) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(table or view, its name, [(column, type)]) of the whole store, tables first."""
    conn = connect(path, readonly=True)
    try:
        with mapped(path):
            found = conn.execute(
                "SELECT type, name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite%'"
                " AND name NOT LIKE '\\_%' ESCAPE '\\' ORDER BY type, rowid"
            ).fetchall()
            return [
                (kind, name, [(row[1], row[2]) for row in conn.execute(f'PRAGMA table_info("{name}")')])
                for kind, name in found
            ]
    finally:
        conn.close()
