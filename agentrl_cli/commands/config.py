"""`agentrl config`: prints settings and their sources, validates files, prints the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands.common import (
    JsonOption,
    ProjectOption,
    answer,
    echo,
    echo_json,
    narrate,
    open_project,
)
from agentrl_cli.commands.options import SettingsOptions, refuse_idle
from agentrl_cli.errors import ConfigError, nearest

app = typer.Typer(help="Show settings and where each came from.", no_args_is_help=True)

YamlOption = Annotated[
    bool, typer.Option("--yaml", help="As a YAML file that reproduces this configuration.")
]


@app.command()
def show(
    key: Annotated[str | None, typer.Argument(help="A section or a dotted key.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every setting, not only those that people change first.")
    ] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only settings that do not come from the defaults.")
    ] = False,
    as_yaml: YamlOption = False,
    as_json: JsonOption = False,
    *,
    where: SettingsOptions,
) -> None:
    """Print settings with their values and sources: those that people change first, and those that are set.

    With a section, a key, --all or --json, nothing is left out.

    JSON: {"train.lr": {"value": 0.0001, "source": "file:agentrl.yaml:12"}, …}
    """
    from agentrl_cli.config.show import FIRST, non_defaults, rows, scalar, to_yaml

    context = where.open(required=False)
    listed = rows(context.config, context.sources)
    if key is not None:
        known = [row[0] for row in listed]
        listed = [row for row in listed if row[0] == key or row[0].startswith(f"{key}.")]
        if not listed:
            near = nearest(key, known)
            raise ConfigError(
                f"unknown key {key}", hint=f"Did you mean {' or '.join(near)}?" if near else ""
            )
    if changed:
        listed = [row for row in listed if row[2] != "default"]
    if as_json:
        echo_json({name: {"value": value, "source": source} for name, value, source in listed})
    elif as_yaml:
        settings = non_defaults(context.config, context.sources)
        if key is not None:
            settings = {name: settings[name] for name, _, _ in listed if name in settings}
        echo(to_yaml(settings).rstrip())
    elif listed:
        wide = max(len(name) for name, _, _ in listed)
        shown = [row for row in listed if every or key or row[2] != "default" or row[0] in FIRST]
        for name, value, source in shown:
            place = source.removeprefix("file:").removeprefix(f"{Path.cwd()}/")
            echo(f"{name:{wide}}  {scalar(value):24}  {place}")
        if left := len(listed) - len(shown):
            narrate(f"{left} more: agentrl config show --all, or a section: config show algo")
    else:
        narrate("Everything is at its default.")


@app.command()
def validate(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files; default: the project's agentrl.yaml.")
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check settings; exit 2 and name file and line of every problem.

    JSON: {"valid": true, "problems": []}
    """
    from agentrl_cli.config import load_config

    refuse_idle("with the names of files", {"--project": files and project})
    try:
        if files:
            load_config(files)
        else:
            open_project(project)
    except ConfigError as error:
        if not as_json:
            raise
        echo_json({"valid": False, "problems": error.message.splitlines()})
        raise typer.Exit(2) from error
    answer(as_json, {"valid": True, "problems": []}, "Valid.")


@app.command()
def schema() -> None:
    """Print the JSON Schema of agentrl.yaml, for editors."""
    from agentrl_cli.config.show import schema as json_schema

    echo_json(json_schema())
