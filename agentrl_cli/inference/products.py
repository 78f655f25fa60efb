"""Ways to multiply few rows with a matrix, and which is the fastest here for a matrix of this shape.

MKL, OpenBLAS (numpy's) and oneDNN differ by up to three times where a product has few rows, and by processor in either
direction. So each shape is tried once per machine, for milliseconds, and the choice is kept in the user's state folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from agentrl_cli.inference.remembered import recall, remember

Product = Callable[[Tensor], Tensor]
"""From rows [n, in] to [n, out]."""
ROWS = (1, 4, 16, 64)
"""Of the trials: a rollout begins with many sequences and ends with few."""
MOST = 2**22
"""Numbers of a matrix that is tried; a larger one is tried with fewer columns."""
_REPEATS = 8
TICK = 1e-9
"""Seconds of a product that the clock does not see."""


def as_torch(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the product as torch computes it."""
    return partial(linear, weight=weight, bias=bias)


def by_input(weight: Tensor, bias: Tensor | None) -> Product:
    """Return torch's product with a matrix that lies by input, for which MKL has another kernel."""
    return partial(linear, weight=weight.T.contiguous().T, bias=bias)


def by_numpy(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the product of numpy's BLAS."""
    matrix = weight.T.contiguous().numpy()

    def product(rows: Tensor) -> Tensor:
        found = torch.from_numpy(np.matmul(rows.numpy(), matrix))
        return found if bias is None else found.add_(bias)

    return product


def by_onednn(weight: Tensor, bias: Tensor | None) -> Product:
    """Return oneDNN's product with a matrix packed for it. Its operator is torch's own: absent, others are taken."""
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight.contiguous(), ROWS[-1])
    return lambda rows: ops._linear_pointwise(rows, packed, bias, "none", [], "")


WAYS: dict[str, Callable[[Tensor, Tensor | None], Product]] = {
    "torch": as_torch,
    "by input": by_input,
    "numpy": by_numpy,
    "oneDNN": by_onednn,
}


def fastest_way(like: Tensor, out: int, width: int) -> str:
    """Return the name of the fastest way for matrices [out, width] of this tensor's kind on this machine."""
    if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.bfloat16):
        return "torch"
    blas = " and numpy" * _numpy_waits()
    name = f"{width} x {out} {like.dtype} {torch.get_num_threads()} threads{blas}"
    found = recall("products", name)
    if found not in WAYS:
        found = _try_ways(min(out, MOST // width), width, like.dtype)
        remember("products", name, found)
    return found


def _numpy_waits() -> bool:
    """Whether numpy's BLAS computes in one thread: several of them spin while they wait, at ten times the cost."""
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    return threads == "1"


@torch.inference_mode()
def _try_ways(out: int, width: int, dtype: torch.dtype) -> str:
    """Time all ways with some rows and return the one that loses least to the best for each count of rows."""
    weight = torch.randn(out, width).to(dtype)
    seconds = {}
    for name, way in WAYS.items():
        if name == "numpy" and (dtype != torch.float32 or not _numpy_waits()):
            continue
        try:
            product = way(weight, None)
            seconds[name] = [_seconds(product, torch.randn(n, width).to(dtype)) for n in ROWS]
        except (RuntimeError, AttributeError, NotImplementedError):  # not in this build of torch
            continue
    best = [min(column) for column in zip(*seconds.values(), strict=True)]
    lost = {name: sum(map(float.__truediv__, row, best)) for name, row in seconds.items()}
    return min(lost, key=lost.__getitem__)


def _seconds(product: Product, rows: Tensor) -> float:
    """Return the least seconds of a product."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times = []
    for _ in range(1 + _REPEATS):  # the first one makes buffers
        began = clock()
        product(rows)
        times.append(clock() - began)
    return least(times)


def least(times: Sequence[float]) -> float:
    """Return the least time above 0: in a virtual machine a thread's clock may miss a product."""
    return min((seconds for seconds in times if seconds > 0), default=TICK)
