"""One total import order: a module imports only what stands to its left. Heavy packages stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "agentrl_cli"

LAYERS = (
    "types errors paths config registry hooks store chat policies algos sandbox compat endpoint tools rewards "
    "interactions env tasks rollout check evaluate whatif plan metrics health collect rft sft steering greedy rescore "
    "trainer runtime doctor server tui commands"
).split()

HEAVY = {"torch", "transformers", "peft", "accelerate", "safetensors"}
MAY_BE_HEAVY = (
    *("policies/local", "policies/forward"),
    *("algos/losses", "algos/terms", "algos/batch", "algos/update", "algos/value", "rewards/model", "sft", "trainer"),
)
READERS = ("ls", "show", "replay", "watch", "grep", "query", "export", "runs", "db", "config", "init", "doctor", "chat")

FRONT = {"__init__.py", "__main__.py"}
"""The public names, loaded lazily, and `python -m`: they may name everything."""

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imports(tree: ast.AST, file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import under a node, relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ["agentrl_cli", *file.parent.parts][: 1 + len(file.parent.parts) - (node.level - 1)]
            start = ".".join(base) + "." if node.level else ""
            module = (start + (node.module or "")).rstrip(".")
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "agentrl_cli" else [module]
            yield from ((node.lineno, name) for name in names)


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import, those under `if TYPE_CHECKING` excepted."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def layer(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", [file for file in FILES if str(file) not in FRONT], ids=str)
def test_a_module_imports_only_to_its_left(file: Path) -> None:
    assert layer(file) in LAYERS, f"{file}: say in LAYERS (and in DESIGN 2) where it stands"
    mine = LAYERS.index(layer(file))
    wrong = []
    for line, name in imports(ast.parse((PACKAGE / file).read_text()), file):
        parts = name.split(".")
        if parts[0] == "agentrl_cli" and len(parts) > 1 and parts[1] in LAYERS and LAYERS.index(parts[1]) > mine:
            wrong.append(f"{file}:{line} imports {name}, which stands to the right of {layer(file)}")
    assert not wrong


@pytest.mark.parametrize("file", FILES, ids=str)
def test_heavy_packages_are_imported_inside_functions(file: Path) -> None:
    tree = ast.parse((PACKAGE / file).read_text())
    found = {(line, name.split(".")[0]) for node in top_level(tree) for line, name in imports(node, file)}
    if not str(file).startswith(MAY_BE_HEAVY):
        assert not {(line, name) for line, name in found if name in HEAVY}
    if layer(file) != "tui":
        assert not {(line, name) for line, name in found if name == "textual"}


def test_what_runs_in_the_sandbox_uses_the_standard_library_alone() -> None:
    for path in (ROOT / "sandbox").glob("*.py"):
        siblings = {other.stem for other in path.parent.glob("*.py")}
        named = {name.split(".")[0] for _, name in imports(ast.parse(path.read_text()), Path("x.py"))}
        assert named - siblings <= set(sys.stdlib_module_names) | {"__future__"}, path


def test_readers_import_no_torch() -> None:
    names = [f"agentrl_cli.commands.{name}" for name in READERS if (PACKAGE / "commands" / f"{name}.py").exists()]
    code = f"import sys, importlib\nfor n in {names!r}: importlib.import_module(n)\n"
    code += f"print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"
