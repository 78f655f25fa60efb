"""Progress on stderr: a bar with ETA on a terminal, elsewhere a plain line at intervals."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any, Self

EVERY = 10.0
"""Seconds between plain lines."""


class Progress:
    """`with Progress("rollout", 64) as progress: progress.advance()`

    `eta`: False if the lines above the bar estimate the time left already.
    """

    def __init__(self, what: str, total: int, *, eta: bool = True) -> None:
        self.what, self.total, self.done, self.eta = what, total, 0, eta
        self._counted = 0  # in this process: a resumed training begins with `done` further on
        self._started = self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich import progress as rich
            from rich.console import Console

            columns = [rich.TextColumn("{task.description}"), rich.BarColumn()]
            columns += [rich.MofNCompleteColumn(), rich.TimeElapsedColumn()]
            if self.eta:
                columns += [rich.TextColumn("ETA"), rich.TimeRemainingColumn()]
            # The rate of the whole time: of the last 30 s, Rich's own, slow episodes have none.
            self._bar = rich.Progress(
                *columns,
                console=Console(stderr=True),
                transient=True,
                speed_estimate_period=math.inf,
            )
            self._task = self._bar.add_task(self.what, total=self.total or None)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, note: str = "") -> None:
        """Count one more as done; `note` is printed beside the bar."""
        self.done += 1
        self._counted += 1
        if self._bar is not None:
            note = f"{self.what} {note}".strip()
            self._bar.update(self._task, completed=self.done, total=self.total, description=note)
            return
        now = time.monotonic()
        if now - self._said >= EVERY:
            from agentrl_cli.hooks.waits import duration  # late: it loads asyncio

            self._said = now
            left = (now - self._started) / self._counted * (self.total - self.done)
            line = f"{self.what} {self.done}/{self.total} {note}  ETA {duration(left)}"
            print(line, file=sys.stderr, flush=True)
