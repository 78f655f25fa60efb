"""Which models train on which GPUs: `python benchmarks/gpu_memory.py` writes the two tables of docs/gpu.md.

Computed by the memory plan from the real configurations in benchmarks/shapes.json; nothing is loaded or measured.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config
from agentrl_cli.inference.memory import live_rows
from agentrl_cli.trainer.memory_fit import fit
from agentrl_cli.trainer.memory_plan import Plan, plan

ROOT = Path(__file__).resolve().parent.parent
SHAPES, PAGE = ROOT / "benchmarks/shapes.json", ROOT / "docs/gpu.md"
GPUS = (4, 8, 12, 16, 24, 48, 80)
GiB = 2**30
PUBLISHED = {
    "Qwen3-0.6B": ("0.92 (GRPO)", "1.81 (GRPO); 2.07 with 8 answers"),
    "Qwen2-0.5B": ("", "4 GB GPU (the case of the preset)"),
    "Qwen2.5-3B": ("3.5 GB", "8 GB"),
    "Qwen2.5-7B": ("5 GB", "19 GB"),
    "Qwen3-8B": ("6 GB", "22 GB"),
}
"""GPU memory that Unsloth publishes as its minimum, QLoRA in 4 bits and LoRA in 16; fine-tuning unless named."""


def settings(**more: Any) -> Config:
    """32 episodes of up to 2,048 tokens in groups of 8; r=8."""
    base: dict[str, Any] = {
        "adapter": {"r": 8, "alpha": 16},
        "rollout": {
            "group_size": 8,
            "prompts_per_step": 4,
            "max_tokens": 2048,
            "max_new_tokens": 512,
        },
        "train": {"token_budget": 4096},
    }
    return Config.model_validate(
        {name: {**base.get(name, {}), **more.get(name, {})} for name in {*base, *more}}
    )


def folders(target: Path) -> dict[str, Path]:
    """A folder with a config.json for each shape."""
    found = {}
    for name, shape in json.loads(SHAPES.read_text(encoding="utf-8")).items():
        found[name] = target / name
        found[name].mkdir()
        (found[name] / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return found


def cell(folder: Path, size: int) -> str:
    """What `--fit` chooses from full weights, episodes at once, and the planned peak in GiB."""
    config, planned = fit(settings(), folder, gpu_bytes=float(size * GiB), quantised=True)
    if not planned.fits:
        return "–"
    bits = {"none": "LoRA", "8bit": "8 bits", "4bit": "4 bits"}[config.model.quantization]
    kind = bits if config.adapter.enabled else "full"
    return f"{kind}, {live_rows(config)}, {planned.peak / GiB:.1f}"


def least(folder: Path, bits: str) -> Plan:
    """The plan of the smallest run: four episodes at once, one of 2,048 tokens in a micro-batch."""
    config = settings(
        adapter={"enabled": True},
        model={"quantization": bits},
        rollout={"concurrency": 4},
        train={"token_budget": 2048, "checkpointing": "on"},
    )
    return plan(config, folder, gpu_bytes=float(80 * GiB))


def tables() -> str:
    """Both tables."""
    with tempfile.TemporaryDirectory() as name:
        models = folders(Path(name))
        lines = [
            f"| model | {' | '.join(f'{size} GB' for size in GPUS)} |",
            "| --- " * (len(GPUS) + 1) + "|",
        ]
        for model, folder in models.items():
            lines.append(f"| {model} | {' | '.join(cell(folder, size) for size in GPUS)} |")
        lines += [
            "",
            "| model | parameters | LoRA trains | 4 bits | published | 16 bits | published |",
        ]
        lines.append("| --- " * 7 + "|")
        for model, folder in models.items():
            few, many = least(folder, "4bit"), least(folder, "none")
            theirs = PUBLISHED.get(model, ("", ""))
            lines.append(
                f"| {model} | {many.parameters:,} | {many.trainable:,} | {few.peak / GiB:.2f} | {theirs[0]} |"
                f" {many.peak / GiB:.2f} | {theirs[1]} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Put the tables into the page."""
    head, start, rest = PAGE.read_text(encoding="utf-8").partition("<!-- memory:start -->\n")
    _, end, tail = rest.partition("<!-- memory:end -->")
    PAGE.write_text(head + start + tables() + "\n" + end + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
