"""A pack of recorded traces: `agentrl init NAME --from traces:FILE`.

Its tasks are the requests, and its tools answer as they did then, by name and arguments; anything else is a miss, the
error `not_recorded` that every count of errors shows. A trace that was scored well is the measure of an attempt.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from math import inf, isfinite
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from agentrl_cli.chat.parse import validate_arguments
from agentrl_cli.errors import DataError, UsageError
from agentrl_cli.plugins.traces.load import traces
from agentrl_cli.plugins.traces.trace import (
    ABOUT,
    UNANSWERED,
    Note,
    Said,
    Trace,
    episode_of,
    group_by_role,
    in_order,
)
from agentrl_cli.rewards.context import RewardContext
from agentrl_cli.rewards.rules import same_number
from agentrl_cli.store.codec import dumps
from agentrl_cli.tools import Tool
from agentrl_cli.types import ROOT, Episode, Message, ToolResult
from agentrl_cli.types.content import content_text

TASK = '''\
"""Requests of recorded traces: tools answer as they did then, and a trace that was scored well is the measure.

`REWARDS` may be replaced by a rule or a judge of your own (docs/formats.md).
"""

from pathlib import Path

from agentrl_cli.plugins.traces.recorded import Recorded

RECORD = Recorded(Path(__file__).with_name("recorded.json"))
TOOLS = RECORD.tools
REWARDS = {"answer": RECORD.answer, "calls": RECORD.calls}
solve = RECORD.solve
'''
SPEC = {
    "rewards": {"answer": {"weight": 1.0, "primary": True}, "calls": {"weight": 0.2}},
    "row": ["recorded"],
}
ASK = (
    "traces:FILE?unscored=right takes such a trace as right, traces:FILE?unscored=skip leaves its request out; or"
    " add a number `score` to each. traces:FILE?score=0.8 takes those with at least this score as right."
)


def add(draft: Any, name: str) -> None:
    """Add the requests of a file's traces to a new pack. Raises UsageError where nothing says what is right."""
    file, _, query = name.partition("?")
    least, unscored = _options(query)
    episodes = _read_graded(file, unscored, draft.notes.append)
    scores = [score for _, score in episodes if score is not None]
    best, answers, schemas = max(scores, default=1.0), list[Any](), dict[str, Any]()
    if least is None:
        least = best if best > 0 else inf
    rows: dict[str, dict[str, Any]] = {}
    low = longer = unfinished = 0
    for trace, score in episodes:
        _learn(trace, answers, schemas)
        right = score >= least if score is not None else unscored == "right"
        path = _main(trace.paths) if right else []
        if row := _row(path, schemas):
            rows.setdefault(dumps(row["prompt"]), row)
            longer += len(row["prompt"]) + len(row["recorded"]) < len(path)
        low += not right
        unfinished += right and row is None
    if low:
        draft.notes.append(
            f"{low} traces only give answers of tools: their score is not at least {least:g}."
            if isfinite(least)
            else f"The best score of {low} traces is {best:g}, which nothing says is right."
        )
    if unfinished:
        draft.notes.append(
            f"{unfinished} traces that are right have no answer in words to their first request."
        )
    if not rows:
        notes = " ".join([*draft.notes[:3], *draft.notes[3:][-2:]])
        said = f"{file} has no request whose trace was scored well. {notes}".strip()
        raise DataError(said, hint=ASK if low else "")
    if longer:
        draft.notes.append(f"{longer} traces go on after their first answer: that is their task.")
    draft.rows, draft.answer, draft.system, draft.spec = (
        [*rows.values()],
        "",
        "",
        {**SPEC, "tools": [*schemas]},
    )
    draft.names = list(schemas)
    draft.files["task.py"] = TASK.encode()
    record = {"tools": [*schemas.values()], "answers": answers}
    draft.files["recorded.json"] = json.dumps(record, ensure_ascii=False, indent=1).encode()


def _read_graded(file: str, unscored: str, note: Note) -> list[tuple[Trace, float | None]]:
    """Return the traces of a file with their scores. Raises UsageError if some have none."""
    if not Path(file).expanduser().is_file():
        raise UsageError(f"No such file: {file}.", hint="agentrl init NAME --from traces:FILE")
    episodes: list[tuple[Trace, float | None]] = []
    for found in traces(Path(file).expanduser(), note):
        one = found if isinstance(found, Trace) else _as_trace(found[0])
        graded = one.reward is not None and isfinite(one.reward)
        episodes.append((one, one.reward if graded else None))
    without = sum(score is None for _, score in episodes)
    if without and not unscored:
        raise UsageError(
            f"{without} of {len(episodes)} traces have no score. Are they right?", hint=ASK
        )
    return episodes


def _options(query: str) -> tuple[float | None, str]:
    """Return the least score of a right trace, and how those without one are taken. Raises UsageError."""
    given = dict(parse_qsl(query, keep_blank_values=True))
    try:
        least = float(given.pop("score")) if "score" in given else None
    except ValueError as error:
        raise UsageError("The score is not a number.", hint=ASK) from error
    unscored = given.pop("unscored", "skip" if least is not None else "")
    if given or unscored not in ("right", "skip", ""):
        raise UsageError(f"{query!r} is not known.", hint=ASK)
    return least, unscored


def _main(paths: Sequence[list[Said]]) -> list[Said]:
    """Return the whole conversation that the first path begins: of spans, each call of the model has a path."""
    if not paths:
        return []

    def begin(path: list[Said]) -> list[Message]:
        return [*takewhile(lambda one: one["role"] != "assistant", (one.message for one in path))]

    wanted = begin(paths[0])
    return max((path for path in reversed(paths) if begin(path) == wanted), key=len)


def _as_trace(episode: Episode) -> Trace:
    turns = episode.chain(episode.main).turns
    said = [Said(_with_calls(message, turn.calls)) for turn in turns for message in turn.messages]
    return Trace(episode.id, [said], reward=episode.reward)


def _with_calls(message: Message, calls: Iterable[Any]) -> Message:
    made = [
        {
            "id": one.id,
            "type": "function",
            "function": {"name": one.name, "arguments": one.arguments},
        }
        for one in calls
        if one.arguments is not None
    ]
    plain = {name: value for name, value in message.items() if name != ABOUT}
    return plain | ({"tool_calls": made} if made and message["role"] == "assistant" else {})


def _row(path: list[Said], schemas: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the first request of a conversation and the messages that answered it; None without an answer.

    Calls that no tool could carry out are left out with their answers: they are nothing to learn or to ask for.
    """
    messages, calls = list[Message](), list[dict[str, Any]]()
    for role, group in group_by_role(path):
        if role == "tool":
            answers = in_order([call["id"] for call in calls], group)
            wrong = [_is_wrong(call, schemas) for call in calls] + [False] * len(answers)
            pairs = zip(answers, wrong, strict=False)
            messages += [one.message for one, left in pairs if one is not None and not left]
            calls = []
            continue
        message = group[0].message
        calls = list(message.get("tool_calls", ()))
        right = [call for call in calls if not _is_wrong(call, schemas)]
        if right or not calls:
            messages.append(message | ({"tool_calls": right} if calls else {}))
    roles = [str(one["role"]) for one in messages]
    first = roles.index("assistant") if "assistant" in roles else 0
    last = roles.index("user", first) if "user" in roles[first:] else len(roles)
    if not first or roles[last - 1] != "assistant" or messages[last - 1].get("tool_calls"):
        return None
    return {"prompt": messages[:first], "recorded": messages[first:last]}


def _is_wrong(call: Mapping[str, Any], schemas: Mapping[str, Any]) -> bool:
    """Whether a recorded call cannot be read, or breaks a schema that the trace has of its tool."""
    function = call["function"]
    schema = schemas.get(function["name"]) or _schema(function["name"])
    known = not schema["function"].get("inferred")
    return "error" in call or bool(known and validate_arguments(schema, function["arguments"]))


def _learn(trace: Trace, answers: list[Any], schemas: dict[str, Any]) -> None:
    """Add the answers of tools, and the schemas of tools, given or as the calls show them."""
    for given in trace.tools:
        function = given.get("function", given) if isinstance(given, dict) else given
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            continue
        shown = function.get("parameters", function.get("input_schema"))
        more = {"parameters": shown, "inferred": False} if isinstance(shown, dict) else {}
        if more or name not in schemas:
            about = {"description": str(function.get("description") or name), **more}
            schemas[name] = {"type": "function", "function": _schema(name)["function"] | about}
    kinds = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    turns = episode_of(trace).turns
    for turn in turns:
        before = turn.index - 1 if turn.parent is None else turn.parent
        calls = turns[before].calls if before != ROOT else ()
        for call, result in zip(calls, turn.results, strict=False):
            if result.error == UNANSWERED or call.error:
                continue
            arguments = call.arguments or {}
            answers.append([call.name, arguments, result.text, result.error])
            known = schemas.setdefault(call.name, _schema(call.name))["function"]
            inferred = known.get("inferred")
            for key, value in arguments.items() if inferred else ():
                shown = {"type": kinds.get(type(value), "string")}
                known["parameters"]["properties"].setdefault(key, shown)


def _schema(name: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    about = {"name": name, "description": name.replace("_", " "), "parameters": parameters}
    return {"type": "function", "function": {**about, "inferred": True}}


class Replayed(Tool):
    """A tool that answers as it did when its calls were recorded."""

    pure = True

    def __init__(self, schema: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
        function = copy.deepcopy(dict(schema["function"]))
        function.pop("inferred", None)
        self.name = function["name"]
        self.schema = {"type": "function", "function": function}
        self._answers = answers

    async def execute(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        found = self._answers.get(_key(self.name, arguments))
        if found is None:
            return ToolResult("Error: no answer to this call was recorded.", error="not_recorded")
        return ToolResult(found[0], error=found[1])


def _key(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the name and arguments as a text that spellings of numbers and of texts do not change."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(value[key]) for key in sorted(value)}
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value.strip().casefold() if isinstance(value, str) else value

    return dumps([name, plain(dict(arguments))])


class Recorded:
    """What a project made of traces knows: `recorded.json`."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text(encoding="utf-8"))
        answers = {
            _key(name, given): (text, error) for name, given, text, error in found["answers"]
        }
        self.tools = [Replayed(schema, answers) for schema in found["tools"]]

    @staticmethod
    def solve(row: Mapping[str, Any]) -> list[Message]:
        """Return the conversation that answered a request."""
        return list(row["recorded"])

    @staticmethod
    def answer(episode: Episode, ctx: RewardContext) -> Any:
        """Return 1 if the last answer is the recorded one: the same words, or the same last number where it has one."""
        assert ctx.task is not None
        wanted = content_text(ctx.task["recorded"][-1].get("content"))
        mine, theirs = _words(ctx.final_text), _words(wanted)
        same = mine == theirs or (
            len(mine) == len(theirs) == 1 and same_number(mine[0].replace(",", ""), theirs[0])
        )
        return ctx.part(
            float(same), f"answered {ctx.final_text[-80:]!r}, recorded {wanted[-80:]!r}"
        )

    @staticmethod
    def calls(episode: Episode, ctx: RewardContext) -> float | None:
        """Return the share of the recorded calls that were made; None where none was."""
        assert ctx.task is not None
        said = (one for message in ctx.task["recorded"] for one in message.get("tool_calls", ()))
        wanted = {_key(one["function"]["name"], one["function"]["arguments"]) for one in said}
        made = {_key(one.name, one.arguments or {}) for turn in episode.turns for one in turn.calls}
        return len(wanted & made) / len(wanted) if wanted else None


def _words(text: str) -> list[str]:
    """Return the last number of a text; its words if it has none."""
    numbers = re.findall(r"-?\d+(?:[.,]\d+)*", text)
    return numbers[-1:] or re.findall(r"\w+", text.casefold())
