"""Memory: an update beside what `train --dry-run` planned for it, and the log-probability part of a large vocabulary.

    python benchmarks/memory.py [--only update|head] [--out FILE]

`update`: peak resident memory of a process that makes two updates (the optimizer's state is there in the second), for
three shapes on a CPU, beside plan.py's sum for the update. `head`: forward and backward of the log-probabilities of
2,048 tokens over 151,936 words from hidden states of 64, ours beside the naive [T, V] log_softmax and, where it is
installed (benchmarks/peers.txt), TRL's fused head; what the process takes above its start. Each figure is a process of
its own, without a sampler, whose copy of the weights is left out of the plan. Writes benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES: dict[str, dict[str, Any]] = {
    # name: hidden, layers, vocabulary, episodes of so many tokens, adapter
    "20M full, 4 x 1024 tokens": {"hidden": 384, "layers": 8, "vocabulary": 8192, "tokens": 1024, "lora": False},
    "60M LoRA, 8 x 512 tokens": {"hidden": 640, "layers": 10, "vocabulary": 8192, "tokens": 512, "lora": True},
    "60M full, 2 x 2048 tokens": {"hidden": 640, "layers": 10, "vocabulary": 32000, "tokens": 2048, "lora": False},
}
HEAD = {"rows": 2048, "vocabulary": 151936, "hidden": 64}


def config_of(shape: dict[str, Any], folder: str) -> Any:
    from agentrl_cli.config import Config

    return Config.model_validate(
        {
            "model": {"name": folder, "device": "cpu", "dtype": "float32"},
            "adapter": {"enabled": shape["lora"], "r": 8, "alpha": 16},
            "rollout": {"group_size": 2, "prompts_per_step": 1, "max_tokens": shape["tokens"], "max_new_tokens": 64},
            "train": {"token_budget": 4096, "warmup_steps": 0},
        }
    )


def write_shape(shape: dict[str, Any], folder: str) -> None:
    """A model's configuration, without weights: what the plan reads."""
    from transformers import Qwen3Config

    make: Any = Qwen3Config
    config = make(
        hidden_size=shape["hidden"], intermediate_size=4 * shape["hidden"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["hidden"] // 64, num_key_value_heads=2, head_dim=64, vocab_size=shape["vocabulary"],
        tie_word_embeddings=True, max_position_embeddings=4096, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)


def update(shape: dict[str, Any], folder: str) -> dict[str, float]:
    """Two updates of 4,096 tokens in this process: its peak resident bytes."""
    import resource

    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from agentrl_cli.algos.update import Learner
    from agentrl_cli.policies.local_load import add_adapter
    from agentrl_cli.types import Episode, Origin, RewardPart, Tokens

    config = config_of(shape, folder)
    load: Any = AutoModelForCausalLM
    model = load.from_config(AutoConfig.from_pretrained(folder)).float()
    if shape["lora"]:
        model = add_adapter(model, config.adapter, Path())
    rng = np.random.default_rng(0)
    episodes = []
    for n in range(4096 // shape["tokens"]):
        ids = rng.integers(10, shape["vocabulary"], shape["tokens"] + 1).astype(np.int32)
        origin = np.where(np.arange(len(ids)) < 64, Origin.USER, Origin.MODEL)
        tokens = Tokens.given(ids, origin.astype(np.int8))
        part = (RewardPart("r", float(n % 2), primary=True),)
        episodes.append(Episode(str(n), "t", group_id="g", tokens=tokens, reward_parts=part))
    learner = Learner(model, config)
    for step in range(2):
        learner.update([episodes], step)
    assert torch.is_grad_enabled()
    return {"measured": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}


def head(name: str) -> dict[str, float]:
    """Peak bytes above the start of one forward and backward of the log-probabilities."""
    import resource

    import torch

    from agentrl_cli.policies.forward_head import head_logprobs

    torch.manual_seed(0)
    linear = torch.nn.Linear(HEAD["hidden"], HEAD["vocabulary"], bias=False).requires_grad_(False)
    hidden = torch.randn(HEAD["rows"], HEAD["hidden"], requires_grad=True)
    targets = torch.randint(HEAD["vocabulary"], (HEAD["rows"],))
    if name == "trl":
        utils = importlib.import_module("trl.trainer.utils")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == "trl":  # as its GRPOTrainer calls it, with the entropy
        given = (1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy"))
        logp = utils._ChunkedLogProbFunction.apply(hidden, linear.weight, None, targets, *given)[0]
    elif name == "naive":
        logp = torch.log_softmax(linear(hidden), -1).gather(-1, targets[:, None])[:, 0]
    else:
        logp, _ = head_logprobs(linear, hidden, targets)
    logp.mean().backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"bytes": (peak - before) * 1024.0, "logp": float(logp.detach().mean())}


def child(*arguments: str) -> dict[str, float]:
    """This file in a process of its own."""
    run = subprocess.run([sys.executable, __file__, "--child", *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def measure_updates() -> list[dict[str, Any]]:
    """Every shape: planned, measured, and how far apart."""
    from agentrl_cli.plan import plan

    rows = []
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_shape(shape, folder)
            planned = plan(config_of(shape, folder), Path(folder))
            measured = child("update", name, folder)["measured"]
        total = sum(planned.update.values()) - planned.update.get("sampling weights", 0.0)
        rows.append({"shape": name, "planned": total, "measured": measured, "error": total / measured - 1,
                     "parts": dict(planned.update)})  # fmt: skip
        print(f"{name}: planned {total / 2**20:.0f} MiB, measured {measured / 2**20:.0f} ({total / measured - 1:+.1%})")
    return rows


def measure_head() -> dict[str, Any]:
    """Ours beside the naive way."""
    ours, naive = child("head", "ours", ""), child("head", "naive", "")
    theirs = child("head", "trl", "") if find_spec("trl") else None
    assert all(abs(one["logp"] - naive["logp"]) < 1e-3 for one in (ours, theirs) if one is not None)
    print(f"head: ours {ours['bytes'] / 2**20:.0f} MiB, naive {naive['bytes'] / 2**20:.0f} MiB:"
          f" 1/{naive['bytes'] / ours['bytes']:.1f}")  # fmt: skip
    found = {**HEAD, "ours": ours["bytes"], "naive": naive["bytes"], "ratio": naive["bytes"] / ours["bytes"]}
    if theirs is None:
        return found
    print(f"TRL's fused head: {theirs['bytes'] / 2**20:.0f} MiB")
    return {**found, "trl": theirs["bytes"], "trl_version": version("trl")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["update", "head"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "memory.json")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "NAME", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        what, name, folder = given.child
        print(json.dumps(update(SHAPES[name], folder) if what == "update" else head(name)))
        return
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {}
    if given.only != "head":
        result["update"] = measure_updates()
    if given.only != "update":
        result["head"] = measure_head()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
