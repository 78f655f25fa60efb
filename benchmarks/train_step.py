"""Forward, backward and optimizer of a GRPO step: AgentRL and TRL, with the same model, episodes, threads and dtype.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install -r benchmarks/peers.txt
    /tmp/peers/bin/python benchmarks/train_step.py [--model 3M|60M] [--case single|tools] [--rows 64] [--rounds 2]
                                                   [--full]

A real GRPOTrainer is trained; its `_generate_and_score_completions` returns finished episodes (with `tool_mask` for
tools), so its own step is timed: micro-batches, padding, loss, backward, clipping, optimizer. Its four settings are
gradient checkpointing on and off, and micro-batches of 8 and of all episodes; all four are printed and kept. After each
of its steps, AgentRL's runs on the same episodes (interleaved), with its defaults. CPU seconds of the process; the
best of all rounds counts. Both cases have 64 episodes; --rows 16 takes two groups, for a busy machine.

`single`: groups of 8, prompts of 64 tokens, 16 to 128 sampled. `tools`: prompts of 200, three turns of 16 to 96 sampled
tokens, two tool results of 64. LoRA r=8 on all linear layers unless --full. Results go into benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.config import Config  # noqa: E402
from agentrl_cli.learning.estimator_inputs import AdvantageInput  # noqa: E402  # works without an installation
from agentrl_cli.learning.update import Learner  # noqa: E402
from agentrl_cli.types import Episode, Origin, RewardPart, Tokens  # noqa: E402

GROUP = 8
SHAPES: dict[str, dict[str, int]] = {
    "3M": {
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
    }
    | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048},
    "60M": {
        "hidden_size": 640,
        "intermediate_size": 2304,
        "num_hidden_layers": 10,
        "num_attention_heads": 10,
    }
    | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192},
}
LR = 1e-4


def make_model(name: str, lora: bool) -> Any:
    """A Qwen3 with random weights, float32; with `lora` under a fresh adapter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    given: dict[str, Any] = {
        **SHAPES[name],
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }
    make: Any = Qwen3ForCausalLM
    model: Any = make(
        Qwen3Config(**given, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    ).float()
    if lora:
        from peft import LoraConfig, get_peft_model

        peft = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, peft)
    return model


def make_episodes(case: str, rows: int, vocabulary: int) -> list[Episode]:
    """Groups of 8 with one prompt each, ragged, with rewards of 0 and 1."""
    rng = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        return [int(n) for n in rng.integers(10, vocabulary, count)]

    episodes = []
    for group in range(rows // GROUP):
        prompt = some(200 if case == "tools" else 64)
        for sample in range(GROUP):
            ids, origin = list(prompt), [Origin.USER] * len(prompt)
            for turn in range(3 if case == "tools" else 1):
                said = some(int(rng.integers(16, 97 if case == "tools" else 129)))
                ids, origin = ids + said, origin + [Origin.MODEL] * len(said)
                if case == "tools" and turn < 2:
                    answer = some(64)
                    ids, origin = ids + answer, origin + [Origin.TOOL] * len(answer)
            part = RewardPart("r", float(rng.integers(0, 2)) + 0.01 * sample, primary=True)
            tokens = Tokens.from_ids(ids, [int(o) for o in origin])
            tokens.logp_policy[tokens.trained_mask] = -7.6
            episodes.append(
                Episode(f"{group}-{sample}", f"t{group}", group_id=str(group), sample=sample, tokens=tokens,
                        reward_parts=(part,))
            )  # fmt: skip
    return episodes


# --- ours ------------------------------------------------------------------------------------------------------------


class Ours:
    """A learner with AgentRL's defaults, stepping on the episodes."""

    def __init__(self, model: Any, episodes: list[Episode]) -> None:
        settings = {
            "rollout": {"max_tokens": 1024},
            "train": {"lr": LR, "schedule": {"warmup_steps": 0}},
        }
        self.learner = Learner(model, Config.model_validate(settings))
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(str(episode.group_id), []).append(episode)
        self.groups = list(groups.values())
        self.steps = 0

    def step(self) -> float:
        """CPU seconds of one update."""
        started = time.process_time()
        self.learner.update(self.groups, self.steps)
        self.steps += 1
        return time.process_time() - started


# --- TRL -------------------------------------------------------------------------------------------------------------


def trl_batch(episodes: list[Episode]) -> dict[str, Any]:
    """The input of TRL's loss: prompts padded left, completions right, advantages, the tool mask."""
    prompts, completions, masks = [], [], []
    for episode in episodes:
        first = int(episode.tokens.trained_mask.argmax())
        prompts.append(episode.tokens.ids[:first])
        completions.append(episode.tokens.ids[first:])
        masks.append(episode.tokens.trained_mask[first:].astype(np.int64))

    def padded(arrays: list[Any], left: bool = False, ones: bool = False) -> torch.Tensor:
        width = max(map(len, arrays))
        out = (
            torch.ones((len(arrays), width), dtype=torch.long)
            if ones
            else torch.zeros((len(arrays), width)).long()
        )
        for row, array in enumerate(arrays):
            place = slice(width - len(array), width) if left else slice(0, len(array))
            out[row, place] = torch.from_numpy(np.asarray(array, np.int64))
        return out

    x = AdvantageInput.of(episodes)
    centred = x.rewards - np.repeat(x.rewards.reshape(-1, GROUP).mean(1), GROUP)
    spread = np.repeat(x.rewards.reshape(-1, GROUP).std(1, ddof=1), GROUP)
    return {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([np.ones(len(p)) for p in prompts], left=True),
        "completion_ids": padded(completions),
        "completion_mask": padded([np.ones(len(c)) for c in completions]),
        "tool_mask": padded(masks, ones=True),
        "advantages": torch.from_numpy(centred / (spread + 1e-4)).float(),
        "num_items_in_batch": torch.tensor(float(sum(mask.sum() for mask in masks))),
    }


def trl_trainer(
    model: Any, episodes: list[Episode], micro: int, checkpointing: bool, ours: Ours, rounds: int
) -> Any:
    """(trainer, timer): TRL's trainer with given episodes; the timer also runs AgentRL's step after each of its own."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    batch = trl_batch(episodes)

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return dict(batch)

    class Timer(TrainerCallback):
        def __init__(self) -> None:
            self.theirs: list[float] = []
            self.mine: list[float] = []

        def on_step_begin(self, *args: Any, **more: Any) -> None:
            self.started = time.process_time()

        def on_step_end(self, *args: Any, **more: Any) -> None:
            self.theirs.append(time.process_time() - self.started)
            self.mine.append(ours.step())

    timer = Timer()
    rows = len(episodes)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro,
        num_generations=GROUP, steps_per_generation=rows // micro, max_completion_length=1024, learning_rate=LR,
        max_steps=rounds + 1, beta=0.0, gradient_checkpointing=checkpointing, use_cpu=True, bf16=False,
        report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    load: Any = AutoTokenizer
    trainer = Given(
        model=model,
        reward_funcs=lambda **given: [0.0],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * rows}),
        processing_class=load.from_pretrained(ROOT / "agentrl_cli" / "models" / "tiny-agent"),
        callbacks=[timer],
    )
    return trainer, timer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(SHAPES), default="3M")
    parser.add_argument("--case", choices=["single", "tools"], default="single")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="after one that warms up")
    parser.add_argument("--full", action="store_true", help="all weights instead of LoRA r=8")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "train_step.json"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    episodes = make_episodes(given.case, given.rows, SHAPES[given.model]["vocab_size"])
    ours = Ours(make_model(given.model, not given.full), episodes)
    mine: list[float] = []
    theirs: dict[str, list[float]] = {}
    for micro in (8, given.rows):
        for checkpointing in (True, False):
            name = f"micro-batch {micro}, checkpointing {'on' if checkpointing else 'off'}"
            model = make_model(given.model, not given.full)
            trainer, timer = trl_trainer(model, episodes, micro, checkpointing, ours, given.rounds)
            trainer.train()
            theirs[name] = [round(t, 3) for t in timer.theirs[1:]]
            mine += [round(t, 3) for t in timer.mine[1:]]
            print(f"{name}: TRL {theirs[name]}  ours {timer.mine[1:]}", flush=True)
            del trainer, model
            gc.collect()
    best = min(theirs, key=lambda name: min(theirs[name]))
    trained = sum(e.trained_tokens for e in episodes)
    row = {
        "model": given.model, "case": given.case, "rows": given.rows, "adapter": "none" if given.full else "LoRA r=8",
        "trained_tokens": trained, "tokens": sum(len(e.tokens) for e in episodes), "ours": mine, "theirs": theirs,
        "best_of_trl": best, "ratio": round(min(theirs[best]) / min(mine), 2),
        "ratio_to_default": round(min(theirs["micro-batch 8, checkpointing on"]) / min(mine), 2),
        "clock": "process CPU seconds, 1 thread, float32", "machine": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl")},
    }  # fmt: skip
    print(
        f"| {given.model} {given.case}, {given.rows} episodes | TRL, CPU s by round | best | ours | ratio |"
    )
    print("| --- " * 5 + "|")
    for name, times in theirs.items():
        numbers = (min(times), min(mine), min(times) / min(mine))
        cells = [name, ", ".join(map(str, times)), *(f"{number:.2f}" for number in numbers)]
        print("| " + " | ".join(cells) + " |")
    kept = json.loads(given.out.read_text()) if given.out.is_file() else []
    same = ("model", "case", "rows", "adapter")
    kept = [old for old in kept if any(old[key] != row[key] for key in same)]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps([*kept, row], indent=1) + "\n")
    print(f"{given.model} {given.case}: ours {min(mine):.2f} s, best of TRL {min(theirs[best]):.2f} s ({best}):"
          f" {row['ratio']} times; its default: {row['ratio_to_default']} times")  # fmt: skip


if __name__ == "__main__":
    main()
