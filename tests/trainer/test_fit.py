"""`agentrl train --fit`, `--gpu-memory` and `--preset`: real shapes, planned for GPUs that are absent."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.config import load_config
from agentrl_cli.config.presets import preset_file, preset_names
from agentrl_cli.inference.memory import live_rows
from agentrl_cli.models.adapter import add_adapter
from agentrl_cli.trainer.memory_fit import changes, fit
from benchmarks.gpu_memory import GPUS, PAGE, cell, folders, settings
from tests.helpers.cli import Cli

GiB = 2**30
PARAMETERS = {
    "Qwen2-0.5B": 494_032_768, "Qwen3-0.6B": 596_049_920, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
    "Qwen3-4B": 4_022_468_096, "Qwen2.5-7B": 7_615_616_512, "Qwen3-8B": 8_190_735_360,
}  # fmt: skip
"""As their model cards have them."""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders(tmp_path_factory.mktemp("shapes"))


def test_the_preset_of_a_small_gpu_trains_what_it_promises(shapes: dict[str, Path]) -> None:
    """4,399,104 of 498,431,872: counted on the model with its adapter, built without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    assert preset_names() == ["qwen2-0.5b-4gb"]
    config, sources = load_config([preset_file("qwen2-0.5b-4gb")])
    assert (config.adapter.r, config.adapter.alpha, config.adapter.dropout) == (8, 16, 0.05)
    assert len(config.adapter.target_modules) == 7 and "qwen2-0.5b-4gb.yaml" in sources["adapter.r"]
    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(AutoConfig.from_pretrained(shapes["Qwen2-0.5B"]))
        adapted = add_adapter(model, config.adapter, Path())
    counts = [(p.numel(), p.requires_grad) for p in adapted.parameters()]
    assert (
        sum(n for n, trained in counts if trained) == 4_399_104
        and sum(n for n, _ in counts) == 498_431_872
    )
    changed, planned = fit(config, shapes["Qwen2-0.5B"], gpu_bytes=4.0 * GiB)
    assert not changes(config, changed) and planned.fits and planned.trainable == 4_399_104


def test_what_changes_a_training_least_is_changed_first(shapes: dict[str, Path]) -> None:
    start = settings(train={"checkpointing": "off"})
    folder, sizes = shapes["Qwen2.5-1.5B"], (80, 12, 6, 2.6)
    found = {size: fit(start, folder, gpu_bytes=size * GiB, quantised=True) for size in sizes}
    assert all(planned.fits and planned.peak <= size * GiB for size, (_, planned) in found.items())
    assert {planned.parameters for _, planned in found.values()} == {PARAMETERS["Qwen2.5-1.5B"]}
    large, middle, small, tiny = (config for config, _ in found.values())
    assert not changes(start, large)
    assert (
        middle.adapter.enabled
        and middle.model.quantization == "none"
        and middle.train.checkpointing == "off"
    )
    assert small.train.checkpointing == "auto" and small.model.quantization == "none"
    assert (
        tiny.model.quantization == "4bit"
        and live_rows(tiny) < 32
        and tiny.train.token_budget == 2048
    )
    for config in (middle, small, tiny):
        assert (
            config.rollout.max_tokens == 2048
            and config.rollout.group_size == 8
            and changes(start, config)
        )
    refused, planned = fit(start, shapes["Qwen3-8B"], gpu_bytes=4.0 * GiB)
    assert not planned.fits and refused.model.quantization == "none", "bitsandbytes is not there"


def test_the_table_is_what_the_planner_computes(shapes: dict[str, Path]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in ("Qwen2-0.5B", "Qwen3-0.6B"):
        assert f"| {name} | {' | '.join(cell(shapes[name], size) for size in GPUS)} |" in page
    for name, count in PARAMETERS.items():
        assert f"| {name} | {count:,} |" in page


def test_planning_from_the_command_line(shapes: dict[str, Path], cli: Cli) -> None:
    cli("init", "calc-task", "p")
    cli.folder = cli.folder / "p"
    small = ("train", "--preset", "qwen2-0.5b-4gb", "--model", str(shapes["Qwen2-0.5B"]))
    plan = (*small, "--dry-run", "--gpu-memory")
    cli(*plan, "4GiB", said="494,032,768 parameters, 4,399,104 trained, on cuda")
    cli(*plan, "1800MiB", code=3, said="To make it fit: --fit")
    report = cli.json(*plan, "1800MiB", "--fit")
    assert report["fits"] and f"none → {report['config']['model']['quantization']}" in cli.err
    for wrong, said in (
        (["--preset", "qwen2-0.5b"], "Did you mean qwen2-0.5b-4gb?"),
        (["--gpu-memory", "4GiB"], "Add --dry-run"),
        (["--dry-run", "--gpu-memory", "much"], "--gpu-memory: 'much'"),
        (["--fit", "--resume", "last"], "Leave out --fit"),
    ):
        cli("train", *wrong, code=2, said=said)
