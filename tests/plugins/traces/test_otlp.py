"""Traces of production come in: OTLP made by the SDK, OpenInference, Phoenix, Langfuse, session logs, rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.plugins.traces.load import traces
from agentrl_cli.plugins.traces.trace import Trace, episode_of
from tests.helpers.cli import Cli

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

    return [{"key": key, "value": value(one)} for key, one in given.items()]


def parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as the GenAI conventions have it."""
    found: list[Any] = [{"type": "text", "content": message["content"]}] * bool(message["content"])
    if message["role"] == "tool":
        found = [{"type": "tool_call_response", "id": "c1", "response": message["content"]}]
    for call in message.get("tool_calls", ()):
        given = json.loads(call["function"]["arguments"])
        found.append({"type": "tool_call", "id": call["id"], "name": "look", "arguments": given})
    return {"role": message["role"], "parts": found}


def span(start: int, **given: Any) -> dict[str, Any]:
    times = {"startTimeUnixNano": f"{start}000000000", "endTimeUnixNano": f"{start + 1}500000000"}
    return {
        "traceId": "a" * 32,
        "spanId": f"{start:016d}",
        **times,
        "attributes": attributes(**given),
    }


def genai(structured: bool) -> dict[str, Any]:
    """Two model calls and a tool between them, with an evaluation."""

    def messages(found: list[dict[str, Any]]) -> Any:
        return (
            [parts(one) for one in found]
            if structured
            else json.dumps([parts(one) for one in found])
        )

    op, asked, said = "gen_ai.operation.name", "gen_ai.input.messages", "gen_ai.output.messages"
    model = {"gen_ai.request.model": "gpt-x", "gen_ai.usage.input_tokens": 7}
    spans = [
        span(100, **{op: "invoke_agent", "gen_ai.agent.name": "finder"}),
        span(101, **{op: "chat", asked: messages(CHAT[:2]), said: messages(CHAT[2:3]), **model}),
        span(103, **{op: "execute_tool", "gen_ai.tool.call.id": "c1", "gen_ai.tool.name": "look"}),
        span(105, **{op: "chat", asked: messages(CHAT[:4]), said: messages(CHAT[4:]), **model}),
    ]
    spans[0]["events"] = [
        {"name": "gen_ai.evaluation.result", "attributes": attributes(**{SCORE: 1.0})}
    ]
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans[::-1]}]}]}


SCORE = "gen_ai.evaluation.score.value"


def openinference(nested: bool) -> list[dict[str, Any]]:
    """Phoenix's spans: flattened names as instrumentations write them, or nested as Phoenix returns them."""

    def message(one: dict[str, Any]) -> dict[str, Any]:
        kept = {key: item for key, item in one.items() if key != "tool_calls" and item}
        calls = [{"tool_call": call} for call in one.get("tool_calls", ())]
        return {"message": kept | ({"tool_calls": calls} if calls else {})}

    rows = []
    for number, (asked, said) in enumerate(((CHAT[:2], CHAT[2:3]), (CHAT[:4], CHAT[4:]))):
        inputs, outputs = [message(one) for one in asked], [message(one) for one in said]
        given: dict[str, Any] = {"llm": {"input_messages": inputs, "output_messages": outputs}}
        if not nested:
            given = flatten(inputs, "llm.input_messages") | flatten(outputs, "llm.output_messages")
        rows.append(
            {
                "name": "ChatCompletion",
                "context": {"trace_id": "t", "span_id": str(number)},
                "span_kind": "LLM",
                "start_time": f"2026-01-01T00:00:0{number}Z",
                "end_time": f"2026-01-01T00:00:0{number + 1}Z",
                "attributes": given,
                "annotations": [{"name": "user", "result": {"score": 1}}] * number,
            }
        )
    return rows


def flat(openllmetry: bool) -> dict[str, Any]:
    """Spans of OpenLLMetry, or of Langfuse's SDK."""
    if not openllmetry:
        asked, said = "langfuse.observation.input", "langfuse.observation.output"
        rows = [{asked: json.dumps(CHAT[:4]), said: json.dumps(CHAT[4])}]
    else:
        bare = {"id": "c1", "name": "look", "arguments": '{"q": "x"}'}
        given = [one | ({"tool_calls": [bare]} if "tool_calls" in one else {}) for one in CHAT]
        rows = [flatten(given[:4], "gen_ai.prompt") | flatten(given[4:], "gen_ai.completion")]
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span(1, reward=1.0, **rows[0])]}]}]}


def events() -> dict[str, Any]:
    """A model call of the GenAI conventions up to 1.36, whose messages are events."""
    given = span(1, reward=1.0, **{"gen_ai.operation.name": "chat"})
    said = [(f"gen_ai.{one['role']}.message", one) for one in CHAT[:4]]
    said += [("gen_ai.choice", {"index": 0, "message": json.dumps(CHAT[4])})]
    given["events"] = [
        {"name": name, "attributes": attributes(**{**one, "content": one.get("content", "")})}
        for name, one in said
    ]
    return {"resourceSpans": [{"scopeSpans": [{"spans": [given]}]}]}


def flatten(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, (list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, one in items for k, v in flatten(one, f"{name}.{key}").items()}
    return {name: value}


def console() -> str:
    """Spans as the SDK prints them, a document after the other, in a file with a byte order mark."""
    rows = openinference(False)
    for row in rows:
        del row["span_kind"]
        row["attributes"]["reward"] = 1
    return "\ufeff" + "\n".join(json.dumps(row, indent=4) for row in rows)


def langfuse() -> dict[str, Any]:
    common = {"traceId": "t", "model": "gpt-x"}
    observations = [
        {"type": "GENERATION", "startTime": "2026-01-01T00:00:01Z", "endTime": "2026-01-01T00:00:02Z",
         "input": CHAT[:2], "output": CHAT[2], **common},
        {"type": "TOOL", "name": "look", "startTime": "2026-01-01T00:00:02Z", "output": "42", **common},
        {"type": "GENERATION", "startTime": "2026-01-01T00:00:03Z", "endTime": "2026-01-01T00:00:04Z",
         "input": {"messages": CHAT[:4]}, "output": {"role": "assistant", "content": "It is 42."}, **common},
    ]  # fmt: skip
    trace = {"id": "t", "timestamp": "2026-01-01T00:00:00Z"}
    return {"trace": trace, "observations": observations, "scores": [{"name": "ok", "value": 1}]}


def claude() -> list[dict[str, Any]]:
    """A session: a summary, an answer in two lines, a tool's result, and a side branch."""
    hm = {"type": "thinking", "thinking": "hm"}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"q": "x"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "42"}],
    }
    said: list[tuple[str, Any, str, str | None]] = [
        ("user", {"role": "user", "content": "Find x."}, "1", None),
        ("assistant", {"id": "m", "role": "assistant", "model": "c", "content": [hm]}, "2", "1"),
        ("assistant", {"id": "m", "role": "assistant", "model": "c", "content": [use]}, "3", "2"),
        ("user", {"role": "user", "content": [result]}, "4", "3"),
        ("assistant", {"id": "n", "role": "assistant", "content": [{"type": "text", "text": "It is 42."}]}, "5", "4"),
        ("user", {"role": "user", "content": "And y?"}, "6", "4"),
    ]  # fmt: skip
    lines = [
        {"type": kind, "message": message, "uuid": id, "parentUuid": parent, "sessionId": "s",
         "timestamp": f"2026-01-01T00:00:0{id}Z"}
        for kind, message, id, parent in said
    ]  # fmt: skip
    return [lines[0], {"type": "summary", "summary": "x"}, *lines[1:]]


def codex() -> list[dict[str, Any]]:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Find x."}]},
        {"type": "function_call", "name": "look", "arguments": '{"q": "x"}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It is 42."}],
        },
    ]
    rows = [
        {"type": "response_item", "timestamp": "2026-01-01T00:00:01Z", "payload": one}
        for one in items
    ]
    return [{"type": "session_meta", "payload": {"id": "s"}}, *rows]


FILES: dict[str, tuple[Any, bool]] = {
    "genai.json": (genai(True), True),
    "genai_text.jsonl": ([genai(False)], True),
    "phoenix.json": (openinference(True), True),
    "openinference.jsonl": (openinference(False), True),
    "langfuse.json": (langfuse(), True),
    "claude.jsonl": (claude(), False),
    "codex.jsonl": (codex(), False),
    "rows.jsonl": ([{"messages": CHAT, "score": 1}], True),
    "openllmetry.json": (flat(True), True),
    "langfuse-sdk.json": (flat(False), True),
    "events.json": (events(), True),
    "api.json": ({"data": openinference(False), "meta": {}}, True),
    "console.json": (console(), True),
}


def write(path: Path, value: Any) -> None:
    lines = value if path.suffix == ".jsonl" else [value]
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts), encoding="utf-8")


@pytest.mark.parametrize("name", FILES)
def test_every_form_is_the_same_episode(cli: Cli, tmp_path: Path, name: str) -> None:
    value, scored = FILES[name]
    write(tmp_path / name, value)
    found = cli.json("replay", name)
    assert "left out" not in cli.err
    said = [message for turn in found["turns"] for message in turn["messages"]]
    texts = [message["content"] for message in said if message["role"] != "system"]
    assert texts[:4] == ["Find x.", "", "42", "It is 42."]
    calls = [call for turn in found["turns"] for call in turn["calls"]]
    assert [(one["name"], one["arguments"], one["id"]) for one in calls] == [
        ("look", {"q": "x"}, "c1")
    ]
    assert found["outcome"] == ("solved" if scored else "ungraded")
    assert len(found["branches"]) == (2 if name == "claude.jsonl" else 1)


@pytest.mark.parametrize("given", (True, False))
def test_a_reward_that_is_true_or_false_is_1_or_0(tmp_path: Path, given: bool) -> None:
    spans, phoenix = genai(True), openinference(True)
    spans["resourceSpans"][0]["scopeSpans"][0]["spans"][-1]["events"][0]["attributes"] = attributes(
        **{SCORE: given}
    )
    phoenix[1]["annotations"][0]["result"]["score"] = given
    langfuse_score = {**langfuse(), "scores": [{"name": "ok", "value": given}]}
    row: dict[str, Any] = {"messages": CHAT, "score": given}
    steps = [{"step_id": 1, "source": "user", "message": "Find x."}]
    atif = {"schema_version": "ATIF-v1.7", "agent": {}, "steps": steps, "extra": {"reward": given}}
    for value in (spans, phoenix, langfuse_score, row, atif):
        write(tmp_path / "x.json", value)
        [found] = traces(tmp_path / "x.json", pytest.fail)
        assert isinstance(found, Trace) and found.reward == float(given)


CALLS = [
    {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
    for id, name in (("c1", "a"), ("c2", "b"))
]


def several(name: str) -> list[dict[str, Any]]:
    """A conversation with two calls in one answer."""
    if name == "rows":
        tools = [
            {"role": "tool", "tool_call_id": f"c{n}", "content": text}
            for n, text in ((2, "B"), (1, "A"))
        ]
        said = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": CALLS}, *tools]
        return [{"messages": [*said, CHAT[4]]}]
    if name == "codex":
        head, asked, _, _, done = codex()
        rows: list[dict[str, Any]] = [
            {"type": "function_call", "name": "a", "arguments": "{}", "call_id": "c1"},
            {"type": "custom_tool_call", "name": "b", "input": "{}", "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "A"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "B"},
        ]
        return [head, asked, *({**asked, "payload": one} for one in rows), done]
    uses = [{"type": "tool_use", "id": f"c{n}", "name": "ab"[n - 1], "input": {}} for n in (1, 2)]
    results = [
        {"type": "tool_result", "tool_use_id": f"c{n}", "content": "AB"[n - 1]} for n in (1, 2)
    ]
    lines: list[tuple[str, Any, str, str | None]] = [
        ("user", {"role": "user", "content": "Find x."}, "1", None),
        ("assistant", {"id": "m", "role": "assistant", "content": uses[:1]}, "2", "1"),
        ("assistant", {"id": "m", "role": "assistant", "content": uses[1:]}, "3", "2"),
        ("user", {"role": "user", "content": results[:1]}, "4", "2"),
        ("user", {"role": "user", "content": results[1:]}, "5", "3"),
        ("system", None, "6", "5"),
        ("assistant", {"id": "n", "role": "assistant", "content": "It is 42."}, "7", "6"),
    ]
    return [
        {"type": kind, "uuid": id, "parentUuid": parent, "sessionId": "s"}
        | ({"message": message} if message else {})
        for kind, message, id, parent in lines
    ]


@pytest.mark.parametrize("name", ["rows", "codex", "claude"])
def test_several_calls_of_one_answer(cli: Cli, tmp_path: Path, name: str) -> None:
    write(tmp_path / "x.jsonl", several(name))
    found = cli.json("replay", "x.jsonl")
    assert len(found["branches"]) == 1
    calls, results = [], []
    for turn in found["turns"]:
        calls += [one["name"] for one in turn["calls"]]
        results += [one["text"] for one in turn["results"]]
    assert (calls, results) == (["a", "b"], ["A", "B"])
    assert found["turns"][-1]["messages"][0]["content"] == "It is 42."


def test_an_answer_belongs_to_its_call(cli: Cli, tmp_path: Path) -> None:
    [row] = several("rows")
    del row["messages"][3]
    write(tmp_path / "x.jsonl", [row])
    found = cli.json("replay", "x.jsonl")
    results = [(one["text"], one["error"]) for turn in found["turns"] for one in turn["results"]]
    assert results == [("", "unanswered"), ("B", None)]


@pytest.mark.parametrize(
    "said", [{"answer": 42}, '{"answer":42}', "[1,2]", [{"a": 1}], {"type": 5}]
)
def test_answers_that_are_documents(cli: Cli, tmp_path: Path, said: Any) -> None:
    given = langfuse()
    given["observations"][1]["output"] = said
    given["observations"][2]["output"] = said
    write(tmp_path / "x.json", given)
    turns = cli.json("replay", "x.json")["turns"]
    text = said if isinstance(said, str) else json.dumps(said, separators=(",", ":"))
    assert turns[-1]["messages"][0]["content"] == text
    given["observations"].pop()
    write(tmp_path / "x.json", given)
    turns = cli.json("replay", "x.json")["turns"]
    assert turns[-1]["results"][0]["text"] == text


def test_tools_of_spans_and_lists_that_are_empty(tmp_path: Path) -> None:
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    given = {
        "gen_ai.tool.definitions": json.dumps(tools),
        "gen_ai.system_instructions": "[]",
        "gen_ai.input.messages": json.dumps([parts(CHAT[1])]),
        "gen_ai.output.messages": "[]",
    }
    (tmp_path / "x.json").write_text(export(span(1, **{"gen_ai.operation.name": "chat", **given})))
    [found] = traces(tmp_path / "x.json", pytest.fail)
    assert isinstance(found, Trace) and found.tools == tools
    assert [one.message["role"] for one in found.paths[0]] == ["user"]


def test_the_times_and_names_of_spans(cli: Cli, tmp_path: Path) -> None:
    given = genai(True)
    spans = given["resourceSpans"][0]["scopeSpans"][0]["spans"]
    del spans[0]  # the last model call
    spans[0]["attributes"] += attributes(**{"gen_ai.tool.call.result": "no such x"})
    spans[0]["status"] = {"code": 2, "message": "timeout"}
    write(tmp_path / "x.json", given)
    found = cli.json("replay", "x.json")
    answer, result = found["turns"][-2:]
    assert (answer["seconds"], answer["weights_version"], found["family"]) == (
        1.5,
        "gpt-x",
        "finder",
    )
    assert (
        result["results"][0]["text"] == "no such x" and result["results"][0]["error"] == "timeout"
    )
    assert result["results"][0]["seconds"] == 1.5


def export(one: dict[str, Any]) -> str:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]})


def tool_spans() -> dict[str, Any]:
    """Two failed runs of a tool, whose calls have no id, by source."""
    said = [*CHAT[:2], {**CHAT[2], "tool_calls": [CALL, {**CALL, "id": "c2"}]}]
    said += [{**CHAT[3], "tool_call_id": id} for id in ("c1", "c2")]
    asked = [{"message": one} for one in said]
    model = {"openinference.span.kind": "LLM"}
    first, last = flatten(asked[:2], "llm.input_messages"), flatten(asked, "llm.input_messages")
    first |= flatten(asked[2:3], "llm.output_messages")
    last |= flatten([{"message": CHAT[4]}], "llm.output_messages")
    schema = {"function": {"name": "look", "parameters": {"type": "object", "required": ["q"]}}}
    first |= flatten([{"tool": {"json_schema": json.dumps(schema)}}], "llm.tools")
    kinds: dict[str, dict[str, Any]] = {
        "openinference": {"openinference.span.kind": "TOOL", "tool.name": "look"},
        "genai": {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look"},
    }
    found: dict[str, Any] = {}
    for name, given in kinds.items():
        runs = [{**span(at, **given), "status": {"code": 2, "message": f"e{at}"}} for at in (3, 5)]
        spans = [span(1, reward=1.0, **model, **first), *runs, span(9, **model, **last)]
        found[name] = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    rows = langfuse()
    rows["observations"][1] |= {"level": "ERROR", "statusMessage": "e3"}
    rows["observations"][1] |= {"endTime": "2026-01-01T00:00:03.5Z"}
    return {**found, "langfuse": rows}


@pytest.mark.parametrize("name", ["openinference", "genai", "langfuse"])
def test_failed_tools_without_call_ids(cli: Cli, tmp_path: Path, name: str) -> None:
    write(tmp_path / "x.json", tool_spans()[name])
    turns = cli.json("replay", "x.json")["turns"]
    found = [(one["error"], one["seconds"]) for turn in turns for one in turn["results"]]
    assert found == [("e3", 1.5), ("e5", 1.5)][: 1 if name == "langfuse" else 2]


def test_arguments_that_are_not_json(cli: Cli, tmp_path: Path) -> None:
    broken = {"id": "c1", "function": {"name": "look", "arguments": "{bad"}}
    write(tmp_path / "x.jsonl", [{"messages": [CHAT[1], {**CHAT[2], "tool_calls": [broken]}]}])
    [call] = cli.json("replay", "x.jsonl")["turns"][1]["calls"]
    assert call["error"] == "its arguments are not JSON"


def test_a_failed_tool_of_a_session(tmp_path: Path) -> None:
    lines = claude()
    lines[-3]["message"]["content"][0]["is_error"] = True
    write(tmp_path / "x.jsonl", lines)
    [found] = traces(tmp_path / "x.jsonl", pytest.fail)
    assert isinstance(found, Trace)
    [failed] = [one.error for turn in episode_of(found).turns for one in turn.results]
    assert failed == "error"


HOSTILE: dict[str, tuple[str, str, int]] = {
    "content": (export(span(1)), "its spans hold no messages", 0),
    "span": (export({"attributes": 5}), "x.jsonl, span 0 is left out: a value in it is of a wrong type.", 0),
    "unknown": (export(span(1, **{"my.messages": "hi"})), "attributes of an unknown form: my.messages", 0),
    "cut": (export(span(1, **{"gen_ai.input.messages": '[{"role":"user"'})), "damaged or cut", 0),
    "shape": ('{"resourceSpans": [{"scopeSpans": 7}]}', "x.jsonl is left out", 0),
    "call": (json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}), "a call has no name", 0),
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
