"""The effects of a call that is run again: files of the sandbox session and tables of a database, before and after."""

from __future__ import annotations

import difflib
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing

from agentrl_cli.envs.tool_env import Env, ToolEnv
from agentrl_cli.hooks.threads import in_thread

MOST = 200
"""Files that are looked at, and rows of a table."""
LARGEST = 1 << 16
"""Bytes of a file that is read; of a larger one only its size is compared."""
SHOWN = 20
"""Lines of a difference that are kept."""

World = Mapping[str, list[str]]
"""Files and tables by name, as lines."""


async def read_world(env: Env) -> World:
    """Return the files and tables that an environment holds now; none of one that keeps its state elsewhere."""
    found: dict[str, list[str]] = {}
    if not isinstance(env, ToolEnv):
        return found
    if env.context.session_factory is not None:
        session = await env.context.session()
        for entry in [one for one in await session.list() if one.kind == "file"][:MOST]:
            if entry.size > LARGEST:
                found[entry.path] = [f"{entry.size:,} bytes"]
            else:
                text = (await session.read(entry.path)).decode("utf-8", "replace")
                found[entry.path] = text.splitlines()
    for value in env.context.state.values():
        if isinstance(value, sqlite3.Connection):
            found |= await in_thread(read_tables, value)
    return found


def read_tables(connection: sqlite3.Connection) -> World:
    """Return the first rows of every table."""
    names = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    found: dict[str, list[str]] = {}
    for (name,) in connection.execute(names).fetchall():
        quoted = '"' + name.replace('"', '""') + '"'
        with closing(connection.execute(f"SELECT * FROM {quoted} LIMIT {MOST}")) as rows:
            found[f"table {name}"] = [" | ".join(map(str, row)) for row in rows]
    return found


def compare_worlds(before: World, after: World) -> Iterator[str]:
    """Yield `new NAME`, `deleted NAME` or `changed NAME`, each with the lines that differ."""
    for name in sorted({**before, **after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        yield f"{'new' if old is None else 'deleted' if new is None else 'changed'} {name}"
        lines = difflib.unified_diff(old or [], new or [], lineterm="", n=0)
        kept = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        yield from kept[:SHOWN]
        if len(kept) > SHOWN:
            yield f"… {len(kept) - SHOWN} more lines differ"
