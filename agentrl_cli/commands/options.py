"""Options that several commands share, as dataclasses: a parameter with such a type is filled from the command line.

    def command(store: StoreOptions, limit: LimitOption = None) -> None:
        path = store.find()

`flatten` makes of it a function with one parameter per option, which Typer reads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.main import get_command

from agentrl_cli.commands.common import (
    ConfigOption,
    Context,
    DbOption,
    ModelOption,
    PackOption,
    ProjectOption,
    RunOption,
    SeedOption,
    SetOption,
    open_project,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.errors import UsageError
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers

if TYPE_CHECKING:
    from agentrl_cli.store import Store

FilterOption = Annotated[str, typer.Option("--filter", "-f", help="As in `agentrl ls`.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
MaskOption = Annotated[
    bool, typer.Option("--mask/--no-mask", help="Mask what looks like a secret.")
]
RateOption = Annotated[float | None, typer.Option("--lr", min=0, help="Peak learning rate.")]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", "-T", min=0, help="0 is greedy.")
]
NoToolsOption = Annotated[bool, typer.Option("--no-tools", help="Sample without tools.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """The store that a command reads."""

    project: ProjectOption = None
    db: DbOption = None

    def find(self, *, must_exist: bool = True) -> Path:
        """Return its path. Raises NotFound."""
        return find_db(self.project, self.db, must_exist=must_exist)

    def open(self, *, readonly: bool = True) -> Store:
        """Open it. Raises NotFound, StoreError."""
        from agentrl_cli.store import Store

        return Store.open(self.find(), readonly=readonly)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStoreOptions(StoreOptions):
    """The store that a command reads, and one of its runs."""

    run: RunOption = None

    def run_id(self, store: Store) -> str | None:
        """Return the id of the run; None if none is named. Raises NotFound."""
        return store.runs.get(self.run).id if self.run else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsOptions:
    """Where settings come from."""

    project: ProjectOption = None
    config: ConfigOption = None
    sets: SetOption = None

    def open(self, flags: Mapping[str, Any] | None = None, *, required: bool = True) -> Context:
        """Return the project with its settings. Raises ConfigError."""
        db = getattr(self, "db", None)
        asked = {key: value for key, value in plugin_settings().items() if "." in key}
        given = {**asked, **(flags or {})}
        return open_project(self.project, db, self.config, self.sets, given, required=required)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectOptions(SettingsOptions):
    """Where settings come from, and the store."""

    db: DbOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions(ProjectOptions):
    """Settings, store, packs and seed of a command that samples or trains."""

    pack: PackOption = None
    seed: SeedOption = None

    def flags(self) -> dict[str, Any]:
        """Return the settings that these options are, None where one is not given."""
        return {"seed": self.seed, "task.packs": self.pack or None}

    def open(self, flags: Mapping[str, Any] | None = None, *, required: bool = True) -> Context:
        """Return the project with its settings. Raises ConfigError."""
        return ProjectOptions.open(self, {**self.flags(), **(flags or {})}, required=required)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(WorkOptions):
    """The same, and one model."""

    model: ModelOption = None


def refuse_idle(where: str, given: Mapping[str, object]) -> None:
    """Raise UsageError if any option of `given` was passed: it would do nothing `where` ("without --grep")."""
    if idle := [name for name, value in given.items() if value]:
        raise UsageError(
            f"{' and '.join(idle)} {'do' if idle[1:] else 'does'} nothing {where}.",
            hint=f"Leave {'them' if idle[1:] else 'it'} out.",
        )


def flatten(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with one parameter for each field of its option dataclasses."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    groups = {name: hints[name] for name in signature.parameters if is_dataclass(hints[name])}
    if not groups:
        return function
    flat: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        if name not in groups:
            flat[name] = parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default = parameter.empty if field.default is MISSING else field.default
            flat[field.name] = inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, default=default, annotation=inner[field.name]
            )

    @functools.wraps(function)
    def call(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return function(**given)

    parameters = sorted(flat.values(), key=lambda one: one.default is not one.empty)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return call


_SETTINGS: ContextVar[Mapping[str, Any]] = ContextVar("settings of flags")


def plugin_settings() -> Mapping[str, Any]:
    """Return the settings by dotted key that plugins' options of the running command mean; None: not given."""
    return _SETTINGS.get({})


def add_flags(command: Any, name: str) -> None:
    """Give a command, and those of a group, the options that plugins offer for them."""
    for inner, sub in getattr(command, "commands", {}).items():
        add_flags(sub, f"{name} {inner}")
    for path in offers("flags"):
        if path.rpartition(" ")[0] == name:
            own = typer.Typer(add_completion=False)
            own.command()(resolve("flags", {}, path))
            _add(command, get_command(own))


def _add(command: Any, given: Any) -> None:
    run, names = command.callback, [param.name for param in given.params]

    def callback(**values: Any) -> Any:
        settings = given.callback(**{name: values.pop(name) for name in names})
        token = _SETTINGS.set({**plugin_settings(), **settings})
        try:
            return run(**values)
        finally:
            _SETTINGS.reset(token)

    command.params += given.params
    command.callback = callback
