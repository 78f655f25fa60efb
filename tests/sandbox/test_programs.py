"""Programs of a session are forked by a template: they run as without one, and none affects the next through it."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from agentrl_cli.sandbox import Sandbox, Session

SANDBOX = {"wall": 3.0}


@pytest_asyncio.fixture(loop_scope="module")
async def session(sandbox: Sandbox) -> Session:
    if sandbox.level != "ns":
        pytest.skip("only boxes with a process namespace have one")
    session = await sandbox.session()
    await session.run("pass")  # forked by the box itself
    return session


OTHERS = """
import os
others = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) not in (1, os.getpid())]
"""
SAME = """
import ctypes, os, random, resource, signal, sys, threading, time
limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
held = [fields[name] for name in ("Uid", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Seccomp_filters", "SigIgn")]
open_fds = sorted(map(int, os.listdir("/proc/self/fd")))
inherited = [os.get_inheritable(fd) for fd in range(4)]
me = threading.get_native_id() == os.getpid() == os.getpgrp() == os.getsid(0)
clock = time.pthread_getcpuclockid(threading.get_ident())
print(me, os.getppid(), time.clock_gettime(clock) > 0, ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), os.umask(0), os.getcwd())
print(limits[1:], held, open_fds, inherited, random.random(), open("/proc/self/oom_score_adj").read())
print(sys.stdin.read(), sorted(os.environ), sys.argv, sorted(sys.modules), sys.path)
try:
    os.memfd_create("x")
except PermissionError as error:
    print(error)
"""


async def test_a_program_finds_what_it_finds_without_a_template(session: Session) -> None:
    code = OTHERS + SAME + "print(len(others))"
    one, other = [await session.sandbox.session(seed=1) for _ in range(2)]
    await one.run("pass")
    by_template, alone = await one.run(code, "given"), await other.run(code, "given")
    assert by_template.ok and by_template.stdout.endswith("\n1\n"), by_template.text()
    # But for the template itself, which the number of processes that a program may start leaves out.
    most = session.limits.processes
    seen = by_template.stdout.replace(f"({most + 3}, {most + 3})", f"({most + 2}, {most + 2})")
    assert seen[:-2] == alone.stdout[:-2] and alone.stdout.endswith("\n0\n")
    assert "LD_BIND_NOW" not in seen and "<warm>" not in seen


async def test_a_template_is_closed_to_programs(session: Session) -> None:
    result = await session.run(OTHERS + """
import errno
for name in ("mem", "environ", "maps", "fd/4", "root"):
    try:
        os.open(f"/proc/{others[0]}/{name}", os.O_RDWR if name == "mem" else os.O_RDONLY)
        print(name, "is open")
    except PermissionError:
        pass
print(len(others))
""")  # fmt: skip
    assert result.stdout == "1\n", result.text()


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
async def test_a_signal_to_the_template_harms_no_later_program(
    session: Session, number: str
) -> None:
    harm = await session.run(
        OTHERS + f"import signal\nos.kill(others[0], signal.{number})\nprint('sent')"
    )
    assert (harm.stdout, harm.stopped) == ("sent\n", 0), harm.text()
    for _ in range(3):
        result = await session.run("print(open(0).read())", "6")
        assert (result.status, result.stdout) == ("ok", "6\n"), result.text()
    assert not any(name.startswith("sandbox_") for name in session.sandbox.counts), (
        session.sandbox.counts
    )


async def test_a_program_that_leaves_something_takes_the_template_with_it(session: Session) -> None:
    leaves = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(30)"
    assert (await session.run(leaves)).stopped == 1
    for expected in ("0\n", "1\n", "1\n"):
        assert (await session.run(OTHERS + "print(len(others))")).stdout == expected


STOPS = """
import os, signal
def stop(*_):
    while True:
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) not in (1, os.getpid()):
                for _ in range(50):
                    try:
                        os.kill(int(name), signal.SIGSTOP)
                    except ProcessLookupError:
                        break
signal.signal(signal.SIGALRM, stop)
_ = signal.setitimer(signal.ITIMER_REAL, 0.01)
"""


async def test_a_session_that_stops_its_programs_meets_the_wall_limit(session: Session) -> None:
    await session.run("pass")
    assert (await session.cell(STOPS)).ok
    await asyncio.sleep(0.05)
    result = await session.run(
        "sum(range(5_000_000))", wall=1.0
    )  # the template is stopped, or its child at the latest
    assert (result.status, result.detail) == ("timeout", "wall"), result.text()
    assert not any(name.startswith("sandbox_") for name in session.sandbox.counts), (
        session.sandbox.counts
    )


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
    await full.run("pass")
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
    """Its threads would go on between calls, unwatched."""
    assert (await session.cell(THREAD)).ok
    assert (await session.run(WAKES)).ok
    await asyncio.sleep(2.0)
    seen = await session.cell("print(ticks)")
    assert seen.ok and int(seen.stdout) < 120, seen.text()
