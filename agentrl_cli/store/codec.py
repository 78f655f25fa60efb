"""Arrays to blobs and values to JSON, and back, exactly.

Floats are little-endian float32 (float16 after pruning, recognised by its length), token ids int32, origins int8. A
float array of nothing but NaN is stored as NULL, so a prompt costs five bytes a token. In training signals an empty
blob means "written, and nothing but NaN", NULL means "never written".
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from agentrl_cli.errors import StoreError
from agentrl_cli.types import (
    TOP_K,
    Float32,
    Int8,
    Int32,
    Origin,
    Support,
    Tokens,
    no_support,
    supports,
)


def _plain(value: object) -> object:
    """Return a JSON value for what JSON cannot hold: numpy values as Python values, anything else as text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return str(value)


_encode = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), default=_plain, check_circular=False
).encode


def dumps(value: object) -> str:
    """Return JSON that any SQLite TEXT column takes."""
    text = _encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, from a tool that printed bytes
        return json.dumps(value, separators=(",", ":"), default=_plain)
    return text


def loads(text: str | None) -> Any:
    """Decode the text of `dumps`. Raises StoreError for anything else."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, TypeError) as error:
        raise _damage_error("Something in the store", error) from error


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turn the errors of decoding a damaged value into a StoreError that names `what`."""
    try:
        yield
    except (ValueError, TypeError, zlib.error) as error:
        raise _damage_error(what, error) from error
    except (
        StoreError
    ) as error:  # from `loads`, which has no name for the value; other StoreErrors pass
        if isinstance(error.__cause__, ValueError):
            raise _damage_error(what, error.__cause__) from error.__cause__
        raise


def _damage_error(what: str, error: Exception) -> StoreError:
    return StoreError(
        f"{what} is damaged: {error}.", hint="Everything else there can still be read."
    )


def clean(text: str) -> str:
    """Return a text that SQLite accepts: lone surrogates become escapes."""
    return text.encode(errors="backslashreplace").decode()


def number(value: Any) -> Any:
    """Return the number, NaN for NULL."""
    return math.nan if value is None else value


def dump_metrics(metrics: Mapping[str, Any]) -> str:
    """Return standard JSON, readable by SQLite's functions: NaN as null, infinity as 9e999."""
    parts = []
    for name, value in metrics.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if isinstance(plain, float) and not math.isfinite(plain):
            text = "null" if math.isnan(plain) else "9e999" if plain > 0 else "-9e999"
        else:
            text = dumps(plain)
        parts.append(f"{_encode(clean(str(name)))}:{text}")
    return "{" + ",".join(parts) + "}"


def load_metrics(text: str) -> dict[str, Any]:
    """Decode the text of `dump_metrics`."""
    return {name: number(value) for name, value in loads(text).items()}


_F4, _I4, I1 = np.dtype("<f4"), np.dtype("<i4"), np.dtype("i1")
_NANS = np.full(1 << 14, np.nan, _F4).tobytes()


def pack(array: Float32 | Int32 | Int8, kind: np.dtype[Any] = _F4) -> bytes:
    """Return the bytes of an array as numbers of a kind, little-endian float32 by default."""
    return array.astype(kind, copy=False).tobytes()


def no_number(data: bytes) -> bool:
    """Whether float32 bytes hold nothing but NaN. Compares bytes first: numpy is far slower for short arrays."""
    if data == _NANS[: len(data)]:
        return True
    if data[-1] & 0x7F != 0x7F or not data[-2] & 0x80:  # the last exponent is that of a number
        return False
    return bool(np.isnan(np.frombuffer(data, _F4)).all())


def floats_blob(array: Float32) -> bytes | None:
    """float32 bytes; None (NULL) if all are NaN."""
    data = pack(array)
    return None if no_number(data) else data


_MODEL, _FORCED = bytes([Origin.MODEL]), bytes([Origin.FORCED])


def token_columns(tokens: Tokens) -> tuple[Any, ...]:
    """Return `turn_tokens` values: n, ids, origin, logp_sampled, logp_policy, entropy, top_ids, top_logps, support."""
    ids, origin = pack(tokens.ids, _I4), pack(tokens.origin, I1)
    if (
        _MODEL not in origin and _FORCED not in origin
    ):  # nothing was sampled, so Tokens has no numbers
        return (len(tokens), ids, origin, None, None, None, None, None, None)
    top_ids = pack(tokens.top_ids, _I4)
    packed = None
    if tokens.support is not None:  # the size of each token's set, −1 for none, then the ids of all
        sizes = np.array([-1 if ids is None else len(ids) for ids in tokens.support], np.int32)
        sets = [ids for ids in tokens.support if ids is not None]
        packed = pack(np.concatenate([sizes, *sets]), _I4)
    return (
        len(tokens),
        ids,
        origin,
        floats_blob(tokens.logp_sampled),
        floats_blob(tokens.logp_policy),
        floats_blob(tokens.entropy),
        None if top_ids.count(b"\xff") == len(top_ids) else top_ids,
        floats_blob(tokens.top_logps),
        packed,
    )


def _read_support(blob: bytes | None, count: int) -> Support:
    """Return the sets of `count` tokens as `token_columns` packs them; NULL: none has one."""
    if blob is None:
        return no_support(count)
    numbers = np.frombuffer(blob, _I4).astype(np.int32)
    sizes, ids = numbers[:count], numbers[count:]
    if len(sizes) != count or int(sizes.clip(min=0).sum()) != len(ids):
        raise ValueError(f"the sets of {count} tokens have {len(ids)} ids")
    parts = np.split(ids, np.cumsum(sizes.clip(min=0))[:-1])
    return supports([None if size < 0 else part for size, part in zip(sizes, parts, strict=True)])


SIGNALS = (
    *("advantage", "logp_train", "ratio", "weight", "logp_ref", "value", "returns"),
    *("logp_teacher", "reward_advantage"),
)
"""Columns of `turn_tokens` that training writes, `clipped` aside."""
TOKENS = (
    "ids",
    "origin",
    "logp_sampled",
    "logp_policy",
    "entropy",
    "top_ids",
    "top_logps",
    "support",
)
"""Those that sampling writes, in the order of `token_columns`."""
_OTHERS: dict[str, tuple[type[Any], int, float]] = {
    "ids": (np.int32, 1, 0),
    "origin": (np.int8, 1, 0),
    "clipped": (np.int8, 1, 0),
    "top_ids": (np.int32, TOP_K, -1),
    "top_logps": (np.float32, TOP_K, math.nan),
}
"""Column → type, numbers of a token, and the number that NULL stands for. All others are one float32, NaN."""


def read_array(name: str, blobs: Sequence[bytes | None], counts: Sequence[int]) -> Any:
    """Return a column of `turn_tokens` as one array over rows of so many tokens each."""
    if name == "support":
        return np.concatenate([_read_support(*row) for row in zip(blobs, counts, strict=True)])
    kind, width, null = _OTHERS.get(name, (np.float32, 1, math.nan))
    parts = []
    for blob, count in zip(blobs, counts, strict=True):
        half = kind is np.float32 and blob and len(blob) != 4 * width * count
        stored = np.dtype(np.float16 if half else kind).newbyteorder("<")
        parts.append(np.frombuffer(blob, stored) if blob else np.full(width * count, null, kind))
    found = np.concatenate(parts).astype(kind, copy=False)
    if len(found) != width * sum(counts):
        raise ValueError(f"{name} does not have {sum(counts)} tokens")
    return found if width == 1 else found.reshape(-1, width)


def tokens_of(rows: Sequence[Sequence[Any]]) -> Tokens:
    """Return the tokens of an episode from `token_columns` rows, one per turn, in order."""
    if not rows:
        return Tokens.empty()
    counts, *columns = zip(*rows, strict=True)
    if not any(columns[-1]):  # no token has a support
        del columns[-1]
    return Tokens(*(read_array(*one, counts) for one in zip(TOKENS, columns, strict=False)))


def read_tokens(row: Any) -> dict[str, Any]:
    """Return the arrays of a row of `turn_tokens`, by column: a mapping, a `sqlite3.Row` or a row of pandas.

    Columns that the row lacks are left out; `n` and `ids` must be there. ids [n] int32, origin [n] int8, clipped [n]
    bool, top_ids [n, 5] int32, top_logps [n, 5] float32, others [n] float32. NULL becomes NaN, −1 in `top_ids` and
    False in `clipped`; `support` is left out. Raises StoreError for damaged arrays.
    """
    with decoding("A row of turn_tokens"):
        names, n = set(row.keys()), int(row["n"])
        blobs = {
            name: row[name] if isinstance(row[name], bytes) else None for name in names
        }  # pandas has NaN for NULL
        known = [name for name in (*TOKENS, *SIGNALS, "clipped") if name in names]
        if not blobs.get("support"):
            known = [name for name in known if name != "support"]
        out = {name: read_array(name, [blobs[name]], [n]) for name in known}
        if "clipped" in out:
            out["clipped"] = out["clipped"].astype(bool)
    return out


def marks(count: int) -> str:
    """`?,?,?`"""
    return ",".join("?" * count)
