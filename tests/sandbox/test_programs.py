"""Programs of a session: limits, the end of an interpreter, and none that affects the next."""

import asyncio

from agentrl_cli.sandbox import Session

SANDBOX = {"wall": 3.0}


async def test_a_program_runs_under_the_limits_and_the_state_of_its_session(
    session: Session,
) -> None:
    count = "import os\nn = 0\ntry:\n    while os.fork():\n        n += 1\nexcept OSError:\n    print(n)"
    own = await session.sandbox.session(processes=5, memory_mb=300, seed=7)
    seen = [(await own.run(count)).stdout for _ in range(2)]
    assert (await own.cell("import random\nrandom.random()")).ok
    quiet = "import random, resource\nprint(random.random(), resource.getrlimit(resource.RLIMIT_AS)[0] > 300 << 20)"
    drawn = {(await own.run(quiet)).stdout for _ in range(3)}
    seen.append((await own.run(count)).stdout)
    assert len(set(seen)) == 1 and len(drawn) == 1, (seen, drawn)


async def test_threads_and_exit_handlers_are_awaited(session: Session) -> None:
    thread = "import threading, time\ndef late():\n    time.sleep(0.1)\n    print('late')"
    assert (
        await session.run(f"{thread}\nthreading.Thread(target=late).start()")
    ).stdout == "late\n"
    look = "import atexit, io, os, sys, threading\nalive = threading.main_thread().is_alive"
    assert (
        await session.run(f"{look}\natexit.register(lambda: print(alive()))")
    ).stdout == "False\n"
    replaced = "class Out(io.StringIO):\n    def flush(self): os.write(1, b'%d' % alive())\nsys.stdout = Out()"
    assert (await session.run(f"{look}\n{replaced}")).stdout == "0"


LEAVES = """
class Says:
    def __init__(self): self.file = open("left", "w")
    def __del__(self): print("closed", say())
def say(): return rest
says, rest = Says(), "well"
says.file.write("kept")
"""


async def test_the_end_of_a_program_is_that_of_an_interpreter(session: Session) -> None:
    for code in (LEAVES, f"{LEAVES}1 / 0", "import os\n" + LEAVES, f"{LEAVES}raise SystemExit"):
        result = await session.run(code)
        assert result.stdout == "closed well\n" and result.ok == ("/" not in code), result.text()
        assert await session.read("left") == b"kept"
        await session.write("left", "")
    assert (
        await session.run("import os, sys\nprint(1)\nos.closerange(3, 200)\nsys.stdout.close()")
    ).ok


async def test_a_programs_changes_to_its_empty_input_end_with_it(session: Session) -> None:
    flags = "import fcntl, os\nprint(fcntl.fcntl(0, fcntl.F_GETFL))\nfcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK)"
    assert len({(await session.run(flags)).stdout for _ in range(3)}) == 1


FILLS = """
import os, signal, time
def fill(*_):
    try:
        while os.fork():
            pass
        time.sleep(5)
    except OSError:
        pass
signal.signal(signal.SIGALRM, fill)
_ = signal.setitimer(signal.ITIMER_REAL, 0.02)
"""


async def test_a_session_that_leaves_no_process_for_its_programs_is_its_own_fault(
    session: Session,
) -> None:
    full = await session.sandbox.session(processes=4, keep=8)
    assert (await full.cell(FILLS)).ok
    await asyncio.sleep(0.05)
    assert (await full.run("print(6 * 7)")).stdout == "42\n"
    assert not any(
        name.startswith("sandbox_") or name == "host_resources" for name in session.sandbox.counts
    )


THREAD = """
import threading, time
ticks = 0
def tick():
    global ticks
    while True:
        time.sleep(0.01)
        ticks += 1
threading.Thread(target=tick, daemon=True).start()
"""
WAKES = """
import os, signal
for name in os.listdir("/proc"):
    if name.isdecimal() and int(name) not in (1, os.getpid()):
        os.kill(int(name), signal.SIGCONT)
"""


async def test_a_session_process_resumed_by_a_program_is_paused_again(session: Session) -> None:
    assert (await session.cell(THREAD)).ok
    assert (await session.run(WAKES)).ok
    await asyncio.sleep(2.0)
    seen = await session.cell("print(ticks)")
    assert seen.ok and int(seen.stdout) < 120, seen.text()
