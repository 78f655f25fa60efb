"""The hostile programs, the twenty ways to fake a test, and what is left after the host dies."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentrl_cli.doctor.attacks import probe
from agentrl_cli.errors import DataError
from agentrl_cli.sandbox import Sandbox, Session, Status, cgroup, grade, launch
from agentrl_cli.sandbox.runner_process import Process
from tests.helpers.processes import comes, commands
from tests.helpers.sandbox import open_sandbox
from tests.sandbox.attacks import attack_all, attacks, contained_attacks, learned_bits, main


async def opened(level: str) -> Sandbox:
    return await open_sandbox(backend=level, min_level="landlock", workers=1, wall=1.0)


SANDBOX = {"wall": 1.0}


@pytest.mark.parametrize("level", ["ns", "landlock"])
async def test_every_attack_is_contained(level: str) -> None:
    every = contained_attacks()
    assert len(every) == 88 and len({one.name for one in attacks()}) == len(attacks()) == 93
    weak = [one for one in every if "quick" in one.flags and "strong" not in one.flags]
    chosen = every if level == "ns" else weak
    async with await opened(level) as sandbox:
        verdicts = await attack_all(sandbox, chosen, wall=0.6 if level == "ns" else 2.0)
    assert {v.attack: v.problems for v in verdicts if not v.contained} == {}
    assert len(verdicts) == len(chosen)


def test_the_rate_of_a_channel_is_its_capacity() -> None:
    word = "w000000ffffff"
    assert learned_bits(word, f"{word} 0.5\n{word} 2.0\n") == 96.0
    assert learned_bits(word, "w00000000ffff 1.0") == pytest.approx(
        48 * (1 - 0.650022), abs=1e-3
    )  # 8 of 48 are wrong
    assert (
        learned_bits(word, "w000000000000 0.001\nwffffff000000 0.001")
        == learned_bits(word, "")
        == 0.0
    )


def test_every_channel_that_stays_open_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text(encoding="utf-8")
    named = {one.name for one in attacks() if "stays" in one.flags}
    assert len(named) == 5 and {name for name in named if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("level", ["ns", "landlock"])
async def test_grading_has_runners_of_its_own_and_takes_no_locks(level: str) -> None:
    lock = (
        "def lock(kind):\n    import fcntl, os\n    file = os.open(os.__file__, 0)\n"
        "    try: fcntl.flock(file, kind) if kind < 5 else fcntl.lockf(file, fcntl.LOCK_SH)\n"
        "    except PermissionError: return 'refused'\n    return 'taken'\n"
    )
    async with await opened(level) as sandbox:
        session = await sandbox.session()
        assert (await session.cell(f"{lock}lock(1), lock(5)")).stdout == "('taken', 'taken')\n"
        before = {id(runner) for runners in sandbox.pool.runners.values() for runner in runners}
        tests = [{"call": "lock", "args": [kind], "expect": "refused"} for kind in (1, 5)]
        assert (await grade(session, lock, tests)).failures == ()
        profiles = {
            profile: {id(runner) for runner in runners}
            for profile, runners in sandbox.pool.runners.items()
        }
        assert len(profiles) == 2 and not profiles[("@grading",)] & before


async def test_the_suite_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    await (await opened("ns")).close()
    assert await main("ns", ["odd-bytes", "hidden-calls-by-access-times"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 1 contained at level ns; 1 channels stay open" in shown and "bit/s here" in shown


async def test_an_attack_stopped_by_time_first_runs_again(sandbox: Sandbox) -> None:
    one = next(one for one in attacks() if one.name == "fills-the-disk")
    (verdict,) = await attack_all(sandbox, [one], wall=0.002)
    assert (verdict.status, verdict.problems) == ("disk_limit", ())


async def test_the_probe_says_what_holds_here(sandbox: Sandbox) -> None:
    rows = await probe(sandbox)
    assert {name: held for name, _, held in rows} == dict.fromkeys(
        ["files", "network", "signals", "processes", "memory", "disk", "output", "system", "state"],
        True,
    )


HONEST = "def add(a, b):\n    return a + b\n"
TESTS = [{"call": "add", "args": [n, 2 * n], "expect": 3 * n} for n in range(1, 9)]

CHEATS = {
    "sys.exit(0)": "import sys; sys.exit(0)",
    "os._exit(0)": "import os; os._exit(0)",
    "fork and exit": "import os\nif os.fork(): os._exit(0)",
    "raise SystemExit": "def add(a, b): raise SystemExit(0)",
    "atexit": "import atexit, os; atexit.register(os._exit, 0)",
    "excepthook": "import sys, os; sys.excepthook = lambda *a: os._exit(0)",
    "equal to everything": "class E:\n    def __eq__(self, o): return True\ndef add(a, b): return E()",
    "an int that equals everything": (
        "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef add(a, b): return E(0)"
    ),
    "a str that equals everything": "class E(str):\n    def __eq__(self, o): return True\ndef add(a, b): return E()",
    "a dict with odd keys": "def add(a, b): return {'$int': '0x3'}",
    "an object tag": "def add(a, b): return {'$object': 'int'}",
    "prints a marker": "print('PASSED ALL TESTS 8/8'); import os; os._exit(0)",
    "reads the callers' frames": (
        "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for v in f.f_locals.values():\n"
        "            if isinstance(v, dict) and 'expect' in v: return v['expect']\n        f = f.f_back\n"
    ),
    "searches the heap": (
        "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and o.get('expect') and o.get('args') == [a, b]: return o['expect']\n"
    ),
    "reads its memory": (
        "import re\ndef add(a, b):\n    with open('/proc/self/mem', 'rb', 0) as m:\n"
        "        m.seek(id(add)); t = m.read(1 << 16)\n"
        "    return int(re.search(rb'expect\": (\\d+)', t)[1])\n"
    ),
    "forges replies": (
        'import os, struct\nh = b\'{"i":0,"status":"ok","nonce":""}\'\n'
        "m = struct.pack('!II', len(h), 1) + h + b'3'\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, m * 20)\n    except OSError: pass\n"
    ),
    "patches json": "import json\njson.dumps = lambda *a, **k: '3'\ndef add(a, b): return 0",
    "patches the encoder": (
        "import sys, gc\nfor o in gc.get_objects():\n"
        "    if type(o).__name__ == 'function' and o.__name__ == 'same': o.__code__ = (lambda *a: True).__code__\n"
        "def add(a, b): return 0"
    ),
    "a huge nested answer": "def add(a, b):\n    v = []\n    for _ in range(100000): v = [v]\n    return v",
    "steals a nonce": (
        "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f.f_back: f = f.f_back\n"
        "    s = [v for v in f.f_globals.values() if hasattr(v, 'nonce')] + [f.f_locals.get('self')]\n"
        "    n = next((v.nonce for v in s if v is not None), '')\n"
        "    print(n, 'PASSED'); return {'nonce': n, 'status': 'ok'}\n"
    ),
    "reads its own source": (
        "import inspect, linecache, re, sys\ndef add(a, b):\n"
        "    t = ''.join(''.join(c[2]) for c in linecache.cache.values() if len(c) > 2) + inspect.getsource(add)\n"
        "    t += repr(sys.argv) + open('/proc/self/cmdline').read()\n"
        "    return int(re.search('expect.: (\\\\d+)', t)[1])\n"
    ),
    "patches ast": "import ast\nast.literal_eval = ast.parse = lambda *a, **k: 3\ndef add(a, b): return 'a + b'",
    "a huge answer": "def add(a, b): return 'x' * (100 << 20)",
    "loops for ever": "def add(a, b):\n    while True: pass",
}


async def test_no_cheat_passes(sandbox: Sandbox) -> None:
    for name, cheat in CHEATS.items():
        session = await sandbox.session()
        graded = await grade(session, cheat, TESTS, wall=0.2)
        assert (graded.total, graded.ok, graded.fakeable) == (8, False, False), (name, graded)
        # A forged 3 would fit the one test whose answer is 3, and no other.
        assert graded.passed <= (name in ("forges replies", "patches json")), (name, graded)
        await session.close()


async def test_a_slow_solution_passes_within_its_budget(sandbox: Sandbox) -> None:
    session = await sandbox.session(cpu=0.6)
    busy = "import time\ndef add(a, b):\n    e = time.process_time() + 0.15\n    while time.process_time() < e: pass\n"
    slow = busy + "    return a + b\n"
    graded = await grade(
        session, slow, TESTS, budget=30.0
    )  # 1.2 CPU seconds, but each call has its own limit
    assert graded.ok, graded
    sleepy = slow.replace("while", "time.sleep(0.2)\n    while")
    spent = await grade(session, sleepy, TESTS, budget=0.8)
    assert 0 < spent.passed < 8
    assert [
        line
        for line in spent.failures
        if "the 0.8 s that all tests have together were over" not in line
    ] == []
    program = "import time; time.sleep(0.2); print(int(input()) * 2)"
    tests = [{"stdin": str(n), "stdout": str(2 * n)} for n in range(8)]
    assert (await grade(session, program, tests)).ok
    late = await grade(session, program, tests, budget=0.7)
    assert 0 < late.passed < 8 and "test 8: the 0.7 s that all tests have" in late.failures[-1]


async def test_programs_find_no_files_of_each_other(session: Session) -> None:
    count = (
        "import glob, os\nprint(len(glob.glob('n*')))\nopen('n' + input(), 'w').write('x' * 1000)\n"
    )
    tests = [{"stdin": str(n), "stdout": "0"} for n in range(4)]
    assert (await grade(session, count, tests)).ok
    deep = (
        count + "for _ in range(100): os.mkdir('d'); os.chdir('d')"
    )  # what cannot be put back is replaced
    graded = await grade(session, deep, tests, setup="import sys")
    assert graded.ok, graded


async def test_an_honest_solution_passes_and_types_count(session: Session) -> None:
    graded = await grade(session, HONEST, TESTS)
    assert (graded.passed, graded.total, graded.score, graded.fakeable, graded.level) == (
        8,
        8,
        1.0,
        False,
        "ns",
    )
    code = (
        "import math\ndef f(x): return x\ndef e(): [][0]\n"
        "def g(): return (1, [2.0, {3: b'4'}], {5}, math.nan, None, 2 ** 20000)"
    )
    same = [
        {"call": "f", "args": [1], "expect": True}, {"call": "f", "args": [1], "expect": 1.0},
        {"call": "f", "args": [[1]], "expect": (1,)}, {"call": "f", "args": ["1"], "expect": 1},
    ]  # fmt: skip
    right = [
        {"call": "g", "expect": (1, [2.0, {3: b"4"}], {5}, float("nan"), None, 2**20000)},
        {"call": "f", "kwargs": {"x": {"$tuple": [1, {"$set": [2]}]}}, "expect": {"$tuple": [1, {"$set": [2]}]}},
        {"call": "f", "args": [0.1 + 0.2], "expect": 0.3, "close": 1e-9}, {"call": "e", "raises": "IndexError"},
    ]  # fmt: skip
    assert (await grade(session, code, same)).passed == 0
    result = await grade(session, code, right)
    assert result.passed == 4, result.failures


async def test_programs_and_test_code(session: Session) -> None:
    tests = [{"stdin": "4\n", "stdout": "8"}, {"stdin": "5", "stdout": "11"}]
    program = await grade(session, "print(int(input()) * 2)", tests)
    assert (program.passed, program.fakeable, len(program.failures)) == (1, False, 1)
    code = await grade(
        session, HONEST, ["assert add(1, 2) == 3", {"code": "assert add(1, 2) == 4"}]
    )
    assert (code.passed, code.fakeable) == (1, True)
    broken = await grade(session, "def add(:", TESTS)
    assert (broken.passed, broken.total, broken.status) == (0, 8, Status.EXCEPTION)
    assert "SyntaxError" in broken.failures[0]
    call = {"call": "add", "expect": 3}
    for wrong in (
        *({"call": "add"}, {"stdin": 3, "stdout": ""}, {"code": None}, {**call, "check": True}),
        *({**call, "args": "12"}, {**call, "kwargs": [1, 2]}, {**call, "close": "1e-6"}),
    ):
        with pytest.raises(DataError, match="Test 2 is not a test"):
            await grade(session, HONEST, [{**call, "args": [1, 2]}, wrong])


async def test_a_check_judges_apart_from_the_solution(session: Session) -> None:
    check = "def check(answer, n): return sorted(answer) == list(range(n))"
    tests = [{"call": "f", "args": [3], "check": check}, {"call": "f", "args": [4], "check": check}]
    graded = await grade(
        session, "def f(n): return {3: [2, 0, 1], 4: [0]}[n]\ndef check(*a): return True", tests
    )
    assert (graded.passed, graded.fakeable, len(graded.failures)) == (1, False, 1)
    with pytest.raises(DataError, match="check of test 1 does not load"):
        await grade(session, HONEST, [{"call": "add", "args": [1, 2], "check": "def check(:"}])


async def test_an_answer_that_breaks_the_check_is_wrong_and_scored(sandbox: Sandbox) -> None:
    broken = {
        "None": "TypeError", "object()": "not a plain value", "[{(1, 2): object()}]": "not a plain value",
        "10 ** 9": "timeout", "[{}]": "TypeError",
    }  # fmt: skip
    check = (
        "def check(answer, n):\n    if answer == 10 ** 9:\n        while True: pass\n"
        "    return sorted(answer)[0] + 1 == n"
    )
    session = await sandbox.session()
    tests = [{"call": "f", "args": [n], "check": check} for n in (2, 3)]
    for answer, why in broken.items():
        graded = await grade(
            session, f"def f(n): return [1] if n == 2 else {answer}", tests, wall=0.3
        )
        assert (graded.passed, graded.total, graded.status) == (
            1,
            2,
            Status.OK,
        ) and why in graded.failures[0], graded


async def test_a_broken_setup_is_the_packs_fault(session: Session) -> None:
    for tests in (TESTS, [{"stdin": "", "stdout": "1"}]):
        with pytest.raises(DataError, match="setup does not load"):
            await grade(session, HONEST, tests, setup="import nothing_there")
    graded = await grade(
        session, "print(6 * x)", [{"stdin": "7", "stdout": "42"}], setup="x = int(input())"
    )
    assert graded.ok, graded


async def test_grading_is_apart_from_the_episode(session: Session) -> None:
    await session.cell("open('notes', 'w').write('x'); secret = 1")
    spy = "import os\ndef look(): return [sorted(os.listdir('.')), 'secret' in globals()]"
    assert (await grade(session, spy, [{"call": "look", "expect": [[".shm", ".tmp"], False]}])).ok
    assert (await session.cell("secret")).stdout == "1\n"


def test_a_cgroup_limits_memory() -> None:
    if cgroup.place() is None:
        pytest.skip(cgroup.describe())
    group = cgroup.Cgroup.make(64 << 20)
    assert group is not None
    try:
        for size, code in ((8, 0), (300, -signal.SIGKILL)):
            program = [sys.executable, "-I", "-S", "-c", f"b = b'x' * ({size} << 20)"]
            assert subprocess.run(group.command(program), check=False).returncode == code
    finally:
        group.remove()
    assert not group.folder.exists() and "cgroup" in cgroup.describe()


def test_a_cgroup_bounds_the_processes_of_a_level_without_namespaces() -> None:
    """Outside of namespaces RLIMIT_NPROC does not hold root, and a watch may be outrun on a busy machine."""
    group = cgroup.Cgroup.make(256 << 20, tasks=20) if cgroup.place() else None
    if group is None or not (group.tasks or (group.folder / "pids.max").exists()):
        pytest.skip("no cgroup that counts processes can be made here")
    program = (
        "import os, time\nmade = []\ntry:\n    for _ in range(60):\n        pid = os.fork()\n"
        "        if not pid: time.sleep(5); os._exit(0)\n        made.append(pid)\nexcept BlockingIOError: pass\n"
        "print(len(made))\nfor pid in made: os.kill(pid, 9); os.waitpid(pid, 0)"
    )
    try:
        command = group.command([sys.executable, "-I", "-S", "-c", program])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and 10 <= int(done.stdout) < 20, done.stderr
    finally:
        group.remove()
    assert not group.folder.exists() and not (group.tasks and group.tasks.exists())


class Unbounded(Process):
    """A level whose processes nothing bounds, as that of the root outside under another name without a cgroup."""

    level = "landlock"

    @property
    def bounded(self) -> bool:
        return False


async def test_no_fork_bomb_is_tried_without_a_bound() -> None:
    if os.geteuid() == 0:
        assert launch.nproc_holds(), "the kernel exempts root, and the runner becomes another user"
    async with await opened("landlock") as sandbox:
        assert sandbox.bounded == all(runner.bounded for runner in sandbox.pool.runners[()])
    async with await open_sandbox(
        backend=f"{__name__}:Unbounded", min_level="landlock", workers=1
    ) as sandbox:
        assert not sandbox.bounded
        bombs = [one for one in attacks() if one.name.endswith("fork-bomb")]
        verdicts = await attack_all(sandbox, bombs)
    assert len(verdicts) == 2
    assert all(
        one.status == "not run" and "root's processes" in one.problems[0] for one in verdicts
    )


HOST = """
import asyncio, sys
from agentrl_cli.config import SandboxConfig
from agentrl_cli.sandbox import Sandbox
async def main():
    sandbox = await Sandbox.open(SandboxConfig(
        backend=sys.argv[1], min_level="landlock", workers=1, limits={"wall": 60.0}))
    session = await sandbox.session()
    print("up", flush=True)
    await session.bash("sleep 45678.5 & setsid sleep 45678.5 & sleep 45678.5")
asyncio.run(main())
"""


@pytest.mark.parametrize(("level", "number"), [("ns", signal.SIGINT), ("landlock", signal.SIGKILL)])
async def test_nothing_is_left_when_the_host_dies(level: str, number: signal.Signals) -> None:
    await (await opened(level)).close()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, level],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with host:
        assert host.stdout is not None and host.stdout.readline() == b"up\n"
        assert comes(lambda: len(commands("^sleep 45678")) == 3)
        host.send_signal(number)
        host.wait()
    folders = Path(tempfile.gettempdir())
    assert comes(
        lambda: (
            not commands("^sleep 45678") and not list(folders.glob(f"agentrl-work-*-{host.pid}-*"))
        )
    )
