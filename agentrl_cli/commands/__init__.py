"""The command `agentrl`: a table of commands that are imported only when they run, and the one error boundary.

To add a command: one file here with a Typer-annotated function `command` (or a Typer object `app` for one with
subcommands), and one line in COMMANDS.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from agentrl_cli._version import __version__
from agentrl_cli.commands.escapes import ESCAPES
from agentrl_cli.commands.flags import add_flags
from agentrl_cli.commands.help import with_examples
from agentrl_cli.errors import AgentRLError, UsageError, disk_problem, nearest
from agentrl_cli.registry import resolve, trust
from agentrl_cli.registry.files import pip_line
from agentrl_cli.registry.plugins import offers

COMMANDS: dict[str, tuple[str, str, str]] = {
    # name: (panel, module:object, help)
    "demo": (
        "Start",
        "agentrl_cli.commands.demo:command",
        "Learn a tool in minutes: init, train and eval in one",
    ),
    "init": (
        "Start",
        "agentrl_cli.commands.init:command",
        "Copy a pack into a project folder that you edit",
    ),
    "check": (
        "Start",
        "agentrl_cli.commands.check:command",
        "Validate a pack: rows, schema, rewards",
    ),
    "doctor": (
        "Start",
        "agentrl_cli.commands.doctor:command",
        "Check this machine, a store, a chat template",
    ),
    "config": (
        "Start",
        "agentrl_cli.commands.config:app",
        "Show settings and where each came from",
    ),
    "rollout": ("Run", "agentrl_cli.commands.rollout:command", "Sample episodes into the store"),
    "train": (
        "Run",
        "agentrl_cli.commands.train:command",
        "Train with GRPO on the local GPU or CPU",
    ),
    "eval": (
        "Run",
        "agentrl_cli.commands.eval:command",
        "pass@k with intervals, base against checkpoint",
    ),
    "bench": (
        "Run",
        "agentrl_cli.commands.bench:command",
        "Models on a named set of packs, in one table",
    ),
    "chat": (
        "Run",
        "agentrl_cli.commands.chat:command",
        "Talk to a model with its tools, or act as the model",
    ),
    "sft": (
        "Run",
        "agentrl_cli.commands.sft:command",
        "Warm-start a model on the packs' demonstrations",
    ),
    "serve": (
        "Run",
        "agentrl_cli.commands.serve:command",
        "The model for any OpenAI or Anthropic client",
    ),
    "rescore": (
        "Run",
        "agentrl_cli.commands.rescore:command",
        "A run under other rewards, without generating",
    ),
    "merge": (
        "Run",
        "agentrl_cli.commands.merge:command",
        "Write a checkpoint as a plain Hugging Face folder",
    ),
    "watch": ("Look", "agentrl_cli.commands.watch:command", "Live dashboard of a training"),
    "replay": (
        "Look",
        "agentrl_cli.commands.replay:command",
        "Step through an episode, token by token",
    ),
    "ls": ("Look", "agentrl_cli.commands.ls:command", "List episodes, runs, tasks, checkpoints"),
    "show": ("Look", "agentrl_cli.commands.show:command", "Print one episode or run"),
    "tools": ("Look", "agentrl_cli.commands.tools:app", "List, show and call tools"),
    "grep": ("Look", "agentrl_cli.commands.grep:command", "Search the text of episodes"),
    "compare": (
        "Look",
        "agentrl_cli.commands.compare:command",
        "Two runs beside each other, task by task",
    ),
    "report": (
        "Look",
        "agentrl_cli.commands.reports:command",
        "What a run learned, as one HTML file or Markdown",
    ),
    "query": ("Look", "agentrl_cli.commands.query:command", "Read-only SQL on the store"),
    "export": (
        "Look",
        "agentrl_cli.commands.export:command",
        "Write episodes as JSONL or as an HTML page",
    ),
    "runs": ("Manage", "agentrl_cli.commands.runs:app", "List, rename, delete runs"),
    "db": ("Manage", "agentrl_cli.commands.db:app", "The store: path, status, backup, vacuum"),
    "sandbox": (
        "Manage",
        "agentrl_cli.commands.sandbox:app",
        "Run a program in the sandbox of this machine",
    ),
}

PANELS = ("Start", "Run", "Look", "Manage")
"""The panels of the front page, in this order; a plugin may add its own after them."""


def commands() -> dict[str, tuple[str, str, str]]:
    """Return every command, those of plugins included, as the front page lists them: by panel, the core's first."""
    known = {**offers("commands"), **COMMANDS}
    found = [(name, known[name]) for name in (*COMMANDS, *sorted(known.keys() - COMMANDS))]
    return dict(
        sorted(
            found,
            key=lambda item: PANELS.index(item[1][0]) if item[1][0] in PANELS else len(PANELS),
        )
    )


ABOUT = "Train tool-using language-model agents with reinforcement learning on one machine, and see what happened."
EPILOG = "First steps: agentrl init code-task && cd code-task && agentrl train --watch"


class LazyGroup(TyperGroup):
    """A group whose commands are imported only when they run or print their help."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and (cmd_name in COMMANDS or cmd_name in commands()):
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-") and args[0] not in commands():
            near = nearest(args[0], commands())
            ctx.fail(
                f"No command {args[0]!r}." + (f" Did you mean {' or '.join(near)}?" if near else "")
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the front page from the table alone, without importing any command or Rich."""
        formatter.write(_front_page(ctx))

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        from typer._click.shell_completion import CompletionItem  # Typer has no public name for it

        known = commands().items()
        words = [
            CompletionItem(name, help=text)
            for name, (_, _, text) in known
            if name.startswith(incomplete)
        ]
        return words or super().shell_complete(ctx, incomplete)

    def invoke(self, ctx: Any) -> Any:
        try:
            value = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # `agentrl ls | head`: the reader closed the pipe
            _silence_stdout()
            raise typer.Exit(0) from None
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
        db = _store_here()
        if db is None:
            typer.echo(ctx.get_help())
            if _new_project():
                typer.echo(
                    "This project has no runs yet: `agentrl train --watch` starts the first."
                )
        else:
            from agentrl_cli.tui.app import start

            start(db)


def _store_here() -> Path | None:
    """Return the project's store if this is a terminal inside a project that has one; None: show the help."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return None
    from agentrl_cli.commands.place import find_db
    from agentrl_cli.paths import find_project

    if find_project() is None:
        return None
    db = find_db(must_exist=False)
    return db if db.is_file() else None


def _new_project() -> bool:
    """Whether this is a project without a store yet."""
    from agentrl_cli.commands.place import find_db
    from agentrl_cli.paths import find_project

    try:
        return find_project() is not None and not find_db(must_exist=False).is_file()
    except AgentRLError:  # an unreadable configuration: the command that needs it reports it
        return False


def load_command(name: str) -> Any:
    """Import one command of the table as the command object that Typer runs."""
    panel, target_name, _ = COMMANDS.get(name) or commands()[name]
    if panel == "Run":
        from agentrl_cli.models.openmp import limit_openmp

        limit_openmp()
    module_name, _, attribute = target_name.partition(":")
    module = importlib.import_module(module_name)
    target = getattr(module, attribute)
    if isinstance(target, typer.Typer):
        sub = target
        for path in offers("subcommands"):
            if path.startswith(f"{name} "):
                sub.command(path.removeprefix(f"{name} "))(resolve("subcommands", {}, path))
    else:
        sub = typer.Typer(add_completion=False)
        sub.command(name=name)(target)
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
    _print_any_text()
    try:
        _require_text(sys.argv[1:] if args is None else args)
        with trust.saying(lambda text: print(text, file=sys.stderr, flush=True)):
            code = get_command(app).main(args=args, prog_name="agentrl", standalone_mode=False)
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001  the boundary: unexpected errors go to a log
        return report(error)
    return code if isinstance(code, int) else 0


def _print_any_text() -> None:
    """Let the standard streams print what their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPES)


def _require_text(args: Sequence[str]) -> None:
    """Raise UsageError for an argument that is not UTF-8: the store, filters and file names cannot hold it."""
    for number, arg in enumerate(args, 1):
        try:
            arg.encode()
        except UnicodeEncodeError:
            text = f"Argument {number}, {arg[:40]!a}, is not UTF-8 text."
            raise UsageError(text, hint="See `locale`, and type it.") from None


def report(error: BaseException) -> int:
    """Print on stderr what happened and what to do; return the exit status. The only place that maps exceptions."""
    match error:
        case AgentRLError():
            return _fail(error.message, error.hint, error.exit_code, error)
        case KeyboardInterrupt() | typer.Abort():
            return _fail("Interrupted.", "", 130)
        case typer.TyperException():
            return _usage_error(error)
        case ModuleNotFoundError() if error.name and not error.name.startswith("agentrl_cli"):
            return _fail(
                f"The package {error.name} is not installed.", pip_line(error.name), 3, error
            )
        case Exception() if (problem := disk_problem(error)) is not None:
            _silence_stdout()  # the flush at exit would fail again
            return _fail(problem.message, problem.hint, problem.exit_code, error)
        case PermissionError() if error.filename:
            return _fail(
                f"{error.filename}: permission denied.", "Check its owner and its mode.", 3, error
            )
        case _:
            return _unexpected(error)


def _silence_stdout() -> None:
    """Redirects stdout to /dev/null: it is closed, and the flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_error(error: typer.TyperException) -> int:
    """Typer's own errors: an unknown option, a wrong value, a missing argument."""
    message = error.format_message().replace(
        "Value error, ", "", 1
    )  # pydantic's, of a parameter's type
    context = getattr(error, "ctx", None)
    hint = f"`{context.command_path} --help` lists what there is." if context is not None else ""
    wrong = re.search("'([^']*)' is not one of (.*)", message)
    near = nearest(wrong[1], re.findall("'([^']*)'", wrong[2])) if wrong else []
    if near:
        hint = f"Did you mean {' or '.join(near)}? {hint}".rstrip()
    return (
        _fail(message, hint, error.exit_code) if message else error.exit_code
    )  # empty: the help is printed already


def _fail(message: str, hint: str, code: int, error: BaseException | None = None) -> int:
    from agentrl_cli.commands.common import harmless

    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    head, tail = ("\x1b[31mError:\x1b[0m ", "\x1b[2m") if colour else ("Error: ", "")
    print(head + (harmless(message) if sys.stderr.isatty() else message), file=sys.stderr)
    if hint:
        print(f"{tail}{hint}" + ("\x1b[0m" if tail else ""), file=sys.stderr)
    if error is not None and os.environ.get("AGENTRL_DEBUG"):
        import traceback

        traceback.print_exception(error)
    return code


def _unexpected(error: BaseException) -> int:
    """Return a bug in AgentRL or in a pack's code: the traceback goes to a file."""
    import traceback

    text = "".join(traceback.format_exception(error))
    where = _write_log(text)
    hint = f"The traceback is in {where}." if where else text
    line = next(iter(str(error).splitlines()), "")
    return _fail(f"Something went wrong: {type(error).__name__}: {line}", hint, 1, error)


def _write_log(text: str) -> Path | None:
    """Write a traceback into the project's runs/logs, else into the folder for temporary files."""
    import platform
    import tempfile
    import time

    from agentrl_cli.paths import find_project, runs_dir

    project = find_project()
    folders = [runs_dir(project) / "logs"] if project else []
    name = f"agentrl-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    head = f"agentrl {__version__}, Python {platform.python_version()}, {platform.platform()}\n{' '.join(sys.argv)}\n\n"
    for folder in [*folders, Path(tempfile.gettempdir())]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(head + text, encoding="utf-8", errors="backslashreplace")
        except OSError:  # read-only or full: try the next folder, and at last the screen
            continue
        return folder / name
    return None


def _front_page(ctx: Any) -> str:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def bold(text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if colour else text

    known = commands()
    width = max(map(len, known)) + 2
    lines = [ABOUT, "", f"{bold('Usage:')} agentrl COMMAND [OPTIONS]", ""]
    for panel in dict.fromkeys(panel for panel, _, _ in known.values()):
        lines.append(bold(panel))
        lines += [
            f"  {name:{width}}{text}" for name, (group, _, text) in known.items() if group == panel
        ]
        lines.append("")
    lines += [
        bold("Options"),
        "  -h, --help            this page; `agentrl COMMAND --help` for one command",
    ]
    lines += ["  --version             the version"]
    lines += ["  --show-completion     print what completes commands, runs, episodes and settings"]
    lines += [
        "  --install-completion  write that into this shell's start file, ~/.bashrc for bash",
        "",
    ]
    return "\n".join([*lines, EPILOG, ""])
