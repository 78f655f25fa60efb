"""Warms the interpreter up before it is forked: imports modules and runs samples once, so that no fork has to."""

from __future__ import annotations

import importlib
import io
import os
import signal
import site
import sys

from sandbox import worker
from sandbox.protocol import framing

PRELOAD = (
    "abc bisect collections collections.abc copy dataclasses datetime enum functools heapq itertools json "
    "math operator random re string textwrap time typing"
).split()
"""The modules that programs of language models import most; each costs a fork microseconds and saves milliseconds."""

_SAMPLE = b"""
import collections, functools, math
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: float = 1.0
@functools.lru_cache(None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
def words(text):
    counts = collections.Counter(w.lower() for w in text.split() if w)
    return sorted(counts.items(), key=lambda kv: (-kv[1], kv[0]))
try:
    assert fib(12) == 144 and words("a b a")[0] == ("a", 2), "wrong"
    for k, v in {n: n ** 2 for n in range(3)}.items():
        print(f"{k:>3} {v:.2f}", Point(k), math.sqrt(v))
    with open("/dev/null") as f:
        f.read()
    [][1]
except IndexError as error:
    print(error)
"""
_SAMPLES = {
    "numpy": b"""
import numpy as np
a = np.arange(6.0).reshape(2, 3)
b = np.array([[1, 2], [3, 4]])
print((a @ a.T).sum(), b.mean(), np.zeros(2), np.dot(b, b), a[a > 1], np.linalg.norm(a))
"""
}
"""Code that warms up packages that the host may ask for."""


def warm_up(imports: list[str]) -> None:
    """Imports modules and runs samples; leaves stdout, stderr and the namespace as they were."""
    _import_all(imports)
    site.setquit()
    site.sethelper()
    for stream, errors in (
        (sys.stdin, "replace"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    kept = sys.modules["__main__"], sys.argv, sys.stdout, sys.stderr
    samples = [_SAMPLE, *(_SAMPLES[name] for name in imports if name in _SAMPLES)]
    unused, other = framing.pair()
    interpreter = worker.Interpreter(unused)
    try:
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        for source in (*samples, b"1 / 0", b"x = 1\nx", b"def f(:"):
            interpreter.cell("<warm>", source)
        sys.stdout, sys.stderr = kept[2:]
        for source in samples:
            worker.script(source, "<warm>")
        worker.has_exit_work()
        sys.stdout.flush()
    finally:
        sys.modules["__main__"], sys.argv, sys.stdout, sys.stderr = kept
        unused.close()
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _import_all(imports: list[str]) -> None:
    """Imports without at-fork hooks: `random` would reseed in every fork, and a rollback has to keep its sequence."""
    register = os.register_at_fork
    os.register_at_fork = lambda **_: None
    try:
        for name in (*PRELOAD, *imports):
            importlib.import_module(name)
        if "numpy" in sys.modules:  # imported later, it could not be seeded with the session
            importlib.import_module("numpy.random")
    finally:
        os.register_at_fork = register
