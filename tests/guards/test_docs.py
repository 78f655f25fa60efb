"""Generated pages are current, every command is in them, the pictures are there, and mutations their lines."""

import re
from pathlib import Path

import pytest

from agentrl_cli.registry import load_file
from agentrl_cli.registry.plugins import offers
from agentrl_cli.store import Store
from agentrl_cli.store.file import Part, PluginPart
from agentrl_cli.store.queries import schema
from docs.store_columns import described

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


@pytest.mark.parametrize("name", ["cli", "config", "glossary", "store", "troubleshooting"])
def test_generated_pages_are_current(name: str) -> None:
    maker = DOCS / f"make_{name}.py"
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == load_file(maker).render(), (
        f"run: python docs/{maker.name}"
    )


def test_the_chinese_page_of_the_rules_is_current() -> None:
    maker = load_file(DOCS / "make_troubleshooting.py")
    assert (DOCS / "zh" / "troubleshooting.md").read_text(
        encoding="utf-8"
    ) == maker.render_chinese()


def test_every_table_and_column_is_described(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        for table in offers("tables"):
            type(table, (PluginPart,), {"table": table})(store)
    tables = {
        name: [column for column, _ in columns] for _, name, columns in schema(tmp_path / "a.db")
    }
    texts = described()
    assert {name: list(columns) for name, (_, columns) in texts.items()} == tables
    assert [
        name for name, (text, columns) in texts.items() if not text or not all(columns.values())
    ] == []


def test_every_part_of_the_store_is_on_its_page() -> None:
    page = (DOCS / "store.md").read_text(encoding="utf-8")
    with Store.open(":memory:") as store:
        parts = [name for name, part in vars(store).items() if isinstance(part, Part)]
    assert parts and [name for name in parts if f"`store.{name}`" not in page] == []


def test_the_table_of_libraries_names_files_that_exist() -> None:
    page = (DOCS / "libraries.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:agentrl_cli|sandbox|tests)/[^`]*)`", page)
    assert len(named) > 20 and [name for name in named if not (DOCS.parent / name).exists()] == []


def test_every_mutation_has_its_line_and_its_tests() -> None:
    module = load_file(DOCS.parent / "benchmarks" / "mutations.py")
    for one in module.MUTATIONS:
        assert module.place_of(one, DOCS.parent).is_file()
        assert [
            name for name in one.tests.split() if not (DOCS.parent / "tests" / name).exists()
        ] == []


def test_every_picture_is_there_and_shown_and_asks_for_nothing() -> None:
    page = (DOCS / "screens.md").read_text("utf-8")
    names = set(re.findall(r"\((screens/[\w-]+\.svg)\)", page))
    assert names == {f"screens/{name}.svg" for name in load_file(DOCS / "make_screens.py").NAMES}
    for name in (*names, "replay.svg"):
        text = (DOCS / name).read_text("utf-8")
        assert text.startswith("<svg") and not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)|@font-face|href", text
        )
