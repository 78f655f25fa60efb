"""The docstring of a function says what it does: it begins with a verb, or with Whether."""

import ast
import re
from pathlib import Path

from tests.helpers.source import parsed

ROOT = Path(__file__).resolve().parents[2]
NOUN = re.compile(r"(?:The|A|An|What|Those|All|Every|Each|Some|Most|How|Where|Why|Which)\b")
# Of all functions, those whose docstring still begins as a noun phrase; it only falls.
SHARE = 0.035


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    nouns, functions = [], 0
    for path in sorted([*(ROOT / "agentrl_cli").rglob("*.py"), *(ROOT / "sandbox").rglob("*.py")]):
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            functions += 1
            attribute = any(
                "property" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            if not attribute and NOUN.match(ast.get_docstring(node) or ""):
                nouns.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert len(nouns) <= SHARE * functions, "\n".join(nouns)
