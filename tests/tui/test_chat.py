"""Chat: the session's rules about tokens, the child process and its protocol, the line mode and the screen."""

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from agentrl_cli import ByteTokenizer, Store, ToolEnv
from agentrl_cli.chat_session.child import Server, run
from agentrl_cli.chat_session.conversation import REFUSED
from agentrl_cli.chat_session.session import save
from agentrl_cli.commands.chat import _find_trained
from agentrl_cli.errors import PolicyError
from agentrl_cli.store import EvalRow, RunRow
from agentrl_cli.tools import as_tool
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.commands import COMMANDS, HELP, complete, parse_command
from agentrl_cli.tui.chat.screen import ChatScreen
from agentrl_cli.tui.chat.transcript import ChatLine, read_history
from agentrl_cli.tui.chat.view import event_lines, turn_view
from agentrl_cli.tui.common.reader import Reader
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.runs.screen import RunsScreen
from tests.helpers import session
from tests.helpers.cli import Cli
from tests.helpers.train import spawn_well
from tests.helpers.tui import SMALL, press, screen_of, until, until_text, visible

CALL = 'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*4.5"}}\n</tool_call>'


async def serve(
    requests: Sequence[dict[str, Any] | str], *arguments: str
) -> tuple[int, list[dict[str, Any]]]:
    """The child's main loop in this process: what it writes for these requests."""
    lines: asyncio.Queue[str | None] = asyncio.Queue()
    for request in requests:
        lines.put_nowait(request if isinstance(request, str) else json.dumps(request))
    lines.put_nowait(None)
    out = io.StringIO()
    code = await run([*arguments], lines, out)
    return code, [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    return scripted(tmp_path, CALL, "It is 54.")


def scripted(folder: Path, *replies: str) -> list[str]:
    """A model that says this, and a store that is there."""
    Store.open(folder / "c.db").close()
    return [*session.scripted(folder, *replies), "--db", str(folder / "c.db")]


async def test_protocol_says_ready_and_idle_and_survives_nonsense(script: list[str]) -> None:
    requests: list[Any] = [
        {"op": "cancel"},  # as ctrl+x while the model is loading
        "not json",
        {"op": "nope"},
        {"op": "undo"},
        {"op": "set", "max_new_tokens": 0},
        {"op": "set", "temperature": -1},
        {"op": "task", "id": "²"},
        {"op": "reward", "value": "x"},
        {"op": "user", "text": "hi"},
        {"op": "save"},
    ]
    code, events = await serve(requests, *script)
    kinds = [event["ev"] for event in events]
    assert code == 0 and kinds[0] == "ready" and kinds.count("idle") == 9
    assert [event["message"] for event in events if event["ev"] == "error"] == [
        "not a request: Expecting value: line 1 column 1 (char 0)",
        "unknown request 'nope'",
        "There is nothing to undo.",
        "max_new_tokens is not 1 or above.",
        "temperature -1 is not 0 or above.",
        "No task named '²'.",
        "ValueError: could not convert string to float: 'x'",
    ]
    assert "saved" in kinds and "token" in kinds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/no/such/model"], "not found"),
        (["--model", "scripted", "--pack", "calc-tusk"], "calc-tusk"),
        (["--model", "scripted", "--task", "x"], "needs a pack"),
        (["--model", "scripted", "--pack", "calc-task", "--pack", "code-task"], "one pack"),
    ],
)
async def test_a_wrong_model_pack_or_task_is_reported(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    code, events = await serve([], *arguments, "--db", str(tmp_path / "c.db"))
    assert code == 2 and events[-1]["ev"] == "fatal" and said in events[-1]["message"]


async def test_a_system_message_replaces_that_of_a_task_too(script: list[str]) -> None:
    given = ["--pack", "calc-task", "--task", "train-0000", "--system", "Be brief."]
    _, events = await serve([{"op": "task", "id": "train-0001"}], *script, *given)
    turns = [turn for turn in events if turn["ev"] == "turn"]
    shown = [(turn["index"], turn["content"]) for turn in turns if turn["role"] == "system"]
    assert shown == [(0, "Be brief.")] * 2 and turns[1]["role"] == "user"


async def test_a_chat_shows_the_texts_that_the_settings_name(
    script: list[str], tmp_path: Path
) -> None:
    (tmp_path / "agentrl.yaml").write_text("task: {packs: [calc-task], prompts: texts.yaml}\n")
    (tmp_path / "texts.yaml").write_text("system: Short.\ntools.calculator.description: Counts.\n")
    say = {"op": "user", "text": "hi"}
    _, events = await serve([say], *script, "--project", str(tmp_path))
    (first,) = [turn["text"] for turn in events if turn["ev"] == "turn" and not turn["index"]]
    assert "Short." in first and "Counts." in first


async def test_an_answer_that_never_comes_does_not_hang(script: list[str]) -> None:
    server = Server(io.StringIO(), Path("c.db"))
    server.session, _ = session.open_chat([CALL], ToolEnv([as_tool("calculator")]))
    await server.session.begin()
    server.session.options.approve = server.ask
    asking = asyncio.create_task(server.session.user("?"))
    await asyncio.sleep(0)
    lines: asyncio.Queue[str | None] = asyncio.Queue()
    lines.put_nowait(None)
    await server.serve(lines)
    await asking
    assert [turn.role for turn in server.session.turns] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("line", "asked", "op", "values"),
    [
        ("hello /there", False, "user", {"text": "hello /there"}),
        ('/call run {"a": 1}', False, "call", {"name": "run", "arguments": {"a": 1}}),
        ("/reward 0.5", False, "reward", {"value": 0.5}),
        ("/reward", False, "reward", {}),
        ("/as-user and you?", False, "user", {"text": "and you?"}),
        ("/as-model I say 7.", False, "as_model", {"text": "I say 7."}),
        ("/as-tool 99", False, "as_tool", {"text": "99"}),
        ("/retry", False, "retry", {}),
        ("/undo", False, "undo", {}),
        ("/set temperature 0.5", False, "set", {"temperature": 0.5}),
        ("/approve", False, "approve", {"on": True}),
        ("/approve off", False, "approve", {"on": False}),
        ("/simulate on", False, "simulate", {"on": True}),
        ("/simulate", False, "simulate", {}),
        ("y", False, "user", {"text": "y"}),
        ("y", True, "answer", {"run": True}),
        ("none", True, "answer", {"run": False, "rest": True}),
        ("/as-tool 54", True, "answer", {"run": False, "text": "54"}),
        ("  ", False, "", {}),
    ],
)
def test_commands_are_read(line: str, asked: bool, op: str, values: dict[str, Any]) -> None:
    read = parse_command(line, asked=asked)
    assert (read.op, read.values, read.problem) == (op, values, "")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/call run {a}", "not JSON"),
        ('/call run {"a', "starting at column"),
        ("/retri", "/retry"),
        ("/set temperature x", ""),
        ("/set lr 1", ""),
        ("/simulate maybe", ""),
        ("/set max_new_tokens inf", "is not a whole number"),
        ("/set top_k 2.5", "is not a whole number"),
        ("/reward nan", "is not a number"),
    ],
)
def test_mistakes_in_commands_are_named(line: str, problem: str) -> None:
    found = parse_command(line).problem
    assert found and problem in found


def test_help_and_completion_know_every_command() -> None:
    assert [command for command in COMMANDS if command not in f"{HELP} /exit"] == []
    assert [parse_command(line).local for line in ("/words", "/mask")] == ["/words", "/mask"]
    tools = ["calculator", "call_me", "run_python"]
    known = {
        "/unk": ("/unk", []),
        "hello": ("hello", []),
        "/und": ("/undo ", ["/undo"]),
        "/as": ("/as-", ["/as-model", "/as-tool", "/as-user"]),
        "/call ca": ("/call cal", ["calculator", "call_me"]),
        "/set t": ("/set t", ["temperature", "top_k", "top_p"]),
    }
    assert {line: complete(line, tools) for line in known} == known


def test_mask_and_logprobs_show_under_the_tokens() -> None:
    tokenizer = ByteTokenizer()
    event = {"ev": "turn", "role": "assistant", "ids": tokenizer.encode("ok<|im_end|>"), "origin": [4, 4, 5],
             "logp": [-0.01, -3.0, None], "calls": [], "results": [], "content": "ok"}  # fmt: skip
    decoder = TokenTexts(tokenizer.json)
    assert turn_view(event, decoder).texts == ["o", "k", "<|im_end|>"]
    for mode, shown in (
        ("mask", "TTffffffffff"),
        ("logprobs", "_#"),
        ("logprobs", "least likely p 0.0498"),
    ):
        assert any(shown in line.plain for line in event_lines(event, decoder, mode, 60))
    (line,) = event_lines({**event, "again": 2, "calls": [{"raw": "{ oops"}]}, decoder, "", 60)
    assert line.plain == "assistant  2× in a row no call that can be run: { oops"
    failed = {"text": "Traceback\n  line 1", "error": "exception"}
    tool = {**event, "role": "tool", "content": "", "results": [failed]}
    lines = [line.plain for line in event_lines(tool, TokenTexts(), "", 80)]
    assert lines[1:] == ["  ERROR exception", "  Traceback", "    line 1"], "it is named once"


def test_a_chat_by_lines(script: list[str], tmp_path: Path, cli: Cli) -> None:
    call = '/call calculator {"expression": "1+1"}'
    lines = ("what is 12*4.5?", call, "/reward 1", "/save", "/bogus", "/quit")
    given = [word for line in lines for word in ("--say", line)]
    said = cli("chat", "--pack", "calc-task", *script, *given, code=1)
    for shown in (
        "tools: calculator",
        "/task 1 opens the first",
        "▸ calculator",
        "54",
        "It is 54.",
        "(by hand)",
        "person",
        "no command /bogus",
    ):
        assert shown in said, shown
    with Store.open(tmp_path / "c.db", readonly=True) as store:
        last = store.episodes.get("last")
    assert (last.kind, last.reward) == ("chat", 1.0)


def give(text: str) -> None:
    """Give this process its input."""
    sys.stdin = io.StringIO(text)


def test_a_chat_over_a_pipe_that_asks_about_a_call_can_be_left(
    script: list[str], tmp_path: Path
) -> None:
    before = partial(give, "what is 12*4.5?\n/quit\nnever sent\n")
    words = ("chat", "--pack", "calc-task", "--approve", *script)
    said = spawn_well(tmp_path, *words, before=before)
    assert "run this?" in said and "not run" in said
    assert "y, n or" not in said and "never sent" not in said


async def test_a_call_by_hand_is_saved(tmp_path: Path) -> None:
    made, _ = session.open_chat(["hi", "ho"], ToolEnv([as_tool("calculator")]))
    await made.begin()
    await made.user("?")
    await made.call("calculator", {"expression": "6*7"})
    await made.call("calculator", {"nope": 1})
    with Store.open(tmp_path / "s.db") as store:
        saved = save(made, store)
        first, second = store.episodes.row(saved).note.splitlines()
        assert first == "by hand before turn 2: calculator(expression='6*7') → 42"
        assert second.startswith("by hand before turn 2: calculator(nope=1) → bad_arguments")
        store.marks.note(saved, f"mine\n{first}\n{second}")
        await made.user("again")
        await made.call("calculator", {"expression": "1+1"})
        await made.undo()  # the third call came after what is taken back
        save(made, store)
        assert store.episodes.row(saved).note == f"mine\n{first}\n{second}"
        assert len(store.episodes.get(saved).turns) == 2


async def test_a_model_that_cannot_be_loaded_is_shown(tmp_path: Path) -> None:
    Store.open(tmp_path / "c.db").close()
    client = ChatClient(["--model", "scripted", "--task", "x", "--db", str(tmp_path / "c.db")])
    async with AgentApp(tmp_path / "c.db", lambda reader: ChatScreen(reader, client)).run_test(
        size=(80, 24)
    ) as pilot:
        await until_text(pilot, "A task needs a pack")
        await until(pilot, lambda: screen_of(pilot, ChatScreen).over)
        await press(pilot, *"hi", "enter", then="process has ended: /quit goes back")
        assert not screen_of(pilot, ChatScreen).waiting


async def test_keys_answer_while_a_chat_that_was_left_still_ends(tmp_path: Path) -> None:
    """A child that loads a model does not hear `quit`: it is killed after seconds, and when the application ends."""
    Store.open(tmp_path / "c.db").close()
    client = ChatClient(["0", "--bind", "127.0.0.1"], "http.server")
    app = AgentApp(tmp_path / "c.db", RunsScreen)
    async with app.run_test() as pilot:
        chat = ChatScreen(app.reader, client)
        await app.push_screen(chat)
        await until(pilot, lambda: client._process is not None)
        process = client._process
        assert process is not None
        chat.action_back()
        await press(pilot, "question_mark", then="agentrl runs: keys")
        assert process.returncode is None
    assert await process.wait()


async def test_nothing_is_sent_before_the_process_has_started() -> None:
    with pytest.raises(PolicyError, match="has not started"):
        await ChatClient([]).send("cancel")


async def test_lines_typed_while_the_model_loads_history_completion_editing_and_the_exact_ids(
    tmp_path: Path,
) -> None:
    client = ChatClient(scripted(tmp_path, "one", "two", "three"))
    app = AgentApp(tmp_path / "c.db", lambda reader: ChatScreen(reader, client))
    async with app.run_test(notifications=True, size=(3, 40)) as pilot:
        visible(app)  # without a place for "loading the model …"
        await pilot.resize_terminal(*SMALL)
        await pilot.press(*"hi", "ctrl+j", *"you", "enter")
        screen = screen_of(pilot, ChatScreen)
        assert [command.values for command in screen.waiting] == [{"text": "hi\nyou"}]
        await until(pilot, lambda: len(screen.transcript.turns) == 2)
        text = await until_text(pilot, "your turn")
        assert "hi" in text and "you" in text and "one" in text and not screen.waiting
        text = await press(pilot, "f5", then="CONTEXT 14 tokens")
        assert "CHAT TEMPLATE" in text and "<|im_start|>" in text
        await pilot.press("f5", "up")
        line = app.screen.query_one(ChatLine)
        assert line.text == "hi\nyou"
        await pilot.press("up", "up", "down", "down", *["ctrl+u"] * 2)
        line.put("/und")
        await pilot.press("tab")
        assert line.text == "/undo "
        line.put("/edit")
        await press(pilot, "enter", then=lambda: line.text == "hi\nyou")
    kept = tmp_path / "chat-history.jsonl"
    assert kept.stat().st_mode & 0o777 == 0o600 and read_history(kept) == ["hi\nyou", "/edit"]
    later = ChatScreen(Reader(tmp_path / "c.db"), client)
    assert later.history.lines == ["hi\nyou", "/edit"] and later.history.step(-1) == "/edit"
    kept.write_text("{")
    assert read_history(kept) == [] == read_history(tmp_path / "none")


def test_a_best_checkpoint_without_training_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.db"
    assert _find_trained(path, None) is None
    with Store.open(path) as store:
        run = store.runs.add(RunRow("", "fox"))
        for step, kind in ((0, "best"), (4, "last")):
            store.runs.add_checkpoint(run.id, step, tmp_path, {}, kind)
        store.runs.add_eval(EvalRow(run.id, 4, pass_rate=0.1, n_tasks=4))
    assert _find_trained(path, None) == "fox@best"
    assert "no later evaluation is better. fox@last has step 4" in capsys.readouterr().err
    assert _find_trained(path, ["model.name=tiny"]) is None


def test_a_project_with_a_server_talks_to_it(cli: Cli) -> None:
    (cli.folder / "agentrl.yaml").write_text("task: {packs: [calc-task]}\n")
    more = "remote: {backend: openai, url: 'http://127.0.0.1:9/v1'}\n"
    (cli.folder / "more.yaml").write_text(more)
    said = "127.0.0.1:9/v1 cannot be reached"
    assert said in cli("chat", "--plain", "--say", "hi", "-c", "more.yaml", code=1)


# --- every command of the screen, as a person types it; and calls that are approved one by one ---

TWO = CALL + CALL.partition("\n")[2].replace("12*4.5", "6*7")


class Chatting:
    def __init__(self, pilot: Pilot[Any], db: Path) -> None:
        self.pilot, self.db = pilot, db

    @property
    def screen(self) -> ChatScreen:
        return screen_of(self.pilot, ChatScreen)

    @property
    def turns(self) -> list[dict[str, Any]]:
        return self.screen.transcript.turns

    async def say(self, text: str, then: str = "") -> str:
        await self.enter(text, lambda: self.screen.line.text != text)
        await until(self.pilot, lambda: not self.screen.busy or self.screen.asked)
        return await until_text(self.pilot, then) if then else visible(self.pilot.app)

    async def enter(self, text: str, then: str | Callable[[], bool]) -> None:
        self.screen.line.put(text)
        await press(self.pilot, "enter", then=then)

    def replays(self) -> bool:
        return isinstance(self.pilot.app.screen, ReplayScreen)


@pytest.fixture
def chatting(tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(replies: list[str], *arguments: str) -> AsyncIterator[Chatting]:
        client = ChatClient([*scripted(tmp_path, *replies), "--pack", "calc-task", *arguments])
        app = AgentApp(tmp_path / "c.db", lambda reader: ChatScreen(reader, client))
        async with app.run_test(notifications=True, size=(120, 60)) as pilot:
            assert "loading the model" in visible(app)
            await until_text(pilot, "your turn")
            yield Chatting(pilot, tmp_path / "c.db")

    return start


async def test_views_scores_saves_and_replay(chatting: Callable[..., Any]) -> None:
    async with chatting([CALL, "54."]) as chat:
        await chat.say("12*4.5?", "54.")
        for command, shown in (
            ("/tokens", "ids "),
            ("/mask", "TTTT"),
            ("/logprobs", "least likely"),
        ):
            await chat.say(command, shown)
            await chat.say(command)  # and off again
            assert chat.screen.transcript.mode == ""
        for command, shown in (
            ('/call calculator {"expression": "6*7"}', "(by hand)"),
            ("/context", "CONTEXT"),
            ("/context", ""),
            ("/reward", "no task to score by"),
            ("/reward 0.5", "REWARD 0.500"),
            ("/save", "saved: agentrl replay"),
            ("/simulate", "no simulated user"),
        ):
            await chat.say(command, shown)
        await chat.enter("/edit", lambda: chat.screen.line.text == "12*4.5?")
        await chat.enter("/help", "/as-model TEXT")
        await chat.pilot.press("escape")
        await chat.say("/bogus", "no command /bogus")
        await chat.enter("/replay", chat.replays)
        with Store.open(chat.db, readonly=True) as store:
            assert store.episodes.get("last").kind == "chat"
        await press(chat.pilot, "q", then=lambda: not chat.replays())


async def test_edit_puts_back_what_was_said_last_and_nothing_of_the_tasks(
    chatting: Callable[..., Any],
) -> None:
    async with chatting(["one", "two"], "--task", "calc-task/train-0000") as chat:
        first = len(chat.turns)
        await chat.say("/edit", "nothing to undo")
        assert chat.screen.line.text == "" and len(chat.turns) == first > 0
        called = CALL.replace("\n", " ").replace("12*4.5", r"12\\n*4.5")
        for said, shown in (("/as-model I say 7.", "I say 7."), ("/as-model " + called, "two")):
            await chat.say(said, shown)
            ran = [one["arguments"] for turn in chat.turns for one in turn["calls"]]
            assert ran == [{"expression": "12\n*4.5"}] * (shown == "two")
            await chat.enter("/edit", lambda said=said: chat.screen.line.text == said)


async def test_calls_of_a_turn_are_approved_one_by_one(chatting: Callable[..., Any]) -> None:
    replies = [TWO, "done", TWO, "all of it", TWO, "so", TWO, CALL, "54."]
    async with chatting(replies, "--approve") as chat:
        for answers, wanted in (
            ([("n", "call 2 of 2?"), ("y", "done")], [REFUSED, "42"]),
            ([("all", "all of it")], ["54", "42"]),
            ([("/as-tool 99", "call 2 of 2?"), ("none", "so")], ["99", REFUSED]),
        ):
            await chat.say("both?", "call 1 of 2?")
            for answer, shown in answers:
                await chat.say(answer, shown)
            results = chat.turns[-2]["results"]
            assert [result["text"] for result in results] == wanted
            assert all((one["error"] == "refused") == (one["text"] == REFUSED) for one in results)
        await chat.say("both?", "call 1 of 2?")
        await chat.say("none")
        assert chat.turns[-1]["role"] == "assistant" and not chat.screen.asked
        await chat.say("12*4.5?", "run this?")
        await chat.enter("/replay", "it is sent when the model is done")
        await chat.enter("y", chat.replays)
