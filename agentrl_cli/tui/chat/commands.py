"""The commands of a chat: a line is read into a `Command`, which `carry_out` runs on a screen or in a pipe."""

from __future__ import annotations

import json
import math
import os.path
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl_cli.errors import nearest
from agentrl_cli.types.plain import describe_json_error, parse_json

HELP = """\
text                  say it as the user (/as-user TEXT too)
/as-model TEXT        answer in the model's place
/as-tool TEXT         answer in the tool's place
                      (\\n is a new line, \\\\ a backslash)
/call NAME {"a": 1}   call a tool by hand
/task [ID]            open a task of the pack; without ID: three
/retry                let the model answer again
/undo                 take the last exchange back
/edit                 change the last message
/tokens /mask /logprobs   tokens; which may train; how likely
/context              the exact ids, and the template (F5;
                      shift+pgup, shift+pgdn scroll them)
/reward [X]           score by the pack, or give X
/save /replay         keep as an episode; and open it in replay
/approve [off]        ask before tools run
/simulate [on|off]    the simulated user: once, always, never
/set KEY VALUE        temperature, max_new_tokens, top_p …
/help  /words (F6)  /quit
While a call waits: y runs it, n refuses, all or none decides the
rest too, /as-tool TEXT answers it."""


@dataclass(frozen=True, slots=True)
class Command:
    """The meaning of a line: a request for the child (`op`), a local action (a key of LOCAL), or a problem."""

    op: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    local: str = ""
    problem: str = ""


class ChatActions(Protocol):
    """Where a chat runs: on a screen, or line by line."""

    local: Mapping[str, Callable[[], Awaitable[None] | None]]
    """By their names in LOCAL the commands that it carries out itself."""

    async def request(self, command: Command) -> None:
        """Sends a request to the child."""

    def show_problem(self, text: str) -> None:
        """Shows a mistake in a line."""


MODES = ("tokens", "mask", "logprobs")
LOCAL = (
    *("/quit", "/exit", "/help", "/words", "/replay", "/edit", "/context"),
    *(f"/{mode}" for mode in MODES),
)
"""Commands that the screen or the pipe carries out itself; a mode shows every turn so, or as text again."""


async def carry_out(command: Command, chat: ChatActions) -> None:
    """Runs a command."""
    if command.problem:
        chat.show_problem(command.problem)
    elif command.local:
        running = chat.local[command.local]()
        if running is not None:
            await running
    elif command.op:
        await chat.request(command)


def _as(word: str, op: str) -> Callable[[str], Command]:
    """Return a command that speaks in a role."""
    missing = Command(problem=f"{word} needs a text")
    return lambda rest: Command(op, {"text": unescape(rest)}) if rest else missing


def unescape(text: str) -> str:
    """Return the text with `\\n` as a newline, and two backslashes as one."""
    return "\\".join(part.replace("\\n", "\n") for part in text.split("\\\\"))


def _simulate(rest: str) -> Command:
    if rest not in ("", "on", "off"):
        return Command(problem="/simulate, /simulate on or /simulate off")
    return Command("simulate", {"on": rest == "on"} if rest else {})


def _set(rest: str) -> Command:
    key, _, value = rest.partition(" ")
    if key not in SETTINGS:
        return Command(problem=f"/set {', '.join(SETTINGS[:-1])} or {SETTINGS[-1]}")
    return _number("set", key, value)


def _number(op: str, key: str, text: str) -> Command:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    whole = key in ("max_new_tokens", "top_k")
    if not math.isfinite(value) or (whole and not value.is_integer()):
        return Command(problem=f"{text!r} is not a {'whole ' * whole}number")
    return Command(op, {key: int(value) if whole else value})


def _call(rest: str) -> Command:
    name, _, text = rest.partition(" ")
    if not name:
        return Command(problem='/call NAME {"argument": value}')
    try:
        arguments = parse_json(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        return Command(
            problem=f"the arguments are not JSON: {describe_json_error(error)} at column {error.colno}"
        )
    except ValueError as error:
        return Command(problem=f"the arguments cannot be used: {error}")
    if not isinstance(arguments, dict):
        return Command(problem="the arguments must be a JSON object")
    return Command("call", {"name": name, "arguments": arguments})


SETTINGS = ("max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p")
REQUESTS: Mapping[str, Callable[[str], Command]] = {
    "/as-model": _as("/as-model", "as_model"),
    "/as-tool": _as("/as-tool", "as_tool"),
    "/as-user": _as("/as-user", "user"),
    **{f"/{op}": lambda rest, op=op: Command(op) for op in ("undo", "retry", "save")},  # type: ignore[misc]
    "/task": lambda rest: Command("task", {"id": rest}),
    "/approve": lambda rest: Command("approve", {"on": rest not in ("off", "no", "0")}),
    "/simulate": _simulate,
    "/reward": lambda rest: _number("reward", "value", rest) if rest else Command("reward"),
    "/set": _set,
    "/call": _call,
}
"""Commands that the child carries out, and how the rest of the line is read."""
DECISIONS: Mapping[str, Mapping[str, Any]] = {
    "y": {"run": True},
    "yes": {"run": True},
    "n": {"run": False},
    "no": {"run": False},
    "all": {"run": True, "rest": True},
    "none": {"run": False, "rest": True},
}
"""Answers while a tool call waits."""
COMMANDS = sorted([*LOCAL, *REQUESTS])


def parse_command(line: str, *, asked: bool = False) -> Command:
    """Reads a line. `asked`: a tool call waits for a decision."""
    word, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if asked and word in DECISIONS:
        return Command("answer", DECISIONS[word])
    if asked and word == "/as-tool":
        return Command("answer", {"run": False, "text": unescape(rest)})
    if word in REQUESTS:
        return REQUESTS[word](rest)
    if word in LOCAL:
        return Command(local=word)
    if word.startswith("/") and word[1:].replace("-", "").isalpha():
        near = nearest(word, COMMANDS)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        return Command(problem=f"no command {word}; {hint}")
    return Command("user", {"text": line.strip()}) if line.strip() else Command()


def complete(line: str, tools: Sequence[str]) -> tuple[str, list[str]]:
    """Complete a line as far as all choices (commands, tools of /call, keys of /set) agree. Returns it and them."""
    head, space, rest = line.rpartition(" ")
    pool: Sequence[str] = ()
    if not space and line.startswith("/"):
        pool = COMMANDS
    elif head in ("/call", "/set"):
        pool = tools if head == "/call" else SETTINGS
    found = [word for word in pool if word.startswith(rest)]
    if not found:
        return line, []
    common = os.path.commonprefix(found)  # noqa: RUF071 - by characters, as wanted
    return f"{head}{space}{common}{' ' if len(found) == 1 else ''}", found
