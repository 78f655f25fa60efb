"""What changes between a kill and a resume is named, and no group holds episodes of two versions."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import UsageError
from agentrl_cli.reports.run_data import notable_of
from agentrl_cli.reports.spans import of_step
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tasks import load_pack
from agentrl_cli.trainer.inputs import Inputs
from agentrl_cli.types import Episode, Fact, Outcome
from tests.helpers.cli import Cli
from tests.helpers.train import TASK_PY, TASK_YAML, episodes_of, spawn, spawn_well
from tests.trainer.test_resume import EPISODES, STEPS, only_run, plan, project_of

HOOK = """\
import asyncio
import os
import sqlite3
from pathlib import Path


class Killer:
    '''Kills this process in step 2, once a group of it is whole and the next one is begun, and both are stored.'''

    calls = 0

    async def on_rollout_end(self, rollout):
        self.calls += rollout.kind == "train"
        if Path("kill").is_file() and self.calls == 8 + 4 + 3:
            while self.ended() < 8 + 4 + 2:
                await asyncio.sleep(0.02)
            Path("kill").unlink()
            os.kill(os.getpid(), 9)

    def ended(self):
        conn = sqlite3.connect("file:runs/agentrl.db?mode=ro", uri=True)
        return conn.execute("SELECT count(*) FROM episodes WHERE kind='train' AND outcome IS NOT NULL").fetchone()[0]
"""


def killed(folder: Path, model: Path, *, cut: bool = True) -> Path:
    """A project whose training was killed in its second step; its reward is in a file of its own, with a helper."""
    shutil.copytree(model, folder / "model")
    given: dict[str, Any] = {"rollout": {"concurrency": 1}}
    given["hooks"] = ["hook.py:Saboteur", "killer.py:Killer"]
    # The model stands beside the project, so that a copy of both is the same run.
    project = project_of(folder / "project", Path("../model"), **given)
    reward = "import scale\n\n\ndef extra(episode, ctx):\n    return scale.FACTOR * episode.trained_tokens\n"
    for name, text in {
        "killer.py": HOOK,
        "scale.py": "FACTOR = 1.0\n",
        "reward.py": reward,
        "task.yaml": TASK_YAML.replace("length: {", 'length: {function: "reward.py:extra", '),
    }.items():
        (project / name).write_text(text)
    if cut:
        (project / "kill").touch()
    else:
        plan(project, "batch", 2)
    code, said = spawn(project, "train")
    assert code == -signal.SIGKILL, said
    return project


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a project that was killed within a group, and of its model; tests copy it."""
    return killed(tmp_path_factory.mktemp("cut"), model).parent


@pytest.fixture
def project(cut: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut, tmp_path / "copy")) / "project"


def rows_of(project: Path) -> list[dict[str, str]]:
    lines = (project / "data" / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write_rows(project: Path, rows: list[dict[str, str]]) -> None:
    (project / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_prompts(project: Path) -> None:
    write_rows(project, [{**row, "prompt": f"Changed {row['id']}."} for row in rows_of(project)])


def change_pack(project: Path) -> None:
    (project / "task.py").write_text(TASK_PY.replace("% 2 == 0", "% 2 == 1"))


def change_file(project: Path) -> None:
    (project / "reward.py").write_text("def extra(episode, ctx):\n    return 0.0\n")


def change_helper(project: Path) -> None:
    (project / "scale.py").write_text("FACTOR = 2.0\n")


def change_weight(project: Path) -> None:
    text = (project / "task.yaml").read_text()
    (project / "task.yaml").write_text(text.replace("weight: 0.0", "weight: 0.5"))


def change_tokenizer(project: Path) -> None:
    path = project.parent / "model" / "tokenizer.json"
    data = json.loads(path.read_text())
    words = data["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(data))


def stored(project: Path) -> list[Episode]:
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        assert store.select("PRAGMA foreign_key_check") == []
        return episodes_of(store, only_run(store))


def state(project: Path) -> list[tuple[object, ...]]:
    """All that a refused resume must leave as it is."""
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        rows: list[tuple[object, ...]] = store.select(
            "SELECT id, group_id, outcome, fact FROM episodes ORDER BY id"
        )
        return rows + store.select("SELECT status, step, tokenizer FROM runs")


def prompts(episodes: list[Episode]) -> set[tuple[str | None, str]]:
    """The groups, each with every prompt that its episodes have."""
    begun = [e for e in episodes if e.turns]
    return {(e.group_id, f"{e.task_id} {e.turns[0].messages[-1]['content']}") for e in begun}


CHANGES: dict[Callable[[Path], None], str] = {
    change_prompts: "6 rows of the same id with another content (bandit/train0, bandit/train1,",
    change_pack: "the code of task.py is different",
    change_file: "the code of reward.py is different",
    change_helper: "the code of scale.py is different",
    change_weight: "the code of task.yaml is different",
    change_tokenizer: "the tokenizer is another",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cut_group_is_not_continued_with_something_else(
    project: Path, change: Callable[[Path], None], cli: Cli
) -> None:
    before, cli.folder = state(project), project
    change(project)
    accept = "agentrl train --resume bandit-grpo --accept-changes"
    said = (CHANGES[change], "both versions: 000002-001.", accept)
    cli("train", "--resume", "last", code=2, said=said)
    assert state(project) == before, "nothing was stored"


def test_a_cut_group_never_holds_two_versions(project: Path, cli: Cli) -> None:
    was = [e for e in stored(project) if e.outcome not in (None, Outcome.CANCELLED)]
    cut = {e.id for e in was if e.group_id == "000002-001"}
    assert 2 <= len(cut) < 4
    for change in (change_prompts, change_file, change_tokenizer):
        change(project)
    said = spawn_well(project, "train", "--resume", "last", "--accept-changes")
    assert CHANGES[change_file] in said, said
    assert f"{len(cut)} episodes of unfinished steps are replaced: 000002-001." in said, said
    after = stored(project)
    retired = {e.id: e.group_id for e in after if e.fact == Fact.SKIPPED_CHANGED}
    assert retired == dict.fromkeys(cut, "000002-001~2")
    check_whole(after)
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run = only_run(store)
        rows = store.episodes.rows(store.episodes.ids(run=run.id))
        logs = "\n".join(line["text"] for line in store.journal.logs(run.id))
        shown = [group.best for group in notable_of(store, run.id, 2)["groups"]]
        title = of_step(store, run, 2).title
    cli.folder = project
    found = cli.json("failures", "last")["attempts"], title, len(shown)
    assert found == (STEPS * 8, f"{run.name} step 2, 8 episodes", 2), "no report has retired ones"
    groups = {(row.group_id, row.tokenizer) for row in rows}
    assert len({group for group, _ in groups}) == len(groups)
    assert ("000004-001", run.tokenizer) in groups, "that of its newest episodes"
    assert CHANGES[change_file] in logs
    said = spawn_well(project, "train", "--resume", "last", "--steps", str(STEPS + 1))
    assert "Changed" not in said, "it is reported once"


def test_what_was_sampled_by_other_settings_is_sampled_again(project: Path) -> None:
    said = spawn_well(project, "train", "--resume", "last", "--set", "rollout.temperature=0.5")
    assert "episodes are sampled, or scored, by other settings" in said, said
    check_whole(stored(project))
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        steps = store.runs.steps(only_run(store).id)
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps[1:]) < 1e-4


def check_whole(after: list[Episode]) -> None:
    """Check that every attempt of every step is there once and decided on, and no group has two prompts."""
    replaced = (Fact.SKIPPED_CHANGED, Fact.SKIPPED_CUT)
    kept = [e for e in after if e.outcome is not Outcome.CANCELLED and e.fact not in replaced]
    assert len({(e.step, e.group_id, e.sample) for e in kept}) == len(kept) == STEPS * EPISODES
    assert all(e.fact for e in after), "each has its disposition"
    found = prompts(after)
    assert len({group for group, _ in found}) == len(found), found


def test_a_change_that_no_cut_group_meets_goes_on(tmp_path: Path, model: Path) -> None:
    project = killed(tmp_path, model, cut=False)
    change_pack(project)
    text = (project / "task.yaml").read_text().replace("Say tokens", "Write tokens")
    (project / "task.yaml").write_text(text)  # the description: no episode depends on it
    said = spawn_well(project, "train", "--resume", "last")
    changed = "Changed since this run was last started: the code of task.py is different."
    assert changed in said, said
    after = stored(project)
    assert Fact.SKIPPED_CHANGED not in {e.fact for e in after} and len(after) == STEPS * EPISODES


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda rows: [*rows[:5], {**rows[0], "id": "new"}], "1 row fewer; 1 row more; "),
        (lambda rows: rows[::-1], "the rows are in another order; "),
    ],
)
def test_other_tasks_than_planned_are_reported(
    project: Path, change: Callable[[list[dict[str, str]]], list[dict[str, str]]], named: str
) -> None:
    write_rows(project, change(rows_of(project)))
    said = spawn_well(project, "train", "--resume", "last")
    assert f"{named}the next steps draw other tasks than planned." in said, said
    check_whole(stored(project))
    sql = "SELECT 1 FROM episodes e JOIN groups g ON g.id=e.group_id WHERE e.task_id!=g.task_id"
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        assert store.select(sql) == []


def test_a_base_that_is_another_checkpoint_by_now_is_reported(tmp_path: Path, model: Path) -> None:
    project = project_of(tmp_path / "project", model)
    spawn_well(project, "train", "--steps", "1")
    spawn_well(project, "train", "--steps", "1", "--model", "bandit-grpo@last", "--lora")
    merge = (project, "merge", "bandit-grpo-2@last")
    assert "trained over other weights" not in spawn_well(*merge, "one")
    spawn_well(project, "merge", "bandit-grpo-2@base", "base")
    spawn_well(project, "train", "--resume", "bandit-grpo", "--steps", "2")
    assert "trained over other weights" in spawn_well(*merge, "two")
    code, said = spawn(project, "merge", "bandit-grpo-2@base", "lost")
    assert code == 2 and "began from bandit-grpo@1, which is not there" in said, said
    assert "the model is another (bandit-grpo@1 before, bandit-grpo@2 now)." in spawn_well(
        project, "train", "--resume", "bandit-grpo-2", "--steps", "2"
    )


def test_only_a_resume_accepts_changes(tmp_path: Path, model: Path, cli: Cli) -> None:
    cli.folder = project_of(tmp_path / "project", model)
    cli("train", "--accept-changes", code=2, said="--accept-changes is for a resume.")


def test_a_greedy_attempt_belongs_to_its_group_and_old_runs_have_no_hashes(tmp_path: Path) -> None:
    old, new = (
        Inputs(("t",), ("aaaaaaaabbbbbbbb",), {"task.py": code}, "h") for code in ("1", "2")
    )
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow("r", "fox", tokenizer="h"))

        def add(sample: int, outcome: Outcome = Outcome.SOLVED, **given: str) -> None:
            where = {"kind": "train", "group_id": "000001-000", **given}
            one = Episode(f"{where}/{sample}/{outcome}", "t", "p", sample=sample, outcome=outcome)
            store.episodes.add([one.with_(run_id="r", step=1, **where)])

        for sample in range(2):
            add(sample)
        add(2, Outcome.CANCELLED)
        assert old.settle(store, run, 0, 2, greedy=True) == "", "a run without hashes gets them"
        assert "task.py is different" in new.settle(store, run, 0, 2), "the group is whole"
        with pytest.raises(UsageError, match="both versions: 000001-000"):
            old.settle(store, run, 0, 2, greedy=True)
        assert old.settle(store, run, 1, 2, greedy=True), "the step is done"
        add(0, kind="baseline", group_id="000001-000-greedy")
        assert new.settle(store, run, 0, 2, greedy=True)
        said = old.settle(store, run, 0, 3, greedy=True, accept=True)
        assert "2 episodes of unfinished steps are replaced" in said
        rows = store.episodes.rows(store.episodes.ids())
        assert {row.group_id for row in rows} == {"000001-000~2", "000001-000-greedy~2"}
        assert {("train", Fact.SKIPPED_CHANGED), ("baseline", "")} <= {
            (r.kind, r.fact) for r in rows
        }
        assert all(f"/{row.group_id}/" in (row.key or "") for row in rows)
        assert store.select("PRAGMA foreign_key_check") == []
        add(0, Outcome.FAILED)
        assert new.settle(store, run, 0, 3, accept=True), "the name is free, and is retired again"
        assert store.stats.groups("r", 0) == [] and len(store.select("SELECT 1 FROM groups")) == 3


def test_an_agents_command_may_hold_any_text(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "Go."}\n')
    (tmp_path / "play.py").write_text("print(1)\n")
    command = ["bash", "-c", "echo " + "x" * 400, "play.py", "missing.py"]
    (tmp_path / "task.yaml").write_text(
        json.dumps({"name": "p", "sandbox": False, "agent": {"command": command}})
    )
    pack = load_pack(tmp_path)
    tasks = pack.tasks("train")
    before = Inputs.of(tasks, [pack], "h", tmp_path)
    assert sorted(before.code) == ["play.py", "task.yaml"]
    (tmp_path / "play.py").write_text("print(2)\n")
    assert Inputs.of(tasks, [pack], "h", tmp_path).code["play.py"] != before.code["play.py"]
