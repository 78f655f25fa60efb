"""Episodes go out as ATIF v1.7 and come back whole; the files of others are read as far as they go."""

import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from agentrl_cli.plugins.traces.atif_read import Whole, read
from agentrl_cli.plugins.traces.atif_write import trajectory
from agentrl_cli.plugins.traces.load import LARGEST, MOST_FILES, load, traces
from agentrl_cli.plugins.traces.trace import UNANSWERED, Trace, episode_of, tokenizer
from agentrl_cli.store import Store
from agentrl_cli.store.codec import dumps
from agentrl_cli.types import (
    ROOT,
    TOP_K,
    Episode,
    Fact,
    Outcome,
    RewardPart,
    StopReason,
    Tokens,
    ToolCall,
    ToolResult,
    TrainSignals,
    Turn,
    new_id,
    supports,
)
from agentrl_cli.types.content import image_part
from tests.helpers.cli import Cli

SUB_AGENTS = Path(__file__).with_name("forms") / "sub-agents.atif.json"
# Made of the pydantic models of Harbor 0.17, without its texts.
SCHEMA = json.loads(Path(__file__).with_name("atif-v1.7.schema.json").read_text())
COUNT = int(os.environ.get("ATIF_EPISODES", "300"))
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
TEXTS = ("", "Grüße, 世界 🌍", "a\x00b\x1b[31m\n\\", "x" * 300, '{"a": [1]}', "<|im_end|>")


def valid(found: Any) -> None:
    """Check the schema and the rules that Harbor's validator adds to it."""
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert [step["step_id"] for step in found["steps"]] == [*range(1, len(found["steps"]) + 1)]
    for step in found["steps"]:
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        results = step.get("observation", {}).get("results", ())
        assert {one["source_call_id"] for one in results if "source_call_id" in one} <= calls
        only = {"metrics", "tool_calls", "reasoning_content", "model_name"} & step.keys()
        assert step["source"] == "agent" or not only
    inner = found.get("subagent_trajectories", [])
    assert len({one["trajectory_id"] for one in inner}) == len(inner)
    for one in inner:
        valid(one)


class Maker:
    """Draws episodes: branches, images, malformed calls, odd numbers, with and without signals."""

    def __init__(self, seed: int) -> None:
        self.dice, self.rng = random.Random(seed), np.random.default_rng(seed)

    def floats(self, *shape: int) -> Any:
        found = self.rng.normal(-1, 3, shape).astype(np.float32)
        odd = self.rng.random(shape)
        found[odd < 0.1], found[odd > 0.97] = np.nan, -np.inf
        return found

    def tokens(self, n: int) -> Tokens:
        ids, tops = self.rng.integers(0, 99, n), self.rng.integers(-1, 99, (n, TOP_K), np.int32)
        sets = [None if self.dice.random() < 0.5 else np.arange(3, dtype=np.int32) for _ in ids]
        floats = (self.floats(n), self.floats(n), self.floats(n))
        origin = self.rng.integers(0, 6, n).astype(np.int8)
        drawn = supports(sets) if self.dice.random() < 0.3 else None
        return Tokens(ids.astype(np.int32), origin, *floats, tops, self.floats(n, TOP_K), drawn)

    def signals(self, n: int) -> TrainSignals:
        found: dict[str, Any] = {
            field.name: None
            if str(field.type).endswith("None") and self.dice.random() < 0.5
            else self.floats(n)
            for field in fields(TrainSignals)
        }
        return TrainSignals(**found | {"clipped": self.rng.integers(0, 5, n).astype(np.int8)})

    def call(self, number: int) -> ToolCall:
        some, bad = self.dice.choice, self.dice.random() < 0.3
        given = None if bad else {"q": some(TEXTS), "n": [number, None]}
        return ToolCall(f"c{number}", "look", given, some(TEXTS), "bad" if bad else None)

    def result(self) -> ToolResult:
        some, images = self.dice.choice, (PNG,) * self.dice.randrange(2)
        numbers = {"a": some([1.5, math.nan])}
        return ToolResult(some(TEXTS), some([None, "timeout"]), 0.5, numbers, images, value=[1])

    def turn(self, index: int, start: int, n: int) -> Turn:
        dice, some = self.dice, self.dice.choice
        role, text = some(["system", "user", "assistant", "assistant", "tool"]), some(TEXTS)
        calls, results = dice.randrange(3), dice.randrange(3)
        shown = (PNG,) if role == "user" and dice.random() < 0.3 else ()
        parts = [image_part(PNG, 4, 4, 1), {"type": "text", "text": text}]
        content = parts if shown else text
        message = {"role": role, "content": content, "reasoning_content": some(TEXTS)}
        return Turn(
            index,
            role,
            (message,) * some([0, 1, 1, 2]),
            start,
            start + n,
            tuple(map(self.call, range(calls if role == "assistant" else 0))),
            tuple(self.result() for _ in range(results if role == "tool" else 0)),
            some([None, StopReason.STOP]),
            some(["", "run@3"]),
            some([0.0, 1.7e9 + dice.random()]),
            dice.random(),
            some([None, 0.25]),
            dice.random() < 0.1,
            some([None, None, None, ROOT, *range(index)]),
            shown,
        )

    def episode(self) -> tuple[Episode, TrainSignals | None]:
        dice, turns, start = self.dice, list[Turn](), 0
        for index in range(dice.randrange(9)):
            turns.append(self.turn(index, start, n := dice.randrange(6)))
            start += n
        parts = [
            RewardPart(name, dice.choice([0.1, 1.0, math.nan]), 0.5, name == "a", "x", True)
            for name in "ab"[: dice.randrange(3)]
        ]
        found = Episode(
            new_id(),
            "task",
            "pack",
            "family",
            step=dice.choice([None, 3]),
            group_id=dice.choice([None, "g"]),
            sample=2,
            seed=2**62,
            kind="train",
            weights_version="v",
            turns=tuple(turns),
            tokens=self.tokens(start),
            reward_parts=tuple(parts),
            outcome=dice.choice([*Outcome]),
            flags=("LOOP",),
            fact=str(Fact.TRAINED),
            advantage=dice.choice([None, -0.3]),
            started=1.5,
            ended=2.5,
        )
        return found, self.signals(start) if dice.random() < 0.5 and start else None


def back(found: Any) -> Whole:
    read_again = read(found, "it", pytest.fail, lambda name: [])
    assert isinstance(read_again, tuple)
    return read_again


def test_forth_and_back() -> None:
    maker = Maker(5)
    for _ in range(COUNT):
        episode, signals = maker.episode()
        text = dumps(trajectory(episode, signals, "hash", masked=False))
        assert "NaN" not in text and "Infinity" not in text
        valid(json.loads(text))
        again, learned, tokenizer_hash, _ = back(json.loads(text))
        assert tokenizer_hash == "hash"
        none = Tokens.empty()
        assert repr(again.with_(tokens=none)) == repr(episode.with_(tokens=none))
        pairs: list[tuple[Any, Any]] = [(again.tokens, episode.tokens), (learned, signals)]
        for got, want in pairs:
            for name in () if want is None else want.__slots__:
                a, b = getattr(got, name), getattr(want, name)
                if name == "support" and b is not None:
                    assert repr([*(() if a is None else a)]) == repr([*b])
                elif b is not None:
                    assert a.dtype == b.dtype, name
                    np.testing.assert_array_equal(a, b, name)


def lines_of(path: Path) -> list[Any]:
    """Episodes of a file, without what another import gives them."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for one in found:
        del one["session_id"], one["extra"]["agentrl"]["run_id"]
    return found


def test_through_a_store(cli: Cli, tmp_path: Path) -> None:
    maker = Maker(7)
    (tmp_path / "b").mkdir()
    with Store.open(tmp_path / "a.db") as store:
        ids: list[str] = []
        for number in range(40):
            episode, signals = maker.episode()
            parent = ids[0] if ids else None
            made = episode.with_(parent_id=parent, started=number + 1.0)
            store.episodes.add([made], split=("train", "test")[number % 2])
            ids.insert(0, episode.id)
            if signals is not None:
                store.signals.add(episode.id, signals)
        store.marks.note(ids[0], "odd")
        for tag in ("seen", "not:good"):
            store.marks.tag(ids[0], tag)
    # children before their parents
    cli("export", *ids, "--db", "a.db", "--format", "atif", "-o", "a.jsonl", "--no-mask")
    assert len(cli.json("import", "atif", "a.jsonl", "--db", "b/b.db")["episodes"]) == 40
    cli("export", "--db", "b/b.db", "--format", "atif", "-o", "b.jsonl", "--no-mask")
    assert lines_of(tmp_path / "a.jsonl")[::-1] == lines_of(tmp_path / "b.jsonl")
    cli("import", "atif", "a.jsonl", "--db", "b/b.db", said="is there already")
    for words, count in (
        ((), 40),
        (("-f", "split:test"), 20),
        (("-f", "tag:seen tag:not:good note:odd"), 1),
    ):
        assert len(cli.json("ls", "--db", "b/b.db", "-n", "99", *words)) == count
    cli("export", "--db", "a.db", "--format", "atfi", code=2, said="Did you mean atif")


def test_a_secret_is_masked_and_its_tokens_are_made_again() -> None:
    secret = {"role": "user", "content": "my key: sk-" + "a1" * 20}
    turns = (Turn(0, "user", (secret,), 0, 1),)
    masked = trajectory(Episode("1" * 14, "t", turns=turns, tokens=Maker(7).tokens(1)), None)
    valid(masked)
    assert "a1a1" not in dumps(masked)
    episode, _, tokenizer_hash, _ = back(masked)
    assert tokenizer_hash == tokenizer().hash and episode.turns[0].end == len(episode.tokens)
    assert "my key: [masked:api-key]" in tokenizer().decode(episode.tokens.ids.tolist())


def foreign(steps: Any, **further: Any) -> dict[str, Any]:
    agent = {"name": "terminus-2", "version": "2.0", "model_name": "some/model"}
    about = {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent}
    return about | {"steps": steps} | further


ASK = {
    "step_id": 1,
    "source": "user",
    "message": "Fix the \x1b[31mtest",
    "timestamp": "2026-10-05T12:00:00Z",
}
CALL: dict[str, Any] = {
    "step_id": 2,
    "source": "agent",
    "message": "Looking.",
    "reasoning_content": "hm",
    "timestamp": "2026-10-05T12:00:02Z",
    "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"cmd": "ls"}}],
    "observation": {"results": [{"source_call_id": "c1", "content": "a.py"}]},
}
DONE = {"step_id": 3, "source": "agent", "message": "Done.", "timestamp": "2026-10-05T12:00:05Z"}


def test_replay_of_a_foreign_file(cli: Cli, tmp_path: Path) -> None:
    inner = foreign([{**ASK, "message": "Look it up."}, DONE], trajectory_id="sub")
    further = foreign([ASK, CALL, {**DONE, "message": "Done later."}])
    (tmp_path / "next.json").write_text(json.dumps(further))
    given = foreign(
        [ASK, CALL, DONE],
        subagent_trajectories=[inner],
        continued_trajectory_ref="next.json",
        final_metrics={"extra": {"reward": 1}},
    )
    (tmp_path / "trajectory.json").write_text(json.dumps(given, indent=1))
    shown = cli("replay", "trajectory.json", "--plain")
    texts = "Fix the|<think>|bash|a.py|Done.|Look it up.|Done later.|3 branches".split("|")
    assert [text for text in texts if text not in shown] == [] and "\x1b" not in shown
    found = cli.json("replay", "trajectory.json")
    assert found["outcome"] == "solved"
    assert found["branches"] == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 6]]
    assert found["turns"][1]["calls"][0]["arguments"] == {"cmd": "ls"}
    # The file says when steps began, and of nothing how long it took.
    assert [turn["started"] for turn in found["turns"][:2]] == [1791201600.0, 1791201602.0]
    results = [one for turn in found["turns"] for one in turn["results"]]
    assert not any(one["seconds"] for one in (*found["turns"], *results))
    assert not (tmp_path / "runs").exists()
    cli("replay", "trajectory.json", "--svg", "shot.svg")
    assert "bash" in (tmp_path / "shot.svg").read_text()


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """A trajectory of others and its sub-agents without our own fields and without parts of a second."""
    steps = [
        {k: v for k, v in step.items() if k not in ("extra", "is_copied_context")}
        | {"timestamp": step["timestamp"][:19]}
        for step in found["steps"]
    ]
    inner = [compared(one) for one in found.get("subagent_trajectories", ())]
    return {**found, "steps": steps, "extra": None, "subagent_trajectories": inner}


def test_what_a_foreign_file_says_of_itself_is_kept(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(SUB_AGENTS.read_bytes())
    (tmp_path / "b").mkdir()
    cli("import", "atif", "t.json", "t.json", "--db", "s.db", said="1 episode in")
    cli("import", "atif", "t.json", "--db", "s.db", said="1 episode, 0 of them new, in")
    cli("export", "--db", "s.db", "--format", "atif", "-o", "out.json")
    cli("import", "atif", "out.json", "--db", "b/b.db")
    cli("export", "--db", "b/b.db", "--format", "atif", "-o", "again.json")
    expected, found, again = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("t", "out", "again")
    )
    valid(found)
    assert again["subagent_trajectories"] == found["subagent_trajectories"]
    shown = cli("replay", "t.json", "--plain")
    assert "helper" in shown and "reader" in shown
    del expected["steps"][1]["metrics"]["cached_tokens"], expected["final_metrics"]["extra"]
    assert compared(found) == compared(expected)


MISTAKES: dict[str, tuple[Any, str]] = {
    "version": ({"schema_version": "ATIF-v9.0"}, "its schema_version is 'ATIF-v9.0'"),
    "none": ({"schema_version": None}, "no schema_version"),
    "id": ({"steps": [{**ASK, "step_id": 9}, DONE]}, "steps[1]: its step_id is not above the one before: '3'"),
    "time": ({"steps": [{**ASK, "timestamp": "yesterday"}]}, "not a time: 'yesterday'"),
    "calls": ({"steps": [{**CALL, "tool_calls": CALL["tool_calls"] * 2}]}, "two calls have one id: 'c1'"),
    "answer": (
        {"steps": [{**CALL, "observation": {"results": [{"source_call_id": "nope", "content": "x"}]}}]},
        "it answers a call that it does not make: 'nope'",
    ),
    "agent": (
        {"steps": [{**CALL, "observation": {"results": [{"subagent_trajectory_ref": [{"trajectory_id": "ghost"}]}]}}]},
        "its sub-agent is not in the file: 'ghost'",
    ),
    "empty": ({"steps": [], "extra": {"reward": 1}}, "has no step that can be read"),
    "source": ({"steps": [{**ASK, "source": "robot"}, DONE]}, "its source is 'robot'"),
    "reward": ({"extra": {"reward": "1"}}, "the reward '1' is not a number"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(tmp_path: Path, name: str) -> None:
    given, said = MISTAKES[name]
    (tmp_path / "x.json").write_text(json.dumps(foreign([ASK, DONE]) | given))
    problems: list[str] = []
    found = [*traces(tmp_path / "x.json", problems.append)]
    assert len(problems) == 1 and said in problems[0]
    assert len(found) == (name not in ("version", "none", "empty"))
    if name == "answer":
        assert isinstance(found[0], Trace)
        results = episode_of(found[0]).turns[-1].results
        assert [(one.text, one.error) for one in results] == [("", UNANSWERED), ("x", None)]


def deep(levels: int) -> str:
    return '{"schema_version": "ATIF-v1.7", "steps": ' + "[" * levels + "]" * levels + "}"


def long_line(path: Path) -> None:
    good = json.dumps(foreign([ASK, DONE])).encode()
    with path.open("wb") as file:
        file.write(good + b"\n")
        file.seek(2 * LARGEST, 1)
        file.write(b"\n" + good.replace(b"Done.", b"Other.") + b"\n")


WRITERS: dict[str, tuple[Callable[[Path], object], str, int]] = {
    "deep": (lambda path: path.write_text(deep(10_000)), "x.jsonl:1 is left out: it is nested", 0),
    "types": (
        lambda path: path.write_text(
            json.dumps(foreign([7, {**ASK, "message": 5}, {**CALL, "tool_calls": [3]}, DONE]))
        ),
        "x.jsonl.steps[1] is left out: its message is neither a text nor a list of parts",
        1,
    ),
    "steps": (lambda path: path.write_text(json.dumps(foreign({}))), "steps is not a list", 0),
    "numbers": (
        lambda path: path.write_text(
            "\n".join(
                json.dumps(foreign([ASK, DONE], extra={"reward": "0"}, session_id=word)).replace(
                    '"0"', word
                )
                for word in ("NaN", "-Infinity", "1" + 400 * "0", "true")
            )
        ),
        "A reward of -inf is not a finite number: its trace is ungraded",
        4,
    ),
    "clock": (
        lambda path: path.write_text(json.dumps(foreign([DONE, ASK]))),
        "the clock runs backwards at message 2",
        1,
    ),
    "twice": (
        lambda path: path.write_text((json.dumps(foreign([ASK, DONE])) + "\n") * 2),
        "is there already",
        1,
    ),
    "circle": (
        lambda path: path.write_text(
            json.dumps(foreign([ASK], continued_trajectory_ref="x.jsonl"))
        ),
        "trajectories form a circle",
        1,
    ),
    "outside": (
        lambda path: path.write_text(
            json.dumps(foreign([ASK], continued_trajectory_ref="../../etc/passwd"))
        ),
        "is not a file beside",
        1,
    ),
    "long": (long_line, "x.jsonl:2 is left out: it is longer than 64 MiB", 2),
    "surrogate": (
        lambda path: path.write_text(
            json.dumps(foreign([ASK, {**DONE, "message": "\ud800 \U0001f600"}], notes="\udc00"))
        ),
        "x.jsonl.steps[1].message has a lone surrogate, which is not a character: it is read as U+FFFD",
        1,
    ),
    "sub-agent": (
        lambda path: path.write_text(
            json.dumps(foreign([ASK, DONE], subagent_trajectories=[{"steps": 5}, 7]))
        ),
        "subagent_trajectories[1] is left out",
        1,
    ),
    "name": (
        lambda path: path.write_text(
            json.dumps(foreign([ASK, DONE], continued_trajectory_ref="n" * 5000))
        ),
        "is not a file beside",
        1,
    ),
    "own": (
        lambda path: path.write_text(
            json.dumps(foreign([ASK], extra={"agentrl": {"tokenizer": 5, "reward_parts": [{}]}}))
        ),
        "read from its steps",
        1,
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_hostile_files(cli: Cli, tmp_path: Path, name: str) -> None:
    write, said, episodes = WRITERS[name]
    write(tmp_path / "x.jsonl")
    cli("import", "atif", "x.jsonl", "--db", "s.db", code=0 if episodes else 2, said=said)
    if not episodes:
        assert [one.name for one in tmp_path.iterdir()] == ["x.jsonl"]
        return
    assert len(cli.json("ls", "--db", "s.db")) == episodes
    assert len(cli.json("ls", "runs", "--db", "s.db")) == 1
    if name == "surrogate":
        assert "\ufffd \U0001f600" in json.dumps(
            cli.json("export", "last", "--db", "s.db", "--format", "atif"), ensure_ascii=False
        )


def test_a_document_that_is_too_long(cli: Cli, tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(LARGEST + 1)
    cli("import", "atif", "x.json", "--db", "new/s.db", code=2, said="it is longer than 64 MiB")
    assert not (tmp_path / "new").exists()
    said = "it is longer than 64 MiB"  # a path by which a folder cannot be deleted hides nothing
    cli("import", "atif", "x.json", "--db", "new/../other/s.db", code=2, said=said)
    assert not (tmp_path / "other").exists()


BREAKS: list[Callable[[Any, Any], Any]] = [
    lambda about, turn: turn["signals"]["advantage"].append(0.0),
    lambda about, turn: turn["tokens"]["origin"].pop(),
    lambda about, turn: turn["tokens"]["top_ids"].__setitem__(0, [1]),
    lambda about, turn: turn.update(index=turn["index"] + 1),
    lambda about, turn: turn.update(parent=turn["index"]),
    lambda about, turn: about.update(seed=2**70),
]


def test_arrays_and_turns_that_do_not_fit_are_not_stored(tmp_path: Path) -> None:
    maker, lines = Maker(11), list[str]()
    turn = Turn(0, "user", ({"role": "user", "content": "a"},), 0, 2)
    for number, broken in enumerate(BREAKS):
        made = Episode(f"{number:014d}", "t", turns=(turn,), tokens=maker.tokens(2))
        one = json.loads(dumps(trajectory(made, maker.signals(2), "hash", masked=False)))
        broken(one["extra"]["agentrl"], one["steps"][0]["extra"]["agentrl"][0])
        lines.append(json.dumps(one))
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with Store.open(tmp_path / "s.db") as store:
        ids, said = load(tmp_path / "x.jsonl", store)
        assert {store.episodes.get(id).pack for id in ids} == {"import"}
    refused = [one.partition(".extra")[0] for one in said if "cannot be used" in one]
    assert refused == [f"x.jsonl:{number}" for number in range(1, 6)]
    assert any("Episode 00000000000005 is left out" in one for one in said)


def test_a_chain_of_many_files_ends_with_a_sentence(cli: Cli, tmp_path: Path) -> None:
    for number in range(2 * MOST_FILES):
        text = json.dumps(foreign([ASK, DONE], continued_trajectory_ref=f"c{number + 1}.json"))
        (tmp_path / f"c{number}.json").write_text(text)
    said = f"c0.json leads to more than {MOST_FILES} files"
    cli("import", "atif", "c0.json", "--db", "s.db", said=said)
    assert len(cli.json("ls", "--db", "s.db")) == 1
