"""`sql`: a SQLite database per episode, read-only or writable, in memory, with limits.

The database comes from the row's `database` or the tool's setting: a script of SQL statements, or the path of a `.db`,
`.sqlite` or `.sql` file. A row can only name a file inside the pack's folder, since rows may be untrusted; the pack's
own setting may name any. A database file is opened in place and read-only, whatever its size; if the tool is writable,
and for scripts, each episode works on its own copy in memory. An authorizer allows queries and changes of tables and
refuses the rest: ATTACH, PRAGMAs that set anything, extensions. A query that runs too long is interrupted; rows,
values, patterns, text and memory are bounded. Errors are returned to the model.
"""

from __future__ import annotations

import asyncio
import copy
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ConfigError, EnvError
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.tools.base import Tool, ToolContext
from agentrl_cli.tools.schema import tool_schema
from agentrl_cli.types import ToolResult

WIDTH = 200
"""Maximum characters shown of a value."""
LONGEST = 128 * 1024
"""Maximum bytes of a value or statement: a single function call cannot be interrupted, and some take quadratic time."""
PATTERN = 200
"""Maximum bytes of a LIKE or GLOB pattern."""
STEPS = 20
"""Virtual-machine steps between checks of the clock; low, since a step may be a function of a long value."""
OPENING = 30.0
"""Maximum seconds of a row's script."""
STRIPS: dict[str, Callable[[str, str], str]] = {
    "trim": str.strip,
    "ltrim": str.lstrip,
    "rtrim": str.rstrip,
}
"""SQLite's functions that are replaced, as are those of FORMATS."""
FORMATS = ("printf", "format")
_FIELD = re.compile(r"%([-+ #0!,]*)(\*|\d+)?(?:\.(\*|\d+))?(l{0,2})(.?)", re.DOTALL)
"""A field of a format of printf: flags, width, precision, length, conversion."""
STATE = "sql"
"""Key of the episode's connection in `ToolContext.state`, for rewards."""

READ = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_SAVEPOINT,
}
WRITE = {
    *(
        sqlite3.SQLITE_INSERT,
        sqlite3.SQLITE_UPDATE,
        sqlite3.SQLITE_DELETE,
        sqlite3.SQLITE_ALTER_TABLE,
    ),
    *(sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_CREATE_VIEW),
    *(
        sqlite3.SQLITE_CREATE_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_TABLE,
        sqlite3.SQLITE_CREATE_TEMP_INDEX,
        sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
    ),
    *(
        sqlite3.SQLITE_DROP_TABLE,
        sqlite3.SQLITE_DROP_INDEX,
        sqlite3.SQLITE_DROP_VIEW,
        sqlite3.SQLITE_DROP_TRIGGER,
    ),
    *(
        sqlite3.SQLITE_DROP_TEMP_TABLE,
        sqlite3.SQLITE_DROP_TEMP_INDEX,
        sqlite3.SQLITE_DROP_TEMP_TRIGGER,
        sqlite3.SQLITE_DROP_TEMP_VIEW,
        sqlite3.SQLITE_REINDEX,
        sqlite3.SQLITE_ANALYZE,
    ),
}
PRAGMAS = {
    "table_info",
    "table_xinfo",
    "table_list",
    "index_list",
    "index_info",
    "foreign_key_list",
}
"""PRAGMAs that only read the schema."""


def sql(query: str) -> ToolResult:
    """Run a SQL statement on the SQLite database and return its rows. The schema is in the table sqlite_master.

    Args:
        query: One SQLite statement.
    """
    raise NotImplementedError("SqlTool.execute runs the query.")


class SqlTool(Tool):
    """`database`: for rows without one. `rows`: maximum rows shown. `seconds`: time limit of a statement.

    `anywhere`: rows may also name files outside the pack's folder.
    """

    name = "sql"
    schema = tool_schema(sql)
    own_timeout = True  # `execute` interrupts the statement
    examples = ({"query": "SELECT 6 * 7 AS answer"}, {"query": "SELECT name FROM sqlite_master"})

    def __init__(
        self,
        database: str = "",
        *,
        writable: bool = False,
        rows: int = 50,
        seconds: float = 2.0,
        memory_mb: int = 64,
        anywhere: bool = False,
    ) -> None:
        if rows < 1 or seconds <= 0 or memory_mb < 1:
            raise ConfigError("The limits of sql (rows, seconds, memory_mb) must be above 0.")
        self.database, self.writable, self.rows = database, writable, rows
        self.seconds, self.memory_mb, self.anywhere = seconds, memory_mb, anywhere
        self.folder: Path | None = None

    def own_limits(self) -> dict[str, Any]:
        return {
            "access": "writable" if self.writable else "read-only",
            "rows": self.rows,
            "seconds": self.seconds,
            "memory MiB": self.memory_mb,
        }

    def at(self, folder: Path) -> SqlTool:
        tool = copy.copy(self)
        tool.folder = folder
        return tool

    async def create(self, ctx: ToolContext) -> sqlite3.Connection:
        row = str((ctx.task.data.get("database") if ctx.task is not None else None) or "")
        within = None if self.anywhere or not row else (self.folder or Path())
        connection = await in_thread(
            open_database,
            row or self.database,
            self.folder,
            self.memory_mb,
            within,
            copied=self.writable,
        )
        ctx.state[STATE] = connection
        return connection

    async def execute(self, state: sqlite3.Connection, arguments: dict[str, Any]) -> ToolResult:
        lock: asyncio.Lock = self.__dict__.setdefault("_locks", {}).setdefault(
            id(state), asyncio.Lock()
        )
        async with lock:  # calls of one turn run concurrently, and a connection has one interrupt
            return await in_thread(self.run, state, str(arguments["query"]))

    def run(self, connection: sqlite3.Connection, query: str) -> ToolResult:
        """Runs one statement within the limits, and commits if writable."""
        ends = time.thread_time() + self.seconds
        connection.set_authorizer(self._authorize)
        connection.set_progress_handler(lambda: int(time.thread_time() > ends), STEPS)
        try:
            with closing(connection.execute(query)) as cursor:
                return ToolResult(table(cursor, self.rows))
        except (sqlite3.Error, sqlite3.Warning, MemoryError, OverflowError, UnicodeError) as error:
            return self._explain(error)
        finally:
            connection.set_progress_handler(None, 0)
            connection.set_authorizer(None)

    async def release(self, state: sqlite3.Connection) -> None:
        self.__dict__.get("_locks", {}).pop(id(state), None)
        state.interrupt()  # a statement that a timed-out episode left running
        await in_thread(state.close)

    def _authorize(
        self, action: int, first: str | None, second: str | None, *rest: str | None
    ) -> int:
        if action in READ:
            fine = (second or "").casefold() != "load_extension"
        elif action == sqlite3.SQLITE_PRAGMA:
            fine = (first or "").casefold() in PRAGMAS
        else:
            fine = self.writable and action in WRITE
        return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY

    def _explain(self, error: BaseException) -> ToolResult:
        text = str(error)
        if "interrupted" in text:
            return ToolResult(
                f"Error: the statement took longer than {self.seconds:g} s.", error="timeout"
            )
        if re.search("not authorized|authorization denied|prohibited", text):
            allowed = (
                "queries and changes of tables"
                if self.writable
                else "queries; the database is read-only"
            )
            return ToolResult(f"Error: {text}. Allowed are {allowed}.", error="refused")
        return ToolResult(f"Error: {text or type(error).__name__}", error="exception")


def open_database(
    source: str,
    folder: Path | None,
    memory_mb: int,
    within: Path | None = None,
    *,
    copied: bool = True,
) -> sqlite3.Connection:
    """Return the database of a script or a file; empty if `source` is "".

    A private copy in memory, or with `copied` false a database file itself, read-only.
    `within`: the folder that must contain the file, links resolved; None: any. Raises EnvError if it cannot be made:
    the row is at fault, not the model.
    """
    is_file = source.endswith((".db", ".sqlite", ".sqlite3", ".sql")) and "\n" not in source
    path = _file(source, folder, within) if is_file else None
    whole = path is not None and path.suffix != ".sql" and not copied
    connection = _connect(_in_place(path) if whole and path is not None else "file::memory:")
    ends = time.thread_time() + OPENING
    try:
        bound = f"cache_size=-{memory_mb * 1024}" if whole else f"max_page_count={memory_mb * 256}"
        connection.execute(f"PRAGMA {bound}")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 8 * LONGEST)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, PATTERN)
        for name, strip in STRIPS.items():
            connection.create_function(name, 2, partial(_strip, strip), deterministic=True)
        connection.set_progress_handler(lambda: int(time.thread_time() > ends), STEPS)
        for name in FORMATS:
            connection.create_function(name, -1, _format, deterministic=True)
        if whole:
            connection.execute(
                "SELECT count(*) FROM sqlite_master"
            )  # fails now if it is not a database
        elif path is not None:
            _copy(path, connection)
        elif source:
            connection.executescript(source)
        connection.set_progress_handler(None, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
    except (sqlite3.Error, OSError, UnicodeError, ValueError) as error:
        connection.close()
        hint = "Raise memory_mb of the tool." if "full" in str(error) else ""
        raise EnvError(f"The database of the row cannot be made: {error}", hint=hint) from error
    return connection


def _connect(address: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None)
    except sqlite3.Error as error:
        raise EnvError(f"The database of the row cannot be opened: {error}") from error


def _in_place(path: Path) -> str:
    """Return a file's address for reading: nothing is written beside it, unless another process
    writes to it (its WAL).
    """
    wal = path.with_name(f"{path.name}-wal")
    return f"{path.as_uri()}?mode=ro" + (
        "" if wal.is_file() and wal.stat().st_size else "&immutable=1"
    )


def _strip(strip: Callable[[str, str], str], value: Any, characters: Any) -> str | None:
    """Compute trim(X, Y): SQLite's own compares each character of X with each of Y, seconds for one call."""
    texts = [
        part.decode("utf-8", "replace") if isinstance(part, bytes) else part
        for part in (value, characters)
    ]
    return None if None in texts else strip(str(texts[0]), "".join(set(str(texts[1]))))


def _format(template: Any = None, *values: Any) -> Any:
    """Compute printf(FORMAT, ...): SQLite's own counts up to each width and precision, seconds for a large one.

    Raises OverflowError, which SQLite reports as too large a text, if they are longer than LONGEST together.
    """
    given, total, at = list(values), 0, 0
    if isinstance(template, bytes):
        template = template.decode("utf-8", "replace")
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as plain:
        for _, width, precision, _, conversion in _FIELD.findall(str(template or "")):
            for size in (width, precision):
                if size == "*" and at < len(given):
                    given[at] = plain.execute(
                        "SELECT CAST(? AS INTEGER)", given[at : at + 1]
                    ).fetchone()[0]
                    size, at = str(given[at] or 0), at + 1
                total += abs(int(size)) if size.lstrip("-").isdecimal() else 0
            at += conversion not in ("%", "")
        if total > LONGEST:
            raise OverflowError
        return plain.execute(
            f"SELECT printf({', '.join('?' * (len(given) + 1))})", (template, *given)
        ).fetchone()[0]


def _file(source: str, folder: Path | None, within: Path | None) -> Path:
    """Return the file named by a row or the setting, links resolved. Raises EnvError if it is missing or lies
    elsewhere.
    """
    path = ((folder or Path()) / source).resolve()
    if within is not None and not path.is_relative_to(within.resolve()):
        raise EnvError(
            f"The row's database {source} lies outside of its pack.",
            hint="Put it into the pack's folder, or let rows name any file: {name: sql, config: {anywhere: true}}.",
        )
    if not path.is_file():
        raise EnvError(f"The database {path} does not exist.")
    return path


def _copy(path: Path, connection: sqlite3.Connection) -> None:
    """Fills a connection from a script or a database file."""
    if path.suffix == ".sql":
        connection.executescript(path.read_text(encoding="utf-8"))
        return
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as original:
        original.backup(connection)


def table(cursor: sqlite3.Cursor, rows: int) -> str:
    """Return rows as text: a header, one line per row, values between bars; without rows, the number changed."""
    if cursor.description is None:
        return f"OK, {max(cursor.rowcount, 0)} rows changed."
    found = cursor.fetchmany(rows + 1)
    lines = [" | ".join(str(column[0]) for column in cursor.description)]
    lines += [" | ".join(_show(value) for value in row) for row in found[:rows]]
    if not found:
        lines.append("(no rows)")
    if len(found) > rows:
        lines.append(f"[more than {rows} rows; narrow the query]")
    return "\n".join(lines)


def _show(value: Any) -> str:
    if value is None:
        return "NULL"
    text = f"x'{value[:32].hex()}'" if isinstance(value, bytes) else str(value)
    return text if len(text) <= WIDTH else text[:WIDTH] + "…"


TOOL = SqlTool()
