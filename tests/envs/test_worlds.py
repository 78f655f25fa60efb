"""Worlds that answer by themselves, in rollouts, chats and what-ifs: simulated users, an environment of a pack."""

import io
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import ByteTokenizer, Chat, Config, Pack, ScriptedPolicy, load_pack
from agentrl_cli.chat_session.session import Session
from agentrl_cli.chat_session.whatif import run
from agentrl_cli.commands import main
from agentrl_cli.envs.load import load_interactions
from agentrl_cli.envs.tool_env import AssistantTurn, ToolEnv
from agentrl_cli.envs.user_simulator import Gsm8k, GuessNumber, Interaction, Reply, Ruled, Scripted
from agentrl_cli.errors import ConfigError, EnvError, NotFound, UsageError
from agentrl_cli.rewards import Reward, rules
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.flags import find_flags
from agentrl_cli.rollout.world import make_env
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Message, Origin, Outcome, Task
from tests.helpers.chat import CHAT
from tests.helpers.remote import server
from tests.helpers.session import open_chat
from tests.helpers.web import completion, served
from tests.tui.test_chat import serve

TASK_YAML = """\
name: door-task
description: Say the word.
tools: []
sandbox: false
rewards:
  opened: {weight: 1.0, primary: true}
row: [word]
"""
TASK_PY = """
from agentrl_cli.envs.tool_env import Env, Step


class Door(Env):
    async def reset(self, task):
        self.word, self.tries = task.data["word"], 0
        return [*task.prompt[:-1], {"role": "user", "content": "A door. Say the word."}]

    async def step(self, turn):
        self.tries += 1
        if turn.content.strip() == self.word:
            return Step(reward=1.0, terminated=True)
        return Step(messages=[{"role": "user", "content": f"{self.tries} wrong"}], reward=-0.1)


def make_env(task):
    if task.data["word"] == "crash":
        raise ValueError("no such door")
    return Door()


def opened(episode, ctx):
    return float(ctx.final_text.strip() == ctx.task.data["word"])


REWARDS = {"opened": opened}
"""


def door(folder: Path) -> Pack:
    """A pack with an environment of its own, in a project."""
    (folder / "data").mkdir(parents=True)
    (folder / "task.yaml").write_text(TASK_YAML)
    (folder / "task.py").write_text(textwrap.dedent(TASK_PY))
    (folder.parent / "agentrl.yaml").write_text(f"task: {{packs: [{folder}]}}\n")
    rows = [
        {"id": word, "family": "door", "prompt": "?", "word": word} for word in ("sesame", "crash")
    ]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_pack(str(folder))


def config() -> Config:
    made = Config()
    made.rollout.max_tokens, made.rollout.max_new_tokens, made.rollout.max_turns = 4000, 200, 6
    return made


async def play(
    path: Path, pack: Pack, task: Task, said: list[str], weights: dict[str, float]
) -> str:
    """A store with one episode of a scripted model; returns its id."""
    tokenizer, settings = ByteTokenizer(), config()
    settings.rewards = weights
    with Store.open(path) as store:
        store.tokenizers.add(
            tokenizer.hash, tokenizer.json, tokenizer.chat_template or "", dict(tokenizer.specials)
        )
        store.tasks.add([task])
        run_config = settings.model_dump(mode="json")
        row = store.runs.add(
            RunRow("r1", "made", status="finished", tokenizer=tokenizer.hash, config=run_config)
        )
        rollout = Rollout(
            ScriptedPolicy(said, tokenizer),
            Chat(tokenizer),
            {pack.name: pack},
            settings,
            store=store,
        )
        return (await rollout.run([Job(task, 0, 0, "g", 1, row.id, "train")]))[0].id


async def what_if(db: Path, episode: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    out = io.StringIO()
    code = await run(["--db", str(db), "--episode", episode, *arguments], out)
    return code, [json.loads(line) for line in out.getvalue().splitlines()]


def scripted(folder: Path, *said: str) -> list[str]:
    path = folder / "script.json"
    path.write_text(json.dumps(said))
    return ["--model", "scripted", "--script", str(path)]


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
    with Store.open(db, readonly=True) as store:
        assert store.episodes.get(episode).outcome is Outcome.TRUNCATED_TURNS
    code, events = await what_if(
        db, episode, "--turn", "4", "--samples", "18", *scripted(tmp_path, "11", "12")
    )
    children = [event for event in events if event["ev"] == "child"]
    assert code == 0 and [event["outcome"] for event in children] == ["solved"] * 18, events[-1]
    assert not [event for event in events if event["ev"] == "diverged"]
    with Store.open(db, readonly=True) as store:
        kept = store.episodes.get(children[-1]["episode"])  # of a slot that was used before
    said = [turn.messages[0]["content"] for turn in kept.turns if turn.role == "user"]
    assert said == ["From 1 to 20.", "higher", "higher"]
    assert [turn.reward for turn in kept.turns if turn.role == "user"] == [None, 0.1, 0.1]
    values = {part.name: part.value for part in kept.reward_parts}
    assert values["interaction"] == pytest.approx(1.2) and values["env"] == pytest.approx(1.2)


async def test_a_truncated_turn_is_not_answered(tmp_path: Path) -> None:
    db, pack = tmp_path / "a.db", load_pack("calc-task")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    episode = await play(db, pack, pack.tasks("train")[0], [call + "x" * 300], {})
    with Store.open(db, readonly=True) as store:
        made = store.episodes.get(episode)
    assert made.outcome is Outcome.TRUNCATED_TOKENS and made.tool_calls == 1
    code, events = await what_if(db, episode, "--rerun")
    assert code == 0 and not [event for event in events if event["ev"] == "rerun"]
    code, events = await what_if(db, episode, "--turn", "2", *scripted(tmp_path, call + "x" * 300))
    (found,) = [event for event in events if event["ev"] == "child"]
    assert code == 0 and found["outcome"] == "truncated_tokens" and found["turns"] == 3


async def test_a_world_that_answers_otherwise_diverges(tmp_path: Path) -> None:
    db, (pack, task) = tmp_path / "a.db", guess()
    episode = await play(db, pack, task, ["10", "12"], {})
    with Store.open(db) as store:
        store.tasks.add([guess(3)[1]])
        with store.transaction() as conn:
            conn.execute("UPDATE tasks SET data=json_set(data, '$.secret', 3)")
    code, events = await what_if(db, episode, "--turn", "4", *scripted(tmp_path, "3"))
    reported = [event["diverged"] for event in events if event["ev"] == "diverged"]
    assert code == 0 and reported == ["diverged at turn 2 (the user)"]
    with Store.open(db, readonly=True) as store:
        kept = store.episodes.get(
            next(event["episode"] for event in events if event["ev"] == "child")
        )
    assert [turn.index for turn in kept.turns if turn.diverged] == [3] and "DIVERGED" in kept.flags
    (flag,) = [flag for flag in find_flags(kept) if flag.name == "DIVERGED"]
    assert (flag.turn, flag.evidence) == (
        3,
        "diverged at turn 3: run again, the user said otherwise",
    )


async def test_an_environment_of_the_packs_own_works_in_what_ifs(tmp_path: Path) -> None:
    db, pack = tmp_path / "a.db", door(tmp_path / "door")
    task = pack.tasks("train")[0]
    episode = await play(db, pack, task, ["open", "please", "sesame"], {"env": 2.0})
    project = ["--project", str(tmp_path)]
    code, events = await what_if(db, episode, "--rerun", *project)
    assert code == 0, events
    rewards = next(event for event in events if event["ev"] == "rewards")
    assert rewards["same"] and rewards["total_after"] == pytest.approx(
        rewards["total_before"]
    ) == pytest.approx(2.6)
    given = ["--turn", "3", "--samples", "2", *project, *scripted(tmp_path, "no", "sesame")]
    code, events = await what_if(db, episode, *given)
    assert code == 0, events
    children = [event["episode"] for event in events if event["ev"] == "child"]
    with Store.open(db, readonly=True) as store:
        for child in children:
            kept = store.episodes.get(child)
            said = [turn.messages[0]["content"] for turn in kept.turns if turn.role == "user"]
            assert said == ["A door. Say the word.", "1 wrong", "2 wrong"] and kept.solved
            assert kept.reward == pytest.approx(1.0 + 2.0 * 0.8)


async def test_an_environment_that_breaks_is_reported(tmp_path: Path) -> None:
    pack = door(tmp_path / "door")
    given = ["--project", str(tmp_path), "--task", "crash", "--db", str(tmp_path / "c.db")]
    code, events = await serve([], *given, *scripted(tmp_path, "x"))
    assert (
        pack.name == "door-task"
        and code == 1
        and "ValueError: no such door" in events[-1]["message"]
    ), events[-1]


async def session(secret: int, *said: str) -> tuple[Session, list[dict[str, Any]]]:
    pack, task = guess(secret)
    env = await make_env(config().rollout, pack, Job(task, 0), None)
    assert isinstance(env, ToolEnv)
    return open_chat(said, env, task=task, rewards=pack.rewards)


async def test_a_chat_with_a_simulated_user_and_a_person_in_its_place() -> None:
    made, events = await session(12, "10", "15", "19", "no", "12")
    made.talk.max_turns = 2
    await made.begin()

    def said() -> list[str]:
        return [turn.messages[0]["content"] for turn in made.turns if turn.role == "user"]

    assert (
        said() == ["From 1 to 20.", "higher", "lower"]
        and "stopped after 2 turns" in events[-1]["text"]
    )
    made.options.simulate = False
    await made.retry()
    assert made.turns[-1].messages[0]["content"] == "19"
    await made.user("Colder.")  # in the simulated user's place
    assert said()[-1] == "Colder." and made.turns[-1].messages[0]["content"] == "no"
    await made.ask_user()
    assert said()[-1] == "Guess a number." and made.turns[-1].messages[0]["content"] == "12"
    with pytest.raises(UsageError):
        await made.as_tool("x")
    await made.ask_user()
    assert "ended the conversation" in events[-1]["text"] and [
        part.value for part in await made.score()
    ][:1] == [1.0]
    await made.talk.close()


async def test_undo_takes_the_simulated_user_back() -> None:
    made, events = await session(5, "10", "7", "8", "5")
    made.options.simulate = False
    await made.begin()
    await made.ask_user()
    await made.ask_user()
    assert [turn.reward for turn in made.turns if turn.role == "user"] == [None, 0.1, 0.1]
    await made.undo()
    await made.undo()
    assert len(made.turns) == 3 and made.talk.transcript.earned is None
    assert not [event for event in events if event["ev"] == "note"]
    await made.ask_user()
    assert made.turns[-2].messages[0]["content"] == "lower" and made.turns[-2].reward == 0.1
    assert made.talk.transcript.earned == pytest.approx(0.1)
    await made.talk.close()


async def test_an_environment_goes_back_with_its_user() -> None:
    task = guess(5)[1]
    env = ToolEnv([], interaction=GuessNumber())
    await env.reset(task)
    for index, text in enumerate(["10", "7", "2"]):
        await env.step(AssistantTurn(text, (), index))
    assert await env.back(1) == ()
    assert (await env.step(AssistantTurn("11", (), 1))).reward == -0.1  # 10 was too high already
    env = ToolEnv([], interaction=Scripted(["a", "b"]))
    await env.reset(task)
    answers = [(await env.step(AssistantTurn("x", (), n))).messages[0]["content"] for n in range(2)]
    await env.back(1)
    again = (await env.step(AssistantTurn("x", (), 1))).messages[0]["content"]
    assert (answers, again) == (["a", "b"], "b")
    await env.close()


async def test_undo_makes_an_environment_of_its_own_again(tmp_path: Path) -> None:
    door(tmp_path / "door")
    given = ["--project", str(tmp_path), "--task", "sesame", "--db", str(tmp_path / "c.db")]
    requests: list[dict[str, Any] | str] = [
        {"op": "simulate", "on": False}, {"op": "simulate"}, {"op": "simulate"}, {"op": "undo"}, {"op": "simulate"},
        {"op": "call", "name": "x"}, {"op": "simulate"}, {"op": "reward"}, {"op": "simulate"},
    ]  # fmt: skip
    replies = scripted(tmp_path, *["a", "b", "c", "d", "e", "f", "g", "sesame"])
    code, events = await serve(requests, *given, *replies)
    ready = events[0]
    assert code == 0 and ready["user"] is True and ready["tools"] == []
    said = [
        event["content"] for event in events if event["ev"] == "turn" and event["role"] == "user"
    ]
    # six turns of its own at first: max_turns; then one, one, one taken back, one
    assert said[0] == "A door. Say the word." and said[-1].endswith("wrong")
    assert any(event["ev"] == "error" and "x" in event["message"] for event in events)
    assert any(event["ev"] == "reward" for event in events)


async def test_a_task_opens_in_a_chat_as_in_a_rollout(tmp_path: Path) -> None:
    pack = load_pack("sql-task")
    task = pack.tasks("train", limit=1)[0]
    given = ["--pack", "sql-task", "--task", task.id, "--db", str(tmp_path / "c.db")]
    code, events = await serve([], *given, *scripted(tmp_path, "I do not know."))
    first = next(
        event["content"] for event in events if event["ev"] == "turn" and event["role"] == "user"
    )
    env = await make_env(config().rollout, pack, Job(task, 0), None)
    wanted = (await env.reset(task))[-1]["content"]
    await env.close()
    assert code == 0 and first == wanted and "create table" in first


def test_a_chat_in_one_command_speaks_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*4.5"}}\n</tool_call>'
    )
    command = [
        "chat",
        "--pack",
        "calc-task",
        "--db",
        str(tmp_path / "c.db"),
        *scripted(tmp_path, call, "54.", "no"),
    ]
    said = ("12*4.5?\nPlease.", "/tokens", "/save", "/bogus")
    assert main([*command, "--json", *(word for text in said for word in ("--say", text))]) == 1
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    turns = [event for event in events if event["ev"] == "turn"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert turns[1]["content"] == "12*4.5?\nPlease." and turns[3]["results"][0]["text"] == "54"
    assert len(turns[4]["ids"]) == len(turns[4]["logp"]) and "tokenizer" not in events[0]
    with Store.open(tmp_path / "c.db", readonly=True) as store:
        saved = next(event["episode"] for event in events if "episode" in event)
        assert store.episodes.get(saved).kind == "chat"
    assert "no command /bogus" in events[-1]["message"]
    assert main([*command, "--say", "12*4.5?"]) == 0
    assert "54." in capsys.readouterr().out
    broken = "chat --json --say x --model scripted --task y --db".split()
    assert main([*broken, str(tmp_path / "c.db")]) == 2
    (last,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert last["ev"] == "fatal" and "needs a pack" in last["message"]


@pytest.mark.parametrize("mode", ["chat", "completions"])
async def test_a_chat_with_a_remote_endpoint(tmp_path: Path, mode: str) -> None:
    seen: list[dict[str, Any]] = []

    async def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":  # whether it is there
            return 200, {"data": []}
        seen.append(body)
        if path == "/v1/chat/completions":
            return 200, {
                "choices": [{"message": {"content": "It is 54."}, "finish_reason": "stop"}]
            }
        return 200, {"choices": [{"text": "It is 54.", "finish_reason": "stop"}]}

    async with server(answer) as url:
        given = f"--set remote.backend=openai --set remote.url={url} --set remote.model=m".split()
        given += ["--set", f"remote.backend.mode={mode}", "--db", str(tmp_path / "c.db")]
        code, events = await serve(
            [{"op": "user", "text": "12*4.5?"}], "--pack", "calc-task", *given
        )
    assert code == 0, events
    last = [event for event in events if event["ev"] == "turn"][-1]
    assert last["content"] == "It is 54." and set(last["logp"]) == {None}
    if mode == "chat":
        assert [message["role"] for message in seen[0]["messages"]] == ["system", "user"] and seen[
            0
        ]["tools"]
    else:
        assert "12*4.5?" in seen[0]["prompt"] and "calculator" in seen[0]["prompt"]


GUESS = {"prompt": "Guess my number.", "low": 1, "high": 100, "secret": 42}


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


def pack(user: Any, row: dict[str, Any], function: Any = rules.interaction) -> Pack:
    made = Pack.of("p", [row], [Reward("right", function)])
    return replace(made, interactions={"user": user})


async def played(made: Pack, said: list[str], store: Store | None = None) -> Episode:
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
        done = await played(pack(GuessNumber, GUESS), ["50", "30", "42"], store)
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


async def test_a_user_that_ends_with_a_word_is_heard_and_one_that_crashes_masks_the_episode() -> (
    None
):
    async def end(rule: Any) -> Episode:
        return await played(pack(lambda: Ruled(rule), {"prompt": "Hi."}), ["Hello.", "never said"])

    heard = await end(lambda messages, row: Reply("Goodbye.", 0.5, True))
    assert heard.turns[-1].messages[0]["content"] == "Goodbye." and heard.turns[-1].reward == 0.5
    assert heard.outcome is Outcome.FAILED
    crashed = await end(lambda messages, row: 1 / 0)
    assert crashed.outcome is Outcome.ENV_ERROR and "ZeroDivisionError" in crashed.error


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
        ([{"name": "a", "function": "gsm8k", "reward": 1}], ConfigError, "reward, which would do"),
        ([{"name": "a", "script": ["b"], "function": "gsm8k"}], ConfigError, "has function, which"),
        (
            [{"name": "a", "function": "builtins:len", "config": {"b": 1}}],
            ConfigError,
            "a function",
        ),
        ([{"name": "a", "script": "Thanks."}], ConfigError, "a list of texts, .* not 'Thanks.'"),
        (
            [{"name": "a", "model": "qwen"}],
            ConfigError,
            "model and config are mappings, not 'qwen'",
        ),
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
