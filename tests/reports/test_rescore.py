"""A run scored again: weights, functions and estimators by hand; what was trained on stays; filters read it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli import Episode, Store
from tests.helpers.cli import Cli
from tests.helpers.train import episodes_of, train_here, write_model

EQUAL = "skipped:no_signal: all rewards of the group are equal"
BROKEN = "def broken(episode, ctx):\n    raise ValueError('no')\n\n\nNUMBER = 3\n"
FUNCTIONS = """\
def even(episode):
    return -1.0


def words(episode, ctx):
    return ctx.part(len(ctx.task.prompt), "messages of the task")
"""


def train(folder: Path, **sections: Any) -> Path:
    train_here(folder / "project", write_model(folder / "model"), **sections)
    return folder / "project" / "runs" / "agentrl.db"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a training, with reward functions beside it."""
    db = train(tmp_path_factory.mktemp("rescore"))
    (db.parent.parent / "mine.py").write_text(FUNCTIONS + BROKEN)
    return db


@pytest.fixture
def rescore(trained: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capfd, trained.parent.parent, "--db", str(trained))


def episodes(db: Path) -> list[Episode]:
    with Store.open(db, readonly=True) as store:
        return episodes_of(store, store.runs.all()[0])


def test_new_weights_by_hand(trained: Path, rescore: Cli) -> None:
    before = episodes(trained)
    found = rescore.json("rescore", "--set", "rewards.length=0.5", "--set", "rewards.even=2")
    assert found["set"] == "length=0.5 even=2" and found["summary"]["episodes"] == len(before) == 16
    parts = {e.id: {part.name: part.value for part in e.reward_parts} for e in before}
    rewards = {name: 2 * part["even"] + 0.5 * part["length"] for name, part in parts.items()}
    groups: dict[str, list[str]] = {}
    for e in before:
        groups.setdefault(str(e.group_id), []).append(e.id)
    for row in found["episodes"]:
        mine = next(names for names in groups.values() if row["episode"] in names)
        values = np.array([rewards[name] for name in mine])
        assert row["reward"] == pytest.approx(rewards[row["episode"]])
        assert row["delta"] == pytest.approx(row["reward"] - row["reward_before"])
        if np.ptp(values) > 1e-8:
            by_hand = (rewards[row["episode"]] - values.mean()) / (values.std(ddof=1) + 1e-4)
            assert row["advantage"] == pytest.approx(by_hand, abs=1e-5) and row["fact"] == "trained"
            assert row["turns"] == pytest.approx([by_hand], abs=1e-5)
        else:
            assert row["advantage"] is None and row["fact"] == EQUAL
    after = episodes(trained)
    assert [(e.reward, e.advantage, e.fact) for e in after] == [
        (e.reward, e.advantage, e.fact) for e in before
    ]


def require_stored(found: dict[str, Any]) -> None:
    """Whether the advantages are those that were trained with."""
    for row in found["episodes"]:
        assert row["fact"] == row["fact_before"] and row["delta"] == 0
        if row["fact"] == "trained":
            assert row["advantage"] == pytest.approx(row["advantage_before"], abs=1e-6)


def test_a_steered_kl_counts_as_it_did_in_its_step(tmp_path: Path, cli: Cli) -> None:
    db = train(
        tmp_path,
        algo={"advantage": "dr_grpo", "kl_coef": 5.0, "kl_in": "reward", "kl_target": 1e-9},
    )
    with Store.open(db, readonly=True) as store:
        first, second = (row["kl_coef"] for row in store.runs.steps(store.runs.all()[0].id))
    assert first == 5.0 and second != first
    found = cli.json("rescore", "--no-keep", "--db", str(db))
    require_stored(found)
    assert {row["step"] for row in found["episodes"] if row["fact"] == "trained"} == {1, 2}


def test_several_estimators_side_by_side(trained: Path, rescore: Cli) -> None:
    names = ["grpo", "dr_grpo", "reinforce_pp", "rloo"]
    asked = [word for name in names for word in ("--advantage", name)]
    found = rescore.json("rescore", *asked)
    assert [one["set"] for one in found] == names
    require_stored(found[0])  # the settings of the training
    assert found[0]["summary"]["changed"] == found[0]["summary"]["sign_flips"] == 0
    known = {e.id: e for e in episodes(trained)}
    for row, centred, left_out in zip(*(found[n]["episodes"] for n in (0, 1, 3)), strict=True):
        if row["fact"] == "trained":
            group = [e for e in known.values() if e.group_id == known[row["episode"]].group_id]
            mean = float(np.mean([e.graded_reward for e in group]))
            assert centred["advantage"] == pytest.approx(row["reward"] - mean, abs=1e-5)
            rest = [e.graded_reward for e in group if e.id != row["episode"]]
            by_hand = row["reward"] - float(np.mean(rest))
            assert left_out["advantage"] == pytest.approx(by_hand, abs=1e-5)
    # It compares over the batch, not in the group.
    assert all(row["fact"] == "trained" for row in found[2]["episodes"])
    out = rescore("rescore", "--no-keep", *asked, said="Nothing was stored")
    assert all(name in out.splitlines()[0] for name in names)
    with Store.open(trained, readonly=True) as store:
        first = found[0]["episodes"][0]["episode"]
        assert set(names) <= {score.name for score in store.scores.get(first)}, "replay lists them"


def test_new_functions(rescore: Cli) -> None:
    words = ("--reward", "mine.py:words", "--set", "rewards.words=3", "-f", "step:1")
    found = rescore.json("rescore", *words)
    assert found["summary"]["episodes"] == 8
    for row in found["episodes"]:
        value = row["parts"]["words"]["value"]
        assert value >= 1 and row["delta"] == pytest.approx(3 * value)
    replaced = rescore.json("rescore", "--reward", "even=mine.py:even", "--no-keep")
    assert {row["reward"] for row in replaced["episodes"]} == {-1.0}
    assert replaced["summary"]["trained"] == 0, "all rewards are equal now"
    assert {row["fact"] for row in replaced["episodes"]} == {EQUAL}


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_pp"])
def test_a_filter_leaves_what_episodes_are_compared_with(
    trained: Path, rescore: Cli, estimator: str
) -> None:
    middle = sorted(e.graded_reward for e in episodes(trained))[8]
    asked = ("rescore", "--no-keep", "--advantage", estimator)
    whole = rescore.json(*asked)["episodes"]
    some = rescore.json(*asked, "-f", f"reward:>={middle}")
    assert 0 < some["summary"]["episodes"] == len(some["episodes"]) < len(whole)
    assert some["episodes"] == [row for row in whole if row["reward"] >= middle]


def test_what_cannot_be_scored_is_said(trained: Path, rescore: Cli) -> None:
    with Store.open(trained, readonly=True) as store:
        before = store.scores.sets(store.runs.all()[0].id)
    for args, code, said in (
        (["--reward", "mine.py:broken"], 1, "raised ValueError: no"),
        (["--reward", "mine.py:NUMBER"], 2, "is not a function"),
        (["--reward", "mine.py:wordz"], 2, "words"),
        (["--set", "rewards.lenght=1"], 2, "length"),
        (["--advantage", "gae"], 2, "gae"),
        (["-f", "step:99"], 2, "no finished episodes"),
    ):
        rescore("rescore", *args, code=code, said=said)
    with Store.open(trained, readonly=True) as store:
        assert store.scores.sets(store.runs.all()[0].id) == before, "nothing was stored"


def test_sets_are_kept_listed_and_found(trained: Path, rescore: Cli) -> None:
    asked = ("rescore", "--set", "rewards.length=-1", "--name", "short")
    rescore(*asked)
    kept = ('Kept as "short-2"', "16 of 16 rewards changed")
    assert "delta" in rescore(*asked, said=kept)
    with Store.open(trained) as store:
        run = store.runs.all()[0]
        names = [name for name, _, _, _ in store.scores.sets(run.id)]
        assert names[-2:] == ["short", "short-2"]
        everyone = store.episodes.rows(store.episodes.ids("delta:<0 kind:train"))
        assert len(everyone) == 16, "each said something, so each lost"
        lowest = store.episodes.rows(store.episodes.ids("", "rescored"))[0]
        score = store.scores.get(lowest.id)[-1]
        assert score.reward == min(store.scores.get(row.id)[-1].reward for row in everyone)
        assert score.parts["length"][1] == -1
        ids = store.episodes.ids(f"rescored:<={score.reward}")
        assert lowest.rowid in ids and len(ids) < 16
    assert "short-2" in rescore("show", lowest.id)
    shown = rescore("replay", lowest.id, "--plain").replace("\n   ", " ")
    assert 'rescored "short-2"' in shown
    with Store.open(trained) as store:
        assert store.scores.remove(run.id, "short") == 1
        assert "short" not in [name for name, *_ in store.scores.sets(run.id)]
