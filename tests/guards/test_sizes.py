"""Budgets: of files 400 lines, of classes 250, of functions 50; a docstring of a function begins with a verb."""

import ast
import re
from pathlib import Path

from tests.helpers.source import nodes

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
        for node in nodes(ROOT / file):
            most = {ast.FunctionDef: 50, ast.AsyncFunctionDef: 50, ast.ClassDef: 250}.get(
                type(node)
            )
            if most and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > most:
                    over.append(f"{file}:{node.lineno} {node.name} has {length} lines")
    assert not over, "\n".join(over)


# --- docstrings of functions begin with a verb, or with Whether ---

NOUN = re.compile(r"(?:The|A|An|What|Those|All|Every|Each|Some|Most|How|Where|Why|Which)\b")
# Of all functions, those whose docstring still begins as a noun phrase; it only falls.
SHARE = 0.035


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    nouns, functions = [], 0
    for path in sorted([*(ROOT / "agentrl_cli").rglob("*.py"), *(ROOT / "sandbox").rglob("*.py")]):
        for node in nodes(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            functions += 1
            attribute = any(
                "property" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            if not attribute and NOUN.match(ast.get_docstring(node) or ""):
                nouns.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert len(nouns) <= SHARE * functions, "\n".join(nouns)
