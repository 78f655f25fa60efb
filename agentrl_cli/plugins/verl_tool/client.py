"""Tools that run in a tool server (`agentrl tools serve`), with the interface of local ones.

Every call carries an idempotency key, so that it can be sent again: the server runs it once, even if the network fails.
Requests to a busy, restarting or unreachable server are retried for `patience` seconds; episodes wait meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import RootModel, ValidationError

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, EnvError, needs_extra
from agentrl_cli.plugins.verl_tool.bodies import (
    CallAnswer,
    M,
    OpenAnswer,
    RewardsAnswer,
    ToolsAnswer,
    first_problem,
)
from agentrl_cli.plugins.verl_tool.settings import ToolServerConfig
from agentrl_cli.policies.remote.http import error_message
from agentrl_cli.tasks import Pack
from agentrl_cli.tools.base import Tool, ToolContext
from agentrl_cli.types import Task, ToolResult, ToolSchema, new_id

if TYPE_CHECKING:
    from aiohttp import ClientSession

AGAIN = {408, 429, 500, 502, 503, 504}
"""Statuses after which a request is retried."""
TRIES = 3
"""Times that a request is sent whose answers are unusable."""


@dataclass(frozen=True)
class RemoteServer:
    """A connection to a tool server: JSON over HTTP or a Unix socket, with retries. `connect` makes one."""

    _session: ClientSession
    _base: str
    patience: float

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to an idempotent request, as JSON. Raises EnvError if none arrives in time."""
        return (await self.ask("POST", path, RootModel[dict[str, Any]], body)).root

    async def schemas(self) -> list[ToolSchema]:
        """Return the schemas of the server's tools."""
        answer = await self.ask("GET", "/v1/tools", ToolsAnswer)
        return [tool.model_dump() for tool in answer.tools]

    async def ask(
        self, method: str, path: str, model: type[M], body: Mapping[str, Any] | None = None
    ) -> M:
        """Return the answer to an idempotent request, with retries, also for one that is not as the model says."""
        from aiohttp import ClientError

        loop = asyncio.get_running_loop()
        until, wait, said, tries = loop.time() + self.patience, 0.05, "", 0
        while True:
            try:
                async with self._session.request(method, self._base + path, json=body) as response:
                    if response.status == 200:
                        return model.model_validate_json(await response.read())
                    said = f"{response.status}: {error_message(await response.text())[:200].rstrip('.')}"
                    if response.status not in AGAIN:
                        said = f"The tool server answered {said}."
                        if response.status == 401:
                            raise ConfigError(said, hint="Set the token in AGENTRL_TOKEN.")
                        raise EnvError(said)
            except (ClientError, TimeoutError, OSError) as error:
                said = str(error) or type(error).__name__
            except ValidationError as error:
                said, tries = first_problem(error), tries + 1
                if tries >= TRIES:
                    sent = f"The tool server at {self._base} sent what cannot be used"
                    raise EnvError(f"{sent}: {said}; tried {tries} times.") from error
            if loop.time() + wait > until:
                raise EnvError(
                    f"The tool server at {self._base} gave no answer for {self.patience:g} s ({said}).",
                    hint="Is `agentrl tools serve` running? tool_server.patience sets the seconds to wait.",
                )
            await asyncio.sleep(wait)
            wait = min(wait * 2, 2.0)


@contextlib.asynccontextmanager
async def connect(
    address: str, *, token: str | None = None, patience: float = 60.0
) -> AsyncIterator[RemoteServer]:
    """Yield a connection to `http://host:port` or `unix:/path`; `token` by default from AGENTRL_TOKEN.

    Raises ConfigError for an invalid address, MissingDependency without aiohttp.
    """
    with needs_extra("A tool server needs aiohttp.", "serve"):
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, UnixConnector
    secret = os.environ.get("AGENTRL_TOKEN", "") if token is None else token
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    path = address.removeprefix("unix:")
    if path != address:
        connector: TCPConnector | UnixConnector = UnixConnector(path, limit=0)
        base = "http://tools"
    elif address.startswith(("http://", "https://")):
        connector, base = TCPConnector(limit=0), address.rstrip("/")
    else:
        raise ConfigError(
            f"Invalid tool server {address!r}.",
            hint="Use http://127.0.0.1:7676 or unix:/path/to/socket",
        )
    timeout = ClientTimeout(total=None, connect=5.0, sock_read=max(patience, 600.0))
    async with ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        yield RemoteServer(session, base, patience)


@contextlib.asynccontextmanager
async def tools_elsewhere(packs: dict[str, Pack], config: Config) -> AsyncIterator[dict[str, Pack]]:
    """Yield the packs with their tools at `tool_server.url`; packs with an environment of their own keep it."""
    settings = config.section(ToolServerConfig)
    if settings.url is None:
        yield packs
        return
    async with connect(settings.url, patience=settings.patience) as server:
        offered = await server.schemas()
        yield {
            name: replace(pack, tools=remote_tools(server, offered, pack.tools))
            if getattr(pack.module, "make_env", None) is None
            else pack
            for name, pack in packs.items()
        }


@dataclass
class _Trajectory:
    """An episode at the server, shared by its tools."""

    id: str = field(default_factory=new_id)
    opened: asyncio.Task[OpenAnswer] | None = None
    calls: int = 0
    users: int = 0
    read: bool = False
    """Whether the tools' opening text was read."""


class RemoteTool(Tool):
    """One tool of a tool server, which limits its time and concurrency; waiting for the server is not counted."""

    own_timeout = True

    def __init__(
        self, server: RemoteServer, schema: ToolSchema, names: Sequence[str], like: Tool
    ) -> None:
        """`names`: all tools of the pack, opened together; `like`: the local tool that this replaces."""
        self.name = str(schema["function"]["name"])
        self.schema = schema
        self._server, self._like = server, like
        self._names = list(names)
        self.pure, self.external, self.examples = like.pure, like.external, like.examples
        self.opens = like.opens

    def offer(self, task: Task) -> list[Tool]:
        """Return what the tool that this replaces offers for a task, at the server."""
        return [
            self if one is self._like else RemoteTool(self._server, one.schema, self._names, one)
            for one in self._like.offer(task)
        ]

    async def create(self, ctx: ToolContext) -> ToolContext:
        if ctx.remote is None:
            ctx.remote = _Trajectory()
        ctx.remote.users += 1
        if self.opens and not ctx.remote.read:
            ctx.remote.read = True
            await self._open_once(ctx)
            ctx.opening += ctx.remote.opened.result().opening
        return ctx

    async def execute(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        ctx: ToolContext = state
        trajectory = await self._open_once(ctx)
        trajectory.calls += 1
        call = {
            "trajectory": trajectory.id,
            "key": f"{trajectory.id}.{trajectory.calls}",
            "name": self.name,
            "arguments": arguments,
        }
        answer = await self._server.ask("POST", "/v1/call", CallAnswer, {"calls": [call]})
        found = answer.result()
        ctx.state.update(found.state)
        return found.result

    async def reward(self, state: Any) -> float | None:
        trajectory: _Trajectory = state.remote
        if trajectory.opened is None:
            return None
        names = {"trajectories": [trajectory.id]}
        answer = await self._server.ask("POST", "/v1/rewards", RewardsAnswer, names)
        return answer.rewards.get(trajectory.id, {}).get(f"tool:{self.name}")

    async def release(self, state: Any) -> None:
        trajectory: _Trajectory = state.remote
        trajectory.users -= 1
        if trajectory.users == 0 and trajectory.opened is not None:
            await self._server.post("/v1/close", {"trajectories": [trajectory.id]})

    async def _open_once(self, ctx: ToolContext) -> _Trajectory:
        """Return the episode's trajectory, opened at the first call: an episode without calls costs no request.

        If tools add text to the task, it is opened earlier.
        """
        trajectory: _Trajectory = ctx.remote
        if trajectory.opened is None:
            task = asdict(ctx.task) if ctx.task is not None else {}
            spec = {
                "trajectory": trajectory.id,
                "task": task,
                "seed": ctx.seed,
                "tools": self._names,
            }
            trajectory.opened = asyncio.create_task(
                self._server.ask("POST", "/v1/open", OpenAnswer, spec)
            )
        await asyncio.shield(trajectory.opened)
        return trajectory


def remote_tools(
    server: RemoteServer, offered: Sequence[ToolSchema], tools: Sequence[Tool]
) -> tuple[Tool, ...]:
    """Return the same tools, at the server. Raises ConfigError if it lacks one or has another schema for it."""
    schemas = {str(schema["function"]["name"]): schema for schema in offered}
    names = [tool.name for tool in tools]
    for tool in tools:
        if tool.name not in schemas:
            raise ConfigError(
                f"The tool server does not offer {tool.name}.",
                hint=f"It offers {', '.join(schemas) or 'nothing'}; start it with the same packs.",
            )
        if schemas[tool.name] != tool.schema:
            raise ConfigError(
                f"The tool server's {tool.name} has another schema than the pack's: another prompt for the model.",
                hint="Restart the server after a change of tools.",
            )
    return tuple(RemoteTool(server, tool.schema, names, tool) for tool in tools)
