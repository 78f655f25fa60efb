"""`agentrl import`, a group whose commands are those of plugins; and the files of others, read into a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentrl_cli.commands.common import warn
from agentrl_cli.errors import DataError
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers

if TYPE_CHECKING:
    from agentrl_cli.store import Store

app = typer.Typer(help="Episodes and models of other projects.", no_args_is_help=True)
MOST = 8
"""Sentences on parts that were left out, of which each is printed."""


def read_file(path: Path, store: Store) -> list[str]:
    """Add the episodes of a file to a store and return their ids; warn of parts left out. Raises DataError."""
    for name in offers("readers"):
        read = resolve("readers", {}, name)(path, store)
        if read is None:
            continue
        found, problems = read
        for text in problems[:MOST]:
            warn(text)
        if len(problems) > MOST:
            warn(f"{len(problems) - MOST} more warnings about {path} are not shown.")
        if not found:
            raise DataError(f"{path} has no episode that can be read.")
        return list(found)
    raise DataError(f"No plugin of this installation reads {path}.", hint="docs/formats.md")
