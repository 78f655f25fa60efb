"""Traces of production come in: OTLP made by the SDK, OpenInference, Phoenix, Langfuse, session logs, rows.

`forms/` has one conversation with a call of the tool `look` in each form, two calls in one answer, and failed runs of
tools whose calls have no id.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Outcome, Store, load_pack
from agentrl_cli.errors import NotFound
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.plugins.traces.load import load, traces
from agentrl_cli.plugins.traces.trace import Trace, episode_of
from agentrl_cli.sft.from_store import choose
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.replay.screen import ReplayScreen
from benchmarks.traces import traces as planted
from tests.helpers.chat import call
from tests.helpers.cli import Cli
from tests.helpers.packs import play
from tests.helpers.tui import press, showing, visible
from tests.plugins.traces.test_atif import SUB_AGENTS

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


def test_a_session_of_codex_keeps_the_calls_of_its_local_shell(cli: Cli) -> None:
    lines = [json.loads(line) for line in (FORMS / "codex.jsonl").read_text().splitlines()]
    for line in lines:
        if line["payload"].get("type") == "function_call":
            shell = {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}}
            line["payload"] = {"call_id": line["payload"]["call_id"], **shell}
    (cli.folder / "shell.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = cli.json("replay", "shell.jsonl")
    [call] = [call for turn in found["turns"] for call in turn["calls"]]
    assert (call["name"], call["arguments"]) == ("local_shell", shell["action"])
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
    assert one_trace(tmp_path, {"messages": CHAT, "tools": json.dumps(tools)}).tools == tools


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


# --- a pack of recorded traces: requests, tools that answer as they did, a reward from what was scored well ---


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)))


async def test_a_planted_set(cli: Cli, tmp_path: Path) -> None:
    rows = planted(30)
    write(tmp_path / "t.jsonl", rows)
    cli("init", "p", "--from", "traces:t.jsonl", said="only give answers of tools")
    pack = load_pack(tmp_path / "p")
    tasks = [task for split in pack.splits() for task in pack.tasks(split)]
    assert len(tasks) == sum(row["score"] for row in rows)
    task = pack.tasks("train")[0]
    good = next(row for row in rows if row["messages"][1] == task.prompt[1])["messages"]
    asked = good[2]["tool_calls"][0]["function"]
    name, item = asked["name"], json.loads(asked["arguments"])["item"]
    right = [call(name, item=f" {item.upper()} "), f"It is {good[-1]['content']}."]
    episode = await play(pack, right)
    assert episode.outcome is Outcome.SOLVED and episode.reward == 1.2
    miss = await play(pack, [call(name, item="moon"), "Answer: 1"])
    assert miss.outcome is Outcome.FAILED and miss.reward == 0.0
    assert [result.error for turn in miss.turns for result in turn.results] == ["not_recorded"]
    assert pack.module.solve({"recorded": task["recorded"]})[-1]["content"] == good[-1]["content"]


@pytest.mark.parametrize(
    "tools",
    [
        [{"name": "look", "input_schema": {"type": "object", "properties": {"q": {}}}}],
        [
            {"function": "x"},
            {"type": "web_search"},
            {"type": "function", "function": {"name": "look"}},
        ],
    ],
)
async def test_schemas_and_conversations_of_others(
    cli: Cli, tmp_path: Path, tools: list[dict[str, Any]]
) -> None:
    rows = []
    for number in range(3, 13):
        asked = {"id": "c1", "function": {"name": "look", "arguments": {"q": number}}}
        said = [
            {"role": "user", "content": f"Price of {number}?"},
            {"role": "assistant", "content": "", "tool_calls": [asked]},
            {"role": "tool", "tool_call_id": "c1", "content": str(number)},
            {"role": "assistant", "content": f"It is {number}."},
        ]
        more = [{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Bye."}]
        rows.append({"messages": said + more, "tools": tools, "score": 1})
    write(tmp_path / "t.jsonl", [*rows, {"messages": rows[0]["messages"], "score": 10**400}])
    cli("init", "p", "--from", "traces:t.jsonl?unscored=skip", said="10 traces go on after")
    pack = load_pack(tmp_path / "p")
    [tool] = pack.tools
    assert [*tool.schema["function"]["parameters"]["properties"]] == ["q"]
    assert pack.tasks("train")[0]["recorded"][-1]["content"].startswith("It is")
    assert [str(problem) for problem in await check_pack(pack, None)] == []


@pytest.mark.parametrize("source", ["openinference", "genai", "langfuse"])
def test_spans_are_whole_conversations(cli: Cli, tmp_path: Path, source: str) -> None:
    cli("init", "p", "--from", f"traces:{FORMS / f'failed-tools-{source}.json'}")
    pack = load_pack(tmp_path / "p")
    [task] = [task for split in pack.splits() for task in pack.tasks(split)]
    assert [one["role"] for one in task.prompt] == ["system", "user"]
    assert task["recorded"][-1]["content"] == "It is 42."
    given = pack.tools[0].schema["function"]["parameters"]
    assert source == "langfuse" or given["required"] == ["q"]


async def test_answers_in_another_order_and_scores(cli: Cli, tmp_path: Path) -> None:
    def row(number: int) -> dict[str, Any]:
        calls = [
            {"id": name, "function": {"name": name, "arguments": {"q": number}}} for name in "ab"
        ]
        said = [
            {"role": "user", "content": f"{number}?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": id, "content": f"{id} {number}"} for id in "ba"),
            {"role": "assistant", "content": f"It is {number}."},
        ]
        return {"messages": said, "score": number / 100}

    rows = [row(number) for number in range(12)]
    write(tmp_path / "t.jsonl", rows)
    cli("init", "p", "--from", "traces:t.jsonl?score=0.02", said="2 traces only give answers")
    pack = load_pack(tmp_path / "p")
    assert sum(len(pack.tasks(split)) for split in pack.splits()) == 10
    assert [str(problem) for problem in await check_pack(pack, None)] == []
    cut = {"score": 1, "messages": rows[0]["messages"][:2]}
    for given, query, said in (
        ([{**one, "score": 0} for one in rows], "", "The best score of 12 traces is 0"),
        ([cut], "", "1 traces that are right have no"),
        ([cut], "?score=high", "not a number"),
    ):
        write(tmp_path / "t.jsonl", given)
        cli("init", "q", "--from", f"traces:t.jsonl{query}", code=2, said=said)


async def test_calls_that_no_tool_can_carry_out_are_not_asked_for(cli: Cli, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}

    def asked(id: str, arguments: Any) -> dict[str, Any]:
        return {"id": id, "function": {"name": "look", "arguments": arguments}}

    def answer(id: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": id, "content": text}

    said = [
        {"role": "user", "content": "Find x."},
        {"role": "assistant", "content": "Hm.", "tool_calls": [asked("a", '{"q": ')]},
        answer("a", "not JSON"),
        {"role": "assistant", "tool_calls": [asked("b", {}), asked("c", {"q": "x"})]},
        answer("b", "q is missing"),
        answer("c", "42"),
        {"role": "assistant", "content": "It is 42."},
    ]
    tools = [{"function": {"name": "look", "parameters": schema}}]
    write(tmp_path / "t.jsonl", [{"messages": said, "tools": tools, "score": 1}])
    cli("init", "p", "--from", "traces:t.jsonl")
    pack = load_pack(tmp_path / "p")
    first, got, _ = pack.tasks("train")[0]["recorded"]
    assert [one["id"] for one in first["tool_calls"]] == ["c"] and got["content"] == "42"
    assert [str(problem) for problem in await check_pack(pack, None)] == []
    for text, reward in (("It is 42.", 1.2), ("So 42.00", 1.2), ("At 1.2.42", 0.2), ("Yes", 0.2)):
        assert (await play(pack, [call("look", q="x"), text])).reward == reward


def test_it_asks_where_no_trace_says_what_is_right(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", [{"messages": row["messages"]} for row in planted(20)])
    cli("init", "a", "--from", "traces:t.jsonl", code=2, said="20 of 20 traces have no score")
    cli("init", "a", "--from", "traces:t.jsonl?unscored=skip", code=2, said="no request")
    cli("init", "a", "--from", "traces:t.jsonl?unscored=right")
    tools = {tool.name: tool for tool in load_pack(tmp_path / "a").tools}
    assert set(tools) == {"price", "stock"}
    parameters = tools["price"].schema["function"]["parameters"]
    assert parameters["properties"] == {"item": {"type": "string"}}  # as the calls show
    cli("init", "b", "--from", "traces:missing.jsonl", code=2, said="No such file")


# --- commands that look at imported episodes ---


@pytest.fixture
def imported(cli: Cli, tmp_path: Path) -> Cli:
    """A run of an import: one solved, one failed, one without a score."""
    call = {"id": "c", "function": {"name": "look", "arguments": {"q": 1}}}
    asked = {"role": "assistant", "content": "", "reasoning_content": "Let me see."}
    said = [
        {"role": "user", "content": "What is it?"},
        {**asked, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    rows = [
        {"messages": [*said, {"role": "assistant", "content": f"It is {number}."}], **score}
        for number, score in ((4, {"score": 1}), (5, {"score": 0}), (6, dict[str, int]()))
    ]
    write(tmp_path / "rows.jsonl", rows)
    cli("import", "otlp", "rows.jsonl", "--db", "a.db")
    cli.always = ("--db", "a.db")
    return cli


def test_what_is_left_out_is_said(imported: Cli, tmp_path: Path) -> None:
    text = imported("failures")
    assert "1 of 2 attempts (import) failed" in text and "--whatif" not in text and "@t" in text
    left = "are left out: no model of this store sampled their tokens (imported, or never asked)."
    imported("export", "--format", "sequences", "-o", "x.jsonl", said=f"3 of 3 episodes {left}")
    lines: list[str] = []
    with Store.open(tmp_path / "a.db") as store, pytest.raises(NotFound):
        choose(store, "run:rows", "", narrate=lines.append)
    assert lines == [f"2 of 2 episodes {left}"]
    imported("why", "rows", code=2, said="is of the kind import, not a training")


def test_what_cannot_run_again_is_said(imported: Cli) -> None:
    for words in (("--verify",), ("--whatif", "rerun")):
        imported("replay", "last", *words, code=2)
        assert "Nothing of this episode can run again" in imported.err
    imported("replay", "nosuch.json", code=2, said="No file named 'nosuch.json'")


async def test_the_screen_says_forced_and_shows_the_reasoning(
    imported: Cli, tmp_path: Path
) -> None:
    with Store.open(tmp_path / "a.db", readonly=True) as store:
        id = store.episodes.resolve("last")
    app = AgentApp(tmp_path / "a.db", lambda reader: ReplayScreen(reader, id))
    async with showing(app, "TURNS", size=(120, 40)) as pilot:
        text = visible(pilot.app)
        assert "LAYER plain" in text  # nothing was sampled: no marks
        assert re.search(r"\dt forced", text) and not re.search(r"\dt sampled", text)
        await press(pilot, "M", then="Let me see.")


async def test_the_reading_fits_a_small_terminal_and_names_sub_agents(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        [id], _ = load(SUB_AGENTS, store)
    app = AgentApp(tmp_path / "a.db", lambda reader: ReplayScreen(reader, id))
    async with showing(app, "TURN 1", size=(80, 24)) as pilot:
        text = await press(pilot, "M", then="TURN 4 user   helper   another context")
        assert "? keys  q back" in text
