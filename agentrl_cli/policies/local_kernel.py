"""Compiled code for decoding (local_kernel.c), given a C compiler: attention in one call a layer, and plain draws.

Decoding attends from one token of each row to that row's own keys and values: little arithmetic, another length for
every row. Tensor operations pad those lengths and mask them, twenty calls a layer; the compiled function reads just
what is there, and serves rows that catch up with several tokens in the same forward. It is compiled when it is first
wanted and kept (local_compile.py). Without a C compiler the fused engine attends by tensor operations
(local_attention.py), as it does to prompts, and tokens are drawn by them (local_sampling.py).
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.local_bases import Base
from agentrl_cli.policies.local_cache import Shelf
from agentrl_cli.policies.local_compile import CompileError, loaded
from agentrl_cli.types import TOP_K, Float32, Int32

_LOG = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("local_kernel.c")
FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"),
)
"""Sums in any order; infinities and NaN stay what they are. Not -ffast-math, which also changes the process."""
WIDEST = 512
"""Most numbers of a head that the compiled attention holds (`held` in `sums`); wider ones take tensor operations."""

POINTERS = "row rotation position place shelf slot base base_slot base_length length".split()


class Plan(ctypes.Structure):
    """What is the same for all layers of a forward; the C side has the same fields."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in "tokens heads kv_heads dim window threads longest".split()),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
        *((name, ctypes.c_void_p) for name in POINTERS),
    )


class Ragged:
    """The new tokens of one forward, any number for each row.

    Args:
        places: Per row its shelf and where it stands there.
        starts: Per row the position of its first new token.
        counts: Per row how many new tokens it has, one at least.
        bases: Per row the beginning that it shares; its own row holds what comes after.
    """

    def __init__(
        self,
        places: Sequence[tuple[Shelf, int]],
        starts: Sequence[int],
        counts: Sequence[int],
        bases: Sequence[Base | None],
    ) -> None:
        numbers: dict[int, int] = {}
        self._shelves: list[Shelf] = []
        self._pointers: np.ndarray[Any, np.dtype[np.uint64]] | None = None
        """[layers, 2, shelves]"""
        rows = [(self._number(shelf, numbers), slot) for shelf, slot in places]
        begins = [(0, 0, 0) if b is None else (self._number(b.shelf, numbers), b.row, b.length) for b in bases]
        each = np.asarray(counts, np.int32)
        ends = each.cumsum(dtype=np.int32)
        first, own = np.asarray(starts, np.int32), np.asarray(begins, np.int32)
        within = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - each, each)
        self.positions: Int32 = np.repeat(first, each) + within
        """[tokens]"""
        self.last: Tensor | None = torch.from_numpy(ends - 1) if len(self.positions) > len(each) else None
        """[rows] each row's newest token; None where all have one."""
        self._arrays = (
            np.repeat(np.arange(len(each), dtype=np.int32), each),
            self.positions,
            self.positions,
            np.repeat(first - own[:, 2], each) + within,
            *(np.ascontiguousarray(column, np.int32) for column in np.asarray(rows, np.int32).T),
            *(np.ascontiguousarray(column, np.int32) for column in own.T),
            np.array([shelf.length for shelf in self._shelves], np.int32),
        )
        self.plan = Plan(len(self.positions), 0, 0, 0, 0, torch.get_num_threads(), int(self.positions.max()) + 1)
        for name, array in zip(POINTERS, self._arrays, strict=True):
            setattr(self.plan, name, array.ctypes.data)

    def _number(self, shelf: Shelf, numbers: dict[int, int]) -> int:
        number = numbers.setdefault(id(shelf), len(self._shelves))
        if number == len(self._shelves):
            self._shelves.append(shelf)
        return number

    def attend(
        self,
        layer: int,
        mixed: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        window: int | None = None,
        norms: tuple[Tensor | None, Tensor | None] = (None, None),
        eps: float = 0.0,
    ) -> Tensor:
        """One layer: mixed [tokens, heads + 2 kv_heads, dim] are queries, keys, values, before norms and rotation.

        Stores keys and values, changes `mixed`, returns [tokens, heads · dim]. cos and sin [most positions, dim];
        `norms` weigh queries and keys [dim]; `window`: a position sees so many, itself included. Raises PolicyError
        where there is no memory for the scores.
        """
        compiled = library()
        assert compiled is not None, "the engine looked for it"
        dim = mixed.shape[-1]
        if self._pointers is None:
            key = mixed[None, :, heads : heads + kv_heads].transpose(1, 2)
            every = [shelf.pointers(key) for shelf in self._shelves]
            self._pointers = np.stack(every).transpose(1, 2, 0).copy()
        pointers = self._pointers[layer]
        plan = self.plan
        plan.heads, plan.kv_heads, plan.dim, plan.window = heads, kv_heads, dim, window or 0
        plan.scale, plan.eps = scale, eps
        out = mixed.new_empty(len(mixed), heads * dim)
        tables = (cos.data_ptr(), sin.data_ptr(), *(None if norm is None else norm.data_ptr() for norm in norms))
        where = (pointers[0].ctypes.data, pointers[1].ctypes.data, out.data_ptr())
        if compiled.layer(ctypes.addressof(plan), mixed.data_ptr(), *tables, *where):
            raise PolicyError("There was no memory for the scores of attention.", hint="Lower rollout.concurrency.")
        return out


class DrawPlan(ctypes.Structure):
    """What is drawn from, and where to; the C side has the same fields."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in "rows vocabulary top threads".split()),
        *(
            (name, ctypes.c_void_p)
            for name in "logits heats numbers ids top_ids best chosen top_values total mean".split()
        ),
    )


def draw_plain(logits: Tensor, heats: Sequence[float], numbers: Sequence[float]) -> tuple[list[int], Float32] | None:
    """A token for each row, of the distribution that a temperature gives, and what is known of it.

    Args:
        logits: [rows, vocabulary].
        heats: [rows] temperatures above 0.
        numbers: [rows] uniform in [0, 1): the token whose cumulative probability first exceeds a row's number is drawn.

    Returns the ids, and [rows, 2 + 2 k] log-probability of the drawn token, entropy, the ids of the k = TOP_K likeliest
    (their bits) and their log-probabilities; None where there is no compiled code for such logits. Raises PolicyError
    where memory is short.
    """
    compiled = library()
    if compiled is None or logits.dtype != torch.float32 or logits.device.type != "cpu" or why_not():
        return None
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    top = min(TOP_K, vocabulary)
    heat, number = np.asarray(heats, np.float32), np.asarray(numbers, np.float64)
    ids, top_ids = np.empty(rows, np.int32), np.empty((rows, top), np.int32)
    best, chosen, values = (np.empty(shape, np.float32) for shape in (rows, rows, (rows, top)))
    total, mean = np.empty(rows), np.empty(rows)
    arrays = (heat, number, ids, top_ids, best, chosen, values, total, mean)
    places = (array.ctypes.data for array in arrays)
    plan = DrawPlan(rows, vocabulary, top, torch.get_num_threads(), logits.data_ptr(), *places)
    if compiled.draw(ctypes.addressof(plan)):
        raise PolicyError("There was no memory to draw a token.", hint="Lower rollout.concurrency.")
    log_sum = np.log(total)
    base = best + log_sum
    found = np.empty((rows, 2 + 2 * top), np.float32)
    found[:, 0], found[:, 1] = chosen - base, log_sum - mean / total
    found[:, 2 : 2 + top] = top_ids.view(np.float32)
    found[:, 2 + top :] = values - base[:, None]
    return ids.tolist(), found


class Library(NamedTuple):
    """The compiled functions."""

    layer: Callable[..., int]
    draw: Callable[..., int]


@cache
def library() -> Library | None:
    """The compiled functions, made and loaded the first time; None where they cannot be (`why_not`)."""
    return _build()[0]


def why_not() -> str:
    """Why there is no compiled function, or why it is not to be used; empty where it is."""
    compiled, why, threads = _build()
    if compiled is None or threads:
        return why
    return f"{why}, and torch uses several threads" if torch.get_num_threads() > 1 else ""


@cache
def _build() -> tuple[Library | None, str, bool]:
    """(functions, why there are none or none with threads, whether they use threads)."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "there is no C compiler", False
    try:
        return loaded(_load, SOURCE, compiler, [*FLAGS, "-fopenmp"]), "", True
    except CompileError as error:
        _LOG.debug("%s: %s", compiler, error)
        first = error
    if first.hung:
        return None, str(first), False
    try:
        return loaded(_load, SOURCE, compiler, list(FLAGS)), _threadless(first), False
    except CompileError as error:
        _LOG.debug("%s: %s", compiler, error)
        return None, str(error), False


def _threadless(error: CompileError) -> str:
    """Why the code has no threads, after it was made without them."""
    if isinstance(error.__cause__, subprocess.CalledProcessError):
        return "the C compiler has no OpenMP"
    return f"with threads {error}"


def _load(path: Path) -> Library:
    code = ctypes.CDLL(str(path))  # calls release the interpreter's lock
    code.agentrl_layer.argtypes = [ctypes.c_void_p] * 9
    code.agentrl_draw.argtypes = [ctypes.c_void_p]
    return Library(code.agentrl_layer, code.agentrl_draw)
