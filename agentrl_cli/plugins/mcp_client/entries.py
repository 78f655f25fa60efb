"""Where MCP servers are named: an entry `mcp` of a pack's tools, and `agentrl init --from mcp:COMMAND`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import ConfigError, UsageError
from agentrl_cli.plugins.mcp_client.client import mcp_tools
from agentrl_cli.tools import Tool

if TYPE_CHECKING:
    from agentrl_cli.commands.init.draft import Draft


def configured_tools(where: str, entry: Mapping[str, Any] | None, folder: Path) -> list[Tool]:
    """Return the tools of MCP servers by name, or from a server file with a selection of their tools."""
    given = dict(entry or {})
    selected = given.pop("tool_selected_list", None)
    path = given.pop("mcp_servers_config_path", None)
    if path is not None:
        file = folder / str(path)
        try:
            given |= json.loads(file.read_text(encoding="utf-8")).get("mcpServers") or {}
        except FileNotFoundError:
            raise ConfigError(f"{where}: {file} does not exist.") from None
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{file} is not JSON with `mcpServers`: {error}") from error
    if not given:
        raise ConfigError(f"{where}: no MCP server is named.")
    tools: list[Tool] = []
    for name, server in given.items():
        tools += mcp_tools(where, str(name), server, folder)
    if selected is not None:
        known = {tool.name for tool in tools}
        missing = sorted(set(selected) - known)
        if missing:
            raise ConfigError(
                f"{where}: the servers have no {', '.join(missing)}.",
                hint=f"They have {', '.join(sorted(known))}.",
            )
    return [tool for tool in tools if selected is None or tool.name in selected]


def add(draft: Draft, target: str) -> None:
    """Add the tools of a server, named by its address or command, to a new pack.

    Files among its arguments become absolute paths.
    """
    server: dict[str, Any] = {"url": target}
    if not target.startswith(("http://", "https://")):
        words = shlex.split(target)
        if not words:
            raise UsageError(
                "No MCP server is named.",
                hint='--from "mcp:python server.py", or mcp:http://host/mcp',
            )
        placed = [str(Path(word).resolve()) if Path(word).is_file() else word for word in words[1:]]
        server = {"command": words[0], "args": placed}
    tools = mcp_tools("--from", "server", server, Path.cwd())
    draft.tools.append({"mcp": {"server": server}})
    draft.names += [tool.name for tool in tools]
