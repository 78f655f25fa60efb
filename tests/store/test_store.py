"""What is written comes back, to others too: episodes token by token, branches, runs, steps, controls, marks."""

import math
import re
import sqlite3
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli import read_tokens
from agentrl_cli.errors import NotFound, StoreError
from agentrl_cli.store import RunRow, Store, episode_key
from agentrl_cli.store.codec import token_columns, tokens_of
from agentrl_cli.store.maintenance import backup, prunable, prune, status, vacuum
from agentrl_cli.types import (
    TOP_K,
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
from tests.helpers.trees import Said, chain, fork, sub_agent, three_leaves
from tests.helpers.trees import episode as said_episode


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
    back: Any = tokens_of([token_columns(tokens)]).support
    assert [None if ids is None else ids.tolist() for ids in back] == sets


@pytest.mark.parametrize(
    "changed", [{}, {"started": 7.0}, {"step": 9}, {"task_id": "another"}, {"group_id": None}]
)
def test_an_end_sets_every_column_whatever_its_start_said(
    store: Store, changed: dict[str, Any]
) -> None:
    episode = random_episode(np.random.default_rng(6))
    store.tokenizers.add("hash", "{}")
    store.episodes.start(episode, split="train", tokenizer="hash")
    store.episodes.finish(episode.with_(**changed))
    row = store.episodes.row(episode.id)
    assert same(store.episodes.get(episode.id), episode.with_(**changed))
    assert (row.split, row.tokenizer) == ("train", "hash")


def test_signals_are_split_by_turn_and_come_back(store: Store) -> None:
    rng = np.random.default_rng(8)
    episode = next(e for e in iter(lambda: random_episode(rng), None) if e.trained_tokens > 10)
    store.episodes.finish(episode)
    assert store.signals.get(episode.id) is None
    trained, n = episode.tokens.trained_mask, len(episode.tokens)
    names = ("logp_train", "ratio", "weight", "advantage", "logp_ref")
    values = {
        name: np.where(trained, rng.normal(size=n), np.nan).astype(np.float32) for name in names
    }
    clipped = (trained & (rng.random(n) < 0.5)).astype(np.int8)
    nan, none = np.full(n, np.nan, np.float32), np.zeros(0, np.float32)
    for signals in (
        TrainSignals(nan, nan, nan, np.zeros(n, np.int8), nan),  # not the same as no signals
        TrainSignals(clipped=clipped, **values),
    ):
        store.signals.add(episode.id, signals)
        assert same(store.signals.get(episode.id), signals)
    with pytest.raises(ValueError, match="signals have 0 tokens"):
        store.signals.add(episode.id, TrainSignals(none, none, none, clipped[:0], none))
    with pytest.raises(NotFound):
        store.signals.add("nosuch", signals)


def test_facts_set_advantage_and_survive_a_second_finish(store: Store) -> None:
    episode = random_episode(np.random.default_rng(4), fact="", advantage=None)
    store.episodes.finish(episode)
    store.marks.set_facts([(episode.id, Fact.SKIPPED_ZERO_VARIANCE, None)])
    equal = "skipped:no_signal: all rewards of the group are equal"
    assert store.episodes.row(episode.id).fact == equal
    store.marks.set_facts([(episode.id, Fact.TRAINED, np.float32(0.5))])  # type: ignore[list-item]  # numpy numbers are fine
    store.episodes.finish(episode)
    row = store.episodes.row(episode.id)
    assert (row.fact, row.advantage) == ("trained", 0.5)


def test_runs_by_name_prefix_and_id(store: Store) -> None:
    first = store.runs.add(RunRow(id="", name="grpo", config={"seed": 1, "nested": {"lr": 1e-5}}))
    second = store.runs.add(RunRow(id="", name="grpo"))
    named = [store.runs.get(name) for name in ("grpo", "grpo-2", second.id[:-1], "last")]
    assert named == [first, second, second, second] and store.runs.all() == [second, first]
    for name, said in (("gr", "could be several"), ("grop", "grpo")):
        with pytest.raises(NotFound) as missing:
            store.runs.get(name)
        assert said in f"{missing.value.message} {missing.value.hint}"
    with pytest.raises(NotFound, match="statsu"):
        store.runs.update(first.id, statsu="x")
    names = ["my depot-grpo", "my depot-grpo", "仓库-grpo", "a'b; $(c)"]
    added = [store.runs.add(RunRow(id="", name=name)).name for name in names]
    # each is one word of a shell
    assert added == ["my-depot-grpo", "my-depot-grpo-2", "仓库-grpo", "a-b-c-"]


def test_steps_merge_and_keep_nan_and_infinity(store: Store) -> None:
    store.runs.add(RunRow(id="r1", name="a"))
    store.runs.add_step("r1", 1, {"reward": 0.25, "kl": math.nan})
    store.runs.add_step("r1", 2, {"reward": np.float32(0.5)})  # type: ignore[dict-item]  # numpy numbers are fine
    store.runs.add_step("r1", 1, {"eval": math.inf})
    one, two = ({**row, "at": 0.0} for row in store.runs.steps("r1"))
    merged = {"step": 1, "at": 0.0, "reward": 0.25, "kl": math.nan, "eval": math.inf}
    assert one == pytest.approx(merged, nan_ok=True, abs=0)
    assert two == {"step": 2, "at": 0.0, "reward": 0.5} and store.runs.get("r1").step == 2
    assert [row["step"] for row in store.runs.steps("r1", since=2)] == [2]
    read = store.select("SELECT json_extract(metrics, '$.reward') FROM steps")
    assert read == [(0.25,), (0.5,)]


def test_logs_by_their_number_and_tokenizers_by_their_hash(store: Store) -> None:
    for n in range(5):
        store.journal.add_log(None, "info", f"line {n}")
    lines = store.journal.logs(None, limit=2)
    assert [line["text"] for line in lines] == ["line 3", "line 4"]
    assert store.journal.logs(None, since=lines[0]["id"]) == lines[1:]
    specials = {"eos_token": "<|im_end|>"}
    store.tokenizers.add("h", '{"a": "é"}', "{{ x }}", specials)
    found: Any = store.tokenizers.get("h")
    assert (found.tokenizer_json, found.specials) == ('{"a": "é"}', specials)


def test_tasks_give_their_split_to_episodes(store: Store) -> None:
    asked = ({"role": "user", "content": "?"},)
    task = Task("calc/1", "calc", "add", "heldout", asked, {"answer": 4}, ("calculator",))
    store.tasks.add([task])
    assert store.tasks.get("calc/1") == task and store.tasks.get("calc/1", "other") is None
    episode = random_episode(np.random.default_rng(0))
    store.episodes.start(episode)
    assert store.episodes.row("last").split == "heldout"
    store.episodes.finish(episode)
    assert store.episodes.row("last").split == "heldout"


def test_siblings_children_and_resume_keys(store: Store) -> None:
    rng, given = np.random.default_rng(1), {"run_id": "r1", "group_id": "g"}
    store.tokenizers.add("hash", "{}")
    store.runs.add(RunRow(id="r1", name="a", tokenizer="hash"))
    group = [random_episode(rng, step=4, sample=n, kind="train", **given) for n in (2, 0, 1)]
    first = group[0].id
    child = random_episode(rng, kind="whatif", parent_id=first, parent_turn=1, **given)
    store.episodes.add([*group, child])
    assert [row.sample for row in store.episodes.siblings(first)] == [0, 1, 2]
    children = [(row.id, row.tokenizer) for row in store.episodes.children(first)]
    assert children == [(child.id, "hash")] and store.stats.group("g", "r1")[0] == 4
    assert store.episodes.find_finished("r1", 4) == {f"r1/4/g/{e.sample}": e.id for e in group}


def test_an_unfinished_attempt_is_replaced_by_the_next_with_its_key(store: Store) -> None:
    store.runs.add(RunRow(id="r1", name="a"))
    old, new = (
        Episode(new_id(), "t", run_id="r1", step=1, group_id="g", kind="train") for _ in range(2)
    )
    assert episode_key(old) == episode_key(new) == "r1/1/g/0"
    for episode in (old, new):
        store.episodes.start(episode)
    assert [row.episode_id for row in store.live.all("r1")] == [new.id]
    assert store.episodes.cancel("r1") == 1 and store.live.all("r1") == []
    (row,) = store.episodes.rows(store.episodes.ids())
    assert (row.id, row.outcome, row.fact) == (new.id, Outcome.CANCELLED, Fact.SKIPPED_CANCELLED)


def test_resolve_episode(store: Store) -> None:
    with pytest.raises(NotFound, match="No last episode"):
        store.episodes.resolve("last")
    for n, (name, value) in enumerate([("aaa1", 0.0), ("aaa2", 1.0), ("bbb1", 0.5)]):
        parts = (RewardPart("r", value),)
        failed = Episode(name, "t", reward_parts=parts, outcome=Outcome.FAILED)
        store.episodes.finish(failed.with_(started=1.0 + n))
    store.episodes.finish(Episode("err", "t", outcome=Outcome.ENV_ERROR, started=9.0))
    named = {"last": "err", "best": "aaa2", "worst": "aaa1", "b": "bbb1", "AAA2": "aaa2"}
    named |= {"agentrl:aaa1@t2.31": "aaa1"}
    assert {name: store.episodes.resolve(name) for name in named} == named
    for name, said in (("aaa", "aaa1, aaa2"), ("bbb2", "bbb1")):
        with pytest.raises(NotFound) as wrong:
            store.episodes.resolve(name)
        assert said in wrong.value.hint and wrong.value.exit_code == 2


def test_tags_and_notes(store: Store) -> None:
    episode = random_episode(np.random.default_rng(0))
    store.episodes.finish(episode)
    for tag in ("seen", "keep", "seen"):
        store.marks.tag(episode.id, tag)
    store.marks.untag(episode.id, "keep")
    for note in ("locale comma", ""):
        store.marks.note(episode.id, note)
        row = store.episodes.row(episode.id)
        assert (row.tags, row.note) == (("seen",), note)
    assert store.stats.tags() == {"seen": 1}


def test_an_inner_transaction_that_fails_is_taken_back_alone(store: Store) -> None:
    episode = random_episode(np.random.default_rng(0))
    crooked = {"turns": (Turn(0, "user", (), 0, 3),), "tokens": Tokens.from_ids([1], [2])}
    with store.transaction():
        store.journal.add_log(None, "info", "kept")
        with pytest.raises(ValueError, match="spans"):
            store.episodes.finish(episode.with_(**crooked))
        store.episodes.finish(episode.with_(id="other"))
    assert [row.id for row in store.episodes.rows(store.episodes.ids())] == ["other"]
    assert [line["text"] for line in store.journal.logs(None)] == ["kept"]


def test_prune_backup_vacuum(store: Store, tmp_path: Path) -> None:
    rng, copy, picture = np.random.default_rng(11), tmp_path / "copy.db", b"\x89PNG\r\n\x1a\n"
    for n in range(6):
        episode = random_episode(rng, group_id="g", sample=n)
        first, *rest = episode.turns
        seen = replace(first, images=(picture,) * (n == 1))
        parts = (RewardPart("r", n / 5, 1.0, primary=True),)
        store.episodes.finish(episode.with_(turns=(seen, *rest), reward_parts=parts))
    ids = [row.id for row in store.episodes.rows(store.episodes.ids("", "reward"))]
    kept, whole = (store.episodes.get(id_).tokens for id_ in ids[:2])

    def tokens() -> Tokens:
        return store.episodes.get(ids[1]).tokens

    run = store.runs.add(RunRow("", "training", kind="train", status="running", step=1))
    own = {"run_id": run.id, "kind": "train"}
    for step, id_ in enumerate(("trained", "untrained"), 1):
        store.episodes.finish(random_episode(rng, id=id_, group_id="own", step=step, **own))
    for ending in ("running", "failed"):  # a resume makes the step, with what was sampled for it
        store.runs.update(run.id, status=ending)
        assert prunable(store, run=run.id) == ["trained"]
    store.runs.delete(run.id)
    spared = prunable(store, keep=("best", "worst"), older_days=1)
    assert spared == ids[1:5] and prune(store, spared, "half") == 4
    half = tokens()
    np.testing.assert_allclose(half.logp_policy, whole.logp_policy, rtol=1e-3)
    prune(store, spared, "half")  # twice changes nothing
    assert same(tokens(), half) and not same(half, whole)
    assert backup(Path(store.path), copy) == copy.stat().st_size
    prune(store, spared, "numbers")
    bare = tokens()
    assert np.array_equal(bare.ids, whole.ids)
    assert np.isnan(bare.logp_policy).all() and (bare.top_ids == -1).all()
    assert same(store.episodes.get(ids[0]).tokens, kept)
    assert store.select("SELECT hash FROM attachments WHERE hash=?", [digest(picture)])
    prune(store, spared, "episodes")
    assert len(store.episodes.ids()) == 2
    assert not store.select("SELECT hash FROM attachments WHERE hash=?", [digest(picture)])
    before, after = vacuum(Path(store.path))
    assert after <= before and status(Path(store.path), check=True).check == "ok"
    with Store.open(copy, readonly=True) as other:
        assert same(other.episodes.get(ids[1]).tokens, half)


# --- turns that branch ---

TREES = {"fork": fork(), "sub_agent": sub_agent(), "three_leaves": three_leaves(), "chain": chain()}


def with_calls(said: list[Said], name: str) -> Episode:
    """Every assistant turn calls a tool named by its index, and every tool turn answers with its own."""
    one, turns = said_episode(said, name), []
    for turn in one.turns:
        call = ToolCall(f"c{turn.index}", f"tool{turn.index}", {}, "{}")
        answer = ToolResult(f"answer {turn.index}")
        calls = (call,) if turn.role == "assistant" else ()
        turns.append(replace(turn, calls=calls, results=(answer,) if turn.role == "tool" else ()))
    return one.with_(turns=tuple(turns))


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    ("shape", "answered"),
    [
        ("fork", [(1, "answer 2"), (1, "answer 4")]),
        ("sub_agent", [(1, "answer 4")]),
        ("three_leaves", []),
        ("chain", [(1, "answer 2"), (3, "answer 4")]),
    ],
)
def test_a_tree_comes_back_and_results_belong_to_the_calls_of_their_path(
    store: Store, shape: str, answered: list[tuple[int, str]], buffered: bool
) -> None:
    one = with_calls(TREES[shape], "e")
    if buffered:
        store.episodes.start(one)
        for turn in one.turns:
            tokens, later = one.tokens.slice(turn.start, turn.end), turn.index % 2 == 0
            store.episodes.add_turn("e", turn, tokens, later=later)
    store.episodes.finish(one)
    back = store.episodes.get("e")
    assert same(back, one) and back.branches == one.branches
    sql = "SELECT turn, result FROM tool_calls WHERE result IS NOT NULL ORDER BY result_turn"
    assert store.select(sql) == answered


def test_signals_are_stored_with_the_turn_of_their_token(store: Store) -> None:
    one = said_episode(three_leaves())
    store.episodes.add([one])
    places = np.arange(len(one.tokens))
    values = np.where(one.tokens.trained_mask, places, np.nan).astype(np.float32)
    signals = TrainSignals(values, values, values, np.zeros(len(values), np.int8), values)
    store.signals.add("e", signals)
    assert same(store.signals.get("e"), signals)
    ((kept,),) = store.select("SELECT advantage FROM turn_tokens WHERE episode_id='e' AND idx=5")
    assert np.frombuffer(kept, "<f4").tolist() == [9.0, 10.0]


def test_branches_are_a_field_of_filters_and_parents_a_column_of_the_view(store: Store) -> None:
    store.episodes.add([said_episode(said, name) for name, said in TREES.items()])
    first, *rest = store.episodes.rows(store.episodes.ids("branches:>1", "-branches"))
    assert first.id == "three_leaves" and {row.id for row in rest} == {"fork", "sub_agent"}
    assert [row.id for row in store.episodes.rows(store.episodes.ids("branches:1"))] == ["chain"]
    parents = store.select("SELECT turn, parent FROM v_turns WHERE episode='sub_agent'")
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
    store.episodes.finish(episode := random_episode(np.random.default_rng(1)))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [text for text in blocks if "pandas" in text]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    tokens, own = names["tokens"], episode.tokens
    assert tokens[["id", "origin"]].to_numpy().T.tolist() == [own.ids.tolist(), own.origin.tolist()]
    assert np.array_equal(tokens["logp"].to_numpy(np.float32), own.logp_policy, equal_nan=True)
    assert episode.id in capsys.readouterr().out


def test_rows_of_sqlite_and_what_was_never_stored(store: Store) -> None:
    store.episodes.finish(episode := random_episode(np.random.default_rng(1)))
    cursor = store.conn.cursor()
    cursor.row_factory = sqlite3.Row
    rows = [read_tokens(row) for row in cursor.execute("SELECT * FROM turn_tokens ORDER BY idx")]
    for name in ("top_ids", "top_logps", "entropy", "logp_sampled"):
        joined = np.concatenate([row[name] for row in rows])
        np.testing.assert_array_equal(joined, getattr(episode.tokens, name), name)
    ids, half = b"\1\0\0\0\2\0\0\0", np.array([0.5, -1.0], "<f2").tobytes()
    found = read_tokens({"n": 2, "ids": ids, "clipped": math.nan, "top_ids": None, "ratio": half})
    wanted = {"ids": [1, 2], "clipped": [False] * 2, "top_ids": [[-1] * 5] * 2, "ratio": [0.5, -1]}
    assert {name: found[name].tolist() for name in wanted} == wanted
    assert np.isnan(read_tokens({"n": 2, "ids": ids, "ratio": None})["ratio"]).all()
    with pytest.raises(StoreError, match=r"ids does not have 3 tokens"):
        read_tokens({"n": 3, "ids": ids})
