"""Reading a store of an older schema as it is: temporary views add the tables and columns that it lacks.

A reader never migrates: a process of an older agentrl may be writing the file. The views hide the tables by their
names, with each missing column as its default, and a missing table as an empty one.
"""

from __future__ import annotations

import sqlite3

from agentrl_cli.store.migration import migrate
from agentrl_cli.store.places import PLACES, add_functions
from agentrl_cli.store.schema import MIGRATIONS, NOT_GRADED, SCHEMA_VERSION

_VALUES = {place: ("m009_relative_paths", value) for place, value in PLACES.items()} | {
    ("runs", "claim"): ("m008_claim", "iif(status='running', kind, '')"),
    ("episodes", "reward"): ("m010_ungraded", f"iif({NOT_GRADED}, NULL, reward)"),
}
"""(table, column) → (the migration that computes it, its value before that, in SQL)."""


def add_views(conn: sqlite3.Connection, version: int) -> None:
    """Make a reading connection to a store of schema `version` show the schema of this agentrl."""
    pending = {name for name, _ in MIGRATIONS[version:]}
    fresh = sqlite3.connect(":memory:", isolation_level=None)
    try:
        migrate(fresh)
        conn.execute("PRAGMA query_only=OFF")
        conn.execute("PRAGMA temp_store=MEMORY")
        add_functions(conn)
        for (table,) in _select(
            fresh, "SELECT name FROM sqlite_schema WHERE type='table' AND name GLOB '[a-z]*'"
        ):
            _add_view(conn, fresh, table, pending)
        for name, sql in _select(
            fresh, "SELECT name, sql FROM sqlite_schema WHERE type='view' ORDER BY rowid"
        ):
            conn.execute(sql.replace(f"CREATE VIEW {name}", f"CREATE TEMP VIEW {name}", 1))
    finally:
        conn.execute("PRAGMA query_only=ON")
        fresh.close()


def drop_views(conn: sqlite3.Connection) -> None:
    """Drop the views once another process has migrated the file; nothing else has any."""
    found = _select(
        conn, "SELECT name FROM sqlite_temp_schema WHERE type='view' ORDER BY rowid DESC"
    )
    if not found or int(conn.execute("PRAGMA main.user_version").fetchone()[0]) < SCHEMA_VERSION:
        return
    conn.execute("PRAGMA query_only=OFF")
    for (name,) in found:
        conn.execute(f'DROP VIEW temp."{name}"')
    conn.execute("PRAGMA query_only=ON")


def _add_view(
    conn: sqlite3.Connection, fresh: sqlite3.Connection, table: str, pending: set[str]
) -> None:
    """Add a view for a table that this version has in another form."""
    wanted = _select(fresh, f'SELECT name, dflt_value FROM pragma_table_info("{table}")')
    known = {
        row[0] for row in _select(conn, f'SELECT name FROM pragma_table_info("{table}", "main")')
    }
    values = {
        name: value
        for (of, name), (migration, value) in _VALUES.items()
        if of == table and migration in pending
    }
    if known >= {name for name, _ in wanted} and not values:
        return
    found = {name: f"{table}.{name}" for name in known} | values
    columns = [f"{found.get(name) or default or 'NULL'} AS {name}" for name, default in wanted]
    whole = (
        bool(_select(fresh, f'SELECT 1 FROM pragma_table_list("{table}") WHERE wr'))
        or "rowid" in known
    )
    if known and not whole:
        columns.insert(0, "rowid AS rowid")
    source = f"main.{table}" if known else "(SELECT 1) WHERE 0"
    conn.execute(f"CREATE TEMP VIEW {table} AS SELECT {', '.join(columns)} FROM {source}")


def _select(conn: sqlite3.Connection, sql: str) -> list[tuple[str, ...]]:
    return conn.execute(sql).fetchall()
