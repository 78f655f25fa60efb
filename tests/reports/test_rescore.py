"""A run scored again: weights, functions and estimators by hand; what was trained on stays; filters read it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agentrl_cli.commands import main
from agentrl_cli.store import Store
from agentrl_cli.types import Episode
from tests.helpers.train import episodes_of, trainer_of, write_model

BROKEN = "def broken(episode, ctx):\n    raise ValueError('no')\n\n\nNUMBER = 3\n"
FUNCTIONS = """\
def even(episode):
    return -1.0


def words(episode, ctx):
    return ctx.part(len(ctx.task.prompt), "messages of the task")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a training of two steps on the bandit."""
    import asyncio

    folder = tmp_path_factory.mktemp("rescore")
    model = write_model(folder / "model")

    async def train() -> None:
        async with trainer_of(folder / "project", model) as trainer:
            await trainer.train()

    asyncio.run(train())
    (folder / "project" / "mine.py").write_text(FUNCTIONS + BROKEN)
    return folder / "project" / "runs" / "agentrl.db"


def episodes(db: Path) -> list[Episode]:
    with Store.open(db, readonly=True) as store:
        return episodes_of(store, store.runs.all()[0])


def rescore(db: Path, capfd: pytest.CaptureFixture[str], *args: str) -> dict:  # type: ignore[type-arg]
    capfd.readouterr()
    assert main(["rescore", "last", "--db", str(db), "--json", *args]) == 0
    found: dict = json.loads(capfd.readouterr().out)  # type: ignore[type-arg]
    return found


def test_new_weights_by_hand(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = episodes(trained)
    found = rescore(trained, capfd, "--set", "rewards.length=0.5", "--set", "rewards.even=2")
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
            assert (
                row["advantage"] is None
                and row["fact"] == "skipped:no_signal: all rewards of the group are equal"
            )
    after = episodes(trained)
    assert [(e.reward, e.advantage, e.fact) for e in after] == [
        (e.reward, e.advantage, e.fact) for e in before
    ]


def test_the_same_settings_give_the_stored_advantages(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = rescore(trained, capfd, "--no-keep")
    assert (
        found["set"] is None and found["summary"]["changed"] == found["summary"]["sign_flips"] == 0
    )
    for row in found["episodes"]:
        assert row["fact"] == row["fact_before"] and row["delta"] == 0
        if row["fact"] == "trained":
            assert row["advantage"] == pytest.approx(row["advantage_before"], abs=1e-6)


def test_a_steered_kl_counts_as_it_did_in_its_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    model = write_model(tmp_path / "model")
    algo = {"advantage": "dr_grpo", "kl_coef": 5.0, "kl_in": "reward", "kl_target": 1e-9}

    async def train() -> None:
        async with trainer_of(tmp_path / "project", model, algo=algo) as trainer:
            await trainer.train()

    asyncio.run(train())
    db = tmp_path / "project" / "runs" / "agentrl.db"
    with Store.open(db, readonly=True) as store:
        first, second = (row["kl_coef"] for row in store.runs.steps(store.runs.all()[0].id))
    assert first == 5.0 and second != first
    rows = [row for row in rescore(db, capfd, "--no-keep")["episodes"] if row["fact"] == "trained"]
    assert {row["step"] for row in rows} == {1, 2}
    for row in rows:
        assert row["advantage"] == pytest.approx(row["advantage_before"], abs=1e-6)


def test_another_estimator(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = rescore(trained, capfd, "--advantage", "rloo")
    assert found["set"] == "rloo"
    by_id = {row["episode"]: row for row in found["episodes"]}
    for e in episodes(trained):
        others = [
            o.graded_reward for o in episodes(trained) if o.group_id == e.group_id and o.id != e.id
        ]
        if by_id[e.id]["fact"] == "trained":
            assert by_id[e.id]["advantage"] == pytest.approx(
                e.graded_reward - float(np.mean(others)), abs=1e-5
            )


def test_several_estimators_side_by_side(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["grpo", "dr_grpo", "reinforce_pp"]
    asked = [word for name in names for word in ("--advantage", name)]
    capfd.readouterr()
    assert main(["rescore", "--db", str(trained), "--json", *asked]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [one["set"] for one in found] == names
    for row, centred in zip(found[0]["episodes"], found[1]["episodes"], strict=True):
        if row["fact"] == "trained":
            assert row["advantage"] == pytest.approx(row["advantage_before"], abs=1e-6)
            mine = [
                e.graded_reward
                for e in episodes(trained)
                if e.group_id == _group(trained, row["episode"])
            ]
            assert centred["advantage"] == pytest.approx(
                row["reward"] - float(np.mean(mine)), abs=1e-5
            )
    assert all(row["fact"] == "trained" for row in found[2]["episodes"]), (
        "it compares over the batch, not in the group"
    )
    assert main(["rescore", "--db", str(trained), "--no-keep", *asked]) == 0
    out = capfd.readouterr()
    assert (
        all(name in out.out.splitlines()[0] for name in names) and "Nothing was stored" in out.err
    )
    with Store.open(trained, readonly=True) as store:
        first = found[0]["episodes"][0]["episode"]
        assert set(names) <= {score.name for score in store.scores.get(first)}, "replay lists them"


def _group(db: Path, episode: str) -> str | None:
    return next(e.group_id for e in episodes(db) if e.id == episode)


def test_new_functions(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(trained.parent.parent / "mine.py")
    found = rescore(
        trained, capfd, "--reward", f"{file}:words", "--set", "rewards.words=3", "-f", "step:1"
    )
    assert found["summary"]["episodes"] == 8
    assert all(
        row["delta"] == pytest.approx(3 * row["parts"]["words"]["value"])
        for row in found["episodes"]
    )
    assert all(row["parts"]["words"]["value"] >= 1 for row in found["episodes"])
    replaced = rescore(trained, capfd, "--reward", f"even={file}:even", "--no-keep")
    assert {row["reward"] for row in replaced["episodes"]} == {-1.0}
    assert replaced["summary"]["trained"] == 0, "all rewards are equal now"
    assert {row["fact"] for row in replaced["episodes"]} == {
        "skipped:no_signal: all rewards of the group are equal"
    }


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_pp"])
def test_a_filter_leaves_what_episodes_are_compared_with(
    trained: Path, capfd: pytest.CaptureFixture[str], estimator: str
) -> None:
    middle = sorted(e.graded_reward for e in episodes(trained))[8]
    whole = rescore(trained, capfd, "--no-keep", "--advantage", estimator)["episodes"]
    some = rescore(
        trained, capfd, "--no-keep", "--advantage", estimator, "-f", f"reward:>={middle}"
    )
    assert 0 < some["summary"]["episodes"] == len(some["episodes"]) < len(whole)
    assert some["episodes"] == [row for row in whole if row["reward"] >= middle]


def test_what_cannot_be_scored_is_said(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(trained.parent.parent / "mine.py")
    with Store.open(trained, readonly=True) as store:
        sets = len(store.scores.sets(store.runs.all()[0].id))
    for args, said in (
        (["--reward", f"{file}:broken"], "raised ValueError: no"),
        (["--reward", f"{file}:NUMBER"], "is not a function"),
        (["--reward", f"{file}:wordz"], "words"),
        (["--set", "rewards.lenght=1"], "length"),
        (["--advantage", "gae"], "gae"),
        (["-f", "step:99"], "no finished episodes"),
    ):
        assert main(["rescore", "--db", str(trained), *args]) != 0
        assert said in capfd.readouterr().err
    with Store.open(trained, readonly=True) as store:
        assert len(store.scores.sets(store.runs.all()[0].id)) == sets, "nothing was stored"


def test_sets_are_kept_listed_and_found(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert (
            main(["rescore", "--db", str(trained), "--set", "rewards.length=-1", "--name", "short"])
            == 0
        )
    out = capfd.readouterr()
    assert (
        "delta" in out.out
        and 'Kept as "short-2"' in out.err
        and "16 of 16 rewards changed" in out.err
    )
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
    assert main(["show", lowest.id, "--db", str(trained)]) == 0
    assert "short-2" in capfd.readouterr().out
    assert main(["replay", lowest.id, "--plain", "--db", str(trained)]) == 0
    assert 'rescored "short-2"' in capfd.readouterr().out.replace("\n   ", " ")
    with Store.open(trained) as store:
        assert store.scores.remove(run.id, "short") == 1 and "short" not in [
            n for n, *_ in store.scores.sets(run.id)
        ]
