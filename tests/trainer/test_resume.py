"""A training that is killed or interrupted anywhere, and resumed, ends where an uninterrupted one ends: to the bit."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, PolicyError, device_fault
from agentrl_cli.store import RunRow, Store
from agentrl_cli.trainer.resume import RESTARTED, _gets_on, resumed_config
from agentrl_cli.types import Outcome
from tests.helpers.train import as_bytes, episodes_of, spawn, spawn_well, write_project

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


@pytest.mark.parametrize(
    ("event", "call"),
    [
        ("eval", 1),  # after that of the base, before it is kept as the best
        ("checkpoint", 2),  # right after a checkpoint: the best one, then that of step 2
        ("rollout", 3 * EPISODES + 4 + 5),  # within the last step, one step after a checkpoint
    ],  # before and after an update: tests/learning/test_ppo.py
)
def test_killed_and_resumed_is_never_interrupted(
    tmp_path: Path, model: Path, whole: dict[str, Any], event: str, call: int
) -> None:
    project = project_of(tmp_path / "project", model)
    done = killed(project, event, call)
    spawn_well(project, "train", "--resume", "last")
    assert ending(project) == whole
    with opened(project) as store:  # what was finished is still there, and was not made again
        assert {name: store.episodes.get(name).tokens.ids.tolist() for name in done} == done


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
