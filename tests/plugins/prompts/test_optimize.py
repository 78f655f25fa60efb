"""`agentrl optimize`: GEPA and APO find words of the system text; a kill, bad input; its table and its screen."""

import json
import os
import signal
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import AgentRLError
from agentrl_cli.plugins.prompts.apo import block
from agentrl_cli.plugins.prompts.candidates import load_candidates
from agentrl_cli.plugins.prompts.screen import PromptsScreen
from agentrl_cli.plugins.prompts.store import PromptRow, Prompts
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.maintenance import delete_run, status
from agentrl_cli.store.migration import migrate
from agentrl_cli.store.schema import MIGRATIONS
from agentrl_cli.tasks.texts import explain_loss
from agentrl_cli.tui.app import AgentApp
from agentrl_cli.tui.replay.screen import ReplayScreen
from agentrl_cli.tui.runs.screen import RunsScreen
from tests.helpers import tui_demo as demo
from tests.helpers.cli import Cli
from tests.helpers.processes import comes
from tests.helpers.train import set_environment, start
from tests.helpers.tui import press, showing, until_text
from tests.helpers.web import completion, served

YAML = """\
name: manners
description: Answer in the manner that each task wants.
system: Answer {politely}.
sandbox: false
rewards:
  right: {weight: 1.0, primary: true}
"""
TASK = """\
def right(episode, ctx):
    return float(ctx.final_text.strip() == "yes")


REWARDS = {"right": right}
"""
BROKEN = """
def broken(episode, ctx):
    if ctx.task.id.endswith(("validation3", "test3")):
        raise OSError("no answer")
    return right(episode, ctx)


REWARDS = {"right": broken}
"""
POLICY = """\
import os, time
from agentrl_cli.policies.scripted import ScriptedPolicy


def make(source):
    def reply(key, ids):
        text = source.chat.tokenizer.decode(ids)
        system, _, rest = text.partition("Task ")
        time.sleep(float(os.environ.get("MANNERS_DELAY", "0")))
        return "yes" if rest.split()[0].rstrip(".") in system else "no"

    return ScriptedPolicy(reply, source.chat.tokenizer)
"""
REFLECT = """\
WORDS = ["alpha", "beta", "gamma"]


def better(prompt):
    old = prompt.split("```")[1].strip()
    if "Write a bullet list" in prompt:
        return "- name one more word"
    missing = [word for word in WORDS if word not in old]
    return "```\\n" + old + " " + (missing[0] if missing else "!") + "\\n```"


def nothing(prompt):
    return ""


def careless(prompt):
    return "```\\nAnswer alpha beta gamma.\\n```"
"""
SETTINGS = """\
remote:
  backend: policy.py:make
rollout:
  max_new_tokens: 8
  max_tokens: 200
"""


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    for split, count in (("train", 24), ("validation", 12), ("test", 30)):
        words = ["alpha", "beta", "gamma"]
        rows = [
            {"id": f"{split}{n}", "family": "m", "prompt": f"Task {words[n % 3]}. {n}"}
            for n in range(count)
        ]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {
        "task.yaml": YAML,
        "task.py": TASK,
        "policy.py": POLICY,
        "reflect.py": REFLECT,
        "agentrl.yaml": f"model:\n  name: {model}\n  device: cpu\ntask:\n  packs: ['.']\n{SETTINGS}",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def optimize(project: Path, *more: str, reflect: str = "reflect.py:better") -> list[str]:
    sizes = ("--validation-tasks", "12", "--test-tasks", "30")
    return ["optimize", "--project", str(project), "--reflect-with", reflect, *sizes, *more]


@pytest.mark.parametrize("method", ["gepa", "apo"])
def test_words_of_the_system_text_are_found(project: Path, method: str, cli: Cli) -> None:
    if method == "gepa":
        pytest.importorskip("gepa", reason="the extra `prompts` is not installed")
    task = project / "task.py"
    task.write_text(task.read_text() + BROKEN)
    report = cli.json(*optimize(project, "--method", method, "--budget", "400", "--write"))
    base, better = report["test"]["base"], report["test"]["best"]
    assert base["value"] <= 0.3 and better["value"] >= 0.9
    assert base["high"] < better["low"] and report["test"]["p_value"] < 1e-3
    assert (report["test"]["tasks"], report["test"]["ungraded"]) == (29, 1)
    assert report["validation"]["best"] == 1.0, "no ungraded attempt counts as a failure"
    assert report["episodes"] <= 400 and "{politely}" in report["parts"]["system"]
    with Store.open(project / "runs" / "agentrl.db") as store:
        (run,) = store.runs.all()
        rows = {row.id: row for row in Prompts(store).all(run.id)}
        best = rows[report["best"]]
        assert best.parent_id in rows and rows[report["base"]].parent_id is None
        assert best.origin == method and best.scores["test"] >= 0.9
        assert len(store.episodes.ids(f"tag:prompt:{best.id}", run=run.id)) >= 30
    assert_written(cli, project)


def assert_written(cli: Cli, project: Path) -> None:
    made = cli.json("rollout", "--project", str(project), "-n", "3", "--split", "test")
    assert [one["outcome"] for one in made["episodes"]] == ["solved"] * 3


def count(db: Path) -> int:
    """Finished episodes; 0 before the store is made."""
    try:
        with Store.open(db, readonly=True) as store:
            rows = store.episodes.rows(store.episodes.ids("kind:eval"))
            return sum(bool(row.outcome) for row in rows)
    except AgentRLError:
        return 0


def test_a_killed_search_makes_nothing_again(project: Path, cli: Cli) -> None:
    args = optimize(project, "--method", "apo", "--budget", "200", "--json")
    started = start(project, *args, before=partial(set_environment, MANNERS_DELAY="0.02"))
    db = project / "runs" / "agentrl.db"
    assert comes(lambda: count(db) >= 25, started.process.is_alive)
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.join()
    assert 25 <= count(db) < 200
    with Store.open(db) as store:  # as of a long search: its settings came first
        (old,) = store.runs.all()
        for _ in range(1000):
            store.journal.add_event(old.id, "reflection", {"key": "", "answer": ""})
    report = json.loads(cli(*args))
    with Store.open(db) as store:
        assert [run.status for run in store.runs.all()] == ["finished"]
        rows = store.episodes.rows(store.episodes.ids("kind:eval", "time"))
    ended = [(row.group_id, row.task_id) for row in rows if str(row.outcome) != "cancelled"]
    assert len({*ended}) == len(ended), "no attempt was made twice"
    assert report["episodes"] <= 200 and report["test"]["best"]["value"] >= 0.9


def test_a_search_under_another_reward_is_another(project: Path, cli: Cli) -> None:
    asked = optimize(project, "--method", "apo", reflect="reflect.py:nothing")
    for reward in (TASK, TASK.replace("yes", "no"), TASK.replace("yes", "no")):
        (project / "task.py").write_text(reward)
        cli(*asked, code=1, said="no usable text")
    with Store.open(project / "runs" / "agentrl.db") as store:
        scores = [Prompts(store).all(run.id)[0].scores for run in store.runs.all()]
    assert [one["validation"] for one in scores] == [1.0, 0.0]  # the third continues the second


def test_the_template_of_tasks_is_a_part_and_an_endpoint_reflects(project: Path, cli: Cli) -> None:
    seen: list[str] = []

    def answer(path: str, asked: Any) -> Any:
        seen.append(asked["messages"][-1]["content"])
        if len(seen) == 2:
            return completion("```\nno place\n```")
        bullets = "Write a bullet list" in seen[-1]
        return completion("- say more" if bullets else "```\nbeta gamma alpha: {prompt}\n```")

    limits = "--method apo --rounds 1 --beam 1 --branch 2 --budget 200".split()
    with served(answer) as url:
        words = optimize(project, *limits, "--write", "--part", "task.prompt", reflect=f"{url}/v1")
        report = cli.json(*words, "--reflect-model", "m")
    assert "it lost {prompt}" in cli.err and len(seen) == 4
    assert report["parts"] == {"task.prompt": "beta gamma alpha: {prompt}"}
    assert report["test"]["best"]["value"] == 1.0
    assert_written(cli, project)


@pytest.mark.parametrize(
    ("more", "reflect", "code", "said"),
    [
        (["--budget", "5"], "better", 2, "below one evaluation"),
        ([], "nothing", 1, "no usable text 8 times in a row; the last: it is empty"),
        (["--method", "gepa", "--rounds", "3"], "careless", 1, "the last: it lost {politely}"),
        (["--part", "tools.x.description"], "better", 2, "tools.x.description"),
        (["--fail-under", "0", "--set", "eval.split=hidden"], "better", 2, "'hidden' of the pack"),
        (["--fail-under", "0", "--test-tasks", "0"], "better", 2, "--fail-under needs test tasks"),
        (["--fail-under", "70"], "better", 2, "less than or equal to 1"),
        (["--show", "x", "--write", "--fail-under", "0"], "better", 2, "do nothing with --show"),
        (["--method", "gepa", "--beam", "3"], "better", 2, "--beam and --rounds do nothing"),
        (["--reflect-model", "m"], "better", 2, "--reflect-model does nothing without an address"),
    ],
)
def test_what_goes_wrong_is_a_sentence(
    project: Path, more: list[str], reflect: str, code: int, said: str, cli: Cli
) -> None:
    if reflect == "careless":
        pytest.importorskip("gepa", reason="the extra `prompts` is not installed")
    words = optimize(project, "--method", "apo", "--rounds", "9", reflect=f"reflect.py:{reflect}")
    cli(*words, *more, code=code, said=said)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("x\n```\nBe brief.\n```\ny", "Be brief."),
        ("```text\nBe {kind}.\n```", "Be {kind}."),
        ("Plain.", "Plain."),
    ],
)
def test_the_text_of_an_answer(answer: str, text: str) -> None:
    assert block(answer) == text
    assert explain_loss("{kind}", f"{text} {{kind}}") == "", "placeholders may be added"


RUN = (
    "INSERT INTO runs VALUES ('r', 'a', 'optimize', 'finished', 'm', 'p', 1, 1, 1, '', NULL, 1, '', 1, '', '', '', 1,"
    " 1, 1, '{}', '', '', '')"
)
TABLE = """CREATE TABLE prompts (
    n INTEGER PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, id TEXT NOT NULL,
    parent_id TEXT, origin TEXT NOT NULL, parts TEXT NOT NULL, scores TEXT NOT NULL, at REAL NOT NULL,
    UNIQUE (run_id, id)
) STRICT"""


def test_a_store_gets_the_table_when_a_candidate_is_added(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Store.open(path) as store, Store.open(path, readonly=True) as watcher:
        store.runs.add(RunRow(id="r", name="r", status="finished"))
        assert Prompts(watcher).all("r") == []
        for id, parent in (("p", None), ("q", "p")):
            Prompts(store).add(PromptRow("r", id, parent, "seed", {"system": id}))
        assert [row.id for row in Prompts(watcher).all("r")] == ["p", "q"]
        assert delete_run(store, store.runs.get("r")) == 0 and Prompts(store).all("r") == []


def test_a_store_of_an_earlier_version_keeps_its_candidates(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode=WAL")
        migrate(conn, MIGRATIONS[:16])
        conn.execute(TABLE)
        conn.execute(RUN)
        conn.execute("INSERT INTO prompts VALUES (1, 'r', 'p', 'missing', 'gepa', '{}', '{}', 1)")
    with Store.open(path, readonly=True) as store:
        assert [row.id for row in Prompts(store).all("r")] == ["p"]
    with Store.open(path) as store:
        Prompts(store).add(PromptRow("r", "q", "p", "gepa", {}))
        assert [(row.id, row.parent_id) for row in Prompts(store).all("r")] == [
            ("p", "missing"),
            ("q", "p"),
        ]
    assert status(path, check=True).check == "ok"


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
async def test_the_candidates_of_a_search(tmp_path: Path, size: tuple[int, int], cli: Cli) -> None:
    db, words = tmp_path / "agentrl.db", demo.Words()
    with Store.open(db) as store:
        run = store.runs.add(RunRow("opt", "optimize-01", kind="optimize", status="finished"))
        store.journal.add_event(run.id, "optimize", {"budget": 40})
        rows = (("aaaa", None, "seed", "Answer."), ("bbbb", "aaaa", "gepa", "Answer briefly."))
        for n, (name, parent, origin, text) in enumerate(rows):
            Prompts(store).add(PromptRow(run.id, name, parent, origin, {"system": text}))
            each = demo.episode(words, n + 1, solved=bool(n), run_id=run.id)
            store.episodes.finish(each.with_(id=f"ep{name}", kind="eval", group_id=f"{name}/t"))
            store.marks.tag(f"ep{name}", f"prompt:{name}")
            Prompts(store).score(run.id, name, "validation", 0.25 + n / 2, n + 1)
        found = load_candidates(store, "opt")
    assert [(row.id, depth) for row, depth in found.rows] == [("aaaa", 0), ("bbbb", 1)]
    assert (found.best, found.spent, found.points) == ("bbbb", 2, ((1, 0.25), (2, 0.75)))
    shown = cli("optimize", "--show", "optimize-01", "--db", str(db)).splitlines()
    assert "2/40 episodes" in shown[0]
    assert shown[3].startswith(" ★gepa  0.750") and shown[3].endswith("└ bbbb")
    assert shown[1].index("candidate") == shown[2].index("aaaa")
    assert shown[-2:] == ["- Answer.", "+ Answer briefly."]
    async with showing(AgentApp(db, RunsScreen), "optimize-01", size=size) as pilot:
        text = await press(pilot, "enter", then="+ Answer briefly.")
        for part in ("2/40 episodes", "└ bbbb", "- Answer.", "0.750"):
            assert part in text
        long = PromptRow(run.id, "cccc", "bbbb", "gepa", {"system": "Answer at length."})
        with Store.open(db) as store:
            Prompts(store).add(long)
        await until_text(pilot, "cccc")
        await press(pilot, "k", "space", "j", "j", then="DIFF aaaa -> cccc")
        assert isinstance(pilot.app.screen, PromptsScreen)
        await press(pilot, "k", "enter", then=lambda: isinstance(pilot.app.screen, ReplayScreen))
