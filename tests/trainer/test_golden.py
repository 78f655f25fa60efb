"""Three deterministic training steps are what they were: ids, log-probabilities, advantages and weights.

`golden.json` holds the numbers. Everything that only moves code keeps them; what changes them on purpose writes them
again (`GOLDEN=write pytest tests/trainer/test_golden.py`) and says why in its commit. examples/loop.py and
`agentrl train` end with the same weights, byte for byte.
"""

import asyncio
import copy
import hashlib
import json
import os
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from agentrl_cli import Config, train
from agentrl_cli.commands import main
from agentrl_cli.paths import packs_dir
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Fact
from tests.helpers.train import episodes_of

GOLDEN = Path(__file__).with_name("golden.json")
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"algo": {"advantage": "grpo", "loss": "ppo_clip"}},
    "lora": {
        "algo": {"advantage": "rloo", "kl_coef": 0.01, "minibatches": 2},
        "adapter": {"enabled": True, "r": 4},
    },
}
THREE_STEPS: dict[str, Any] = {
    "deterministic": True,
    "seed": 3,
    "model": {"name": "tiny", "device": "cpu", "dtype": "float32"},
    "task": {"packs": ["calc-task"]},
    "rollout": {
        "group_size": 4,
        "prompts_per_step": 4,
        "max_turns": 3,
        "max_new_tokens": 24,
        "max_tokens": 256,
    },
    "train": {"steps": 3, "lr": 1e-3, "warmup_steps": 1},
}
# Of summed log-probabilities and norms on another kind of processor, where products are added up
# in another order.
TOLERANCE = 2e-4


def fingerprint() -> str:
    """Return a hash of a few products and exponentials: equal on processors with the same arithmetic."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for rows in (1, 7, 64):
        left = torch.randn(rows, 160, generator=generator)
        right = torch.randn(160, 432, generator=generator)
        parts.append(torch.log_softmax(left @ right, -1).numpy().tobytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def measure(run: RunRow, db: Path) -> dict[str, Any]:
    """Return the numbers of a run as they stand in golden.json."""
    with Store.open(db, readonly=True) as store:
        episodes = [episode for step in (1, 2, 3) for episode in episodes_of(store, run, step)]
        last = next(row for row in reversed(store.runs.checkpoints(run.id)) if row.kind == "last")
    weights = load_file(next(Path(last.path).glob("*.safetensors")))
    exact = hashlib.sha256(
        b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    ).hexdigest()
    return {
        "episodes": [
            {
                "task": episode.task_id,
                "step": episode.step,
                "ids": hashlib.sha256(
                    np.asarray(episode.tokens.ids, np.int32).tobytes()
                ).hexdigest()[:16],
                "logp": round(float(np.nansum(episode.tokens.logp_policy)), 4),
                "reward": episode.reward,
                "advantage": None if episode.advantage is None else round(episode.advantage, 5),
                "fact": Fact(episode.fact).old,  # one to one; the fixture has these names
            }
            for episode in sorted(
                episodes, key=lambda each: (each.step or 0, each.task_id, each.sample)
            )
        ],
        "norms": {name: round(float(weights[name].float().norm()), 4) for name in sorted(weights)},
        "weights": exact,
    }


@pytest.mark.parametrize("name", list(SETTINGS))
def test_three_steps_give_the_numbers_that_they_gave(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = train(Config.model_validate(THREE_STEPS | SETTINGS[name]), project=tmp_path)
    found = measure(run, tmp_path / "runs" / "agentrl.db")
    if os.environ.get("GOLDEN") == "write":
        stored = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
        stored |= {"arithmetic": fingerprint(), name: found}
        GOLDEN.write_text(json.dumps(stored, indent=0) + "\n")
    golden = json.loads(GOLDEN.read_text())
    if golden["arithmetic"] == fingerprint():
        assert found == golden[name]
        return
    first = [each for each in found["episodes"] if each["step"] == 1]
    for new, old in zip(first, golden[name]["episodes"], strict=False):
        assert (new["task"], new["ids"], new["reward"]) == (old["task"], old["ids"], old["reward"])
        assert new["logp"] == pytest.approx(old["logp"], abs=TOLERANCE)
        assert new["advantage"] == pytest.approx(old["advantage"], abs=TOLERANCE)


EXAMPLE = Path(__file__).parents[2] / "examples" / "loop.py"
# `deterministic` computes every row that there might be.
SMALL = {
    "prompts_per_step": 2,
    "group_size": 4,
    "concurrency": 8,
    "max_new_tokens": 24,
    "max_tokens": 256,
}


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
