"""Every command and every setting that a text names exists, and is written as it must be typed.

A command in a text stands in backticks, or ends where the line, the sentence or the column ends. Titles of screens
(`agentrl watch   NAME`) and docstrings may name a command without what it needs.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl_cli import AgentRLError, load_config
from agentrl_cli.commands import commands, load_command
from agentrl_cli.config.models import fields
from agentrl_cli.store.filters import compile_filter
from tests.helpers.source import nodes

ROOT = Path(__file__).resolve().parents[2]
NAMES = "|".join(commands())
TICKED = re.compile(r"(?<!`)`([^`]+)`(?!`)")
BARE = re.compile(rf"(?<![-\w./])agentrl (?:{NAMES})\b(?!-)[^\n]*")
END = re.compile(r"\s{2,}|[,;:.] |[.,;:)]+$| \(")
TITLE = re.compile(rf"agentrl (?:{NAMES})   .*")
HOLE = "\ue000"
# What the code fills in, a value or several words.
OPEN = re.compile(rf"…|{HOLE}")
# What a user replaces: `--steps N`.
FILLED = re.compile(r"(?<![-\w])[A-Z]+\b")
KEYS = {key for key, _ in fields()}
SECTIONS = sorted({key.partition(".")[0] for key in KEYS if "." in key})
SETTING = re.compile(
    rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w(/])(=[^\s`),;:|]+)?"
)
FILES = {
    "py",
    "yaml",
    "yml",
    "jsonl",
    "json",
    "md",
    "db",
    "toml",
    "parquet",
    "lua",
    "pt",
    "safetensors",
    "sock",
}
# A text that `agentrl optimize` improves, and an attribute in Python.
OTHER = {"task.prompt", "store.runs"}
# Texts that name other projects' settings.
FOREIGN = re.compile(r"agentrl_cli/plugins/(lightning|verl)|docs/lightning")
Place = tuple[str, str, bool]


def words_of(node: ast.AST) -> str | None:
    """A string as the user sees it, with HOLE for each value that is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
        )
    return None


def in_code(file: Path) -> Iterator[Place]:
    """(place, text, whether it is a docstring) of each string of a Python file."""
    every = nodes(file)
    loose = {id(node.value) for node in every if isinstance(node, ast.Expr)}
    parts = {id(part) for node in every if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in every:
        text = None if id(node) in parts else words_of(node)
        if text:
            yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", text, id(node) in loose


def in_pages(file: Path) -> Iterator[Place]:
    """The lines of code blocks and the code in the lines of a page."""
    fenced = False
    joined = re.sub(r"\\\n\s*", "", file.read_text(encoding="utf-8"))
    for number, line in enumerate(joined.splitlines(), 1):
        place = f"{file.relative_to(ROOT)}:{number}"
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced and line.startswith(("agentrl ", "$ agentrl ")):
            yield place, f"`{re.split(r'  | # ', line.removeprefix('$ '))[0]}`", False
        elif not fenced:
            yield from ((place, f"`{span}`", True) for span in TICKED.findall(line))


@cache
def texts() -> list[Place]:
    """Every text of the package, of the packs and of the pages."""
    code = [
        *ROOT.glob("agentrl_cli/**/*.py"),
        *ROOT.glob("tasks/*/task.py"),
        *ROOT.glob("examples/**/*.py"),
    ]
    pages = {
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("tasks/*/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    }
    pages -= {ROOT / "docs" / "cli.md"}  # generated: it shows forms, `agentrl demo [DIR] [OPTIONS]`
    found = [place for file in sorted(code) for place in in_code(file)]
    return found + [place for file in sorted(pages) for place in in_pages(file)]


def commands_in(text: str) -> Iterator[str]:
    for span in TICKED.findall(text):
        if span.startswith("agentrl "):
            yield span
    for line in BARE.findall(TICKED.sub("", text)):
        if not TITLE.fullmatch(line):
            cuts = [line[: end.start()] for end in END.finditer(line)]
            yield next((cut for cut in cuts if _is_closed(cut)), line)


def _is_closed(line: str) -> bool:
    try:
        return bool(shlex.split(line))
    except ValueError:
        return False


@cache
def problem_of(line: str, mention: bool) -> str:
    """What is wrong with a command; empty if nothing is. `mention`: it may lack arguments."""
    if not _is_closed(line):
        return "a quotation mark is missing"
    for one in re.split(r" && | \| | > |; ", line):
        words = shlex.split(one)
        if words[:1] != ["agentrl"] or words[1:2] in ([], ["COMMAND"]):
            continue
        filled = [
            re.sub(rf"(?<=\w){HOLE}", value, FILLED.sub("1", one)) for value in ("", " --json", "1")
        ]
        filled = [OPEN.sub(value, words) for words in filled for value in ("1", "solved")]
        tried = [_try(shlex.split(words)[1:], mention) for words in dict.fromkeys([one, *filled])]
        if all(tried):
            return tried[0]
    return ""


loaded = cache(load_command)


def _try(words: list[str], mention: bool) -> str:
    if words[0].startswith("-"):
        return ""
    if words[0] not in commands():
        return f"there is no command {words[0]}"
    command, name, rest = loaded(words[0]), words[0], words[1:]
    while getattr(command, "commands", None):
        if not rest:
            return ""
        if rest[0] not in command.commands:
            return f"{name} has no {rest[0]}"
        command, name, rest = command.commands[rest[0]], rest[0], rest[1:]
    try:
        given = command.make_context(name, list(rest)).params
    except typer.Exit:  # --help
        return ""
    except typer.TyperException as error:
        needs = re.match(
            r"Missing (argument|parameter)|Option .* requires an argument", error.format_message()
        )
        return "" if mention and needs else error.format_message()
    return _values(given)


def _values(given: dict[str, Any]) -> str:
    try:
        if given.get("sets"):
            load_config([], given["sets"], {})
        compile_filter(given.get("filter") or "")
    except AgentRLError as error:
        return error.message
    return ""


def test_every_command_that_a_text_names_can_be_typed() -> None:
    found, wrong = 0, []
    for place, text, mention in texts():
        for line in commands_in(text) if "agentrl " in text else ():
            found += 1
            if problem := problem_of(line, mention):
                wrong.append(f"{place}: {line!r}: {problem}")
    assert not wrong, "\n".join(wrong)
    assert found > 500


def test_every_setting_that_a_text_names_exists() -> None:
    found, wrong = 0, []
    for place, text, mention in texts():
        for match in SETTING.finditer(text) if not FOREIGN.match(place) and " " in text else ():
            key, value = match[1], (match[2] or "")[1:].rstrip(".'\"")
            known = key in OTHER or key.rpartition(".")[2] in FILES
            if not known and (value or not mention):
                found += 1
                if problem := _setting(key, value):
                    wrong.append(f"{place}: {match[0]!r}: {problem}")
    assert not wrong, "\n".join(wrong)
    assert found > 200


def _setting(key: str, value: str) -> str:
    if key not in KEYS and not key.startswith(tuple(f"{name}." for name in KEYS)):
        return "there is no such setting"
    if (
        not value
        or FILLED.search(value)
        or OPEN.search(value)
        or key.startswith(("algo.advantage.", "algo.loss."))
    ):
        return ""
    try:
        load_config([], [f"{key}={value}"], {})
    except AgentRLError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("agentrl ls -f flag:MASK lists them", ["agentrl ls -f flag:MASK lists them"]),
        (
            "Look: agentrl ls -f flag:MASK. Then `agentrl eval`, again",
            ["agentrl eval", "agentrl ls -f flag:MASK"],
        ),
        ("agentrl watch   1   reading …", []),
    ],
)
def test_commands_are_found(text: str, named: list[str]) -> None:
    assert list(commands_in(text)) == named


def test_what_cannot_be_typed_is_a_problem() -> None:
    for line in (
        "agentrl eval A B",
        "agentrl ls -f flg:X",
        "agentrl eval --set algo.lk=0.01",
        "agentrl runs show",
    ):
        assert problem_of(line, mention=True), line
    assert problem_of("agentrl doctor --template", mention=False) and not problem_of(
        "agentrl sft", mention=True
    )
    assert (
        _setting("algo.kl", "k9")
        and _setting("algo.kll", "")
        and not _setting("algo.kl.coef", "0.01")
    )
    assert not _setting("train.checkpointing", "on")  # YAML's `on` is a boolean
