"""The models of a server: the one that is loaded, and LoRA adapters on it, by the names that clients use.

One engine samples for all of them. It has one set of weights at a time, so a batch holds turns of one model: requests
wait in their order, the engine changes its adapter when the running turns have ended, and then takes all that wait for
the new one. Turns of one model are batched as in a training.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl_cli.agents.gateway.app import unknown_model
from agentrl_cli.agents.gateway.request import RequestError
from agentrl_cli.errors import ModelError
from agentrl_cli.policies.protocols import MessagePolicy, OnToken, Policy
from agentrl_cli.types import Generation, Int32, Message, Sampling, ToolSchema

T = TypeVar("T")

ANY = "*"
"""The alias that stands for every name."""

Load = Callable[[str], Awaitable[tuple[str, str]]]
"""Puts the adapter of a checkpoint or folder on the engine's model: peft's name for it, and its version."""


@dataclass(eq=False)
class ServedModel:
    """One name that clients may ask for: a Policy that takes its turns of the shared engine."""

    name: str
    adapter: str | None
    """peft's name of the adapter; None: the model as it was loaded."""
    weights_version: str
    """Stored with its turns."""
    engine: SharedEngine
    untrainable: str = ""
    context_length: int = 0
    removed: RequestError | None = None
    """The answer to turns that wait for it although it is served no more."""

    def __post_init__(self) -> None:
        policy = self.engine.policy
        self.context_length, self.untrainable = policy.context_length, policy.untrainable

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Return one turn with this model's weights."""
        async with self.engine.turn(self):
            return await self.engine.policy.generate(
                f"{self.name}/{key}", ids, sampling, group=group
            )

    def observe(
        self, key: str, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *choice: Any
    ) -> bool:
        """Take the conversation so far, for a server that renders the messages itself."""
        policy, name = self.engine.policy, f"{self.name}/{key}"
        return isinstance(policy, MessagePolicy) and policy.observe(name, messages, tools, *choice)

    async def release(self, key: str) -> None:
        """Forget an episode."""
        await self.engine.policy.release(f"{self.name}/{key}")

    async def close(self) -> None:
        """Do nothing: the engine is closed by the server."""


@dataclass(eq=False)
class SharedEngine:
    """A policy whose weights are those of one model at a time.

    Args:
        activate: Makes a model the one that the next forwards compute; None if there is only one.
    """

    policy: Policy
    activate: Callable[[ServedModel], None] | None = None
    _current: ServedModel | None = None
    _running: int = 0
    _waiting: list[tuple[int, ServedModel]] = field(default_factory=list)
    """Number and model of each turn that waits for its weights, in order."""
    _asked: int = 0
    """Turns that were asked for."""
    _before: int = 0
    """Those of them that were asked for when the current model was activated."""
    _changing: bool = False
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def turn(self, model: ServedModel) -> AsyncIterator[None]:
        """Compute with a model's weights meanwhile. Raises RequestError (404) if it was removed before that."""
        self._asked += 1
        ticket = (self._asked, model)
        self._waiting.append(ticket)
        try:
            await self._until(lambda: self._is_next(*ticket))
            if model.removed is not None:
                raise model.removed
            if self.activate is not None and model is not self._current:
                self.activate(model)
                self._current, self._before = model, self._asked
            self._running += 1
        finally:
            self._waiting.remove(ticket)
            self._ring()
        try:
            yield
        finally:
            self._running -= 1
            self._ring()

    def _is_next(self, number: int, model: ServedModel) -> bool:
        """Whether a turn may begin: in the order of requests, but with all that waited for the same model."""
        if self._changing or self.activate is None:
            return not self._changing
        if model is not self._current:
            return not self._running and self._waiting[0][0] == number
        return number <= self._before or all(other is model for _, other in self._waiting)

    async def exclusive(self, change: Callable[[], Awaitable[T]]) -> T:
        """Run `change` while no turn runs; those that come meanwhile wait."""
        await self._until(lambda: not self._changing)
        self._changing = True
        try:
            await self._until(lambda: not self._running)
            return await change()
        finally:
            self._current, self._changing = None, False
            self._ring()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._moved.wait()

    def _ring(self) -> None:
        """Let everything that waits look again."""
        self._moved.set()
        self._moved = asyncio.Event()


class ServedModels:
    """The names that a server answers to. The first is the default."""

    def __init__(
        self,
        name: str,
        engine: SharedEngine,
        load: Load | None = None,
        unload: Callable[[str], Awaitable[None]] | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """Serve the model. `load`, `unload`: None if it takes no adapters. `aliases`: more names of it, or ANY."""
        self.default = name
        self._engine, self._load, self._unload = engine, load, unload
        model = ServedModel(name, None, engine.policy.weights_version, engine)
        self._served = dict.fromkeys([name, *(alias for alias in aliases if alias != ANY)], model)
        self._any = model if ANY in aliases else None

    def policy(self, name: str) -> Policy:
        """Return the policy of a name; "" is the default. Raises RequestError (404)."""
        found = self._served.get(name or self.default, self._any)
        if found is None:
            raise unknown_model(name, list(self._served))
        return found

    def cards(self) -> list[Mapping[str, Any]]:
        """Return the list of `/v1/models`."""
        length = self._engine.policy.context_length
        return [
            {
                "id": name,
                "root": self.default,
                "parent": None if model.adapter is None else self.default,
            }
            | {"max_model_len": length, "weights_version": model.weights_version}
            for name, model in self._served.items()
        ]

    async def add(self, name: str, spec: str) -> ServedModel:
        """Serve an adapter under a name, or give a served one new weights; turns that run end with the old ones.

        Raises RequestError, ModelError, NotFound.
        """
        if self._is_model(name):
            raise RequestError(
                f"{name!r} is the model itself: an adapter needs a name of its own.", param="id"
            )
        if self._load is None:
            raise ModelError(
                "This model takes no adapters.",
                hint="Adapters are served on a model that is loaded in this process.",
            )
        load = self._load

        async def change() -> ServedModel:
            adapter, version = await load(spec)
            model = self._served.get(name)
            if model is None:
                model = self._served[name] = ServedModel(name, adapter, version, self._engine)
            else:  # the same one, as turns may wait for it
                await self._drop(model)
                model.adapter, model.weights_version = adapter, version
            return model

        return await self._engine.exclusive(change)

    async def remove(self, name: str) -> None:
        """Serve an adapter no more; turns that run end with it. Raises RequestError."""
        if self._is_model(name):
            raise RequestError(
                f"{name!r} is the model itself: it is served as long as the server runs.",
                param="id",
            )
        if name not in self._served:
            raise unknown_model(name, list(self._served))
        model = self._served.pop(name)
        model.removed = unknown_model(name, list(self._served))
        await self._engine.exclusive(lambda: self._drop(model))

    def _is_model(self, name: str) -> bool:
        return self._served.get(name) is self._served[self.default]

    async def _drop(self, model: ServedModel) -> None:
        if self._unload is not None and model.adapter is not None:
            await self._unload(model.adapter)
