"""Tables of plugins: the core's schema has none of them, and a store gets one when its plugin first writes to it.

A plugin offers the statements under `tables`. They say IF NOT EXISTS: a store of an earlier version has the table
already, and two processes may add it at the same time.
"""

from __future__ import annotations

from agentrl_cli.registry import resolve
from agentrl_cli.store.file import Part, StoreFile
from agentrl_cli.store.schema import statements


class PluginPart(Part):
    """A part of a store whose table a plugin brings."""

    table = ""
    """Its name, under which the plugin offers the statements that make it."""

    def __init__(self, file: StoreFile) -> None:
        """Add the table to a store that lacks it, unless it is open for reading only."""
        super().__init__(file)
        if not file.readonly and not self.exists:
            script: str = resolve("tables", {}, self.table)
            with file.transaction() as conn:
                for statement in statements(script):
                    conn.execute(statement)

    @property
    def exists(self) -> bool:
        """Whether the store has the table; a reader of one without it finds no rows."""
        found = "SELECT 1 FROM sqlite_schema WHERE type='table' AND name=?"
        return bool(self.file.select(found, (self.table,), settled=False))
