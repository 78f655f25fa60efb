"""The warmed-up interpreter in a box: few mappings, its code in huge pages where the kernel has any."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest

from agentrl_cli.config import SandboxConfig
from agentrl_cli.errors import SandboxUnavailable
from agentrl_cli.paths import sandbox_dir
from agentrl_cli.sandbox import Sandbox

LOOK = """
import ctypes
inside = ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if not first.endswith(":"):
        span, rights, offset, _, inode = line.split()[:5]
        low, high = (int(part, 16) for part in span.split("-"))
        print("mapping", low, high, rights, int(offset, 16), inode, int(low <= inside < high))
    elif first == "AnonHugePages:":
        print("huge", line.split()[1])
"""
_HUGE = 2 << 20


async def test_neighbours_are_one_mapping_and_the_code_is_in_huge_pages() -> None:
    try:
        sandbox = await Sandbox.open(SandboxConfig(workers=1))
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
    async with sandbox:
        lines = [line.split() for line in (await sandbox.run(LOOK)).stdout.splitlines()]
        # A program of its own, and a session: both run from what was replaced.
        session = await sandbox.session()
        assert (await session.cell("import re\nre.sub('a', 'b', 'aa')")).stdout == "'bb'\n"
    mappings = [line[1:] for line in lines if line[0] == "mapping"]
    huge = [int(line[1]) for line in lines if line[0] == "huge"]
    assert len(mappings) == len(huge) > 20
    for (_, end, rights, offset, inode, _), (start, _, others, begins, other, _) in pairwise(mappings):
        if end == start and inode == other != "0" and int(begins) > int(offset):
            assert (rights, others) not in {("r--p", "r-xp"), ("r-xp", "r--p")}, "constants beside code are one with it"
    (number,) = [number for number, mapping in enumerate(mappings) if mapping[-1] == "1"]
    low, high, rights, _, inode, _ = mappings[number]
    assert rights == "r-xp"
    # In small pages it would be dearer than the file: then it is left as it is.
    assert inode != "0" or huge[number] << 10 == int(high) - int(low) >= _HUGE


FILLED = """
import pages
small = [[bytes(size) for _ in range(9)] for size in range(31, 400, 16)]  # with holes between them
del small[::2]
pages.fill()
print(all(len({id(bytes_) >> 14 for bytes_ in [bytes(size) for _ in range(9)]}) == 1 for size in range(31, 400, 16)))
"""


def test_what_comes_after_the_holes_are_filled_lies_side_by_side() -> None:
    env = {**os.environ, "PYTHONPATH": str(sandbox_dir())}
    done = subprocess.run([sys.executable, "-c", FILLED], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stdout + done.stderr


GROWS = """
import pages
class Function:
    def __init__(self, call): self.call = call
    def __call__(self, *given): return self.call(*given)
class Other:
    taken = 0
    def give(size):
        Other.taken += size
        return Other.taken if Other.taken < 1 << 30 else 0
    malloc, free, sbrk = Function(give), Function(lambda place: None), Function(lambda by: 1)
pages._RAW = Other
pages.fill()
print(Other.taken >> 20)
"""


def test_a_heap_that_does_not_end_is_not_filled() -> None:
    """Other C libraries give out places elsewhere, and so does this one where its heap cannot grow."""
    env = {**os.environ, "PYTHONPATH": str(sandbox_dir())}
    done = subprocess.run([sys.executable, "-c", GROWS], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "63\n", done.stdout + done.stderr


USED = """
import secrets
import numpy as np
print(secrets.__spec__ is not None and secrets.token_hex(4).isalnum(), np.random.default_rng(1).random() < 1)
print(np.random.SeedSequence().entropy != np.random.SeedSequence().entropy, np.arange(4.0).reshape(2, 2) @ np.eye(2))
"""


async def test_a_program_finds_the_real_secrets_beside_numpy() -> None:
    try:
        sandbox = await Sandbox.open(SandboxConfig(workers=1, imports=["numpy"]))
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
    async with sandbox:
        session = await sandbox.session()
        for _ in range(2):
            assert (await session.run(USED)).stdout == "True True\nTrue [[0. 1.]\n [2. 3.]]\n"
