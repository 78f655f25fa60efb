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
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl_cli.agents.gateway.guard import bearer, is_foreign, is_served, is_token, sent_unasked
from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.parsers import Parser
from agentrl_cli.errors import (
    AgentRLError,
    EnvError,
    EnvironmentProblem,
    MissingDependency,
    NotFound,
    UsageError,
)
from agentrl_cli.plugins.verl_tool import bodies
from agentrl_cli.plugins.verl_tool.parser import PARSER as VERL_TOOL
from agentrl_cli.plugins.verl_tool.trajectories import Call, Trajectories
from agentrl_cli.types import new_id

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY = 64 * 1024 * 1024
"""Maximum bytes of a request."""

BOXED = r"\boxed{"

Handler = Callable[[Mapping[str, Any]], Awaitable[Any]]
Route = Callable[["web.Request"], Awaitable["web.Response"]]


class Busy(AgentRLError):
    """More concurrent calls than the server accepts; nothing was run."""


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

    async def open(self, body: Mapping[str, Any]) -> Any:
        trajectory = bodies.text(body, "trajectory") if "trajectory" in body else new_id()
        names = await self.trajectories.open(trajectory, bodies.spec(body))
        schemas = [self.trajectories.tools[name].schema for name in names]
        return {
            "trajectory": trajectory,
            "tools": schemas,
            "opening": await self.trajectories.opening(trajectory),
        }

    async def call(self, body: Mapping[str, Any]) -> Any:
        calls = [bodies.call(item) for item in bodies.items(body, "calls")]
        return {"results": await self._admitted(calls)}

    async def rewards(self, body: Mapping[str, Any]) -> Any:
        names = [str(name) for name in bodies.items(body, "trajectories")]
        return {"rewards": {name: await self.trajectories.rewards(name) for name in names}}

    async def close(self, body: Mapping[str, Any]) -> Any:
        names = [str(name) for name in bodies.items(body, "trajectories")]
        return {"closed": [name for name in names if await self.trajectories.close(name)]}

    async def _admitted(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """Return the calls' answers, in order."""
        with self._slots(len(calls)):
            return list(await asyncio.gather(*map(self._answer, calls)))

    @contextlib.contextmanager
    def _slots(self, count: int) -> Iterator[None]:
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
        except AgentRLError as error:
            kinds = {UsageError: "usage_error", EnvironmentProblem: "sandbox_error"}
            kind = next(
                (name for cls, name in kinds.items() if isinstance(error, cls)), "env_error"
            )
            return {"fault": kind, "message": error.message}

    # -- verl-tool's --------------------------------------------------------------------------------------------------

    async def observe(self, body: Mapping[str, Any]) -> Any:
        """Handles verl-tool's batch of actions: texts with tool calls, each for one trajectory."""
        started = time.perf_counter()
        names, actions = bodies.items(body, "trajectory_ids"), bodies.items(body, "actions")
        fields = bodies.fields(body, len(names))
        if not names or not len(names) == len(actions) == len(fields):
            raise UsageError(
                "trajectory_ids, actions and extra_fields must have the same length, at least 1."
            )
        with self._slots(len(names)):
            rows = await asyncio.gather(
                *map(self._observe, map(str, names), map(str, actions), fields)
            )
        took = (time.perf_counter() - started) * 1000
        return {
            "observations": [row[0] for row in rows],
            "dones": [row[1] for row in rows],
            "valids": [row[2] for row in rows],
            "processing_time_ms": took,
            "queue_time_ms": 0.0,  # a call runs at once, or its request is refused
        }

    async def _observe(
        self, name: str, action: str, field: Mapping[str, Any]
    ) -> tuple[Any, bool, bool]:
        """(observation, done, valid) of one action."""
        if field.get("finish"):
            await self.trajectories.close(name)
            answer = _boxed(action)
            return ("" if answer is None else answer.strip()), True, True
        if not field.get(
            "key"
        ):  # verl-tool's ids begin again after a finish; with a key it may be a late retry
            self.trajectories.journal.forget_closed(name)
        if not self.trajectories.journal.known(name):
            await self.trajectories.open(name, {"task": {"data": bodies.task_data(field)}})
        schemas = [tool.schema for tool in self.trajectories.tools.values()]
        parsed = await asyncio.to_thread(
            parse_text, action, self._parser, schemas
        )  # actions may be long
        if not parsed.calls:
            parsed = await asyncio.to_thread(parse_text, action, VERL_TOOL, schemas)
        if not parsed.calls:
            return (
                {"obs": "", "invalid_reason": "no valid tool found for action"},
                self._done_if_invalid,
                False,
            )
        bad = [call for call in parsed.calls if call.error]
        if bad:
            return (
                {"obs": str(bad[0].error), "invalid_reason": str(bad[0].error)},
                self._done_if_invalid,
                False,
            )
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

    async def health(self, _: Mapping[str, Any]) -> Any:
        """Return the answer to verl-tool's `/health`, with the tools' names only for authorized clients."""
        return {**await self.pulse({}), "tools": list(self.trajectories.tools)}

    async def pulse(self, _: Mapping[str, Any]) -> Any:
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

    async def schemas(self, _: Mapping[str, Any]) -> Any:
        return {"tools": [tool.schema for tool in self.trajectories.tools.values()]}

    def metrics(self) -> str:
        """Metrics in Prometheus' text format."""
        lines = ["# TYPE agentrl_tool_calls_total counter"]
        for (tool, status), count in sorted(self.trajectories.counts.items()):
            lines.append(f'agentrl_tool_calls_total{{tool="{tool}",status="{status}"}} {count}')
        lines.append("# TYPE agentrl_tool_seconds_total counter")
        for tool, seconds in sorted(self.trajectories.seconds.items()):
            lines.append(f'agentrl_tool_seconds_total{{tool="{tool}"}} {seconds:.6f}')
        for name, value in {
            "agentrl_tool_calls_active": self.active,
            "agentrl_tool_trajectories": len(self.trajectories),
            "agentrl_tool_calls_refused_total": self.refused,
        }.items():
            lines += [
                f"# TYPE {name} {'counter' if name.endswith('total') else 'gauge'}",
                f"{name} {value}",
            ]
        return "\n".join(lines) + "\n"

    # -- HTTP -------------------------------------------------------------------------------------------------------

    def app(self, names: Collection[str] | None = None) -> web.Application:
        """Return the aiohttp application. Raises MissingDependency.

        `names`: allowed Host names besides IP addresses; None: any, for sockets that no web page can reach.
        """
        try:
            from aiohttp import web
        except ImportError as error:
            hint = "pip install 'agentrl-cli[serve]'"
            raise MissingDependency("The tool server needs aiohttp.", hint=hint) from error

        async def metrics(request: web.Request) -> web.Response:
            if not self._allowed(request):
                return _problem(401, UsageError("The token is missing or wrong."))
            return web.Response(text=self.metrics(), content_type="text/plain")

        posts: dict[str, Handler] = {
            "/v1/open": self.open,
            "/v1/call": self.call,
            "/v1/rewards": self.rewards,
            "/v1/close": self.close,
            "/get_observation": self.observe,
        }
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_guard(names)])
        for path, handler in posts.items():
            app.router.add_post(path, self._route(handler))
        app.router.add_get("/v1/tools", self._route(self.schemas))
        app.router.add_get("/health", self._route(self.health, everyone=self.pulse))
        app.router.add_get("/metrics", metrics)
        return app

    def _allowed(self, request: web.Request) -> bool:
        return not self._token or is_token(
            self._token, bearer(request.headers.get("Authorization", ""))
        )

    def _route(self, handler: Handler, *, everyone: Handler | None = None) -> Route:
        """Wraps a handler of JSON objects as an aiohttp handler; AgentRL errors become JSON with a fitting status.

        `everyone`: the answer without a token; by default, that the token is missing.
        """
        from aiohttp import web

        async def answer(request: web.Request) -> web.Response:
            started = time.perf_counter()
            response = await handled(request)
            response.headers["X-Process-Time"] = f"{time.perf_counter() - started:.6f}"
            return response

        async def handled(request: web.Request) -> web.Response:
            known = self._allowed(request)
            if not known and everyone is None:
                return _problem(
                    401,
                    UsageError("The token is missing or wrong.", hint="Authorization: Bearer …"),
                )
            if self.draining and everyone is None:
                return _problem(
                    503,
                    Busy("The tool server is shutting down.", hint="Try again after its restart."),
                )
            try:
                body = bodies.json_object(await request.read()) if request.method == "POST" else {}
                return web.json_response(
                    await (handler if known or everyone is None else everyone)(body)
                )
            except Busy as error:
                return _problem(429, error)
            except NotFound as error:
                return _problem(404, error)
            except UsageError as error:
                return _problem(400, error)
            except EnvError as error:  # caused by the task or its tools: a retry would not help
                return _problem(422, error)
            except AgentRLError as error:
                return _problem(500, error)

        return answer


def _guard(names: Collection[str] | None) -> Any:
    """Return the middleware that keeps web pages out, with or without a token: checks Host, Origin and content type."""
    from aiohttp import web

    @web.middleware
    async def guard(request: web.Request, handler: Route) -> web.StreamResponse:
        host = request.host
        if names is not None and not is_served(host, names):
            hint = "`tools serve --allow-host NAME` serves it under another name, too."
            return _problem(403, UsageError(f"The host {host!r} is not served here.", hint=hint))
        if is_foreign(request.headers.get("Origin"), (host,)):
            return _problem(403, UsageError("Requests from pages of other sites are refused."))
        if request.method == "POST" and sent_unasked(request.headers.get("Content-Type", "")):
            return _problem(
                415, UsageError("The body must be JSON.", hint="Content-Type: application/json")
            )
        return await handler(request)

    return guard


def _boxed(action: str) -> str | None:
    r"""Return the content of an answer's first non-empty \boxed{}; None if absent."""
    start = action.find(BOXED)
    end = action.find("}", start + len(BOXED) + 1) if start >= 0 else -1
    return action[start + len(BOXED) : end] if end >= 0 else None


def _problem(status: int, error: AgentRLError) -> web.Response:
    from aiohttp import web

    said = {"error": {"kind": type(error).__name__, "message": error.message, "hint": error.hint}}
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return web.json_response(said, status=status, headers=headers)
