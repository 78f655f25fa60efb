"""Operations of an HTTP service as tools, from its OpenAPI 3 description (JSON or YAML).

    - openapi: openapi.json                                    # its GET operations, at the server that it names
    - openapi: {file: openapi.json, server: "http://127.0.0.1:8000", operations: [getOrder, cancelOrder],
                auth_token_env: SHOP_TOKEN, headers: {X-Tenant: test}, timeout: 10, kilobytes: 64}

Operations other than GET must be named: they cannot be undone. Path, query and header parameters and the fields
of a JSON body are the tool's parameters. An error status is an observation; an unreachable server is an EnvError.
Redirects are not followed, so that the token reaches no other host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2

from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import ConfigError, EnvError, NotFound
from agentrl_cli.plugins.web.parameters import NotOffered, Place, read_place
from agentrl_cli.tools.base import Tool
from agentrl_cli.types import ToolResult

KEYS = {"file", "server", "operations", "auth_token_env", "headers", "timeout", "kilobytes"}
NOT_PARAMETERS = ("accept", "authorization", "content-type")
"""Headers that are not parameters, even where a description lists them (OpenAPI 3.1, Parameter Object)."""
DEEPEST = 12
"""References inside each other that are followed; below, any value is accepted."""
MOST_VALUES = 20_000
"""Values of an operation with its references replaced: those of a schema that names itself from many fields have no
end that one would live to see."""


@dataclass(frozen=True)
class Operation:
    """One operation of a service, as a request is made from it."""

    name: str
    description: str
    method: str
    path: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments."""
    places: dict[str, Place] = field(default_factory=dict)
    """Argument to its place in the request."""
    problem: str = ""
    """Why it cannot be a tool; empty if it can."""


class OpenApiTool(Tool):
    """An operation of an HTTP service."""

    external = True

    def __init__(self, operation: Operation, server: str, given: Mapping[str, Any]) -> None:
        self.operation, self.server, self.given = operation, server.rstrip("/"), given
        self.name = operation.name
        self.timeout = given.get("timeout")
        self.kilobytes = int(given.get("kilobytes") or 64)
        function = {
            "name": self.name,
            "description": operation.description,
            "parameters": operation.parameters,
        }
        self.schema = {"type": "function", "function": function}

    def own_limits(self) -> dict[str, Any]:
        return {
            "request": f"{self.operation.method.upper()} {self.server}{self.operation.path}",
            "KiB": self.kilobytes,
        }

    async def execute(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        path = self.operation.path
        headers = {str(key): str(value) for key, value in (self.given.get("headers") or {}).items()}
        if variable := str(self.given.get("auth_token_env") or ""):
            if not os.environ.get(variable):  # the service's refusals would count as the model's
                text = f"auth_token_env of {self.server} names {variable}, which is not set"
                raise EnvError(f"{text} in the environment.", hint="Export it.")
            headers["Authorization"] = f"Bearer {os.environ[variable]}"
        query: list[tuple[str, str]] = []
        body: Any = {}
        for name, value in arguments.items():
            place = self.operation.places.get(name, Place("query", name))
            if value is None and place.where in {"query", "header"}:
                continue  # an address cannot say null
            if place.where == "path":
                text = "".join(text for _, text in place.write(value))
                if text in {"", ".", ".."}:
                    return ToolResult(
                        f"Bad tool call: {name} cannot be {text!r}.", error="bad_arguments"
                    )
                path = path.replace("{" + place.name + "}", quote(text, safe=","))
            elif place.where == "query":
                query += place.write(value)
            elif place.where == "header":
                headers |= {key: " ".join(text.splitlines()) for key, text in place.write(value)}
            else:
                body = value if place.where == "whole" else {**body, name: value}
        has_body = {"body", "whole"} & {place.where for place in self.operation.places.values()}
        sent = body if has_body else None
        try:
            async with httpx2.AsyncClient(timeout=float(self.timeout or 30.0)) as client:
                url, method = self.server + path, self.operation.method.upper()
                async with client.stream(
                    method, url, params=tuple(query), headers=headers, json=sent
                ) as answer:
                    text = await self._read(answer)
                    status = answer.status_code
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise EnvError(f"{self.server} cannot be reached: {error}") from error
        except httpx2.TimeoutException:
            return ToolResult(f"Error: {self.name} took too long.", error="timeout")
        except httpx2.HTTPError as error:
            return ToolResult(f"Error: {type(error).__name__}: {error}", error="exception")
        return (
            ToolResult(text)
            if status < 300
            else ToolResult(f"Error: status {status}: {text}", error="exception")
        )

    async def _read(self, answer: httpx2.Response) -> str:
        """Return the body as text, cut at the limit."""
        most = self.kilobytes * 1024
        read = b""
        async for part in answer.aiter_bytes():
            read += part
            if len(read) > most:
                return read[:most].decode("utf-8", "replace") + "\n[… cut …]"
        return read.decode("utf-8", "replace")


def openapi_tools(where: str, value: Any, folder: Path) -> list[Tool]:
    """Return the operations of a description as tools. Raises ConfigError, NotFound."""
    given = {"file": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not given.get("file") or set(given) - KEYS:
        known = ", ".join(sorted(KEYS))
        raise ConfigError(
            f"{where}: `openapi` is a file, or a mapping with `file`.", hint=f"Known keys: {known}."
        )
    for key in ("timeout", "kilobytes"):
        number = 1 if given.get(key) is None else given[key]
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
            raise ConfigError(f"{where}: {key} of `openapi` must be a number above 0.")
    path = folder / str(given["file"])
    document = load_yaml(path)
    found = {operation.name: operation for operation in operations(document, str(path))}
    wanted = given.get("operations")
    for name in wanted or ():
        if name not in found:
            raise NotFound.of(f"operation in {path.name}", str(name), found)
    chosen = [
        o for o in found.values() if (o.method == "get" if wanted is None else o.name in wanted)
    ]
    if not chosen:
        raise ConfigError(
            f"{where}: {path.name} has no GET operation.", hint="List others under `operations`."
        )
    if problem := next((f"{path.name}: {o.name} {o.problem}" for o in chosen if o.problem), ""):
        raise ConfigError(
            f"{where}: {problem}.", hint="List the `operations` that you need without it."
        )
    server = str(given.get("server") or server_of(document))
    if urlsplit(server).scheme not in {"http", "https"} or not urlsplit(server).netloc:
        raise ConfigError(
            f"{where}: {path.name} names no server with http:// or https://.",
            hint="Add `server: URL`.",
        )
    return [OpenApiTool(operation, server, given) for operation in chosen]


def draft_service(path: Path) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return a pack's entry for the GET operations of a description, their names, and notes for its author."""
    document = load_yaml(path)
    found = list(operations(document, str(path)))
    notes = [f"{one.name} is not offered: it {one.problem}." for one in found if one.problem]
    safe = [one.name for one in found if one.method == "get" and not one.problem]
    if not safe:
        raise ConfigError(
            f"{path} has no GET operation.", hint="List others under `operations` of task.yaml."
        )
    server = server_of(document)
    if not urlsplit(server).netloc:
        server = "http://127.0.0.1:8000"
        notes.append(f"{path.name} names no server: set `server` in task.yaml (now {server}).")
    if others := [one.name for one in found if one.method != "get"]:
        notes.append(f"Operations that change something are not offered: {', '.join(others)}.")
    return {"openapi": {"file": path.name, "server": server, "operations": safe}}, safe, notes


def server_of(document: Any) -> str:
    """Return the first server that a description names; empty without one."""
    servers = document.get("servers") if isinstance(document, Mapping) else None
    first = servers[0] if isinstance(servers, list) and servers else {}
    return str(first.get("url") or "") if isinstance(first, Mapping) else ""


def operations(document: Any, where: str) -> Iterator[Operation]:
    """Yield every operation, in the order of the file. Raises ConfigError for a file that is not OpenAPI 3."""
    if not isinstance(document, Mapping) or not str(document.get("openapi", "")).startswith("3"):
        raise ConfigError(
            f"{where} is not an OpenAPI 3 description.", hint="It has `openapi: 3.…` and `paths`."
        )
    paths = document.get("paths") or {}
    if not isinstance(paths, Mapping):
        raise ConfigError(f"{where}: `paths` must be a mapping.")
    taken: set[str] = set()
    for path, item in paths.items():
        if isinstance(item, Mapping) and isinstance(item.get("$ref"), str):
            item = _target(item["$ref"], document)
        if not isinstance(item, Mapping):
            continue
        for method in ("get", "put", "post", "delete", "patch"):
            operation = item.get(method)
            if isinstance(operation, Mapping):
                name = str(operation.get("operationId") or f"{method}{path}")
                name = re.sub(r"\W+", "_", name).strip("_")
                ends = ("", *(f"_{n}" for n in range(2, len(taken) + 3)))
                names = (f"{name[: 64 - len(end)]}{end}" for end in ends)
                taken.add(name := next(one for one in names if one not in taken))
                shared = item.get("parameters") or []
                yield _operation(name, str(path), method, operation, shared, document)


def _operation(
    name: str, path: str, method: str, given: Mapping[str, Any], shared: Any, document: Any
) -> Operation:
    text = str(given.get("description") or given.get("summary") or f"{method.upper()} {path}")
    said = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    try:
        parameters, places = _parameters(
            [*shared, *(given.get("parameters") or [])], given, document
        )
    except NotOffered as error:
        return Operation(name, said, method, path, {}, problem=str(error))
    except (LookupError, TypeError, AttributeError, ValueError):
        problem = "has parameters or a body that are not as OpenAPI 3 writes them"
        return Operation(name, said, method, path, {}, problem=problem)
    return Operation(name, said, method, path, parameters, places)


def _parameters(
    entries: Sequence[Any], given: Mapping[str, Any], document: Any
) -> tuple[dict[str, Any], dict[str, Place]]:
    """Return the JSON Schema of an operation's arguments, and where each goes; later `entries` override earlier ones.

    Raises NotOffered if it is too large, or has a body or a style that cannot be written.
    """
    follow = References(document)
    properties: dict[str, Any] = {}
    required: list[str] = []
    places: dict[str, Place] = {}
    # Cookies are left out, as a tool call has none to send.
    listed = [one for one in map(follow, entries) if one["in"] != "cookie" or one.get("required")]
    for parameter in {(one["in"], one["name"]): one for one in listed}.values():
        place = read_place(parameter)
        if place.where == "header" and place.name.casefold() in NOT_PARAMETERS:
            continue
        key = _free_name(place.name, place.where, properties)
        kinds = [parameter, *(parameter.get("content") or {}).values()]
        schema = next((one["schema"] for one in kinds if one.get("schema")), {"type": "string"})
        note = parameter.get("description")
        properties[key] = {**schema, **({"description": str(note)} if note else {})}
        places[key] = place
        if parameter.get("required") or place.where == "path":
            required.append(key)
    request = follow(given.get("requestBody") or {})
    content = request.get("content") or {}
    kinds = [
        kind for kind in content if kind.partition(";")[0].strip() in ("application/json", "*/*")
    ]
    if content and not kinds:
        raise NotOffered("has a body that is not application/json")
    body = (content[kinds[0]].get("schema") or {}) if kinds else {}
    fields = body.get("properties") or {}
    combined = ("allOf", "anyOf", "oneOf")  # parts with fields, or with parts of their own
    parts = [part for word in combined for part in body.get(word) or () if part is not True]
    hidden = any({"properties", *combined} & set(part) for part in parts)
    if body and (not fields or hidden or set(fields) & set(properties)):
        key = _free_name("body", "request", properties)
        properties[key], places[key] = body, Place("whole", key)
        required += [key] * (request.get("required") is True)
    else:
        properties |= fields
        places |= {name: Place("body", name) for name in fields}
        required += [name for name in body.get("required") or () if name in fields]
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
    }, places


def _free_name(name: str, where: str, taken: Collection[str]) -> str:
    """Return the name of an argument: a query may have the `id` that the path has, too."""
    while name in taken:
        name += f"_in_{where}"
    return name


class References:
    """Replaces the `$ref`s of values of a document; one that leads too deep, or nowhere, is any value."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._left = MOST_VALUES

    def __call__(self, value: Any, depth: int = 0) -> Any:
        """Return the value without references. Raises NotOffered after `MOST_VALUES` values."""
        self._left -= 1
        if self._left < 0:
            raise NotOffered(f"has more than {MOST_VALUES} values once its $refs are followed")
        if depth > DEEPEST:
            return {}
        if isinstance(value, list):
            return [self(item, depth + 1) for item in value]
        if not isinstance(value, Mapping):
            return value
        reference = value.get("$ref")
        if isinstance(reference, str):
            return self(_target(reference, self._document), depth + 1)
        return {key: self(item, depth + 1) for key, item in value.items()}


def _target(reference: str, document: Any) -> Mapping[str, Any]:
    """Return the value of a reference in its document; an empty mapping if there is none."""
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
