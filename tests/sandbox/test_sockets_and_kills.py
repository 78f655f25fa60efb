"""Sockets that honest programs need still work, and kills in other sessions change no result."""

import errno
import struct

import pytest

from agentrl_cli.sandbox import Sandbox, Session, grade
from agentrl_cli.sandbox.channel import guest_module

SANDBOX = {"wall": 10.0}

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
