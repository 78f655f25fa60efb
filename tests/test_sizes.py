"""Budgets: a file has at most 400 lines, a function at most 50."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    path.relative_to(ROOT) for folder in ("agentrl_cli", "sandbox", "tasks") for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_budgets(file: Path) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert text.count("\n") <= 400, f"{file} is too long: split it where a reader would"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 50, f"{file}:{node.lineno} {node.name} has {length} lines"
