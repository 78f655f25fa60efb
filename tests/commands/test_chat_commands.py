"""Every slash command of the chat, on the screen, as a person types it; and calls that are approved one by one."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from agentrl_cli.chat_session.conversation import REFUSED
from agentrl_cli.store import Store
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.screen import ChatScreen
from agentrl_cli.tui.replay.screen import ReplayScreen
from tests.helpers.tui import press, screen_of, until, until_text, visible
from tests.tui.test_chat import CALL, scripted

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
