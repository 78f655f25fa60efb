"""Environments: tools as the world, users, an Env of one's own, in rollouts, chats and what-ifs; what must be freed."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, Pack, ScriptedPolicy, load_pack
from agentrl_cli.commands import main
from agentrl_cli.envs.load import load_interactions
from agentrl_cli.envs.tool_env import AssistantTurn, ToolEnv
from agentrl_cli.envs.user_simulator import Gsm8k, GuessNumber, Interaction, Reply, Ruled, Scripted
from agentrl_cli.errors import ConfigError, EnvError, NotFound
from agentrl_cli.rewards import Reward, rules
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.flags import find_flags
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import (
    Episode,
    Message,
    Origin,
    Outcome,
    Task,
    ToolCall,
)
from tests.helpers.chat import CHAT, call
from tests.helpers.cli import Cli
from tests.helpers.packs import pack as write_pack
from tests.helpers.remote import server
from tests.helpers.session import scripted, what_if
from tests.helpers.web import completion, served
from tests.tui.test_chat import serve


def config() -> Config:
    made = Config()
    made.rollout.max_tokens, made.rollout.max_new_tokens, made.rollout.max_turns = 4000, 200, 6
    return made


async def play(
    path: Path, pack: Pack, task: Task, said: list[str], weights: dict[str, float]
) -> str:
    """A store with one episode of a scripted model; returns its id."""
    tokenizer, settings = CHAT.tokenizer, config()
    settings.rewards = weights
    kept = RunRow("r1", "made", status="finished", tokenizer=tokenizer.hash)
    with Store.open(path) as store:
        store.tokenizers.add(
            tokenizer.hash, tokenizer.json, tokenizer.chat_template or "", dict(tokenizer.specials)
        )
        store.tasks.add([task])
        row = store.runs.add(replace(kept, config=settings.model_dump(mode="json")))
        policy = ScriptedPolicy(said, tokenizer)
        rollout = Rollout(policy, CHAT, {pack.name: pack}, settings, store=store)
        return (await rollout.run([Job(task, 0, 0, "g", 1, row.id, "train")]))[0].id


def guess(secret: int = 12) -> tuple[Pack, Task]:
    pack = load_pack("guess-task")
    row = {
        "id": "x",
        "family": "small",
        "prompt": "From 1 to 20.",
        "low": 1,
        "high": 20,
        "secret": secret,
    }
    return pack, pack.task(row, "train")


async def test_a_reroll_continues_with_the_simulated_user_from_where_it_was(tmp_path: Path) -> None:
    db, (pack, task) = tmp_path / "a.db", guess()
    episode = await play(db, pack, task, ["10", "15", "1", "1", "1", "1"], {})
    again = ["--turn", "4", "--samples", "18", *scripted(tmp_path, "11", "12")]
    code, events = await what_if(db, episode, *again)
    children = [event for event in events if event["ev"] == "child"]
    assert code == 0 and [event["outcome"] for event in children] == ["solved"] * 18, events[-1]
    with Store.open(db, readonly=True) as store:
        kept = store.episodes.get(children[-1]["episode"])  # of a slot that was used before
    users = [turn for turn in kept.turns if turn.role == "user"]
    said = [(turn.messages[0]["content"], turn.reward) for turn in users]
    assert said == [("From 1 to 20.", None), ("higher", 0.1), ("higher", 0.1)]
    assert all(Origin.USER in kept.tokens.origin[turn.start : turn.end] for turn in users)
    parts = {part.name: part for part in kept.reward_parts}
    assert (parts["interaction"].value, parts["env"].value) == pytest.approx((1.2, 1.2))
    assert parts["interaction"].detail == "by turn: 0.1, 0.1, 1"
    assert parts["interaction"].weight == 0


async def test_a_truncated_turn_is_not_answered(tmp_path: Path) -> None:
    db, pack = tmp_path / "a.db", load_pack("calc-task")
    said = call("calculator", expression="1+1") + "x" * 300
    episode = await play(db, pack, pack.tasks("train")[0], [said], {})
    code, events = await what_if(db, episode, "--rerun")
    assert code == 0 and not [event for event in events if event["ev"] == "rerun"]
    code, events = await what_if(db, episode, "--turn", "2", *scripted(tmp_path, said))
    found = [(e["outcome"], e["turns"]) for e in events if e["ev"] == "child"]
    assert code == 0 and found == [("truncated_tokens", 3)]


async def test_a_world_that_answers_otherwise_diverges(tmp_path: Path) -> None:
    db, (pack, task) = tmp_path / "a.db", guess()
    episode = await play(db, pack, task, ["10", "12"], {})
    with Store.open(db) as store, store.transaction() as conn:
        conn.execute("UPDATE tasks SET data=json_set(data, '$.secret', 3)")
    code, events = await what_if(db, episode, "--turn", "4", *scripted(tmp_path, "3"))
    reported = [event["diverged"] for event in events if event["ev"] == "diverged"]
    assert code == 0 and reported == ["diverged at turn 2 (the user)"]
    (child,) = [event["episode"] for event in events if event["ev"] == "child"]
    with Store.open(db, readonly=True) as store:
        kept = store.episodes.get(child)
    assert [turn.index for turn in kept.turns if turn.diverged] == [3] and "DIVERGED" in kept.flags
    (flag,) = [flag for flag in find_flags(kept) if flag.name == "DIVERGED"]
    said = "diverged at turn 3: run again, the user said otherwise"
    assert (flag.turn, flag.evidence) == (3, said)


async def test_an_environment_that_breaks_is_reported(tmp_path: Path) -> None:
    breaks = "def make_env(task):\n    raise ValueError('no such door')\n"
    write_pack(tmp_path, {}, [{"id": "crash", "prompt": "?"}], task=breaks)
    (tmp_path / "agentrl.yaml").write_text("task: {packs: [.]}\n")
    given = ["--project", str(tmp_path), "--task", "crash", "--db", str(tmp_path / "c.db")]
    code, events = await serve([], *given, *scripted(tmp_path, "x"))
    assert code == 1 and "ValueError: no such door" in events[-1]["message"], events[-1]


@pytest.mark.parametrize(
    ("user", "said", "again", "reply"),
    [
        (GuessNumber(), ["10", "7", "2"], "11", -0.1),  # 10 was too high already
        (Scripted(["a", "b"]), ["x", "x"], "x", "b"),
    ],
)
async def test_an_environment_goes_back_with_its_user(
    user: Interaction, said: list[str], again: str, reply: Any
) -> None:
    env = ToolEnv([], interaction=user)
    await env.reset(guess(5)[1])
    for index, text in enumerate(said):
        await env.step(AssistantTurn(text, (), index))
    assert await env.back(1) == ()
    step = await env.step(AssistantTurn(again, (), 1))
    assert reply in (step.reward, step.messages[0]["content"])
    await env.close()


def test_a_chat_in_one_command_speaks_json(tmp_path: Path, cli: Cli) -> None:
    replies = [call("calculator", expression="12*4.5"), "54.", "no"]
    command = ["chat", "--pack", "calc-task", "--db", "c.db", *scripted(tmp_path, *replies)]
    said = ("12*4.5?\nPlease.", "/tokens", "/save", "/bogus")
    out = cli(*command, "--json", *(word for text in said for word in ("--say", text)), code=1)
    events = [json.loads(line) for line in out.splitlines()]
    turns = [event for event in events if event["ev"] == "turn"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert turns[1]["content"] == "12*4.5?\nPlease." and turns[3]["results"][0]["text"] == "54"
    assert len(turns[4]["ids"]) == len(turns[4]["logp"]) and "tokenizer" not in events[0]
    assert "no command /bogus" in events[-1]["message"]
    saved = next(event["episode"] for event in events if "episode" in event)
    with Store.open(tmp_path / "c.db", readonly=True) as store:
        assert store.episodes.get(saved).kind == "chat"
    assert "54." in cli(*command, "--say", "12*4.5?")
    broken = f"chat --json --say x --model scripted --task y --db {tmp_path}/b.db".split()
    assert main(broken) == 2
    last = json.loads(cli.capture.readouterr().out)
    assert last["ev"] == "fatal" and "needs a pack" in last["message"]


@pytest.mark.parametrize("mode", ["chat", "completions"])
async def test_a_chat_with_a_remote_endpoint(tmp_path: Path, mode: str) -> None:
    seen: list[dict[str, Any]] = []

    async def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":  # whether it is there
            return 200, {"data": []}
        seen.append(body)
        said = "It is 54."
        return 200, {
            "choices": [{"message": {"content": said}, "text": said, "finish_reason": "stop"}]
        }

    async with server(answer) as url:
        given = f"--set remote.backend=openai --set remote.url={url} --set remote.model=m".split()
        given += f"--set remote.backend.mode={mode} --db {tmp_path}/c.db --pack calc-task".split()
        code, events = await serve([{"op": "user", "text": "12*4.5?"}], *given)
    assert code == 0, events
    last = [event for event in events if event["ev"] == "turn"][-1]
    assert last["content"] == "It is 54." and set(last["logp"]) == {None}
    if mode == "chat":
        assert [message["role"] for message in seen[0]["messages"]] == ["system", "user"]
        assert seen[0]["tools"]
    else:
        assert "12*4.5?" in seen[0]["prompt"] and "calculator" in seen[0]["prompt"]


def task(**data: Any) -> Task:
    return Task("p/1", "p", "", "train", ({"role": "user", "content": "Hi."},), data)


async def talk(user: Interaction, said: Sequence[str], **data: Any) -> list[Reply]:
    await user.start(task(**data))
    messages: list[Message] = [{"role": "user", "content": "Hi."}]
    replies = []
    for text in said:
        messages.append({"role": "assistant", "content": text})
        replies.append(Reply(*await user.reply(messages)))
        messages.append({"role": "user", "content": replies[-1].text})
    await user.stop()
    return replies


def pack(user: Any, row: dict[str, Any]) -> Pack:
    made = Pack.of("p", [row], [Reward("right", rules.interaction)])
    return replace(made, interactions={"user": user})


async def played(made: Pack, said: list[str]) -> Episode:
    rollout = Rollout(ScriptedPolicy(said, CHAT.tokenizer), CHAT, {"p": made}, Config())
    return await rollout.episode(Job(made.tasks("train")[0], 1))


async def test_a_script_and_a_rule() -> None:
    thanks = ("Thanks.", 0.5, False)
    said = await talk(Scripted(["Why?", "Thanks."], 0.5), ["a", "b", "c"])
    assert said == [("Why?", 0.5, False), thanks, (None, 0.5, False)]

    async def rule(messages: Sequence[Message], row: Task) -> Any:
        answers = {"a": None, "b": "More.", "c": ("No.", -1.0)}
        return answers.get(messages[-1]["content"], Reply("Bye.", row.data["worth"], True))

    assert await talk(Ruled(rule), "abcd", worth=2.0) == [
        (None, None, False),
        ("More.", None, False),
        ("No.", -1.0, False),
        ("Bye.", 2.0, True),
    ]
    counts = await talk(Ruled(lambda messages, row: f"{len(messages)}"), ["a", "b"])
    assert counts == [("2", None, False), ("4", None, False)]


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
    said = await talk(Gsm8k(), ["#### 4", "it is 1,002.0"], answer="1002")
    assert said == [wrong, (None, 1.0, True)]
    said = await talk(Gsm8k(2), ["4", "5"], interaction_kwargs={"ground_truth": 6})
    assert said == [wrong, (None, 0.0, True)]
    with pytest.raises(EnvError, match="no ground_truth"):
        await talk(Gsm8k(), ["1"])


@pytest.mark.parametrize(
    ("rule", "outcome", "error"),
    [
        (lambda messages, row: Reply("Goodbye.", 0.5, True), Outcome.FAILED, ""),
        (lambda messages, row: 1 / 0, Outcome.ENV_ERROR, "ZeroDivisionError"),
    ],
)
async def test_a_user_that_ends_with_a_word_is_heard_and_one_that_crashes_masks_the_episode(
    rule: Any, outcome: Outcome, error: str
) -> None:
    done = await played(pack(lambda: Ruled(rule), {"prompt": "Hi."}), ["Hello.", "never said"])
    last = done.turns[-1]
    assert done.outcome is outcome and error in done.error
    assert error or (last.messages[0]["content"], last.reward) == ("Goodbye.", 0.5)


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
    model = {"url": url, "model": "m", "persona": "You are curt.", "cache": None}
    maker = load_interactions(tmp_path, [{"name": "user", "model": model}])["user"]
    asked = {"goal": "a refund"}
    replies = await talk(maker(), ["How can I help?", "Done."], interaction_kwargs=asked)
    assert replies == [("I want a refund.", None, False), ("Thank you.", None, True)]
    system, *said = bodies[1]["messages"]
    assert system["role"] == "system" and "You are curt.\nYour goal: a refund" in system["content"]
    # the roles are swapped
    assert [message["role"] for message in said] == ["assistant", "user"] * 2


async def test_a_model_that_cannot_be_reached_masks_the_episode(tmp_path: Path) -> None:
    given = {"url": "http://127.0.0.1:9/v1", "model": "m", "retries": 0}
    maker = load_interactions(tmp_path, [{"name": "user", "model": given}])["user"]
    done = await played(pack(maker, {"prompt": "Hi."}), ["Hello."])
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
    entries: dict[str, Any] = {
        "GuessNumber": "guess_number",
        "Gsm8k": {"name": "g", "function": "gsm8k", "config": {"tries": 5}},
        "Kind": {"name": "kind", "function": "mine.py:Kind", "config": {"mood": "bad"}},
        "Ruled": {"name": "rule", "function": "mine.py:rule"},
        "Scripted": {"name": "talk", "script": ["a"], "reward": 1},
    }
    makers = load_interactions(tmp_path, [*entries.values()])
    assert list(makers) == ["guess_number", "g", "kind", "rule", "talk"]
    made: list[Any] = [maker() for maker in makers.values()]
    assert [type(user).__name__ for user in made] == list(entries)
    assert (made[1].tries, made[2].mood, load_interactions(tmp_path, None)) == (5, "bad", {})


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
        ([{"name": "a", "function": "gsm8k", "reward": 1}], ConfigError, "reward, which would do"),
        ([{"name": "a", "script": ["b"], "function": "gsm8k"}], ConfigError, "has function, which"),
        (
            [{"name": "a", "function": "builtins:len", "config": {"b": 1}}],
            ConfigError,
            "a function",
        ),
        ([{"name": "a", "script": "Thanks."}], ConfigError, "a list of texts, .* not 'Thanks.'"),
        ([{"name": "a", "script": ["b"], "reward": "c"}], ConfigError, "reward a number, .*'c'"),
        (
            [{"name": "a", "model": "qwen"}],
            ConfigError,
            "model and config are mappings, not 'qwen'",
        ),
        (["gess_number"], NotFound, "'gess_number'"),
        ("missing.yaml", ConfigError, "does not exist"),
        ([{"name": "a", "model": {"url": "http://x"}}], ConfigError, "a.model is missing"),
    ],
)
def test_entries_that_cannot_be(
    tmp_path: Path, value: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load_interactions(tmp_path, value)


# --- environments by themselves ---


def turn(*calls: ToolCall, content: str = "") -> AssistantTurn:
    return AssistantTurn(content, calls)


def asked(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(f"c-{name}", name, arguments, "")


# --- tools -----------------------------------------------------------------------------------------------------------


# --- a simulated user ------------------------------------------------------------------------------------------------


# --- an Env of one's own, in a pack ----------------------------------------------------------------------------------


async def answer(env: ToolEnv, index: int, name: str, **arguments: Any) -> str:
    call = ToolCall("c", name, arguments, "")
    return (await env.step(AssistantTurn("", (call,), index))).results[0].text
