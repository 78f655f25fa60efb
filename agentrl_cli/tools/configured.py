"""Tools from `tools.yaml`: classes, the short form, MCP servers, HTTP services, environments.

    tools:
      - class_name: my_tools.Lookup                    # a Tool, or a class of another project
        config: {type: native, rate_limit: 5}
        tool_schema: {type: function, function: {name: …, description: …, parameters: {…}}}
      - config: {type: mcp}                            # servers of a file, and a selection of their tools
        mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}
      - name: add                                      # short: a function, or a built-in tool, with another text
        description: Add two numbers.
        parameters: {a: {type: number}, b: {type: number}}
        function: "task.py:add"
        timeout: 5
      - name: sql                                      # a built-in tool, configured
        config: {database: data/shop.db, writable: true}
      - mcp: {time: {command: python, args: [server.py]}, web: {url: "http://127.0.0.1:8000/mcp"}}
      - openapi: {file: openapi.json, server: "http://127.0.0.1:8000"}      # an HTTP service
      - environment: "task.py:Counter"                 # a class, or {name: class}: the row's `environment` picks

Paths are relative to the file's folder.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, StrictBool

from agentrl_cli.config.yamlfile import load_yaml, read_as
from agentrl_cli.errors import ConfigError
from agentrl_cli.registry import resolve
from agentrl_cli.registry.adapters import adapt, foreign_imports
from agentrl_cli.tools import TOOLS, FunctionTool, Tool, as_tool
from agentrl_cli.types import ToolSchema
from agentrl_cli.types.section import Positive, Seconds


class Limits(BaseModel):
    """Limits of a tool that any entry may set; see Tool."""

    timeout: Seconds | None = None
    concurrency: Positive | None = None
    rate: Seconds | None = None
    pure: StrictBool | None = None
    external: StrictBool | None = None


ADAPTED = ("mcp", "openapi", "environment")
"""Keys whose value a plugin turns into tools; such a word as `type` of `config` names one, too."""
KEYS = {
    *(
        "class_name",
        "config",
        "tool_schema",
        "name",
        "description",
        "parameters",
        "function",
    ),
    *ADAPTED,
    *Limits.__annotations__,
}


def load_tools(
    source: Path | Sequence[Any], folder: Path, own: Mapping[str, Tool] | None = None
) -> list[Tool]:
    """Return the tools of a file, or of entries in its form; `own` maps names to the tools of the pack's task.py.

    Raises ConfigError for invalid entries, NotFound for missing files, functions and classes.
    """
    where: Path = folder / "task.yaml"
    entries: Any = source
    if isinstance(source, Path):
        where, folder = source, source.parent
        entries = load_yaml(source)
        entries = entries.get("tools") if isinstance(entries, dict) else entries
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(f"{where} must hold a list of tools, or `tools:` with one.")
    tools: list[Tool] = []
    for number, entry in enumerate(entries, 1):
        tools += _entry(f"{where}, tool {number}", entry, folder, own or {})
    return tools


def _entry(where: str, entry: Any, folder: Path, own: Mapping[str, Tool]) -> list[Tool]:
    if isinstance(entry, str):
        return [
            own[entry] if entry in own else as_tool(resolve("tools", TOOLS, entry, base=folder))
        ]
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: a tool is a name or a mapping, not {entry!r}.")
    unknown = sorted(set(entry) - KEYS)
    if unknown:
        raise ConfigError(
            f"{where} has unknown keys: {', '.join(unknown)}.", hint=f"Known keys: {_names(KEYS)}."
        )
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: `config` must be a mapping.")
    named = [kind for kind in ADAPTED if entry.get(kind) is not None or config.get("type") == kind]
    if named:
        kind = named[0]
        found = adapt(kind, where, entry.get(kind), folder)
        if found is None:
            raise ConfigError(f"{where}: no plugin of this installation reads `{kind}`.")
    elif entry.get("class_name") is not None:
        found = [_load_class(where, entry, dict(config), folder)]
    else:
        found = [_short(where, entry, dict(config), folder, own)]
    return [_with_limits(where, tool, entry) for tool in found]


def _load_class(where: str, entry: Mapping[str, Any], config: dict[str, Any], folder: Path) -> Tool:
    """Return the tool of `class_name`: another project's tool, or a Tool that takes the config as keywords."""
    name = str(entry["class_name"])
    with foreign_imports(folder) as target:
        kind = resolve("tools", {}, target(name, "tools"), base=folder)
        tool: Tool | None = adapt("tool", kind, config, entry.get("tool_schema"), where)
        if tool is not None:
            return tool
    config.pop("type", None)
    if isinstance(kind, type) and issubclass(kind, Tool):
        return _make_tool(where, kind, config)
    raise ConfigError(f"{where}: {name} is neither a Tool nor a class that a plugin reads as one.")


def _short(
    where: str,
    entry: Mapping[str, Any],
    config: dict[str, Any],
    folder: Path,
    own: Mapping[str, Tool],
) -> Tool:
    """Return the short form: name, description and parameters for a function, a tool of the pack or a built-in tool."""
    name = str(entry.get("name") or "")
    if not name:
        raise ConfigError(f"{where} needs a name.")
    target = entry.get("function")
    if target is None and name in own:
        base = own[name]
    else:
        base = as_tool(resolve("tools", TOOLS, str(target or name), base=folder))
    if config and type(base) is FunctionTool:
        hint = f"Its limits ({_names(set(Limits.__annotations__))}) are keys of the entry itself."
        raise ConfigError(f"{where}: {name} is a function and takes no config.", hint=hint)
    made = _make_tool(where, type(base), config) if config else copy.copy(base)
    made.schema = _schema(where, entry, made.schema, name)
    made.name = name
    return made


def _make_tool(where: str, kind: type[Tool], config: dict[str, Any]) -> Tool:
    try:
        inspect.signature(kind).bind(**config)
        return kind(**config)
    except TypeError as error:
        parameters = _names(set(inspect.signature(kind).parameters))
        raise ConfigError(
            f"{where}: {error}.", hint=f"config takes: {parameters or 'nothing'}."
        ) from error


def _schema(where: str, entry: Mapping[str, Any], schema: ToolSchema, name: str) -> ToolSchema:
    """Return the tool's schema, overridden by the entry's name, description and parameters."""
    function = {**schema["function"], "name": name}
    if entry.get("description") is not None:
        function["description"] = str(entry["description"])
    if entry.get("parameters") is not None:
        parameters = _parameters(where, entry["parameters"], function.get("parameters", {}))
        theirs, ours = (
            set(p.get("properties", {})) for p in (parameters, function.get("parameters", {}))
        )
        if theirs - ours:
            raise ConfigError(
                f"{where}: {name} has no parameter {_names(theirs - ours)}; it has {_names(ours)}."
            )
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _parameters(where: str, value: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON Schema of an object, from short forms like `{a: number}` and `{a: {type: number}}`."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: `parameters` must be a mapping.")
    if value.get("type") == "object" and isinstance(value.get("properties"), Mapping):
        return dict(value)
    for key, item in value.items():
        if not isinstance(item, str | Mapping):
            raise ConfigError(
                f"{where}: parameters.{key} must be a type or a schema, not {item!r}."
            )
    properties = {
        key: {"type": item} if isinstance(item, str) else dict(item) for key, item in value.items()
    }
    required = [key for key in properties if key in own.get("required", ())]
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
    }


def _with_limits(where: str, tool: Tool, entry: Mapping[str, Any]) -> Tool:
    """Sets the entry's limits on the tool."""
    known = Limits.__annotations__
    given = {key: entry[key] for key in known if entry.get(key) is not None}
    limits = read_as(Limits, given, where, known, strict=True)
    tool = copy.copy(tool) if given else tool
    for key in given:
        setattr(tool, key, getattr(limits, key))
    return tool


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names))
