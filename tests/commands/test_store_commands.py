"""ls, show, export, runs, db, query, grep as a person runs them."""

import json
from pathlib import Path

import numpy as np
import pytest

from agentrl_cli.store import EvalRow, RunRow, Store
from agentrl_cli.types import (
    Episode,
    Generation,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Tokens,
    ToolCall,
    ToolResult,
    TrainSignals,
    Turn,
)
from tests.helpers.cli import Cli
from tests.helpers.processes import run_code


def episode_of(n: int) -> Episode:
    answer = np.frombuffer(b"it is", np.uint8).astype(np.int32)
    half = np.full(5, -0.5, np.float32)
    top = np.zeros((5, 5), np.int32)
    said = Tokens.from_generation(
        Generation(answer, half, half, half, top, top.astype(np.float32), StopReason.STOP, "step-0")
    )
    parts = [
        Tokens.from_ids(list(b"12*4,5?"), [Origin.USER] * 7),
        said,
        Tokens.from_ids([33], [Origin.TOOL]),
        said,
    ]
    calls = (ToolCall("c", "calculator", {"expr": "12*4,5"}, "{}"),)
    results = (ToolResult("SyntaxError: 4,5", error="exception", seconds=0.012, level="ns"),)
    return Episode(
        f"1e{n}",
        "calc/0001",
        pack="calc",
        run_id="1aaa",
        step=1,
        group_id="g",
        sample=n,
        kind="train",
        turns=(
            Turn(0, "user", ({"role": "user", "content": "12*4,5?"},), 0, 7),
            Turn(
                1,
                "assistant",
                ({"role": "assistant", "content": "it is"},),
                7,
                12,
                calls=calls,
                seconds=0.5,
            ),
            Turn(
                2,
                "tool",
                ({"role": "tool", "content": "SyntaxError: 4,5"},),
                12,
                13,
                results=results,
            ),
            Turn(
                3,
                "assistant",
                ({"role": "assistant", "content": "it is"},),
                13,
                18,
                stop_reason=StopReason.STOP,
            ),
        ),
        tokens=Tokens.concat(parts),
        reward_parts=(
            RewardPart("correct", n / 4, 1.0, primary=True, detail="got 54"),
            RewardPart("format", 0.5, 0.2),
        ),
        outcome=Outcome.SOLVED if n == 3 else Outcome.FAILED,
        flags=("AFTERERR",),
        fact="trained",
        advantage=0.1 * n,
        started=1.7e9 + n,
        ended=1.7e9 + n + 2,
    )


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Two runs; four episodes of one group, each with a call, a failing tool and an answer."""
    path = tmp_path / "runs" / "agentrl.db"
    with Store.open(path) as store:
        store.runs.add(
            RunRow(
                id="1aaa",
                name="grpo-07",
                status="finished",
                dir="grpo-07",
                total_steps=4,
                started=1.7e9,
            )
        )
        store.runs.add(RunRow(id="1bbb", name="grpo-08", started=1.7e9 + 9))
        store.tokenizers.add("h", json.dumps({"byte_tokenizer": ["<|im_end|>"]}))
        for n in range(4):
            episode = episode_of(n)
            store.episodes.finish(episode, tokenizer="h")
            column = np.where(episode.tokens.trained_mask, 0.25, np.nan).astype(np.float32)
            clipped = np.zeros(len(column), np.int8)
            store.signals.add(episode.id, TrainSignals(column, column, column, clipped, column))
        store.marks.tag("1e0", "seen")
        store.runs.add_step("1aaa", 1, {"reward": 0.5, "kl": float("nan")})
        store.runs.add_eval(
            EvalRow("1aaa", 1, "step-1", n_tasks=10, n_samples=4, pass_rate=0.5, low=0.4, high=0.6)
        )
        store.runs.add_checkpoint("1aaa", 1, "grpo-07/checkpoints/step_1", {})
    (path.parent / "grpo-07" / "checkpoints").mkdir(parents=True)
    return path


@pytest.fixture
def run(db: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capfd, db.parent, "--db", str(db))


def test_ls(run: Cli) -> None:
    lines = run("ls", "--sort", "reward", "--limit", "2", said="2 of 4").splitlines()
    assert lines[0].split()[:4] == ["id", "run", "step", "task"]
    assert [line.split()[0] for line in lines[1:]] == ["1e0", "1e1"]
    assert lines[1].endswith("AFTERERR  seen")
    (row,) = run.json("ls", "--filter", "outcome:solved")
    assert [row[name] for name in ("id", "reward", "flags", "outcome")] == [
        *("1e3", 0.85, ["AFTERERR"], "solved")
    ]
    run("ls", "--run", "grpo-08", said="Nothing matches.\n")
    assert len(run("ls", "--format", "jsonl").splitlines()) == 4


@pytest.mark.parametrize(
    ("what", "first"),
    [
        ("runs", "grpo-08"),
        ("tasks", "calc/0001"),
        ("checkpoints", "grpo-07"),
        ("evals", "grpo-07"),
        ("tags", "seen"),
    ],
)
def test_ls_other_things(run: Cli, what: str, first: str) -> None:
    assert next(iter(run.json("ls", what)[0].values())) == first
    assert run("ls", what, "--format", "csv").splitlines()[1].startswith(first)
    assert run("ls", what, "--format", "md").splitlines()[1].startswith("| ---")


def test_show_an_episode_and_the_tokens_of_one_turn(run: Cli) -> None:
    out = run("show", "best")
    for text in (
        "episode 1e3   calc/0001   run grpo-07   step 1   sample 3   train",
        "solved   reward 0.85   advantage 0.3   trained   4 turns   18 tokens (10 sampled)",
        "1 call (1 failed)   2.0 s",
        "── turn 1 assistant ── 5 tokens   5 sampled   0.50 s",
        "→ calculator(expr='12*4,5')",
        "← ERROR exception (12 ms, ns)",
        "── turn 2 tool ── 1 token   not trained",
        "correct*   0.75       1  0.75  got 54",
        "! AFTERERR (turn 3): it answered although its call failed: SyntaxError: 4,5",
        "group g:",
    ):
        assert text in out, out
    # The message and the flags of the tool and of the answer; the result is not printed twice.
    assert out.count("SyntaxError: 4,5") == 3
    lines = run("show", "1e3", "--tokens", "--turn", "1").strip().splitlines()
    assert len(lines) == 7
    assert lines[1].split() == "at id origin logp entropy ratio clip adv weight text".split()
    assert lines[2].split() == "7 105 model -0.5 -0.5 0.25 no 0.25 0.25 |i|".split()
    assert run.json("show", "1e3", "--tokens")["signals"]["ratio"][7] == 0.25


def test_show_a_run(run: Cli) -> None:
    out = run("show", "grpo-07")
    assert "run grpo-07   train   finished   step 1 of 4" in out and "reward    0.5" in out
    assert run.json("show", "grpo-07")["last_step"]["kl"] is None


def test_export(run: Cli, tmp_path: Path) -> None:
    out = run("export", "--filter", "reward:>0.2", "--no-tokens")
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["1e1", "1e2", "1e3"]
    target, page = tmp_path / "out.jsonl", tmp_path / "out.html"
    run("export", "best", "--group", "--out", str(target))
    assert len(target.read_text().splitlines()) == 4
    run("export", "best", "--out", str(target), code=2, said="--force")
    assert run.json("export", "best", "--out", str(target), "--force")["episodes"] == 1
    run("export", "best", "--out", str(page))
    assert page.read_text().startswith("<!doctype html>")


REFUSED = {
    "ls -f rewrad:1": "reward",
    "ls --role user -i": "--role and --ignore-case do nothing without",
    "ls runs --grep a": "runs does nothing with --grep",
    "ls runs -f outcome:failed": "apply to the list of episodes",
    "ls --sql select --grep a": "--grep does nothing with --sql",
    "ls --sql select --run x": "--run does nothing with --sql",
    "ls --grep a --format csv": "--format does nothing with --grep",
    "ls --schema --format csv": "--format does nothing with --schema",
    "eval best --bench math --run grpo-07": "CHECKPOINT and --run do nothing with --bench",
    "ls --param 1": "--param does nothing without --sql",
    "grep (": "cannot be read",
    "query": "",
    "show 1e9": "1e",
    "show 1e": "several",
    "show 1e3 --turn 9": "",
    "show last --step 1": "--step does nothing for an episode",
    "show grpo-07 --time --turn 1": "--turn does nothing with --time",
    "compare grpo-08": "One name is compared with the newest run",
    "export -f html last": "--format html",
    "export --no-tokens -o out.html": "with --format html",
    "export --report --group --no-tokens": "do nothing with --report",
    "export best -o .": "is a folder",
    "export best --force": "--force does nothing without --out",
    "export grpo-07 --report --run x": "--run does nothing with",
    "export -f reward:>0.2 last": "cannot be combined",
    "export grpo-07": "--report grpo-07` reports",
    "export grpo-0": "Runs of a similar name: grpo-0",
    "replay best --svg a.svg --json": "--json does nothing with --svg",
    "replay best --script a.json": "--script does nothing without --whatif",
    "replay best --verify --layer logp": "--layer does nothing when calls run again",
    "replay best --json --layer logp": "--layer does nothing with --tokens or --json",
    "db prune --keep bset": "best",
    **{
        f"db prune --older-than={time}": "needs a time like 7d"
        for time in "soon -5d nan 7dd h".split()
    },
    "runs delete grpo-08 --yes": "is running",
    "runs rename grpo-07 grpo-08": "exists already",
    **{f"runs rename grpo-07 {name}": "cannot be the name of a run" for name in ("last", "a;b")},
}


def test_mistakes_and_options_that_would_do_nothing_are_refused(run: Cli) -> None:
    for words, said in REFUSED.items():
        run(*words.split(), code=2, said=said)
    run("query", "delete from runs", code=2, said="only reads")
    for name in ("two words", ""):
        run("runs", "rename", "grpo-07", name, code=2, said="cannot be the name of a run")


def test_words_and_rules_are_explained(run: Cli) -> None:
    assert "grader_noise" in run("show", "--words")
    rules = run.json("show", "--words")["Rules of `agentrl why`"]
    assert "grader_noise" in rules and rules["mismatch"].count(" Or: ") == 2, "three have that name"


def test_grep(run: Cli) -> None:
    assert run("grep", r"Error: \d", "-l").split() == ["1e3", "1e2", "1e1", "1e0"]
    out = run("grep", "syntax", "-i", "--role", "tool", "--limit", "1", said="The first 1")
    assert out == "1e3@t2 tool: SyntaxError: 4,5\n"
    assert run.json("grep", "12", "--limit", "1")["turn"] == 0
    run("grep", "nothing like it", code=1)


def test_query_and_the_views(run: Cli) -> None:
    text = "select task, count(*) as n, avg(reward) as mean from v_episodes group by task"
    assert run.json("query", text) == [{"task": "calc/0001", "n": 4, "mean": pytest.approx(0.475)}]
    assert "1 row" not in run("query", "select ids from turn_tokens", "--limit", "1")
    assert "view v_groups: id, run, step" in run("query", "--schema")
    (group,) = run.json("query", "select * from v_groups")
    rewards = [n / 4 + 0.1 for n in range(4)]
    assert [group["mean"], group["sd"]] == pytest.approx([np.mean(rewards), np.std(rewards)])
    assert (group["episodes"], group["solved"], group["has_signal"]) == (4, 0.25, 1)
    text = "select turn, tool, error from v_turns where episode='1e0' and tool is not null"
    assert run.json("query", text) == [{"turn": 1, "tool": "calculator", "error": "exception"}]


def test_runs_delete_asks_and_takes_the_folder_and_no_other(
    run: Cli, db: Path, tmp_path: Path
) -> None:
    folder, outside = db.parent / "grpo-07", tmp_path / "precious"
    outside.mkdir()
    for place in ("../precious", str(outside), ".", ".."):
        with Store.open(db) as store:
            item = store.runs.add(RunRow(id="", name="odd", status="finished", dir=place))
        run("runs", "delete", item.name, "--yes")
    assert outside.is_dir() and db.exists()
    run("runs", "delete", "grpo-07", code=1, said="--yes")
    assert folder.is_dir()
    assert run.json("runs", "delete", "grpo-07", "--yes") == [{"run": "grpo-07", "episodes": 4}]
    assert not folder.exists() and db.exists() and run.json("ls") == []


def test_runs_list_and_rename(run: Cli, db: Path) -> None:
    assert [row["name"] for row in run.json("runs", "list")] == ["grpo-08", "grpo-07"]
    renamed = run.json("runs", "rename", "grpo-07", "team/base")
    assert renamed == {"id": "1aaa", "name": "team/base", "before": "grpo-07"}
    assert "team/base" in run("runs", "list")
    run("export", "--report", "team/base", said="is in report-team-base.html")
    with Store.open(db) as store:
        store.runs.add(RunRow("", "eval-base", kind="eval", started=1.8e9))
    run("export", "--report", said="The report of grpo-08 is in")


def test_db(run: Cli, db: Path, tmp_path: Path) -> None:
    assert run("db", "path").strip() == str(db) and "episodes" in run("db", "status")
    found = run.json("db", "status", "--check")
    assert (found["rows"]["episodes"], found["rows"]["turns"], found["check"]) == (4, 16, "ok")
    copy = tmp_path / "copy.db"
    assert run.json("db", "backup", str(copy))["bytes"] == copy.stat().st_size
    run("db", "backup", str(copy), code=2)
    planned = {"what": "numbers", "episodes": 2, "done": False}
    assert run.json("db", "prune", "--dry-run") == planned
    assert run.json("db", "prune", "--keep", "", "--yes")["episodes"] == 4
    with Store.open(db, readonly=True) as store:
        assert store.signals.get("1e0") is None
        assert np.isnan(store.episodes.get("1e0").tokens.logp_policy).all()
    with Store.open(copy, readonly=True) as store:
        assert store.signals.get("1e0") is not None
    assert run.json("db", "prune", "--older-than", "1.5h", "--dry-run")["done"] is False
    run("db", "vacuum")


def test_readers_import_neither_torch_nor_textual_and_print_to_a_pipe(db: Path) -> None:
    code = (
        "import sys; from agentrl_cli.commands import main\n"
        "for c in (['ls'], ['show', 'last', '--tokens'], ['export', 'last'], ['grep', 'x'],\n"
        "          ['replay', 'last', '--layer', 'logp']):\n"
        f"    assert main([*c, '--db', {str(db)!r}]) == 0\n"
        "bad = {'torch', 'transformers', 'textual', 'peft', 'tokenizers', 'sqlite_utils'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    assert "\nreward " in run_code(code).stdout
