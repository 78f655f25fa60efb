"""Candidates of a prompt optimisation: their texts, where they came from, and their scores."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl_cli.store.codec import dumps, loads
from agentrl_cli.store.file import PluginPart
from agentrl_cli.store.rows import build

TABLE = """
CREATE TABLE IF NOT EXISTS prompts (
    n INTEGER PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, id TEXT NOT NULL,
    parent_id TEXT, origin TEXT NOT NULL, parts TEXT NOT NULL, scores TEXT NOT NULL, at REAL NOT NULL,
    UNIQUE (run_id, id), FOREIGN KEY (run_id, parent_id) REFERENCES prompts(run_id, id)
) STRICT;
"""
"""A store that an early version wrote has it without the foreign key for parents."""
_GET = "SELECT run_id, id, parent_id, origin, parts, scores, at FROM prompts"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One candidate."""

    run_id: str
    id: str
    """Hash of its texts: equal texts have equal ids."""
    parent_id: str | None
    origin: str
    """seed, gepa or apo."""
    parts: Mapping[str, str]
    scores: Mapping[str, float] = field(default_factory=dict)
    """`validation`, `test`: means over the tasks, once it was evaluated on all; `validation_episodes`,
    `test_episodes`: episodes that the search had spent by then."""
    at: float = 0.0


class Prompts(PluginPart):
    """Writing and reading candidates."""

    table = "prompts"

    def add(self, row: PromptRow) -> None:
        """Store a candidate; one that is known stays as it is."""
        with self.file.transaction() as conn:
            conn.execute(
                "INSERT OR IGNORE INTO prompts (run_id, id, parent_id, origin, parts, scores, at)"
                " VALUES (?,?,?,?,?,?,?)",
                (
                    row.run_id,
                    row.id,
                    row.parent_id,
                    row.origin,
                    dumps(dict(row.parts)),
                    "{}",
                    time.time(),
                ),
            )

    def score(self, run_id: str, id: str, name: str, value: float, spent: int) -> None:
        """Set one of a candidate's scores, with the episodes that the search has spent."""
        with self.file.transaction() as conn:
            conn.execute(
                "UPDATE prompts SET scores=json_set(scores, '$.' || ?1, ?2, '$.' || ?1 || '_episodes', ?3)"
                " WHERE run_id=?4 AND id=?5",
                (name, value, spent, run_id, id),
            )

    def all(self, run_id: str) -> list[PromptRow]:
        """Return the candidates of a run, oldest first."""
        if not self.exists:
            return []
        rows = self.file.select(f"{_GET} WHERE run_id=? ORDER BY rowid", (run_id,))
        return [build(PromptRow, row, parts=loads(row[4]), scores=loads(row[5])) for row in rows]
