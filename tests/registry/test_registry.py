"""Names to objects."""

import importlib
import math
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentrl_cli import Task, Tool
from agentrl_cli.config.losses import LOSSES, Loss
from agentrl_cli.errors import EnvError, NotFound
from agentrl_cli.learning.losses import LossInput
from agentrl_cli.registry import load_file, names, resolve
from agentrl_cli.registry.old_modules import MODULES, OBJECTS
from agentrl_cli.registry.plugins import offers
from agentrl_cli.types.old_names import OldAttribute, adopt_override
from agentrl_cli.types.tokens import Tokens
from tests.helpers.processes import run_code

TABLE: dict[str, str | object] = {"root": "math:sqrt", "five": 5}


def test_tables_and_paths_to_modules_and_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Box:\n    value = 7\n")
    known = {"root": math.sqrt, "five": 5, "os:path.join": os.path.join, "mine.py:Box.value": 7}
    assert {name: resolve("things", TABLE, name, base=tmp_path) for name in known} == known
    assert names("things", TABLE) == ["five", "root"]


def test_an_edit_that_keeps_size_and_second_is_seen_by_the_next_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    load = f"load_file(Path({str(file)!r}))"
    program = (
        f"from pathlib import Path; from agentrl_cli.registry import load_file; print({load}.value)"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    for value in ("1", "2"):
        file.write_text(f"value = {value}\n")
        os.utime(file, ns=(10**18, 10**18))
        assert run_code(program, env=environment).stdout == f"{value}\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rot", "No tool named 'rot'.*root"),
        ("math:sqr", "sqrt"),
        ("no_such_module_here:thing", "no_such_module_here"),
        (":thing", "No tool named ':thing'"),
        ("mime.py:thing", r"mine\.py"),
    ],
)
def test_unknown_names_name_the_nearest(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "mine.py").touch()
    with pytest.raises(NotFound) as caught:
        resolve("tools", TABLE, name, base=tmp_path)
    assert re.search(said, f"{caught.value.message} {caught.value.hint}")


def test_a_module_that_would_end_the_process_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script without `if __name__ == "__main__":` does; the command ended with that status and no word."""
    (tmp_path / "script_that_ends.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvError, match="script_that_ends ended its import by"):
        resolve("rewards", {}, "script_that_ends:x")


def folder_of(place: Path, **files: str) -> Path:
    for name, text in files.items():
        file = place / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return place


TOOL = """
from db import STOCK
import helpers.units as units
def look(name):
    import later
    return later.show(STOCK[name], units.UNIT)
"""
LATER = (
    "from .db import STOCK\ndef show(count, unit):\n    return f'{count} {unit} of {len(STOCK)}'\n"
)


def test_files_beside_a_file_are_imported_when_it_loads_and_when_it_is_called(
    tmp_path: Path,
) -> None:
    before = [*sys.path]
    for name, stock in (("one", "{'bolt': 3}"), ("two", "{'bolt': 5, 'nut': 1}")):
        files = {
            "tool": TOOL,
            "later": LATER,
            "db": f"STOCK = {stock}\n",
            "helpers__units": "UNIT = 'pallets'\n",
        }
        folder_of(tmp_path / name, **files, reward="import db\nimport tool\n")
    one, two = (load_file(tmp_path / name / "tool.py") for name in ("one", "two"))
    assert (one.look("bolt"), two.look("bolt")) == ("3 pallets of 1", "5 pallets of 2")
    reward = load_file(tmp_path / "two" / "reward.py")
    assert (
        reward.tool is two
        and reward.db.STOCK is two.STOCK is load_file(tmp_path / "two" / "db.py").STOCK
    )
    assert sys.path == before and not {"db", "tool", "later", "helpers"} & set(sys.modules)
    (tmp_path / "one" / "db.py").write_text("STOCK = {'bolt': 40}\n")
    os.utime(tmp_path / "one" / "db.py", ns=(1, 1))  # an older file is a change, too
    assert load_file(tmp_path / "one" / "tool.py").look("bolt") == "40 pallets of 1"
    assert one.look("bolt") == "3 pallets of 1"  # what runs already keeps what it has


IN_LIBRARY = (
    "import pathlib, runpy\n\nfile = pathlib.Path(__file__).parent / '.venv/site-packages/lib.py'\n"
)
IN_LIBRARY += "runpy.run_path(str(file))['fail']()\n"


@pytest.mark.parametrize(
    ("tool", "more", "place", "hint"),
    [
        ("x = 1\ny = x / 0\n", {}, r"tool\.py:2: ZeroDivisionError", ""),
        ("x = 1\n\ndef f(:\n", {}, r"tool\.py:3: SyntaxError", ""),
        ("x = 1\nraise SystemExit(3)\n", {}, r"tool\.py:2: SystemExit: 3", ""),
        (
            "x = 1\nimport asyncio; raise asyncio.CancelledError\n",
            {},
            r"tool\.py:2: CancelledError",
            "",
        ),
        # a missing module is a package to install or a file to put beside
        (
            "import not_there",
            {},
            r"tool\.py:1: ",
            "`pip install not_there` if it is a package; a file of your own, not_there.py, must",
        ),
        ("from bs4x.sub import y", {}, r"tool\.py:1: ", "`pip install bs4x`"),
        ("import far", {}, r"tool\.py:1: ", "far.py must lie beside tool.py"),
        ("from .absent import x", {}, r"tool\.py:1: ", "has no absent.py"),
        ("from db import missing", {"db": ""}, r"tool\.py:1: ", "Fix the file"),
        # a failure beside is named where it is, one in a library at the user's line
        ("\nimport db\n", {"db": "x = {}['y']\n"}, r"db\.py:1: KeyError", ""),
        ("\nimport db\n", {"db": "def (\n"}, r"db\.py:1: SyntaxError", ""),
        (
            IN_LIBRARY,
            {".venv__site-packages__lib": "def fail():\n    raise ValueError('inside')\n"},
            r"tool\.py:4: ValueError: inside",
            "",
        ),
    ],
)
def test_code_that_fails_is_named_with_its_line_and_with_what_helps(
    tmp_path: Path, tool: str, more: dict[str, str], place: str, hint: str
) -> None:
    (tmp_path / "far.py").touch()
    inner = folder_of(tmp_path / "inner", tool=tool, **more)
    with pytest.raises(EnvError, match=place) as caught:
        load_file(inner / "tool.py")
    assert hint in caught.value.hint
    assert "agentrl_files" not in caught.value.message + caught.value.hint
    folder_of(inner, tool="import db\n", db="y = 1\n")
    assert load_file(inner / "tool.py").db.y == 1, "fixed, it loads"


def test_names_that_differ_in_a_dot_alone_are_two_files(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text("NAME = 'underscore'\n")
    (tmp_path / "my.task.py").write_text("NAME = 'dot'\n")
    assert [load_file(tmp_path / name).NAME for name in ("my_task.py", "my.task.py")] == [
        "underscore",
        "dot",
    ]


# --- plugins of outsiders ---


CODE = """
from pydantic import Field
from agentrl_cli.types.section import Section


class Colours(Section):
    '''Colours of a screen.'''

    main: str = Field(default="red", description="the first one")


def paint() -> None:
    '''Paint.'''
    print("painted")
"""
OFFERS = """
OFFERS = {
    "commands": {"paint": ("Look", "stranger_code:paint", "Paint a screen")},
    "settings": {"colours": "stranger_code:Colours", "train": "stranger_code:Colours", "lost": "no_such_module:X"},
    "renamed": {"train.colour": "colours.main"},
}
"""
COMMANDS = """
import sys
sys.path.insert(0, sys.argv.pop())
from agentrl_cli.commands import main
for words in (["--help"], ["paint"], ["config", "show", "--all", "--set", "train.colour=blue"]):
    assert main(words) == 0
    print("---", flush=True)
"""
POINTS = "[agentrl.plugins]\nstranger = stranger_offers:OFFERS\nbroken = no_such_package:OFFERS\n"


def install(folder: Path) -> None:
    """Write a distribution with two plugins, one of which cannot be imported."""
    info = folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (folder / "stranger_offers.py").write_text(OFFERS)
    (folder / "stranger_code.py").write_text(CODE)


def test_an_outsiders_plugin_is_used_and_a_broken_one_is_reported(tmp_path: Path) -> None:
    install(tmp_path)
    done = run_code(COMMANDS, str(tmp_path))
    page, painted, shown, _ = done.stdout.split("---\n")
    assert "paint" in page and "Paint a screen" in page and painted == "painted\n"
    assert "colours.main" in shown and "blue" in shown and "train.lr" in shown
    for said in (
        "The plugin broken could not be loaded: ModuleNotFoundError",
        "train.colour is now colours.main",
        "The section train of a plugin is left out: the core has a section train",
        "The section lost of a plugin is left out",
    ):
        assert said in done.stderr


# --- Python names before 0.1: every one of the tables still means the object that it meant, and names the new one ---

MOVED = MODULES | OBJECTS | offers("moved")


@pytest.fixture(autouse=True)
def _forget_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    olds = tuple(f"agentrl_cli.{old}." for old in MOVED)
    for name in [one for one in sys.modules if f"{one}.".startswith(olds)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("old", [old for old in MOVED if ":" not in old])
def test_an_old_module_has_the_objects_of_the_new_one(old: str) -> None:
    new = f"agentrl_cli.{MOVED[old]}"
    with pytest.warns(FutureWarning, match=f"^agentrl_cli.{old} is now {new}.$") as said:
        module = importlib.import_module(f"agentrl_cli.{old}")
    assert len([one for one in said if old in str(one.message)]) == 1
    real = importlib.import_module(new)
    assert real.__name__ == new and real.__spec__ is not None and real.__spec__.name == new
    for name in [one for one in dir(real) if not one.startswith("__")]:
        value = getattr(real, name)
        assert isinstance(value, ModuleType) or getattr(module, name) is value


@pytest.mark.parametrize("old", [old for old in MOVED if ":" in old])
def test_an_old_object_is_the_new_one(old: str) -> None:
    with pytest.warns(FutureWarning, match=f"{old.replace(':', '.')} is now agentrl_cli."):
        found = resolve("rewards", {}, f"agentrl_cli.{old}")
    assert found is resolve("rewards", {}, f"agentrl_cli.{MOVED[old]}")


def test_modules_below_an_old_package_are_the_same_and_loaded_once() -> None:
    with pytest.warns(FutureWarning) as said:
        from agentrl_cli.servers.model_server.server import open_server  # type: ignore[import-untyped]
    assert [str(one.message).partition(" ")[0] for one in said] == [
        "agentrl_cli.servers.model_server"
    ]
    assert said[0].filename == __file__
    from agentrl_cli.agents.serve.server import open_server as now

    assert open_server is now


def test_other_names_are_still_missing() -> None:
    for name in ("agentrl_cli.analysis.nothing", "agentrl_cli.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    with pytest.raises(AttributeError, match="nothing"):
        _ = importlib.import_module("agentrl_cli.tools").nothing


TASK = Task(id="1", pack="", family="", split="", prompt=[])
OLD_ATTRIBUTES: dict[type, dict[str, str]] = {
    Loss: {"mark": "select"},
    LossInput: {"marked": "selected", "held": "entropy_masked"},
    Tokens: {"given": "from_ids", "sampled": "from_generation"},
    Tool: {"offered": "offer"},
}


def test_old_attributes_read_the_new_ones() -> None:
    for kind, renamed in OLD_ATTRIBUTES.items():
        held = {name for name, value in vars(kind).items() if isinstance(value, OldAttribute)}
        assert held == set(renamed)
        for old, new in renamed.items():
            assert hasattr(kind, new)
            with pytest.warns(FutureWarning, match=f"^{kind.__name__}.{old} is now .*{new}.$"):
                assert getattr(kind, old) == getattr(kind, new)
    assert LossInput.kept is None
    with pytest.warns(FutureWarning, match="Loss.mark is now Loss.select"):
        assert LOSSES["clip_cov"].mark == LOSSES["clip_cov"].select != ""
    with pytest.warns(FutureWarning, match=r"Tokens.given is now Tokens.from_ids"):
        assert list(Tokens.given([3], [0]).ids) == [3]


def test_methods_that_users_override_under_old_names_are_called() -> None:
    with pytest.warns(FutureWarning, match="Twice.offered is now Twice.offer"):

        class Twice(Tool):
            def offered(self, task: Task) -> list[Tool]:
                return [self, self]

    assert len(Twice().offer(TASK)) == 2

    class Own:
        def published(self) -> str:
            return "weights"

    with pytest.warns(FutureWarning, match="Own.published is now Own.last_published"):
        adopt_override(Own, "published", "last_published")
    adopt_override(Tool, "published", "last_published")  # not without an old name
    assert vars(Own)["last_published"](Own()) == "weights"
