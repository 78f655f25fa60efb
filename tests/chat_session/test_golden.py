"""Chats and what-ifs say token for token what they said: events, ids, origins, and the episodes that they store.

`golden_chat.json` and `golden_whatif.json` hold the transcripts, ids and origins as hashes. Everything that only moves
code keeps them; what changes them on purpose writes them again (`CHAT_GOLDEN=write pytest
tests/chat_session/test_golden.py`) and says why in its commit.
"""

import asyncio
import hashlib
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli import Chat, Config, Pack, ScriptedPolicy, Tokenizer, load_pack
from agentrl_cli.chat_session.child import run as run_chat
from agentrl_cli.paths import bundled_model
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode
from tests.helpers import session
from tests.helpers.chat import call
from tests.helpers.session import scripted

# Keys of events that another machine or day writes otherwise.
UNSTABLE = {"seconds", "tokenizer", "template", "db", "sandbox", "level"}

ODD_YAML = """\
name: odd-task
description: Tools that go wrong, in a world of its own.
tools: [boom, send, look]
sandbox: false
rewards:
  opened: {weight: 1.0, primary: true}
row: [word]
"""
ODD_PY = '''
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


def boom(text: str) -> str:
    """Raise an error.

    Args:
        text: Its text.
    """
    raise ValueError(text)


def send(text: str) -> str:
    """Send a text to someone outside.

    Args:
        text: What to send.
    """
    return f"sent {text}"


def look(times: int) -> str:
    """Look at a long text.

    Args:
        times: Its length.
    """
    return "very " * times + "long"


def opened(episode, ctx):
    return float(ctx.final_text.strip() == ctx.task.data["word"])


TOOLS = [boom, send, look]
REWARDS = {"opened": opened}
'''
DOOR_PY = ODD_PY + "\n\ndef make_env(task):\n    return Door()\n"


def calc(expression: str) -> str:
    return call("calculator", expression=expression)


def python(code: str) -> str:
    return call("run_python", code=code)


def say(text: str) -> dict[str, Any]:
    return {"op": "user", "text": text}


def op(op_: str, **values: Any) -> dict[str, Any]:
    return {"op": op_, **values}


BROKEN = '<tool_call>\n{"name": "calculator", "arguments": {"expr\n</tool_call>'
UNKNOWN = call("calculatr", expression="1")
TWO = "Both.\n" + calc("12*4.5") + "\n" + calc("6*7")
NO, YES = {"run": False}, {"run": True}
CALC = ["--pack", "calc-task"]
# Name to replies of the scripted model, arguments, requests, and answers to calls that need
# approval.
CHATS: dict[str, tuple[list[str], list[str], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "one call": (
        ["Let me see.\n" + calc("12*4.5"), "54.", "Let me see.\n" + calc("12*4.5"), "55."],
        CALC,
        [
            say("12*4.5?"),
            op("call", name="calculator", arguments={"expression": "1+1"}),
            op("call", name="calc", arguments={}),
            op("reward"),
            op("reward", value=0.5),
            op("save"),
            op("retry"),
            op("save"),
        ],
        [],
    ),
    "several turns of a task": (
        [calc("2*3"), calc("6/0"), "It is 6.", "Yes, 6.", calc("1+1"), "2"],
        [*CALC, "--task", "train-0003", "--seed", "5"],
        [op("reward"), op("save"), say("Sure?"), op("save"), op("task", id="heldout-0002")],
        [],
    ),
    "tasks are offered": (
        ["A", "B"],
        CALC,
        [op("task", id="2"), op("task"), op("task", id="1"), op("task", id="none"), op("save")],
        [],
    ),
    "malformed calls": (
        [BROKEN, UNKNOWN, calc("1 +"), BROKEN, UNKNOWN, BROKEN, "never", "later", "and"],
        CALC,
        [
            say("1?"),
            op("undo"),
            op("undo"),
            say("2?"),
            op("as_model", text=TWO),
            op("save"),
        ],
        [],
    ),
    "a tool that raises": (
        [call("boom", text="no"), call("send", text="a") + call("boom", text="b"), "done", "more"],
        ["--pack", "odd"],
        [say("go"), op("undo"), say("again"), op("save")],
        [],
    ),
    "limits": (
        ["A long answer " * 5, *[calc(f"{n}+1") for n in range(12)]],
        [*CALC, "--set", "rollout.max_turns=3"],
        [
            op("set", max_new_tokens=12),
            say("talk"),
            op("retry"),
            op("set", max_new_tokens=300),
            op("retry"),
            op("retry"),
            op("save"),
        ],
        [],
    ),
    "undo, edit, act as model and tool": (
        ["one", "two", "three", calc("5*5"), "25", "four", "five", "six"],
        [*CALC, "--system", "Be brief."],
        [
            op("as_model", text="too early"),
            op("as_tool", text="too early"),
            op("undo"),
            say("a"),
            say("b"),
            op("retry"),
            op("undo"),
            say("c"),
            op("as_tool", text="24"),
            op("as_model", text="I say " + calc("7*7")),
            op("undo"),
            op("undo"),
            op("save"),
            op("as_model", text="Just text."),
            op("simulate"),
            op("save"),
        ],
        [],
    ),
    "approved one by one": (
        [TWO, "done", TWO, TWO, "after", TWO, "end"],
        [*CALC, "--approve"],
        [
            say("1"),
            say("2"),
            op("as_tool", text="x"),
            op("undo"),
            say("3"),
            op("approve", on=False),
            op("retry"),
            op("save"),
        ],
        [
            NO,
            YES,
            NO,
            NO,
            {"run": False, "text": "99", "rest": True},
            {"run": True, "rest": True},
        ],
    ),
    "a simulated user": (
        ["10", "15", "12", "3", "4", "5", "6", "7", "8"],
        ["--pack", "guess-task", "--task", "train-0000"],
        [
            op("simulate", on=False),
            op("retry"),
            say("Colder."),
            op("simulate"),
            op("undo"),
            op("simulate", on=True),
            say("Go on."),
            op("reward"),
            op("save"),
        ],
        [],
    ),
    "a world of its own": (
        ["knock", "please", "sesame", "open", "sesame"],
        ["--pack", "door", "--task", "sesame"],
        [op("reward"), op("undo"), op("retry"), say("more"), op("undo"), op("reward"), op("save")],
        [],
    ),
    "a turn that must call": (
        ['boom", "arguments": {"text": "x"}}\n</tool_call>', "x"],
        ["--pack", "odd", "--task", "must"],
        [op("reward"), op("save")],
        [],
    ),
    "a sandbox": (
        [
            python("x = 1"),
            "done",
            python("x += 1\nopen('f', 'w').write('2')"),
            "done",
            python("raise ValueError"),  # without a caret, whose place differs between Pythons
            "no",
        ],
        ["--pack", "code-task"],
        [
            say("a"),
            say("b"),
            op("call", name="run_python", arguments={"code": "x, open('f').read()"}),
            op("undo"),
            op("call", name="run_python", arguments={"code": "import os; x, os.path.exists('f')"}),
            say("c"),
            op("save"),
        ],
        [],
    ),
    "the bundled model": (
        [],
        [*CALC, "--model", "tiny", "--seed", "11", "--temperature", "1.0", "--task", "train-0001"],
        [op("reward"), op("retry"), op("undo"), say("And 3 * 4?"), say("x " * 3000), op("save")],
        [],
    ),
    "the bundled model with code": (
        [],
        [
            "--pack",
            "code-task",
            "--model",
            "tiny",
            "--seed",
            "2",
            "--temperature",
            "0.7",
            "--set",
            "rollout.max_new_tokens=48",
        ],
        [say("Print 17 * 3 with Python."), op("retry"), op("save")],
        [],
    ),
}


class Reactive(io.StringIO):
    """The child's output; sends the next request when it is idle, and the next answer when it asks."""

    def __init__(
        self, requests: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]
    ) -> None:
        super().__init__()
        self.lines: asyncio.Queue[str | None] = asyncio.Queue()
        self.requests, self.answers = iter(requests), iter(answers)

    def write(self, text: str) -> int:
        event = json.loads(text)["ev"]
        if event == "idle":
            request = next(self.requests, None)
            self.lines.put_nowait(None if request is None else json.dumps(request))
        elif event == "ask":
            self.lines.put_nowait(json.dumps({"op": "answer", **next(self.answers)}))
        return super().write(text)


def _hash(numbers: Any) -> str:
    return hashlib.sha256(np.asarray(numbers, np.int32).tobytes()).hexdigest()[:16]


def stable(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events without what depends on the machine or the day; tokens of a turn joined to one text."""
    found: list[dict[str, Any]] = []
    for event in events:
        kept = {key: value for key, value in event.items() if key not in UNSTABLE}
        if event["ev"] == "ready":
            kept.pop("note", None)
        if event["ev"] == "token" and found and found[-1]["ev"] == "token":
            found[-1]["text"] += event["text"]
            continue
        if event["ev"] == "turn":
            logp = [value for value in kept.pop("logp") if value is not None]
            kept |= {"ids": [len(event["ids"]), _hash(event["ids"])], "origin": _hash(event["origin"]),
                     "logp": round(sum(logp), 2) + 0.0}  # fmt: skip
            kept.pop("text")
            kept["results"] = [
                {key: value for key, value in result.items() if key not in UNSTABLE}
                for result in event["results"]
            ]
        found.append(
            {
                key: round(value, 4) + 0.0 if isinstance(value, float) else value
                for key, value in kept.items()
            }
        )
    return found


def stored(episode: Episode) -> dict[str, Any]:
    """Return everything about a stored episode that does not depend on the machine or the day.

    `tokens`: their number, hashes of ids and origins, and the sum of the log-probabilities.
    """
    tokens = episode.tokens
    logp = round(float(np.nansum(tokens.logp_policy)), 2) + 0.0
    return {
        "task": episode.task_id,
        "kind": episode.kind,
        "parent": [episode.parent_id, episode.parent_turn],
        "sample": episode.sample,
        "seed": episode.seed,
        "weights": episode.weights_version,
        "outcome": str(episode.outcome),
        "error": episode.error,
        "flags": sorted(episode.flags),
        "advantage": None if episode.advantage is None else round(episode.advantage, 5),
        "rewards": [
            [part.name, part.value, part.weight, part.primary, part.detail]
            for part in episode.reward_parts
        ],
        "tokens": [len(tokens), _hash(tokens.ids), _hash(tokens.origin), logp],
        "turns": [
            {
                "role": turn.role,
                "span": [turn.start, turn.end],
                "messages": [dict(message) for message in turn.messages],
                "calls": [[one.name, one.arguments, one.error] for one in turn.calls],
                "results": [
                    [one.text, one.error, "diverged" in one.metrics] for one in turn.results
                ],
                "stop": turn.stop_reason and str(turn.stop_reason),
                "weights": turn.weights_version,
                "reward": turn.reward,
                "diverged": turn.diverged,
            }
            for turn in episode.turns
        ],
    }


def named(value: Any, folder: Path) -> Any:
    """Return JSON with ids of episodes and calls numbered in order, floats rounded (`sum` differs between Pythons) and
    the folder's name replaced.
    """
    text = json.dumps(value, default=str).replace(str(folder), "FOLDER")
    text = re.sub(r"-?\d+\.\d{12,}\b", lambda match: repr(round(float(match[0]), 12)), text)
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"<{len(numbers)}>")

    text = re.sub(r"\b1[0-9a-hjkmnp-tv-z]{13}\b", number, text)
    return json.loads(text)


def check(file: str, name: str, found: Any) -> None:
    """Compare with the golden transcript of that name, or write it."""
    path = Path(__file__).parent / file
    if os.environ.get("CHAT_GOLDEN") == "write":
        kept = json.loads(path.read_text()) if path.is_file() else {}
        kept[name] = found
        lines = [f"{json.dumps(key)}: {json.dumps(kept[key], sort_keys=True)}" for key in kept]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert found == json.loads(path.read_text())[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in (("odd", ODD_PY), ("door", DOOR_PY)):
        (tmp_path / name / "data").mkdir(parents=True)
        text = ODD_YAML if name == "odd" else ODD_YAML.replace("odd-task", "door-task")
        (tmp_path / name / "task.yaml").write_text(text)
        (tmp_path / name / "task.py").write_text(code)
        rows = "".join(
            json.dumps(row) + "\n"
            for row in [
                {"id": "sesame", "family": "door", "prompt": "Go.", "word": "sesame"},
                {
                    "id": "must",
                    "family": "door",
                    "prompt": "Go.",
                    "word": "x",
                    "tool_choice": "required",
                },
            ]
        )
        (tmp_path / name / "data" / "train.jsonl").write_text(rows)
    (tmp_path / "agentrl.yaml").write_text("task: {packs: [odd]}\n")
    return tmp_path


def saved(db: Path, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    with Store.open(db, readonly=True) as store:
        ids = [event["episode"] for event in events if event["ev"] in ("saved", "child", "rewards")]
        return [stored(store.episodes.get(one)) for one in dict.fromkeys(ids) if one]


async def talk(
    db: Path,
    arguments: Sequence[str],
    requests: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    out = Reactive(requests, answers)
    assert await run_chat(["--db", str(db), *arguments], out.lines, out) == 0, out.getvalue()
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("name", list(CHATS))
async def test_a_chat_says_what_it_said(name: str, folder: Path) -> None:
    replies, arguments, requests, answers = CHATS[name]
    db = folder / "c.db"
    model = scripted(folder, *replies) if replies else []
    events = await talk(db, ["--project", str(folder), *model, *arguments], requests, answers)
    found = {"events": stable(events), "stored": saved(db, events)}
    check("golden_chat.json", name, named(found, folder))


async def fill(folder: Path, pack: Pack, row: int, *replies: str, **limits: int) -> str:
    """Store a group of an episode with these replies and a sibling; return the first one's id."""
    tokenizer, config = Tokenizer.load(bundled_model()), Config()
    config.rollout.max_tokens, config.rollout.max_new_tokens = 6000, 1000
    for key, value in limits.items():
        setattr(config.rollout, key, value)
    task = pack.tasks("train")[row]
    with Store.open(folder / "a.db") as store:
        store.tokenizers.add(
            tokenizer.hash, tokenizer.json, tokenizer.chat_template or "", dict(tokenizer.specials)
        )
        store.tasks.add([task])
        settings = config.model_dump(mode="json")
        settings["task"] = {}
        run = store.runs.add(
            RunRow("r1", "made", status="finished", tokenizer=tokenizer.hash, config=settings)
        )
        sandbox = await Sandbox.open(config.sandbox) if pack.sandbox else None
        try:
            ids = []
            for sample, texts in enumerate((replies, ["no"])):
                policy = ScriptedPolicy(list(texts), tokenizer)
                chat = Chat(tokenizer, "hermes", append_only=True)
                rollout = Rollout(
                    policy, chat, {pack.name: pack}, config, store=store, sandbox=sandbox
                )
                job = Job(task, sample, sample, "g", 1, run.id, "train")
                ids.append((await rollout.run([job]))[0].id)
        finally:
            if sandbox is not None:
                await sandbox.close()
    return ids[0]


async def what_if(folder: Path, episode: str, *arguments: str) -> dict[str, Any]:
    """Return the events of a what-if and the episodes that it stored; samples report in any order."""
    db = folder / "a.db"
    _, events = await session.what_if(db, episode, "--project", str(folder), *arguments)
    kept = [event for event in stable(events) if event["ev"] != "progress"]
    return {"events": kept, "stored": saved(db, events)}


def again(turn: int, samples: int = 2) -> list[str]:
    return ["--turn", str(turn), "--samples", str(samples), "--seed", "3"]


async def test_what_ifs_of_a_call_say_what_they_said(folder: Path) -> None:
    pack = load_pack("calc-task")
    said = ("See.\n" + calc("2*3"), calc("6/0"), "6")
    episode = await fill(folder, pack, 0, *said, max_turns=4)
    with Store.open(folder / "a.db", readonly=True) as store:
        found: dict[str, Any] = {"episode": stored(store.episodes.get(episode))}
    found["rerun"] = await what_if(folder, episode, "--rerun")
    found["verify"] = await what_if(folder, episode, "--verify")
    script = scripted(folder, calc("1+1"), "2")
    found["again"] = await what_if(folder, episode, *again(2, 3), *script)
    found["later"] = await what_if(folder, episode, *again(4), *script)
    edit = ["--edit", "-I try " + calc("9*9")]
    found["edit"] = await what_if(folder, episode, *again(4), *script, *edit)
    found["edited text"] = await what_if(folder, episode, *again(2, 1), *script, "--edit", "6.")
    calls = scripted(folder, *(calc(f"{n}+1") for n in range(9)))
    found["too many turns"] = await what_if(folder, episode, *again(2, 1), *calls)
    found["mistakes"] = [
        await what_if(folder, episode, "--turn", turn, *script) for turn in ("0", "1", "99")
    ]
    tiny = ["--model", "tiny", "--temperature", "1.0"]
    found["the bundled model"] = await what_if(folder, episode, *again(2, 3), *tiny)
    with Store.open(folder / "a.db") as store, store.transaction() as conn:
        conn.execute("UPDATE tool_calls SET result='other' WHERE episode_id=?", (episode,))
    found["another world"] = await what_if(folder, episode, "--rerun")
    found["again in another world"] = await what_if(folder, episode, *again(4), *script)
    check("golden_whatif.json", "calls", named(found, folder))


async def test_what_ifs_with_a_limit_a_user_a_world_and_a_sandbox(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found: dict[str, Any] = {}
    episode = await fill(folder, load_pack("guess-task"), 0, "10", "15", "12", max_turns=5)
    script = scripted(folder, "3", "4", "5", "6", "7")
    found["user"] = [
        await what_if(folder, episode, "--rerun"),
        await what_if(folder, episode, *again(4), *script),
    ]
    (folder / "a.db").unlink()
    door = load_pack(str(folder / "door"))
    (folder / "agentrl.yaml").write_text("task: {packs: [door]}\n")
    episode = await fill(folder, door, 0, "knock", "please", "sesame")
    script = scripted(folder, "open", "sesame")
    found["world"] = [
        await what_if(folder, episode, "--rerun"),
        await what_if(folder, episode, *again(3, 3), *script),
    ]
    (folder / "a.db").unlink()
    odd = load_pack(str(folder / "odd"))
    (folder / "agentrl.yaml").write_text("task: {packs: [odd]}\n")
    limits = {"max_new_tokens": 40, "max_turns": 5}
    episode = await fill(folder, odd, 0, call("send", text="a"), "x", **limits)
    script = scripted(folder, call("boom", text="b"), "many words " * 50)
    found["limit"] = [
        await what_if(folder, episode, "--rerun"),
        await what_if(folder, episode, *again(3), *script),
    ]
    (folder / "a.db").unlink()
    code = load_pack("code-task")
    said = (python("x = 1"), python("x += 1; x"), "Answer: 2")
    episode = await fill(folder, code, 0, *said)
    script = scripted(folder, python("x += 5; x"), "Answer: 6")
    found["sandbox"] = [
        await what_if(folder, episode, "--rerun"),
        await what_if(folder, episode, *again(4, 3), *script),
    ]
    check("golden_whatif.json", "worlds", named(found, folder))


async def test_a_chat_continues_a_stored_episode_as_it_did(folder: Path) -> None:
    said = ("See.\n" + calc("2*3"), calc("6/0"), "6")
    episode = await fill(folder, load_pack("calc-task"), 0, *said)
    script = scripted(folder, calc("1+1"), "2", "three")
    with Store.open(folder / "a.db") as store, store.transaction() as conn:
        conn.execute("UPDATE tool_calls SET result='other' WHERE episode_id=?", (episode,))
    requests = [op("retry"), op("reward"), op("save"), op("undo"), op("undo"),
                op("as_model", text="By hand."), say("Thanks."), op("save")]  # fmt: skip
    given = ["--project", str(folder), "--episode", episode, "--turn", "4", *script]
    events = await talk(folder / "a.db", given, requests)
    found = {"events": stable(events), "stored": saved(folder / "a.db", events)}
    check("golden_chat.json", "a stored episode", named(found, folder))


@pytest.mark.parametrize(
    ("answers", "ran"),
    [
        ([NO, YES], ["refused", None]),
        ([{**NO, "text": "7", "rest": True}], [None, None]),
        ([NO, NO], []),
    ],
)
async def test_calls_that_a_person_refused_or_answered_are_not_run_again(
    folder: Path, answers: list[dict[str, Any]], ran: list[str | None]
) -> None:
    replies = scripted(folder, call("boom", text="a") + call("send", text="b"), "done")
    given = ["--project", str(folder), "--task", "sesame", "--approve", *replies]
    saved = (await talk(folder / "a.db", given, [op("save")], answers))[-2]
    found = (await what_if(folder, saved["episode"], "--verify"))["events"][1:-1]
    assert [(one["same"], one["error_after"]) for one in found] == [(True, error) for error in ran]
