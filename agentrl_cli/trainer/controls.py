"""What stops, pauses and changes a running training: signals, and the controls that `agentrl watch` stores."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl_cli.config import TrainConfig
from agentrl_cli.config.renamed import new_key
from agentrl_cli.errors import AgentRLError, ConfigError, RunFailed, StoreError
from agentrl_cli.store import Store

CHANGEABLE = (
    "train.lr",
    "train.steps",
    "train.max_grad_norm",
    "train.eval.every",
    "train.save.every",
)
"""Settings that may change during a run."""
INTERRUPTED = "interrupted"
STOPPED = "stopped by a control"
REQUESTED = (INTERRUPTED, STOPPED)
"""Why a run stops if a user wants it; an alert names itself."""
POLL = 0.2
"""Seconds between two reads of the controls while a run is paused."""
POLL_NOW = 1.0
"""Seconds between two reads of the controls within a step, for one that stops the run at once."""


class Controls:
    """The controls of one run."""

    def __init__(
        self,
        train: TrainConfig,
        run_id: str,
        store: Store,
        narrate: Callable[[str], None],
        fault: Callable[[], RunFailed | None] = lambda: None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """`keep` stores the changed settings; `fault`: why the training cannot continue, noticed while a step runs."""
        self.train = train
        self.run_id = run_id
        self.store = store
        self.narrate = narrate
        self.fault = fault
        self.keep = keep
        self.stopping = ""
        """Why the run stops after this step; empty while it continues."""
        self.lost = ""
        """Why this process may no longer write to the run; empty while it may."""
        self.changed = False
        """True after a setting was changed, until the trainer has stored it."""
        self._polling: asyncio.Task[None] | None = None
        self._part = "step"
        """The part of the run that a requested stop waits for."""

    def listen(self) -> None:
        """First Ctrl-C (or SIGTERM): finish the step and save. Second, or `stop {"now": true}`: stop now."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is not None:
            self._polling = loop.create_task(self._poll(task))
            self._polling.add_done_callback(self._after_poll)

        def interrupted() -> None:
            if self.stopping and task is not None:
                task.cancel()
                return
            self.stopping = INTERRUPTED
            self.narrate(f"stopping after this {self._part}; Ctrl-C again stops now")

        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, interrupted)
            except (NotImplementedError, RuntimeError, ValueError):
                return  # not in the main thread: the caller handles signals

    @contextlib.contextmanager
    def announce(self, part: str) -> Iterator[None]:
        """Let a stop wait for this part while the block runs, and say so if one was requested before."""
        self._part, before = part, self._part
        if self.stopping:
            self.narrate(f"stopping after this {part}; Ctrl-C stops now")
        try:
            yield
        finally:
            self._part = before

    async def _poll(self, task: asyncio.Task[Any]) -> None:
        """Cancel `task` at once for `stop {"now": true}`, a lost claim or a fault; other controls wait for the step."""
        while not any(
            c.action == "stop" and c.data.get("now") and c.taken is None
            for c in self.store.controls.all(self.run_id)
        ):
            self.lost = self.store.claims.why_lost(self.run_id)
            if self.lost or self.fault():
                task.cancel()
                return
            await asyncio.sleep(POLL_NOW)
        self.store.controls.take(self.run_id)
        self.narrate("control: stop now")
        self.stopping = STOPPED
        task.cancel()

    def require_claim(self) -> None:
        """Raise RunFailed if another process took the run over, before anything is written to it."""
        self.lost = self.store.claims.why_lost(self.run_id)
        if self.lost:
            raise RunFailed(self.lost, hint="Nothing more was written to it from here.")

    def _after_poll(self, polling: asyncio.Task[None]) -> None:
        """A store that could not be read stops the run at its next write, not through the event loop's handler."""
        error = None if polling.cancelled() else polling.exception()
        if isinstance(error, StoreError):
            self.store.postpone(error)
        elif error is not None:
            raise error

    def ignore(self) -> None:
        """Restore the signals' default: the event loop may continue after the run."""
        if self._polling is not None:
            self._polling.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().remove_signal_handler(number)

    async def obey(self, actions: Mapping[str, Callable[[], Any]]) -> None:
        """Carry out the controls since the last step; while paused, wait here. `actions`: checkpoint, evaluate.

        Raises CancelledError for `stop {"now": true}`.
        """
        paused = False
        while True:
            for control in self.store.controls.take(self.run_id):
                self.narrate(f"control: {control.action} {dict(control.data) or ''}".rstrip())
                if control.action in ("pause", "resume"):
                    paused = control.action == "pause"
                elif control.action in actions:
                    answer = actions[control.action]()
                    if inspect.isawaitable(answer):
                        await answer
                elif control.action == "set":
                    self._set(control.data)
                elif control.action == "stop":
                    self.stopping = STOPPED
                    if control.data.get("now"):
                        raise asyncio.CancelledError
            if not paused or self.stopping:
                return
            await asyncio.sleep(POLL)

    def _set(self, data: Mapping[str, Any]) -> None:
        """Change a setting of a running run; a refusal is an alert."""
        key, value = new_key(str(data.get("key", "")), data.get("value"))
        try:
            if key not in CHANGEABLE:
                raise ConfigError(f"{key or 'nothing'} cannot be changed during a run.")
            *path, name = key.split(".")[1:]
            section = getattr(self.train, path[0]) if path else self.train
            setattr(section, name, value)
            self.changed = True
        except (AgentRLError, ValueError) as error:
            self.store.journal.add_alert(self.run_id, "warn", "set_refused", None, None, str(error))
