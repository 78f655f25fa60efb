"""Simulated users: by script, by rule, by a model, guess-the-number, GSM8K; their turns and rewards are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.envs.load import load_interactions
from agentrl_cli.envs.user_simulator import Gsm8k, GuessNumber, Interaction, Reply, Ruled, Scripted
from agentrl_cli.errors import ConfigError, EnvError, NotFound
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rewards import Reward, rules
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode, Message, Origin, Outcome, Task
from tests.helpers.web import completion, served

CHAT = Chat(ByteTokenizer())
GUESS = {"prompt": "Guess my number.", "low": 1, "high": 100, "secret": 42}


def task(**data: Any) -> Task:
    return Task("p/1", "p", "", "train", ({"role": "user", "content": "Hi."},), data)


async def talk(user: Interaction, said: Sequence[str], **data: Any) -> list[Reply]:
    """What a user answers to assistant turns."""
    await user.start(task(**data))
    messages: list[Message] = [{"role": "user", "content": "Hi."}]
    replies = []
    for text in said:
        messages.append({"role": "assistant", "content": text})
        replies.append(Reply(*await user.reply(messages)))
        messages.append({"role": "user", "content": replies[-1].text})
    await user.stop()
    return replies


def pack(user: Any, row: dict[str, Any], function: Any = rules.interaction) -> Pack:
    made = Pack.of("p", [row], [Reward("right", function)])
    return replace(made, interactions={"user": user})


async def play(made: Pack, said: list[str], store: Store | None = None) -> Episode:
    rollout = Rollout(
        ScriptedPolicy(said, CHAT.tokenizer), CHAT, {"p": made}, Config(), store=store
    )
    return await rollout.episode(Job(made.tasks("train")[0], 1))


async def test_a_script_and_a_rule() -> None:
    assert await talk(Scripted(["Why?", "Thanks."], 0.5), ["a", "b", "c"]) == [
        ("Why?", 0.5, False),
        ("Thanks.", 0.5, False),
        (None, 0.5, False),
    ]

    async def rule(messages: Sequence[Message], row: Task) -> Any:
        said = messages[-1]["content"]
        return {
            "a": None,
            "b": "More.",
            "c": ("No.", -1.0),
            "d": Reply("Bye.", row.data["worth"], True),
        }[said]

    expected = [
        (None, None, False),
        ("More.", None, False),
        ("No.", -1.0, False),
        ("Bye.", 2.0, True),
    ]
    assert await talk(Ruled(rule), "abcd", worth=2.0) == expected
    assert await talk(Ruled(lambda messages, row: f"{len(messages)}"), ["a", "b"]) == [
        ("2", None, False),
        ("4", None, False),
    ]


async def test_guess_the_number() -> None:
    said = ["Is it 50?", "25", "80", "no idea", "42"]
    assert await talk(GuessNumber(), said, low=1, high=100, secret=42) == [
        ("lower", 0.1, False),
        ("higher", 0.1, False),
        ("lower", -0.1, False),  # 80 was out of the question
        ("Guess a number.", -0.1, False),
        (None, 1.0, True),
    ]
    with pytest.raises(EnvError, match="lacks low, high or secret"):
        await talk(GuessNumber(), ["1"], low=1)


async def test_gsm8k() -> None:
    wrong = (Gsm8k.WRONG, 0.0, False)
    assert await talk(Gsm8k(), ["#### 4", "it is 1,002.0"], answer="1002") == [
        wrong,
        (None, 1.0, True),
    ]
    assert await talk(Gsm8k(2), ["4", "5"], interaction_kwargs={"ground_truth": 6}) == [
        wrong,
        (None, 0.0, True),
    ]
    with pytest.raises(EnvError, match="no ground_truth"):
        await talk(Gsm8k(), ["1"])


async def test_turns_of_the_user_are_stored_with_their_rewards(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s.db") as store:
        done = await play(pack(GuessNumber, GUESS), ["50", "30", "42"], store)
        kept = store.episodes.get(done.id)
    assert done.outcome is Outcome.SOLVED and kept.turns == done.turns
    users = [turn for turn in kept.turns if turn.role == "user"]
    assert [(turn.messages[0]["content"], turn.reward) for turn in users] == [
        ("Guess my number.", None),
        ("lower", 0.1),
        ("higher", 0.1),
    ]
    assert all(Origin.USER in kept.tokens.origin[turn.start : turn.end] for turn in users)
    part = next(part for part in kept.reward_parts if part.name == "interaction")
    assert (
        part.value == pytest.approx(1.2)
        and part.weight == 0
        and part.detail == "by turn: 0.1, 0.1, 1"
    )


async def test_a_user_that_ends_with_a_word_is_heard(tmp_path: Path) -> None:
    def rule(messages: Sequence[Message], row: Task) -> Reply:
        return Reply("Goodbye.", 0.5, True)

    done = await play(pack(lambda: Ruled(rule), {"prompt": "Hi."}), ["Hello.", "never said"])
    assert done.turns[-1].messages[0]["content"] == "Goodbye." and done.turns[-1].reward == 0.5
    assert done.outcome is Outcome.FAILED


async def test_a_user_that_crashes_masks_the_episode() -> None:
    done = await play(
        pack(lambda: Ruled(lambda messages, row: 1 / 0), {"prompt": "Hi."}), ["Hello."]
    )
    assert done.outcome is Outcome.ENV_ERROR and "ZeroDivisionError" in done.error


# --- a model as the user ---------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[Any], list[str]]]:
    """(url, bodies that came, answers to give)."""
    bodies: list[Any] = []
    answers: list[str] = []

    def answer(path: str, asked: Any) -> Any:
        bodies.append(asked)
        return completion(answers.pop(0))

    with served(answer) as url:
        yield f"{url}/v1", bodies, answers


async def test_a_model_plays_the_user(
    tmp_path: Path, endpoint: tuple[str, list[Any], list[str]]
) -> None:
    url, bodies, answers = endpoint
    answers += ["I want a refund.", "Thank you. [DONE]"]
    entry = {
        "name": "user",
        "model": {"url": url, "model": "m", "persona": "You are curt.", "cache": None},
    }
    maker = load_interactions(tmp_path, [entry])["user"]
    replies = await talk(
        maker(), ["How can I help?", "Done."], interaction_kwargs={"goal": "a refund"}
    )
    assert replies == [("I want a refund.", None, False), ("Thank you.", None, True)]
    system, *said = bodies[1]["messages"]
    assert system["role"] == "system" and "You are curt.\nYour goal: a refund" in system["content"]
    assert [message["role"] for message in said] == [
        "assistant",
        "user",
        "assistant",
        "user",
    ]  # the roles are swapped


async def test_a_model_that_cannot_be_reached_masks_the_episode(tmp_path: Path) -> None:
    given = {"url": "http://127.0.0.1:9/v1", "model": "m", "retries": 0}
    maker = load_interactions(tmp_path, [{"name": "user", "model": given}])["user"]
    done = await play(pack(maker, {"prompt": "Hi."}), ["Hello."])
    assert done.outcome is Outcome.ENV_ERROR and "cannot be" in done.error


# --- configuration ---------------------------------------------------------------------------------------------------


def test_entries_by_name_script_and_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Kind:\n    def __init__(self, mood='good'):\n        self.mood = mood\n\n"
        "    async def start(self, task): ...\n"
        "    async def reply(self, messages): ...\n"
        "    async def stop(self): ...\n"
        "def rule(messages, task):\n    return None\n"
    )
    entries: list[Any] = [
        "guess_number",
        {"name": "g", "function": "gsm8k", "config": {"tries": 5}},
        {"name": "kind", "function": "mine.py:Kind", "config": {"mood": "bad"}},
        {"name": "rule", "function": "mine.py:rule"},
        {"name": "talk", "script": ["a"], "reward": 1},
    ]
    made = {name: maker() for name, maker in load_interactions(tmp_path, entries).items()}
    kinds = {name: type(user).__name__ for name, user in made.items()}
    assert kinds == {
        "guess_number": "GuessNumber",
        "g": "Gsm8k",
        "kind": "Kind",
        "rule": "Ruled",
        "talk": "Scripted",
    }
    assert made["g"].tries == 5 and made["kind"].mood == "bad"  # type: ignore[attr-defined]
    assert load_interactions(tmp_path, None) == {}


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (3, ConfigError, "must be a list of entries"),
        ([{"nme": "a"}], ConfigError, "an interaction takes"),
        ([{"name": "a"}], ConfigError, "needs class_name, function, script or model"),
        ([{"script": ["a"]}], ConfigError, "needs a name"),
        (
            ["guess_number", "guess_number"],
            ConfigError,
            "two interactions are named 'guess_number'",
        ),
        ([{"name": "a", "function": "gsm8k", "config": {"trys": 1}}], ConfigError, "trys"),
        (["gess_number"], NotFound, "'gess_number'"),
        ("missing.yaml", ConfigError, "does not exist"),
        ([{"name": "a", "model": {"url": "http://x"}}], ConfigError, "model missing"),
    ],
)
def test_entries_that_cannot_be(
    tmp_path: Path, value: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load_interactions(tmp_path, value)
