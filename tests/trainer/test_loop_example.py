"""examples/loop.py and `agentrl train` end with the same weights, byte for byte."""

import asyncio
import copy
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from agentrl_cli.commands import main
from agentrl_cli.config import Config
from agentrl_cli.paths import packs_dir
from agentrl_cli.store import Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop.py"
SMALL = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 24, "max_tokens": 256}


@pytest.mark.parametrize("adapter", [{"enabled": False}, {"enabled": True, "r": 4, "dropout": 0.1}])
def test_both_end_with_the_same_weights(
    adapter: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.set_num_threads(1)
    example = runpy.run_path(str(EXAMPLE))
    settings = copy.deepcopy(example["SETTINGS"]) | {"adapter": adapter}
    settings["rollout"] |= SMALL
    pack = shutil.copytree(packs_dir() / "calc-task", tmp_path / "calc-task")
    unseen = pack / "data" / "validation.jsonl"
    unseen.write_text("".join(unseen.read_text().splitlines(keepends=True)[:4]))
    settings["task"] = {"packs": [str(pack)]}
    settings["train"] |= {
        "steps": 2,
        "token_budget": 600,
        "schedule": {"warmup_steps": 2},
        "eval": {"every": 0 if adapter["enabled"] else 2, "samples": 1},
    }
    monkeypatch.chdir(tmp_path)
    asyncio.run(example["main"](tmp_path / "out", Config.model_validate(settings)))
    assert ("unseen tasks solved" in capsys.readouterr().out) is not adapter["enabled"]

    Path("agentrl.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train"]) == 0
    with Store.open(tmp_path / "runs" / "agentrl.db", readonly=True) as store:
        (run,) = store.runs.all()
        last = next(row for row in store.runs.checkpoints(run.id) if row.kind == "last")
        steps = store.runs.steps(run.id)
    assert len(steps) == 2 and all(row["grad_norm"] > 0 for row in steps)
    (ours,) = (tmp_path / "out").glob("*.safetensors")
    (theirs,) = (tmp_path / last.path).glob("*.safetensors")
    found, wanted = load_file(ours), load_file(theirs)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].numpy().tobytes() == weight.numpy().tobytes(), name


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 250
