"""Episodes as ATIF v1.7 trajectories: https://github.com/harbor-framework/harbor/blob/main/rfcs/0001-trajectory-format.md

Each is one JSON object in one line: a file of one episode is a trajectory.json. The main branch is the trajectory, each
other branch an embedded one, in which shared turns are copied context. ATIF's own fields say what they can;
`extra.agentrl` of a step holds its turns whole, with tokens and training signals, and that of the root the episode.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from agentrl_cli._version import __version__
from agentrl_cli.plugins.traces.trace import ABOUT, KIND, Said, in_order
from agentrl_cli.reports.export import episode_object, marks_of, mask_secrets
from agentrl_cli.store import Store
from agentrl_cli.store.codec import dumps
from agentrl_cli.types import Episode, Origin, TrainSignals
from agentrl_cli.types.content import content_text, data_uri, digest, is_image, media_type

VERSION = "ATIF-v1.7"
OWN = "agentrl"
"""The key in `extra` under which this package's records lie."""
REFERENCE = "subagent_trajectory_ref"
REFERENCES = ("trajectory_id", "session_id", "trajectory_path")
USAGE = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
WHOLE = "trajectory"
"""Key in `ABOUT` of the last message of an imported trajectory for what it says of itself."""
TEXTS = ("session_id", "trajectory_id", "notes")
NOTHING: Sequence[Mapping[str, Any]] = ({"depth": 0},)


def lines(store: Store, episode_ids: Sequence[str], masked: bool) -> Iterator[str]:
    """Yield a trajectory for each episode; without token ids if a secret was masked, as they spell it."""
    for episode_id in episode_ids:
        episode, row = store.episodes.get(episode_id), store.episodes.row(episode_id)
        signals = store.signals.get(episode_id)
        yield dumps(trajectory(episode, signals, row.tokenizer, masked, marks_of(row)))


def trajectory(
    episode: Episode,
    signals: TrainSignals | None,
    tokenizer: str = "",
    masked: bool = True,
    marks: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return an episode as a trajectory; `marks`: its split, tags and note."""
    row = episode_object(episode, signals) | dict(marks or {})
    row = mask_secrets(row) if masked else row
    known = {branch: _trajectory_facts(row, branch) for branch in episode.branches}
    main = episode.main.turns
    if episode.kind == KIND:  # the file's own trajectory, not one that continues it
        main = min(known, key=lambda branch: known[branch][0]["depth"], default=main)
    written = set[int]()
    found = _branch(episode, row, main, written, known.get(main, NOTHING)[0])
    found = {"session_id": episode.run_id or episode.id, "trajectory_id": episode.id} | found
    ids, above = {found["trajectory_id"]}, [found]
    whole = {key: value for key, value in row.items() if key not in ("turns", "tokens", "signals")}
    extra = {"reward": row["reward"], "outcome": row["outcome"]}
    found["extra"] = extra | {OWN: {**whole, "tokenizer": tokenizer}}
    for number, branch in enumerate((one for one in known if one != main), 1):
        about = known[branch][-1]
        inner = _branch(episode, row, branch, written, about)
        if inner.get("trajectory_id") in (None, *ids):
            inner["trajectory_id"] = f"{episode.id}/{number}"
        ids.add(inner["trajectory_id"])
        del above[max(1, about["depth"]) :]
        above[-1].setdefault("subagent_trajectories", []).append(inner)
        above.append(inner)
    return found


def _trajectory_facts(row: Mapping[str, Any], branch: Sequence[int]) -> Sequence[Mapping[str, Any]]:
    """Return what the trajectories that end on a branch say of themselves, in order."""
    said = [message for index in branch for message in row["turns"][index]["messages"]]
    found = (mapping(mapping(one.get(ABOUT)).get(WHOLE)) for one in said)
    return [
        facts(one) | {"depth": one["depth"]} for one in found if type(one.get("depth")) is int
    ] or NOTHING


def _branch(
    episode: Episode,
    row: Mapping[str, Any],
    branch: Sequence[int],
    written: set[int],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the turns of a branch as a trajectory. Records are those of turns that no earlier one has."""
    agent = {"name": "agentrl", "version": __version__}
    if episode.kind == KIND:  # another program played it
        agent = {"name": episode.family or "unknown", "version": "unknown"}
    if "agent" in about:
        agent |= about["agent"]
    elif episode.weights_version:
        agent["model_name"] = episode.weights_version
    steps: list[dict[str, Any]] = []
    before = 0
    for index in branch:
        turn, content = episode.turns[index], row["turns"][index]
        copied = index in written
        written.add(index)
        if turn.role == "tool" and steps and "observation" not in steps[-1]:
            _observe(steps[-1], content)
        else:
            fresh = _steps(content, len(steps))
            if turn.role == "assistant":
                fresh[0] |= _answer(content, row, before)
                if turn.weights_version not in ("", agent.get("model_name")):
                    fresh[0]["model_name"] = turn.weights_version
            steps += fresh
        if copied:
            steps[-1]["is_copied_context"] = True
        else:
            steps[-1].setdefault("extra", {OWN: []})[OWN].append(_record(content, row))
        before += turn.end - turn.start
    steps = steps or [{"step_id": 1, "source": "system", "message": ""}]
    own = {name: about[name] for name in (*TEXTS, "final_metrics") if name in about}
    return {"schema_version": VERSION, **own, "agent": agent, "steps": steps}


def facts(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return who made a trajectory, in which session and at which cost, as far as it is well-formed."""
    given = mapping(value.get("agent"))
    agent: dict[str, Any] = texts_in(given, ("name", "version", "model_name"))
    if isinstance(tools := given.get("tool_definitions"), list):
        agent["tool_definitions"] = [one for one in tools if isinstance(one, dict)]
    totals = amounts(mapping(value.get("final_metrics")), "total_", "steps")
    further = {"agent": agent, "final_metrics": totals}
    return texts_in(value, TEXTS) | {name: one for name, one in further.items() if one}


def amounts(given: Mapping[str, Any], prefix: str = "", *further: str) -> dict[str, Any]:
    """Return the usage and cost in metrics; whatever is not an amount is left out."""
    names = [prefix + name for name in (*USAGE, *further)]
    return {
        name: given[name]
        for name in names
        if type(given.get(name)) is int
        or (type(given.get(name)) is float and name.endswith("usd") and math.isfinite(given[name]))
    }


def texts_in(value: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of these names that are texts."""
    return {name: value[name] for name in names if isinstance(value.get(name), str)}


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def _steps(turn: Mapping[str, Any], before: int) -> list[dict[str, Any]]:
    """Return a step for each message of a turn; one for a turn without any."""
    images = {f"sha256:{digest(b64decode(one))}": one for one in turn["images"]}
    source = {"assistant": "agent", "user": "user"}.get(turn["role"], "system")
    steps: list[dict[str, Any]] = []
    for message in turn["messages"] or [{}]:
        own = {"user": "user", "system": "system"}.get(message.get("role"), source)
        step = {
            "step_id": before + len(steps) + 1,
            "source": source if source == "agent" else own,
            "message": _content(message.get("content"), images),
        }
        if stamp := _stamp(turn["started"]):
            step["timestamp"] = stamp
        steps.append(step)
        if source == "agent":  # an answer is one step, whatever it is made of
            break
    if turn["role"] == "tool":
        _observe(steps[-1], turn)
    return steps


def _answer(turn: Mapping[str, Any], row: Mapping[str, Any], before: int) -> dict[str, Any]:
    """Return the fields of an agent's step: reasoning, calls, and its sampled tokens."""
    found: dict[str, Any] = {}
    reasoning = (turn["messages"] or [{}])[0].get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        found["reasoning_content"] = reasoning
    if turn["calls"]:
        found["tool_calls"] = [
            {
                "tool_call_id": call["id"],
                "function_name": call["name"],
                "arguments": call["arguments"] or {},
            }
            | ({"extra": {"error": call["error"], "raw": call["raw"]}} if call["error"] else {})
            for call in turn["calls"]
        ]
    source = mapping((turn["messages"] or [{}])[0].get(ABOUT))
    found |= {name: source[name] for name in ("metrics", "reasoning_effort") if name in source}
    tokens = None if row["kind"] == KIND else row["tokens"]
    if tokens is not None:
        span = range(turn["start"], turn["end"])
        sampled = [place for place in span if tokens["origin"][place] == Origin.MODEL]
        metrics: dict[str, Any] = {"prompt_tokens": before, "completion_tokens": len(sampled)}
        metrics["completion_token_ids"] = [tokens["ids"][place] for place in sampled]
        logps = [tokens["logp_policy"][place] for place in sampled]
        if logps and all(one is not None and math.isfinite(one) for one in logps):
            metrics["logprobs"] = logps
        found["metrics"] = metrics
    return found


def _observe(step: dict[str, Any], turn: Mapping[str, Any]) -> None:
    """Add the results of a tool turn to a step."""
    calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
    texts = [content_text(message.get("content")) for message in turn["messages"]]
    results = [
        {
            "content": _content(result["text"], {}, result["images"]),
            **({"source_call_id": calls[number]} if number < len(calls) else {}),
            **({"extra": {"error": result["error"]}} if result["error"] else {}),
        }
        for number, result in enumerate(turn["results"])
    ]
    step["observation"] = {"results": results or [{"content": text} for text in texts]}
    for result, one in zip(results, in_order(calls, [*map(Said, turn["messages"])]), strict=False):
        if one is not None and REFERENCE in (about := mapping(one.message.get(ABOUT))):
            result[REFERENCE] = about[REFERENCE]


def _record(turn: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn whole, with its part of the arrays; the span follows from their length."""
    span = slice(turn["start"], turn["end"])
    found = {key: value for key, value in turn.items() if key not in ("start", "end")}
    for name in ("tokens", "signals"):
        arrays = row[name] or {}
        found[name] = {key: _exact(array[span]) for key, array in arrays.items() if array}
    return found


def _exact(value: Any) -> Any:
    """Return numbers as JSON has them: infinity as text, an array inside as a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list):
        return [_exact(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _content(content: Any, images: Mapping[str, str], after: Sequence[str] = ()) -> Any:
    """Return a content as text; as parts if it shows images, whose bytes are in base64."""
    parts = content if isinstance(content, list) else []
    shown = [images[name] for part in parts if is_image(part) and (name := part["image"]) in images]
    text = content_text([part for part in parts if not is_image(part)] if shown else content)
    found = [_image(one) for one in (*shown, *after)]
    return [{"type": "text", "text": text}, *found] if found else text


def _image(image: str) -> dict[str, Any]:
    data = b64decode(image)
    return {"type": "image", "source": {"media_type": media_type(data), "path": data_uri(data)}}


def _stamp(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds > 0 else ""
    except (OverflowError, ValueError, OSError):
        return ""
