"""Cost of watching: the store's share of a training's CPU seconds, and a watcher's share of a core, in one real run.

    python benchmarks/watch.py [--steps 20] [--out benchmarks/results/watch.json]

Trains code-task with the bundled model; the training's process counts the CPU seconds that its threads spend inside the
store (`time.thread_time`; including reading, encoding and committing) and in total (without the sandbox's processes).
Meanwhile `agentrl watch` runs in its own terminal of 120x40, first on its overview, then on its charts; its CPU seconds
come from /proc, without its start (imports). Linux only.

Targets: the store at most 2 % of the training's CPU seconds, a watcher at most 10 % of a core. Exits with 1 if missed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

STORE, WATCHER = 0.02, 0.10
WARM = 6.0
"""Maximum seconds for a watcher to start."""


class Meter:
    """CPU seconds inside the store, over all threads; calls within calls count once."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        self._lock, self._inside = threading.Lock(), threading.local()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the cost of its body, unless an outer call already does."""
        if getattr(self._inside, "on", False):
            yield
            return
        self._inside.on, begin = True, time.thread_time()
        try:
            yield
        finally:
            self._inside.on = False
            with self._lock:
                self.seconds += time.thread_time() - begin
                self.calls += 1

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, counted."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with self.counted():
                return method(*args, **kwargs)

        return called

    def wrap_transaction(
        self, method: Callable[..., AbstractContextManager[Any]]
    ) -> Callable[..., Any]:
        """Counts begin and commit, but not the caller's work between them."""

        @contextmanager
        def called(*args: Any, **kwargs: Any) -> Iterator[Any]:
            inner = method(*args, **kwargs)
            with self.counted():
                conn = inner.__enter__()
            try:
                yield conn
            except BaseException as error:
                with self.counted():
                    inner.__exit__(type(error), error, error.__traceback__)
                raise
            with self.counted():
                inner.__exit__(None, None, None)

        return called


def metered() -> Meter:
    """Counts every public method of a store, and its background writer, from now on."""
    from agentrl_cli.store import Store

    meter = Meter()
    for name in dir(Store):
        method = getattr(Store, name)
        if name == "transaction":
            setattr(Store, name, meter.wrap_transaction(method))
        elif name == "_drain" or (
            callable(method) and not name.startswith("_") and name not in ("open", "db")
        ):
            setattr(Store, name, meter.wrap(method))
    return meter


def train(project: Path, steps: int, cost: Path) -> int:
    """The training, in this process; writes its cost into `cost`."""
    meter = metered()
    from agentrl_cli.commands import main
    from agentrl_cli.trainer import Trainer

    whole = Trainer.train

    async def counted(self: Trainer) -> Any:
        begin, before = time.process_time(), meter.seconds
        row = await whole(self)
        cpu = time.process_time() - begin
        cost.write_text(
            json.dumps(
                {
                    "trainer_cpu_s": cpu,
                    "store_cpu_s": meter.seconds - before,
                    "store_calls": meter.calls,
                }
            )
        )
        return row

    setattr(Trainer, "train", counted)  # noqa: B010  mypy does not let a method be assigned
    return main(["train", "--project", str(project), "--steps", str(steps)])


def cpu_of(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def watcher(project: Path) -> Iterator[tuple[int, int]]:
    """`agentrl watch` in a terminal: its process id, and the descriptor for its keys."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "agentrl_cli", "watch", "--project", str(project)]
    process = subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env=env, start_new_session=True
    )
    os.close(inner)

    def swallow() -> None:
        try:
            while os.read(outer, 1 << 16):
                pass
        except OSError:
            pass  # its end of the terminal is closed: it has exited

    reading = threading.Thread(target=swallow, daemon=True)
    reading.start()
    try:
        yield process.pid, outer
    finally:
        os.write(outer, b"q")
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reading.join(5)
        os.close(outer)


def share(pid: int, training: subprocess.Popen[bytes], most: float) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of a watcher for at most `most` seconds of the training."""
    cpu, begin = cpu_of(pid), time.monotonic()
    while training.poll() is None and time.monotonic() - begin < most:
        time.sleep(0.2)
    return cpu_of(pid) - cpu, time.monotonic() - begin


def begun(db: Path) -> bool:
    """Whether a run is in the store."""
    from agentrl_cli.errors import AgentRLError
    from agentrl_cli.store import Store

    try:
        with Store.open(db, readonly=True) as store:
            return bool(store.runs.all())
    except AgentRLError:
        return False  # missing, or being created


def measure(steps: int, seconds: float) -> dict[str, Any]:
    """One run with one watcher."""
    with tempfile.TemporaryDirectory() as folder:
        project, cost = Path(folder) / "p", Path(folder) / "cost.json"
        subprocess.run(
            [sys.executable, "-m", "agentrl_cli", "init", "code-task", str(project), "--yes"],
            check=True,
            capture_output=True,
        )
        command = [
            sys.executable,
            __file__,
            "--train",
            str(project),
            "--steps",
            str(steps),
            "--cost",
            str(cost),
        ]
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not begun(project / "runs" / "agentrl.db") and training.poll() is None:
            time.sleep(0.2)
        with watcher(project) as (pid, keys):
            time.sleep(WARM)
            overview = share(pid, training, seconds)
            os.write(keys, b"2")
            charts = share(pid, training, seconds)
            if cpu_of(pid) == 0.0 or not overview[0]:
                raise SystemExit("the watcher did not run: more --steps, or fewer --seconds")
        if training.wait():
            raise SystemExit("the training failed")
        found: dict[str, Any] = json.loads(cost.read_text())
    found["store_share"] = found["store_cpu_s"] / found["trainer_cpu_s"]
    for name, (cpu, wall) in (("overview", overview), ("charts", charts)):
        found[f"watch_{name}"] = {
            "cpu_s": cpu,
            "wall_s": wall,
            "share": cpu / wall if wall else 0.0,
        }
    return found


def main() -> int:
    """Measures, prints, compares with the targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for each of the watcher's two tabs"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cost", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        return train(given.train, given.steps, given.cost)
    found = {"steps": given.steps, "cores": os.cpu_count()} | measure(given.steps, given.seconds)
    rows = [
        ("store, of the training's CPU seconds", found["store_share"], STORE),
        ("watcher on its overview, of a core", found["watch_overview"]["share"], WATCHER),
        ("watcher on its charts, of a core", found["watch_charts"]["share"], WATCHER),
    ]
    for name, value, target in rows:
        print(
            f"{name:<40} {value:7.2%}   target {target:.0%}   {'ok' if value <= target else 'MISSED'}"
        )
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(value > target for _, value, target in rows))


if __name__ == "__main__":
    sys.exit(main())
