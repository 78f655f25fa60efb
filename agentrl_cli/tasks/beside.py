"""The files beside a program that it needs: those that it imports or names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def files_beside(path: Path) -> list[Path]:
    """Return the files of its folder that a Python file needs, directly or through one of them. Runs nothing.

    Modules and packages that are imported anywhere in the code, and files whose names stand there as texts.
    """
    found: dict[Path, None] = {}
    unread = [path]
    while unread:
        for file in _needs(unread.pop(), path.parent):
            if file != path and file not in found:
                found[file] = None
                unread += [file] if file.suffix == ".py" else []
    return sorted(found)


def _needs(file: Path, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # it is reported when it is loaded
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _find_file(node.value, folder)
        for name in _find_imports(node):
            top = name.partition(".")[0]
            if (folder / f"{top}.py").is_file():
                yield folder / f"{top}.py"
            elif (folder / top).is_dir():
                yield from (inner for inner in (folder / top).rglob("*.py") if inner.is_file())


def _find_imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level < 2:
        yield from [node.module] if node.module else (alias.name for alias in node.names)


def _find_file(text: str, folder: Path) -> Iterator[Path]:
    """Yield the file beside that a text names."""
    if (
        text
        and len(text) < 200
        and text.isprintable()
        and not {"", ".", ".."} & set(text.split("/"))
    ):
        file = folder / text
        if file.is_file():
            yield file
