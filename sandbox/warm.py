"""Warming up the interpreter before it is forked: what every program touches is touched once, here."""

from __future__ import annotations

import importlib
import io
import os
import signal
import site
import sys

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


def up(imports: list[str]) -> None:
    """Imports and runs samples; leaves stdout, stderr and the namespace as they were."""
    register = os.register_at_fork
    # random would seed itself again in every fork: a session that rolls back has to keep its sequence.
    os.register_at_fork = lambda **_: None
    try:
        for name in (*PRELOAD, *imports):
            importlib.import_module(name)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # imported later it could not be seeded with the session
    finally:
        os.register_at_fork = register
    site.setquit()
    site.sethelper()
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    main = sys.modules["__main__"]
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    try:
        session = worker.Session.__new__(worker.Session)
        session.module = worker.main_module()
        session.nonce = ""
        for source in (_SAMPLE, "1 / 0", "x = 1\nx", "def f(:"):
            session.cell("<warm>", source.encode())
        exec(compile(_SAMPLE, "<warm>", "exec"), worker.main_module().__dict__)
    finally:
        sys.stdout, sys.stderr = out, err
        sys.modules["__main__"] = main
    signal.signal(signal.SIGINT, signal.SIG_DFL)
