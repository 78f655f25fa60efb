"""The one boundary where errors become a message, a hint and an exit status."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import re
import sys
import traceback
from pathlib import Path

import typer

from agentrl_cli._version import __version__
from agentrl_cli.commands.place import locate
from agentrl_cli.errors import AgentRLError, disk_problem, nearest
from agentrl_cli.registry.files import pip_line

ESCAPES = "agentrl-escape"
"""For `errors=` of a stream: what its encoding lacks is written as escapes, which JSON reads, too."""


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(ESCAPES, _escape)


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
            silence_stdout()  # the flush at exit would fail again
            return _fail(problem.message, problem.hint, problem.exit_code, error)
        case RuntimeError() if "determine home directory" in str(error):  # pathlib's, of ~NAME
            hint = "Write the whole path, or ~/ for your own home."
            return _fail("A path begins with ~, and that user has no home here.", hint, 2, error)
        case OSError(errno=errno.ENAMETOOLONG):
            hint = "Look for a text, or a list, where a file or a folder is to be named."
            return _fail("A path is longer than this system allows.", hint, 2, error)
        case PermissionError() if error.filename:
            return _fail(
                f"{error.filename}: permission denied.", "Check its owner and its mode.", 3, error
            )
        case _:
            return _report_bug(error)


def silence_stdout() -> None:
    """Redirect stdout to /dev/null: it is closed, and the flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_error(error: typer.TyperException) -> int:
    """Print Typer's own errors: an unknown option, a wrong value, a missing argument."""
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
    from agentrl_cli.tui.common.plain_text import harmless

    message, hint = locate(message), locate(hint)
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    head, tail = ("\x1b[31mError:\x1b[0m ", "\x1b[2m") if colour else ("Error: ", "")
    print(head + (harmless(message) if sys.stderr.isatty() else message), file=sys.stderr)
    if hint:
        print(f"{tail}{hint}" + ("\x1b[0m" if tail else ""), file=sys.stderr)
    if error is not None and os.environ.get("AGENTRL_DEBUG"):
        traceback.print_exception(error)
    return code


def _report_bug(error: BaseException) -> int:
    """Write the traceback of a bug, in AgentRL or in a pack's code, to a file, and name it.

    The file is in the project's runs/logs, else in the folder for temporary files.
    """
    import platform
    import tempfile
    import time

    from agentrl_cli.paths import find_project, runs_dir

    text = "".join(traceback.format_exception(error))
    hint = text
    project = find_project()
    name = f"agentrl-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    head = f"agentrl {__version__}, Python {platform.python_version()}, {platform.platform()}\n{' '.join(sys.argv)}\n\n"
    folders = [runs_dir(project) / "logs"] if project else []
    for folder in (*folders, Path(tempfile.gettempdir())):
        log = folder / name
        with contextlib.suppress(OSError):  # read-only or full: the next folder, at last the screen
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(head + text, encoding="utf-8", errors="backslashreplace")
            hint = f"The traceback is in {log}."
            break
    line = next(iter(str(error).splitlines()), "")
    return _fail(f"Something went wrong: {type(error).__name__}: {line}", hint, 1, error)
