"""How an algorithm and its runners run beside each other: as threads of this process, each with an event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.context import BaseContext
from typing import Literal, Protocol

from agentrl_cli.plugins.lightning.env_var import (
    LightningEnvVar,
    resolve_bool_env_var,
    resolve_int_env_var,
    resolve_str_env_var,
)
from agentrl_cli.plugins.lightning.store import LightningStore
from agentrl_cli.plugins.lightning.store_http import PORT, LightningStoreClient, serving

AlgorithmBundle = Callable[[LightningStore, "ExecutionEvent"], Awaitable[None]]
RunnerBundle = Callable[[LightningStore, int, "ExecutionEvent"], Awaitable[None]]


class ExecutionEvent(Protocol):
    """Set when everything is to end."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


ThreadingEvent = threading.Event


def MultiprocessingEvent(*, ctx: BaseContext | None = None) -> ExecutionEvent:
    """Return an event that other processes see, for a strategy of the user's own."""
    return (ctx or multiprocessing).Event()


class ExecutionStrategy:
    """Base: `execute` runs an algorithm and runners until the algorithm has ended."""

    n_runners = 1

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Raises what either of them raises."""
        raise NotImplementedError


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Threads. `main_thread` is the one of the two that gets this thread."""

    alias = "shm"

    def __init__(
        self,
        n_runners: int = 1,
        main_thread: Literal["algorithm", "runner"] = "runner",
        join_timeout: float = 15.0,
        graceful_delay: float = 5.0,
        poll_interval: float = 0.05,
        managed_store: bool | None = None,
    ) -> None:
        """`managed_store`, `graceful_delay` and `poll_interval` have no effect: stores take threads, nothing polls."""
        if main_thread not in ("algorithm", "runner"):
            raise ValueError("main_thread must be 'algorithm' or 'runner'")
        if main_thread == "runner" and n_runners != 1:
            raise ValueError("When main_thread is 'runner', n_runners must be 1.")
        self.n_runners, self.main_thread, self.join_timeout = n_runners, main_thread, join_timeout
        self.role = "both"

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Run both; the first error stops all and is raised. A Ctrl-C, too."""
        stop, errors = threading.Event(), []

        def run(make: Callable[[], Awaitable[None]], last: bool) -> None:
            async def whole() -> None:
                await make()

            try:
                asyncio.run(whole())
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread below
                errors.append(error)
                stop.set()
            if last:
                stop.set()

        parts: list[tuple[str, Callable[[], Awaitable[None]], bool]] = []
        if self.role in ("algorithm", "both"):
            parts.append(("algorithm", lambda: algorithm(store, stop), True))
        if self.role in ("runner", "both"):
            parts += [
                (f"runner-{n}", partial(runner, store, n, stop), False)
                for n in range(self.n_runners)
            ]
        main = next((part for part in parts if part[0].startswith(self.main_thread)), parts[0])
        threads = [
            threading.Thread(target=run, args=part[1:], name=part[0], daemon=True)
            for part in parts
            if part is not main
        ]
        for thread in threads:
            thread.start()
        try:
            run(*main[1:])
        finally:
            if main[2]:
                stop.set()
            for thread in threads:
                thread.join(
                    None if thread.name == "algorithm" and not errors else self.join_timeout
                )
        if errors:
            raise errors[0]


class ClientServerExecutionStrategy(SharedMemoryExecutionStrategy):
    """Agent-Lightning's default. With `role` `algorithm` or `runner` this process is one side of several.

    They meet in a SqliteLightningStore, else at the algorithm's store, which is served at host and port.
    """

    alias = "cs"

    def __init__(
        self,
        role: Literal["algorithm", "runner", "both"] | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 10.0,
        terminate_timeout: float = 10.0,
        main_process: Literal["algorithm", "runner"] = "algorithm",
        managed_store: bool | None = None,
        allowed_exit_codes: tuple[int, ...] = (0, -15),
    ) -> None:
        """Raises ValueError for a role that is none of the three."""
        super().__init__(n_runners, main_process, graceful_timeout, managed_store=managed_store)
        found = resolve_str_env_var(LightningEnvVar.AGL_CURRENT_ROLE, role, "both") or "both"
        if found not in ("algorithm", "runner", "both"):
            raise ValueError("role must be one of 'algorithm', 'runner', or 'both'")
        self.role = found
        self.server_host = (
            resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST, server_host, "localhost")
            or "localhost"
        )
        self.server_port = (
            resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, server_port, PORT) or PORT
        )
        self.managed_store = resolve_bool_env_var(
            LightningEnvVar.AGL_MANAGED_STORE, managed_store, True
        )

    def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore
    ) -> None:
        """Run this process's side. Raises ConnectionError if no algorithm's store answers a runner."""
        if self.role == "both" or store.capabilities.get("zero_copy") or not self.managed_store:
            super().execute(algorithm, runner, store)
        elif self.role == "algorithm":
            with serving(store, self.server_host, self.server_port):
                super().execute(algorithm, runner, store)
        else:
            at = LightningStoreClient(f"http://{self.server_host}:{self.server_port}")
            super().execute(algorithm, runner, at)
