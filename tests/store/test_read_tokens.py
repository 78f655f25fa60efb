"""`read_tokens` and the page's example for pandas: the arrays of `turn_tokens` outside of the package's own reader."""

from __future__ import annotations

import math
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli import read_tokens
from agentrl_cli.errors import StoreError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode
from tests.store.test_store import random_episode, write

PAGE = Path(__file__).parents[2] / "docs" / "store.md"


@pytest.fixture
def episode(tmp_path: Path) -> Episode:
    made = random_episode(np.random.default_rng(1))
    with Store.open(tmp_path / "runs" / "agentrl.db") as store:
        if made.run_id:
            store.runs.add(RunRow(made.run_id, "r"))
        write(store, made)
    return made


def test_the_example_for_pandas_reads_an_episode(
    episode: Episode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
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


def test_rows_of_sqlite_and_what_was_never_stored(episode: Episode, tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "runs" / "agentrl.db")
    db.row_factory = sqlite3.Row
    rows = [read_tokens(row) for row in db.execute("SELECT * FROM turn_tokens ORDER BY idx")]
    db.close()
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
    with pytest.raises(StoreError, match=r"ids do not have 3 tokens"):
        read_tokens({"n": 3, "ids": b"\0" * 8})
