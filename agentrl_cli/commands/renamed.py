"""Names of commands and options before 0.1: each still works for one release, and prints its new form.

COMMANDS maps the words that a command line began with to those that replace them; a last word that ends with `=`
takes the first argument. OPTIONS maps an option of a command to the words that replace it; VALUE is its value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

COMMANDS: dict[str, str] = {
    "query": "ls --sql=",
    "grep": "ls --grep=",
    "runs list": "ls runs",
    "runs rename": "db rename",
    "runs delete": "db delete",
    "runs": "ls runs",
    "bench": "eval --bench=",
    "report": "export --report",
    "rescore": "compare --rewards",
    "words": "show --words",
    "sandbox attack": "doctor --sandbox",
}

OPTIONS: dict[tuple[str, str], str] = {
    ("eval", "--checkpoint"): "VALUE",
    ("eval", "--families"): "--set task.families=[VALUE]",
    ("export", "--html"): "--format html",
    ("sft", "--teacher-model"): "--set remote.model=VALUE",
}


def translate(args: Sequence[str], load: Callable[[str], Any]) -> tuple[list[str], str]:
    """Return a command line in today's words, and the line to print (empty if nothing was renamed).

    `load` returns a command by its name; its options say which words are arguments.
    """
    words = list(args)
    old = next((name for name in COMMANDS if words[: name.count(" ") + 1] == name.split()), "")
    now = COMMANDS.get(old, "")
    if old:
        words = _begin(now, words[old.count(" ") + 1 :], load)
    words, changed = _replace_options(words)
    if not old and not changed:
        return words, ""
    before, command = old or f"{words[0]} {changed}", words[0]
    after = now.rstrip("=") if old else f"{command} {OPTIONS[command, changed]}"
    before, after = (f"`{' '.join(('agentrl', form))}`" for form in (before, after))
    return words, f"{before} is now {after}."


def _begin(now: str, rest: list[str], load: Callable[[str], Any]) -> list[str]:
    """Return the rest of a command line behind its new first words."""
    first = now.split()
    if not now.endswith("="):
        return [*first, *rest]
    option = first.pop().rstrip("=")
    at = _first_argument(rest, load(first[0]))
    if at is None:  # Typer reports that the option needs a value
        return [*first, *rest, *([] if {"--help", "-h", "--schema"} & set(rest) else [option])]
    before = rest[: at - 1] if rest[at - 1 : at] == ["--"] else rest[:at]
    return [*first, *before, f"{option}={rest[at]}", *rest[at + 1 :]]


def _first_argument(words: Sequence[str], command: Any) -> int | None:
    """Return the place of the first word that is neither an option nor its value; None if absent."""
    values = {
        name
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.is_flag
        for name in parameter.opts
    }
    at = 0
    while at < len(words):
        if words[at] == "--":
            return at + 1 if at + 1 < len(words) else None
        if not words[at].startswith("-") or words[at] == "-":
            return at
        at += 2 if words[at] in values else 1
    return None


def _replace_options(words: list[str]) -> tuple[list[str], str]:
    """Return the words with each renamed option replaced, and the last of these options."""
    found, changed, at = words[:1], "", 1
    while at < len(words):
        name, equals, value = words[at].partition("=")
        new = OPTIONS.get((words[0], name))
        if words[at] == "--":
            return [*found, *words[at:]], changed
        at += 1
        if new is None:
            found.append(words[at - 1])
            continue
        if "VALUE" in new and not equals:
            value, at = " ".join(words[at : at + 1]), at + 1
        found += [word.replace("VALUE", value) for word in new.split(" ")]
        changed = name
    return found, changed
