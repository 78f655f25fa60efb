"""Budgets: a file has at most 400 lines, a class at most 250, a function at most 50."""

import ast
from pathlib import Path

from tests.helpers.source import parsed

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("agentrl_cli", "sandbox", "tasks", "recipes")
FILES = sorted(
    path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
)


def test_budgets() -> None:
    over = []
    for file in FILES:
        if (ROOT / file).read_text(encoding="utf-8").count("\n") > 400:
            over.append(f"{file} is too long: split it where a reader would")
        for node in ast.walk(parsed(ROOT / file)):
            most = {ast.FunctionDef: 50, ast.AsyncFunctionDef: 50, ast.ClassDef: 250}.get(
                type(node)
            )
            if most and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > most:
                    over.append(f"{file}:{node.lineno} {node.name} has {length} lines")
    assert not over, "\n".join(over)
