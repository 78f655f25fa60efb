"""What the model does wrong in an agent of others is scored, and what the agent or its machine does is masked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.agents.runners.base import printed_names
from agentrl_cli.errors import ConfigError
from agentrl_cli.types import Episode, Outcome
from tests.agents.test_runners import ADD, pack_of, play
from tests.helpers.gateway import call

LOOP = f"""
import os
ADD = {ADD!r}

class Rejected(Exception): "What a framework raises for an answer that it cannot use."

def agent(task, base_url, api_key, model):
    messages = task.prompt
    while True:
        said = ask(base_url, api_key, messages, tools=[ADD])
        messages.append(said)
        for one in said.get("tool_calls") or ():
            if one["function"]["name"] != "add":
                raise LookupError(f"Tool {{one['function']['name']}} not found in agent Triage")
            given = json.loads(one["function"]["arguments"])
            messages.append({{"role": "tool", "tool_call_id": one["id"], "content": str(given["a"] + given["b"])}})
        if not said.get("tool_calls"):
            AFTER
            return float(said["content"] == task.data["answer"])
"""
AGENT = {"function": "agent.py:agent"}
GOOD = call("add", a=0, b=2)
UNREADABLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>'
PARTS = "rewards: {half: {weight: 1.0, primary: true}}\n"


def loop(after: str = "pass") -> str:
    return LOOP.replace("AFTER", after)


async def ended(folder: Path, replies: list[str], after: str = "pass", **agent: Any) -> Episode:
    return await play(pack_of(folder, loop(after), {**AGENT, **agent}), replies)


@pytest.mark.parametrize(
    "replies",
    [[call("add_up", a=0, b=2)], [GOOD, UNREADABLE], [call("add", a="x", b=2)]],
    ids=["unknown tool", "unreadable", "argument of another type"],
)
async def test_an_exception_that_the_model_caused_is_scored(
    tmp_path: Path, replies: list[str]
) -> None:
    """Its last answer has a call that no one can carry out, and the agent raised: 0, or as `on_error` says."""
    episode = await ended(tmp_path, replies)
    assert (episode.outcome, episode.reward, episode.graded) == (Outcome.FAILED, 0.0, True)
    assert "(agent.py:" in episode.error
    assert (await ended(tmp_path, replies, on_error=-0.5)).reward == -0.5
    masked = await ended(tmp_path, replies, on_error="mask")
    assert (masked.outcome, masked.reward) == (Outcome.AGENT_ERROR, None)


@pytest.mark.parametrize(
    ("replies", "after"),
    [
        ([GOOD, "2"], "raise KeyError('a bug of the agent')"),
        ([UNREADABLE, "2"], "raise KeyError('after the model had written it well')"),
        ([UNREADABLE], ""),
    ],
    ids=["a bug", "a mistake before", "a machine's fault"],
)
async def test_any_other_exception_is_masked(
    tmp_path: Path, replies: list[str], after: str
) -> None:
    code = loop(after or "pass")
    if after:  # this one answers the model's mistakes
        code = code.replace('str(given["a"] + given["b"])', "'done'")
    else:
        raises = "raise RuntimeError('the search') from ConnectionError('refused')"
        code = code.replace("given = ", f"{raises}\n            given = ")
    episode = await play(pack_of(tmp_path, code), replies)
    assert (episode.outcome, episode.reward) == (Outcome.AGENT_ERROR, None)


async def test_exceptions_that_reject_an_answer_are_named_by_the_pack(tmp_path: Path) -> None:
    """As dspy's and pydantic-ai's, which raise for a text that has not their form; also as the cause of another."""
    after = "raise ValueError('no output') from Rejected('not in the form that was asked for')"
    assert (await ended(tmp_path, ["two"], after)).outcome is Outcome.AGENT_ERROR
    episode = await ended(tmp_path, ["two"], after, rejects=["Rejected"])
    assert (episode.outcome, episode.reward) == (Outcome.FAILED, 0.0)
    code = (
        loop(after)
        + """
from types import SimpleNamespace
task = SimpleNamespace(prompt=json.loads(os.environ["AGENTRL_TASK"])["messages"], data={})
agent(task, os.environ["OPENAI_BASE_URL"], "k", "")
"""
    )
    command = {"command": [sys.executable, "agent.py"]}
    assert (await play(pack_of(tmp_path, code, command), ["two"])).outcome is Outcome.AGENT_ERROR
    episode = await play(pack_of(tmp_path, code, {**command, "rejects": ["Rejected"]}), ["two"])
    assert (episode.outcome, episode.reward) == (Outcome.FAILED, 0.0), episode.error
    episode = await play(pack_of(tmp_path, code, command), [call("add_up", a=1)])
    assert (episode.outcome, episode.reward) == (Outcome.FAILED, 0.0), (
        "an unknown tool ends a program, too"
    )


@pytest.mark.parametrize(
    ("on_error", "parts", "reward"), [(0, "", 0.0), ("mask", "", 0.0), (0, PARTS, 0.5)]
)
async def test_limits_and_mistakes_are_scored_by_the_packs_parts_or_as_0(
    tmp_path: Path, on_error: Any, parts: str, reward: float
) -> None:
    """Four answers are the limit: the fourth is recorded, and the fifth call is refused."""
    (tmp_path / "task.py").write_text("REWARDS = {'half': lambda episode, ctx: 0.5}\n")
    pack = pack_of(tmp_path, loop(), {**AGENT, "on_error": on_error}, rewards=parts)
    turns = await play(pack, [GOOD] * 9)
    assert (turns.outcome, turns.reward) == (Outcome.TRUNCATED_TURNS, reward)
    assert sum(turn.role == "assistant" for turn in turns.turns) == 4 and "400" in turns.error
    tokens = await play(pack, [GOOD] * 99, max_tokens=700, max_turns=50)
    assert (tokens.outcome, tokens.reward) == (Outcome.TRUNCATED_TOKENS, 0.0)
    assert tokens.tokens.trained_mask.nonzero()[0].max() < 700, "the model's tokens fit"
    if parts:
        mistake = await play(pack, [call("add_up", a=0)])
        assert (mistake.outcome, mistake.reward) == (Outcome.FAILED, reward)


async def test_an_exception_after_an_answer_that_was_cut(tmp_path: Path) -> None:
    """A call that was cut cannot be read; a text may be cut and the exception be a bug."""
    replies = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {"1" * 200}']
    cut = await ended(tmp_path, replies)
    assert (cut.outcome, cut.reward) == (Outcome.TRUNCATED_TOKENS, 0.0) and "KeyError" in cut.error
    text, after = ["two " * 80], "json.loads(said['content'])"
    assert (await ended(tmp_path, text, after)).outcome is Outcome.AGENT_ERROR
    named = await ended(tmp_path, text, after, rejects=["JSONDecodeError"])
    assert (named.outcome, named.reward) == (Outcome.TRUNCATED_TOKENS, 0.0)


async def test_a_limit_beside_a_reward_of_the_agents_own(tmp_path: Path) -> None:
    code = (
        loop()
        .replace("said = ask", "emit_reward(0.25); said = ask")
        .replace("model):", "model, emit_reward):")
    )
    episode = await play(pack_of(tmp_path, code), [GOOD] * 9)
    assert (episode.outcome, episode.reward) == (Outcome.TRUNCATED_TURNS, 0.25)


async def test_too_long_names_tokens_limit_and_setting(tmp_path: Path) -> None:
    episode = await play(pack_of(tmp_path, loop()), ["2"], max_tokens=20, max_new_tokens=10)
    assert episode.outcome is Outcome.TOO_LONG
    assert "20 tokens" in episode.error and "rollout.max_tokens" in episode.error
    assert any(
        word.isdecimal() and int(word) > 20 for word in episode.error.replace(".", " ").split()
    )


async def test_the_prompt_is_a_list_of_plain_dicts_of_its_own(tmp_path: Path) -> None:
    """LangGraph takes a tuple for (role, content); and what an agent appends does not reach the next attempt."""
    code = """
def agent(task, base_url, api_key):
    assert type(task.prompt) is list and all(type(message) is dict for message in task.prompt)
    task.prompt.append({"role": "user", "content": "Be brief."})
    task.prompt[0]["content"] = "Changed."
    ask(base_url, api_key, task.prompt)
    return float(len(task.prompt) == 2)
"""
    pack = pack_of(tmp_path, code)
    for _ in range(2):
        assert (await play(pack)).reward == 1.0
    assert pack.tasks("train")[0].prompt[0]["content"] == "What is 0 + 2?"


@pytest.mark.parametrize(
    ("key", "value"), [("on_error", "zero"), ("on_error", 1), ("on_error", True), ("rejects", "X")]
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"agent.{key}"):
        pack_of(tmp_path, loop(), {**AGENT, key: value})


CHAINED = """\
OSError: [Errno 111] handled and logged long before
Traceback (most recent call last):
  File "a.py", line 1, in one
ValueError: first

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 2, in two
frame.errors.BadCall: no tool zzz
"""


def test_only_the_exception_that_ended_a_program_counts() -> None:
    """Not what it logged before; causes do, and without a traceback the last line does."""
    assert {"BadCall", "ValueError"} <= set(
        printed_names(CHAINED)
    ) and "OSError" not in printed_names(CHAINED)
    assert printed_names("OSError: logged\nKeyError: 'x'\n")[0] == "KeyError"
    assert (
        "OSError" not in printed_names("OSError: logged\nKeyError: 'x'\n")
        and printed_names("") == ()
    )
