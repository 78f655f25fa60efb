"""Reads YAML files into flat dotted keys with their line numbers, without interpreting the keys.

Every unreadable file is a ConfigError that names the file, and the line if known.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.types.plain import is_text, quote_text

MOST = 100_000
"""Maximum values in a file; each repetition by an alias counts."""
OPEN = 300
"""Maximum depth of open brackets."""


class Value(NamedTuple):
    """A value, its layer, and a more precise place for messages (file:line), if known."""

    value: Any
    source: str
    place: str = ""
    old: str = ""
    """The old key that it was given by."""


def read_yaml(path: Path, *, only: str | None = None) -> dict[str, Value]:
    """Return the leaves of a YAML mapping by dotted key; lists are leaves. `only`: just that top-level key.

    Raises NotFound, and ConfigError (with file and line) for text that is not a YAML mapping or repeats a key.
    """
    root = _compose(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{path}:{root.start_mark.line + 1}: expected a mapping of sections, like `train:`."
        )
    return {
        key: Value(_construct(node, path), f"file:{path}:{node.start_mark.line + 1}")
        for key, node in _leaves(root, "", path)
        if only is None or key.startswith(f"{only}.")
    }


M = TypeVar("M")


def read_as(
    model: type[M],
    value: Any,
    where: str,
    known: Collection[str],
    *,
    strict: bool | None = None,
    **fixed: Any,
) -> M:
    """Return a mapping of a file, with keys among `known`, as an object: a pydantic model or a dataclass.

    `strict`: no text is read as a number. `fixed` are fields that the file does not give. Raises ConfigError that names
    the place, and the nearest key for an unknown one.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping with {', '.join(known)}, not {value!r}.")
    for key in value:
        if key not in known:
            raise ConfigError.of(f"key in {where}", str(key), sorted(known))
    try:
        return TypeAdapter(model).validate_python({**value, **fixed}, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([where, *map(str, first["loc"])])
        if first["type"] == "missing":
            hint = f"Known keys: {', '.join(known)}."
            raise ConfigError(f"{place} is missing.", hint=hint) from None
        text = str(first["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"{place}: {text} (it is {first['input']!r:.60}).") from None


def load_yaml(path: Path) -> Any:
    """Return a file's value. Raises NotFound, ConfigError."""
    root = _compose(path)
    return None if root is None else _construct(root, path)


def parse_scalar(text: str, source: str) -> Any:
    """Return a value written on the command line or in the environment, read as YAML."""
    try:
        with _as_yaml_error():
            root = _nodes(text)
            return None if root is None else yaml.SafeLoader("").construct_object(root, deep=True)
    except yaml.YAMLError as error:
        hint = "Quote it, or write a list as [a, b]."
        said = source if len(source) < 200 else f"{source[:60]}…"
        raise ConfigError(f"{said}: {quote_text(text)} is not a YAML value.", hint=hint) from error


def flatten(key: str, value: Any, source: str) -> dict[str, Value]:
    """Return a key and its value; a mapping for a section becomes dotted keys."""
    if not isinstance(value, dict) or not value:
        return {key: Value(value, source)}
    flat: dict[str, Value] = {}
    for name, inner in value.items():
        flat |= flatten(f"{key}.{name}", inner, source)
    return flat


def _compose(path: Path) -> yaml.Node | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [item.name for item in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise NotFound.of("file", str(path), near) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        with _as_yaml_error():
            return _nodes(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {error.problem or 'not YAML'}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error


def _nodes(text: str) -> yaml.Node | None:
    depth = 0
    # Checked first: PyYAML takes quadratic time for such a text.
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > OPEN:
            raise RecursionError
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    _check_size(root, {})
    return root


def _construct(node: yaml.Node, path: Path) -> Any:
    try:
        with _as_yaml_error():
            return yaml.SafeLoader("").construct_object(node, deep=True)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {problem}.") from error


@contextmanager
def _as_yaml_error() -> Iterator[None]:
    """Turns other exceptions of PyYAML into YAMLError: too deep nesting, and invalid tags or numbers."""
    try:
        yield
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


def _check_size(node: yaml.Node | None, sizes: dict[int, int]) -> int:
    """Return the number of values in a node. Raises YAMLError for too many, for cyclic aliases, and for lone
    surrogates.
    """
    if node is None:
        return 0
    known = sizes.get(id(node))
    if known is None:
        sizes[id(node)] = MOST  # seen again while being counted: it contains itself
        if isinstance(node, yaml.ScalarNode):
            if not is_text(node.value):
                raise yaml.YAMLError(
                    f"line {node.start_mark.line + 1}: {quote_text(node.value)} has a lone surrogate"
                )
            known = 1
        else:
            pairs = isinstance(node, yaml.MappingNode)
            inner = [part for pair in node.value for part in pair] if pairs else list(node.value)
            known = 1 + sum(_check_size(part, sizes) for part in inner)
        sizes[id(node)] = known
    if known >= MOST:
        raise yaml.YAMLError(f"it has more than {MOST:,} values, or one that contains itself")
    return known


def _leaves(node: yaml.MappingNode, prefix: str, path: Path) -> Iterator[tuple[str, yaml.Node]]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: a key must be a name.")
        name = f"{prefix}{key_node.value}"
        if name in seen:
            raise ConfigError(
                f"{path}:{line}: {name} is set a second time (first in line {seen[name]})."
            )
        seen[name] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(value_node, f"{name}.", path)
        else:
            yield name, value_node
