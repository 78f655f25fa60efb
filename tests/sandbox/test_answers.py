"""Hostile code around an answer: it delays it, continues after it, or makes it too large; what honest code may do."""

import errno
import struct
from typing import Any

import pytest

from agentrl_cli.errors import UsageError
from agentrl_cli.sandbox import Sandbox, Session, Status, grade
from agentrl_cli.sandbox.channel import guest_module

SANDBOX = {"wall": 5.0}

DRIBBLE = """
import os, struct, time
os.write(3, struct.pack("!II", 60_000, 0))
while True:
    os.write(3, b"x")
    time.sleep(0.2)
"""


async def test_an_answer_sent_byte_by_byte_is_the_codes_own_fault(sandbox: Sandbox) -> None:
    session = await sandbox.session(wall=1.0)
    await session.cell("x = 6")
    result = await session.cell(DRIBBLE)
    assert (result.status, result.rolled_back) == ("crashed", True), result
    assert (await session.cell("x * 7")).stdout == "42\n"


# The session process reads its requests at 100 KB a second.
SLOW = """
import sys, time
frame = sys._getframe()
while not hasattr(frame.f_locals.get("self"), "control"):
    frame = frame.f_back
class Slow:
    def __init__(self, sock): self.sock = sock
    def __getattr__(self, name): return getattr(self.sock, name)
    def recv(self, size, *rest): time.sleep(0.2); return self.sock.recv(min(size, 30_000), *rest)
session = frame.f_locals["self"]
session.control = Slow(session.control)
"""


async def test_a_request_read_slowly_is_the_codes_own_fault(sandbox: Sandbox) -> None:
    long, slow = "x" * 1_500_000, SLOW + "def f(x): return 1"
    session = await sandbox.session(wall=1.0)
    for _ in range(2):
        assert (await session.cell(slow)).ok
        result = await session.cell(f"len({long!r})")
        lost = (result.status, result.state_kept, result.rolled_back)
        assert lost == ("state_lost", False, True), result
        assert (await session.cell("6 * 7")).stdout == "42\n"
    assert (await session.cell(slow)).ok
    answers, body = await session.calls([["f", [long], {}], ["f", [1], {}]])
    assert ([answer.status for answer in answers], body) == (["state_lost"] * 2, b""), answers


async def test_a_long_request_is_answered(session: Session) -> None:
    assert (await session.cell(f"x = {'x' * 9_000_000!r}\nlen(x)")).stdout == "9000000\n"
    (answer,), _ = await session.calls([["len", ["y" * 9_000_000], {}]])
    assert answer.detail == "NameError"  # a builtin is not a function of the session
    await session.cell("size = len")
    (answer,), body = await session.calls([["size", ["y" * 9_000_000], {}]])
    assert (answer.status, body) == ("ok", b"9000000")


LARGE = """
import sys
frame = sys._getframe()
while "framing" not in frame.f_globals:
    frame = frame.f_back
frame.f_globals["framing"].MAX_ANSWER = 1 << 30
def large(size): return "x" * size
def wordy(n): raise ValueError("\U0001f600" * 300)
"""


async def test_answers_that_are_too_large_are_the_codes_own_fault(
    sandbox: Sandbox, session: Session
) -> None:
    await session.cell(LARGE)
    sizes = (900_000, 15 << 20, 60 << 20, 900_000)
    answers, body = await session.calls([["large", [size], {}] for size in sizes])
    assert [answer.status for answer in answers] == ["ok", "crashed", "crashed", "ok"], answers
    assert len(body) == 2 * 900_002
    answers, body = await session.calls([["wordy", [number], {}] for number in range(300)])
    said = [(one.status, one.error[:13], len(one.error)) for one in answers]
    assert said == [("exception", "ValueError: \U0001f600", 300)] * 300 and body == b""
    assert set(sandbox.counts) == {"ok", "crashed", "exception"}, sandbox.counts


async def test_no_path_that_a_model_names_ends_the_box(session: Session) -> None:
    await session.cell(
        "import os\nx = 6\nfor _ in range(20): os.mkdir('d' * 250); os.chdir('d' * 250)"
    )
    for path in ("\ud800", "a" * 300, "a" * 70_000, "a/" * 2000 + "b", "\udc80"):
        with pytest.raises(UsageError):
            await session.read(path)
    with pytest.raises(UsageError):
        await session.write("\ud800/x", b"")
    assert len(await session.list()) > 10 and (await session.cell("x * 7")).stdout == "42\n"


LEASE = """
import fcntl, signal
signal.signal(signal.SIGIO, signal.SIG_IGN)
held = open("held", "w")
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
"""


async def test_a_leased_file_blocks_no_other_process(session: Session) -> None:
    """The kernel would block every other process that opens a leased file, the host too, for up to 45 seconds."""
    leased = await session.cell(LEASE)
    assert (leased.status, leased.detail) == (Status.BLOCKED, "syscall"), leased.text()
    assert await session.read("held") == b"" and (await session.cell("6 * 7")).stdout == "42\n"
    await session.write("held", "mine")
    assert await session.read("held") == b"mine"


WAIT = """
import os
seen = []
def wait():
    child = os.fork()
    if not child:
        os._exit(3)
    while True:
        try:
            seen.append(os.wait() == (child, 3 << 8))
        except ChildProcessError:
            return
wait()
"""


@pytest.mark.parametrize("keep", [0, 2])
async def test_a_cell_that_waits_for_children_reaps_only_its_own(
    sandbox: Sandbox, keep: int
) -> None:
    session = await sandbox.session(keep=keep, wall=3.0)
    for code in (WAIT, *["wait()"] * 4):
        result = await session.cell(code)
        assert result.ok and result.stopped == 0, result.text()
    assert (await session.cell("os.abort()")).rolled_back
    assert (await session.cell("seen")).stdout == "[True, True, True, True, True]\n"
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()"
    assert (await session.cell(thread)).ok
    assert (await session.cell("x = 1; os.abort()")).rolled_back
    assert (await session.cell("len(seen), 'x' in globals()")).stdout == "(5, False)\n"
    assert (await session.cell("wait()\nlen(seen)")).stdout == "6\n"  # the thread has ended


LEAVES = """
import os, time
def leave():
    if not os.fork():
        os.setsid()
        time.sleep(30)
    os._exit(1)
def look():
    return sum(name.isdecimal() for name in os.listdir("/proc"))
"""


async def test_a_call_that_fails_leaves_nothing_to_the_next(session: Session) -> None:
    if session.sandbox.level != "ns":
        pytest.skip("elsewhere /proc shows more than the box")
    await session.cell(LEAVES)
    calls: list[list[Any]] = [[name, [], {}] for name in ("look", "leave", "look")]
    answers, body = await session.calls(calls)
    assert [answer.status for answer in answers] == ["ok", "exit", "ok"], answers
    assert body[: answers[0].size] == body[answers[0].size :]


SKIPS = """
import sys, time
frame = sys._getframe()
while "framing" not in frame.f_globals:
    frame = frame.f_back
session, framing = frame.f_locals["self"], frame.f_globals["framing"]
def skip(): session._say({"done": "", "nonce": session.nonce})
"""


async def test_calls_that_code_skips_are_crashed_and_not_timed_out(session: Session) -> None:
    await session.cell(SKIPS)
    answers, _ = await session.calls([["skip", [], {}]] * 3)
    said = [(answer.status, answer.detail[-8:]) for answer in answers]
    assert said == [("crashed", "nonsense")] * 3 and await session.calls([]) == ((), b"")
    # What it sent afterwards does not count as an answer to this.
    assert (await session.cell("6 * 7")).status in ("crashed", "state_lost")
    assert (await session.cell("6 * 7")).stdout == "42\n"


@pytest.mark.parametrize("after", ["pass", "files = [open('a', 'wb') for _ in range(20)]"])
async def test_a_cell_that_closes_its_checkpoints_socket_still_rolls_back(
    session: Session, after: str
) -> None:
    assert (await session.cell("x = 1")).status == "ok"
    assert (await session.cell(f"import os\nos.closerange(4, 1000)\n{after}\nx = 2")).status == "ok"
    crashed = await session.cell("x = 3\nos.kill(os.getpid(), 9)")
    assert crashed.rolled_back and crashed.state_kept, crashed
    assert [(await session.cell("x")).stdout for _ in range(2)] == ["2\n", "2\n"]


FORKS = """
import os, sys, time
frame = sys._getframe()
while "framing" not in frame.f_globals:
    frame = frame.f_back
session = frame.f_locals["self"]
say = type(session)._say.__get__(session)
def fork(answer):
    say(answer)
    if not os.fork():
        os.setsid()
        time.sleep(60)
        os._exit(0)
session._say = fork
"""
# Counts processes; a pipe would count its own parts, or not, as they start.
ALIVE = """
n=0
for file in /proc/[0-9]*/stat; do
  { read -r line <"$file"; } 2>/dev/null && [[ $line != *") Z"* ]] && n=$((n + 1))
done
echo $n
"""


async def test_nothing_is_started_between_two_answers(session: Session) -> None:
    if session.sandbox.level != "ns":
        pytest.skip("elsewhere /proc shows more than the box")
    assert (await session.cell("x = 6")).ok
    before = (await session.bash(ALIVE)).stdout
    for _ in range(3):
        assert (await session.cell(FORKS)).ok
        assert (await session.bash(ALIVE)).stdout == before
    assert (await session.cell("x * 7")).stdout == "42\n"


# --- sockets that honest programs need still work, and the filter for code refuses what reaches other sessions ---


HONEST = """
import asyncio, concurrent.futures, multiprocessing, socket, sqlite3, subprocess, tempfile

async def main():
    done = await asyncio.create_subprocess_exec('echo', 'child', stdout=-1)
    loop = asyncio.get_running_loop()
    return (await done.communicate())[0].decode().strip(), await loop.run_in_executor(None, str, 'thread')

def square(n, results): results.send(n * n)

if __name__ == '__main__':
    print(*asyncio.run(main()))
    fork = multiprocessing.get_context('fork')
    here, there = fork.Pipe()
    workers = [fork.Process(target=square, args=(n, there)) for n in range(3)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    print(sorted(here.recv() for _ in workers))
    left, right = socket.socketpair()
    left.sendall(b'pair'); print(right.recv(4).decode())
    socket.send_fds(left, [b'f'], [left.fileno()]); print(len(socket.recv_fds(right, 1, 1)[1]))
    with sqlite3.connect('rows.db') as db: print(db.execute('select 6 * 7').fetchone()[0])
    with tempfile.TemporaryFile() as file: print(file.write(b'temporary'))
"""


@pytest.mark.parametrize("sandbox", ["ns", "landlock"], indirect=True)
async def test_what_honest_programs_need_of_sockets_works(sandbox: Sandbox) -> None:
    result = await sandbox.run(HONEST)
    assert result.ok, result.text()
    assert result.stdout.split("\n") == ["child thread", "[0, 1, 4]", "pair", "1", "42", "9", ""]


def refused(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """The error with which a filter refuses a system call; 0 if it allows it. Runs BPF as the kernel does."""
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    data = struct.pack("IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    at, word = 0, 0
    while True:
        code, yes, no, value = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if code == 0x06:
            return value & 0xFFFF if value >> 16 == 5 else 0
        if code == 0x20:
            word = struct.unpack_from("I", data, value)[0]
        elif code == 0x54:
            word &= value
        else:
            true = {
                0x15: word == value,
                0x25: word > value,
                0x35: word >= value,
                0x45: bool(word & value),
            }[code]
            at += yes if true else no


NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {"fcntl": 72, "flock": 73, "setxattr": 188, "statfs": 137,
               "utimensat": 280, "fadvise64": 221, "madvise": 28, "preadv2": 327, "cachestat": 451, "sendmsg": 46},
    "aarch64": {"fcntl": 25, "flock": 32, "setxattr": 5,
                "statfs": 43, "utimensat": 88, "fadvise64": 223, "madvise": 233, "preadv2": 286, "cachestat": 451,
                "sendmsg": 211},
}  # fmt: skip


FREE = {"x86_64": ((335, 423),), "aarch64": ((244, 259), (295, 423))}


@pytest.mark.parametrize("machine", NUMBERS)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("grading", [True, False])
def test_the_filter_for_code_refuses_what_reaches_other_sessions(
    machine: str, counted: bool, grading: bool
) -> None:
    seccomp, numbers = guest_module("isolation/seccomp"), NUMBERS[machine]
    program = seccomp.build_for_code(counted, grading, machine)
    assert len(program) % 8 == 0 and len(program) // 8 < 300

    eperm, unsupported, graded = errno.EPERM, errno.EOPNOTSUPP, errno.EPERM if grading else 0
    wanted: list[tuple[str, tuple[int, ...], int]] = [
        *(("fcntl", (3, command), graded) for command in (5, 6, 7, 36, 37, 38)),  # locks
        *(("fcntl", (3, command), 0) for command in (0, 1, 2, 3, 4, 8, 9, 1030, 1031, 1032)),
        *(("fcntl", (3, command), eperm) for command in (1024, 1025, 1026, 1036, 1038, 1040, 9999)),
        *((name, (), graded) for name in ("flock", "sendmsg")),
        ("utimensat", (), 0 if counted else graded),
        ("statfs", (), 0 if counted else unsupported),
        *((name, (), unsupported) for name in ("setxattr", "cachestat")),
        *(("preadv2", (3, 0, 1, 0, 0, flag), unsupported if flag else 0) for flag in (0, 8)),
        *(("fadvise64", (3, 0, 0, advice), eperm if advice == 4 else 0) for advice in (2, 3, 4)),
        *(("madvise", (0, 0, advice), eperm if advice > 9 else 0) for advice in (4, 8, 20, 21)),
    ]
    for name, given, error in wanted:
        assert refused(program, machine, numbers[name], *given) == error, (name, given)
    for filtered in (program, seccomp.build(machine=machine)):
        assert refused(filtered, machine, seccomp.LAST_KNOWN + 1) == errno.ENOSYS
        for first, last in FREE[machine]:
            ends = [refused(filtered, machine, n) for n in (first - 1, first, last, last + 1)]
            assert [end == errno.ENOSYS for end in ends] == [False, True, True, False]


LINES = "".join(f"{n:06d}\n" for n in range(15_000))


async def test_right_output_that_is_long_is_right(session: Session) -> None:
    long = {"stdin": "", "stdout": LINES}
    right = await grade(session, "for n in range(15_000): print(f'{n:06d} ')", [long])
    assert len(LINES) > 100_000 and (right.passed, right.failures) == (1, ())
    wrong = await grade(
        session, "for n in range(15_000): print(f'{n:06d}' if n != 7000 else 'x')", [long]
    )
    assert wrong.passed == 0 and "expected" in wrong.failures[0]
    cut = await grade(session, "for n in range(99_000): print(f'{n:06d}')", [long])
    assert cut.passed == 0 and "KiB of output that are compared" in cut.failures[0]
    # A cut that is shorter than the line that reports it is one, too.
    result = await session.run("print('x' * (64 * 1024 + 4))")
    assert result.truncated and "5 bytes left out" in result.stdout
