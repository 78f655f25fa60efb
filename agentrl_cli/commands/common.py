"""Option types and helpers that the commands share. stdout is data, stderr is narration.

Options (Annotated types for Typer; write `db: DbOption = None`):
    ProjectOption  --project/-p  Path | None      DbOption    --db          Path | None
    ConfigOption   --config/-c   list[Path] | None SetOption   --set         list[str] | None
    JsonOption     --json        bool             RunOption   --run         str | None
    PackOption     --pack        list[str] | None ModelOption --model/-m    str | None
    SeedOption     --seed        int | None       YesOption   --yes/-y      bool
    LimitOption    --limit/-n    int | None       AgentOption --agent       str | None

Helpers:
    open_project(project=None, db=None, config=None, sets=None, flags=None, required=True) -> Context
        the whole configuration; `flags` maps dotted keys to values (None: not given), e.g. {"model.name": model}
    Context(config: Config, sources: Sources, project: Path, db: Path)
    packs_of(context, packs) -> dict[str, Pack]     the named packs, or the project's
    known_tools(context, packs) -> dict[str, (str, Tool)]        by name, with where each is from
    data_stdout() context manager                   other code's prints go to stderr; `echo*` still reach stdout
    echo(text), echo_json(value), echo_jsonl(rows)  to stdout
    answer(as_json, value, text)                    the value to stdout, or the text to stderr
    narrate(text), warn(text)                       to stderr, without markup; `warn` is yellow on a terminal
    warn_unsafe(sandbox)                            warns if the opened sandbox isolates nothing
    warn_bare(settings)                             the same, before a sandbox is opened
    stop_event() -> asyncio.Event                   set by Ctrl-C and SIGTERM, in the running event loop
    is_terminal() -> bool                           both stdin and stdout are terminals, and not dumb
    confirm(question, yes=False) -> bool            asks on a terminal; elsewhere the answer is `yes`
    console() -> rich.console.Console               colours only on a terminal, NO_COLOR respected

Errors: raise an AgentRLError; `main` prints message and hint and exits with its code. Nothing heavy is imported at
module level here: no pydantic models, no rich, no store.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.boundary import ESCAPES
from agentrl_cli.commands.place import keep_place, locate
from agentrl_cli.errors import ConfigError
from agentrl_cli.paths import PROJECT_FILE, default_db, find_project
from agentrl_cli.tui.common.plain_text import STEERS, UNPAINTED, harmless

if TYPE_CHECKING:
    import asyncio

    from rich.console import Console

    from agentrl_cli.config import Config, SandboxConfig, Sources
    from agentrl_cli.sandbox import Sandbox
    from agentrl_cli.tasks import Pack
    from agentrl_cli.tools import Tool

ProjectOption = Annotated[
    Path | None,
    typer.Option(
        "--project",
        "-p",
        envvar="AGENTRL_PROJECT",
        help="Project folder; default: found upwards.",
        callback=keep_place,
    ),
]
DbOption = Annotated[
    Path | None,
    typer.Option(
        "--db",
        envvar="AGENTRL_DB",
        help="The store; default: runs/agentrl.db of the project.",
        callback=keep_place,
    ),
]
ConfigOption = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", help="YAML over the project's agentrl.yaml; repeat for more."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting, e.g. train.lr=3e-5; repeatable.",
        autocompletion=completion.settings,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
RunOption = Annotated[
    str | None,
    typer.Option(
        "--run", "-r", help="A run by name, id or unique prefix.", autocompletion=completion.runs
    ),
]
PackOption = Annotated[
    list[str] | None, typer.Option("--pack", help="A pack by name or folder; repeatable.")
]
AgentOption = Annotated[
    str | None,
    typer.Option(
        "--agent", metavar="FILE.py:FUNCTION", help="The program that makes the episodes."
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help='"tiny", a Hugging Face id, a folder, or RUN@STEP.',
        autocompletion=completion.models,
    ),
]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="The one seed.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Answer yes to every question.")]
LimitOption = Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most this many.")]


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """An opened project: its settings, where each came from, its folder and its store's path."""

    config: Config
    sources: Sources
    project: Path
    """The project folder, or the working folder outside a project."""
    db: Path


def open_project(
    project: Path | None = None,
    db: Path | None = None,
    config: Sequence[Path] | None = None,
    sets: Sequence[str] | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    required: bool = True,
) -> Context:
    """Find the project and load its configuration: agentrl.yaml, then `config` files, environment, `sets`, `flags`.

    Raises ConfigError without a project, `config` and a `task.packs` flag, unless `required` is False.
    """
    from agentrl_cli.config import load_config

    folder = find_project(override=project)
    says_packs = bool((flags or {}).get("task.packs")) or any(
        text.startswith("task.packs=") for text in sets or ()
    )
    if folder is None and required and not config and not says_packs:
        raise ConfigError(
            f"No configuration: no {PROJECT_FILE} here or in a folder above.",
            hint="`agentrl init code-task` makes a project; --project names an existing one.",
        )
    files = ([folder / PROJECT_FILE] if folder else []) + list(config or [])
    base = folder or Path.cwd()
    settings, sources = load_config(files, sets or (), os.environ, flags, base=base)
    named = db or (base / Path(settings.store.path).expanduser() if settings.store.path else None)
    return Context(settings, sources, base, (named or default_db(base)).expanduser().absolute())


_data: TextIO | None = None


@contextmanager
def data_stdout() -> Iterator[None]:
    """Keep stdout clean: inside the block, other code's prints (file descriptor 1 included) go to stderr.

    `echo`, `echo_json` and `echo_jsonl` still reach the real stdout.
    """
    global _data
    sys.stdout.flush()
    outer_data, outer_stdout = _data, sys.stdout
    saved = os.dup(1)
    _data = os.fdopen(os.dup(saved), "w", encoding="utf-8", errors=ESCAPES)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = outer_stdout
        try:
            _data.close()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            _data = outer_data


def echo(text: str = "", *, painted: bool = False) -> None:
    """Print one line of data to stdout; on a terminal, text of a model or a tool cannot control it.

    `painted`: the line has AgentRL's own colours, and foreign text in it is `harmless` already.
    """
    out = _data or sys.stdout
    print(
        (UNPAINTED if painted else STEERS).sub("", text) if out.isatty() else text,
        file=out,
        flush=True,
    )


def echo_json(value: Any) -> None:
    """Print a value as indented JSON. Accepts dataclasses, pydantic models, paths, enums and numpy values."""
    echo(_dumps(value, indent=2))


def echo_jsonl(rows: Iterable[Any]) -> None:
    """Print one JSON value per line, each as it comes."""
    for row in rows:
        echo(_dumps(row))


def answer(as_json: bool, value: Any, text: str) -> None:
    """Print a result: as JSON on stdout, or as a sentence on stderr."""
    if as_json:
        echo_json(value)
    else:
        narrate(text)


def narrate(text: str = "") -> None:
    """Print one line for people to stderr; on a terminal as harmless as `echo`. Its commands name the place."""
    text = locate(text)
    print(harmless(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def announce_loading(name: str = "the model") -> None:
    """Show a message while torch and a model load."""
    narrate(f"Loading torch and {name} …")


def warn(text: str) -> None:
    """Print a warning to stderr; yellow on a terminal."""
    text = locate(text)
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        print(f"\x1b[33m{harmless(text)}\x1b[0m", file=sys.stderr, flush=True)
    else:
        narrate(text)


def warn_unsafe(sandbox: Sandbox | None) -> None:
    """Warns if the opened sandbox isolates nothing."""
    if sandbox is not None and sandbox.warning:
        warn(f"WARNING: {sandbox.warning}")


def warn_bare(settings: SandboxConfig) -> None:
    """Warns before a sandbox is opened if both settings ask for no isolation (one alone is refused)."""
    if settings.backend == settings.min_level == "bare":
        from agentrl_cli.sandbox.sandbox import bare_warning

        warn(f"WARNING: {bare_warning()}")


def stop_event() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set from now on, in the running event loop."""
    import asyncio
    import signal

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def is_terminal() -> bool:
    """True if stdin and stdout are a terminal that can draw a screen."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def confirm(question: str, *, yes: bool = False) -> bool:
    """Ask on a terminal (on stderr); without a terminal the answer is `yes`."""
    if yes or not sys.stdin.isatty():
        return yes
    return typer.confirm(question, err=True)


def console() -> Console:
    """Return a Rich console on stdout. Rich itself checks NO_COLOR and for a terminal."""
    from rich.console import Console

    return Console(file=_data or sys.stdout, highlight=False)


def _dumps(value: Any, indent: int | None = None) -> str:
    """Return JSON; NaN and infinity, which are not JSON, are null."""
    from pydantic_core import to_jsonable_python

    plain = to_jsonable_python(value, inf_nan_mode="null", fallback=lambda array: array.tolist())
    return json.dumps(plain, indent=indent, ensure_ascii=False)


def known_tools(context: Context, packs: list[str] | None) -> dict[str, tuple[str, Tool]]:
    """Name to origin and tool: those of the project's packs, or of `packs`, then the built-in ones."""
    from agentrl_cli.registry.plugins import offers
    from agentrl_cli.tools import TOOLS, as_tool

    found: dict[str, tuple[str, Tool]] = {}
    for pack in packs_of(context, packs).values():
        found |= {tool.name: (pack.name, tool) for tool in pack.tools}
    for name in (*TOOLS, *offers("tools")):
        found.setdefault(name, ("built-in", as_tool(name)))
    return found


def packs_of(context: Context, packs: list[str] | None) -> dict[str, Pack]:
    """`packs`, or the project's, inside a project."""
    from agentrl_cli.tasks import load_packs

    names = packs or (
        context.config.task.packs if (context.project / "agentrl.yaml").is_file() else []
    )
    return load_packs(names, base=context.project)
