"""Python files as trees, for guards that read the whole package."""

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file: to walk a tree takes longer than to look at what is in it."""
    return list(ast.walk(parsed(path)))
