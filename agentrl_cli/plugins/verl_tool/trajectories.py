"""A tool server's trajectories: one set of tool states each, and calls that run exactly once.

HTTP is in app.py. After a restart, a trajectory's state is rebuilt by running its journalled calls again and
comparing the results; calls to `external` or `pure` tools are not repeated, their stored answers are used.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from agentrl_cli.config import RolloutConfig
from agentrl_cli.envs.tool_env import ToolEnv, as_env_error, tool_env
from agentrl_cli.errors import AgentRLError, EnvError, NotFound, SandboxFault, UsageError
from agentrl_cli.plugins.verl_tool.journal import Entry, Journal
from agentrl_cli.tools import Tool, refuse
from agentrl_cli.types import Task, ToolCall, ToolResult

Text = Annotated[str, Field(min_length=1)]
CACHE = 4096
"""Maximum number of cached answers of pure tools."""
OPENING = ""
"""Among the running calls of a trajectory, the making of its tools; no call has this key."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call as received. `key` is the caller's idempotency key."""

    trajectory: Text
    key: Text
    name: Text
    arguments: Mapping[str, Any]


@dataclass
class _Live:
    env: ToolEnv
    ready: asyncio.Task[None]
    used: float = 0.0
    running: dict[str, asyncio.Task[Any]] = field(default_factory=dict)


class Trajectories:
    """All trajectories of one server."""

    def __init__(
        self,
        tools: Sequence[Tool],
        journal: Journal,
        *,
        open_session: Callable[..., Awaitable[Any]] | None = None,
        limits: RolloutConfig | None = None,
        sessions: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`open_session(episode_seed=…, …)` opens a trajectory's sandbox session; `sessions` maps each pack's name to
        its options. `limits`: those of calls and observations, as in a rollout."""
        self.tools = {tool.name: tool for tool in tools}
        self.journal = journal
        self.counts: Counter[tuple[str, str]] = Counter()
        """Number of calls by (tool, `ok` or error class)."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of calls by tool, summed."""
        self._open_session = open_session
        self._limits = limits or RolloutConfig()
        self._sessions = sessions or {}
        self.observers: Sequence[Callable[[str, ToolCall, ToolResult, float], None]] = ()
        """Get each answered call: trajectory, call, result, begin."""
        self._live: dict[str, _Live] = {}
        self._cache: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    async def open(self, trajectory: str, spec: Mapping[str, Any]) -> list[str]:
        """Open a trajectory; returns its tools' names. Raises NotFound for an unknown tool, UsageError."""
        names = [str(name) for name in spec.get("tools") or self.tools]
        for name in names:
            if name not in self.tools:
                raise NotFound.of("tool", name, self.tools)
        self.journal.open(trajectory, {**spec, "tools": names})
        return names

    async def opening(self, trajectory: str) -> list[str]:
        """Text that the trajectory's tools add to the task's prompt. Raises EnvError if a tool's state cannot be made.

        Only tools that may add text are created for it.
        """
        names = [name for name in self.journal.spec(trajectory)["tools"] if self.tools[name].opens]
        if not names:
            return []
        live = await self._ready(trajectory)
        if (task := live.running.get(OPENING)) is None:  # a close waits for it, and then frees them
            task = live.running[OPENING] = asyncio.create_task(_open_tools(live.env))
            task.add_done_callback(lambda _: live.running.pop(OPENING, None))
        return list(await asyncio.shield(task))

    async def call(self, call: Call) -> dict[str, Any]:
        """Run a call once, however often it is requested; returns `{"result", "state"}` as JSON.

        Raises UsageError for a key of another call, EnvError if the state cannot be rebuilt or a call to an external
        tool was in flight when the server stopped, SandboxFault if the sandbox itself failed.
        """
        entry = self.journal.find(call.trajectory, call.key)
        if entry is not None and (entry.name, entry.arguments) != (call.name, call.arguments):
            raise UsageError(
                f"The key {call.key} belongs to another call.", hint="Use a new key for each call."
            )
        if entry is not None and entry.result is not None:
            return dict(entry.result)
        live = await self._ready(call.trajectory)
        task = live.running.get(call.key)
        if task is None:
            if call.name not in live.env.tools:
                return _answer(refuse(_tool_call(call.name, {}), live.env.tools), {})
            if entry is not None and live.env.tools[call.name].external:
                raise EnvError(
                    f"A call to {call.name} was in flight when the tool server stopped: whether it took effect is not "
                    "known, and it must not run twice."
                )
            entry = entry or self.journal.begin(
                call.trajectory, call.key, call.name, call.arguments
            )
            task = live.running[call.key] = asyncio.create_task(self._run(live, entry))
            task.add_done_callback(lambda _: live.running.pop(call.key, None))
        # Shielded: a disconnecting caller does not cancel a call that may be requested again.
        return await asyncio.shield(task)

    async def rewards(self, trajectory: str) -> dict[str, float]:
        """Return the tools' rewards for a trajectory, `tool:<name>` to value."""
        live = await self._ready(trajectory)
        return {part.name: part.value for part in await live.env.rewards()}

    async def close(self, trajectory: str) -> bool:
        """Close a trajectory after its running calls; releases its tools and sandbox. False if it was not open."""
        closed = self.journal.end(trajectory)  # first, so that no call begins meanwhile
        await self._release(trajectory)
        return closed

    async def sweep(self, idle: float) -> int:
        """Release trajectories without a call for `idle` seconds; the next call rebuilds them. Returns their number."""
        before = time.monotonic() - idle
        old = [name for name, live in self._live.items() if live.used < before and not live.running]
        for name in old:
            await self._release(name)
        return len(old)

    async def shutdown(self, grace: float = 10.0) -> None:
        """Wait up to `grace` seconds for running calls, then release everything. The journal keeps open ones."""
        running = [task for live in self._live.values() for task in live.running.values()]
        if running:
            _, late = await asyncio.wait(running, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        while self._live:
            await self._release(next(iter(self._live)))

    # -- one trajectory ---------------------------------------------------------------------------------------------

    async def _ready(self, trajectory: str) -> _Live:
        live = self._live.get(trajectory)
        if live is None:
            spec = self.journal.spec(trajectory)
            row = spec.get("task") or {}
            pack, family, split = (str(row.get(key, "")) for key in ("pack", "family", "split"))
            prompt, data = tuple(row.get("prompt", ())), dict(row.get("data", {}))
            task = Task(trajectory, pack, family, split, prompt, data)
            seed, opener = int(spec.get("seed", 0)), self._open_session
            tools = [self.tools[name] for name in spec["tools"] if name in self.tools]
            # A rollout sends the whole task; other clients see the tools as they are.
            if "prompt" in row:
                tools = _offer(tools, task)
            one = not task.pack and len(self._sessions) == 1  # without a name: the only pack's
            name = next(iter(self._sessions)) if one else task.pack
            wants = {"episode_seed": seed, **self._sessions.get(name, {})}
            session = partial(opener, **wants) if opener is not None else None
            env = tool_env(self._limits, tools, task, open_session=session, seed=seed, late=True)
            started = asyncio.create_task(self._start(env, task))
            live = self._live[trajectory] = _Live(env, started)
        live.used = time.monotonic()
        try:
            await asyncio.shield(live.ready)
        except AgentRLError:
            if self._live.get(trajectory) is live:  # the next call rebuilds it from the journal
                del self._live[trajectory]
                await live.env.close()
            raise
        released = self._live.get(trajectory) is not live
        return await self._ready(trajectory) if released else live

    async def _start(self, env: ToolEnv, task: Task) -> None:
        """Creates the tools' states, then replays the journal."""
        try:
            await env.reset(task)
        except Exception as error:
            raise as_env_error(error) from error
        for number, entry in enumerate(self.journal.calls(task.id)):
            assert entry.result is not None
            if (tool := env.tools.get(entry.name)) is None:
                raise EnvError(
                    f"The state of {task.id} could not be rebuilt: {entry.name} is not served any more.",
                    hint="Start the server with the same packs.",
                )
            if tool.external or tool.pure:
                env.context.state.update(entry.result["state"])
                continue
            again = await env.call(_tool_call(entry.name, entry.arguments))
            was = entry.result["result"]
            if (again.text, again.error) != (was["text"], was["error"]):
                raise EnvError(
                    f"The state of {task.id} could not be rebuilt: diverged at call {number} ({entry.name}).",
                    hint="Its tools are not deterministic, so the episode is an env_error.",
                )

    async def _run(self, live: _Live, entry: Entry) -> dict[str, Any]:
        tool = live.env.tools[entry.name]
        key = ""
        if tool.pure and tool is self.tools.get(entry.name):  # not one that the row changes
            state = await live.env.create(entry.name)
            # A tool's own state decides its answer, too: that of search is the corpus of its row.
            own = "" if state is live.env.context else state
            if isinstance(own, str):
                key = json.dumps([entry.name, entry.arguments, own], sort_keys=True)
        answer, started = self._cache.get(key), time.time()
        if answer is not None:
            answer = {**answer, "state": _plain_fields(live.env.context.state)}
        else:
            try:
                result = await live.env.call(_tool_call(entry.name, entry.arguments))
            except SandboxFault:
                self.journal.forget(entry.number)
                raise
            answer = _answer(result, live.env.context.state)
            self.seconds[entry.name] += result.seconds
        if key and answer["result"]["error"] is None:
            self._cache[key] = answer
            self._cache.move_to_end(key)
            if len(self._cache) > CACHE:
                self._cache.popitem(last=False)
        self.journal.finish(entry.number, answer)
        said, seconds = answer["result"], time.time() - started
        for observe in self.observers:
            call = ToolCall(entry.key, entry.name, dict(entry.arguments), "")
            found = ToolResult(said["text"], error=said["error"], seconds=seconds)
            observe(entry.trajectory, call, found, started)
        self.counts[entry.name, answer["result"]["error"] or "ok"] += 1
        live.used = time.monotonic()
        return answer

    async def _release(self, trajectory: str) -> None:
        live = self._live.pop(trajectory, None)
        if live is None:
            return
        await asyncio.gather(live.ready, *live.running.values(), return_exceptions=True)
        await live.env.close()


async def _open_tools(env: ToolEnv) -> list[str]:
    for name, tool in env.tools.items():
        if tool.opens:
            await env.create(name)
    return env.context.opening


def _offer(tools: Sequence[Tool], task: Task) -> list[Tool]:
    """Return the tools as the task's row shows them. Raises EnvError."""
    try:
        return [one for tool in tools for one in tool.offer(task)]
    except Exception as error:
        raise as_env_error(error) from error


def _tool_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """Return a ToolCall without source text."""
    return ToolCall(id="", name=name, arguments=dict(arguments), raw="")


def _answer(result: ToolResult, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result and the tools' shared state as JSON; values that JSON cannot carry are left out."""
    said = asdict(result) | {
        "images": [base64.b64encode(image).decode() for image in result.images],
        "metrics": dict(result.metrics),
        "value": result.value if _plain(result.value) else None,
    }
    return {"result": said, "state": _plain_fields(state)}


def _plain_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if _plain(value)}


def _plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
