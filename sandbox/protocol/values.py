"""Plain values as JSON that keeps exact types: arguments and return values of a function under test.

JSON's own types stand for themselves; the rest is an object with one key that starts with `$`:
`{"$tuple": [...]}`, `{"$set": [...]}`, `{"$frozenset": [...]}`, `{"$bytes": "hex"}`, `{"$complex": [re, im]}`,
`{"$float": "nan"}`, `{"$int": "0x…"}` (beyond 4000 digits), `{"$dict": [[key, value], ...]}` (keys other than plain
strings), `{"$object": "type name"}` for everything else, which equals nothing.

A type counts only where it is the type itself: a subclass of int with an `__eq__` of its own is an `$object`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
MAX_NODES = 500_000
_BIG = 1 << 13000


class NotPlain(ValueError):
    """A value or text that is too deep, too large or not tagged JSON."""


def encode(value: Any) -> Any:
    """Return the tagged form of a Python value. Raises NotPlain if it is too deep or too large."""
    return _encode(value, MAX_DEPTH, [MAX_NODES])


def _encode(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth < 0 or left[0] < 0:
        raise NotPlain("the value is too deep or too large")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_BIG < value < _BIG else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [_encode(item, depth - 1, left) for item in value]
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, depth - 1, left) for key, item in value.items()}
        return {
            "$dict": [
                [_encode(k, depth - 1, left), _encode(v, depth - 1, left)] for k, v in value.items()
            ]
        }
    if kind is tuple:
        return {"$tuple": [_encode(item, depth - 1, left) for item in value]}
    if kind is set or kind is frozenset:
        items = [_encode(item, depth - 1, left) for item in value]
        return {"$" + kind.__name__: sorted(items, key=_text)}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if kind is complex:
        return {
            "$complex": [_encode(value.real, depth - 1, left), _encode(value.imag, depth - 1, left)]
        }
    return {"$object": str(kind.__name__)[:80]}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def decode(tagged: Any, depth: int = MAX_DEPTH) -> Any:
    """Return the Python value of a tagged form; raises NotPlain for an unknown tag."""
    if depth < 0:
        raise NotPlain("the value is too deep")
    if isinstance(tagged, list):
        return [decode(item, depth - 1) for item in tagged]
    if not isinstance(tagged, dict):
        return tagged
    if len(tagged) != 1 or not next(iter(tagged)).startswith("$"):
        return {key: decode(item, depth - 1) for key, item in tagged.items()}
    ((tag, inner),) = tagged.items()
    if tag not in _UNTAG:
        raise NotPlain(f"unknown tag {tag}")
    try:
        return _UNTAG[tag](inner, depth - 1)
    except (TypeError, ValueError, KeyError) as error:
        raise NotPlain(f"{tag}: {error}") from None


_UNTAG: dict[str, Callable[[Any, int], Any]] = {
    "$tuple": lambda inner, depth: tuple(decode(item, depth) for item in inner),
    "$set": lambda inner, depth: {decode(item, depth) for item in inner},
    "$frozenset": lambda inner, depth: frozenset(decode(item, depth) for item in inner),
    "$dict": lambda inner, depth: {decode(key, depth): decode(item, depth) for key, item in inner},
    "$bytes": lambda inner, depth: bytes.fromhex(inner),
    "$complex": lambda inner, depth: complex(decode(inner[0], depth), decode(inner[1], depth)),
    "$float": lambda inner, depth: float(inner),
    "$int": lambda inner, depth: int(inner, 16),
}


def same(answer: Any, expected: Any, close: float = 0.0) -> bool:
    """Whether two tagged forms are equal, type for type; `close` is a relative and absolute tolerance of floats."""
    if type(answer) is not type(expected):
        return False
    if isinstance(expected, float):
        return bool(answer == expected) or (
            close > 0 and math.isclose(answer, expected, rel_tol=close, abs_tol=close)
        )
    if isinstance(expected, list):
        return len(answer) == len(expected) and all(
            same(a, e, close) for a, e in zip(answer, expected, strict=True)
        )
    if isinstance(expected, dict):
        if "$object" in expected or answer.keys() != expected.keys():
            return False
        if "$dict" in expected:
            if not isinstance(answer["$dict"], list):
                return False
            pairs = sorted(answer["$dict"], key=_text), sorted(expected["$dict"], key=_text)
            return same(pairs[0], pairs[1], close)
        return all(same(answer[key], expected[key], close) for key in expected)
    return bool(answer == expected)


def loads(data: bytes | str) -> Any:
    """Reads JSON from an untrusted peer. Raises NotPlain for anything that is not tagged JSON of a sane depth."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"invalid JSON: {type(error).__name__}") from None
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > 2 * MAX_DEPTH + 2:
            raise NotPlain("the value is too deep")
        below: list[Any] = []
        for item in level:
            if isinstance(item, list):
                below += item
            elif isinstance(item, dict):
                below += item.values()
        level = below
