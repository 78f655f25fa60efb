"""Warming up the interpreter before it is forked: what every program touches is touched once, here."""

from __future__ import annotations

import importlib
import io
import os
import signal
import site
import sys
import types
from typing import Any

import worker

PRELOAD = (
    "abc bisect collections collections.abc copy dataclasses datetime enum functools heapq itertools json "
    "math operator random re string textwrap time typing"
).split()
"""What programs of language models import most; each costs a fork a few microseconds and saves milliseconds."""

_SAMPLE = """
import math, collections, functools
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: float = 1.0
class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
@functools.lru_cache(None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
def words(text):
    counts = collections.Counter(w.lower() for w in text.split() if w)
    return sorted(counts.items(), key=lambda kv: (-kv[1], kv[0]))
squares = {n: n ** 2 for n in range(10)}
try:
    assert fib(12) == 144 and words("a b a")[0] == ("a", 2), "wrong"
    for k, v in squares.items():
        print(f"{k:>3} {v:.2f}", Point(k), math.sqrt(v))
    while squares:
        squares.popitem()
    with open("/dev/null") as f:
        f.read()
    [][1]
except IndexError as error:
    print(error)
else:
    pass
finally:
    print("done")
"""

_SAMPLES = {
    "numpy": """
import numpy as np
a = np.arange(6.0).reshape(2, 3)
b = np.array([[1, 2], [3, 4]])
print((a @ a.T).sum(), b.mean(), np.zeros(2), np.dot(b, b), a[a > 1], np.linalg.norm(a))
"""
}
"""Of packages that may be imported beforehand."""
_TIMES = 10
"""After so many the interpreter has made up its mind about how to run a function, and writes to it no more."""


def _numpy_random() -> None:
    """numpy.random, which could not be seeded with the session if it were imported later.

    It asks `secrets` for this one function, and that brings hashlib and OpenSSL, which every fork would pay for.
    """
    import random  # by now without its hook

    def whole(name: str) -> Any:
        sys.modules.pop("secrets", None)
        return getattr(importlib.import_module("secrets"), name)

    secrets = types.ModuleType("secrets")
    vars(secrets).update(randbits=random.SystemRandom().getrandbits, __getattr__=whole)
    sys.modules.setdefault("secrets", secrets)
    importlib.import_module("numpy.random")
    if sys.modules.get("secrets") is secrets:
        del sys.modules["secrets"]


def up(imports: list[str]) -> None:
    """Imports and runs samples; leaves stdout, stderr and the namespace as they were."""
    register = os.register_at_fork
    # random would seed itself again in every fork: a session that rolls back has to keep its sequence.
    os.register_at_fork = lambda **_: None
    try:
        for name in (*PRELOAD, *imports):
            importlib.import_module(name)
        if "numpy" in sys.modules:
            _numpy_random()
    finally:
        os.register_at_fork = register
    site.setquit()
    site.sethelper()
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    kept = sys.modules["__main__"], sys.argv, sys.stdout, sys.stderr
    samples = [sample.encode() for sample in (_SAMPLE, *(_SAMPLES[name] for name in imports if name in _SAMPLES))]
    session = worker.Session.__new__(worker.Session)
    session.module = worker.main_module()
    session.nonce = ""
    try:
        for _ in range(_TIMES):
            sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
            for source in (*samples, b"1 / 0", b"x = 1\nx", b"def f(:"):
                session.cell("<warm>", source)
            sys.stdout, sys.stderr = kept[2:]
            for source in samples:
                worker.script(source, "<warm>")
            worker.is_awaited()
            sys.stdout.flush()
    finally:
        sys.modules["__main__"], sys.argv, sys.stdout, sys.stderr = kept
    signal.signal(signal.SIGINT, signal.SIG_DFL)
