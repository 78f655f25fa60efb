"""`agentrl optimize`: a task whose answer depends on words of the system text, GEPA and APO, a kill, bad input."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import main
from agentrl_cli.errors import AgentRLError
from agentrl_cli.plugins.prompts.apo import block
from agentrl_cli.plugins.prompts.store import Prompts
from agentrl_cli.store import Store
from agentrl_cli.tasks.texts import explain_loss
from tests.helpers.processes import comes
from tests.helpers.train import start, write_model
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
BUDGET = 400


@pytest.fixture
def project(tmp_path: Path) -> Path:
    model, folder = write_model(tmp_path / "model"), tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    for split, count in (("train", 24), ("validation", 12), ("test", 30)):
        words = ["alpha", "beta", "gamma"]
        rows = [
            {"id": f"{split}{n}", "family": "m", "prompt": f"Task {words[n % 3]}. {n}"}
            for n in range(count)
        ]
        (folder / "data" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    for name, text in (
        ("task.yaml", YAML),
        ("task.py", TASK),
        ("policy.py", POLICY),
        ("reflect.py", REFLECT),
    ):
        (folder / name).write_text(text)
    (folder / "agentrl.yaml").write_text(
        f"model:\n  name: {model}\n  device: cpu\ntask:\n  packs: ['.']\nremote:\n  backend: policy.py:make\n"
        "rollout:\n  max_new_tokens: 8\n  max_tokens: 200\n"
    )
    return folder


def optimize(project: Path, *more: str, reflect: str = "better") -> list[str]:
    given = [
        "--project",
        str(project),
        "--reflect-with",
        f"reflect.py:{reflect}",
        "--validation-tasks",
        "12",
    ]
    return ["optimize", *given, "--test-tasks", "30", *more]


@pytest.mark.parametrize("method", ["gepa", "apo"])
def test_words_of_the_system_text_are_found(
    project: Path, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if method == "gepa":
        pytest.importorskip("gepa", reason="the extra `prompts` is not installed")
    assert (
        main(optimize(project, "--method", method, "--budget", str(BUDGET), "--write", "--json"))
        == 0
    )
    report = json.loads(capfd.readouterr().out)
    assert report["test"]["base"]["value"] <= 0.3 and report["test"]["best"]["value"] >= 0.9
    assert (
        report["test"]["base"]["high"] < report["test"]["best"]["low"]
        and report["test"]["p_value"] < 1e-3
    )
    assert report["episodes"] <= BUDGET and "{politely}" in report["parts"]["system"]
    with Store.open(project / "runs" / "agentrl.db") as store:
        (run,) = store.runs.all()
        rows = {row.id: row for row in Prompts(store).all(run.id)}
        best = rows[report["best"]]
        assert (
            best.parent_id in rows
            and rows[report["base"]].parent_id is None
            and best.origin == method
        )
        tagged = store.episodes.rows(
            store.episodes.ids(f"tag:prompt:{best.id}", "time", run=run.id)
        )
        assert len(tagged) >= 30 and best.scores["test"] >= 0.9
    # what was written is what every other command uses
    assert main(["rollout", "--project", str(project), "-n", "6", "--split", "test", "--json"]) == 0
    assert [e["outcome"] for e in json.loads(capfd.readouterr().out)["episodes"]] == ["solved"] * 6


def test_a_killed_search_makes_nothing_again(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    args = optimize(project, "--method", "apo", "--budget", "200", "--json")
    started = start(project, *args, before=slowly)
    db = project / "runs" / "agentrl.db"
    assert comes(lambda: count(db) >= 25, started.process.is_alive)
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.join()
    before = count(db)
    assert 25 <= before < 200
    capfd.readouterr()
    assert main(args) == 0
    report = json.loads(capfd.readouterr().out)
    with Store.open(db) as store:
        assert [run.status for run in store.runs.all()] == ["finished"]
        rows = store.episodes.rows(store.episodes.ids("kind:eval", "time"))
        rows = [row for row in rows if str(row.outcome) != "cancelled"]
        assert len({(row.group_id, row.task_id) for row in rows}) == len(rows), (
            "no attempt was made twice"
        )
    assert report["episodes"] <= 200 and report["test"]["best"]["value"] >= 0.9


def test_the_template_of_tasks_is_a_part_and_an_endpoint_reflects(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Over HTTP, as a served model answers; `{prompt}` must survive, and what is written is what a rollout uses."""
    seen: list[str] = []

    def answer(path: str, asked: Any) -> Any:
        prompt = asked["messages"][-1]["content"]
        seen.append(prompt)
        text = (
            "- say more"
            if "Write a bullet list" in prompt
            else "```\nbeta gamma alpha: {prompt}\n```"
        )
        return completion("```\nno place\n```" if len(seen) == 2 else text)

    with served(answer) as url:
        given = [
            "--project",
            str(project),
            "--validation-tasks",
            "12",
            "--test-tasks",
            "30",
            "--write",
            "--json",
        ]
        limits = [
            "--method",
            "apo",
            "--rounds",
            "1",
            "--beam",
            "1",
            "--branch",
            "2",
            "--budget",
            "200",
        ]
        with_http = ["--reflect-with", f"{url}/v1", "--reflect-model", "m", "--part", "task.prompt"]
        code = main(["optimize", *given, *limits, *with_http])
    done = capfd.readouterr()
    assert code == 0, done.err
    report = json.loads(done.out)
    assert "it lost {prompt}" in done.err and len(seen) == 4
    assert (
        report["parts"] == {"task.prompt": "beta gamma alpha: {prompt}"}
        and report["test"]["best"]["value"] == 1.0
    )
    assert main(["rollout", "--project", str(project), "-n", "3", "--split", "test", "--json"]) == 0
    assert [e["outcome"] for e in json.loads(capfd.readouterr().out)["episodes"]] == ["solved"] * 3


def slowly() -> None:
    os.environ["MANNERS_DELAY"] = "0.02"


def count(db: Path) -> int:
    """Finished episodes; 0 before the store is made."""
    try:
        with Store.open(db, readonly=True) as store:
            return len(
                [
                    row
                    for row in store.episodes.rows(store.episodes.ids("kind:eval", "time"))
                    if row.outcome
                ]
            )
    except AgentRLError:
        return 0


@pytest.mark.parametrize(
    ("more", "reflect", "code", "said"),
    [
        (["--budget", "5"], "better", 2, "below one evaluation"),
        ([], "nothing", 1, "no usable text 8 times in a row; the last: it is empty"),
        (["--method", "gepa"], "careless", 1, "8 times in a row; the last: it lost {politely}"),
        (["--part", "tools.x.description"], "better", 2, "tools.x.description"),
    ],
)
def test_what_goes_wrong_is_a_sentence(
    project: Path,
    more: list[str],
    reflect: str,
    code: int,
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if "gepa" in more:
        pytest.importorskip("gepa", reason="the extra `prompts` is not installed")
    assert (
        main(optimize(project, "--method", "apo", "--rounds", "9", *more, reflect=reflect)) == code
    )
    assert said in capfd.readouterr().err


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


def test_placeholders_must_survive() -> None:
    assert explain_loss("a {x}", "b {x} {y}") == ""
    assert explain_loss("a {x}", "b") == "it lost {x}" and explain_loss("a", " ") == "it is empty"
