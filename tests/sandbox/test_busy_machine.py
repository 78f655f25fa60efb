"""Other programs on the same processor: what a box waits for one counts neither against its limits nor its grade."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_cli.sandbox import Status, grade
from tests.helpers.sandbox import open_sandbox

OTHERS = 2
COMPUTE = "import time\nwhile time.process_time() < {seconds}: pass\n"


def counts_waiting() -> bool:
    """Whether the kernel counts how long a thread waits for a processor."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) > 0
    except (OSError, ValueError, IndexError):
        return False


@pytest.fixture
def busy() -> Iterator[None]:
    """One processor for this process, what it starts, and programs that want all of it."""
    if not hasattr(os, "sched_setaffinity") or not counts_waiting():
        pytest.skip("the kernel does not count how long a thread waits for a processor")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(OTHERS)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.wait()


async def test_only_what_others_take_of_the_processor_does_not_count(busy: None) -> None:
    """Each computes for less CPU time than its wall limit, and takes longer than that limit by the clock."""
    async with await open_sandbox(workers=1, wall=0.5, cpu=5.0) as sandbox:
        session = await sandbox.session()
        program = COMPUTE.format(seconds=0.3) + "print('done')"
        # A session's process has used CPU time before.
        spent = (
            "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
        )
        cell = f"x = 1\n{spent}\nprint('done')"
        for result in (await session.run(program), await session.cell(cell)):
            assert (result.status, result.stdout) == (Status.OK, "done\n"), result
        assert (await session.cell("print(x)")).stdout == "1\n"
        slow = "import time\ndef f(n):\n    end = time.process_time() + 0.3\n"
        slow += "    while time.process_time() < end: pass\n    return n"
        assert (await grade(session, slow, [{"call": "f", "args": [1], "expect": 1}])).passed == 1
        slow = COMPUTE.format(seconds=0.3) + "print(input())"
        assert (await grade(session, slow, [{"stdin": "1\n", "stdout": "1\n"}])).passed == 1
        for code in ("import time\ntime.sleep(3600)", "while True: pass"):
            result = await session.run(code, wall=0.3)
            assert result.status is Status.TIMEOUT, result
