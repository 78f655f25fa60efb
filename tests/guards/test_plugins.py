"""A plugin is a folder and a line in the registry: without both of them everything else works."""

import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

from agentrl_cli.registry.plugins import PLUGINS
from tests.helpers.core import FOLDERS, ROOT, delete_plugins

PACKAGE = ROOT / "agentrl_cli"
NAMED = re.compile(r"agentrl_cli[./]plugins[./](\w+)")
LINES = 15
"""Lines of a plugin's README."""


def names_of_plugins(path: Path) -> set[str]:
    """Return the plugins that a file's code or texts name by their place."""
    return set(NAMED.findall(path.read_text(encoding="utf-8")))


def test_every_plugin_has_its_line_its_page_and_its_tests() -> None:
    assert sorted(PLUGINS) == FOLDERS
    for name, target in PLUGINS.items():
        assert target == f"agentrl_cli.plugins.{name}:OFFERS"
        page = (PACKAGE / "plugins" / name / "README.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {name}\n") and len(page.splitlines()) <= LINES, name
        assert list((ROOT / "tests" / "plugins" / name).glob("test_*.py")), name


def test_no_test_of_the_core_names_a_plugin() -> None:
    """So that `make test-core` can run them all without any."""
    kept = (path for path in (ROOT / "tests").rglob("*.py") if "plugins" not in path.parts)
    assert [str(path) for path in kept if names_of_plugins(path)] == []


def test_nothing_names_a_plugin_but_its_line_and_itself() -> None:
    """Neither by an import nor by a text that is resolved later."""
    own = PACKAGE / "registry" / "plugins.py"
    core = [
        path
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "plugins" not in path.parents and path != own
    ]
    assert [str(path) for path in core if names_of_plugins(path)] == []
    for name in FOLDERS:
        for path in (PACKAGE / "plugins" / name).rglob("*.py"):
            assert names_of_plugins(path) <= {name}, path


WITHOUT = """
import importlib, os, pkgutil, sys, traceback

def load(root):
    sys.path.insert(0, root)
    import agentrl_cli

    assert agentrl_cli.__file__.startswith(root + "/")
    for module in pkgutil.walk_packages(agentrl_cli.__path__, "agentrl_cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

def use(root, left):
    own = ("agentrl_cli", "agentlightning")  # the second is an alias that a plugin registers
    for name in [name for name in sys.modules if name.split(".")[0] in own]:
        del sys.modules[name]
    os.chdir(root)
    load(root)
    from agentrl_cli.commands import commands, load_command, main
    from agentrl_cli.registry.plugins import load_plugins

    assert sorted(load_plugins()) == left
    for name in commands():
        load_command(name)
    assert main(["config", "show", "--all"]) == 0
    assert main(["tools", "list", "--pack", "echo-task"]) == 0

load(sys.argv[1])  # what others wrote is imported once: a fork loads each copy
for line in sys.stdin.read().splitlines():
    if not os.fork():
        root, *left = line.split()
        try:
            use(root, left)
            print("works:", os.path.basename(root), flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.wait()
"""


def deleted_sets() -> dict[str, list[str]]:
    """Return sets of plugins: all, and seven such that each is once deleted without any given other one.

    Each plugin is in three of the seven, and no two in the same three (Sperner 1928).
    """
    places = list(combinations(range(7), 3))
    assert len(FOLDERS) <= len(places)
    found = {"all": FOLDERS}
    for number in range(7):
        named = zip(FOLDERS, places, strict=False)
        found[f"set-{number}"] = [name for name, places in named if number in places]
    return found


def test_without_some_plugins_the_rest_can_be_imported_and_used(tmp_path: Path) -> None:
    """Each with every other one deleted in some copy, and the core without any."""
    lines = []
    sets = deleted_sets()
    for missing, deleted in sets.items():
        copy = tmp_path / missing
        shutil.copytree(PACKAGE, copy / "agentrl_cli")
        for name in ("tasks", "sandbox", "runs"):
            (copy / name).symlink_to(ROOT / name)
        delete_plugins(copy, deleted)
        lines.append(" ".join([str(copy), *sorted(set(FOLDERS) - set(deleted))]))
    command = [sys.executable, "-P", "-c", WITHOUT, str(ROOT)]
    given = "\n".join(lines)
    done = subprocess.run(
        command, cwd=tmp_path, input=given, capture_output=True, text=True, check=False
    )
    works = [line for line in done.stdout.splitlines() if line.startswith("works: ")]
    assert works == [f"works: {name}" for name in sets], done.stderr[-4000:]
