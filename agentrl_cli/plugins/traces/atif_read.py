"""ATIF trajectories, v1.0 to v1.8, as episodes: exactly where this package wrote them, else from their steps.

Sub-agents and continuations are branches. A file that a trajectory refers to is read if it lies in the same folder.
"""

from __future__ import annotations

import itertools
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Set
from datetime import datetime
from functools import cache
from typing import Any, get_type_hints

import numpy as np
from pydantic import TypeAdapter

from agentrl_cli.plugins.traces.atif_write import (
    OWN,
    REFERENCE,
    REFERENCES,
    WHOLE,
    amounts,
    facts,
    mapping,
    texts_in,
)
from agentrl_cli.plugins.traces.trace import (
    ERRORS,
    Note,
    Said,
    Trace,
    encode_text,
    number_in,
    say,
    tokenizer,
    tool_call,
)
from agentrl_cli.types import TOP_K, Episode, Message, Tokens, TrainSignals, supports

Follow = Callable[[str], list[Any]]
"""Returns the trajectories of a file beside; empty for one that is not there, or was read before."""
INTEGERS = {"ids": np.int32, "top_ids": np.int32, "origin": np.int8, "clipped": np.int8}
SOURCES = {"system": "system", "user": "user", "agent": "assistant"}
Whole = tuple[Episode, TrainSignals | None, str, Mapping[str, Any]]
"""With the tokenizer's hash, and what has the split, the tags and the note."""


def is_atif(value: Any) -> bool:
    """Whether a JSON value is a trajectory."""
    return isinstance(value, dict) and str(value.get("schema_version", "")).startswith("ATIF-v1.")


def read(value: Mapping[str, Any], where: str, note: Note, follow: Follow) -> Trace | Whole:
    """Return a trajectory; whole if this package wrote it."""
    extra = mapping(value.get("extra"))
    if isinstance(extra.get(OWN), dict):
        try:
            return _read_own(value, extra[OWN])
        except ERRORS as error:
            note(f"{where}.extra.{OWN} cannot be used ({say(error)}): read from its steps.")
    found = Trace(value, [*_paths(value, where, note, follow)])
    agent, final = mapping(value.get("agent")), mapping(value.get("final_metrics"))
    found.agent = str(agent.get("name", ""))
    tools = agent.get("tool_definitions")
    found.tools = [one for one in tools if isinstance(one, dict)] if isinstance(tools, list) else ()
    found.reward = reward_in(where, note, extra, final, mapping(final.get("extra")))
    return found


def reward_in(where: str, note: Note, *places: Mapping[str, Any]) -> float | None:
    """Return the first number called reward or score."""
    for place in places:
        for name in ("reward", "score"):
            if (number := number_in(place.get(name))) is not None:
                return number
            if place.get(name) is not None:
                note(f"{where}: the {name} {str(place[name])[:40]!r} is not a number.")
    return None


def _paths(
    value: Mapping[str, Any], where: str, note: Note, follow: Follow, depth: int = 0, main: str = ""
) -> Iterator[list[Said]]:
    """Yield the conversation of a trajectory, then those that it embeds or refers to.

    `main` is the name of the agent whose file it is; turns of others have theirs.
    """
    steps = value.get("steps")
    if not isinstance(steps, list):
        raise ValueError(f"{where}.steps is not a list.")
    path, files = list[Said](), list[str]()
    model = str(mapping(value.get("agent")).get("model_name") or "")
    for number, step in enumerate(steps):
        try:
            path += [*_read_step(step, model, files)]
        except ERRORS as error:
            note(f"{where}.steps[{number}] is left out: {say(error)}.")
    if not path:
        raise ValueError(f"{where} has no step that can be read")
    about = facts(value)
    name = about.get("agent", {}).get("name", "")
    path[-1].about[WHOLE] = about | {"depth": depth}
    main = main if depth else name
    for one in path:
        one.player = name if name != main else ""
    stamps = [(number, one.at) for number, one in enumerate(path) if one.at]
    for (_, at), (number, after) in itertools.pairwise(stamps):
        if after < at:
            note(f"{where}: the clock runs backwards at message {number + 1}.")
            break
    yield path
    inner = value.get("subagent_trajectories")
    inner = inner if isinstance(inner, list) else []
    for text in _mistakes(steps, {str(one.get("trajectory_id")) for one in _mappings(inner)}):
        note(f"{where}.{text}.")
    further = [
        (f"{where}.subagent_trajectories[{number}]", one) for number, one in enumerate(inner)
    ]
    if isinstance(name := value.get("continued_trajectory_ref"), str):
        files.append(name)
    further += [(name, one) for name in files for one in follow(name)]
    for place, one in further:
        try:
            yield from _paths(mapping(one), place, note, follow, depth + 1, main)
        except ValueError as error:
            note(f"{place} is left out: {error}")


def _mistakes(steps: list[Any], inner: Set[Any]) -> Iterator[str]:
    """Yield a clause for the first of each mistake in steps that are read nevertheless."""
    last, calls, said = 0, set[str](), set[str]()
    for number, step in enumerate(map(mapping, steps)):
        id, at = step.get("step_id"), step.get("timestamp")
        own = [str(one.get("tool_call_id")) for one in _mappings(step.get("tool_calls"))]
        results = _mappings(mapping(step.get("observation")).get("results"))
        named = [one for result in results for one in _mappings(result.get(REFERENCE))]
        answered = [one["source_call_id"] for one in results if one.get("source_call_id")]
        agents = [one.get("trajectory_id") for one in named if not one.get("trajectory_path")]
        wrong: dict[str, list[Any]] = {
            "its step_id is not above the one before": [id] * (type(id) is not int or id <= last),
            "its timestamp is not a time": [at] * (at is not None and not stamp(at)),
            "two calls have one id": [one for one in own if one in calls or own.count(one) > 1],
            "it answers a call that it does not make": [
                one for one in answered if str(one) not in own
            ],
            "its sub-agent is not in the file": [
                one for one in agents if one and str(one) not in inner
            ],
        }
        last = id if type(id) is int else last
        calls |= {*own}
        for text in (text for text, values in wrong.items() if values and text not in said):
            said.add(text)
            yield f"steps[{number}]: {text}: {str(wrong[text][0])[:40]!r}"


def _read_step(step: Any, model: str, files: list[str]) -> Iterator[Said]:
    """Yield the messages of a step; add the files of its sub-agents to `files`. Raises ValueError and its like."""
    if (role := SOURCES.get(str(step["source"]))) is None:
        raise ValueError(f"its source is {str(step['source'])[:40]!r}, not system, user or agent")
    message: Message = {"role": role, "content": _content(step["message"])}
    at = stamp(step.get("timestamp"))
    if role == "assistant":
        message |= {key: str(step[key]) for key in ("reasoning_content",) if step.get(key)}
        calls = [
            tool_call(
                str(call["function_name"]), dict(call["arguments"]), str(call["tool_call_id"])
            )
            for call in step.get("tool_calls") or ()
        ]
        message |= {"tool_calls": calls} if calls else {}
        effort = step.get("reasoning_effort")
        metrics = amounts(mapping(step.get("metrics")))
        about = ({"metrics": metrics} if metrics else {}) | (
            {"reasoning_effort": effort} if isinstance(effort, (str, float, int)) else {}
        )
        yield Said(message, at, model=str(step.get("model_name") or model), about=about)
    elif message["content"] or not step.get("observation"):
        yield Said(message, at)
    for result in (step.get("observation") or {}).get("results", ()):
        answer = {"role": "tool", "content": _content(result.get("content") or "")}
        if (id := result.get("source_call_id")) is not None:
            answer["tool_call_id"] = str(id)
        error = mapping(result.get("extra")).get("error")
        named = [texts_in(one, REFERENCES) for one in result.get(REFERENCE) or ()]
        kept = {REFERENCE: named} if named else {}
        yield Said(answer, at, error=str(error) if error else None, about=kept)
        files += [one["trajectory_path"] for one in named if "trajectory_path" in one]


def _content(content: Any) -> str:
    """Return a message's text; an image or a sound by its path."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("its message is neither a text nor a list of parts")
    return "\n".join(
        str(part["text"])
        if part["type"] == "text"
        else f"[{part['type']} {part['source']['path']:.80}]"
        for part in content
    )


def stamp(text: Any) -> float:
    """Return the seconds since the epoch of an ISO 8601 time; 0 for anything else."""
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


@cache
def _adapters() -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(Episode)
    return {name: TypeAdapter(hints[name]) for name in hints if name != "tokens"}


def _read_own(value: Mapping[str, Any], about: Mapping[str, Any]) -> Whole:
    """Return the episode that this package wrote: exactly, or with texts as tokens if masked. Raises ValueError."""
    steps = [step for branch in _branches(value) for step in branch["steps"]]
    records = [one for step in steps for one in step.get("extra", {}).get(OWN, ())]
    records.sort(key=lambda one: one["index"])
    masked = about.get("masked") is True
    texts = [encode_text(one["role"], one["messages"]) for one in records if masked]
    turns, start = list[dict[str, Any]](), 0
    for record in records:
        parent = -1 if record["parent"] is None else record["parent"]
        if record["index"] != len(turns) or parent not in range(-1, len(turns)):
            raise ValueError(f"turn {record['index']} is missing, doubled or before its parent")
        end = start + len(texts[len(turns)] if masked else record["tokens"].get("ids", ()))
        turns.append(_turn(record) | {"start": start, "end": end})
        start = end
    parts = [_null(part, "value", "weight") for part in about["reward_parts"]]
    fields = {**about, "turns": turns, "reward_parts": parts}
    known = {name: one.validate_python(fields[name]) for name, one in _adapters().items()}
    if masked:
        return Episode(**known, tokens=Tokens.concat(texts)), None, tokenizer().hash, about
    tokens = _arrays(Tokens, records, "tokens", start) or Tokens.empty()
    signals = _arrays(TrainSignals, records, "signals", start)
    return Episode(**known, tokens=tokens), signals, str(about["tokenizer"]), about


def _branches(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield value
    for one in value.get("subagent_trajectories", ()):
        yield from _branches(one)


def _turn(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn's fields, images as bytes and NaN where JSON has null."""
    results = [
        result
        | {
            "images": [b64decode(image) for image in result["images"]],
            "metrics": _null(result["metrics"], *result["metrics"]),
        }
        for result in record["results"]
    ]
    images = [b64decode(image) for image in record["images"]]
    kept = {key: item for key, item in record.items() if key not in ("tokens", "signals")}
    return kept | {"results": results, "images": images}


def _null(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {**record, **{name: float("nan") for name in names if record[name] is None}}


def _arrays(kind: type[Any], records: list[Any], name: str, n: int) -> Any:
    """Return the arrays of all turns put together, of `n` tokens; None if no turn has any."""
    given = {key for record in records for key in record[name]}
    if not given:
        return None
    found: dict[str, Any] = {}
    for key in given:
        values = [item for record in records for item in record[name].get(key, ())]
        if len(values) != n:
            raise ValueError(f"{name}.{key} does not have {n} tokens")
        if key == "support":
            found[key] = supports(
                [None if one is None else np.array(one, "i4").reshape(-1) for one in values]
            )
        else:
            dtype = INTEGERS.get(key, np.float32)
            shape = (n, TOP_K) if key.startswith("top_") else (n,)
            exact = np.array(_numbers(values), np.float64 if dtype is np.float32 else dtype)
            found[key] = exact.reshape(shape).astype(dtype)
    return kind(**found)


def _numbers(values: list[Any]) -> list[Any]:
    """Return numbers, of nested lists too: null is NaN, and texts are infinities."""
    return [
        _numbers(item) if isinstance(item, list) else float("nan") if item is None else float(item)
        for item in values
    ]
