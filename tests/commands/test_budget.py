"""Settings for a time: hand-computed choices, what the user set is kept, and the record in the store."""

import json
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, Store, load_config
from agentrl_cli.commands.budget import choose, describe_budget, parse_time, set_by_user
from agentrl_cli.commands.progress import Progress
from agentrl_cli.errors import UsageError
from agentrl_cli.hooks.waits import advance
from agentrl_cli.registry.plugins import offers, spread_settings
from tests.helpers.processes import comes
from tests.helpers.train import spawn, write_project
from tests.trainer.test_resume import only_run

FOUND = {
    "tasks": 4, "step": 2.0, "attempt": 0.02, "opening": 10.0, "solved": 0.4, "equal": 0.2, "cut": 0.0,
    "longest": 30, "moved": 0.05,
}  # fmt: skip


def test_times() -> None:
    assert [parse_time(x) for x in ("90s", "5m", "1.5h", "1h30m", "45")] == [
        90,
        300,
        5400,
        5400,
        45,
    ]
    for wrong in ("5x", "soon", "-5m", "0m", "5 m m", ""):
        with pytest.raises(UsageError, match="not a time"):
            parse_time(wrong)


def pick(left: float, own: set[str] | None = None, **found: float) -> tuple[Config, dict[str, Any]]:
    rollout = {"group_size": 8, "prompts_per_step": 8, "max_new_tokens": 40}
    config = Config.model_validate({"rollout": rollout, "train": {"steps": 200, "lr": 0.001}})
    return choose(config, {**FOUND, **found}, left, own or set())


def test_steps_and_evaluations_fill_the_time() -> None:
    """A short time, 140 s: six evaluations of 80 attempts take 9.6 s, and 65 steps of 2 s 130: one every 13 steps."""
    config, record = pick(150)
    train = config.train
    assert (train.steps, train.eval.every, train.eval.samples, train.heal) == (65, 13, 2, True)
    assert config.rollout.prompts_per_step == 4 and train.lr == 0.0018, "(200 / 65) ** 0.5 = 1.754"
    assert record["expected"] == pytest.approx(130 + 6 * 1.6 + 10)
    assert record["changed"]["train.steps"] == [200, 65] and record["kept"] == []
    assert pick(60)[0].train.lr == 0.002, "twice at most"
    longer, _ = pick(290)  # 67 steps of 4 s are over a fifth of 200
    assert (longer.train.steps, longer.rollout.prompts_per_step, longer.train.lr) == (65, 8, 0.001)
    assert pick(30)[0].train.eval.samples == 1, "two evaluations of 1.6 s are over 15 % of 20 s"
    with pytest.raises(UsageError, match="Not one step fits: it takes 2 s"):
        pick(11)


@pytest.mark.parametrize(
    ("left", "probe", "chosen", "wanted"),
    [
        (150, {"equal": 0.6}, "rollout.prompts_per_step", 5),  # two of 5 groups differ
        (290, {"equal": 0.9, "solved": 0.1}, "rollout.prompts_per_step", 8),
        (290, {"equal": 0.9, "solved": 0.1}, "rollout.group_size", 16),
        (290, {"cut": 0.5, "longest": 39}, "rollout.max_new_tokens", 80),
        (290, {"cut": 0.5, "longest": 20}, "rollout.max_new_tokens", 40),  # solved turns are short
        (290, {"moved": 0.6}, "train.lr", 0.0005),
        (290, {"moved": 0.0006}, "train.lr", 0.01),
        (290, {"moved": 0.0006, "equal": 1.0}, "train.lr", 0.001),  # nothing was trained
    ],
)
def test_groups_lengths_and_rate_follow_the_probe(
    left: float, probe: dict[str, float], chosen: str, wanted: float
) -> None:
    assert attrgetter(chosen)(pick(left, None, **probe)[0]) == wanted


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    own = {"train.lr", "train.steps", "rollout.prompts_per_step"}  # six evaluations in 200 steps
    config, record = pick(150, own, moved=0.6)
    assert (config.train.lr, config.train.steps, config.rollout.prompts_per_step) == (0.001, 200, 8)
    assert sorted(record["kept"]) == sorted(own) and config.train.eval.every == 40
    said = describe_budget(record | {"seconds": 300})
    assert "kept as they are set: rollout.prompts_per_step, train.lr, train.steps" in said[1]
    (tmp_path / "task.yaml").write_text("name: p\ndefaults:\n  train: {lr: 0.01, steps: 9}\n")
    file = tmp_path / "agentrl.yaml"
    file.write_text("task: {packs: [.]}\ntrain: {lr: 0.01, steps: 8}\n")
    given = load_config([file], ["rollout.group_size=8"], base=tmp_path)
    assert set_by_user(*given, tmp_path) == {"train.steps", "rollout.group_size"}


def test_the_choice_is_printed_stored_and_left_alone_by_a_resume(
    tmp_path: Path, model: Path
) -> None:
    project = write_project(tmp_path / "project", model, rollout={"max_new_tokens": 1})
    if spread_settings():  # two processes, unless the user says otherwise
        code, said = spawn(project, "train", "--budget=10m", "--set=cluster.worker_gpus=0.5")
        assert code == 2 and "a process takes whole GPUs" in said, said
    here = [f"--set={key}={default}" for key, (default, _) in offers("spread").items()]
    code, said = spawn(project, "train", "--budget", "10m", "--steps", "2", "--json", *here)
    assert code == 0, said
    lines = [line.split()[0] for line in said.splitlines() if line.strip()]
    assert [one for one in lines if one in ("budget", "found", "chosen", "time")] == [
        "budget", "found", "chosen", "time",
    ]  # fmt: skip
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run, before = only_run(store), json.dumps(only_run(store).config)
        record = store.journal.newest_event(run.id, "budget")
    assert record is not None and (run.step, record["seconds"]) == (2, 600)
    assert "train.steps" in record["kept"] and run.config["train"]["heal"] is True
    code, said = spawn(project, "train", "--resume", "last", "--budget", "10m")
    assert code == 2 and "--budget is for a new run" in said
    for more in (["--fit"], ["--budget", "10m", *here]):  # the checkpoint is in the store
        code, said = spawn(project, "train", "--model", f"{run.name}@last", "--dry-run", *more)
        assert code == 0, said
    assert spawn(project, "train", "--resume", "last", "--steps", "3")[0] == 0
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        after = json.dumps(only_run(store).config).replace('"steps": 3', '"steps": 2')
        assert only_run(store).step == 3 and after == before


def test_the_time_left_is_that_of_the_steps_made_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress("sft", 4_000) as bar:
        bar.done = 1_000  # a resumed training begins further on
        now = 60.0
        bar.advance("loss 0.5")
        now = 120.0
        bar.advance("loss 0.4")
    monkeypatch.undo()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "sft 1001/4000 loss 0.5  ETA 49 h 59 min"
    assert second == "sft 1002/4000 loss 0.4  ETA 49 h 58 min"
    with Progress("rollout", 3, every=0.01):
        advance(5)
        line = "rollout 0/3 5 tokens 0 s\n"
        assert comes(lambda: line in capsys.readouterr().err), "before the first has ended"
