"""What is written comes back, to others too: episodes token by token, branches, runs, steps, controls, marks."""

import math
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli import read_tokens
from agentrl_cli.errors import NotFound, StoreError
from agentrl_cli.store import EvalRow, RunRow, Store, episode_key
from agentrl_cli.store.codec import token_columns, tokens_of
from agentrl_cli.store.maintenance import backup, prunable, prune, status, vacuum
from agentrl_cli.types import (
    TOP_K,
    AgentState,
    Episode,
    Fact,
    Generation,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Task,
    Tokens,
    ToolCall,
    ToolResult,
    TrainSignals,
    Turn,
    new_id,
    supports,
)
from agentrl_cli.types.content import digest
from tests.helpers.processes import comes
from tests.helpers.trees import Said, chain, fork, sub_agent, three_leaves
from tests.helpers.trees import episode as said_episode


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "runs" / "agentrl.db") as opened:
        yield opened


def same(a: Any, b: Any) -> bool:
    """Equality through dataclasses and arrays, bit for bit, NaN equal to NaN."""
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)
        )
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(
        a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
    )


def sampled(rng: np.random.Generator, n: int) -> Tokens:
    def floats(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    return Tokens.from_generation(
        Generation(
            ids=rng.integers(0, 2**31 - 1, n).astype(np.int32),
            logp_sampled=floats(n),
            logp_policy=floats(n),
            entropy=floats(n),
            top_ids=rng.integers(-1, 512, (n, TOP_K)).astype(np.int32),
            top_logps=floats(n, TOP_K),
            stop_reason=StopReason.STOP,
            weights_version="step-3",
        )
    )


TEXTS = ["", "4,5", "naïve — 日本語 🙂", "a\nb\x00c", '{"quoted": "\\"}', "\ud800 lone", "%_\\"]


def random_episode(rng: np.random.Generator, **given: Any) -> Episode:
    """Prompt, then assistant and tool turns with anything that can be in them."""

    def text() -> str:
        return TEXTS[rng.integers(len(TEXTS) - 2)]

    spans: list[Tokens] = [
        Tokens.from_ids(
            rng.integers(0, 99, n := int(rng.integers(0, 30))).tolist(), [Origin.USER] * n
        )
    ]
    turns = [
        Turn(
            0,
            "user",
            ({"role": "user", "content": TEXTS[rng.integers(len(TEXTS))]},),
            0,
            n,
            started=1.5,
        )
    ]
    for _ in range(rng.integers(0, 4)):
        calls = tuple(
            ToolCall(
                f"c{k}",
                text(),
                {"a": [1, None, text()]} if k % 2 else None,
                text(),
                text() if k == 2 else None,
            )
            for k in range(rng.integers(0, 4))
        )
        parts = [sampled(rng, int(rng.integers(0, 20))), Tokens.from_ids([7], [Origin.FORCED])]
        _add(
            turns,
            spans,
            "assistant",
            Tokens.concat(parts[: rng.integers(1, 3)]),
            calls=calls,
            text=text(),
        )
        results = tuple(
            ToolResult(
                text(),
                text() if k % 2 else None,
                0.5,
                {"ms": 1.5, "n": 2},
                (b"\x89x",) * k,
                level="ns",
                done=k > 1,
            )
            for k in range(rng.integers(0, len(calls) + 2))
        )
        answer = Tokens.from_ids(list(range(5)), [Origin.TOOL] * 5)
        if rng.random() < 0.8:
            _add(turns, spans, "tool", answer, results=results, text=text())
    episode = Episode(
        id=new_id(),
        task_id="calc/1",
        pack="calc",
        family="add",
        sample=int(rng.integers(8)),
        seed=2**40 + 1,
        weights_version="step-3",
        turns=tuple(turns),
        tokens=Tokens.concat(spans),
        reward_parts=(
            RewardPart("correct", 0.1 + 0.2, 1.0, primary=True, detail=text()),
            RewardPart("format", -1.0, 0.3),
        ),
        outcome=Outcome.FAILED,
        error=text(),
        flags=("LOOP", "BADARG"),
        fact=Fact.TRAINED.value,
        advantage=-0.1,
        started=1.7e9 + 0.123456,
        ended=1.7e9 + 3.3,
    )
    return episode.with_(**given)


def _add(
    turns: list[Turn], spans: list[Tokens], role: str, tokens: Tokens, *, text: str, **rest: Any
) -> None:
    start = turns[-1].end
    reason = StopReason.LENGTH if role == "assistant" else None
    messages = ({"role": role, "content": text, "extra": {"z": 1, "a": [True, None, 1.5]}},)
    turns.append(
        Turn(
            len(turns),
            role,
            messages,
            start,
            start + len(tokens),
            stop_reason=reason,
            seconds=0.25,
            **rest,
        )
    )
    spans.append(tokens)


def write(store: Store, episode: Episode) -> None:
    store.episodes.start(
        episode.with_(turns=(), tokens=Tokens.empty(), reward_parts=(), fact="", advantage=None)
    )
    for turn in episode.turns:
        store.live.set(episode.id, AgentState.GENERATING, turn.index)
        store.episodes.add_turn(episode.id, turn, episode.tokens.slice(turn.start, turn.end))
    store.episodes.finish(episode)


@pytest.mark.parametrize("seed", range(30))
def test_episode_comes_back_equal(store: Store, seed: int) -> None:
    rng = np.random.default_rng(seed)
    by_turn, at_once = random_episode(rng), random_episode(rng)
    write(store, by_turn)
    store.episodes.finish(at_once)
    for episode in (by_turn, at_once):
        assert same(store.episodes.get(episode.id), episode)
        row = store.episodes.row(episode.id)
        assert (row.n_turns, row.n_tokens) == (len(episode.turns), len(episode.tokens))
        assert row.n_model_tokens == episode.trained_tokens
        assert (row.n_calls, row.n_tool_errors) == (episode.tool_calls, episode.tool_errors)
        assert row.reward == pytest.approx(0.3 - 0.3) and row.primary_score == 0.1 + 0.2
        assert row.flags == ("LOOP", "BADARG") and row.seconds == pytest.approx(3.176544, abs=1e-6)
    assert store.live.all() == []
    with Store.open(store.path, readonly=True) as reader:
        assert same(reader.episodes.get(by_turn.id), by_turn)


def test_every_array_bit_survives(store: Store) -> None:
    odd = np.array([np.nan, -0.0, np.inf, -np.inf, 1e-45, 3.4e38, 0.1], np.float32)
    tokens = Tokens.from_generation(
        Generation(
            np.arange(7, dtype=np.int32), odd, odd[::-1], odd, np.zeros((7, 5), np.int32), np.tile(odd, (5, 1)).T,
            StopReason.STOP, "",
        )
    )  # fmt: skip
    episode = Episode(
        new_id(),
        "t",
        turns=(Turn(0, "assistant", (), 0, 7),),
        tokens=tokens,
        outcome=Outcome.SOLVED,
        started=1.0,
    )
    store.episodes.finish(episode)
    assert same(store.episodes.get(episode.id), episode)


def test_the_sets_of_sampled_tokens_come_back() -> None:
    sets = [[1, 2], None, [3], None]
    support = supports([None if ids is None else np.array(ids, np.int32) for ids in sets])
    tokens = replace(sampled(np.random.default_rng(0), 4), support=support)
    back = tokens_of([token_columns(tokens)]).support
    assert back is not None and [None if ids is None else ids.tolist() for ids in back] == sets


def test_running_episode_counts_while_it_runs(store: Store) -> None:
    episode = random_episode(np.random.default_rng(11))
    store.episodes.start(episode)
    first = episode.turns[0]
    store.episodes.add_turn(episode.id, first, episode.tokens.slice(first.start, first.end))
    store.live.set(episode.id, AgentState.PROCESSING_TOOLS, 1, "x" * 9000)
    (live,) = store.live.all()
    assert (live.state, live.turn, len(live.text), live.task_id) == (
        "processing_tools",
        1,
        4000,
        "calc/1",
    )
    row = store.episodes.row("last")
    assert (row.running, row.reward, row.n_turns, row.n_tokens) == (True, None, 1, first.end)
    assert store.episodes.get(episode.id).outcome is None


def test_a_prompt_waits_for_the_first_turn_and_comes_back_equal(store: Store) -> None:
    episode = random_episode(np.random.default_rng(5))
    prompt, rest = episode.turns[0], episode.turns[1:]
    store.episodes.start(episode)
    store.episodes.add_turn(
        episode.id, prompt, episode.tokens.slice(prompt.start, prompt.end), later=True
    )
    with Store.open(store.path, readonly=True) as other:
        assert (
            other.episodes.ids() == []
        )  # its start waits, too: nothing is seen without what it belongs to
        store.episodes.add_turn(
            episode.id, rest[0], episode.tokens.slice(rest[0].start, rest[0].end)
        )
        (row,) = other.episodes.rows(other.episodes.ids())
        assert (row.n_turns, row.n_tokens) == (2, rest[0].end)
    store.episodes.finish(episode)
    assert same(store.episodes.get(episode.id), episode)
    store.episodes.start(Episode("e1", "t"))
    for later in (True, False):
        with pytest.raises(ValueError, match=r"spans 0\.\.3 but has 2"):
            tokens = Tokens.from_ids([1, 2], [2, 2])
            store.episodes.add_turn("e1", Turn(0, "user", (), 0, 3), tokens, later=later)
    assert store.episodes.turns("e1") == []


@pytest.mark.parametrize(
    "changed", [{}, {"started": 7.0}, {"step": 9}, {"task_id": "another"}, {"group_id": None}]
)
def test_an_end_sets_every_column_whatever_its_start_said(
    store: Store, changed: dict[str, Any]
) -> None:
    episode = random_episode(np.random.default_rng(6))
    store.tokenizers.add("hash", "{}")
    store.episodes.start(episode, split="train", tokenizer="hash")
    ended = episode.with_(**changed)
    store.episodes.finish(ended)
    (row,) = store.episodes.rows(store.episodes.ids())
    assert same(store.episodes.get(episode.id), ended) and (row.split, row.tokenizer) == (
        "train",
        "hash",
    )


def test_signals_are_split_by_turn_and_come_back(store: Store) -> None:
    rng = np.random.default_rng(8)
    episode = next(e for e in iter(lambda: random_episode(rng), None) if e.trained_tokens > 10)
    write(store, episode)
    assert store.signals.get(episode.id) is None
    trained, n = episode.tokens.trained_mask, len(episode.tokens)

    def column() -> Any:
        return np.where(trained, rng.normal(size=n), np.nan).astype(np.float32)

    clipped = (trained & (rng.random(n) < 0.5)).astype(np.int8)
    nan = np.full(n, np.nan, np.float32)
    for signals in (
        TrainSignals(nan, nan, nan, np.zeros(n, np.int8), nan),  # not the same as no signals
        TrainSignals(column(), column(), column(), clipped, column(), logp_ref=column()),
    ):
        store.signals.add(episode.id, signals)
        assert same(store.signals.get(episode.id), signals)
    with pytest.raises(ValueError, match="signals have 0 tokens"):
        none = np.zeros(0, np.float32)
        store.signals.add(episode.id, TrainSignals(none, none, none, clipped[:0], none))
    with pytest.raises(NotFound):
        store.signals.add("nosuch", signals)


def test_facts_set_advantage_and_survive_a_second_finish(store: Store) -> None:
    episode = random_episode(np.random.default_rng(4), fact="", advantage=None)
    store.episodes.finish(episode)
    store.marks.set_facts([(episode.id, Fact.SKIPPED_ZERO_VARIANCE, None)])
    assert (
        store.episodes.row(episode.id).fact
        == "skipped:no_signal: all rewards of the group are equal"
    )
    store.marks.set_facts([(episode.id, Fact.TRAINED, np.float32(0.5))])  # type: ignore[list-item]  # numpy numbers are fine
    store.episodes.finish(episode)
    row = store.episodes.row(episode.id)
    assert (row.fact, row.advantage) == ("trained", 0.5)


def test_runs_by_name_prefix_and_id(store: Store) -> None:
    first = store.runs.add(RunRow(id="", name="grpo", config={"seed": 1, "nested": {"lr": 1e-5}}))
    second = store.runs.add(RunRow(id="", name="grpo"))
    assert (first.name, second.name) == ("grpo", "grpo-2")
    assert (
        store.runs.get("grpo") == first
        and store.runs.get(second.id[:-1]) == second
        and store.runs.get("last") == second
    )
    assert [run.name for run in store.runs.all()] == ["grpo-2", "grpo"]
    with pytest.raises(NotFound, match="could be several"):
        store.runs.get("gr")
    with pytest.raises(NotFound) as missing:
        store.runs.get("grop")
    assert "grpo" in missing.value.hint
    store.runs.update(first.id, status="finished", step=3)
    assert (store.runs.get(first.id).state, store.runs.get(first.id).alive) == ("finished", False)
    assert store.runs.get(second.id).state == "running"
    store.runs.update(second.id, pid=2**22 + 1)
    assert store.runs.get(second.id).state == "interrupted"
    with pytest.raises(NotFound, match="statsu"):
        store.runs.update(first.id, statsu="x")


def test_a_run_s_name_is_one_word_of_a_shell(store: Store) -> None:
    names = ["my depot-grpo", "my depot-grpo", "仓库-grpo", "a'b; $(c)"]
    added = [store.runs.add(RunRow(id="", name=name)).name for name in names]
    assert added == ["my-depot-grpo", "my-depot-grpo-2", "仓库-grpo", "a-b-c-"]


def test_steps_merge_and_keep_nan_and_infinity(store: Store) -> None:
    run = store.runs.add(RunRow(id="r1", name="a"))
    store.runs.add_step("r1", 1, {"reward": 0.25, "kl": math.nan})
    store.runs.add_step("r1", 2, {"reward": np.float32(0.5)})  # type: ignore[dict-item]  # numpy numbers are fine
    store.runs.add_step("r1", 1, {"eval": math.inf})
    one, two = store.runs.steps("r1")
    assert (one["step"], one["reward"], one["eval"]) == (1, 0.25, math.inf) and math.isnan(
        one["kl"]
    )
    assert store.runs.steps("r1", since=2) == [two] and two["reward"] == 0.5
    assert store.runs.get(run.id).step == 2
    assert store.conn.execute("SELECT json_extract(metrics, '$.reward') FROM steps").fetchall() == [
        (0.25,),
        (0.5,),
    ]


def test_controls_are_taken_once_and_leave_events(store: Store) -> None:
    store.runs.add(RunRow(id="r1", name="a"))
    with Store.open(store.path) as watcher:
        watcher.controls.add("r1", "set", {"key": "train.lr", "value": None})
        watcher.controls.add("r1", "stop")
    taken = store.controls.take("r1")
    assert [(item.action, dict(item.data)) for item in taken] == [
        ("set", {"key": "train.lr", "value": None}),
        ("stop", {}),
    ]
    assert store.controls.take("r1") == []
    assert [event["kind"] for event in store.journal.events("r1")] == [
        "control:set",
        "control:stop",
    ]
    assert all(item.taken for item in store.controls.all("r1"))


def test_logs_alerts_evals_checkpoints_drift_tokenizer(store: Store) -> None:
    store.runs.add(RunRow(id="r1", name="a"))
    for n in range(5):
        store.journal.add_log("r1", "info", f"line {n}")
    lines = store.journal.logs("r1", limit=2)
    assert [line["text"] for line in lines] == ["line 3", "line 4"]
    assert store.journal.logs("r1", since=lines[-1]["id"]) == []
    store.journal.add_alert("r1", "warn", "tool_errors", 0.3, 0.2, "look")
    assert store.journal.alerts("r1")[0]["value"] == 0.3
    store.runs.add_eval(
        EvalRow(
            "r1",
            20,
            "step-20",
            n_tasks=150,
            n_samples=4,
            pass_rate=0.5,
            metrics={"pass@4": math.nan},
        )
    )
    (row,) = store.runs.evals("r1")
    assert (row.pass_rate, row.n_tasks) == (0.5, 150) and math.isnan(row.metrics["pass@4"])
    for step in (10, 20):
        store.runs.add_checkpoint("r1", step, f"ckpt/{step}", {"reward": 0.1}, "step")
        store.runs.add_checkpoint("r1", step, f"ckpt/{step}", {"reward": 0.1}, "last")
    assert [(c.kind, c.step) for c in store.runs.checkpoints("r1")] == [
        ("step", 10),
        ("step", 20),
        ("last", 20),
    ]
    store.runs.remove_checkpoint("r1", "ckpt/10")
    assert len(store.runs.checkpoints("r1")) == 2
    store.tokenizers.add("h", '{"a": "é"}', "{{ x }}", {"eos_token": "<|im_end|>"})
    found = store.tokenizers.get("h")
    assert found is not None and (found.tokenizer_json, found.specials) == (
        '{"a": "é"}',
        {"eos_token": "<|im_end|>"},
    )
    assert store.tokenizers.get("none") is None
    store.episodes.start(Episode("e1", "t"))
    store.marks.add_drift("e1", kind="structural", turn=1, position=9, expected="\n", got="")
    assert store.marks.drift("e1")[0].position == 9


def test_tasks_give_their_split_to_episodes(store: Store) -> None:
    task = Task(
        "calc/1",
        "calc",
        "add",
        "heldout",
        ({"role": "user", "content": "?"},),
        {"answer": 4},
        ("calculator",),
    )
    store.tasks.add([task])
    assert store.tasks.get("calc/1") == task and store.tasks.get("calc/1", "other") is None
    episode = random_episode(np.random.default_rng(0))
    store.episodes.start(episode)
    assert store.episodes.row(episode.id).split == "heldout"
    store.episodes.finish(episode)
    assert store.episodes.row(episode.id).split == "heldout"


def test_siblings_children_and_resume_keys(store: Store) -> None:
    rng = np.random.default_rng(1)
    store.tokenizers.add("hash", "{}")
    store.runs.add(RunRow(id="r1", name="a", tokenizer="hash"))
    group = [
        random_episode(rng, run_id="r1", step=4, group_id="g", sample=n, kind="train")
        for n in (2, 0, 1)
    ]
    for episode in group:
        write(store, episode)
    child = random_episode(
        rng, run_id="r1", group_id="g", kind="whatif", parent_id=group[0].id, parent_turn=1
    )
    store.episodes.add([child])
    assert [row.sample for row in store.episodes.siblings(group[0].id)] == [0, 1, 2]
    assert [row.id for row in store.episodes.children(group[0].id)] == [child.id]
    assert store.episodes.find_finished("r1", 4) == {f"r1/4/g/{e.sample}": e.id for e in group}
    assert store.episodes.row(child.id).tokenizer == "hash"
    assert store.stats.group("g", "r1")[0] == 4


def test_an_unfinished_attempt_is_replaced_by_the_next_with_its_key(store: Store) -> None:
    store.runs.add(RunRow(id="r1", name="a"))
    old, new = (
        Episode(new_id(), "t", run_id="r1", step=1, group_id="g", kind="train") for _ in range(2)
    )
    assert episode_key(old) == episode_key(new) == "r1/1/g/0"
    store.episodes.start(old)
    store.episodes.start(new)
    assert [row.episode_id for row in store.live.all("r1")] == [new.id]
    assert len(store.episodes.ids()) == 1
    assert store.episodes.cancel("r1") == 1
    row = store.episodes.row(new.id)
    assert (row.outcome, row.fact) == (Outcome.CANCELLED, Fact.SKIPPED_CANCELLED)
    assert store.live.all("r1") == []


def test_resolve_episode(store: Store) -> None:
    with pytest.raises(NotFound, match="No last episode"):
        store.episodes.resolve("last")
    for n, (name, value) in enumerate([("aaa1", 0.0), ("aaa2", 1.0), ("bbb1", 0.5)]):
        store.episodes.finish(
            Episode(
                name,
                "t",
                reward_parts=(RewardPart("r", value),),
                outcome=Outcome.FAILED,
                started=1.0 + n,
            )
        )
    store.episodes.finish(Episode("err", "t", outcome=Outcome.ENV_ERROR, started=9.0))
    named = {
        name: store.episodes.resolve(name)
        for name in ("last", "best", "worst", "b", "AAA2", "agentrl:aaa1@t2.31")
    }
    assert list(named.values()) == ["err", "aaa2", "aaa1", "bbb1", "aaa2", "aaa1"]
    with pytest.raises(NotFound, match="several") as several:
        store.episodes.resolve("aaa")
    assert "aaa1, aaa2" in several.value.hint
    with pytest.raises(NotFound) as missing:
        store.episodes.get("bbb2")
    assert "bbb1" in missing.value.hint and missing.value.exit_code == 2


def test_tags_and_notes(store: Store) -> None:
    episode = random_episode(np.random.default_rng(0))
    store.episodes.finish(episode)
    for tag in ("seen", "keep", "seen"):
        store.marks.tag(episode.id, tag)
    store.marks.untag(episode.id, "keep")
    store.marks.note(episode.id, "locale comma")
    row = store.episodes.row(episode.id)
    assert (row.tags, row.note) == (("seen",), "locale comma")
    store.marks.note(episode.id, "")
    assert store.episodes.row(episode.id).note == "" and store.stats.tags() == {"seen": 1}


def test_deleting_a_run_leaves_nothing_of_it(store: Store) -> None:
    rng = np.random.default_rng(6)
    store.runs.add(RunRow(id="r1", name="a"))
    store.runs.add(RunRow(id="r2", name="b"))
    for n in range(6):
        write(store, random_episode(rng, run_id=f"r{1 + n % 2}", step=1, group_id="g", sample=n))
    store.journal.add_log("r1", "info", "x")
    store.runs.add_step("r1", 1, {"a": 1.0})
    assert store.runs.delete("r1") == 3
    counts = status(Path(store.path)).rows
    assert (
        counts["runs"],
        counts["episodes"],
        counts["logs"],
        counts["steps"],
        counts["groups"],
    ) == (1, 3, 0, 0, 1)
    left = {row.id for row in store.episodes.rows(store.episodes.ids())}
    for table in ("turns", "turn_tokens", "reward_parts", "tool_calls"):
        assert {row[0] for row in store.conn.execute(f"SELECT episode_id FROM {table}")} <= left
    assert store.conn.execute("PRAGMA foreign_key_check").fetchall() == []


def test_an_unknown_run_is_refused_and_holds_nothing_back(store: Store) -> None:
    with pytest.raises(StoreError):
        store.episodes.finish(random_episode(np.random.default_rng(0), run_id="nosuch"))
    store.journal.add_log("nosuch", "info", "bad")
    store.journal.add_log(None, "info", "good")
    assert [line["text"] for line in store.journal.logs(None)] == ["good"]
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "next")
    assert len(store.journal.logs(None)) == 2


def test_an_inner_transaction_that_fails_is_taken_back_alone(store: Store) -> None:
    episode = random_episode(np.random.default_rng(0))
    turn = Turn(0, "user", (), 0, 3)
    with store.transaction():
        store.journal.add_log(None, "info", "kept")
        with pytest.raises(ValueError, match="spans"):
            store.episodes.finish(episode.with_(turns=(turn,), tokens=Tokens.from_ids([1], [2])))
        store.episodes.finish(episode.with_(id="other"))
    assert [row.id for row in store.episodes.rows(store.episodes.ids())] == ["other"]
    assert [line["text"] for line in store.journal.logs(None)] == ["kept"]


def test_queued_writes_reach_other_readers_by_themselves(store: Store) -> None:
    store.runs.add(RunRow(id="r1", name="a"))
    with Store.open(store.path, readonly=True) as reader:
        version = reader.data_version()
        store.journal.add_log("r1", "info", "hello")
        assert reader.journal.logs("r1") == []  # it waits
        assert comes(lambda: reader.data_version() != version)
        assert [line["text"] for line in reader.journal.logs("r1")] == ["hello"]
        with pytest.raises(StoreError, match="reading only"):
            reader.journal.add_log("r1", "info", "no")


def test_prune_backup_vacuum(store: Store, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    episodes = [random_episode(rng, group_id="g", sample=n) for n in range(6)]
    seen, *rest = episodes[1].turns
    picture = b"\x89PNG\r\n\x1a\n"
    pictured = replace(seen, images=(picture,))
    episodes[1] = episodes[1].with_(turns=(pictured, *rest))
    for n, episode in enumerate(episodes):
        store.episodes.finish(
            episode.with_(reward_parts=(RewardPart("r", n / 5, 1.0, primary=True),))
        )
    spared = prunable(store, keep=("best", "worst"), older_days=1)
    assert spared == [episode.id for episode in episodes[1:5]]
    first, kept = episodes[1], episodes[0]
    assert prune(store, spared, "half") == 4
    half = store.episodes.get(first.id).tokens
    np.testing.assert_allclose(
        half.logp_policy, first.tokens.logp_policy, rtol=1e-3, equal_nan=True
    )
    prune(store, spared, "half")  # twice changes nothing
    assert same(store.episodes.get(first.id).tokens, half)
    copy = tmp_path / "copy.db"
    assert backup(Path(store.path), copy) == copy.stat().st_size
    prune(store, spared, "numbers")
    bare = store.episodes.get(first.id).tokens
    assert (
        np.array_equal(bare.ids, first.tokens.ids)
        and np.isnan(bare.logp_policy).all()
        and (bare.top_ids == -1).all()
    )
    assert same(store.episodes.get(kept.id).tokens, kept.tokens)
    assert (digest(picture),) in store.select("SELECT hash FROM attachments")
    prune(store, spared, "episodes")
    assert len(store.episodes.ids()) == 2
    assert (digest(picture),) not in store.select("SELECT hash FROM attachments")
    before, after = vacuum(Path(store.path))
    assert after <= before and status(Path(store.path), check=True).check == "ok"
    with Store.open(copy, readonly=True) as other:
        assert same(other.episodes.get(first.id).tokens, half)


# --- turns that branch ---

TREES = {"fork": fork(), "sub_agent": sub_agent(), "three_leaves": three_leaves(), "chain": chain()}


def with_calls(said: list[Said], name: str) -> Episode:
    """Every assistant turn calls a tool named by its index, and every tool turn answers with its own."""
    one = said_episode(said, name)
    turns = []
    for turn in one.turns:
        if turn.role == "assistant":
            turn = replace(turn, calls=(ToolCall(f"c{turn.index}", f"tool{turn.index}", {}, "{}"),))
        if turn.role == "tool":
            turn = replace(turn, results=(ToolResult(f"answer {turn.index}"),))
        turns.append(turn)
    return one.with_(turns=tuple(turns))


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("shape", sorted(TREES))
def test_a_tree_comes_back_and_results_belong_to_the_calls_of_their_path(
    store: Store, shape: str, buffered: bool
) -> None:
    one = with_calls(TREES[shape], "e")
    if buffered:
        store.episodes.start(one)
        for turn in one.turns:
            store.episodes.add_turn(
                "e", turn, one.tokens.slice(turn.start, turn.end), later=turn.index % 2 == 0
            )
        store.episodes.finish(one)
    else:
        store.episodes.add([one])
    back = store.episodes.get("e")
    assert back.turns == one.turns and back.branches == one.branches
    assert back.tokens.ids.tolist() == one.tokens.ids.tolist()
    assert [b.trained.tolist() for b in back.sequences] == [
        b.trained.tolist() for b in one.sequences
    ]
    expected = {
        "fork": [(1, "answer 2"), (1, "answer 4")],
        "sub_agent": [(1, "answer 4")],
        "three_leaves": [],
        "chain": [(1, "answer 2"), (3, "answer 4")],
    }
    sql = "SELECT turn, result FROM tool_calls WHERE result IS NOT NULL ORDER BY result_turn"
    assert store.conn.execute(sql).fetchall() == expected[shape]


def test_signals_are_stored_with_the_turn_of_their_token(store: Store) -> None:
    one = said_episode(three_leaves())
    store.episodes.add([one])
    values = np.where(one.tokens.trained_mask, np.arange(len(one.tokens)), np.nan).astype(
        np.float32
    )
    clipped = np.zeros(len(values), np.int8)
    store.signals.add("e", TrainSignals(values, values, values, clipped, values))
    found = store.signals.get("e")
    assert found is not None and np.array_equal(found.weight, values, equal_nan=True)
    row = store.conn.execute(
        "SELECT advantage FROM turn_tokens WHERE episode_id='e' AND idx=5"
    ).fetchone()
    assert np.frombuffer(row[0], "<f4").tolist() == [9.0, 10.0]


def test_branches_are_a_field_of_filters_and_parents_a_column_of_the_view(store: Store) -> None:
    store.episodes.add([said_episode(said, name) for name, said in TREES.items()])
    rows = store.episodes.rows(store.episodes.ids("branches:>1", "-branches"))
    assert rows[0].id == "three_leaves" and {row.id for row in rows} == set(TREES) - {"chain"}
    assert [row.id for row in store.episodes.rows(store.episodes.ids("branches:1"))] == ["chain"]
    parents = store.conn.execute(
        "SELECT turn, parent FROM v_turns WHERE episode='sub_agent'"
    ).fetchall()
    assert parents == [(0, -1), (1, 0), (2, -1), (3, 2), (4, 1), (5, 4)]


# --- as others read it ---

PAGE = Path(__file__).parents[2] / "docs" / "store.md"


def test_the_example_for_pandas_reads_an_episode(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    write(store, episode := random_episode(np.random.default_rng(1)))
    (code,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "pandas" in text
    ]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    tokens = names["tokens"]
    assert tokens["id"].tolist() == episode.tokens.ids.tolist()
    assert tokens["origin"].tolist() == episode.tokens.origin.tolist()
    assert np.array_equal(
        tokens["logp"].to_numpy(np.float32), episode.tokens.logp_policy, equal_nan=True
    )
    assert episode.id in capsys.readouterr().out


def test_rows_of_sqlite_and_what_was_never_stored(store: Store) -> None:
    write(store, episode := random_episode(np.random.default_rng(1)))
    cursor = store.conn.cursor()
    cursor.row_factory = sqlite3.Row
    rows = [read_tokens(row) for row in cursor.execute("SELECT * FROM turn_tokens ORDER BY idx")]
    tokens = episode.tokens
    for name in ("top_ids", "top_logps", "entropy", "logp_sampled"):
        joined = np.concatenate([row[name] for row in rows])
        assert np.array_equal(joined, getattr(tokens, name), equal_nan=name != "top_ids"), name
    plain = read_tokens(
        {"n": 2, "ids": b"\1\0\0\0\2\0\0\0", "ratio": None, "clipped": math.nan, "top_ids": None}
    )
    assert plain["ids"].tolist() == [1, 2] and np.isnan(plain["ratio"]).all()
    assert (
        plain["clipped"].tolist() == [False, False] and plain["top_ids"].tolist() == [[-1] * 5] * 2
    )
    half = np.array([0.5, -1.0], "<f2").tobytes()
    assert read_tokens({"n": 2, "ids": b"\0" * 8, "ratio": half})["ratio"].tolist() == [0.5, -1.0]
    with pytest.raises(StoreError, match=r"ids does not have 3 tokens"):
        read_tokens({"n": 3, "ids": b"\0" * 8})
