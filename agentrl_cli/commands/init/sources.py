"""Reads the sources of a new pack: rows, functions, an agent, a service, an MCP server, an environment.

rows.jsonl  .json  .csv  .tsv  .parquet rows of any known form, with their answers
tool.py                                 typed functions with docstrings
agent.py  agent.py:function             a program that calls a model (docs/agents.md)
openapi.json  openapi.yaml              the operations of an HTTP service
mcp:COMMAND …  mcp:http://…             the tools of an MCP server
NAME:PACKAGE  NAME:PACKAGE@TASK         tasks, tools and scorers of another project, if a plugin has its name
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from agentrl_cli.commands.init.draft import Draft
from agentrl_cli.commands.init.functions import ask, tools_in
from agentrl_cli.commands.init.rows import ANSWERS, HOW, distinct, read_rows
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import ConfigError, DataError, NotFound, UsageError
from agentrl_cli.registry import load_file, resolve
from agentrl_cli.registry.adapters import adapt
from agentrl_cli.registry.plugins import offers
from agentrl_cli.reports.reference import FILE, curve_file, describe_bases, project_settings
from agentrl_cli.tasks.beside import files_beside
from agentrl_cli.tasks.called import SPLIT
from agentrl_cli.tasks.sources import FILES

AGENT = {"base_url", "api_key", "emit_reward", "event_url"}
"""Parameters by which a function is recognised as an agent."""
CLIENTS = ("openai", "anthropic")
"""Packages by which a file that runs by itself is recognised as an agent program."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_ROWS = 1000
"""Rows taken of such an environment, which may have no end."""
SELF_PLAY = {"group_size": 2, "prompts_per_step": 32}
"""Settings of `rollout` for games of several players, which are not compared within a group."""
FOREIGN_AGENT = '''\
"""{about}: its own loop, tools and scorers, with the model of this project at `base_url`."""

from pathlib import Path

from {module} import {kind}

HERE = Path(__file__).parent

solve = {kind}({given}).solve
'''
BADGE = Path(__file__).with_name("badge.txt")
OWN = {
    "task.py",
    "test_task.py",
    "task.yaml",
    "agentrl.yaml",
    *(f"data/{split}.jsonl" for split in SPLIT),
}
"""Files that every new pack has."""
LARGEST = 64 * 2**20
"""Bytes of a file that is copied."""
TAKES = "--from takes rows, a .py file, openapi.json or mcp:COMMAND."
TOOL_FILES = "Put typed functions with these names into a file, and add --from tools.py"


def blank(draft: Draft) -> None:
    """A small tool, its questions and its reward, as an example to change."""
    code, _, ask_text = BADGE.read_text(encoding="utf-8").partition("=== ask\n")
    draft.code, draft.asks = code, {"ask_badge": ask_text}
    draft.tools, draft.names = ["badge"], ["badge"]


def add_source(draft: Draft, source: str, python: str = "") -> None:
    """Add what `source` names to the draft; a path is relative to the working folder.

    `python` is the interpreter that has another project's packages; this one without it.
    Raises UsageError or one of its kinds for what cannot be used, EnvError if a file's code fails.
    """
    kind, _, name = source.partition(":")
    if kind in offers("programs"):
        return _foreign(draft, kind, name, python)
    if kind in (readers := offers("sources")):
        resolve("sources", readers, kind)(draft, name)
        return None
    path = Path(kind).expanduser()
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder. Name a file in it; --from can be given several times.",
            hint=f"It is a pack: agentrl init {shlex.quote(kind)} DIR."
            if (path / "task.yaml").is_file()
            else "",
        )
    if not path.is_file():
        is_word = kind.replace("-", "_").isidentifier() and not Path(f"{kind}.py").is_file()
        if name and is_word and not name.startswith("/"):
            raise NotFound.of("kind of source", kind, [*offers("programs"), *readers], hint=TAKES)
        siblings = [str(one) for one in path.parent.iterdir()] if path.parent.is_dir() else []
        raise NotFound.of("file", source, siblings, hint=TAKES)
    if path.suffix == ".py":
        agent = f"{path.name}:{name}" if name else _agent_in(path)
        if not agent:
            return _functions(draft, path)
        draft.agent = agent
        return _copy(draft, path)
    described = None
    with contextlib.suppress(ConfigError):  # `_rows` has the better message for broken JSON
        described = load_yaml(path) if path.suffix == ".json" else None
    service = isinstance(described, dict) and ("openapi" in described or "swagger" in described)
    if service or path.suffix in {".yaml", ".yml"}:
        return _openapi(draft, path)
    if path.suffix in FILES:
        return _rows(draft, path)
    raise UsageError(
        f"{path} is neither rows ({', '.join(FILES)}) nor a .py file nor an OpenAPI description."
    )


def finish(draft: Draft) -> None:
    """Check what only the whole draft shows. Raises UsageError."""
    if draft.rows is None:
        return
    draft.asks, draft.code = {}, ""  # the questions are given, and task.yaml names the tools' files
    draft.rows = distinct(draft.rows, draft.places, draft.answer, draft.notes)
    if not draft.names and not draft.agent:
        draft.notes.append(
            "No tool is given: the model answers alone. Name tools in task.yaml, or add --from tool.py."
        )
    own = sum(
        row["prompt"][0]["role"] == "system" for row in draft.rows if type(row["prompt"]) is list
    )
    if own and draft.answer and not draft.agent:
        draft.notes.append(
            f"In {own} of {len(draft.rows)} rows a system message takes the place of `system` in task.yaml: unless they"
            " ask for a last line `Answer: …`, make `exact` in task.py fit what they ask for."
        )
    wanted = {
        name for row in draft.rows for name in row.get("tools") or () if isinstance(name, str)
    }
    if missing := sorted(wanted - set(draft.names)):
        raise UsageError(
            f"The rows use tools whose code is not given: {', '.join(missing)}.",
            hint=TOOL_FILES + ".",
        )
    if not draft.answer and not draft.agent and "rewards" not in draft.spec:
        fields = sorted({key for row in draft.rows for key in row} - {"prompt"})
        raise UsageError(
            f"The rows have no answer to compare with; their fields: {', '.join(fields)}.",
            hint=f"{HOW} An answer is a text or a number. Or start with --blank and write a reward: `ctx.grade` runs"
            " tests, a judge reads texts (docs/tasks.md).",
        )


def _rows(draft: Draft, path: Path) -> None:
    rows, places = read_rows(path)
    draft.rows = [*(draft.rows or ()), *rows]
    draft.places += places
    usable = (
        name
        for name in ANSWERS
        if all(isinstance(row.get(name), (str, int, float)) for row in draft.rows)
    )
    draft.answer = next(usable, "")


def _functions(draft: Draft, path: Path) -> None:
    tools = tools_in(load_file(path), draft.notes)
    if not tools:
        raise ConfigError(
            f"{path} has no tool.",
            hint="A tool is a function with a docstring and typed parameters. "
            + " ".join(note.removeprefix("Left out: ") for note in draft.notes[:1]),
        )
    _copy(draft, path)
    stem = f"_{len(draft.files)}" if draft.code else ""
    module = f"TOOLS_FILE{stem}"
    draft.code += f'{module} = load_file(Path(__file__).with_name("{path.name}"))\n'
    for tool in tools:
        attribute = getattr(getattr(tool, "function", None), "__name__", "")
        if not attribute or not hasattr(load_file(path), attribute):
            attribute = next(key for key, value in vars(load_file(path)).items() if value is tool)
        draft.tools.append(f"{path.name}:{attribute}")
        draft.names.append(tool.name)
        name, text = ask(tool, f"{module}.{attribute}")
        draft.asks[name] = text


def _agent_in(path: Path) -> str | dict[str, Any]:
    """Return the `agent` that a file is, by its function or as a program; empty if it is none. Runs nothing."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno or 1}: not Python: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not Python: {error}") from error
    for node in tree.body:
        if isinstance(node, FUNCTIONS):
            arguments = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
            if arguments & AGENT and not node.name.startswith("_"):
                return f"{path.name}:{node.name}"
    text = ast.unparse(tree)
    calls = re.search(rf"^\s*(?:import|from) (?:{'|'.join(CLIENTS)})\b", text, re.MULTILINE)
    runs = "__name__ ==" in text or not any(isinstance(one, FUNCTIONS) for one in tree.body)
    return {"command": ["python", path.name]} if calls and runs else ""


def _foreign(draft: Draft, kind: str, name: str, python: str) -> None:
    """`PACKAGE`, `PACKAGE@TASK`, and options after a question mark: `?key=value&key=value`, the values as in YAML."""
    place, _, query = name.partition("?")
    package, _, task = place.replace(".py:", ".py@").partition("@")
    program = resolve("programs", {}, kind)
    if not package or draft.files or draft.rows or draft.tools:
        text = "brings tasks, tools and scorers: it stands alone." if package else "lacks a name."
        raise UsageError(f"--from {kind}: {text}", hint=program.shown)
    options = {
        key: yaml.safe_load(value) for key, value in parse_qsl(query, keep_blank_values=True)
    }
    if options and program.options_under:
        options = {program.options_under: options}
    given: dict[str, Any] = {
        "task": task,
        "python": _path(python, os.sep in python),
        "options": options,
    }
    module, here = package.partition(":")[0].partition(".")[0], Path.cwd()
    if program.imports_here and any((here / f"{module}{end}").exists() for end in ("", ".py")):
        given["folder"] = here
    given = {key: value for key, value in given.items() if value}
    about, named = f"{place} of {kind}", _path(package, package.endswith(".py"))
    made = program(named, **given)
    made.require_models(Path.cwd())
    draft.rows, known = made.rows(MOST_ROWS), made.find_name(name)
    if not draft.rows:
        raise DataError(f"{about} has no tasks.")
    words = [_code(named, draft), *(f"{key}={_code(value, draft)}" for key, value in given.items())]
    text = FOREIGN_AGENT.format(
        about=about,
        given=", ".join(words).replace("'", '"'),
        module=program.__module__,
        kind=program.__name__,
    )
    draft.files["agent.py"] = text.encode()
    draft.answer, draft.agent, draft.system = "", "agent.py:solve", ""
    draft.settings["rollout"] = dict(program.limits)
    if any("players" in row for row in draft.rows):
        draft.settings["rollout"] |= SELF_PLAY
        draft.settings["algo"] = {"advantage": "rae"}
    _add_curves(draft, curve_file(Path(program.worker).parent, known), known)


def _add_curves(draft: Draft, kept: Path, known: str) -> None:
    """Add the reference curves of a source, and the settings that made them, for their model; else what is known."""
    curves = json.loads(kept.read_bytes()) if kept.is_file() else {}
    if curves.get("model") == draft.model:
        draft.files[FILE] = kept.read_bytes()
        for section, values in project_settings(curves).items():
            draft.settings.setdefault(section, {}).update(values)
        return
    if curves:
        before, after = (curves[key]["value"] for key in ("base", "trained"))
        text = f"{curves['model']} learned it, from {before} to {after} solved: --model"
        draft.notes.append(f"{text} {curves['model']}")
    if text := describe_bases(kept.parent, known, draft.model):
        draft.notes.append(text)


def _path(text: str, is_path: bool) -> str | Path:
    """Return the path that a text names, from the root; the last part may be a link. Any other text is itself."""
    if not is_path:
        return text
    path = Path(text).expanduser()
    return path.parent.resolve() / path.name


def _code(value: Any, draft: Draft) -> str:
    """Return a value as agent.py has it. A path beside the project or in it is relative to it, so both can be moved."""
    if not isinstance(value, Path):
        return repr(value)
    target = draft.target.resolve()
    near = value.is_relative_to(target.parent)
    return f"HERE / {os.path.relpath(value, target)!r}" if near else repr(str(value))


def _copy(draft: Draft, path: Path) -> None:
    """Add a file to the pack, with the files beside it that it needs."""
    needed = files_beside(path) if path.suffix == ".py" else []
    for file in (path, *needed):
        name = file.relative_to(path.parent).as_posix()
        if file.stat().st_size > LARGEST:
            draft.notes.append(
                f"{name} is too large to be copied: put it into the project, beside {path.name}."
            )
            continue
        content = file.read_bytes()
        if name in OWN or draft.files.get(name, content) != content:
            raise UsageError(f"The new pack has a {name} of its own.", hint=f"Rename {file}.")
        draft.files[name] = content


def _openapi(draft: Draft, path: Path) -> None:
    made = adapt("service", path)
    if made is None:
        raise ConfigError(f"{path}: no plugin of this installation reads OpenAPI descriptions.")
    entry, names, notes = made
    _copy(draft, path)
    draft.notes += notes
    draft.tools.append(entry)
    draft.names += names
