"""Every table and column of a store is described."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.store import Store
from agentrl_cli.store.file import Part
from agentrl_cli.store.queries import schema
from agentrl_cli.store.schema_docs import described


def test_every_table_and_column_is_described(tmp_path: Path) -> None:
    Store.open(tmp_path / "a.db").close()
    tables = {name: [column for column, _ in columns] for _, name, columns in schema(tmp_path / "a.db")}
    texts = described()
    assert {name: list(columns) for name, (_, columns) in texts.items()} == tables
    assert [name for name, (text, columns) in texts.items() if not text or not all(columns.values())] == []


def test_every_part_is_on_the_page() -> None:

    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
    with Store.open(":memory:") as store:
        parts = [name for name, part in vars(store).items() if isinstance(part, Part)]
    assert parts and [name for name in parts if f"`store.{name}`" not in page] == []
