"""Reference curves: the band by hand, which runs leave it, the way from a pack's file to diagnosis and watch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import DataError
from agentrl_cli.reports.diagnosis import diagnose
from agentrl_cli.reports.read_evidence import read_evidence
from agentrl_cli.reports.reference import (
    BASES,
    FILE,
    Reference,
    describe_bases,
    read_reference,
)
from agentrl_cli.reports.run_load import load
from agentrl_cli.store import RunRow, Store
from agentrl_cli.trainer.inputs import EVENT as INPUTS
from agentrl_cli.trainer.inputs import hash_rows
from agentrl_cli.tui.watch.charts import chart_grid
from tests.helpers.train import trainer_of

STEADY = Reference({"train.lr": 3e-4}, {"solved": [[0.4] * 8, [0.6] * 8], "reward": [[1.0] * 8]})


def test_the_band_holds_the_seeds_and_half_their_distance_more() -> None:
    assert STEADY.band("solved") == [pytest.approx((0.28, 0.72))] * 8
    assert STEADY.band("entropy") == []
    zigzag = Reference({}, {"solved": [[0.0, 0.2, 0.0, 0.2, 0.0]]})
    low, high = zigzag.band("solved")[
        -1
    ]  # mean 0.08; steps of 0.2: an error of 0.2/√2, over 5 steps
    beyond = 0.02 + 2.5 * 0.02**0.5 / 5**0.5
    assert (low, high) == pytest.approx((0.08 - beyond, 0.08 + beyond))


@pytest.mark.parametrize(
    ("key", "values", "since"),
    [
        ("solved", [0.5] * 8, 0),
        ("solved", [0.0] * 8, 1),
        ("solved", [0.5] * 3 + [0.0] * 5, 6),  # means 0.375, 0.3, 0.25, 0.21, 0.19
        ("solved", [0.5] * 4 + [0.0] * 4, 0),  # 0.25 at the end is below 0.28: one step alone
        ("solved", [1.0] * 8, 0),  # more is better
        ("reward", [1.5] * 8, 1),
        ("reward", [1.0] * 6 + [1.5] * 2, 0),  # not for LASTING steps
        ("solved", [0.0] * 9, 0),  # longer than the reference
    ],
)
def test_a_run_leaves_the_band_after_three_steps_outside(
    key: str, values: Sequence[float], since: int
) -> None:
    assert STEADY.leaves(key, values) == since


def test_settings_that_differ_are_named() -> None:
    assert STEADY.differences({"train": {"lr": 0.01}}) == ["train.lr 0.01 (there 0.0003)"]
    assert STEADY.differences({"train": {"lr": 3e-4}}) == []


async def test_a_pack_s_reference_reaches_the_diagnosis_and_the_charts(
    tmp_path: Path, model: Path
) -> None:
    async def train(**more: Any) -> tuple[RunRow, str]:
        async with trainer_of(tmp_path / "pack", model, train={"steps": 4}, **more) as trainer:
            run = await trainer.train()
            (event,) = [
                row for row in trainer.store.journal.events(run.id) if row["kind"] == INPUTS
            ]
            return run, hash_rows(event["data"]["rows"])

    run, rows = await train()
    curves = {"solved": [[0.9, 0.9, 0.9, 0.9, 0.9]] * 2, "reward": [[2.0] * 5]}
    content = {"model": run.model, "rows": rows, "settings": {"train.lr": 1.0}, "curves": curves}
    (tmp_path / "pack" / FILE).write_text(json.dumps(content))
    second, _ = await train(seed=1)
    with Store.open(tmp_path / "pack" / "runs" / "agentrl.db", readonly=True) as store:
        first, found = (
            [one for one in diagnose(read_evidence(store, row)) if one.name == "off_reference"]
            for row in (run, second)
        )
        data = load(store, second.id)
    assert not first  # it began before the pack had a reference
    assert "Since step 1 solved is outside" in found[0].text
    assert "there 0.88 to 0.92" in found[0].text
    assert "train.lr 0.001 (there 1.0)" in found[0].text
    low, high = data.band("solved")
    assert [x for x, _ in low] == [x for x, _ in high] == [1, 2, 3, 4]
    assert [y for _, y in low + high] == pytest.approx([0.88] * 4 + [0.92] * 4)
    assert data.band("loss") == []
    assert "the range of the reference curves" in "\n".join(map(str, chart_grid(data, 80)))


def test_a_reference_counts_for_its_model_and_its_rows_alone(tmp_path: Path) -> None:
    assert read_reference(tmp_path, "tiny-tools", "abcd") is None
    content = {"model": "tiny-tools", "rows": "abcd", "settings": {}, "curves": {"solved": [[0.5]]}}
    (tmp_path / FILE).write_text(json.dumps(content))
    assert read_reference(tmp_path, "tiny-tools", "abcd") == content
    assert read_reference(tmp_path, "tiny-tools", "other") is None
    assert read_reference(tmp_path, "smollm2", "abcd") is None
    (tmp_path / FILE).write_text('{"settings": {}, "curves": {"solved": "high"}}')
    with pytest.raises(DataError, match=r"reference\.json is not a reference of curves"):
        read_reference(tmp_path, "tiny-tools", "abcd")


def test_bases_say_where_a_model_will_not_learn(tmp_path: Path) -> None:
    assert describe_bases(tmp_path, "sums", "tiny-tools") == ""
    kept = {"tiny-tools": {"sums?terms=2": [0, 24], "coins": [0, 24], "coins?level=1": [16, 24]}}
    (tmp_path / BASES).write_text(json.dumps(kept))
    text = describe_bases(tmp_path, "sums?terms=9", "tiny-tools")
    assert text.startswith("tiny-tools solved 0 of 24 of `sums?terms=2` when this was measured")
    assert "will not learn here: take a larger one, --model" in text
    text = describe_bases(tmp_path, "coins?level=3", "tiny-tools")
    assert "0 of 24 of `coins`, 16 of 24 of `coins?level=1`" in text and "not learn" not in text
    assert describe_bases(tmp_path, "sums", "smollm2") == ""
