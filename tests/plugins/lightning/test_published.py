"""Agent-Lightning's published calc_x and spider train here, as they are but for model, batch, data and `uvx`.

    AGENTLIGHTNING_EXAMPLES=…/examples EXAMPLES_PYTHON=…/bin/python pytest tests/plugins/lightning/test_published.py

The folder is that of its release 0.3.0. The interpreter has what this package imports, and what the examples do:
autogen-agentchat, autogen-ext[openai,mcp], mcp-server-calculator, sympy, langgraph, langchain, langchain-community,
langchain-openai, pandas, datasets, nltk, sqlparse, termcolor. Nothing is fetched.
"""

import json
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Fact, Origin, Outcome

ROOT = Path(__file__).resolve().parents[3]
NEEDS = {
    "calc_x": "autogen_agentchat, autogen_ext.tools.mcp, mcp_server_calculator, sympy, datasets",
    "spider": "langchain_community, langgraph, langchain_openai, nltk, sqlparse, termcolor, pandas",
}
CALC = """
import agentrl_cli.plugins.lightning.alias, sys
import train_calc_agent as script
sys.argv = ["train", "--model", "tiny-tools", "--ci-fast", "--n-runners", "4",
            "--train-file", "rows.parquet", "--val-file", "rows.parquet"]
own = script.verl_default_config
def small():
    config = own()
    config["data"] |= {"train_batch_size": 2, "max_prompt_length": 3000, "max_response_length": 24}
    config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 2
    return config
script.verl_default_config = small
script.main()
"""
SPIDER = """
import agentrl_cli.plugins.lightning.alias
import train_sql_agent as script
config = script.config_train_fast()
config["data"] |= {"train_files": "rows.parquet", "val_files": "rows.parquet", "train_batch_size": 2,
                   "max_prompt_length": 3000, "max_response_length": 24}
config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 2
config["actor_rollout_ref"]["model"]["path"] = "tiny-tools"
script.train(config, None)
"""


def setting(name: str) -> tuple[Path, str]:
    """The examples' folder and the interpreter that runs one of them."""
    folder, python = (
        os.environ.get("AGENTLIGHTNING_EXAMPLES", ""),
        os.environ.get("EXAMPLES_PYTHON", ""),
    )
    if not (folder and python):
        pytest.skip(
            "AGENTLIGHTNING_EXAMPLES and EXAMPLES_PYTHON name the published examples and their interpreter"
        )
    return Path(folder) / name, python


def run(name: str, script: str, folder: Path, rows: list[dict[str, Any]]) -> list[Episode]:
    example, python = setting(name)
    asked = [python, "-c", f"import agentrl_cli, torch, {NEEDS[name]}"]
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if (
        missing := subprocess.run(asked, check=False, capture_output=True, text=True, env=given)
    ).returncode:
        pytest.skip(f"{python}: {missing.stderr.strip().splitlines()[-1]}")
    shutil.copytree(example, folder / "run")
    (folder / "run" / "rows.json").write_text(json.dumps(rows))
    made = "import json, pandas; pandas.DataFrame(json.load(open('rows.json'))).to_parquet('rows.parquet')"
    subprocess.run([python, "-c", made], check=True, cwd=folder / "run")
    (folder / "bin").mkdir()
    (folder / "bin" / "uvx").write_text(f'#!/bin/sh\nexec "{python}" -m mcp_server_calculator\n')
    (folder / "bin" / "uvx").chmod(0o755)
    given["PATH"] = f"{folder / 'bin'}{os.pathsep}{given['PATH']}"
    done = subprocess.run(
        [python, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder / "run",
        env=given,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with Store.open(folder / "run" / "runs" / "agentrl.db", readonly=True) as store:
        made_rows = store.episodes.rows(store.episodes.ids("kind:train", "time"))
        return [store.episodes.get(row.id) for row in made_rows]


def check(episodes: list[Episode]) -> None:
    assert len(episodes) == 8
    for episode in episodes:
        assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED_TOKENS), (
            episode.error
        )
        assert episode.graded and episode.fact in (Fact.TRAINED, Fact.SKIPPED_ZERO_VARIANCE)
        assert set(episode.tokens.origin[episode.tokens.trained_mask]) == {int(Origin.MODEL)}


def test_the_published_calc_x_trains(tmp_path: Path) -> None:
    given = {"chain": "", "source": ""}
    rows = [
        {"id": str(n), "question": f"What is {n} + 2?", "result": str(n + 2), **given}
        for n in (1, 2)
    ]
    check(run("calc_x", CALC, tmp_path, rows))


def test_the_published_spider_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting("spider")
    for place in ("database", "test_database"):
        folder = tmp_path / "data" / place / "singers"
        folder.mkdir(parents=True)
        schema = "CREATE TABLE singer (name TEXT, age INTEGER);"
        (folder / "schema.sql").write_text(schema)
        with sqlite3.connect(folder / "singers.sqlite") as db:
            db.executescript(f"{schema} INSERT INTO singer VALUES ('Ann', 30), ('Bo', 41);")
    monkeypatch.setenv("VERL_SPIDER_DATA_DIR", str(tmp_path / "data"))
    rows = [
        {
            "question": "How many singers are there?",
            "db_id": "singers",
            "query": "SELECT count(*) FROM singer",
        }
    ] * 2
    check(run("spider", SPIDER, tmp_path, rows))
