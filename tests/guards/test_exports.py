"""The public names: sorted, complete, lazy. Importing the package is silent and free of torch."""

import ast

import pytest

import agentrl_cli
from tests.helpers.processes import ROOT, run_code

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
    assert getattr(agentrl_cli, name).__doc__, f"{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trianer"):
        _ = agentrl_cli.Trianer


PAGES = """
from agentrl_cli.commands import commands, load_command
for name in commands().keys() - {"ls", "import"}:
    load_command(name)
"""
UNASKED: dict[str, tuple[str, str, int]] = {
    "package": ("import agentrl_cli", "torch numpy pydantic rich typer", 12),
    "help": (
        "from agentrl_cli.commands import main; main(['--help'])",
        "numpy asyncio ssl pydantic yaml sqlite3 rich textual torch importlib.metadata.metadata",
        12,
    ),
    "pages of help": (
        PAGES,
        "torch transformers peft accelerate safetensors numpy jinja2"
        " agentrl_cli.config.models agentrl_cli.store.connection",
        999,
    ),
    "chat": ("import agentrl_cli.chat.render", "jsonschema torch", 999),
}


@pytest.mark.parametrize(("code", "unwanted", "most"), UNASKED.values(), ids=UNASKED)
def test_hardly_anything_is_imported_unasked(code: str, unwanted: str, most: int) -> None:
    code += f"\nimport sys\nprint({{*{unwanted.split()}}} & {{*sys.modules}})\n"
    code += "own = [one for one in sys.modules if one.startswith('agentrl_cli.')]\n"
    done = run_code(f"{code}print(sum('.plugins.' not in one for one in own))")
    *said, found, modules = done.stdout.splitlines()
    assert found == "set()" and int(modules) <= most, done.stdout
    assert done.stderr == "" and (not said or "main" in code), done.stdout
