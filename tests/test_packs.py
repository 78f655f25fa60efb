"""The packs that ship: their data is what their generators make, and every row has what its pack declares."""

from __future__ import annotations

import pytest

from agentrl_cli.paths import pack_names
from agentrl_cli.tasks import load_pack

FIELDS = {
    "calc-task": ("expression", "answer"),
    "code-task": ("kind", "answer"),
    "echo-task": ("answer",),
    "file-task": ("setup", "path", "wrong", "right", "tests"),
    "guess-task": ("low", "high", "secret"),
    "parallel-task": ("first", "second", "prices", "stocks", "answer"),
    "search-task": ("search", "answer"),
    "sql-task": ("database", "query", "answer"),
}


@pytest.mark.parametrize("name", pack_names())
def test_data_is_what_the_generator_makes(name: str) -> None:
    pack = load_pack(name)
    built = {split: rows for split, rows in pack.module.build().items() if rows}
    assert {"train", "test"} <= set(built)
    for split, rows in built.items():
        assert [task.data["id"] for task in pack.tasks(split)] == [row["id"] for row in rows]
        assert [task.prompt[-1]["content"] for task in pack.tasks(split)] == [row["prompt"] for row in rows]


def test_fields_are_declared() -> None:
    assert {name: load_pack(name).row for name in pack_names()} == FIELDS
