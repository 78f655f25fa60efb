"""Adapters: how plugins read other projects' files. One that does not apply returns None, and the next is asked.

They are asked in the order of `plugins.PLUGINS`, those of outsiders last. The kinds:

    modules      context manager (folder): inside it modules that are not installed can be imported; its
                 `target(name, kind)` returns a class name as `resolve` takes it, or None
    data         (folder, `data` of task.yaml) to one that names a source for each split
    tool         (class, config, schema, where) to a Tool
    table        (where, names to functions of a mapping, schemas) to a list of Tools
    environment  (where, class or classes by name, folder) to a list of Tools
    openapi      (where, a file or a mapping with `file`, folder) to a list of Tools
    mcp          (where, servers by name or a mapping with their file, folder) to a list of Tools
    service      (file of a description) to an entry of `tools:`, the names of its tools, and notes for the author
    reward       (function, its parameters, keyword arguments) to a function of (episode, ctx)
    interaction  (class, config) to a maker of Interactions
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from agentrl_cli.registry import dotted_target, resolve
from agentrl_cli.registry.plugins import load_plugins


def adapters(kind: str) -> Iterator[Any]:
    """Yield the adapters of a kind, in order."""
    for offered in load_plugins().values():
        if target := offered.get("adapters", {}).get(kind):
            yield resolve("adapters", {}, target)


def adapt(kind: str, *given: Any) -> Any:
    """Return the result of the first adapter that applies to the arguments; None if none applies."""
    return next((made for one in adapters(kind) if (made := one(*given)) is not None), None)


@contextmanager
def foreign_imports(folder: Path) -> Iterator[Callable[[str, str], str]]:
    """Let the files of a folder import each other, and modules that plugins stand in for.

    Yields `target(name, kind)`: the name of a class, of a kind such as "tools", as `resolve` takes it.
    """
    with ExitStack() as stack:
        entered = [stack.enter_context(modules(folder)) for modules in adapters("modules")]
        path = str(folder.absolute())
        sys.path.insert(0, path)

        def target(name: str, kind: str) -> str:
            found = (modules.target(name, kind) for modules in entered)
            return next((one for one in found if one), dotted_target(name, folder))

        try:
            yield target
        finally:
            if path in sys.path:
                sys.path.remove(path)
