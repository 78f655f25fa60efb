"""Every slash command of the chat, on the screen, as a person types it; and calls that are approved one by one."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from agentrl_cli.chat_session.conversation import REFUSED, Answer
from agentrl_cli.store import Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.commands import COMMANDS, HELP, parse_command
from agentrl_cli.tui.chat.screen import ChatScreen
from agentrl_cli.tui.chat.transcript import ChatLine
from agentrl_cli.tui.chat.view import event_lines
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.types import Origin, ToolCall
from tests.helpers.tui import press, until, until_text, visible
from tests.tui.test_chat import CALL, session

TWO = CALL + CALL.partition("\n")[2].replace("12*4.5", "6*7")
SAID = ["one", "two", "three", CALL, "four", "five"]
PACK = ["--pack", "calc-task"]


class Chatting:
    def __init__(self, pilot: Pilot[Any], db: Path) -> None:
        self.pilot, self.db = pilot, db

    @property
    def screen(self) -> ChatScreen:
        screen = self.pilot.app.screen
        assert isinstance(screen, ChatScreen)
        return screen

    async def say(self, text: str, then: str = "") -> str:
        self.screen.line.put(text)
        await press(self.pilot, "enter", then=lambda: self.screen.line.text != text)
        await until(self.pilot, lambda: not self.screen.busy or self.screen.asked)
        return await until_text(self.pilot, then) if then else visible(self.pilot.app)

    def turns(self) -> list[dict[str, Any]]:
        return self.screen.transcript.turns


@pytest.fixture
def chatting(tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(replies: list[str], *arguments: str) -> AsyncIterator[Chatting]:
        db, script = tmp_path / "c.db", tmp_path / "replies.json"
        Store.open(db).close()
        script.write_text(json.dumps(replies), "utf-8")
        client = ChatClient(
            ["--model", "scripted", "--script", str(script), "--db", str(db), *PACK, *arguments]
        )
        app = AgentApp(db, lambda reader: ChatScreen(reader, client))
        async with app.run_test(notifications=True, size=(120, 60)) as pilot:
            assert "loading the model" in visible(app)
            await until(pilot, lambda: "your turn" in visible(app))
            yield Chatting(pilot, db)

    return start


async def test_every_command_does_what_it_says(chatting: Callable[..., Any]) -> None:
    async with chatting(SAID) as chat:
        await chat.say("hello", "one")
        await chat.say("/as-user and you?", "two")
        assert [turn["role"] for turn in chat.turns()][1:] == ["user", "assistant"] * 2
        await chat.say("/retry", "three")
        assert chat.turns()[-1]["content"] == "three" and "two" not in [
            turn["content"] for turn in chat.turns()
        ]
        await chat.say("/undo", "3 turns left")
        assert chat.turns()[-1]["content"] == "one"
        await chat.say("12*4.5?", "four")
        assert [turn["role"] for turn in chat.turns()][-3:] == ["assistant", "tool", "assistant"]
        await chat.say("/as-tool 99", "99")  # in the place of what the calculator said
        assert chat.turns()[-2]["content"] == "99"
        assert chat.turns()[-1]["content"] == "five"
        await chat.say("/as-model I say 7.", "I say 7.")
        assert set(chat.turns()[-1]["origin"]) == {int(Origin.FORCED)}
        assert "42" in await chat.say('/call calculator {"expression": "6*7"}', "(by hand)")
        await chat.say("/set temperature 0.5")
        await chat.say("/approve")
        await chat.say("/approve off")


async def test_views_scores_saves_and_replay(chatting: Callable[..., Any]) -> None:
    async with chatting([CALL, "54."]) as chat:
        await chat.say("12*4.5?", "54.")
        for command, shown in (
            ("/tokens", "ids "),
            ("/mask", "TTTT"),
            ("/logprobs", "least likely"),
        ):
            assert shown in await chat.say(command, shown)
            await chat.say(command)  # and off again
            assert chat.screen.transcript.mode == ""
        await chat.say("/context", "CONTEXT")
        assert "CHAT TEMPLATE" in visible(chat.pilot.app) or chat.screen.template
        await chat.say("/context")
        assert "no task" in await chat.say("/reward", "no task to score by")
        await chat.say("/reward 0.5", "REWARD 0.500")
        await chat.say("/save", "saved: agentrl replay")
        await chat.say("/simulate", "no simulated user")
        chat.screen.line.put("/edit")
        await press(
            chat.pilot,
            "enter",
            then=lambda: chat.pilot.app.screen.query_one(ChatLine).text == "12*4.5?",
        )
        chat.screen.line.put("/help")
        await press(chat.pilot, "enter", then="/as-model TEXT")
        await chat.pilot.press("escape")
        await chat.say("/bogus", "no command /bogus")
        chat.screen.line.put("/replay")
        await press(
            chat.pilot, "enter", then=lambda: isinstance(chat.pilot.app.screen, ReplayScreen)
        )
        with Store.open(chat.db, readonly=True) as store:
            assert store.episodes.get("last").kind == "chat"
        await press(chat.pilot, "q", then=lambda: isinstance(chat.pilot.app.screen, ChatScreen))


async def test_edit_puts_back_what_was_said_last_and_nothing_of_the_tasks(
    chatting: Callable[..., Any],
) -> None:
    async with chatting(["one", "two"], "--task", "calc-task/train-0000") as chat:
        first = len(chat.turns())
        assert first
        await chat.say("/edit", "nothing to undo")
        assert chat.screen.line.text == "" and len(chat.turns()) == first
        await chat.say("/as-model I say 7.", "I say 7.")
        chat.screen.line.put("/edit")
        await press(chat.pilot, "enter", then=lambda: chat.screen.line.text == "/as-model I say 7.")


async def test_calls_of_a_turn_are_approved_one_by_one(chatting: Callable[..., Any]) -> None:
    async with chatting([TWO, "done", TWO, "all of it"], "--approve") as chat:
        await chat.say("both?", "call 1 of 2?")
        await chat.say("n", "call 2 of 2?")
        await chat.say("y", "done")
        results = chat.turns()[-2]["results"]
        assert [result["text"] for result in results] == [REFUSED, "42"] and results[0][
            "error"
        ] == "refused"
        await chat.say("again", "call 1 of 2?")
        await chat.say("all", "all of it")
        assert [result["text"] for result in chat.turns()[-2]["results"]] == ["54", "42"]


async def test_replay_waits_until_the_calls_are_decided(chatting: Callable[..., Any]) -> None:
    async with chatting([CALL, "54."], "--approve") as chat:
        await chat.say("12*4.5?", "run this?")
        chat.screen.line.put("/replay")
        await press(chat.pilot, "enter", then="it is sent when the model is done")
        chat.screen.line.put("y")
        await press(
            chat.pilot, "enter", then=lambda: isinstance(chat.pilot.app.screen, ReplayScreen)
        )


@pytest.mark.parametrize(
    ("answers", "texts"),
    [
        ([Answer(True), Answer(False, "x")], ["54", "x"]),
        ([Answer(False, "a", rest=True)], ["a", "a"]),
        ([Answer(False, rest=True)], None),
        ([Answer(True, rest=True)], ["54", "42"]),
    ],
)
async def test_each_call_is_run_refused_or_answered(
    answers: list[Answer], texts: list[str] | None
) -> None:
    given = iter(answers)

    async def approve(calls: tuple[ToolCall, ...]) -> Answer:
        return next(given)

    made, _ = session([TWO, "done"], approve=approve)
    await made.begin()
    await made.user("?")
    if texts is None:
        assert [turn.role for turn in made.turns] == ["user", "assistant"]
    else:
        assert [result.text for result in made.turns[2].results] == texts
        assert [message["content"] for message in made.turns[2].messages] == texts
    await made.undo()
    assert made.turns == []
    await made.talk.close()


def test_help_and_completion_know_every_command() -> None:
    for command in COMMANDS:
        assert command == "/exit" or command in HELP, command
    assert (
        parse_command("/simulate on").values == {"on": True}
        and parse_command("/simulate").values == {}
    )
    assert parse_command("/simulate maybe").problem
    assert parse_command("none", asked=True).values == {"run": False, "rest": True}


def test_an_error_is_named_once() -> None:
    event = {"ev": "turn", "role": "tool", "ids": [1], "origin": [3], "logp": [None], "calls": [], "content": "",
             "results": [{"text": "Traceback\n  line 1", "error": "exception"}]}  # fmt: skip
    shown = [text.plain for text in event_lines(event, TokenTexts(), "", 80)]
    assert shown[1:] == ["  ERROR exception", "  Traceback", "    line 1"]
