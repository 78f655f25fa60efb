"""Commands on a second device that is not the CPU, with data: sampling, update, publish, checkpoint, resume, eval.

A tensor on the wrong device fails here, and so does a read as NumPy, or a decode step that waits for the device twice.
Not shown: kernels, streams, recomputed activations, quantised weights, and what asks for `cuda` by name.
"""

from pathlib import Path

import pytest

from agentrl_cli.store import Store
from tests.helpers.second_device import NAME, install
from tests.helpers.train import spawn, write_project


@pytest.mark.parametrize("lora", [False, True])
def test_commands_stay_on_their_device(tmp_path: Path, model: Path, lora: bool) -> None:
    adapter = {"enabled": lora, "r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    project = write_project(tmp_path, model, adapter=adapter, train={"steps": 2, "save_every": 1})
    there = ["--set", f"model.device={NAME}"]
    commands = [
        ["train"],
        ["train", "--resume", "last", "--steps", "3"],
        ["eval", "--samples", "1"],
    ]
    for words in commands if lora else [*commands[:1], ["rollout", "-n", "2"]]:
        code, text = spawn(project, *words, *([] if "--resume" in words else there), before=install)
        assert code == 0, text
    with Store.open(project / "runs/agentrl.db", readonly=True) as store:
        run = next(run for run in store.runs.all() if run.kind == "train")
        assert run.status == "finished" and run.step == (3 if lora else 2)
