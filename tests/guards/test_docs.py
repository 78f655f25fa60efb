"""Generated pages are current, every command is in them, the pictures are there, and mutations their lines."""

import asyncio
import re
import runpy
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx2
import pytest
import torch
import yaml

import agentrl_cli.policies.load  # noqa: F401 - before calls are recorded, which makes it dear
from agentrl_cli.agents.gateway.http import _READER
from agentrl_cli.commands import main
from agentrl_cli.registry import load_file
from agentrl_cli.registry.plugins import offers
from agentrl_cli.store import Store
from agentrl_cli.store.file import Part, PluginPart
from agentrl_cli.store.queries import schema
from docs.make_architecture import PACKAGE, PAGE, WALKS, page
from docs.store_columns import described
from tests.helpers.gateway import MODEL, world_of
from tests.helpers.processes import ROOT

DOCS = ROOT / "docs"


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
    assert len(named) > 20 and [name for name in named if not (ROOT / name).exists()] == []


def test_every_mutation_has_its_line_and_its_tests() -> None:
    module = load_file(ROOT / "benchmarks" / "mutations.py")
    for one in module.MUTATIONS:
        assert module.place_of(one, ROOT).is_file()
        assert [name for name in one.tests.split() if not (ROOT / "tests" / name).exists()] == []


def test_every_picture_is_there_and_shown_and_asks_for_nothing() -> None:
    page = (DOCS / "screens.md").read_text("utf-8")
    names = set(re.findall(r"\((screens/[\w-]+\.svg)\)", page))
    assert names == {f"screens/{name}.svg" for name in load_file(DOCS / "make_screens.py").NAMES}
    for name in (*names, "replay.svg"):
        text = (DOCS / name).read_text("utf-8")
        assert text.startswith("<svg") and not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)|@font-face|href", text
        )


# --- the README, its translations and the pages that run ---

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_script_runs_and_the_agent_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 32
    for long, short in (
        ('"steps": 20', '"steps": 4'),
        ("limits = {", 'limits = {"group_size": 4, "prompts_per_step": 4, '),
    ):
        assert long in code
        code = code.replace(long, short)
    (tmp_path / "script.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("script.py", run_name="__main__")
    said = capsys.readouterr().out
    assert "library-grpo finished in" in said
    found = re.findall(r"^\d+ reward (\d\.\d\d) calls \d\.\d\d$", said, re.MULTILINE)
    rewards = [float(reward) for reward in found]
    assert len(rewards) == 4
    assert sum(rewards[-2:]) > sum(rewards[:2])
    assert (tmp_path / "runs" / "agentrl.db").is_file()


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/index.md", "docs/zh/index.md"])
def test_the_clone_comes_first_until_the_package_is_published(page: str) -> None:
    """The first command of each page ended in `No matching distribution found`."""
    block = (ROOT / page).read_text(encoding="utf-8").split("```")[1].strip().splitlines()
    assert block[0].startswith("git clone ") and block[1].startswith("make demo")
    assert not any("pip install" in line for line in block)


def test_every_text_names_the_package_and_extras_that_it_has() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    texts = [ROOT / "README.md", ROOT / "README.zh.md"]
    for folder, kind in (("agentrl_cli", "*.py"), ("docs", "*.md"), ("examples", "*.py")):
        texts += sorted((ROOT / folder).rglob(kind))
    for text in texts:
        named = re.findall(
            r"pip install (?:-U )?'?(agentrl[\w-]*)(?:\[([\w,-]+)\])?", text.read_text()
        )
        for package, some in named:
            assert package == "agentrl-cli", text
            assert {*filter(None, some.split(","))} <= extras.keys(), (text, some)


def test_the_map_names_what_is_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = page.split("## Where things are")[1].split("```")[1]
    for name in re.findall(
        r"^\s*((?:[a-z_]+(?:/|\.py)?(?:[a-z.-]+/)?[ ]?)+)  ", block, re.MULTILINE
    ):
        for part in name.split():
            places = (part, f"agentrl_cli/{part}", f"agentrl_cli/{part}.py")
            assert any((ROOT / place).exists() for place in places), part


def test_the_translation_shows_the_same_commands() -> None:
    def commands(text: str) -> list[str]:
        return re.findall(r"^(?:agentrl|make) [^#\n]*", text, re.MULTILINE)

    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    assert [c.split() for c in commands(README)] == [c.split() for c in commands(chinese)]


def test_translated_pages_show_the_commands_of_the_pages_that_run_in_tests() -> None:
    def blocks(page: Path) -> list[str]:
        return re.findall(
            r"```(?:console|yaml|python)\n.*?```", page.read_text(encoding="utf-8"), re.DOTALL
        )

    def named(page: Path) -> set[str]:
        return set(re.findall(r"`agentrl [^`\n]*`", page.read_text(encoding="utf-8")))

    for name in ("tutorial.md", "your-own-task.md", "real-run.md"):
        assert blocks(DOCS / "zh" / name) == blocks(DOCS / name) != [], name
        assert named(DOCS / "zh" / name) == named(DOCS / name), name


# --- docs/architecture.md: its walks are those of a real run ---

SETTINGS = {
    **{"seed": 3, "deterministic": True, "task": {"packs": ["calc-task"]}},
    "model": {"name": "tiny", "device": "cpu", "dtype": "float32"},
    "rollout": {
        **{"group_size": 4, "prompts_per_step": 2, "concurrency": 8},
        **{"max_turns": 3, "max_new_tokens": 64},
    },
    "algo": {"skip": {"zero_variance": False}},
    "train": {"steps": 1, "lr": 1e-3, "eval": {"every": 0}},
}
STEPS = {
    (str(PACKAGE / file), name): f"{file}:{name}"
    for walk in WALKS
    for file, name in (step.split(":") for step in walk.steps)
}


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "PYTHONPATH=. python docs/make_architecture.py"
    )


@contextmanager
def record_calls() -> Iterator[list[str]]:
    """Yield the steps of walks that are called while the block runs, in order, of all threads."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            if step := STEPS.get((code.co_filename, code.co_qualname)):
                calls.append(step)

    threading.setprofile(note)
    sys.setprofile(note)
    _READER.submit(sys.setprofile, note).result()  # an earlier test may have started this thread
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        _READER.submit(sys.setprofile, None).result()


def test_the_walks_are_those_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agentrl.yaml").write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    with record_calls() as trained:
        assert main(["train"]) == 0
    with record_calls() as asked:
        asyncio.run(ask())
    for walk in WALKS:
        calls = iter(asked if walk.title == "A foreign request" else trained)
        # in their order: looking for a step leaves the calls behind it
        assert [step for step in walk.steps if step not in calls] == [], walk.title


async def ask() -> None:
    transport = httpx2.ASGITransport(app=world_of(["Hello."]).gateway.app)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://test", timeout=None
    ) as client:
        assert (await client.post("/e/a/v1/chat/completions", json=body)).status_code == 200
