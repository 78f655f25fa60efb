"""Writes docs/cli.md from the commands themselves: python docs/make_cli.py. A test fails where it is stale."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl_cli.commands import commands, load_command

TARGET = Path(__file__).with_name("cli.md")

HEAD = """\
# Commands

<!-- Written by docs/make_cli.py from the commands' own help; edit those. -->

stdout is data, stderr is narration. Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 environment, 4 gate not
met (`eval --fail-under`), 130 interrupted. `AGENTRL_DEBUG=1` shows the traceback of an error.
"""


def render() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    panel = ""
    for name, (group, _, _) in commands().items():
        if group != panel:
            panel = group
            lines += ["", f"## {panel}"]
        lines += _command(f"agentrl {name}", load_command(name), "###")
    return "\n".join(lines) + "\n"


def _command(path: str, command: Any, level: str) -> Iterator[str]:
    children = getattr(command, "commands", {})
    yield from (
        "",
        f"{level} {path}",
        "",
        inspect.cleandoc(command.help or "").replace("\b\n", "").replace("\\[", "["),
    )
    if children:
        for name, child in children.items():
            yield from _command(f"{path} {name}", child, f"{level}#")
        return
    words = [
        path,
        *(_metavar(p) for p in command.params if p.param_type_name == "argument"),
        "[OPTIONS]",
    ]
    yield from ("", "```", " ".join(words), "```")
    rows = [
        _row(parameter)
        for parameter in command.params
        if parameter.name != "help" and not parameter.hidden
    ]
    if rows:
        yield from ("", "| | |", "| --- | --- |", *rows)


def _metavar(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper()).strip("[]")
    name = f"{name}..." if parameter.nargs == -1 else name
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        flags = f"`{_metavar(parameter)}`"
    else:
        flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
    text = (parameter.help or "").replace("|", "\\|")
    default = parameter.default
    if default not in (None, False, (), [], "") and not callable(default):
        text += f" Default: `{getattr(default, 'value', default)}`."
    return f"| {flags} | {text} |"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
