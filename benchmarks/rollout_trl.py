"""TRL's generation phase over scripted three-turn tool episodes; benchmarks/rollout_tools.py starts it.

    /venv/with/trl/bin/python benchmarks/rollout_trl.py WORK.json        needs trl==1.16.*, torch, transformers

WORK.json has the model's configuration, the tokenizer's folder, prompts, and the tokens of every turn of every episode:
a model with random weights never calls a tool, so the script replaces its replies; the forwards are real.
Prints one JSON line: CPU and wall seconds of `GRPOTrainer._generate` (tools included, scoring and update not).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer  # a separate environment
from trl.chat_template_utils import qwen3_template


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class Script(LogitsProcessor):
    """Makes every sequence's next token the script's, by a logit far above the others."""

    def __init__(self, turns: list[list[int]], start: int, end: int, likely: float) -> None:
        width = max(map(len, turns)) + 1
        self.ids = torch.tensor([turn + [end] * (width - len(turn)) for turn in turns])
        self.start, self.likely = start, likely

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = min(input_ids.shape[1] - self.start, self.ids.shape[1] - 1)
        return scores.scatter_(1, self.ids[:, place : place + 1], self.likely)


def main() -> None:
    torch.set_num_threads(1)
    work: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(work["tokenizer"])
    tokenizer.response_template = qwen3_template
    torch.manual_seed(0)
    make: Any = Qwen2ForCausalLM
    model: Any = make(Qwen2Config(**work["model"])).eval()
    turn = [0]
    plain = model.generate

    def generate(**options: Any) -> Any:
        turns = [episode[turn[0] % 3] for episode in work["turns"]]
        turn[0] += 1
        start = options["input_ids"].shape[1]
        forced = LogitsProcessorList([Script(turns, start, tokenizer.eos_token_id, work["likely"])])
        return plain(**options, logits_processor=forced)

    model.generate = generate
    rows = [{"prompt": [{"role": "system", "content": work["system"]}, {"role": "user", "content": text}]}
            for text in work["prompts"]]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=len(rows),
            num_generations=8,
            max_completion_length=work["most"],
            max_tool_calling_iterations=2,
            temperature=1.0,
            report_to=[],
        )
        trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=options,
            train_dataset=Dataset.from_list(rows[::8]),
            processing_class=tokenizer,
            tools=[add],
        )
        trainer.model.train()
        seconds: list[dict[str, Any]] = []
        inner = trainer._generate

        def timed(*given: Any, **more: Any) -> Any:
            cpu, wall = time.process_time(), time.perf_counter()
            out = inner(*given, **more)
            seconds.append({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall})
            return out

        trainer._generate = timed
        for _ in range(work["rounds"]):
            turn[0] = 0
            out = trainer._generate_and_score_completions(
                [json.loads(json.dumps(row)) for row in rows]
            )
            seconds[-1]["generate_calls"] = turn[0]
            seconds[-1]["completion_tokens"] = int(out["completion_mask"].sum())
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
