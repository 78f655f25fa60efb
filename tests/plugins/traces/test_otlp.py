"""Traces of production come in: OTLP made by the SDK, OpenInference, Phoenix, Langfuse, session logs, rows.

`forms/` has one conversation with a call of the tool `look` in each form, two calls in one answer, and failed runs of
tools whose calls have no id.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.plugins.traces.load import traces
from agentrl_cli.plugins.traces.trace import Trace, episode_of
from tests.helpers.cli import Cli

FORMS = Path(__file__).with_name("forms")
CALL = {"id": "c1", "function": {"name": "look", "arguments": '{"q": "x"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Find x."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 42."},
]


def attributes(**given: Any) -> list[dict[str, Any]]:
    def value(one: Any) -> dict[str, Any]:
        if isinstance(one, list):
            return {"arrayValue": {"values": [value(item) for item in one]}}
        if isinstance(one, dict):
            return {"kvlistValue": {"values": attributes(**one)}}
        kind = {str: "stringValue", int: "intValue", float: "doubleValue", bool: "boolValue"}[
            type(one)
        ]
        return {kind: str(one) if kind == "intValue" else one}

    return [
        {"key": key, **({} if one is None else {"value": value(one)})} for key, one in given.items()
    ]


def parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without calls as the GenAI conventions have it."""
    return {"role": message["role"], "parts": [{"type": "text", "content": message["content"]}]}


def span(start: int, **given: Any) -> dict[str, Any]:
    return {
        "traceId": "a" * 32,
        "spanId": f"{start:016d}",
        "startTimeUnixNano": f"{start}000000000",
        "endTimeUnixNano": f"{start + 1}500000000",
        "attributes": attributes(**given),
    }


def export(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": [*spans]}]}]}


def form(name: str) -> Any:
    text = (FORMS / name).read_text(encoding="utf-8")
    return [*map(json.loads, text.splitlines())] if name.endswith("l") else json.loads(text)


def one_trace(folder: Path, value: Any) -> Trace:
    """Return the only trace of a document, or of the lines of a list."""
    path = folder / ("x.jsonl" if isinstance(value, list) else "x.json")
    lines = value if isinstance(value, list) else [value]
    path.write_text("\n".join(map(json.dumps, lines)))
    [found] = traces(path, pytest.fail)
    assert isinstance(found, Trace)
    return found


@pytest.mark.parametrize(
    ("name", "scored"),
    [
        ("genai.json", True),  # two model calls and a tool between them, with an evaluation
        ("genai_text.jsonl", True),  # with its messages in a text
        ("events.json", True),  # the GenAI conventions up to 1.36, whose messages are events
        ("openllmetry.json", True),
        ("openinference.jsonl", True),  # flattened names, as instrumentations write them
        ("phoenix.json", True),  # nested, as Phoenix returns them
        ("api.json", True),  # Phoenix's answer over HTTP
        ("console.json", True),  # as the SDK prints them, in a file with a byte order mark
        ("langfuse.json", True),
        ("langfuse-sdk.json", True),
        ("claude.jsonl", False),  # a summary, an answer in two lines, and a side branch
        ("codex.jsonl", False),
        ("rows.jsonl", True),
    ],
)
def test_every_form_is_the_same_episode(cli: Cli, name: str, scored: bool) -> None:
    found = cli.json("replay", str(FORMS / name))
    assert "left out" not in cli.err
    said = [message for turn in found["turns"] for message in turn["messages"]]
    texts = [message["content"] for message in said if message["role"] != "system"]
    assert texts[:4] == ["Find x.", "", "42", "It is 42."]
    thoughts = [one["reasoning_content"] for one in said if "reasoning_content" in one]
    assert thoughts == ["hm"] * (name in ("claude.jsonl", "codex.jsonl"))
    [call] = [call for turn in found["turns"] for call in turn["calls"]]
    assert (call["name"], call["arguments"], call["id"]) == ("look", {"q": "x"}, "c1")
    assert found["outcome"] == ("solved" if scored else "ungraded")
    assert len(found["branches"]) == (2 if name == "claude.jsonl" else 1)


@pytest.mark.parametrize("given", [True, False])
def test_a_reward_that_is_true_or_false_is_1_or_0(tmp_path: Path, given: bool) -> None:
    evaluation = {"gen_ai.evaluation.score.value": given}
    scored = {"name": "gen_ai.evaluation.result", "attributes": attributes(**evaluation)}
    chat = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": [parts(CHAT[1])]}
    [*_, last] = form("phoenix.json")
    steps = [{"step_id": 1, "source": "user", "message": "Find x."}]
    values: list[Any] = [
        export({**span(1, **chat), "events": [scored]}),
        [{**last, "annotations": [{"name": "user", "result": {"score": given}}]}],
        {**form("langfuse.json"), "scores": [{"name": "ok", "value": given}]},
        {"messages": CHAT, "score": given},
        {"schema_version": "ATIF-v1.7", "agent": {}, "steps": steps, "extra": {"reward": given}},
    ]
    assert [one_trace(tmp_path, value).reward for value in values] == [float(given)] * 5


@pytest.mark.parametrize("name", ["rows", "codex", "claude"])
def test_several_calls_of_one_answer(cli: Cli, name: str) -> None:
    found = cli.json("replay", str(FORMS / f"two-calls-{name}.jsonl"))
    assert len(found["branches"]) == 1
    calls = [one["name"] for turn in found["turns"] for one in turn["calls"]]
    results = [one["text"] for turn in found["turns"] for one in turn["results"]]
    assert (calls, results) == (["a", "b"], ["A", "B"])
    assert found["turns"][-1]["messages"][0]["content"] == "It is 42."


def results_of(trace: Trace) -> list[tuple[str, str | None]]:
    return [(one.text, one.error) for turn in episode_of(trace).turns for one in turn.results]


def test_calls_without_an_answer_or_with_a_wrong_one(tmp_path: Path) -> None:
    [row] = form("two-calls-rows.jsonl")
    del row["messages"][3]
    assert results_of(one_trace(tmp_path, row)) == [("", "unanswered"), ("B", None)]
    lines = form("claude.jsonl")
    lines[-3]["message"]["content"][0]["is_error"] = True
    assert [error for _, error in results_of(one_trace(tmp_path, lines))] == ["error"]
    broken = {"id": "c1", "function": {"name": "look", "arguments": "{bad"}}
    row = {"messages": [CHAT[1], {**CHAT[2], "tool_calls": [broken]}]}
    [call] = episode_of(one_trace(tmp_path, row)).turns[1].calls
    assert call.error == "its arguments are not JSON"
    old = {"name": "look", "arguments": '{"q": "x"}'}  # before OpenAI had `tools`
    asked = {"role": "assistant", "content": None, "function_call": old}
    row = {"messages": [CHAT[1], asked, {"role": "function", "name": "look", "content": "A"}]}
    found = one_trace(tmp_path, row)
    assert results_of(found) == [("A", None)]
    assert episode_of(found).turns[1].calls[0].arguments == {"q": "x"}


@pytest.mark.parametrize(
    "said", [{"answer": 42}, '{"answer":42}', "[1,2]", [{"a": 1}], {"type": 5}]
)
def test_answers_that_are_documents(tmp_path: Path, said: Any) -> None:
    given = form("langfuse.json")
    for one in given["observations"][1:]:
        one["output"] = said
    text = said if isinstance(said, str) else json.dumps(said, separators=(",", ":"))
    answered = episode_of(one_trace(tmp_path, given)).turns[-1]
    assert answered.messages[0]["content"] == text
    given["observations"].pop()
    assert results_of(one_trace(tmp_path, given)) == [(text, None)]


def test_tools_of_spans_and_lists_that_are_empty(tmp_path: Path) -> None:
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    given = {
        "gen_ai.operation.name": "chat",
        "gen_ai.tool.definitions": json.dumps(tools),
        "gen_ai.system_instructions": "[]",
        "gen_ai.input.messages": [{**parts(CHAT[1]), "name": None}],
        "gen_ai.output.messages": "[]",
    }
    found = one_trace(tmp_path, export(span(1, **given)))
    assert found.tools == tools
    assert [one.message["role"] for one in found.paths[0]] == ["user"]


def test_the_times_and_names_of_spans(tmp_path: Path) -> None:
    given = form("genai.json")
    spans = given["resourceSpans"][0]["scopeSpans"][0]["spans"]
    del spans[0]  # the last model call
    spans[0]["attributes"] += attributes(**{"gen_ai.tool.call.result": "no such x"})
    spans[0]["status"] = {"code": 2, "message": "timeout"}
    episode = episode_of(one_trace(tmp_path, given))
    *_, answer, result = episode.turns
    assert (answer.seconds, answer.weights_version, episode.family) == (1.5, "gpt-x", "finder")
    [found] = result.results
    assert (found.text, found.error, found.seconds) == ("no such x", "timeout", 1.5)


@pytest.mark.parametrize("name", ["openinference", "genai", "langfuse"])
def test_failed_tools_without_call_ids(cli: Cli, name: str) -> None:
    turns = cli.json("replay", str(FORMS / f"failed-tools-{name}.json"))["turns"]
    found = [(one["error"], one["seconds"]) for turn in turns for one in turn["results"]]
    assert found == [("e3", 1.5), ("e5", 1.5)][: 1 if name == "langfuse" else 2]


HOSTILE: dict[str, tuple[str, str, int]] = {
    "content": (json.dumps(export(span(1))), "its spans hold no messages", 0),
    "span": (json.dumps(export({"attributes": 5})), "x.jsonl, span 0 is left out: a value in it is of a", 0),
    "unknown": (json.dumps(export(span(1, **{"my.messages": "hi"}))), "attributes of an unknown form: my.messages", 0),
    "cut": (json.dumps(export(span(1, **{"gen_ai.input.messages": '[{"role":"user"'}))), "damaged or cut", 0),
    "shape": ('{"resourceSpans": [{"scopeSpans": 7}]}', "x.jsonl is left out", 0),
    "call": (json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}), "a call has no name", 0),
    "empty": ('{"messages": []}', "it has no message", 0),
    "role": (json.dumps({"messages": [{"role": "robot", "content": "a"}]}), "the role 'robot' is not known", 1),
    "score": (json.dumps({"messages": CHAT, "score": "1"}), "the score '1' is not a number", 1),
    "only a circle": (
        "\n".join(
            json.dumps({"type": "user", "uuid": a, "parentUuid": b, "sessionId": "s", "message": {"content": "x"}})
            for a, b in (("1", "2"), ("2", "1"))
        ),
        "Session s is left out",
        0,
    ),
    "circle": (
        "\n".join(
            json.dumps({"type": "user", "uuid": a, "parentUuid": b, "sessionId": "s", "message": {"content": "x"}})
            for a, b in (("1", "2"), ("2", "1"), ("3", "1"))
        ),
        "",
        1,
    ),
    "one good": (
        json.dumps({"messages": CHAT}) + "\n{broken\n" + json.dumps({"messages": CHAT[:2]}) + "\n[1]\n",
        "x.jsonl:2 is left out",
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_traces(cli: Cli, tmp_path: Path, name: str) -> None:
    text, said, count = HOSTILE[name]
    (tmp_path / "x.jsonl").write_text(text)
    cli("import", "otlp", "x.jsonl", "--db", "s.db", code=0 if count else 2, said=said)
    assert count or not (tmp_path / "s.db").exists()
    if count:
        assert len(cli.json("ls", "--db", "s.db")) == count
        assert "\x1b" not in cli("replay", "last", "--plain", "--db", "s.db")
