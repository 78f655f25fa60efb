"""Progress on stderr: a bar with ETA on a terminal, elsewhere a plain line at intervals."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentrl_cli.commands.common import Context, announce_loading, warn_unsafe

if TYPE_CHECKING:
    from agentrl_cli.config import Config
    from agentrl_cli.runtime import Runtime

EVERY = 10.0
"""Seconds between plain lines."""


class Progress:
    """`with Progress("rollout", 64) as progress: progress.advance()`

    Before the first is done, and where one takes long, the tokens sampled and the time show that work goes on.
    `total`: 0 if there is nothing to count. `eta`: False if the lines above the bar estimate the time left already.
    `bar`: False if something else may draw one.
    """

    def __init__(
        self,
        what: str,
        total: int = 0,
        *,
        eta: bool = True,
        bar: bool = True,
        every: float = EVERY,
    ) -> None:
        self.what, self.total, self.done, self.eta, self.every = what, total, 0, eta, every
        self._counted = 0  # in this process: a resumed training begins with `done` further on
        self._started = self._said = time.monotonic()
        self._note, self._before = "", 0
        self._bars = bar and sys.stderr.isatty()
        self._bar: Any = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agentrl-progress", daemon=True)

    def __enter__(self) -> Self:
        from agentrl_cli.hooks.waits import sampled  # late: it loads asyncio

        self._before = sampled()
        if self._bars:
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
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def advance(self, note: str = "") -> None:
        """Count one more as done; `note` is printed beside the bar."""
        self.done += 1
        self._counted += 1
        self._note = note
        self._show()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.every)):
            self._show()

    def _show(self) -> None:
        """Update the bar, or print a line if the last one is old enough."""
        from agentrl_cli.hooks.waits import duration, sampled

        now, tokens = time.monotonic(), sampled() - self._before
        facts = [self._note, f"{tokens} tokens" if tokens else ""]
        if self._bar is not None:
            text = " ".join(filter(None, [self.what, *facts]))
            total = self.total or None
            self._bar.update(self._task, completed=self.done, total=total, description=text)
        elif now - self._said >= self.every:
            self._said = now
            what = f"{self.what} {self.done}/{self.total}" if self.total else self.what
            took = duration(now - self._started)
            if self._counted and self.total:
                left = (now - self._started) / self._counted * (self.total - self.done)
                took = f" ETA {duration(left)}"
            print(" ".join(filter(None, [what, *facts, took])), file=sys.stderr, flush=True)


@asynccontextmanager
async def load_runtime(
    context: Context, config: Config, spec: str | None
) -> AsyncIterator[Runtime]:
    """Open the parts of `config` in a project; prints that the model loads, and what isolates nothing."""
    from agentrl_cli.hooks.waits import interruptible

    name = spec or config.model.name
    announce_loading(name)
    async with AsyncExitStack() as stack:
        with Progress(f"loading {name}", bar=False):
            with interruptible():
                from agentrl_cli.runtime import open_runtime
            opened = open_runtime(config, base=context.project, db=context.db, spec=spec)
            runtime = await stack.enter_async_context(opened)
        warn_unsafe(runtime.sandbox)
        yield runtime
