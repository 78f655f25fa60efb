"""A pack of recorded traces: requests, tools that answer as they did, and a reward from what was scored well."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Outcome, Store, load_pack
from agentrl_cli.errors import NotFound
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.plugins.traces.load import load
from agentrl_cli.sft.from_store import choose
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.replay.screen import ReplayScreen
from benchmarks.traces import traces
from tests.helpers.chat import call
from tests.helpers.cli import Cli
from tests.helpers.packs import play
from tests.helpers.tui import press, showing, visible
from tests.plugins.traces.test_atif import SUB_AGENTS
from tests.plugins.traces.test_otlp import FORMS


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)))


async def test_a_planted_set(cli: Cli, tmp_path: Path) -> None:
    rows = traces(30)
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
    assert (await play(pack, [call("look", q="x"), "It is 42."])).reward == 1.2


def test_it_asks_where_no_trace_says_what_is_right(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", [{"messages": row["messages"]} for row in traces(20)])
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
