"""The public names: sorted, complete, lazy. Importing the package is silent and free of torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl_cli

ROOT = Path(__file__).resolve().parent.parent.parent
INIT = ROOT / "agentrl_cli" / "__init__.py"

WANTED = (
    "Batch Config Env Episode Hook Policy Reward RewardPart ScriptedPolicy Store Task Tool Trainer Turn "
    "load_config load_pack tool train"
).split()


def test_all_is_sorted_and_agrees_with_the_table() -> None:
    assert agentrl_cli.__all__ == sorted(agentrl_cli.__all__) == sorted(agentrl_cli._WHERE)
    assert set(WANTED) <= set(agentrl_cli.__all__)


def test_type_checkers_see_the_same_names_from_the_same_places() -> None:
    block = next(node for node in ast.parse(INIT.read_text()).body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == agentrl_cli._WHERE


@pytest.mark.parametrize("name", agentrl_cli.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(agentrl_cli, name)
    assert value.__doc__, f"{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trianer"):
        _ = agentrl_cli.Trianer


def test_import_is_silent_and_light() -> None:
    code = "import sys, agentrl_cli; print(sorted({'torch', 'numpy', 'pydantic', 'rich', 'typer'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
