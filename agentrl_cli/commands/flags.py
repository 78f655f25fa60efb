"""Options that plugins add to a command of the core, and the settings that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import typer
from typer.main import get_command

from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers

_SETTINGS: ContextVar[Mapping[str, Any]] = ContextVar("settings of flags")


def plugin_settings() -> Mapping[str, Any]:
    """Return the settings by dotted key that plugins' options of the running command mean; None: not given."""
    return _SETTINGS.get({})


def add_flags(command: Any, name: str) -> None:
    """Give a command the options that plugins offer for it. A command without any is left as it is."""
    for path in offers("flags"):
        if path.startswith(f"{name} "):
            _add(command, resolve("flags", {}, path))


def _add(command: Any, function: Any) -> None:
    own = typer.Typer(add_completion=False)
    own.command()(function)
    given, run = get_command(own), command.callback
    names = [param.name for param in given.params]

    def callback(**values: Any) -> Any:
        settings = given.callback(**{name: values.pop(name) for name in names})  # type: ignore[misc]
        token = _SETTINGS.set({**plugin_settings(), **settings})
        try:
            return run(**values)
        finally:
            _SETTINGS.reset(token)

    command.params += given.params
    command.callback = callback
