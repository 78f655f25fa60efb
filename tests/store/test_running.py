"""Episodes that run wait in memory for a moment: no reader sees a difference, and `kill -9` takes that moment alone."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl_cli.errors import StoreError
from agentrl_cli.store import EpisodeRow, RunRow, Store
from agentrl_cli.store.buffer import LINGER
from agentrl_cli.types import (
    AgentState,
    Drift,
    Episode,
    Outcome,
    RewardPart,
    Tokens,
    ToolResult,
    Turn,
)
from tests.helpers.processes import comes
from tests.store.test_store import random_episode, same


@pytest.fixture
def store(store: Store) -> Store:
    store.runs.add(RunRow(id="r1", name="a"))
    store.tokenizers.add("hash", "{}")
    return store


def begun(episode: Episode) -> Episode:
    return episode.with_(
        turns=(), tokens=Tokens.empty(), reward_parts=(), outcome=None, fact="", advantage=None
    )


def part(episode: Episode, turn: Turn) -> Tokens:
    return episode.tokens.slice(turn.start, turn.end)


@pytest.mark.parametrize("seed", range(12))
def test_whenever_it_is_written_it_comes_back_equal(store: Store, seed: int) -> None:
    rng = np.random.default_rng(seed)
    episodes = [
        random_episode(rng, run_id="r1", step=1, group_id="g", sample=n, kind="train")
        for n in range(6)
    ]
    with Store.open(store.path, readonly=True) as watcher:
        for episode in episodes:
            store.episodes.start(begun(episode), split="train", tokenizer="hash")
        for index in range(max(len(episode.turns) for episode in episodes) + 1):
            for episode in episodes:
                if index < len(episode.turns):
                    turn, later = episode.turns[index], bool(rng.random() < 0.9)
                    store.live.set(episode.id, AgentState.GENERATING, index, "text")
                    for _ in range(1 + (rng.random() < 0.1)):  # again with its reward, say
                        store.episodes.add_turn(episode.id, turn, part(episode, turn), later=later)
                elif index == len(episode.turns):
                    store.episodes.finish(episode, later=bool(rng.random() < 0.8))
                match rng.integers(8):
                    case 0:
                        store.flush()
                        rows = watcher.episodes.rows(watcher.episodes.ids())
                        assert len(rows) == 6
                        for row in rows:
                            seen = watcher.episodes.get(row.id)
                            check_counts(row, seen)
                            assert seen.turns == episodes[row.sample].turns[: row.n_turns]
                    case 1:
                        store.flush_ended()
                    case 2:
                        store.marks.note(episode.id, "noted")
                    case 3:
                        assert store.episodes.row(episode.id).id == episode.id
        store.flush()
        store.episodes.finish(at_once := random_episode(rng, run_id="r1", sample=6))
        for episode in (*episodes, at_once):
            assert same(watcher.episodes.get(episode.id), episode)
            row = watcher.episodes.row(episode.id)
            check_counts(row, episode)
            assert row.reward == pytest.approx(0.3 - 0.3) and row.primary_score == 0.1 + 0.2
            assert (row.flags, row.fact) == (("LOOP", "BADARG"), "trained")
            assert row.seconds == pytest.approx(3.176544, abs=1e-6)
        rows = watcher.episodes.rows(watcher.episodes.ids("", "time"))
        assert {(row.split, row.tokenizer) for row in rows if row.step} == {("train", "hash")}
        assert watcher.live.all() == []
    assert store.select("PRAGMA foreign_key_check") == []


def check_counts(row: EpisodeRow, episode: Episode) -> None:
    """A list's row of an episode counts what is there of it."""
    wanted = {
        "n_turns": len(episode.turns),
        "n_tokens": len(episode.tokens),
        "n_model_tokens": episode.trained_tokens,
        "n_calls": episode.tool_calls,
        "n_tool_errors": episode.tool_errors,
    }
    assert {name: getattr(row, name) for name in wanted} == wanted


def test_one_that_ends_soon_is_written_once_and_the_others_wait(store: Store) -> None:
    rng = np.random.default_rng(3)
    short, long = (random_episode(rng, run_id="r1", sample=n) for n in range(2))
    with Store.open(store.path, readonly=True) as watcher:
        for episode in (short, long):
            store.episodes.start(begun(episode))
            for turn in episode.turns:
                store.episodes.add_turn(episode.id, turn, part(episode, turn), later=True)
        store.marks.add_drift(short.id, Drift("structural", 0, 9, "a", "b"))
        store.episodes.finish(short, later=True)
        assert watcher.episodes.ids() == []
        store.flush_ended()
        assert [row.id for row in watcher.episodes.rows(watcher.episodes.ids())] == [short.id]
        assert same(watcher.episodes.get(short.id), short) and watcher.live.all() == []
        (drift,) = watcher.marks.drift(short.id)  # it decides whether that is trained
        assert (drift.kind, drift.position) == ("structural", 9)
        store.flush()
        assert [row.episode_id for row in watcher.live.all()] == [long.id]
        assert watcher.episodes.get(long.id).turns == long.turns
        assert len(watcher.marks.drift(short.id)) == 1


def test_a_watcher_sees_what_runs_within_a_second(store: Store) -> None:
    episode = random_episode(np.random.default_rng(5))
    with Store.open(store.path, readonly=True) as watcher:
        store.episodes.start(begun(episode))
        store.live.set(episode.id, AgentState.PROCESSING_TOOLS, 0, "x" * 9000)
        store.episodes.add_turn(
            episode.id, episode.turns[0], part(episode, episode.turns[0]), later=True
        )
        store.journal.add_log("r1", "info", "hello")
        assert LINGER < 1 and watcher.journal.logs("r1") == []
        assert comes(lambda: bool(watcher.live.all() and watcher.journal.logs("r1")))
        live = [(row.state, row.text, row.task_id) for row in watcher.live.all()]
        assert live == [("processing_tools", "x" * 4000, "calc/1")]
        assert [line["text"] for line in watcher.journal.logs("r1")] == ["hello"]
        seen = watcher.episodes.get(episode.id)
        assert (seen.turns, seen.outcome) == (episode.turns[:1], None)
        with pytest.raises(StoreError, match="reading only"):
            watcher.journal.add_log("r1", "info", "no")


def test_a_transaction_that_fails_takes_nothing_that_waited(store: Store) -> None:
    episode = random_episode(np.random.default_rng(7))
    store.episodes.start(begun(episode))
    for turn in episode.turns:
        store.episodes.add_turn(episode.id, turn, part(episode, turn), later=True)
    with pytest.raises(RuntimeError), store.transaction():
        store.episodes.finish(episode)
        raise RuntimeError("crash")
    assert store.episodes.row(episode.id).outcome is None
    store.episodes.finish(episode, later=True)
    store.flush()
    assert same(store.episodes.get(episode.id), episode)


def test_an_end_with_other_turns_than_were_reported_is_what_counts(store: Store) -> None:
    rng = np.random.default_rng(0)
    episode = next(e for e in iter(lambda: random_episode(rng), None) if len(e.turns) > 3)
    store.episodes.start(begun(episode))
    for turn in episode.turns[1:]:
        store.episodes.add_turn(episode.id, turn, part(episode, turn), later=True)
    store.flush()
    *fewer, last = episode.turns
    shorter = episode.with_(turns=tuple(fewer), tokens=episode.tokens.slice(0, last.start))
    store.episodes.finish(shorter, later=True)
    assert same(store.episodes.get(episode.id), shorter)
    with pytest.raises(ValueError, match="no outcome"):
        store.episodes.finish(begun(episode), later=True)


@pytest.mark.parametrize("later", [True, False])
def test_a_turn_whose_span_is_not_that_of_its_tokens_is_refused(store: Store, later: bool) -> None:
    store.episodes.start(Episode("e1", "t"))
    with pytest.raises(ValueError, match=r"spans 0\.\.3 but has 0"):
        store.episodes.add_turn("e1", Turn(0, "user", (), 0, 3), Tokens.empty(), later=later)
    assert store.episodes.turns("e1") == []


def test_a_row_that_is_refused_is_reported_and_holds_nothing_back(store: Store) -> None:
    good, bad = (random_episode(np.random.default_rng(n)) for n in range(2))
    bad = bad.with_(run_id="nosuch")
    with pytest.raises(StoreError):
        store.episodes.finish(bad)
    for episode in (bad, good):
        store.episodes.start(begun(episode))
        store.episodes.finish(episode, later=True)
    store.flush()
    assert same(store.episodes.get(good.id), good)
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "next")
    odd = ToolResult("x", reward=object())  # type: ignore[arg-type]  # what SQLite has no column for
    store.episodes.start(Episode("e2", "t"))
    answer = Turn(0, "tool", (), 0, 0, results=(odd,))
    store.episodes.add_turn("e2", answer, Tokens.empty(), later=True)
    store.journal.add_log("nosuch", "info", "bad")
    store.journal.add_log(None, "info", "goes on")
    assert [line["text"] for line in store.journal.logs(None)] == ["next", "goes on"]
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "line")


def test_an_end_that_is_refused_leaves_nothing_of_itself(store: Store) -> None:
    episode = random_episode(np.random.default_rng(11), run_id="r1")
    store.episodes.start(begun(episode))
    store.flush()
    odd = RewardPart("odd", 0.0, fakeable=object())  # type: ignore[arg-type]  # what SQLite has no column for
    store.marks.add_drift(episode.id, Drift("structural", 0, 1, "a", "b"))
    store.episodes.finish(episode.with_(reward_parts=(RewardPart("good", 1.0), odd)), later=True)
    store.flush()
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "next")
    left = store.episodes.get(episode.id)
    assert (left.outcome, left.turns, store.marks.drift(episode.id)) == (None, (), [])


WRITER = """
import sys, time
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Outcome, RewardPart, Tokens, Turn, new_id
with Store.open(sys.argv[1]) as store:
    run = store.runs.add(RunRow(id="r", name="r"))
    while True:
        tokens = Tokens.from_ids([1] * 50, [2] * 50)
        episode = Episode(new_id(), "t", run_id=run.id, started=1.0)
        store.episodes.start(episode)
        turn = Turn(0, "user", ({"role": "user", "content": "x"},), 0, 50)
        store.episodes.add_turn(episode.id, turn, tokens, later=True)
        print(episode.id, flush=True)
        store.episodes.finish(episode.with_(turns=(turn,), tokens=tokens, outcome=Outcome.FAILED), later=True)
        time.sleep(0.01)
"""


def test_kill_9_takes_no_more_than_the_last_moment(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "a.db")], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    first = writer.stdout.readline()  # the store has been made
    with Store.open(tmp_path / "a.db", readonly=True) as watcher:
        ended = "SELECT count(*) FROM episodes WHERE outcome IS NOT NULL"
        assert comes(
            lambda: watcher.conn.execute(ended).fetchone()[0] > 20, lambda: writer.poll() is None
        )
        visible = watcher.conn.execute(ended).fetchone()[0]
    writer.send_signal(signal.SIGKILL)
    seen = [first.strip(), *writer.stdout.read().split()]
    writer.wait()
    writer.stdout.close()
    with Store.open(tmp_path / "a.db") as store:
        assert store.conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        stored = {row.id: row for row in store.episodes.rows(store.episodes.ids())}
        whole = [one for one in seen if one in stored and stored[one].outcome is Outcome.FAILED]
        assert len(whole) >= visible and whole == seen[: len(whole)]
        assert all(len(store.episodes.get(one).turns) == 1 for one in whole)
