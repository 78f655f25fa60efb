"""A live episode rolls back to turn k, its world with it: in the environment, a chat, a what-if."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest

from agentrl_cli.envs.tool_env import AssistantTurn, ToolEnv
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tools import as_tool
from agentrl_cli.types import Message, Task, ToolCall
from tests.helpers.sandbox import open_sandbox
from tests.helpers.session import open_chat

TASK = Task("pack/1", "pack", "", "train", ({"role": "user", "content": "?"},))
SENT: list[str] = []


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with await open_sandbox(workers=1) as opened:
        yield opened


def send(text: str) -> str:
    """Send a text to someone outside.

    Args:
        text: What to send.
    """
    SENT.append(text)
    return "sent"


class User:
    """Says the number of times it was asked, and rewards that."""

    asked = 0

    async def start(self, task: Task) -> None:
        self.asked = 0

    async def reply(self, messages: Sequence[Message]) -> tuple[str | None, float | None]:
        self.asked += 1
        return str(self.asked), 1.0

    async def stop(self) -> None:
        self.asked = -1


async def answer(env: ToolEnv, index: int, name: str, **arguments: Any) -> str:
    call = ToolCall("c", name, arguments, "")
    return (await env.step(AssistantTurn("", (call,), index))).results[0].text


@pytest.mark.parametrize("keep", [4, 0])
async def test_an_environment_rolls_back_to_before_a_turn(sandbox: Sandbox, keep: int) -> None:
    tools = [as_tool(name) for name in ("run_python", "bash", "files", "submit", "calculator")]
    env = ToolEnv(tools, open_session=partial(sandbox.session, keep=keep), setup="x = 0")
    await env.reset(TASK)
    await answer(env, 0, "calculator", expression="1 + 1")
    assert await answer(env, 1, "run_python", code="x += 1; x") == "1"
    await answer(env, 2, "bash", command="echo a > f")
    await answer(env, 3, "submit", answer="first")
    await answer(env, 3, "files", action="write", path="g", text="b")
    assert env.context.state == {"answer": "first"}

    assert await env.back(3) == () and env.context.state == {}
    assert await answer(env, 3, "bash", command="ls; cat f") == "f\na"
    assert await env.back(2) == ()
    assert (
        await answer(env, 2, "run_python", code="import os; x, os.listdir('.')")
        == "(1, ['.shm', '.tmp'])"
    )
    assert await env.back(0) == ()  # before the session was opened: its set-up stays
    assert await answer(env, 0, "run_python", code="x") == "0"
    assert await env.back(5) == ()
    await env.close()


async def test_what_cannot_be_taken_back_is_said() -> None:
    SENT.clear()
    env = ToolEnv([as_tool(send), as_tool("calculator")], interaction=User())
    await env.reset(TASK)
    await env.step(AssistantTurn("hello", (), 0))
    await answer(env, 1, "send", text="hi")
    await answer(env, 2, "calculator", expression="2")
    assert [(part.name, part.value) for part in await env.rewards()] == [("interaction", 1.0)]
    assert await env.back(2) == ()
    assert await env.back(1) == ("what send did stays done",)
    assert (
        await env.back(0) == ("what the simulated user did stays done",)
        and await env.rewards() == ()
    )
    assert SENT == ["hi"]
    await env.close()


def python(code: str) -> str:
    call = json.dumps({"name": "run_python", "arguments": {"code": code}})
    return f"<tool_call>\n{call}\n</tool_call>"


async def test_undo_takes_the_session_of_a_chat_back(sandbox: Sandbox) -> None:
    env = ToolEnv(
        [as_tool("run_python"), as_tool(send)], open_session=partial(sandbox.session, keep=4)
    )
    outside = '<tool_call>\n{"name": "send", "arguments": {"text": "hi"}}\n</tool_call>'
    replies = [
        python("x = 1"),
        "done",
        python("x += 1\nopen('f', 'w').write('2')"),
        "done",
        outside,
        "done",
    ]
    made, events = open_chat(replies, env, sandbox=sandbox)
    await made.begin()
    for text in ("a", "b"):
        await made.user(text)
    assert (await made.call("run_python", {"code": "x, open('f').read()"})).text == "(2, '2')"
    await made.undo()
    seen = await made.call("run_python", {"code": "import os; x, os.path.exists('f')"})
    assert seen.text == "(1, False)" and not [event for event in events if event["ev"] == "note"]
    await made.user("c")
    await made.undo()
    assert [e["text"] for e in events if e["ev"] == "note"] == ["what send did stays done"]
    await made.talk.close()
