"""Episodes that run wait in memory for a moment: no reader sees a difference, and `kill -9` takes that moment alone; a
training that is killed between any two commits, and resumed, leaves the store that an uninterrupted one leaves.
"""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli.errors import StoreError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.buffer import LINGER
from agentrl_cli.types import AgentState, Episode, Outcome, RewardPart, Tokens, ToolResult, Turn
from tests.helpers.cli import Cli
from tests.helpers.processes import comes
from tests.helpers.train import TASK_PY, episodes_of, spawn, spawn_well, write_pack, write_project
from tests.store.test_store import random_episode, same


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "a.db") as opened:
        opened.runs.add(RunRow(id="r1", name="a"))
        opened.tokenizers.add("hash", "{}")
        yield opened


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
                    turn = episode.turns[index]
                    store.live.set(episode.id, AgentState.GENERATING, index, "text")
                    store.episodes.add_turn(episode.id, turn, part(episode, turn), later=True)
                    if turn.role == "assistant" and rng.random() < 0.2:
                        store.episodes.add_turn(
                            episode.id, turn, part(episode, turn), later=True
                        )  # with its reward, say
                elif index == len(episode.turns):
                    store.episodes.finish(episode, later=True)
                match rng.integers(8):
                    case 0:
                        store.flush()
                        rows = {
                            row.id: row for row in watcher.episodes.rows(watcher.episodes.ids())
                        }
                        assert len(rows) == 6
                        for one in episodes:
                            seen, row = watcher.episodes.get(one.id), rows[one.id]
                            assert (row.n_turns, row.n_tokens) == (
                                len(seen.turns),
                                len(seen.tokens),
                            )
                            assert (row.n_model_tokens, row.n_calls) == (
                                seen.trained_tokens,
                                seen.tool_calls,
                            )
                            assert (
                                row.n_tool_errors == seen.tool_errors
                                and seen.turns == one.turns[: row.n_turns]
                            )
                    case 1:
                        store.flush_ended()
                    case 2:
                        store.marks.note(episode.id, "noted")
                    case 3:
                        assert store.episodes.row(episode.id).id == episode.id
        store.flush()
        assert watcher.live.all() == []
        for episode in episodes:
            assert same(watcher.episodes.get(episode.id), episode)
            row = watcher.episodes.row(episode.id)
            assert (row.split, row.tokenizer, row.fact) == ("train", "hash", "trained")
    assert store.conn.execute("PRAGMA foreign_key_check").fetchall() == []


def test_one_that_ends_soon_is_written_once_and_the_others_wait(store: Store) -> None:
    rng = np.random.default_rng(3)
    short, long = (random_episode(rng, run_id="r1", sample=n) for n in range(2))
    with Store.open(store.path, readonly=True) as watcher:
        for episode in (short, long):
            store.episodes.start(begun(episode))
            for turn in episode.turns:
                store.episodes.add_turn(episode.id, turn, part(episode, turn), later=True)
        store.marks.add_drift(
            short.id, kind="structural", turn=0, position=1, expected="a", got="b"
        )
        store.episodes.finish(short, later=True)
        assert watcher.episodes.ids() == []
        store.flush_ended()
        assert [row.id for row in watcher.episodes.rows(watcher.episodes.ids())] == [short.id]
        assert same(watcher.episodes.get(short.id), short) and watcher.live.all() == []
        assert [row.kind for row in watcher.marks.drift(short.id)] == [
            "structural"
        ]  # it decides whether that is trained
        store.flush()
        assert [row.episode_id for row in watcher.live.all()] == [long.id]
        assert watcher.episodes.get(long.id).turns == long.turns
        assert len(watcher.marks.drift(short.id)) == 1


def test_a_watcher_sees_what_runs_within_a_second(store: Store) -> None:
    episode = random_episode(np.random.default_rng(5))
    with Store.open(store.path, readonly=True) as watcher:
        store.episodes.start(begun(episode))
        store.live.set(episode.id, AgentState.GENERATING, 0, "thinking")
        store.episodes.add_turn(
            episode.id, episode.turns[0], part(episode, episode.turns[0]), later=True
        )
        assert LINGER < 1
        assert comes(lambda: bool(watcher.live.all()))
        assert [(row.state, row.text) for row in watcher.live.all()] == [("generating", "thinking")]
        assert watcher.episodes.get(episode.id).turns == episode.turns[:1]


def test_a_transaction_that_fails_takes_nothing_that_waited(store: Store) -> None:
    episode = random_episode(np.random.default_rng(7))
    store.episodes.start(begun(episode))
    for turn in episode.turns:
        store.episodes.add_turn(episode.id, turn, part(episode, turn), later=True)

    def broken() -> None:
        with store.transaction():
            store.episodes.finish(episode)
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError):
        broken()
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
    shorter = episode.with_(
        turns=episode.turns[:-1], tokens=episode.tokens.slice(0, episode.turns[-2].end)
    )
    store.episodes.finish(shorter, later=True)
    assert same(store.episodes.get(episode.id), shorter)
    with pytest.raises(ValueError, match="no outcome"):
        store.episodes.finish(begun(episode), later=True)


def test_a_row_that_is_refused_is_reported_and_holds_nothing_back(store: Store) -> None:
    good, bad = (random_episode(np.random.default_rng(n)) for n in range(2))
    for episode in (bad.with_(run_id="nosuch"), good):
        store.episodes.start(begun(episode))
        store.episodes.finish(episode, later=True)
    store.flush()
    assert same(store.episodes.get(good.id), good)
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "next")
    odd = ToolResult("x", reward=object())  # type: ignore[arg-type]  # what SQLite has no column for
    store.episodes.start(Episode("e2", "t"))
    store.episodes.add_turn(
        "e2", Turn(0, "tool", (), 0, 0, results=(odd,)), Tokens.empty(), later=True
    )
    store.journal.add_log(None, "info", "goes on")
    assert [line["text"] for line in store.journal.logs(None)] == ["next", "goes on"]
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "line")


def test_an_end_that_is_refused_leaves_nothing_of_itself(store: Store) -> None:
    episode = random_episode(np.random.default_rng(11), run_id="r1")
    store.episodes.start(begun(episode))
    store.flush()
    odd = RewardPart("odd", 0.0, fakeable=object())  # type: ignore[arg-type]  # what SQLite has no column for
    store.marks.add_drift(episode.id, kind="structural", turn=0, position=1, expected="a", got="b")
    store.episodes.finish(episode.with_(reward_parts=(RewardPart("good", 1.0), odd)), later=True)
    store.flush()
    with pytest.raises(StoreError, match="refused"):
        store.journal.add_log(None, "info", "next")
    row = store.episodes.row(episode.id)
    assert (
        row.outcome is None
        and store.marks.drift(episode.id) == []
        and store.episodes.get(episode.id).turns == ()
    )


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


# --- a kill between any two commits ---

STEPS = 3
SLOW = """
import asyncio


async def even(episode, ctx):
    '''Episodes end apart, so that they are committed apart, while others run.'''
    await asyncio.sleep(0.15 * (episode.sample % 3))
    output = episode.tokens.ids[episode.tokens.trained_mask]
    share = float((output % 2 == 0).mean())
    return ctx.part(share if share < 0.5 else 1.0, f"{len(output)} tokens")


REWARDS = {"even": even, "length": length}
"""


def kill_at_commit(number: int) -> None:
    """Sends this process SIGKILL right before its commit of this number, counted from 1; 0: never. Notes how many were.

    CPython's audit events hand over every connection, just before it is made: nothing of the package is changed.
    """
    seen, new = 0, []

    def trace(statement: str) -> None:
        nonlocal seen
        if statement == "COMMIT":
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            Path("commits").write_text(str(seen))

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "sqlite3.connect/handle":
            new.append(args[0])
        elif new and not event.startswith("sqlite3"):
            with contextlib.suppress(sqlite3.ProgrammingError):  # closed meanwhile
                new.pop().set_trace_callback(trace)

    sys.addaudithook(audit)


def project_of(folder: Path, model: Path) -> Path:
    write_pack(folder, code=TASK_PY + SLOW)
    train = {
        "steps": STEPS,
        "save_every": 2,
        "eval_every": 1,
        "eval_tasks": 3,
        "eval_samples": 2,
        "lr": 3e-2,
    }
    given: dict[str, Any] = {"rollout": {"concurrency": 3, "max_new_tokens": 12}, "train": train}
    return write_project(
        folder, model, deterministic=True, algo={"drop_zero_variance": False}, **given
    )


def ending(project: Path) -> dict[str, Any]:
    """All that a kill must not change: metrics, facts, drift, evaluations, checkpoints, what was sampled."""
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        (run,) = store.runs.all()
        assert (run.status, run.step, run.error) == ("finished", STEPS, "")
        kept = [
            episode
            for episode in episodes_of(store, run)
            if episode.outcome is not Outcome.CANCELLED
        ]
        last = next(Path(c.path) for c in store.runs.checkpoints(run.id) if c.kind == "last")
        return {
            "metrics": [
                {name: value for name, value in row.items() if not name.startswith(("time/", "at"))}
                for row in store.runs.steps(run.id)
            ],
            "sampled": Counter(
                (e.step, e.group_id, e.sample, tuple(e.tokens.ids.tolist())) for e in kept
            ),
            "facts": {
                (e.step, e.group_id, e.sample): (e.fact, e.advantage, e.reward, e.flags)
                for e in kept
            },
            "drift": Counter(
                (e.step, e.group_id, e.sample, d.kind)
                for e in kept
                for d in store.marks.drift(e.id)
            ),
            "evals": [(row.step, row.pass_rate, row.n_samples) for row in store.runs.evals(run.id)],
            "checkpoints": sorted((c.kind, c.step) for c in store.runs.checkpoints(run.id)),
            "alerts": sorted((a["name"], a["text"]) for a in store.journal.alerts(run.id)),
            "weights": (last / "model.safetensors").read_bytes(),
        }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[dict[str, Any], int]:
    """How the uninterrupted run ends, and how many commits it made."""
    project = project_of(tmp_path_factory.mktemp("whole") / "project", model)
    spawn_well(project, "train", before=partial(kill_at_commit, 0))
    found = ending(project)
    assert sum(found["drift"].values()) > 20 and all(
        "drift/resegmented" in row for row in found["metrics"]
    ), "without drift in the metrics a lost one would not be seen"
    return found, int((project / "commits").read_text())


def test_killed_between_commits_again_and_again(
    tmp_path: Path, model: Path, whole: tuple[dict[str, Any], int]
) -> None:
    found, count = whole
    project, rng = project_of(tmp_path / "project", model), random.Random(5)
    code, output = spawn(
        project, "train", before=partial(kill_at_commit, rng.randint(6, count // 3))
    )
    assert code == -signal.SIGKILL, output
    for number in (rng.randint(1, 12) for _ in range(4)):
        code, output = spawn(
            project, "train", "--resume", "last", before=partial(kill_at_commit, number)
        )
        if code == 0:
            break
        assert code == -signal.SIGKILL, output
    else:
        code, output = spawn(project, "train", "--resume", "last")
    assert code == 0, output
    after = ending(project)
    assert {name for name in found if after[name] != found[name]} == set()


# --- a store that is lost, replaced or damaged under a training ---


HOOK = """\
import os
import shutil
import sqlite3
from pathlib import Path

DB = Path("runs/agentrl.db")


def lose(*names):
    return lambda: [Path(f"{DB}{name}").unlink() for name in names]


def replace():
    shutil.copy(DB, "other.db")
    os.replace("other.db", DB)


def delete():
    from agentrl_cli.commands import main

    assert os.system(f"'{os.sys.executable}' -m agentrl_cli runs delete last --force --yes > deleted.txt 2>&1") == 0


def damage():
    other = sqlite3.connect(DB)  # its commit makes the training read its pages again
    other.execute("INSERT INTO logs (at, level, text) VALUES (1.0, 'info', 'x')")
    other.commit()
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with DB.open("r+b") as file:
        file.seek(4096)
        file.write(bytes([0xA5]) * (DB.stat().st_size - 4096))
    other.close()


FAULTS = {
    "everything": lose("", "-wal", "-shm"),
    "log": lose("-wal"),
    "replaced": replace,
    "deleted": delete,
    "damaged": damage,
    "killed": lambda: os.kill(os.getpid(), 9),
}


class Fault:
    def on_update(self, metrics, step):
        if step == 2 and Path("fault").is_file():
            Path("fault").rename("done")
            FAULTS[Path("done").read_text()]()
"""


def training(folder: Path, model: Path, fault: str, *more: str) -> tuple[Path, int, str]:
    """A training of four steps in which something happens to the store after the second."""
    folder.mkdir()
    (folder / "hook.py").write_text(HOOK)
    (folder / "fault").write_text(fault)
    project = write_project(
        folder, model, hooks=["hook.py:Fault"], train={"steps": 4, "save_every": 1}
    )
    return project, *spawn(project, "train", *more)


def errors(output: str) -> list[str]:
    assert (
        "Traceback" not in output
        and "never retrieved" not in output
        and "Something went wrong" not in output
    ), output
    return [line for line in output.splitlines() if line.startswith("Error: ")]


@pytest.mark.parametrize("fault", ["everything", "log", "replaced"])
def test_a_training_stops_where_its_store_is_lost(tmp_path: Path, model: Path, fault: str) -> None:
    project, code, output = training(tmp_path / "project", model, fault)
    assert code == 3, output
    (line,) = errors(output)
    assert f"was {'replaced' if fault == 'replaced' else 'deleted'} while it was in use" in line, (
        output
    )
    assert output.count("while it was in use") == 1 and "step 3" not in output
    if fault == "log":  # what was in the log was saved, and a resume goes on
        assert spawn(project, "train", "--resume", "last")[0] == 0
        with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
            assert [row["step"] for row in store.runs.steps(store.runs.get("last").id)] == [
                1,
                2,
                3,
                4,
            ]


def test_a_training_whose_run_is_deleted_ends_with_a_sentence(tmp_path: Path, model: Path) -> None:
    project, code, output = training(tmp_path / "project", model, "deleted")
    assert code == 1, output
    (line,) = errors(output)
    assert "was deleted while it ran" in line and "closed database" not in output
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        assert store.runs.all() == [] and store.episodes.ids() == []


def test_a_training_whose_store_is_damaged_fails_and_is_not_resumed(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    project, code, output = training(tmp_path / "project", model, "damaged")
    cli.folder = project
    (line,) = errors(output)
    assert code == 3 and "is damaged" in line, output
    for command in (["train", "--resume", "last"], ["rollout", "-n", "1"]):
        cli(*command, code=3, said=("is damaged", ".recover"))


def test_a_damaged_page_is_found_before_a_resume(tmp_path: Path, model: Path, cli: Cli) -> None:
    project, code, output = training(tmp_path / "project", model, "log")
    assert code == 3, output
    path = project / "runs" / "agentrl.db"
    with sqlite3.connect(path) as conn:
        (page,) = conn.execute(
            "SELECT rootpage FROM sqlite_master WHERE name='turn_tokens'"
        ).fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    cli.folder = project
    cli("train", "--resume", "last", code=3, said="is damaged")
    assert "resumed" not in cli.err


def test_a_watched_training_that_dies_does_not_exit_with_0(tmp_path: Path, model: Path) -> None:
    _, code, output = training(tmp_path / "project", model, "killed", "--watch")
    assert code == 1 and "Error: bandit-grpo: interrupted at step 2" in output, output


@pytest.mark.parametrize("name", ["", "-wal", "-shm", "replaced"])
def test_the_next_commit_notices(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / "agentrl.db", tmp_path / "other.db"
    with Store.open(other) as store:
        store.runs.add(RunRow(id="r2", name="replaced"))
    store = Store.open(path)
    store.runs.add(RunRow(id="r1", name=name))
    other.replace(path) if name == "replaced" else Path(f"{path}{name}").unlink()
    wanted = f"{'replaced' if name == 'replaced' else 'deleted'} while it was in use"
    with pytest.raises(StoreError, match=wanted):
        store.episodes.finish(Episode("e", "t", outcome=Outcome.FAILED))
    with pytest.raises(StoreError, match=wanted):
        store.close()
    if name:
        shutil.copy(path, tmp_path / "copy.db")
        with closing(sqlite3.connect(tmp_path / "copy.db")) as conn:
            assert conn.execute("SELECT name FROM runs").fetchall() == [(name,)]
