"""YAML files to flat dotted keys, each with the line it stands on. Nothing here knows what the keys mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from agentrl_cli.errors import ConfigError, NotFound


class Value(NamedTuple):
    """A value, the layer it came from, and for messages the very place (file:line) where that says more."""

    value: Any
    source: str
    place: str = ""


def read_yaml(path: Path, *, only: str | None = None) -> dict[str, Value]:
    """The leaves of a YAML mapping by dotted key; lists are leaves. `only`: just that top-level key.

    Raises NotFound, and ConfigError (file and line) for text that is no YAML mapping or names a key twice.
    """
    root = _compose(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:{root.start_mark.line + 1}: expected a mapping of sections, like `train:`.")
    loader = yaml.SafeLoader("")
    return {
        key: Value(loader.construct_object(node, deep=True), f"file:{path}:{node.start_mark.line + 1}")
        for key, node in _leaves(root, "", path)
        if only is None or key.startswith(f"{only}.")
    }


def parse_scalar(text: str, source: str) -> Any:
    """A value written on the command line or in the environment, read as YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        hint = "Quote it, or write a list as [a, b]."
        raise ConfigError(f"{source}: {text!r} is no YAML value.", hint=hint) from error


def flatten(key: str, value: Any, source: str) -> dict[str, Value]:
    """A value for a key; a mapping for a section becomes its dotted keys."""
    if isinstance(value, dict) and value:
        flat: dict[str, Value] = {}
        for name, inner in value.items():
            flat.update(flatten(f"{key}.{name}", inner, source))
        return flat
    return {key: Value(value, source)}


def _compose(path: Path) -> yaml.Node | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [item.name for item in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise NotFound.of("file", str(path), near) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {error.problem or 'not YAML'}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error


def _leaves(node: yaml.MappingNode, prefix: str, path: Path) -> Iterator[tuple[str, yaml.Node]]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        name = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"{path}:{line}: {name} is set a second time (first in line {seen[name]}).")
        seen[name] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(value_node, f"{name}.", path)
        else:
            yield name, value_node
