"""Agent-Lightning 0.x's names over this package's store, gateway and trainer.

`import agentrl_cli.plugins.lightning as agl` is the one changed import; docs/lightning.md has the table of names.
`import agentrl_cli.plugins.lightning.alias` makes `import agentlightning` mean this. `__init__.pyi` lists the names;
each is imported when it is first used, since the table of commands must not load them.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl_cli.plugins.lightning.modules import register

OFFERS: dict[str, dict[str, Any]] = {
    "moved": {"lightning": "plugins.lightning"},
    "tables": {"lightning": f"{__name__}.rules:TABLE"},
}

register(__name__)


@cache
def _homes() -> dict[str, str]:
    """Return the module of each public name."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: str(node.module)
        for node in imports
        for alias in node.names
        if node.module != "typing"
    }


def __getattr__(name: str) -> Any:
    """Return a public name, or a module. Raises AttributeError for any other."""
    if not name.startswith("__"):
        if name in _homes():
            return getattr(import_module(_homes()[name]), name)
        with suppress(ModuleNotFoundError):
            return import_module(f"{__name__}.{name}")
    raise AttributeError(f"{__name__} has no {name!r}; docs/lightning.md lists its names")


def __dir__() -> list[str]:
    return [*globals(), *_homes()]
