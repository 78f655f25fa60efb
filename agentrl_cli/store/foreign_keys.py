"""The migration that adds foreign keys for groups, parents, tasks and tokenizers.

SQLite adds a constraint only by a rebuild of its table. Ids and rowids stay, so other tables are not touched. A row
of an old store may refer to a missing one: a missing group, task or tokenizer is added by its name; a missing parent
becomes NULL and is listed in `logs`. No row is dropped.
"""

from __future__ import annotations

import sqlite3
import time

from agentrl_cli.errors import StoreError

_REBUILT: dict[str, tuple[tuple[str, str], ...]] = {
    "runs": (
        ("tokenizer TEXT NOT NULL", "tokenizer TEXT REFERENCES tokenizers(hash)"),
        ("parent_id TEXT", "parent_id TEXT REFERENCES runs(id) ON DELETE SET NULL"),
    ),
    "groups": (
        (") STRICT", ", pack TEXT, FOREIGN KEY (pack, task_id) REFERENCES tasks(pack, id)) STRICT"),
    ),
    "episodes": (
        ("tokenizer TEXT NOT NULL", "tokenizer TEXT REFERENCES tokenizers(hash)"),
        ("parent_id TEXT", "parent_id TEXT REFERENCES episodes(id) ON DELETE SET NULL"),
        (
            ") STRICT",
            ", FOREIGN KEY (group_id, run_id) REFERENCES groups(id, run_id),"
            " FOREIGN KEY (pack, task_id) REFERENCES tasks(pack, id)) STRICT",
        ),
    ),
}
"""Table → (text of its definition, new text)."""

_NULLED = (
    ("runs", "parent_id", "parent_id NOT IN (SELECT id FROM runs)"),
    ("episodes", "parent_id", "parent_id NOT IN (SELECT id FROM episodes)"),
)
"""(table, column, condition of the rows whose column refers to nothing)."""

_SETTLE = """
UPDATE runs SET tokenizer = NULL WHERE tokenizer = '';
UPDATE episodes SET tokenizer = NULL WHERE tokenizer = '';
INSERT OR IGNORE INTO tokenizers
    SELECT tokenizer, x'', '', '{}' FROM (SELECT tokenizer FROM runs UNION SELECT tokenizer FROM episodes)
    WHERE tokenizer IS NOT NULL;
INSERT OR IGNORE INTO tasks (pack, id, family, split, prompt, data)
    SELECT pack, task_id, family, split, '[]', 'null' FROM episodes ORDER BY rowid;
INSERT OR IGNORE INTO groups (id, run_id, task_id, step, at, why)
    SELECT group_id, run_id, task_id, step, started, '' FROM episodes WHERE group_id IS NOT NULL ORDER BY rowid;
UPDATE groups SET pack = (SELECT e.pack FROM episodes e WHERE e.group_id = groups.id AND +e.run_id IS groups.run_id
    AND +e.task_id = groups.task_id LIMIT 1);
DROP INDEX groups_id;
CREATE UNIQUE INDEX groups_id ON groups (id, run_id);
CREATE UNIQUE INDEX groups_alone ON groups (id) WHERE run_id IS NULL
"""


def add_foreign_keys(conn: sqlite3.Connection) -> None:
    """Rebuild the tables with their foreign keys, inside a transaction with `PRAGMA foreign_keys=OFF`."""
    users = "SELECT type, name, sql FROM sqlite_schema WHERE type IN ('view', 'trigger') ORDER BY type='trigger', rowid"
    others = conn.execute(users).fetchall()
    for kind, name, _ in reversed(
        others
    ):  # a table cannot be renamed while one of them names a missing one
        conn.execute(f'DROP {kind} "{name}"')
    for table, changes in _REBUILT.items():
        _rebuild(conn, table, changes)
    for statement in _SETTLE.split(";\n"):
        conn.execute(statement)
    for _, _, sql in others:
        conn.execute(sql)
    notes = [note for place in _NULLED if (note := _set_null(conn, *place))]
    for table in _REBUILT:
        left = conn.execute(f"PRAGMA foreign_key_check({table})").fetchall()
        notes += [
            f"{table}: row {rowid} refers to a missing row of {parent}; it was kept"
            for _, rowid, parent, _ in left
        ]
    conn.executemany(
        "INSERT INTO logs (run_id, at, level, text) VALUES (NULL, ?, 'warn', ?)",
        [(time.time(), note) for note in notes],
    )


def _rebuild(conn: sqlite3.Connection, table: str, changes: tuple[tuple[str, str], ...]) -> None:
    definition = str(
        conn.execute("SELECT sql FROM sqlite_schema WHERE name=?", (table,)).fetchone()[0]
    )
    for old, new in changes:
        if definition.count(old) != 1:
            raise StoreError(
                f"The table {table} of the store was changed by another program: {definition}.",
                hint="Restore a backup, or name another store with --db.",
            )
        definition = definition.replace(old, new)
    info = conn.execute(f"PRAGMA table_info({table})").fetchall()
    names = [str(row[1]) for row in info]
    if not any(row[2] == "INTEGER" and row[5] for row in info):
        names.insert(0, "rowid")
    extra = "type='index' AND tbl_name=? AND sql IS NOT NULL"
    indexes = conn.execute(f"SELECT sql FROM sqlite_schema WHERE {extra}", (table,)).fetchall()
    columns, before = (
        ",".join(f'"{name}"' for name in names),
        conn.execute(f"SELECT count(*) FROM {table}").fetchone(),
    )
    conn.execute("CREATE TABLE agentrl_rebuilt " + definition[definition.index("(") :])
    conn.execute(
        f"INSERT INTO agentrl_rebuilt ({columns}) SELECT {columns} FROM {table} ORDER BY rowid"
    )
    if conn.execute("SELECT count(*) FROM agentrl_rebuilt").fetchone() != before:
        raise StoreError(
            f"The table {table} of the store could not be copied.",
            hint="Try again; nothing was changed.",
        )
    conn.execute(f"DROP TABLE {table}")
    conn.execute(f"ALTER TABLE agentrl_rebuilt RENAME TO {table}")
    for (sql,) in indexes:
        conn.execute(sql)


def _set_null(conn: sqlite3.Connection, table: str, column: str, where: str) -> str:
    """Set references to nothing to NULL. Returns a note of the old values; empty without any."""
    found = conn.execute(
        f"SELECT {column}, count(*) FROM {table} WHERE {where} GROUP BY 1 ORDER BY 1"
    ).fetchall()
    conn.execute(f"UPDATE {table} SET {column} = NULL WHERE {where}")
    missing = ", ".join(f"{value} ({count})" for value, count in found)
    return (
        f"{table}.{column} was set to NULL where the row it names is missing: {missing}"
        if found
        else ""
    )
