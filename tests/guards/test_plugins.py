"""A plugin is a folder and a line in the registry: without both of them everything else works."""

import re
import shutil
from pathlib import Path

from agentrl_cli.registry.plugins import PLUGINS
from tests.helpers.core import FOLDERS, ROOT, delete_plugins
from tests.helpers.train import spawn_code

PACKAGE = ROOT / "agentrl_cli"
NAMED = re.compile(r"agentrl_cli[./]plugins[./](\w+)")
# Lines of a plugin's README.
LINES = 15


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


def test_nothing_names_a_plugin_but_its_line_its_tests_and_itself() -> None:
    own = PACKAGE / "registry" / "plugins.py"
    core = [path for path in (ROOT / "tests").rglob("*.py") if "plugins" not in path.parts]
    core += [
        path
        for path in PACKAGE.rglob("*.py")
        if PACKAGE / "plugins" not in path.parents and path != own
    ]
    assert [str(path) for path in core if names_of_plugins(path)] == []
    for name in FOLDERS:
        for path in (PACKAGE / "plugins" / name).rglob("*.py"):
            assert names_of_plugins(path) <= {name}, path


USE = """
import importlib, os, pkgutil, sys

def load(package, but="-"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__") and not module.name.startswith(but):
            importlib.import_module(module.name)

def forget(*packages):
    for name in [name for name in sys.modules if (name + ".").startswith(packages)]:
        del sys.modules[name]

class Others:
    def find_spec(self, name, *given):
        if name.startswith("agentrl_cli.plugins.") and name.split(".")[2] != self.one:
            raise ModuleNotFoundError(f"{self.one} needs {name}")

copy, root, *names = sys.argv[1:]
sys.path.insert(0, root)
forget("agentrl_cli.")
load("agentrl_cli", but="agentrl_cli.plugins.")
others = Others()
sys.meta_path.insert(0, others)
for others.one in names:
    forget("agentrl_cli.plugins.", "agentlightning.")  # the second is an alias that a plugin registers
    load(f"agentrl_cli.plugins.{others.one}")
    print("works:", others.one)
forget("agentrl_cli.", "agentlightning.")
sys.path[0] = copy
os.chdir(copy)
load("agentrl_cli")
from agentrl_cli.commands import commands, load_command, main
from agentrl_cli.registry.plugins import load_plugins

assert sys.modules["agentrl_cli"].__file__.startswith(copy + "/") and not load_plugins()
for name in commands():
    load_command(name)
assert main(["config", "show", "--all"]) == main(["tools", "list", "--pack", "echo-task"]) == 0
print("works: core")
"""


def test_each_plugin_is_imported_without_the_others_and_the_core_is_used_without_any(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "core"
    shutil.copytree(PACKAGE, copy / "agentrl_cli")
    for name in ("tasks", "sandbox", "runs"):
        (copy / name).symlink_to(ROOT / name)
    delete_plugins(copy, FOLDERS)
    code, printed = spawn_code(tmp_path, USE, str(copy), str(ROOT), *FOLDERS)
    works = [line for line in printed.splitlines() if line.startswith("works: ")]
    assert works == [f"works: {name}" for name in (*FOLDERS, "core")] and code == 0, printed[-4000:]
