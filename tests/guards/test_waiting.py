"""No test fails because the machine is slow.

Growth is compared between two sizes in one run (`tests/helpers/growth.py`) or counted. What must happen is waited for
by its sign and without an end (`tests/helpers/processes.py`): pytest's own limit alone ends what hangs.
"""

import ast
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.growth import exponent

ROOT = Path(__file__).resolve().parent.parent.parent
CLOCKS = {"process_time", "perf_counter", "monotonic", "thread_time", "getrusage"}
# Functions whose `timeout` is how long they wait.
WAITS = {
    "run", "check_call", "check_output", "communicate", "wait", "wait_for", "wait_for_rollouts", "timeout", "join",
    "acquire", "urlopen", "create_connection", "Client", "AsyncClient", "get", "post", "put", "request", "stream",
    "result",
}  # fmt: skip
# Where some of them take it as an argument without a name.
PLACES = {"wait": 0, "timeout": 0, "join": 0, "acquire": 1, "wait_for": 1}
# They give up after five seconds by default.
CLIENTS = {f"httpx2.{name}" for name in ("Client", "AsyncClient", "get", "post", "put", "stream")}
LIMIT: float = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"][
    "ini_options"
]["timeout"]
# What may look at a clock, and why.
EXPECTED = {
    "helpers/growth.py::exponent": "compares two sizes",
    "plugins/engines/test_remote.py::test_a_lost_server_is_waited_for_with_patience": "waited for so long at least",
    "policies/test_policies.py::test_a_busy_server_is_left_alone_as_long_as_it_asks": "left alone so long at least",
    "tools/test_tools.py::test_timeout_concurrency_and_rate": "a rate is a least time, never a most",
}


def _constants(tree: ast.Module) -> dict[str, float]:
    """Return the numbers that a module gives names to."""
    found = {}
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign) else None
        if (
            isinstance(node, ast.Assign)
            and isinstance(value, ast.Constant)
            and isinstance(value.value, (int, float))
        ):
            found.update(
                {one.id: float(value.value) for one in node.targets if isinstance(one, ast.Name)}
            )
    return found


def _limit(call: ast.Call, named: dict[str, float]) -> float | None:
    """Return the seconds after which a call of something that waits gives up; None if it does not."""
    last = str(getattr(call.func, "attr", getattr(call.func, "id", "")))
    given = {one.arg: one.value for one in call.keywords}
    if last not in WAITS:
        return None
    limit = given.get("timeout")
    if limit is None and last in PLACES:
        limit = next(iter(call.args[PLACES[last] :]), None)
    if limit is None:
        return 5.0 if ast.unparse(call.func) in CLIENTS and None not in given else None
    if isinstance(limit, ast.Name):
        return named.get(limit.id)
    return (
        float(limit.value)
        if isinstance(limit, ast.Constant) and isinstance(limit.value, (int, float))
        else None
    )


def _lasts(node: ast.AST) -> bool:
    """Whether a node is how long something took: `time() - began`."""
    if not isinstance(node, ast.BinOp):
        return False
    return isinstance(node.op, ast.Sub) and ast.unparse(node.left).endswith("time()")


def faults(
    node: ast.AST, named: dict[str, float], where: str = ""
) -> Iterator[tuple[str, int, str]]:
    """Yield the place, the line and the text of everything in a file that reads a clock or gives up early."""
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = where or child.name
        elif isinstance(child, (ast.Name, ast.Attribute)):
            if (child.id if isinstance(child, ast.Name) else child.attr).removesuffix(
                "_ns"
            ) in CLOCKS:
                yield inside, child.lineno, f"reads {ast.unparse(child)}"
        elif isinstance(child, ast.Compare) and any(map(_lasts, ast.walk(child))):
            yield inside, child.lineno, f"asserts seconds: {ast.unparse(child)}"
        elif isinstance(child, ast.Call):
            limit = _limit(child, named)
            if limit is not None and 0 < limit < LIMIT:
                yield inside, child.lineno, f"gives up after {limit:g} s: {ast.unparse(child)[:80]}"
        yield from faults(child, named, inside)


def test_no_test_depends_on_the_speed_of_the_machine() -> None:
    found, used = [], set()
    for file in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for name, line, text in faults(tree, _constants(tree)):
            place = f"{file.relative_to(ROOT / 'tests').as_posix()}::{name}"
            if place in EXPECTED:
                used.add(place)
            else:
                found.append(f"{place}, line {line}: {text}")
    assert not found, "\n".join(found)
    assert used == set(EXPECTED), "these read no clock any more"


def test_the_guard_sees_what_it_is_for() -> None:
    code = """
SOON = 5
assert time.process_time() - began < 1
end = monotonic() + 5
subprocess.run(["x"], timeout=60)
process.wait(10)
asyncio.wait_for(event.wait(), SOON)
httpx2.AsyncClient(base_url="x")
asyncio.timeout(100)
assert loop.time() - started < 5
"""
    tree = ast.parse(code)
    assert {line for _, line, _ in faults(tree, _constants(tree))} == set(range(3, 11))
    fine = "event.wait()\nsubprocess.run(['x'])\nhttpx2.Client(timeout=None)\nstore.wait(timeout=0)\n', '.join('a')"
    assert not list(faults(ast.parse(fine), {}))


def test_growth_does_not_depend_on_the_speed_of_the_machine() -> None:
    def square(size: int) -> None:
        for _ in range(size):
            sum(range(size))

    assert exponent(lambda size: sum(range(size)), 10_000) < 1.3
    assert exponent(square, 100) > 1.5
    assert exponent(lambda size: time.sleep(size / 1e4), 10) < 0.8, "waiting takes no CPU time"
