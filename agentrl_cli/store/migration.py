"""Migrating a store: in one transaction, by a writer, and never under a process of an older agentrl.

A store of an older schema is read as it is: temporary views add the tables and columns that it lacks. A reader never
migrates: a process of an older agentrl may be writing the file. The views hide the tables by their names, with each
missing column as its default, and a missing table as an empty one.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from agentrl_cli.errors import StoreError
from agentrl_cli.store.codec import dumps
from agentrl_cli.store.holder import Holder
from agentrl_cli.store.places import PLACES, add_functions
from agentrl_cli.store.schema import (
    APPLICATION_ID,
    FLAGS,
    MIGRATION_SET,
    MIGRATIONS,
    NOT_GRADED,
    SCHEMA_VERSION,
    Migration,
    statements,
)
from agentrl_cli.store.sqlite_errors import MIGRATION, explain

PROGRESS = 20_000_000
"""Instructions of SQLite's machine between two lines of progress: some seconds."""

_LOG = logging.getLogger("agentrl.store")


def bring_up(conn: sqlite3.Connection, path: Path | str) -> None:
    """Migrate a store of an older schema, with a line before, after and in between.

    Raises StoreError if a process of an older agentrl works on a run: it could not write a migrated store.
    """
    with conn:
        conn.execute("BEGIN IMMEDIATE")
        version = int(conn.execute("PRAGMA user_version").fetchone()[0])
        if version < SCHEMA_VERSION:
            _require_free(conn, path)
            about = asdict(Holder.of()) | {"from": version, "to": SCHEMA_VERSION}
            conn.execute(
                "INSERT INTO events (run_id, at, kind, data) VALUES (NULL, ?, ?, ?)",
                (time.time(), MIGRATION, dumps(about)),
            )
    if version >= SCHEMA_VERSION:  # another process has done it meanwhile
        return
    size = int(conn.execute("PRAGMA page_count").fetchone()[0]) * int(
        conn.execute("PRAGMA page_size").fetchone()[0]
    )
    what = f"the store {path} ({size / 1e6:.0f} MB) from schema {version} to {SCHEMA_VERSION}"
    _LOG.warning("Bringing %s; nothing is lost if this is interrupted …", what)
    passed = 0

    def tick() -> None:
        nonlocal passed
        passed += PROGRESS
        _LOG.warning(
            "… still bringing it to schema %d (%d million instructions)",
            SCHEMA_VERSION,
            passed // 10**6,
        )

    conn.set_progress_handler(tick, PROGRESS)
    try:
        migrate(conn, check=lambda: _require_free(conn, path))
    finally:
        conn.set_progress_handler(None, 0)
    _LOG.warning("Brought %s.", what)


def migrate(
    conn: sqlite3.Connection,
    upto: tuple[Migration, ...] = MIGRATIONS,
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Apply pending migrations in one transaction: readers see the old schema or the new one, never a mix.

    `check` is called in it before anything changes, and may raise. Turns foreign keys off, for good: a table that is
    rebuilt would take the rows that refer to it with it.
    """
    conn.execute("PRAGMA foreign_keys=OFF")
    conn.execute("BEGIN IMMEDIATE")
    try:
        check()
        empty = conn.execute("SELECT 1 FROM sqlite_schema").fetchone() is None
        bring = _create if empty and upto is MIGRATIONS else _apply
        bring(conn, upto)
        conn.execute(f"PRAGMA application_id={APPLICATION_ID}")
        conn.execute(f"PRAGMA user_version={len(upto)}")
        conn.execute("COMMIT")
    except BaseException as error:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        if isinstance(error, sqlite3.DatabaseError) and explain(error, "") is None:
            raise StoreError(
                f"The store cannot be brought to this version: {error}.",
                hint="Nothing was changed. Remove what another program added to the file, or name another with --db.",
            ) from error
        raise


def _create(conn: sqlite3.Connection, upto: tuple[Migration, ...]) -> None:
    """Make the tables of a new file at once, and the same record of the migrations that `_apply` leaves."""
    for statement in statements(Path(__file__).with_name("schema.sql").read_text("utf-8")):
        conn.execute(statement)
    conn.executemany(
        "INSERT INTO _sqlite_migrations (migration_set, name, applied_at)"
        " VALUES (?, ?, strftime('%Y-%m-%d %H:%M:%f+00:00', 'now'))",
        [(MIGRATION_SET, name) for name, _ in upto],
    )


def _apply(conn: sqlite3.Connection, upto: tuple[Migration, ...]) -> None:
    """Apply the migrations that a file lacks."""
    # Here: importing it costs 0.15 s, and most processes never need it.
    from sqlite_utils import Database, Migrations

    migrations = Migrations(MIGRATION_SET)
    for name, change in upto:

        def apply(
            db: Database, change: str | Callable[[sqlite3.Connection], None] = change
        ) -> None:
            if callable(change):
                change(db.conn)
                return
            for statement in statements(change):
                db.execute(statement)

        migrations(name=name)(apply)
    migrations.apply(Database(conn))


def _require_free(conn: sqlite3.Connection, path: Path | str) -> None:
    claims = any(row[1] == "claim" for row in conn.execute("PRAGMA table_info(runs)"))
    which = "claim, heartbeat, pid, pid_started, boot, host FROM runs WHERE claim<>''"
    if not claims:  # before claims, only the status shows that a process works on a run
        which = "kind, heartbeat, pid, '', '', host FROM runs WHERE status='running'"
    for name, doing, heartbeat, *holder in conn.execute(f"SELECT name, {which}"):
        if Holder(*holder).lives(heartbeat):
            raise StoreError(
                f"An older agentrl works on the run {name} in {path} ({doing}, process {holder[0]} on {holder[3]}),"
                " and this one would migrate the store.",
                hint="Wait until that ends, or stop it. Reading commands (ls, show, replay, watch) work meanwhile.",
            )


_VALUES = {place: ("m009_relative_paths", value) for place, value in PLACES.items()} | {
    ("runs", "claim"): ("m008_claim", "iif(status='running', kind, '')"),
    ("episodes", "reward"): ("m010_ungraded", f"iif({NOT_GRADED}, NULL, reward)"),
    ("episodes", "flags"): ("m021_no_tools_offered", FLAGS),
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
        for (table,) in _select_rows(
            fresh, "SELECT name FROM sqlite_schema WHERE type='table' AND name GLOB '[a-z]*'"
        ):
            _add_view(conn, fresh, table, pending)
        for name, sql in _select_rows(
            fresh, "SELECT name, sql FROM sqlite_schema WHERE type='view' ORDER BY rowid"
        ):
            conn.execute(sql.replace(f"CREATE VIEW {name}", f"CREATE TEMP VIEW {name}", 1))
    finally:
        conn.execute("PRAGMA query_only=ON")
        fresh.close()


def drop_views(conn: sqlite3.Connection) -> None:
    """Drop the views once another process has migrated the file; nothing else has any."""
    found = _select_rows(
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
    wanted = _select_rows(fresh, f'SELECT name, dflt_value FROM pragma_table_info("{table}")')
    known = {
        row[0]
        for row in _select_rows(conn, f'SELECT name FROM pragma_table_info("{table}", "main")')
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
        bool(_select_rows(fresh, f'SELECT 1 FROM pragma_table_list("{table}") WHERE wr'))
        or "rowid" in known
    )
    if known and not whole:
        columns.insert(0, "rowid AS rowid")
    source = f"main.{table}" if known else "(SELECT 1) WHERE 0"
    conn.execute(f"CREATE TEMP VIEW {table} AS SELECT {', '.join(columns)} FROM {source}")


def _select_rows(conn: sqlite3.Connection, sql: str) -> list[tuple[str, ...]]:
    return conn.execute(sql).fetchall()
