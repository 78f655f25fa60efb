"""What a worker does: opens packs, sandbox and model, runs the orders that it is sent, and reports.

It lives in one event loop, in a process of its own or in a Ray actor. It has no store: what attempts record goes out as
messages (`relay.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.cluster.protocol import (
    Emit,
    Hello,
    Message,
    Order,
    Setup,
    Status,
    Variant,
    Weights,
)
from agentrl_cli.cluster.relay import Relay
from agentrl_cli.errors import AgentRLError, NotFound, device_fault
from agentrl_cli.hooks import HookList
from agentrl_cli.learning.length_shaping import Shaping
from agentrl_cli.policies.protocols import TrainablePolicy, require_trainable
from agentrl_cli.policies.remote.token_ids import Published
from agentrl_cli.rollout.parts import Parts, open_parts
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode

if TYPE_CHECKING:
    from agentrl_cli.policies.load import Loaded

BEAT = 1.0
"""Seconds between two signs of life."""
PACKAGES = ("agentrl-cli", "torch", "transformers", "tokenizers", "peft", "numpy", "ray")
"""What must have the same version everywhere, if it is installed."""


@runtime_checkable
class Swapping(Protocol):
    """A policy that changes its weights between two turns."""

    async def swap(self, version: str, change: Callable[[], None]) -> None:
        """Call `change` while nothing is computed; later turns have this version."""


@runtime_checkable
class Following(Protocol):
    """A policy on servers, to which one process brings the weights for all."""

    def published(self) -> Published:
        """Return the weights of the last `publish`."""
        ...

    async def hold(self) -> None:
        """Wait for running turns and let none begin until `adopt`."""

    async def adopt(self, version: str, published: Published | None) -> None:
        """Sample with the weights that another process had the servers load; None: with those that they had."""

    async def publish(self, version: str) -> None:
        """Let the servers load the trained weights."""


def hello(packs: dict[str, Pack]) -> Hello:
    """Return where this process runs, and with what."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    hashes = {name: pack_hash(pack.dir) for name, pack in packs.items()}
    return Hello(
        socket.gethostname(), os.getpid(), platform.python_version(), found, time.time(), hashes
    )


def pack_hash(folder: Path) -> str:
    """Hash of a pack's code and settings."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.glob("task.*")):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def open_policy(setup: Setup) -> Loaded:
    """Return the worker's own copy of the model, ready to sample."""
    import torch

    from agentrl_cli.policies.load import load_policy

    if setup.threads:
        torch.set_num_threads(setup.threads)
    return load_policy(setup.spec, setup.config, base=setup.base, trainable=setup.trainable)


async def use_weights(loaded: Loaded, version: str, weights: Weights) -> None:
    """Let a policy sample with other weights from its next turn on. Raises ModelError, OSError."""
    policy = loaded.policy
    if isinstance(policy, Following):
        await policy.adopt(version, weights)
        return
    if weights is None:
        policy.weights_version = version
        return
    from agentrl_cli.models.trained import put_weights

    if isinstance(policy, Swapping):
        await policy.swap(version, lambda: put_weights(loaded.model, weights))
    else:
        put_weights(loaded.model, weights)
        await require_trainable(policy).publish(version)


class Service:
    """A worker. `emit` sends a message; `take` gets those that arrive, in order."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.status = Status()
        self._stack = contextlib.AsyncExitStack()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._orders: dict[int, asyncio.Task[None]] = {}
        self._known: set[int] = set()
        """Numbers of the orders that arrived and have not ended."""
        self._rollouts: dict[tuple[Any, ...], AgentRollout] = {}
        self._parts: Parts | None = None
        self._loaded: Loaded | None = None
        self._setup: Setup | None = None

    def take(self, message: Message) -> None:
        """Accept a message; a cancellation acts at once, before a `load` that waits for running turns."""
        if message[0] == "cancel":
            task = self._orders.get(message[1])
            if task is not None:
                task.cancel()
            elif message[1] in self._known:  # it waits in the inbox
                self._known.discard(message[1])
                self.emit(("failed", message[1], "CancelledError", "", ""))
        else:
            if message[0] == "run":
                self._known.add(message[1].number)
            self._inbox.put_nowait(message)

    async def serve(self) -> None:
        """Handle messages until `close`; everything is freed then, and when cancelled."""
        beats = asyncio.ensure_future(self._beat())
        try:
            while (message := await self._inbox.get())[0] != "close":
                await getattr(self, f"_{message[0]}")(*message[1:])
        finally:
            beats.cancel()
            for task in self._orders.values():
                task.cancel()
            await asyncio.gather(beats, *self._orders.values(), return_exceptions=True)
            await self._stack.aclose()

    # --- messages ----------------------------------------------------------------------------------------------------

    async def _open(self, setup: Setup) -> None:
        """Open everything and answer `ready`, or `refused` with the reason."""
        try:
            self._setup = setup
            self._parts = await self._stack.enter_async_context(
                open_parts(setup.config, setup.base)
            )
            self._loaded = open_policy(setup)
            self._stack.push_async_callback(self._loaded.policy.close)
            self.status.version = self._loaded.policy.weights_version
            self.emit(("ready", hello(self._parts.packs)))
        except AgentRLError as error:
            self.emit(("refused", *problem(error)))

    async def _hold(self) -> None:
        assert self._loaded is not None
        if isinstance(self._loaded.policy, Following):
            await self._loaded.policy.hold()
        self.emit(("held",))

    async def _load(self, version: str, weights: Weights) -> None:
        assert self._loaded is not None
        try:
            await use_weights(self._loaded, version, weights)
            self.status.version = version
            self.emit(("loaded", version, ""))
        except (AgentRLError, OSError) as error:
            self.emit(("loaded", version, str(error)))

    async def _run(self, order: Order) -> None:
        if order.number not in self._known:  # cancelled meanwhile
            return
        task = asyncio.ensure_future(self._attempt(order))
        self._orders[order.number] = task
        task.add_done_callback(lambda _: self._forget(order.number))

    def _forget(self, number: int) -> None:
        self._orders.pop(number, None)
        self._known.discard(number)

    async def _attempt(self, order: Order) -> None:
        try:
            relay = Relay(order.number, self.emit)
            rollout = self._rollout(order.variant).with_(recorder=relay)
            packs = rollout.context.packs
            pack = packs.get(order.job.task.pack)
            if pack is None:
                raise NotFound.of("pack", order.job.task.pack, packs)
            found = await rollout.attempt(pack, order.job).run()
        except AgentRLError as error:
            self.emit(("failed", order.number, *problem(error)))
            if device_fault(
                error
            ):  # only another process can use this GPU again; the run starts one
                self._inbox.put_nowait(("close",))
        except asyncio.CancelledError:
            self.emit(("failed", order.number, "CancelledError", "", ""))
        except Exception as error:  # noqa: BLE001 - any failure must reach the run, or it waits for ever
            self.emit(("failed", order.number, "RunFailed", f"{type(error).__name__}: {error}", ""))
        else:
            self._count(found.episode)
            self.emit(("end", order.number, found.drift, found.guard_seconds, found.foreign))

    async def _echo(self, sent: float) -> None:
        self.emit(("echo", sent, time.time()))

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _rollout(self, variant: Variant) -> AgentRollout:
        """Return the rollout of a variant; one is kept for each."""
        assert self._parts is not None and self._loaded is not None and self._setup is not None
        run = variant.run
        key = (
            variant.temperature,
            variant.with_tools,
            variant.shaped,
            run.id if run is not None else None,
        )
        if key not in self._rollouts:
            parts, config = self._parts, self._setup.config
            hooks = (
                HookList([*parts.hooks.hooks, Shaping(config)]) if variant.shaped else parts.hooks
            )
            self._rollouts[key] = AgentRollout(
                self._loaded.policy,
                self._loaded.chat,
                parts.packs,
                config,
                sandbox=parts.sandbox,
                hooks=hooks,
                with_tools=variant.with_tools,
                temperature=variant.temperature,
                run=run,
            )
        return self._rollouts[key]

    def _count(self, episode: Episode) -> None:
        self.status.finished += 1
        self.status.tokens += episode.trained_tokens

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            status = self.status
            policy = self._loaded.policy if self._loaded is not None else None
            metrics = policy.take_metrics() if isinstance(policy, TrainablePolicy) else {}
            found = Status(
                status.version, tuple(self._known), status.finished, status.tokens, metrics
            )
            self.emit(("beat", found))


def problem(error: AgentRLError) -> tuple[str, str, str]:
    """Class, message and hint of an error, for a message."""
    return type(error).__name__, error.message, error.hint
