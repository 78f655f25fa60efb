"""`run_python`, `bash` and `files`: a Python session, shell commands and files of one folder, in the episode's sandbox.

Paths of `files` are resolved in the sandbox, beneath the folder and never through a link
(sandbox/filesystem/files.py); nothing of the host is reached. The model reads the error; it never ends the episode.
"""

from __future__ import annotations

import posixpath
import re
from typing import Literal, NamedTuple

from agentrl_cli.errors import SandboxFault, UsageError
from agentrl_cli.sandbox import ExecResult, Session
from agentrl_cli.tools.base import FunctionTool, ToolContext
from agentrl_cli.types import ToolResult


async def run_python(code: str, ctx: ToolContext) -> ToolResult:
    """Run Python code and return what it prints. Variables are kept between calls.

    Args:
        code: Python code.
    """
    session = await ctx.session()
    return as_observation(await session.cell(code))


def as_observation(result: ExecResult) -> ToolResult:
    """Return the text of an execution for the model. Raises SandboxFault if the sandbox failed."""
    if result.infrastructure:
        raise SandboxFault(
            f"The sandbox failed: {result.status} {getattr(result, 'detail', '')}".strip()
        )
    return ToolResult(
        text=result.text(),
        error=None if result.ok else str(result.status),
        seconds=result.seconds,
        level=str(result.level),
    )


TOOL = FunctionTool(run_python, examples=({"code": "print(6 * 7)"},))
TOOL.own_timeout = True  # the sandbox limits the time; waiting for a slot there must not count
TOOL.rewinds = True


async def bash(command: str, ctx: ToolContext) -> ToolResult:
    """Run a bash command and return its output and, if it is not 0, its exit code. Every command starts in the same
    folder; files stay there between calls, variables and `cd` do not.

    Args:
        command: A command, or a script of several lines.
    """
    session = await ctx.session()
    return as_observation(await session.bash(command))


BASH = FunctionTool(
    bash, examples=({"command": "echo hi"}, {"command": "seq 3 > n.txt && wc -l n.txt"})
)
BASH.own_timeout = True  # as for run_python
BASH.rewinds = True


LINES = 200
"""Maximum lines of a view, and entries of a list."""
WIDTH = 500
"""Maximum characters shown of a line."""
MAX_TEXT = 1 << 20
"""Maximum bytes of a file to write or edit."""


class Refused(Exception):
    """A request that cannot be carried out; the model reads the message."""


async def files(
    action: Literal["view", "write", "edit", "list"],
    ctx: ToolContext,
    path: str = ".",
    start: int = 1,
    end: int | None = None,
    text: str | None = None,
    old: str | None = None,
    new: str | None = None,
) -> ToolResult:
    """View, write, edit or list files of the working folder. `write` replaces the whole file, `edit` replaces `old`,
    which must occur exactly once, by `new`.

    Args:
        action: What to do.
        path: Relative to the working folder, e.g. src/main.py.
        start: For view, the first line, from 1.
        end: For view, the last line.
        text: For write, the whole content.
        old: For edit, the text to replace, with enough around it to be unique.
        new: For edit, what to put in its place.
    """
    session = await ctx.session()
    asked = Asked(posixpath.normpath(path or "."), start, end, text, old, new)
    async with ctx.writing:
        try:
            return ToolResult(await ACTIONS[action](session, asked), level=session.level)
        except (Refused, UsageError) as problem:
            return ToolResult(f"Error: {problem}", error="exception", level=session.level)


class Asked(NamedTuple):
    """The arguments of a call."""

    path: str
    start: int
    end: int | None
    text: str | None
    old: str | None
    new: str | None


async def view(session: Session, asked: Asked) -> str:
    """Return the lines `start` to `end`, numbered, at most LINES; for a folder, its entries."""
    if asked.path == ".":
        return await entries(session, asked)
    try:
        lines = _lines(await _text(session, asked.path))
    except UsageError:
        if any(
            entry.path == asked.path and entry.kind == "folder" for entry in await session.list()
        ):
            return await entries(session, asked)
        raise
    start, end = asked.start, asked.end
    if not lines:
        return f"[{asked.path} is empty]"
    if not 1 <= start <= len(lines) or (end is not None and end < start):
        wanted = f"{start} to {len(lines) if end is None else end}"
        raise Refused(f"{asked.path} has lines 1 to {len(lines)}, not {wanted}")
    last = min(len(lines) if end is None else end, len(lines), start + LINES - 1)
    shown = [f"{number}\t{_clip(lines[number - 1])}" for number in range(start, last + 1)]
    if last < (len(lines) if end is None else min(end, len(lines))):
        shown.append(f"[lines {start} to {last} of {len(lines)}; go on with start {last + 1}]")
    return "\n".join(shown)


async def write(session: Session, asked: Asked) -> str:
    """Writes the whole file, creating its parent folders."""
    text = _require(asked.text, "write needs text")
    await _put(session, asked.path, text)
    return f"Wrote {asked.path}: {len(_lines(text))} lines, {len(text.encode())} bytes."


async def edit(session: Session, asked: Asked) -> str:
    """Replaces a text that occurs once; reports its line."""
    old, new = _require(asked.old, "edit needs old"), _require(asked.new, "edit needs new")
    path = asked.path
    if not old:
        raise Refused("old is empty; write the whole file instead")
    if old == new:
        raise Refused("old and new are the same")
    text = await _text(session, path)
    # Overlaps included, since replacing one of those would also be a guess.
    found = [part.start() for part in re.finditer(f"(?={re.escape(old)})", text)]
    if not found:
        raise Refused(
            f"old does not occur in {path}; view it and copy the text exactly, spaces included"
        )
    if len(found) > 1:
        lines = ", ".join(str(text.count("\n", 0, at) + 1) for at in found[:10])
        where = f"{len(found)} times in {path} (lines {lines})"
        raise Refused(f"old occurs {where}; add what stands around the one you mean")
    await _put(session, path, text[: found[0]] + new + text[found[0] + len(old) :])
    line = text.count("\n", 0, found[0]) + 1
    return f"Edited {path} at line {line}."


async def entries(session: Session, asked: Asked) -> str:
    """Lists a folder recursively, one entry per line: folders end with /, links are listed but never followed."""
    path, listed = asked.path, await session.list()
    found = [e for e in listed if path in (".", e.path) or e.path.startswith(f"{path}/")]
    only = f"[only {len(listed)} entries of the working folder are looked at]" * listed.more
    if not found and path != ".":
        raise Refused(f"there is no {path} {only}".rstrip())
    ends = {"folder": "/", "link": "  (a link, not followed)", "other": "  (not a regular file)"}
    lines = [e.path + (f"  {e.size} bytes" if e.kind == "file" else ends[e.kind]) for e in found]
    more = [f"[{len(lines) - LINES} more]"] if len(lines) > LINES else []
    return "\n".join([*lines[:LINES], *more, *[only] * listed.more]) or "[the folder is empty]"


ACTIONS = {"view": view, "write": write, "edit": edit, "list": entries}


def _require(value: str | None, problem: str) -> str:
    if value is None:
        raise Refused(problem)
    return value


async def _text(session: Session, path: str) -> str:
    data = await session.read(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(f"{path} is not text: {len(data)} bytes that are not UTF-8") from None


async def _put(session: Session, path: str, text: str) -> None:
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_TEXT:
        raise Refused(f"{len(data)} bytes are too many: a file may have {MAX_TEXT}")
    if path == ".":
        raise Refused("path is needed: the file to write")
    await session.write(path, data)


def _lines(text: str) -> list[str]:
    """Return the lines of a text as editors count them: `splitlines` also ends one at a form feed."""
    return [
        line.removesuffix("\r") for line in (text.removesuffix("\n").split("\n") if text else ())
    ]


def _clip(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[:WIDTH]} [… {len(line) - WIDTH} more characters]"


FILES = FunctionTool(
    files,
    examples=(
        {"action": "list"},
        {"action": "write", "path": "src/a.py", "text": "x = 1\n"},
        {"action": "view", "path": "src/a.py", "start": 1, "end": 20},
        {"action": "edit", "path": "src/a.py", "old": "x = 1", "new": "x = 2"},
    ),
)
FILES.own_timeout = True  # as for run_python
FILES.rewinds = True
