"""Hostile code around an answer: it delays it, continues after it, or makes it too large."""

from typing import Any

import pytest

from agentrl_cli.errors import UsageError
from agentrl_cli.sandbox import Sandbox, Session, Status

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
