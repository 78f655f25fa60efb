"""A worker: opens packs, sandbox and model, makes the episodes it is asked for, and reports.

It lives in one event loop, in a process or in an actor of its own. It never opens the store: its recorder, a
`Relay`, sends what attempts record, and a `Delivery` in the process of the run records and assembles that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.config import Config
from agentrl_cli.errors import AgentRLError, NotFound, RunFailed, device_fault
from agentrl_cli.hooks import HookList
from agentrl_cli.learning.length_shaping import Shaping
from agentrl_cli.policies.load import Loaded, load_policy
from agentrl_cli.policies.protocols import Published, TrainablePolicy, require_trainable
from agentrl_cli.rollout import Rollout
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.parts import limits_of, name_agents, open_parts
from agentrl_cli.rollout.recorder import Recorder
from agentrl_cli.store.codec import dumps, loads
from agentrl_cli.tasks import Pack
from agentrl_cli.types import AgentState, Drift, Episode, Tokens, ToolResult, Turn

Message = tuple[int, str, Any]
"""From a worker: the number of a call, `done`, `failed`, `beat` or a method of Recorder, its value or arguments."""


def head_of(episode: Episode) -> Episode:
    """Return an episode without its turns and tokens, which were sent before."""
    return episode.with_(turns=(), tokens=Tokens.concat([]))


def as_stored(turn: Turn) -> Turn:
    """Return a turn as the store would return it: values of tools and arguments that cannot be pickled stay here."""

    def plain(result: ToolResult) -> ToolResult:
        return replace(result, value=None, metrics=dict(result.metrics))

    calls = (replace(call, arguments=loads(dumps(call.arguments))) for call in turn.calls)
    messages, results = loads(dumps(turn.messages)), map(plain, turn.results)
    return replace(turn, messages=tuple(messages), calls=tuple(calls), results=tuple(results))


class Relay(Recorder):
    """The recorder of one call in a worker: each turn is sent once, when it is finished."""

    def __init__(self, number: int, emit: Callable[[Message], None]) -> None:
        self.number = number
        self.emit = emit
        self.sent: dict[int, Turn] = {}

    def start(self, episode: Episode, split: str, tokenizer: str) -> None:
        self._send("start", head_of(episode), split, tokenizer)

    def turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        self.sent[turn.index] = turn
        self._send("turn", episode_id, as_stored(turn), tokens)

    def live(self, episode_id: str, state: AgentState, turn: int, text: str) -> None:
        self._send("live", episode_id, state, turn, text)

    def drift(self, episode_id: str, drift: Drift) -> None:
        self._send("drift", episode_id, drift)

    def event(self, run_id: str | None, kind: str, data: Mapping[str, Any]) -> None:
        self._send("event", run_id, kind, loads(dumps(data)))

    def finish(self, episode: Episode) -> None:
        # A turn that was changed after it was sent (by a reward or a masked call) is another object: sent again.
        for turn in episode.turns:
            if self.sent.get(turn.index) is not turn:
                self.turn(episode.id, turn, episode.tokens.slice(turn.start, turn.end))
        self._send("finish", head_of(episode), [turn.index for turn in episode.turns])

    def _send(self, name: str, *values: Any) -> None:
        self.emit((self.number, name, values))


@dataclass(eq=False)
class Delivery:
    """A call's episode as it arrives: recorded at once, and assembled."""

    recorder: Recorder | None
    episode_id: str = ""
    """Empty before it has begun, and once it has ended."""
    turns: dict[int, tuple[Turn, Tokens]] = field(default_factory=dict)
    ended: Episode | None = None

    def take(self, name: str, *values: Any) -> None:
        """Record one message of the call's Relay."""
        if name == "start":
            self.episode_id = values[0].id
        elif name == "turn":
            self.turns[values[1].index] = values[1:]
        elif name == "finish":
            head, indices = values
            sent = [
                self.turns[index] for index in indices
            ]  # none, of one that failed before its prompt
            tokens = Tokens.concat([tokens for _, tokens in sent])
            self.ended = head.with_(turns=tuple(turn for turn, _ in sent), tokens=tokens)
            self.episode_id, values = "", (self.ended,)
        if self.recorder is not None:
            getattr(self.recorder, name)(*values)


BEAT = 1.0
"""Seconds between two signs of life."""
PACKAGES = ("agentrl-cli", "torch", "transformers", "tokenizers", "peft", "numpy", "ray")
"""Packages that must have the same version everywhere, if installed."""

Call = tuple[int, str, tuple[Any, ...]]
"""To a worker: the number of the call, a method of `Service` (or `cancel` or `close`), its arguments."""
Weights = Any
"""A safetensors file or its bytes, or a link's reference to these; Published: the servers have them.

None: the weights of the model's own files.
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a worker."""

    config: Config
    base: Path
    """The project folder, which the worker must see."""
    spec: str
    """The model, as `load_policy` takes it."""
    trainable: bool
    threads: int = 0
    """Threads of torch; 0: its default."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The node and versions of a worker."""

    node: str
    pid: int
    facts: Mapping[str, str]
    """Versions, and the hash of each pack's code: all must be the same everywhere."""


@runtime_checkable
class Following(Protocol):
    """A policy on servers, to which one process brings the weights for all."""

    def last_published(self) -> Published:
        """Return the weights of the last `publish`."""

    async def hold(self) -> None:
        """Wait for running turns and let none begin until `adopt`."""

    async def adopt(self, version: str, published: Published | None) -> None:
        """Sample with the weights that another process had the servers load; None: with those that they had."""

    async def publish(self, version: str) -> None:
        """Let the servers load the trained weights."""


def describe_node(packs: Mapping[str, Pack]) -> Hello:
    """Return the node and versions of this process."""
    facts = {"Python": platform.python_version().rpartition(".")[0]}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    facts |= {f"code of the pack {name}": pack.code for name, pack in packs.items()}
    return Hello(socket.gethostname(), os.getpid(), facts)


def open_policy(setup: Setup, packs: Mapping[str, Pack]) -> Loaded:
    """Return the worker's own copy of the model, ready to sample."""
    import torch

    if setup.threads:
        torch.set_num_threads(setup.threads)
    limited = limits_of(setup.config, packs)
    return load_policy(setup.spec, limited, base=setup.base, trainable=setup.trainable)


class Service:
    """A worker. `take` gets calls, in order; `messages` returns answers and records, in order."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._out: list[Message] = []
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._ended = False
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._opened: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._in_order = asyncio.Lock()
        """Held while weights change: a call that arrives later begins afterwards."""
        self._loaded: Loaded | None = None
        self._rollout: Rollout | None = None

    async def messages(self) -> list[Message]:
        """Return the next messages; empty once it has ended."""
        await self._wake.wait()
        if not self._ended:
            self._wake.clear()
        found, self._out = self._out, []
        return found

    def take(self, call: Call) -> None:
        """Begin a call; a cancellation acts at once."""
        number, method, arguments = call
        if method == "close":
            self._closing.set()
        elif method == "cancel":
            if number in self._calls:
                self._calls[number].cancel()
        else:
            given = (number, *arguments) if method == "attempt" else arguments
            self._calls[number] = work = asyncio.ensure_future(getattr(self, method)(*given))
            work.add_done_callback(partial(self._answer, number))

    async def serve(self) -> None:
        """Open everything, then make calls until `close`; everything is freed at the end."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(self._stop)
                self._calls[-1] = asyncio.ensure_future(self._beat())
                try:
                    self._opened.set_result(await self._open(stack))
                    stack.push_async_callback(self._stop)
                except Exception as error:  # noqa: BLE001 - `hello` raises it
                    self._opened.set_exception(error)
                await self._closing.wait()
        finally:
            self._ended = True
            self._wake.set()

    # --- calls -------------------------------------------------------------------------------------------------------

    async def hello(self) -> Hello:
        """Return where it runs, once everything is open. Raises the error of opening it."""
        return await asyncio.shield(self._opened)

    async def load(self, version: str, weights: Weights) -> None:
        """Sample with other weights from the next turn on; running turns end with those they began with."""
        from agentrl_cli.models.adapter import put_weights

        assert self._loaded is not None
        policy, model = self._loaded.policy, self._loaded.model
        async with self._in_order:
            if isinstance(policy, Following):
                await policy.adopt(version, weights)
            elif weights is None:
                policy.weights_version = version
            elif swap := getattr(policy, "swap", None):  # between two turns, nothing is computed
                await swap(version, lambda: put_weights(model, weights))
            else:
                put_weights(model, weights)
                await require_trainable(policy).publish(version)

    async def hold(self) -> None:
        """Let no turn begin until the next `load`; return once none runs."""
        assert self._loaded is not None
        async with self._in_order:
            if isinstance(self._loaded.policy, Following):
                await self._loaded.policy.hold()

    async def echo(self) -> float:
        """Return this node's time."""
        return time.time()

    async def attempt(
        self, number: int, job: Job, shaped: bool, variant: Mapping[str, Any]
    ) -> tuple[str, float, str]:
        """Make an episode, recorded as messages of the call `number`. Returns drift, guard_seconds, foreign.

        `shaped`: the reward parts of training are added; `variant`: fields of the RolloutContext.
        """
        assert self._rollout is not None
        async with self._in_order:
            rollout = self._rollout.with_(recorder=Relay(number, self._emit), **variant)
        if shaped:
            own, limit = self.setup.config, rollout.context.policy.context_length
            agents = name_agents(rollout.context.packs)
            shaping = Shaping(own.algo, own.rollout, limit, agents)
            hooks = [*rollout.context.hooks.hooks, shaping]
            rollout = rollout.with_(hooks=HookList(hooks))
        packs = rollout.context.packs
        if job.task.pack not in packs:
            raise NotFound.of("pack", job.task.pack, packs)
        found = await rollout.attempt(packs[job.task.pack], job).run()
        return found.drift, found.guard_seconds, found.foreign

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _emit(self, message: Message) -> None:
        self._out.append(message)
        self._wake.set()

    async def _open(self, stack: contextlib.AsyncExitStack) -> Hello:
        setup, config = self.setup, self.setup.config
        parts = await stack.enter_async_context(open_parts(config, setup.base))
        loaded = open_policy(setup, parts.packs)
        stack.push_async_callback(loaded.policy.close)
        rollout = AgentRollout(loaded.policy, loaded.chat, parts.packs, config)
        self._rollout = rollout.with_(sandbox=parts.sandbox, hooks=parts.hooks)
        self._loaded = loaded
        return describe_node(parts.packs)

    def _answer(self, number: int, ended: asyncio.Future[Any]) -> None:
        """Send the result of a call, or its error."""
        self._calls.pop(number, None)
        error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        if error is None:
            self._emit((number, "done", ended.result()))
            return
        if device_fault(error):  # only another process can use this GPU again; the run starts one
            self._closing.set()
        self._emit((number, "failed", plain_error(error)))

    async def _stop(self) -> None:
        running = list(self._calls.values())
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            policy = self._loaded.policy if self._loaded is not None else None
            metrics = policy.take_metrics() if isinstance(policy, TrainablePolicy) else {}
            self._emit((-1, "beat", (tuple(self._calls), metrics)))


def plain_error(error: BaseException) -> BaseException:
    """Return an error that every process can unpickle, of the nearest class of the error tree."""
    if isinstance(error, asyncio.CancelledError):
        return error
    if not isinstance(error, AgentRLError):
        return RunFailed(f"{type(error).__name__}: {error}")
    kinds = (one for one in type(error).__mro__ if one.__module__ == AgentRLError.__module__)
    plain: AgentRLError = next(kinds)(error.message, hint=error.hint)
    return plain
