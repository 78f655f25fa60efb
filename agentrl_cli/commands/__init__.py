"""The command `agentrl`: a table of commands that are imported only when they run, and the one error boundary.

To add a command: one file here, named as it is, with a Typer-annotated function `command` (or a Typer object `app` for
one with subcommands), and one line in COMMANDS. Commands parse, call and print; functions below them do the rest.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from agentrl_cli._version import __version__
from agentrl_cli.commands.boundary import ESCAPES, report, silence_stdout
from agentrl_cli.commands.place import begin_command
from agentrl_cli.commands.renamed import translate
from agentrl_cli.errors import AgentRLError, UsageError, nearest
from agentrl_cli.registry import resolve, trust
from agentrl_cli.registry.plugins import offers

COMMANDS: dict[str, dict[str, str]] = {
    "Start": {
        "demo": "Learn a tool in minutes: init, train and eval in one",
        "init": "Copy a pack into a project folder that you edit",
        "check": "Validate a pack: rows, schema, rewards",
        "doctor": "Check this machine, a store, a chat template",
        "config": "Show settings and where each came from",
    },
    "Run": {
        "rollout": "Sample episodes into the store",
        "train": "Train with GRPO on the local GPU or CPU",
        "eval": "pass@k with intervals, base against checkpoint",
        "chat": "Talk to a model with its tools, or act as the model",
        "sft": "Warm-start a model on the packs' demonstrations",
        "serve": "The model for any OpenAI or Anthropic client",
        "merge": "Write a checkpoint as a plain Hugging Face folder",
    },
    "Look": {
        "watch": "Live dashboard of a training",
        "why": "Why a training does not learn: the first fault, and a command",
        "replay": "Step through an episode, token by token",
        "ls": "List and search episodes, runs, tasks; read-only SQL",
        "show": "Print one episode or run; explain a word of the screens",
        "tools": "List, show and call tools",
        "compare": "Two runs task by task, or a run under other rewards",
        "export": "Episodes as JSONL or HTML, a run as a report",
    },
    "Manage": {
        "db": "The store: status, backup, prune; rename, delete runs",
        "sandbox": "Run a program in the sandbox of this machine",
    },
}
"""Panel of the front page to its commands, each with a line of help; `commands/NAME.py` is imported when it runs."""


@cache
def commands() -> dict[str, tuple[str, str, str]]:
    """Return every command as (panel, module:object, help), by panel: the core's, then those of plugins."""
    found = {
        name: (panel, f"agentrl_cli.commands.{name}", text)
        for panel, group in COMMANDS.items()
        for name, text in group.items()
    }
    offered = offers("commands")
    found |= {name: offered[name] for name in sorted(offered.keys() - found.keys())}
    panels = [*COMMANDS, *(panel for panel, _, _ in found.values())]
    return dict(sorted(found.items(), key=lambda item: panels.index(item[1][0])))


ABOUT = "Train tool-using language-model agents with reinforcement learning on one machine, and see what happened."
OPTIONS = """\
  -h, --help            this page; `agentrl COMMAND --help` for one command
  --version             the version
  --show-completion     print what completes commands, runs, episodes and settings
  --install-completion  write that into this shell's start file, ~/.bashrc for bash"""
EPILOG = "First steps: agentrl init code-task && cd code-task && agentrl train --watch"


class LazyGroup(TyperGroup):
    """A group whose commands are imported only when they run or print their help."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in commands():
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and args[0] not in commands():
            near = nearest(args[0], commands())
            ctx.fail(
                f"No command {args[0]!r}." + (f" Did you mean {' or '.join(near)}?" if near else "")
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the front page from the table alone, without importing any command or Rich."""
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        bold = "\x1b[1m{}\x1b[0m" if colour else "{}"
        known = commands()
        width = max(map(len, known)) + 2
        lines = [ABOUT, "", f"{bold.format('Usage:')} agentrl COMMAND [OPTIONS]", ""]
        for panel in dict.fromkeys(panel for panel, _, _ in known.values()):
            rows = ((name, text) for name, (group, _, text) in known.items() if group == panel)
            lines += [bold.format(panel), *(f"  {name:{width}}{text}" for name, text in rows), ""]
        formatter.write("\n".join([*lines, bold.format("Options"), OPTIONS, "", EPILOG, ""]))

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        from typer._click.shell_completion import CompletionItem  # Typer has no public name for it

        known = commands().items()
        words = [
            CompletionItem(name, help=text)
            for name, (_, _, text) in known
            if name.startswith(incomplete)
        ]
        return words or super().shell_complete(ctx, incomplete)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().make_context(*args, **extra)
        except KeyboardInterrupt as error:  # Typer would exit without a word
            raise typer.Abort from error

    def invoke(self, ctx: Any) -> Any:
        try:
            value = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # `agentrl ls | head`: the reader closed the pipe
            silence_stdout()
            raise typer.Exit(0) from None
        except KeyboardInterrupt as error:  # likewise
            raise typer.Abort from error
        return value


app = typer.Typer(
    name="agentrl",
    cls=LazyGroup,
    help=ABOUT,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Runs before each command, or alone when no command is given."""
    if version:
        typer.echo(f"agentrl {__version__}")
    elif ctx.invoked_subcommand is None:
        from agentrl_cli.commands.common import is_terminal
        from agentrl_cli.commands.place import find_db
        from agentrl_cli.paths import find_project

        try:
            db = find_db(must_exist=False) if find_project() is not None else None
        except AgentRLError:  # an unreadable configuration: the command that needs it reports it
            db = None
        if db is not None and db.is_file() and is_terminal():
            from agentrl_cli.models.openmp import limit_openmp
            from agentrl_cli.tui.app import start

            limit_openmp()  # the screens sample what-ifs and chats
            return start(db)
        typer.echo(ctx.get_help())
        if db is not None and not db.is_file():
            typer.echo("This project has no runs yet: `agentrl train --watch` starts the first.")


def load_command(name: str) -> Any:
    """Import one command of the table as the command object that Typer runs."""
    from agentrl_cli.commands.help import with_examples
    from agentrl_cli.commands.options import add_flags, flatten
    from agentrl_cli.models.openmp import limit_openmp

    limit_openmp()  # whichever command: `demo`, `check`, `init` compute as well as `train`
    # Importing torch and transformers makes a million objects, none of them garbage: looking for it takes 0.4 s.
    gc.set_threshold(10_000, 10, 10)
    _, target_name, _ = commands()[name]
    module_name, _, attribute = target_name.partition(":")
    module = importlib.import_module(module_name)
    target = getattr(module, attribute or ("app" if hasattr(module, "app") else "command"))
    if isinstance(target, typer.Typer):
        sub = target
        for path in offers("subcommands"):
            if path.startswith(f"{name} "):
                sub.command(path.removeprefix(f"{name} "))(resolve("subcommands", {}, path))
        for info in sub.registered_commands:
            info.callback = flatten(info.callback) if info.callback else None
    else:
        sub = typer.Typer(add_completion=False)
        sub.command(name=name)(flatten(target))
    command = get_command(sub)
    command.name = name
    command.params = [
        p for p in command.params if p.name not in ("install_completion", "show_completion")
    ]
    add_flags(command, name)
    with_examples(command, name)
    return command


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPES)
    begin_command(lambda name: load_command(name) if name in commands() else None)
    try:
        given = sys.argv[1:] if args is None else args
        for number, arg in enumerate(given, 1):
            if any("\ud800" <= character <= "\udfff" for character in arg):
                text = f"Argument {number}, {arg[:40]!a}, is not UTF-8 text."
                raise UsageError(text, hint="See `locale`, and type it.")
        given, renamed = translate(given, load_command)
        if renamed:
            print(renamed, file=sys.stderr, flush=True)
        with trust.saying(lambda text: print(text, file=sys.stderr, flush=True)):
            code = get_command(app).main(args=given, prog_name="agentrl", standalone_mode=False)
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001  the boundary: unexpected errors go to a log
        return report(error)
    return code if isinstance(code, int) else 0
