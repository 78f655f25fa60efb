"""Resolves names to objects: a literal dict, a plugin, a `module:object` or `file.py:object` path, an entry point.

Built-in objects are resolved in the same way as everyone else's. No decorator registers anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl_cli.errors import EnvError, MissingDependency, NotFound
from agentrl_cli.registry.files import from_outside
from agentrl_cli.registry.files import load_file as load_file
from agentrl_cli.registry.plugins import offers


def resolve(
    kind: str, table: Mapping[str, str | object], name: str, *, base: Path | None = None
) -> Any:
    """Return the object that `name` means.

    `kind` is the plural noun, which is also the entry-point group: "tools" is `agentrl.tools`. In order: a key of
    `table` (the value is the object, or a "module:object" string that is loaded now), a name that a plugin offers,
    "module:object" or "file.py:object" (relative to `base`, default the working folder), an entry point.
    Raises NotFound with the nearest names, EnvError if the user's code fails to import.
    """
    known = table if name in table or ":" in name else {**offers(kind), **table}
    if name in known:
        value = known[name]
        return _load(kind, value, base) if isinstance(value, str) else value
    if name.find(":") > 0:
        return _load(kind, name, base)
    points = _entry_points(kind)
    if name in points:
        return _load(kind, points[name], base)
    hint = f'Anything else is written "module:object" or "file.py:object", or registered under agentrl.{kind}.'
    raise NotFound.of(_one(kind), name, sorted({*known, *points}), hint=hint)


def dotted_target(name: str, folder: Path) -> str:
    """Return a dotted class name as `resolve` takes it: a file beside the configuration goes before a module.

    Two projects may each have a `my_tools.py`; loaded by its path, neither gets the other's.
    """
    if ":" in name or "." not in name:
        return name
    module, _, attribute = name.rpartition(".")
    file = f"{module.replace('.', '/')}.py"
    alone = (folder / file).is_file() and not (folder / file).with_name("__init__.py").is_file()
    return f"{file if alone else module}:{attribute}"


def _one(kind: str) -> str:
    """Return the singular of a kind: loss of losses, policy of policies, tool of tools."""
    if kind.endswith("ies"):
        return f"{kind[:-3]}y"
    return kind.removesuffix("es") if kind.endswith("sses") else kind.removesuffix("s")


def names(kind: str, table: Mapping[str, str | object]) -> list[str]:
    """Return every name that `resolve` knows for a kind, those of plugins and entry points included, sorted."""
    return sorted({*table, *offers(kind), *_entry_points(kind)})


def _entry_points(kind: str) -> dict[str, str]:
    from importlib.metadata import entry_points  # late: it costs every command a tenth of its start

    return {point.name: point.value for point in entry_points(group=f"agentrl.{kind}")}


def _load(kind: str, target: str, base: Path | None) -> Any:
    where, _, attribute = target.partition(":")
    if where.endswith(".py"):
        module = load_file((base or Path.cwd()) / Path(where).expanduser())
    else:
        module = _import(kind, where)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            known = (
                [name for name in vars(value) if not name.startswith("_")]
                if hasattr(value, "__dict__")
                else []
            )
            raise NotFound.of(f"object in {where}", attribute, known)
        value = getattr(value, part)
    return value


def _import(kind: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # a dependency of that module: `main` reports which one to install
        raise NotFound(
            f"No module named {name!r}, wanted as one of the {kind}.",
            hint=f'Put {name.rpartition(".")[2]}.py beside the file that names it, or name a file: "my_code.py:thing".',
        ) from error
    except BaseException as error:
        if isinstance(error, Exception) or from_outside(error):
            raise
        raise EnvError(
            f"The module {name} ended its import by {type(error).__name__}: {error}"
        ) from error


def require_package(name: str, version: str, extra: str, *, otherwise: str = "") -> None:
    """Raise MissingDependency if an optional package is missing or its version does not begin with `version`."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        found = installed(name)
    except PackageNotFoundError as error:
        line = f"pip install 'agentrl-cli[{extra}]'" + (f", or {otherwise}." if otherwise else "")
        raise MissingDependency(f"The package {name} is not installed.", hint=line) from error
    if not f"{found}.".startswith(f"{version}."):
        raise MissingDependency(
            f"{name} {found} is another version than {version}, which this release is tested with.",
            hint=f"pip install 'agentrl-cli[{extra}]'",
        )
