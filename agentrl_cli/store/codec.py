"""Arrays to blobs and values to JSON, and back, exactly.

Floats are little-endian float32 (float16 after pruning, recognised by its length), token ids int32, origins int8. A
float array of nothing but NaN is stored as NULL, so a prompt costs five bytes a token. In training signals an empty
blob means "written, and nothing but NaN", NULL means "never written".
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def _encoder() -> Callable[[object], str]:
    """`json.JSONEncoder.encode` with its C encoder built once: building it takes longer than encoding a message.

    A value that contains itself raises RecursionError.
    """
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain).encode
    iterate = make(None, _plain, json.encoder.encode_basestring, None, ":", ",", False, False, True)
    return lambda value: "".join(iterate(value, 0))


_encode = _encoder()


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
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def number(value: Any) -> Any:
    """Return the number, NaN for NULL."""
    return math.nan if value is None else value


def dump_metrics(metrics: Mapping[str, Any]) -> str:
    """Return standard JSON, readable by SQLite's functions: NaN as null, infinity as 9e999."""
    parts = []
    for name, value in metrics.items():
        parts.append(f"{_encode(clean(str(name)))}:{_metric(value)}")
    return "{" + ",".join(parts) + "}"


def _metric(value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "null" if math.isnan(value) else ("9e999" if value > 0 else "-9e999")
    return dumps(value)


def load_metrics(text: str) -> dict[str, Any]:
    """Decode the text of `dump_metrics`."""
    return {name: number(value) for name, value in loads(text).items()}


_F4, _I4 = np.dtype("<f4"), np.dtype("<i4")
_NANS = np.full(1 << 14, np.nan, _F4).tobytes()
_ONES = b"\xff" * (1 << 16)
"""Four of these bytes are the id −1."""


def float_bytes(array: Float32) -> bytes:
    """Little-endian float32 bytes."""
    return (array if array.dtype is _F4 else array.astype(_F4)).tobytes()


def no_number(data: bytes) -> bool:
    """Whether float32 bytes hold nothing but NaN. Compares bytes first: numpy is far slower for short arrays."""
    if data == _NANS[: len(data)]:
        return True
    if data[-1] & 0x7F != 0x7F or not data[-2] & 0x80:  # the last exponent is that of a number
        return False
    return bool(np.isnan(np.frombuffer(data, _F4)).all())


def _no_alternative(data: bytes) -> bool:
    """Whether int32 bytes hold nothing but −1."""
    return data == _ONES[: len(data)] or (
        len(data) > len(_ONES) and data.count(b"\xff") == len(data)
    )


def floats_blob(array: Float32) -> bytes | None:
    """float32 bytes; None (NULL) if all are NaN."""
    data = float_bytes(array)
    return None if no_number(data) else data


def blob_floats(blob: bytes | None, n: int) -> Float32:
    """[n] float32; all NaN if nothing was stored."""
    if not blob:
        return np.full(n, np.nan, np.float32)
    return np.frombuffer(blob, "<f4" if len(blob) == 4 * n else "<f2").astype(np.float32)


def ints_blob(array: Int32) -> bytes:
    """Little-endian int32 bytes."""
    return (array if array.dtype is _I4 else array.astype(_I4)).tobytes()


def blob_ints(blob: bytes) -> Int32:
    """int32 array of `ints_blob` bytes."""
    return np.frombuffer(blob, "<i4").astype(np.int32)


def bytes_blob(array: Int8) -> bytes:
    """int8 bytes."""
    return array.astype(np.int8, copy=False).tobytes()


_MODEL, _FORCED = bytes([Origin.MODEL]), bytes([Origin.FORCED])


def token_columns(tokens: Tokens) -> tuple[Any, ...]:
    """Return `turn_tokens` values: n, ids, origin, logp_sampled, logp_policy, entropy, top_ids, top_logps, support."""
    ids, origin = ints_blob(tokens.ids), bytes_blob(tokens.origin)
    if (
        _MODEL not in origin and _FORCED not in origin
    ):  # nothing was sampled, so Tokens has no numbers
        return (len(tokens), ids, origin, None, None, None, None, None, None)
    top_ids = ints_blob(tokens.top_ids)
    return (
        len(tokens),
        ids,
        origin,
        floats_blob(tokens.logp_sampled),
        floats_blob(tokens.logp_policy),
        floats_blob(tokens.entropy),
        None if _no_alternative(top_ids) else top_ids,
        floats_blob(tokens.top_logps),
        None if tokens.support is None else support_blob(tokens.support),
    )


def support_blob(support: Support) -> bytes:
    """Return the size of each token's set as int32, −1 for none, then the ids of all."""
    sets = [ids for ids in support if ids is not None]
    sizes = np.array([-1 if ids is None else len(ids) for ids in support], np.int32)
    return ints_blob(np.concatenate([sizes, *sets]))


def blob_support(blob: bytes | None, count: int) -> Support:
    """`support_blob`'s sets of `count` tokens; NULL: none has one."""
    if blob is None:
        return no_support(count)
    numbers = blob_ints(blob)
    sizes, ids = numbers[:count], numbers[count:]
    if len(sizes) != count or int(sizes.clip(min=0).sum()) != len(ids):
        raise ValueError(f"the sets of {count} tokens have {len(ids)} ids")
    parts = np.split(ids, np.cumsum(sizes.clip(min=0))[:-1])
    return supports([None if size < 0 else part for size, part in zip(sizes, parts, strict=True)])


def tokens_of(rows: Sequence[Sequence[Any]]) -> Tokens:
    """Return the tokens of an episode from `token_columns` rows, one per turn, in order."""
    if not rows:
        return Tokens.empty()
    count = sum(row[0] for row in rows)

    def floats(column: int) -> Float32:
        return np.concatenate([blob_floats(row[column], row[0]) for row in rows])

    tops = [
        np.full(TOP_K * row[0], -1, np.int32) if row[6] is None else blob_ints(row[6])
        for row in rows
    ]
    top_logps = np.concatenate([blob_floats(row[7], TOP_K * row[0]) for row in rows])
    return Tokens(
        blob_ints(b"".join(row[1] for row in rows)),
        np.frombuffer(b"".join(row[2] for row in rows), np.int8).copy(),
        floats(3),
        floats(4),
        floats(5),
        np.concatenate(tops).reshape(count, TOP_K),
        top_logps.reshape(count, TOP_K),
        np.concatenate([blob_support(row[8], row[0]) for row in rows])
        if any(row[8] for row in rows)
        else None,
    )


_SIGNALS = ("advantage", "logp_train", "ratio", "weight", "logp_ref", "value", "returns")


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
        out: dict[str, Any] = {"ids": blob_ints(blobs["ids"] or b"")}
        if "origin" in names:
            out["origin"] = np.frombuffer(blobs["origin"] or b"", np.int8).copy()
        for name in names & {"logp_sampled", "logp_policy", "entropy", *_SIGNALS}:
            out[name] = blob_floats(blobs[name], n)
        if "top_ids" in names:
            out["top_ids"] = blob_ints(blobs["top_ids"] or _ONES[:4] * (TOP_K * n)).reshape(
                n, TOP_K
            )
        if "top_logps" in names:
            out["top_logps"] = blob_floats(blobs["top_logps"], TOP_K * n).reshape(n, TOP_K)
        if blobs.get("support"):
            out["support"] = blob_support(blobs["support"], n)
        if "clipped" in names:
            out["clipped"] = np.frombuffer(blobs["clipped"] or bytes(n), np.int8).astype(bool)
        if wrong := [name for name, array in out.items() if len(array) != n]:
            raise ValueError(f"{', '.join(sorted(wrong))} do not have {n} tokens")
    return out


def marks(count: int) -> str:
    """`?,?,?`"""
    return ",".join("?" * count)
