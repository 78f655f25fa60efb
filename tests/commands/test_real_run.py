"""docs/real-run.md: its commands in order, on a tiny random model of Qwen2.5's architecture."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import main
from agentrl_cli.paths import bundled_model
from agentrl_cli.store import Store

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "real-run.md").read_text(
    encoding="utf-8"
)
BRIEF = ["--set", "rollout.max_new_tokens=16"]  # random weights never stop a turn
# The same commands with less to do.
SHORTER = {
    "train": [
        "--set",
        "rollout.prompts_per_step=2",
        "--set",
        "rollout.group_size=2",
        "--set",
        "train.eval.every=0",
        "--set",
        "algo.skip.zero_variance=false",  # random weights earn nothing
        *BRIEF,
    ],
    "eval": ["--set", "eval.limit=2", "--set", "eval.k=1", *BRIEF],
    "rollout": ["-n", "2", "--set", "rollout.group_size=2", *BRIEF],
}
STEPS = {"--steps 101": "--steps 2"}


def tiny_qwen(folder: Path) -> None:
    """Random weights, and the bundled tokenizer and template."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shutil.copytree(
        bundled_model(), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    make: Any = Qwen2Config
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(
        make(
            **sizes,
            num_key_value_heads=2,
            vocab_size=768,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
        )
    )
    model.save_pretrained(folder)


def test_the_page_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        line
        for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
    ]
    settings = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert settings is not None and len(lines) == 14
    said = {}
    for line in lines:
        words = shlex.split(line)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            tiny_qwen(
                Path("Qwen/Qwen2.5-0.5B-Instruct")
            )  # a folder has precedence over the hub's name
            Path("qwen.yaml").write_text(
                settings[1].replace("steps: 100", "steps: 1"), encoding="utf-8"
            )
            continue
        for long, short in STEPS.items():
            words = shlex.split(line.replace(long, short))
        brief = [] if "--dry-run" in words else SHORTER.get(words[1], [])
        code = main([*words[1:], *brief])
        said[line] = "".join(capfd.readouterr())
        assert code in ((0, 3) if words[1] == "doctor" else (0,)), (
            line,
            said[line],
        )  # a machine may lack a sandbox
    planned = said["agentrl train --config qwen.yaml --dry-run --fit --gpu-memory 8GiB"]
    assert "nothing has to change" in planned and "available  8,192 MiB" in planned
    with Store.open(Path("runs/agentrl.db"), readonly=True) as store:
        trained = next(run for run in store.runs.all() if run.kind == "train")
        assert (trained.status, trained.step) == ("finished", 2)
        table = PAGE.partition("| curve")[2].partition("\n\n")[0]
        curves = re.findall(
            r"`([a-z_/]+)`", "".join(re.findall(r"^\| (`[^|]*) \| ", table, re.MULTILINE))
        )
        assert len(curves) == 6 and set(curves) <= set(store.runs.steps(trained.id)[-1])
    assert Path("trained/config.json").is_file()
