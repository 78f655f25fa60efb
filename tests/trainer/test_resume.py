"""A training that is killed or interrupted anywhere, and resumed, ends where an uninterrupted one ends: to the bit.

What changes between a kill and a resume is named, and no group holds episodes of two versions.
"""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, PolicyError, UsageError, device_fault
from agentrl_cli.reports.run_data import notable_of
from agentrl_cli.reports.spans import of_step
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tasks import load_pack
from agentrl_cli.trainer.inputs import Inputs
from agentrl_cli.trainer.resume import RESTARTED, _gets_on, resumed_config
from agentrl_cli.types import Episode, Fact, Outcome
from tests.helpers.cli import Cli
from tests.helpers.train import TASK_YAML, as_bytes, episodes_of, spawn, spawn_well, write_project

STEPS, EPISODES = 4, 8

HOOK = """\
import json
import os
from pathlib import Path

PLAN = Path("plan.json")


class Saboteur:
    '''At the n-th call of an event, sends this process a signal; once for each plan.'''

    def __init__(self):
        self.calls = {}

    def seen(self, event):
        self.calls[event] = self.calls.get(event, 0) + 1
        if not PLAN.is_file():
            return
        plan = json.loads(PLAN.read_text())
        if (plan["event"], plan["call"]) == (event, self.calls[event]):
            PLAN.unlink()
            os.kill(os.getpid(), plan["signal"])

    def on_rollout_end(self, rollout):
        self.seen("rollout")

    def on_batch(self, batch):
        self.seen("batch")

    def on_update(self, metrics):
        self.seen("update")

    def on_eval(self, result):
        self.seen("eval")

    def on_checkpoint(self, path):
        self.seen("checkpoint")


class Twice(Saboteur):
    '''Two signals, one after the other.'''

    def seen(self, event):
        before = PLAN.is_file()
        super().seen(event)
        if before and not PLAN.is_file():
            import signal
            import time

            time.sleep(0.2)  # in a thread: signals that wait for the main thread at once become one
            os.kill(os.getpid(), signal.SIGINT)
"""


def project_of(folder: Path, model: Path, hook: str = "Saboteur", **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "hook.py").write_text(HOOK)
    often = {"save_every": 2, "eval_every": 2, "eval_tasks": 2, "eval_samples": 1}
    given: dict[str, Any] = {
        "deterministic": True,
        "hooks": [f"hook.py:{hook}"],
        "rollout": {"concurrency": 3},
        "train": {"steps": STEPS, "lr": 1e-2, **often},
        "algo": {"drop_zero_variance": False},
    }
    return write_project(folder, model, **{**given, **sections})


def plan(project: Path, event: str, call: int, number: int = signal.SIGKILL) -> None:
    (project / "plan.json").write_text(json.dumps({"event": event, "call": call, "signal": number}))


def only_run(store: Store) -> RunRow:
    (run,) = [run for run in store.runs.all() if run.kind == "train"]
    return run


def ending(project: Path) -> dict[str, Any]:
    """All that must not depend on interruptions: weights and optimizer as bytes, what was sampled, what was trained."""
    with opened(project) as store:
        run = only_run(store)
        assert (run.status, run.step, run.error) == ("finished", STEPS, "")
        assert not store.live.all(run.id)
        last = next(Path(c.path) for c in store.runs.checkpoints(run.id) if c.kind == "last")
        kept = [e for e in episodes_of(store, run) if e.outcome is not Outcome.CANCELLED]
        sampled = {
            (e.step, e.group_id, e.sample): (e.tokens.ids.tolist(), e.reward, e.fact, e.advantage)
            for e in kept
        }
        assert len(sampled) == len(kept) == STEPS * EPISODES, "every attempt is there once"
        metrics = [
            {name: value for name, value in row.items() if not name.startswith(("time/", "at"))}
            for row in store.runs.steps(run.id)
        ]
        (file,) = last.glob("*model.safetensors")
        return {
            "weights": file.read_bytes(),
            "state": as_bytes(torch.load(last / "trainer.pt", weights_only=True)),
            "sampled": sampled,
            "metrics": metrics,
            "evals": [(row.step, row.pass_rate) for row in store.runs.evals(run.id)],
            "checkpoints": sorted((c.kind, c.step) for c in store.runs.checkpoints(run.id)),
        }


def opened(project: Path) -> Store:
    return Store.open(project / "runs" / "agentrl.db", readonly=True)


def made_once(project: Path, done: dict[str, list[int]]) -> bool:
    """Whether what was finished is still there, and was not made again."""
    with opened(project) as store:
        return {name: store.episodes.get(name).tokens.ids.tolist() for name in done} == done


def killed(project: Path, event: str, call: int) -> dict[str, list[int]]:
    """Kill a training there; the ids of what had been sampled by then, for each episode."""
    plan(project, event, call)
    code, said = spawn(project, "train")
    assert code == -signal.SIGKILL, said
    with opened(project) as store:
        run = only_run(store)
        assert run.state == "interrupted"
        done = [e for e in episodes_of(store, run) if e.outcome not in (None, Outcome.CANCELLED)]
    return {e.id: e.tokens.ids.tolist() for e in done}


def test_killed_and_resumed_is_never_interrupted(
    tmp_path: Path, model: Path, whole: dict[str, Any]
) -> None:
    """Right after a checkpoint: the best one, then that of step 2.

    Before and after an update: tests/learning/test_ppo.py; within an evaluation and a step: tests/store/test_claims.py.
    """
    project = project_of(tmp_path / "project", model)
    done = killed(project, "checkpoint", 2)
    spawn_well(project, "train", "--resume", "last")
    assert ending(project) == whole
    assert made_once(project, done)


def test_killed_while_it_samples_ahead(tmp_path: Path, model: Path) -> None:
    ahead: dict[str, Any] = {
        "rollout": {"concurrency": 3, "async_staleness": 1},
        "deterministic": False,
    }
    project = project_of(tmp_path / "project", model, **ahead)
    done = killed(project, "rollout", EPISODES + 3)
    spawn_well(project, "train", "--resume", "last")
    with opened(project) as store:
        run = only_run(store)
        assert (run.status, run.step) == ("finished", STEPS)
        assert [row["step"] for row in store.runs.steps(run.id)] == list(range(1, STEPS + 1))
        kept = [e for e in episodes_of(store, run) if e.outcome is not Outcome.CANCELLED]
    places = {(e.step, e.group_id, e.sample) for e in kept}
    assert len(places) == len(kept) == STEPS * EPISODES and all(e.fact for e in kept)
    assert done.items() <= {e.id: e.tokens.ids.tolist() for e in kept}.items()


def test_the_first_interrupt_finishes_the_step_and_saves(
    tmp_path: Path, model: Path, whole: dict[str, Any]
) -> None:
    project = project_of(tmp_path / "project", model)
    plan(project, "rollout", EPISODES + 3, signal.SIGINT)
    code, said = spawn(project, "train")
    assert code == 130 and "stopping after this step" in said and "Traceback" not in said
    assert "stopping after this evaluation of 2 tasks" in said, said
    with opened(project) as store:
        run = only_run(store)
        assert (run.status, run.step) == ("stopped", 2)
        assert ("last", 2) in {(c.kind, c.step) for c in store.runs.checkpoints(run.id)}
        outcomes = {e.outcome for e in episodes_of(store, run)}
    assert outcomes <= {Outcome.FAILED, Outcome.SOLVED, Outcome.TRUNCATED_TOKENS}
    assert "resumed at step 2" in spawn_well(project, "train", "--resume", "last")
    assert ending(project)["weights"] == whole["weights"]


def test_the_second_interrupt_stops_now(tmp_path: Path, model: Path, whole: dict[str, Any]) -> None:
    train = {"steps": STEPS, "save_every": 2, "eval_every": 0, "lr": 1e-2}
    project = project_of(
        tmp_path / "project", model, "Twice", train=train, store={"precision": "float16"}
    )
    widths = "SELECT DISTINCT length(logp_sampled) / n FROM turn_tokens WHERE logp_sampled <> ''"
    plan(project, "rollout", EPISODES + 2, signal.SIGINT)
    code, said = spawn(project, "train")
    assert code == 130 and "Traceback" not in said, said
    resume = "Resume it (from step 0: no checkpoint was saved): agentrl train --resume"
    assert f"stopped after step 1: stopped at once. {resume}" in said, said
    with opened(project) as store:
        run = only_run(store)
        assert (run.status, run.step, store.live.all(run.id)) == ("stopped", 1, [])
        assert None not in {e.outcome for e in episodes_of(store, run)}
        assert store.select(widths) == [(4,)], "the resume trains on these numbers"
    said = spawn_well(project, "train", "--resume", "last")
    assert "no checkpoint: begins again at step 0" in said, said
    assert ending(project)["weights"] == whole["weights"]
    with opened(project) as store:
        assert store.select(widths) == [(2,)]


def test_a_finished_run_goes_on_to_more_steps(
    tmp_path: Path, model: Path, whole: dict[str, Any]
) -> None:
    project = project_of(tmp_path / "project", model)
    plan(project, "rollout", 2 + EPISODES + 3, signal.SIGTERM)  # within the last step
    said = spawn_well(project, "train", "--steps", "2")
    assert "stopping after this step" in said and "finished at step 2" in said, said
    said = spawn_well(project, "train", "--resume", "last")
    assert "has done its 2 steps: nothing left to do" in said and "--steps 4" in said, said
    with Store.open(project / "runs" / "agentrl.db") as store:
        # a watcher's, too late: it is not for the next start
        store.controls.add(only_run(store).id, "stop")
    said = spawn_well(project, "train", "--resume", "last", "--steps", str(STEPS))
    assert "stop was requested before the run stopped" in said, said
    assert ending(project)["weights"] == whole["weights"]


def test_a_resume_keeps_the_optimizer_whose_state_it_loads(tmp_path: Path) -> None:
    run = RunRow("r", "r", config=Config().model_dump(mode="json"))
    settings, _ = resumed_config(run, tmp_path, ["train.lr=0.5"], {})
    assert settings.train.lr == 0.5
    for other in ("train.optimizer=muon", "train.optimizer.weight_decay=0.1"):
        with pytest.raises(ConfigError, match=r"other settings under `train\.optimizer`"):
            resumed_config(run, tmp_path, [other], {})


# --- a GPU fault that ends the process ---


FAULTY = """\
from pathlib import Path

from agentrl_cli.inference.model_runner import ModelRunner
from agentrl_cli.inference.policy import LocalPolicy

ILLEGAL = "CUDA error: an illegal memory access was encountered\\nCUDA kernel errors might be reported later."


class Faulty(ModelRunner):
    # What a GPU with a memory fault does: after some steps every call fails, until the process ends.
    steps = 0

    def decode(self, pool, sequences, *given):
        self.steps += 1
        limit = Path(__file__).with_name("limit")
        if limit.exists() and self.steps > int(limit.read_text()):
            if limit.read_text() == "9":
                limit.unlink()
            raise RuntimeError(ILLEGAL)
        return super().decode(pool, sequences, *given)


def make(source):
    return LocalPolicy(source.model(), context_length=96, rows=8, version=source.name, runner=Faulty)
"""


def test_a_run_continues_in_a_new_process(tmp_path: Path, model: Path) -> None:
    train = {"steps": 3, "save_every": 1}
    project = write_project(tmp_path, model, remote={"backend": "sampler.py:make"}, train=train)
    (project / "sampler.py").write_text(FAULTY)
    (project / "limit").write_text("9")
    fault = "the GPU failed (CUDA error: an illegal memory access was encountered)"
    assert f"{fault}; a new process resumes" in spawn_well(project, "train")
    with opened(project) as store:
        (run,) = store.runs.all()
        assert (run.status, run.step, run.error) == ("finished", 3, "")
        kinds = [event["kind"] for event in store.journal.events(run.id)]
        assert kinds.index("restarted") < kinds.index("resumed") and kinds.count("restarted") == 1
        steps = [row["step"] for row in store.runs.steps(run.id)]
        assert steps == [1, 2, 3], "no step is lost, and none is there twice"


def test_what_is_such_a_fault() -> None:
    first, more = "CUDA error: device-side assert triggered", "Compile with TORCH_USE_CUDA_DSA."
    lost = PolicyError("The model could not generate.")
    lost.__cause__ = RuntimeError(f"{first}\n{more}")
    assert device_fault(lost) == first
    for other in (
        "CUDA out of memory. Tried to allocate",
        "CUDA error: out of memory",
        "HIPPO error: none",
    ):
        assert not device_fault(RuntimeError(other))


def test_a_restart_is_remembered_whatever_came_after_it(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        store.runs.add(RunRow(id="r", name="r", step=3))
        for kind in (RESTARTED, *["note"] * 1000):
            store.journal.add_event("r", kind, {"step": 3})
    assert not _gets_on(tmp_path / "a.db", "r", "a fault", print)


# --- inputs that change between a kill and a resume ---


KILLER = """\
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


def killed_in_a_group(folder: Path, model: Path, *, cut: bool = True) -> Path:
    """A project whose training was killed in its second step; its reward is in a file of its own, with a helper."""
    shutil.copytree(model, folder / "model")
    given: dict[str, Any] = {"rollout": {"concurrency": 1}}
    given["hooks"] = ["hook.py:Saboteur", "killer.py:Killer"]
    # The model stands beside the project, so that a copy of both is the same run.
    project = project_of(folder / "project", Path("../model"), **given)
    reward = "import scale\n\n\ndef extra(episode, ctx):\n    return scale.FACTOR * episode.trained_tokens\n"
    for name, text in {
        "killer.py": KILLER,
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
    return killed_in_a_group(tmp_path_factory.mktemp("cut"), model).parent


@pytest.fixture
def project(cut: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut, tmp_path / "copy")) / "project"


# What changes: the file, what stands there, what instead; and what is reported of it.
CHANGES = {
    "prompts": (
        ("data/train.jsonl", "Go ", "Changed "),
        "6 rows of the same id with another content (bandit/train0, bandit/train1,",
    ),
    "pack": (("task.py", "% 2 == 0", "% 2 == 1"), "the code of task.py is different"),
    "file": (("reward.py", "FACTOR *", "FACTOR +"), "the code of reward.py is different"),
    "helper": (("scale.py", "1.0", "2.0"), "the code of scale.py is different"),
    "weight": (("task.yaml", "weight: 0.0", "weight: 0.5"), "the code of task.yaml is different"),
    "tokenizer": (
        ("../model/tokenizer.json", '"a": 69, "b": 70', '"a": 70, "b": 69'),
        "the tokenizer is another",
    ),
}


def change(project: Path, what: str) -> str:
    """Make one of the changes; what is reported of it."""
    (name, old, new), said = CHANGES[what]
    before = (project / name).read_text()
    assert old in before
    (project / name).write_text(before.replace(old, new))
    return said


def stored(project: Path) -> list[Episode]:
    with opened(project) as store:
        assert store.select("PRAGMA foreign_key_check") == []
        return episodes_of(store, only_run(store))


def state(project: Path) -> list[tuple[object, ...]]:
    """All that a refused resume must leave as it is."""
    with opened(project) as store:
        rows: list[tuple[object, ...]] = store.select(
            "SELECT id, group_id, outcome, fact FROM episodes ORDER BY id"
        )
        return rows + store.select("SELECT status, step, tokenizer FROM runs")


def prompts(episodes: list[Episode]) -> set[tuple[str | None, str]]:
    """The groups, each with every prompt that its episodes have."""
    begun = [e for e in episodes if e.turns]
    return {(e.group_id, f"{e.task_id} {e.turns[0].messages[-1]['content']}") for e in begun}


@pytest.mark.parametrize("what", CHANGES)
def test_a_cut_group_is_not_continued_with_something_else(
    project: Path, what: str, cli: Cli
) -> None:
    before, cli.folder = state(project), project
    reported = change(project, what)
    accept = "agentrl train --resume bandit-grpo --accept-changes"
    said = (reported, "both versions: 000002-001.", accept)
    cli("train", "--resume", "last", code=2, said=said)
    assert state(project) == before, "nothing was stored"


def test_a_cut_group_never_holds_two_versions(project: Path, cli: Cli) -> None:
    was = [e for e in stored(project) if e.outcome not in (None, Outcome.CANCELLED)]
    cut = {e.id for e in was if e.group_id == "000002-001"}
    assert 2 <= len(cut) < 4
    for what in ("prompts", "tokenizer", "file"):
        reported = change(project, what)
    said = spawn_well(project, "train", "--resume", "last", "--accept-changes")
    assert reported in said, said
    assert f"{len(cut)} episodes of unfinished steps are replaced: 000002-001." in said, said
    after = stored(project)
    retired = {e.id: e.group_id for e in after if e.fact == Fact.SKIPPED_CHANGED}
    assert retired == dict.fromkeys(cut, "000002-001~2")
    check_whole(after)
    with opened(project) as store:
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
    assert reported in logs
    said = spawn_well(project, "train", "--resume", "last", "--steps", str(STEPS + 1))
    assert "Changed" not in said, "it is reported once"


def test_what_was_sampled_by_other_settings_is_sampled_again(project: Path) -> None:
    said = spawn_well(project, "train", "--resume", "last", "--set", "rollout.temperature=0.5")
    assert "episodes are sampled, or scored, by other settings" in said, said
    check_whole(stored(project))
    with opened(project) as store:
        steps = store.runs.steps(only_run(store).id)
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps[1:]) < 1e-4


def test_what_other_weights_made_is_made_again(tmp_path: Path, model: Path) -> None:
    """Step 2 is sampled and evaluated, and the newest checkpoint is that of the base."""
    project = project_of(tmp_path / "project", model)
    killed(project, "eval", 2)
    with opened(project) as store:
        assert max(c.step for c in store.runs.checkpoints(only_run(store).id)) == 0
    said = spawn_well(project, "train", "--resume", "last", "--lr", "0.1")
    assert "steps after 1 are sampled and evaluated again" in said, said
    assert "step 2 was evaluated already" not in said, said
    check_whole(stored(project))
    with opened(project) as store:
        run = only_run(store)
        steps = store.runs.steps(run.id)
        assert [row.step for row in store.runs.evals(run.id)] == [0, 2, 4]
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps) < 1e-4


def check_whole(after: list[Episode]) -> None:
    """Check that every attempt of every step is there once and decided on, and no group has two prompts."""
    replaced = (Fact.SKIPPED_CHANGED, Fact.SKIPPED_CUT)
    kept = [e for e in after if e.outcome is not Outcome.CANCELLED and e.fact not in replaced]
    assert len({(e.step, e.group_id, e.sample) for e in kept}) == len(kept) == STEPS * EPISODES
    assert all(e.fact for e in after), "each has its disposition"
    found = prompts(after)
    assert len({group for group, _ in found}) == len(found), found


def test_a_change_that_no_cut_group_meets_goes_on(tmp_path: Path, model: Path) -> None:
    project = killed_in_a_group(tmp_path, model, cut=False)
    change(project, "pack")
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
    path = project / "data" / "train.jsonl"
    rows = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = spawn_well(project, "train", "--resume", "last")
    assert f"{named}the next steps draw other tasks than planned." in said, said
    check_whole(stored(project))
    sql = "SELECT 1 FROM episodes e JOIN groups g ON g.id=e.group_id WHERE e.task_id!=g.task_id"
    with opened(project) as store:
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
