"""On a real GPU: `pytest -m gpu`, or `python benchmarks/gpu.py`, which also measures. Skipped without one."""

from pathlib import Path

import pytest
import torch

from agentrl_cli.policies.device_check import try_device
from agentrl_cli.store import Store
from tests.helpers.train import spawn, write_model, write_project

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


def test_every_engine_and_way_has_the_numbers_of_transformers() -> None:
    verdict = try_device("cuda", 4.0)
    assert not [part for part in verdict.parts.values() if part.problem]


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"checkpointing": "on"}},
        {"adapter": {"enabled": True, "r": 2}, "rollout": {"cuda_graphs": "auto"}},
        {"adapter": {"enabled": True, "r": 2}, "model": {"quantization": "4bit"}},
    ],
    ids=["full", "lora-graphs", "qlora"],
)
def test_a_run_is_trained_resumed_and_evaluated(
    tmp_path: Path, sections: dict[str, dict[str, object]]
) -> None:
    if "model" in sections:
        pytest.importorskip("bitsandbytes")
    folder = write_model(tmp_path / "model", hidden=64, head_dim=32)
    sections = {**sections, "train": {**sections.get("train", {}), "steps": 2, "save_every": 1}}
    quantised = sections.pop("model", {}).get("quantization", "none")
    project = write_project(tmp_path / "project", folder, **sections)
    there = [
        "--set",
        "model.device=cuda",
        "--set",
        "model.dtype=auto",
        "--set",
        f"model.quantization={quantised}",
    ]
    for words in (
        ["train", *there],
        ["train", "--resume", "last", "--steps", "3"],
        ["eval", "--samples", "1", *there],
    ):
        code, text = spawn(project, *words)
        assert code == 0, text
    with Store.open(project / "runs/agentrl.db", readonly=True) as store:
        assert [run.step for run in store.runs.all() if run.kind == "train"] == [3]
