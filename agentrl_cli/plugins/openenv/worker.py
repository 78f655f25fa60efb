"""Plays an OpenEnv environment over its WebSocket: a session is an episode.

An environment with tools of its own (MCP) offers them; of another one the fields of its action are the tool `act`.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

LARGEST = 16 * 2**20
"""Bytes of a message."""
MOST_TOOLS = 2000
"""Tools of an environment."""
PATIENCE = 300.0
"""Seconds that an answer may take."""
NAMING = 20.0
"""Seconds that a server has to answer with its name, which is only for finding curves."""
CLOSING = 10.0
"""Seconds that a server has to end a session."""
BOOKKEEPING = ("done", "reward", "metadata")


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: no other address was asked for."""

    def redirect_request(self, *given: Any) -> None:
        """Return nothing, so that the redirect is the error."""


_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)


class OpenEnv:
    """An environment by its address."""

    def __init__(self, config: dict[str, Any]) -> None:
        os.environ["WEBSOCKETS_MAX_REDIRECTS"] = "1"  # attempts, so that it follows none
        from websockets.exceptions import ConnectionClosed
        from websockets.sync.client import connect

        self.connect, self.closed = connect, ConnectionClosed
        self.name, self.score = str(config["package"]).rstrip("/"), config["score"]
        if self.score not in ("", "last"):
            raise LookupError("score", self.score, ["last"])
        options = dict(config["options"])
        self.goal, self.size = str(options.pop("goal", "")), _number(options, "size", 64)
        self.patience = _number(options, "patience", PATIENCE)
        self.options = options
        token = os.environ.get("OPENENV_TOKEN")
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        said: IO[str] = io.StringIO()
        self.url, self.remedy = self.name, "start it with a larger max_concurrent_envs"
        if not self.name.startswith(("http://", "https://")):
            if ":" not in self.name:
                raise ValueError(
                    f"{self.name} is neither an address, docker:IMAGE nor MODULE:CLASS"
                )
            self.url, said = _serve_class(self.name, config["folder"])
            self.remedy = (
                "give it SUPPORTS_CONCURRENT_SESSIONS = True if its sessions share nothing"
            )
        try:
            self.action = self._fetch("/schema", self.patience)["action"]
            self.act = _act(self.action)
        except (*WRONG, OSError, http.client.HTTPException) as error:
            why = said.read() or error
            if getattr(error, "code", 0) == 401:
                why = f"{why}; export OPENENV_TOKEN=… with its token"
            raise ValueError(f"{self.name} does not answer as an OpenEnv server: {why}") from error

    @property
    def title(self) -> str:
        """The name in the server's metadata, by default that of its class; empty if it has none that can be read."""
        with contextlib.suppress(*WRONG, OSError, http.client.HTTPException):
            name = self._fetch("/metadata", min(self.patience, NAMING))["name"]
            return name if isinstance(name, str) else ""
        return ""

    def open(self, sample: int) -> World:
        """Return an environment in a session of its own, reset with the seed."""
        return World(self, sample)

    def _fetch(self, path: str, patience: float) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", headers=self.headers)
        until, data = time.monotonic() + patience, b""
        with _HTTP.open(request, timeout=patience) as answer:
            while part := answer.read1(LARGEST):
                data += part
                if len(data) > LARGEST or time.monotonic() > until:
                    raise ValueError(f"{path} is longer than {LARGEST} bytes or {patience:g} s")
        return json.loads(data)


def _number(options: dict[str, Any], name: str, default: Any) -> Any:
    """Take a number of the default's type out of the options. Raises ValueError."""
    given = options.pop(name, default)
    try:
        return type(default)(given)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={given} is not a number") from None


def _serve_class(name: str, folder: str) -> tuple[str, IO[str]]:
    """Return the address of a server of that class, and a file with the reason if it could not be started.

    It ends with this process: both are supervised. The socket listens before it starts, so that requests wait for it.
    """
    read, write = os.pipe()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        fds = listening.fileno(), write
        host = str(Path(__file__).with_name("host.py"))
        subprocess.Popen([sys.executable, host, name, folder, *map(str, fds)], pass_fds=fds)
        os.close(write)
        return f"http://127.0.0.1:{listening.getsockname()[1]}", open(read, encoding="utf-8")


WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)
"""Raised by what is not of the form that the protocol has."""


class World:
    """One episode. `reward` is the sum of the environment's; with `score: last` the last one."""

    def __init__(self, env: OpenEnv, seed: int) -> None:
        self._closed = env.closed
        self._env, self._total, self._last = env, 0.0, 0.0
        self._graded = False
        self._socket = env.connect(
            f"ws{env.url.removeprefix('http')}/ws",
            max_size=LARGEST,
            open_timeout=env.patience,
            additional_headers=env.headers,
            proxy=None,
        )
        try:
            seen, _ = self._ask("reset", {"seed": seed, **env.options})
            self.tools = self._list_tools()
        except BaseException:
            self.close()
            raise
        self._own = bool(self.tools)
        self.tools = self.tools or [env.act]
        about = "" if self._own else env.action.get("description", "")
        goal = env.goal or f"Use the tools until it is done. {about}"
        self.prompt = [{"role": "system", "content": goal.strip()}]
        self.prompt.append({"role": "user", "content": seen or "Begin."})

    def say(self, text: str) -> tuple[str, bool]:
        """Answer a text: only tools act."""
        names = ", ".join(one["function"]["name"] for one in self.tools)
        return f"Nothing was done. Call a tool: {names}.", False

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Take a step. One that the environment refuses is answered, and changes nothing."""
        action = dict(arguments)
        if self._own:
            action = {"type": "call_tool", "tool_name": name, "arguments": action}
        return self._ask("step", action)

    def reward(self) -> float:
        """Return the reward so far."""
        return self._last if self._env.score == "last" else self._total

    def close(self) -> None:
        """End the session, and wait until the server has: it may take one at a time."""
        with contextlib.suppress(self._closed, TimeoutError):
            self._socket.send(json.dumps({"type": "close"}))
            self._socket.recv(CLOSING)
        self._socket.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the text of an observation, and whether it is the last."""
        answer = self._send(kind, data)
        if answer.get("type") == "error":
            said = answer["data"]
            if said.get("code") in ("VALIDATION_ERROR", "EXECUTION_ERROR") and kind == "step":
                wrong = _short(said.get("errors") or "")
                with contextlib.suppress(*WRONG):
                    wrong = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in said["errors"])
                return f"Error: {_short(wrong or said.get('message'))}", False
            raise ValueError(_problem(said, self._env))
        try:
            found, over = answer["data"], answer["data"].get("done") or False
            if (given := found.get("reward")) is not None:
                self._last, self._graded = float(given), kind == "step"
                self._total += self._last
            if not math.isfinite(self._total):
                raise ValueError("a reward that is not finite")
            if not isinstance(over, bool):
                raise TypeError("`done` is neither true nor false")
            text = text_of(found.get("observation"))
        except WRONG as error:
            raise ValueError(
                f"{self._env.name} answered {kind} with {_short(answer)}: {error}"
            ) from error
        if over and not self._graded:  # never a 0: nothing was graded
            raise ValueError(f"{self._env.name} ended the episode without a reward. {text[:300]}")
        return text, over

    def _send(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        url, patience = self._env.name, self._env.patience
        with contextlib.suppress(self._closed):  # why it was closed is there to be read
            self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            answer = json.loads(self._socket.recv(patience))
        except (self._closed, TimeoutError, *WRONG) as error:
            raise ValueError(f"{url} did not answer {kind}: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise ValueError(f"{url} answered {kind} with {_short(answer)[:60]}")
        return answer

    def _list_tools(self) -> list[dict[str, Any]]:
        """Return the environment's own tools; none if it has none."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = self._send("mcp", request)["data"]
        try:
            found = (answer.get("result") or {}).get("tools", ())
            if len(found) > MOST_TOOLS:
                raise ValueError(f"there are more than {MOST_TOOLS}")
            return [
                _tool(
                    one["name"],
                    one.get("description"),
                    one.get("inputSchema", one.get("input_schema")),
                )
                for one in found
            ]
        except WRONG as error:
            raise ValueError(
                f"{self._env.name} lists tools that cannot be read: {error}"
            ) from error


def _tool(name: Any, description: Any, schema: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        raise TypeError(f"the name {name!r:.40} is not a text")
    parameters = schema if isinstance(schema, dict) else {"type": "object", "properties": {}}
    function = {"name": name, "description": str(description or name), "parameters": parameters}
    return {"type": "function", "function": function}


def _act(action: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an action as a tool; many templates show them alone, so a named type stands where it is."""
    fields = {key: one for key, one in action.get("properties", {}).items() if key != "metadata"}
    needed = [key for key in action.get("required", ()) if key in fields]
    fields = _inline(fields, action.get("$defs", {}))
    schema = {"type": "object", "properties": fields, "required": needed}
    return _tool("act", "Take an action.", schema)


def _inline(schema: Any, types: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Return a schema with its types in place of their names; one that holds itself is any value there."""
    if isinstance(schema, list):
        return [_inline(one, types, within) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _inline(one, types, within) for key, one in schema.items() if key != "$ref"}
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name and name not in within:
        found = {**_inline(types[name], types, (*within, name)), **found}
    return found


def text_of(seen: Any) -> str:
    """Return an observation as text: a tool's answer as it is, else a line for each field."""
    if not isinstance(seen, Mapping):
        shown = "" if seen is None else seen
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
    if seen.get("error"):
        return f"Error: {_short(seen['error'])}"
    result = seen.get("result")
    if isinstance(result, Mapping):
        parts = result.get("content") or ()
        texts = [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
        return "\n".join(texts) or text_of(result.get("data", dict(result)))
    if result is not None and "tool_name" in seen:
        return text_of(result)
    fields = {key: one for key, one in seen.items() if key not in BOOKKEEPING and one is not None}
    return "\n".join(f"{key}: {text_of(one)}" for key, one in fields.items())


def _problem(said: Mapping[str, Any], env: OpenEnv) -> str:
    """Return why a session did not begin."""
    if said.get("code") != "CAPACITY_REACHED":
        return f"{env.name}: {_short(said.get('message'))}"
    most = said.get("max_sessions", 1)
    return (
        f"{env.name} takes {most} session{'s' * (most != 1)} at once: {env.remedy}, or set"
        f" rollout.concurrency to {most}"
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:500]


WORKER, FORKED = OpenEnv, True
