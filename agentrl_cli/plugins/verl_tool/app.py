"""The tool server's HTTP side: a typed protocol of its own, and verl-tool's `/get_observation`, `/health`, `/metrics`.

    POST /v1/open     {"trajectory": id, "task": {…}, "seed": 0, "tools": [names]}  → {"trajectory", "tools", "opening"}
    POST /v1/call     {"calls": [{"trajectory", "key", "name", "arguments"}, …]}    → {"results": [answer, …]}
    POST /v1/rewards  {"trajectories": [ids]}                                       → {"rewards": {id: {"tool:x": 1.0}}}
    POST /v1/close    {"trajectories": [ids]}                                       → {"closed": [ids]}
    GET  /v1/tools                                                                  → {"tools": [schemas]}

Each answer is {"result", "state"}, or {"fault": "env_error" | "sandbox_error" | "usage_error", "message"}.
`tools` are schemas, `opening` is text that the tools add to the task's prompt.
Every request but `/health` needs `Authorization: Bearer TOKEN`. 429 with Retry-After means that nothing was run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agentrl_cli.agents.gateway.http import bearer, is_token, page_problem
from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.parsers import Parser
from agentrl_cli.errors import (
    AgentRLError,
    EnvError,
    EnvironmentProblem,
    NotFound,
    UsageError,
    needs_extra,
)
from agentrl_cli.plugins.verl_tool.bodies import (
    CallsBody,
    NamesBody,
    ObserveBody,
    OpenBody,
    read,
)
from agentrl_cli.plugins.verl_tool.parser import PARSER as VERL_TOOL
from agentrl_cli.plugins.verl_tool.trajectories import Call, Trajectories
from agentrl_cli.types import new_id

if TYPE_CHECKING:
    from aiohttp import web
    from pydantic import BaseModel

MAX_BODY = 64 * 1024 * 1024
"""Maximum bytes of a request."""

BOXED = r"\boxed{"

Handler = Callable[..., Awaitable[Any]]
Route = Callable[["web.Request"], Awaitable["web.Response"]]


class Busy(AgentRLError):
    """More concurrent calls than the server accepts; nothing was run."""


STATUSES: dict[type[AgentRLError], int] = {
    **{Busy: 429, NotFound: 404, UsageError: 400},
    EnvError: 422,  # caused by the task or its tools: a retry would not help
    AgentRLError: 500,
}
"""Class of an error to the status of its answer; the first that fits counts."""


class ToolServer:
    """Handles requests. `limit`: maximum number of calls running or waiting."""

    def __init__(
        self,
        trajectories: Trajectories,
        parser: Parser,
        *,
        token: str,
        limit: int = 256,
        done_if_invalid: bool = False,
    ) -> None:
        """If `token` is empty, anyone who reaches the address may call. `parser` reads verl-tool's actions."""
        self.trajectories = trajectories
        self.limit = limit
        self.active = 0
        self.refused = 0
        self.draining = False
        self._parser = parser
        self._token = token
        self._done_if_invalid = done_if_invalid
        self._since = time.monotonic()

    # -- the typed protocol -----------------------------------------------------------------------------------------

    async def open(self, body: OpenBody) -> Any:
        trajectory = body.trajectory or new_id()
        spec = body.model_dump(exclude={"trajectory"}, exclude_unset=True)
        names = await self.trajectories.open(trajectory, spec)
        return {
            "trajectory": trajectory,
            "tools": [self.trajectories.tools[name].schema for name in names],
            "opening": await self.trajectories.opening(trajectory),
        }

    async def call(self, body: CallsBody) -> Any:
        with self.slots(len(body.calls)):
            return {"results": await asyncio.gather(*map(self._answer, body.calls))}

    async def rewards(self, body: NamesBody) -> Any:
        names = body.trajectories
        return {"rewards": {name: await self.trajectories.rewards(name) for name in names}}

    async def close(self, body: NamesBody) -> Any:
        return {
            "closed": [name for name in body.trajectories if await self.trajectories.close(name)]
        }

    @contextlib.contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Reserves slots for `count` calls. Raises Busy, or UsageError if `count` exceeds the limit, before any run."""
        if count > self.limit:
            raise UsageError(f"{count} calls in one request; the limit is {self.limit}.")
        if self.active + count > self.limit:
            self.refused += count
            raise Busy(
                f"{self.active} calls are running or waiting; the limit is {self.limit}.",
                hint="Try again.",
            )
        self.active += count
        try:
            yield
        finally:
            self.active -= count

    async def _answer(self, call: Call) -> dict[str, Any]:
        try:
            return await self.trajectories.call(call)
        except UsageError as error:
            kind, message = "usage_error", error.message
        except EnvironmentProblem as error:
            kind, message = "sandbox_error", error.message
        except AgentRLError as error:
            kind, message = "env_error", error.message
        return {"fault": kind, "message": message}

    # -- verl-tool's --------------------------------------------------------------------------------------------------

    async def observe(self, body: ObserveBody) -> Any:
        """Handles verl-tool's batch of actions: texts with tool calls, each for one trajectory."""
        started, fields = time.perf_counter(), body.fields()
        names, actions = map(str, body.trajectory_ids), map(str, body.actions)
        with self.slots(len(fields)):
            rows = await asyncio.gather(*map(self._observe, names, actions, fields))
        return {
            "observations": [row[0] for row in rows],
            "dones": [row[1] for row in rows],
            "valids": [row[2] for row in rows],
            "processing_time_ms": (time.perf_counter() - started) * 1000,
            "queue_time_ms": 0.0,  # a call runs at once, or its request is refused
        }

    async def _observe(
        self, name: str, action: str, field: Mapping[str, Any]
    ) -> tuple[Any, bool, bool]:
        """(observation, done, valid) of one action."""
        if field.get("finish"):
            await self.trajectories.close(name)
            answer = _read_boxed(action)
            return ("" if answer is None else answer.strip()), True, True
        if not field.get("key"):  # the id begins again after a finish; with a key it may be a retry
            self.trajectories.journal.forget_closed(name)
        if not self.trajectories.journal.is_known(name):
            about = ("finish", "is_last_step", "key")  # the request itself: the rest is of the task
            data = {key: value for key, value in field.items() if key not in about}
            await self.trajectories.open(name, {"task": {"data": data}})
        schemas = [tool.schema for tool in self.trajectories.tools.values()]
        # Actions may be long: read in a thread.
        parsed = await asyncio.to_thread(parse_text, action, self._parser, schemas)
        if not parsed.calls:
            parsed = await asyncio.to_thread(parse_text, action, VERL_TOOL, schemas)
        wrong = next((str(call.error) for call in parsed.calls if call.error), "")
        if wrong or not parsed.calls:
            reason = wrong or "no valid tool found for action"
            return {"obs": wrong, "invalid_reason": reason}, self._done_if_invalid, False
        key = str(field.get("key") or new_id())
        calls = [
            Call(name, f"{key}.{n}", call.name, call.arguments or {})
            for n, call in enumerate(parsed.calls)
        ]
        answers = [await self._answer(call) for call in calls]
        faults = [answer["message"] for answer in answers if "fault" in answer]
        if faults:
            if not field.get("key"):  # it is over, and its id begins again, as after a finish
                await self.trajectories.close(name)
            return {"obs": "", "error": faults[0]}, True, False
        results = [answer["result"] for answer in answers]
        text = "\n".join(result["text"] for result in results)
        images = [image for result in results for image in result["images"]]
        done = any(result["done"] for result in results)
        rewards = [result["reward"] for result in results if result["reward"] is not None]
        extra = {"image": images} if images else {}
        extra |= {"reward": sum(rewards)} if rewards else {}
        return ({"obs": text, **extra} if extra else text), done, True

    async def health(self) -> Any:
        """Return the answer to verl-tool's `/health`, with the tools' names only for authorized clients."""
        return {**await self.pulse(), "tools": list(self.trajectories.tools)}

    async def pulse(self) -> Any:
        """Return the answer to `/health` for any client."""
        return {
            "status": "draining" if self.draining else "healthy",
            "concurrent_requests": self.active,
            "thread_pool_size": 0,
            "active_tasks": self.active,
            "max_concurrent": self.limit,
            "trajectories": len(self.trajectories),
            "uptime_seconds": time.monotonic() - self._since,
        }

    async def schemas(self) -> Any:
        return {"tools": [tool.schema for tool in self.trajectories.tools.values()]}

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        calls, seconds = self.trajectories.counts, self.trajectories.seconds
        families: dict[str, list[tuple[str, object]]] = {
            "calls_total": [
                (f'{{tool="{tool}",status="{status}"}}', count)
                for (tool, status), count in sorted(calls.items())
            ],
            "seconds_total": [
                (f'{{tool="{tool}"}}', f"{spent:.6f}") for tool, spent in sorted(seconds.items())
            ],
            "calls_active": [("", self.active)],
            "trajectories": [("", len(self.trajectories))],
            "calls_refused_total": [("", self.refused)],
        }
        lines = []
        for name, values in families.items():
            kind = "counter" if name.endswith("total") else "gauge"
            lines.append(f"# TYPE agentrl_tool_{name} {kind}")
            lines += [f"agentrl_tool_{name}{labels} {value}" for labels, value in values]
        return "\n".join(lines) + "\n"

    # -- HTTP -------------------------------------------------------------------------------------------------------

    def app(self, names: Collection[str] | None = None) -> web.Application:
        """Return the aiohttp application. Raises MissingDependency.

        `names`: allowed Host names besides IP addresses; None: any, for sockets that no web page can reach.
        """
        with needs_extra("The tool server needs aiohttp.", "serve"):
            from aiohttp import web

        async def metrics(request: web.Request) -> web.Response:
            if not self._is_allowed(request):
                return _problem(401, UsageError("The token is missing or wrong."))
            return web.Response(text=self.metrics(), content_type="text/plain")

        app = web.Application(client_max_size=MAX_BODY, middlewares=[_guard(names)])
        app.add_routes(
            [
                web.post("/v1/open", self._route(self.open, OpenBody)),
                web.post("/v1/call", self._route(self.call, CallsBody)),
                web.post("/v1/rewards", self._route(self.rewards, NamesBody)),
                web.post("/v1/close", self._route(self.close, NamesBody)),
                web.post("/get_observation", self._route(self.observe, ObserveBody)),
                web.get("/v1/tools", self._route(self.schemas)),
                web.get("/health", self._route(self.health, everyone=self.pulse)),
                web.get("/metrics", metrics),
            ]
        )
        return app

    def _is_allowed(self, request: web.Request) -> bool:
        return not self._token or is_token(
            self._token, bearer(request.headers.get("Authorization", ""))
        )

    def _route(
        self,
        handler: Handler,
        body: type[BaseModel] | None = None,
        *,
        everyone: Handler | None = None,
    ) -> Route:
        """Wraps a handler of bodies as an aiohttp handler; AgentRL errors become JSON with a fitting status.

        `everyone`: the answer without a token; by default, that the token is missing.
        """
        from aiohttp import web

        async def handle_request(request: web.Request) -> web.Response:
            known = self._is_allowed(request)
            if not known and everyone is None:
                hint = "Authorization: Bearer …"
                return _problem(401, UsageError("The token is missing or wrong.", hint=hint))
            if self.draining and everyone is None:
                hint = "Try again after its restart."
                return _problem(503, Busy("The tool server is shutting down.", hint=hint))
            try:
                given = [] if body is None else [read(body, await request.read())]
                answer = handler if known or everyone is None else everyone
                return web.json_response(await answer(*given))
            except AgentRLError as error:
                kind = next(kind for kind in STATUSES if isinstance(error, kind))
                return _problem(STATUSES[kind], error)

        async def timed(request: web.Request) -> web.Response:
            started = time.perf_counter()
            response = await handle_request(request)
            response.headers["X-Process-Time"] = f"{time.perf_counter() - started:.6f}"
            return response

        return timed


def _guard(names: Collection[str] | None) -> Any:
    """Return the middleware that keeps web pages out, with or without a token: checks Host, Origin and content type."""
    from aiohttp import web

    @web.middleware
    async def guard(request: web.Request, handler: Route) -> web.StreamResponse:
        hint = "`tools serve --allow-host NAME` serves it under another name, too."
        status, why = page_problem(request.method, request.headers, names, hint=hint)
        return _problem(status, UsageError(why)) if why else await handler(request)

    return guard


def _read_boxed(action: str) -> str | None:
    r"""Return the content of an answer's first non-empty \boxed{}; None if absent."""
    start = action.find(BOXED)
    end = action.find("}", start + len(BOXED) + 1) if start >= 0 else -1
    return action[start + len(BOXED) : end] if end >= 0 else None


def _problem(status: int, error: AgentRLError) -> web.Response:
    from aiohttp import web

    said = {"error": {"kind": type(error).__name__, "message": error.message, "hint": error.hint}}
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return web.json_response(said, status=status, headers=headers)
