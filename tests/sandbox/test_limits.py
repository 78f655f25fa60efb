"""The limits of an execution and of a session: each is named, counted, and shown to the model."""

import asyncio
import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentrl_cli.errors import SandboxFault
from agentrl_cli.sandbox import Sandbox, Session, Status, cgroup, grade
from agentrl_cli.sandbox.channel import guest_module
from agentrl_cli.sandbox.runner_process import Process

SANDBOX = {"wall": 3.0}


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("import sys; sys.exit(4)", Status.EXIT, ""),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", Status.BLOCKED, "net"),
        ("open('/usr/x', 'w')", Status.BLOCKED, "fs"),
        ("open('f', 'wb').write(bytes(70 << 20))", Status.DISK_LIMIT, "a file is too large"),
        (
            "for n in 'fg': open(n, 'wb').write(bytes(60 << 20))",
            Status.DISK_LIMIT,
            "the work folder is full",
        ),
        ("for i in range(5000): open(str(i), 'w').close()", Status.DISK_LIMIT, "too many files"),
        ("files = [open('/dev/null') for _ in range(300)]", Status.OPEN_FILES_LIMIT, ""),
        (
            "import os\nwhile os.fork(): pass\nimport time; time.sleep(9)",
            Status.PROCESS_LIMIT,
            "processes",
        ),
        ("class E(Exception):\n  def __str__(self): return 1 / 0\nraise E", Status.EXCEPTION, "E"),
        ("def f(:", Status.EXCEPTION, "SyntaxError"),
    ],
)
async def test_a_cell_that_meets_a_limit_keeps_its_state(
    session: Session, code: str, status: Status, detail: str
) -> None:
    await session.cell("x = 1")
    result = await session.cell(code)
    assert (result.status, result.detail) == (status, detail)
    assert (result.state_kept, result.rolled_back) == (True, False)
    assert (await session.cell("x")).stdout == "1\n"


async def test_the_name_of_an_exception_is_shown_without_control_characters(
    session: Session,
) -> None:
    odd = "raise type('\\x1b[2J\\n', (Exception,), {})('text')"
    for result in (await session.cell(odd), await session.run(odd)):
        assert (result.status, result.detail) == (Status.EXCEPTION, "\\x1b[2J\\n")
    graded = await grade(session, f"def f(): {odd}", [{"call": "f", "expect": 1}])
    assert graded.failures == ("test 1: f() gave exception \\x1b[2J\\n: text",)


async def test_shared_memory_counts(sandbox: Sandbox) -> None:
    session = await sandbox.session(memory_mb=100, wall=5.0)
    code = (
        "import mmap, os, time\n[os.fork() for _ in range(2)]\nm = mmap.mmap(-1, 60 << 20)\n"
        "m.write(b'x' * (60 << 20))\ntime.sleep(3)"
    )
    assert (await session.run(code)).status is (await session.cell(code)).status is Status.MEMORY
    denied = await session.bash("python3 -S -c 'import os; os.memfd_create(\"x\")'", "in")
    assert "PermissionError" in denied.stderr
    # its own memfd for that is allowed
    assert (await session.run("print(input())", "in")).stdout == "in\n"


async def test_memory_that_a_checkpoint_shares_counts_once(sandbox: Sandbox) -> None:
    session = await sandbox.session(memory_mb=200)
    assert (await session.cell("b = b'x' * (120 << 20)")).ok
    assert (await session.cell("import time; time.sleep(0.4); len(b) >> 20")).stdout == "120\n"


async def test_output_is_capped_in_the_middle_and_always_text(sandbox: Sandbox) -> None:
    session = await sandbox.session(output_kb=1)
    result = await session.cell("print('a' * 5000 + 'z' * 5000)")
    said = "a" * 512 + "\n[... 8977 bytes left out ...]\n" + "z" * 511 + "\n"
    assert result.truncated and result.stdout == said
    code = r"import sys; print('\ud800\0\x1b[2J'); sys.stdout.flush(); sys.stdout.buffer.write(b'\xff'); None"
    assert (await session.cell(code)).stdout == "\\ud800\0\x1b[2J\n\ufffd"


@pytest.mark.parametrize(
    ("command", "limit", "says"),
    [
        ("head -c 70000000 /dev/zero > f", "file_mb", "a file may have 64 MiB"),
        (
            "dd if=/dev/zero of=f bs=1M count=60 && cp f g",
            "disk_mb",
            "all files together may have 64 MiB",
        ),
        (
            "for i in $(seq 5000); do echo >$i || exit 1; done",
            "inodes",
            "4096 files and folders in all",
        ),
        (
            "python3 -S -c 'f = [open(\"/dev/null\") for _ in range(300)]'",
            "open_files",
            "the limit is 256 for each",
        ),
        (
            "python3 -S -c 'b = bytearray(4 << 30)'",
            "memory_mb",
            "out of memory: the limit is 1024 MiB",
        ),
        (
            "for i in $(seq 99); do sleep 9 & done",
            "processes",
            "too many processes or threads: the limit is 32",
        ),
        ("(kill -XCPU $BASHPID)", "cpu", "5 s of CPU time"),
        ("sleep 9", "wall", "timed out after 3 s"),
        ("yes", "output_kb", "more than 16 MiB of output"),
    ],
)
async def test_a_limit_that_a_command_meets_is_named_and_counted(
    sandbox: Sandbox, session: Session, command: str, limit: str, says: str
) -> None:
    result = await session.bash(command)
    assert (result.limit, result.infrastructure) == (limit, False) and says in result.text(), result
    assert sandbox.limits_hit == {limit: 1} and sandbox.counts == {result.status: 1}
    assert (await session.bash("rm -f * && echo next")).stdout == "next\n"


def as_command(code: str) -> str:
    return f"python3 -S - <<'END'\n{code}\nEND"


@pytest.mark.parametrize("op", ["cell", "run", "bash"])
async def test_cpu_seconds_of_children_count(sandbox: Sandbox, op: str) -> None:
    """Bounded in CPU seconds of the children, not of the clock: on a busy machine a second of CPU takes many."""
    session = await sandbox.session(cpu=0.6, wall=60.0)
    loop = "sh -c 'while :; do :; done'"
    busy = f'import os\nfor _ in range(999):\n    os.system("timeout 0.3 {loop}")\n'
    busy += "    print(sum(os.times()[2:4]), flush=True)"
    result = await getattr(session, op)(as_command(busy) if op == "bash" else busy)
    assert (result.status, result.detail) == (Status.TIMEOUT, "cpu"), result
    assert 0.2 < float(result.stdout.split()[-1]) < 1.2, result


HOG = (
    "import os, time\nfor _ in range(8):\n"
    "    if os.fork() == 0:\n        b = b'x' * (90 << 20); time.sleep(3); os._exit(0)\n"
    "for _ in range(8): assert os.wait()[1] == 0\n"
)


async def test_a_burst_of_memory_is_the_codes_own_fault(sandbox: Sandbox) -> None:
    session = await sandbox.session(memory_mb=100, disk_mb=32)
    for op, code in (("run", HOG), ("cell", HOG), ("bash", as_command(HOG))):
        result = await getattr(session, op)(code)
        assert (result.status, result.limit) == (Status.MEMORY, "memory_mb"), result
    graded = await grade(session, f"def f():\n    exec({HOG!r})\n", [{"call": "f", "expect": 1}])
    assert "memory" in graded.failures[0] and sandbox.counts[Status.HOST_RESOURCES] == 0
    assert (await session.cell("1 + 1")).stdout == "2\n"


@pytest.mark.parametrize("later", [0.0, 0.001, 0.005, 0.02])
async def test_a_function_that_dies_after_its_last_answer_keeps_the_answer(
    session: Session, later: float
) -> None:
    code = (
        "import os, threading, time\ndef f(n):\n"
        "    threading.Thread(target=lambda: (time.sleep(n), os._exit(3))).start()\n    return n"
    )
    graded = await grade(session, code, [{"call": "f", "args": [later], "expect": later}])
    assert graded.total == 1 and (graded.passed or re.search("exit|crash", graded.failures[0]))
    assert (await session.cell("1 + 1")).stdout == "2\n"


async def test_a_neighbour_that_dies_of_anothers_memory_is_not_at_fault(sandbox: Sandbox) -> None:
    if cgroup.place() is None:
        pytest.skip(cgroup.describe())
    session = await sandbox.session()
    await session.cell("x = 41")
    (runner,) = sandbox.pool.runners[()]
    assert isinstance(runner, Process) and runner.group is not None
    # Less for all boxes of the runner together than one may have: as where the others hold the rest.
    cgroup.set_limit(runner.group.folder, 160 << 20)
    with pytest.raises(SandboxFault, match="host_resources"):
        await session.cell("b = b'x' * (300 << 20)")
    assert sandbox.counts == {Status.OK: 1, Status.HOST_RESOURCES: 2} and not sandbox.limits_hit
    cgroup.set_limit(runner.group.folder, 1 << 30)
    again = await sandbox.session()
    assert (await again.cell("b = b'x' * (300 << 20); len(b) >> 20")).stdout == "300\n"


@pytest.mark.parametrize(
    ("kills", "over", "killed", "whose"),
    [
        (3, False, True, ""),
        (4, False, True, "others"),
        (4, False, False, ""),
        (4, True, True, "own"),
    ],
)
def test_without_a_cgroup_only_what_was_killed_may_be_the_machines_fault(
    tmp_path: Path, kills: int, over: bool, killed: bool, whose: str
) -> None:
    file = tmp_path / "vmstat"
    file.write_text("nr_free 5\noom_kill 3\n")
    seen = guest_module("processes").OutOfMemoryKills([])
    for fd in seen.fds:
        os.close(fd)
    with open(file, "rb") as numbers:
        seen.fds = [numbers.fileno()]
        seen.since(over=False, killed=True)
        file.write_text(f"nr_free 5\noom_kill {kills}\n")
        assert seen.since(over=over, killed=killed) == whose


EVENTS = "low 0\nhigh 0\nmax 9\noom 1\noom_kill {}\n".format
LIMIT = "104857600\n"
# Files of a cgroup, and what follows: whether an execution begins, what the kernel writes then, whether the code was
# over its limit, whether it was killed, and whose memory that was.
KILLS: dict[str, tuple[dict[str, str], list[tuple[bool, dict[str, str], bool, bool, str]]]] = {
    "version two": (
        {"memory.events": "low 0\nhigh 0\nmax 9\noom 0\noom_kill 0\n"},
        [
            (True, {"memory.events": EVENTS(0)}, False, False, ""),  # it is counted a moment later
            (False, {"memory.events": EVENTS(1)}, False, False, "own"),
            (False, {"memory.events": EVENTS(2)}, False, False, "own"),
            (True, {"memory.events": EVENTS(3)}, True, False, "others"),
            (False, {}, True, False, ""),
        ],
    ),
    "version one": (
        {"control": "oom_kill 0\n", "peak": LIMIT, "limit": LIMIT},
        [
            (True, {"peak": "104800000\n", "control": "oom_kill 1\n"}, False, True, "own"),
            (False, {"control": "oom_kill 2\n"}, False, True, "own"),  # every kill of a burst
            (True, {"peak": "50000000\n", "control": "oom_kill 3\n"}, False, True, "others"),
        ],
    ),
}


@pytest.mark.parametrize("version", KILLS)
def test_a_cgroup_separates_own_from_other_memory(tmp_path: Path, version: str) -> None:
    files, steps = KILLS[version]
    with ExitStack() as stack:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        fds = [stack.enter_context(open(tmp_path / name, "rb+")).fileno() for name in files]
        kills = guest_module("processes").OutOfMemoryKills(fds)
        for begins, written, over, killed, whose in steps:
            if begins:
                kills.mark()
                assert "peak" not in files or (tmp_path / "peak").read_text().startswith("0")
            for name, text in written.items():
                (tmp_path / name).write_text(text)
            assert kills.since(over=over, killed=killed) == whose


# --- programs of a session ---


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
        assert (result.stdout, result.ok) == ("closed well\n", "/" not in code), result.text()
        assert await session.read("left") == b"kept"
        await session.write("left", "")
    closes = "import os, sys\nprint(1)\nos.closerange(3, 200)\nsys.stdout.close()"
    assert (await session.run(closes)).ok


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
    sandbox: Sandbox,
) -> None:
    full = await sandbox.session(processes=4, keep=8)
    assert (await full.cell(FILLS)).ok
    await asyncio.sleep(0.05)
    assert (await full.run("print(6 * 7)")).stdout == "42\n"
    assert Status.HOST_RESOURCES not in sandbox.counts


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
