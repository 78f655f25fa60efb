"""The commands of a chat: a line is read into a `Command`, which `carry_out` runs on a screen or in a pipe."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl_cli.errors import nearest
from agentrl_cli.types.plain import parse_json

HELP = """\
text                  say it as the user (/as-user TEXT too)
/as-model TEXT        answer in the model's place
/as-tool TEXT         answer in the tool's place
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
/help  /quit
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

    async def request(self, command: Command) -> None:
        """Sends a request to the child."""

    async def show_problem(self, text: str) -> None:
        """Shows a mistake in a line."""

    async def show_help(self) -> None:
        """Shows HELP."""

    async def show_mode(self, mode: str) -> None:
        """Shows every turn as `tokens`, `mask` or `logprobs`; as text again if it is so shown already."""

    async def show_context(self) -> None:
        """Shows or hides the exact ids."""

    async def edit_last(self) -> None:
        """Takes the last message back into the line."""

    async def save_and_replay(self) -> None:
        """Keeps the chat as an episode and opens it in replay."""

    async def leave_chat(self) -> None:
        """Ends the chat."""


LOCAL: Mapping[str, Callable[[ChatActions], Awaitable[None]]] = {
    "/quit": lambda chat: chat.leave_chat(),
    "/exit": lambda chat: chat.leave_chat(),
    "/help": lambda chat: chat.show_help(),
    "/tokens": lambda chat: chat.show_mode("tokens"),
    "/mask": lambda chat: chat.show_mode("mask"),
    "/logprobs": lambda chat: chat.show_mode("logprobs"),
    "/replay": lambda chat: chat.save_and_replay(),
    "/edit": lambda chat: chat.edit_last(),
    "/context": lambda chat: chat.show_context(),
}
"""Commands that the screen or the pipe carries out itself."""


async def carry_out(command: Command, chat: ChatActions) -> None:
    """Runs a command."""
    if command.problem:
        await chat.show_problem(command.problem)
    elif command.local:
        await LOCAL[command.local](chat)
    elif command.op:
        await chat.request(command)


def _as(word: str, op: str) -> Callable[[str], Command]:
    """Return a command that speaks in a role."""

    def read(rest: str) -> Command:
        return (
            Command(op, {"text": unescaped(rest)})
            if rest
            else Command(problem=f"{word} needs a text")
        )

    return read


def unescaped(text: str) -> str:
    """Return the text with `\\n` as a newline."""
    return text.replace("\\n", "\n")


def _approve(rest: str) -> Command:
    return Command("approve", {"on": rest not in ("off", "no", "0")})


def _simulate(rest: str) -> Command:
    if rest not in ("", "on", "off"):
        return Command(problem="/simulate, /simulate on or /simulate off")
    return Command("simulate", {"on": rest == "on"} if rest else {})


def _reward(rest: str) -> Command:
    return _number("reward", "value", rest) if rest else Command("reward")


def _set(rest: str) -> Command:
    key, _, value = rest.partition(" ")
    if key not in SETTINGS:
        return Command(problem=f"/set {', '.join(SETTINGS[:-1])} or {SETTINGS[-1]}")
    return _number("set", key, value)


def _number(op: str, key: str, text: str) -> Command:
    try:
        value: float = float(text)
    except ValueError:
        return Command(problem=f"{text!r} is not a number")
    return Command(op, {key: int(value) if key in ("max_new_tokens", "top_k") else value})


def _call(rest: str) -> Command:
    name, _, text = rest.partition(" ")
    if not name:
        return Command(problem='/call NAME {"argument": value}')
    try:
        arguments = parse_json(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        return Command(problem=f"the arguments are not JSON: {error.msg} at column {error.colno}")
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
    "/undo": lambda rest: Command("undo"),
    "/retry": lambda rest: Command("retry"),
    "/save": lambda rest: Command("save"),
    "/task": lambda rest: Command("task", {"id": rest}),
    "/approve": _approve,
    "/simulate": _simulate,
    "/reward": _reward,
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
        return Command("answer", {"run": False, "text": unescaped(rest)})
    if word in REQUESTS:
        return REQUESTS[word](rest)
    if word in LOCAL:
        return Command(local=word)
    if word.startswith("/") and word[1:].replace("-", "").isalpha():
        near = nearest(word, COMMANDS)
        return Command(
            problem=f"no command {word}"
            + (f"; did you mean {near[0]}?" if near else "; /help lists them")
        )
    return Command("user", {"text": line.strip()}) if line.strip() else Command()


def complete(line: str, tools: Sequence[str]) -> tuple[str, list[str]]:
    """(the line completed as far as all choices agree, the choices): commands, then tools of /call, keys of /set."""
    head, space, rest = line.rpartition(" ")
    pool: Sequence[str] = ()
    if not space and line.startswith("/"):
        pool = COMMANDS
    elif head in ("/call", "/set"):
        pool = tools if head == "/call" else SETTINGS
    found = [word for word in pool if word.startswith(rest)]
    if not found:
        return line, []
    first, last = min(found), max(found)
    agree = next(
        (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
    common = first[:agree]
    return f"{head}{space}{common}{' ' if len(found) == 1 else ''}", found
