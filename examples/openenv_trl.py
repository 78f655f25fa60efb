"""TRL's GRPOTrainer on a pack of ours: `agentrl tools serve --openenv` serves calc-task, TRL's own client plays it.

    agentrl tools serve --openenv --pack calc-task --no-auth
    python examples/openenv_trl.py http://127.0.0.1:7676 --model Qwen/Qwen3-0.6B --steps 100

Needs `pip install 'trl>=1.16,<1.17' 'openenv>=0.10,<0.11'`; the server may run in another environment. A pack's tools
are methods here, as TRL wants them; the model's last answer is the tool `answer`, whose reward is the pack's own.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from openenv.core import GenericEnvClient
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


class Calculation:
    """An episode of the pack in a session of its own."""

    url = ""

    def __init__(self) -> None:
        self._client: Any = None
        self._reward: float | None = None

    def reset(self, seed: int, **row: Any) -> str:
        """Return the task at a seed."""
        if self._client is None:
            self._client = GenericEnvClient(base_url=self.url).sync()
            self._client.connect()
        self._reward = None
        return str(self._client.reset(seed=seed).observation["result"])

    def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression exactly.

        Args:
            expression: Numbers, + - * / // % **, parentheses.

        Returns:
            The value.
        """
        return self._step("calculator", expression=expression)

    def _step(self, tool: str, **arguments: Any) -> str:
        if self._reward is not None:
            raise ValueError("It is over.")
        action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        found = self._client.step(action)
        if found.done:
            self._reward = found.reward  # None: it could not be graded
        return str(found.observation["result"])

    def _finish(self, text: str) -> float | None:
        if self._reward is None:
            self._step("answer", text=text)
        return self._reward


def pack_reward(environments: list[Calculation], completions: list[Any], **_: Any) -> list[Any]:
    """Return the pack's rewards: the last message of each completion is the answer."""
    last = [said[-1].get("content") or "" for said in completions]
    return [one._finish(text) for one, text in zip(environments, last, strict=True)]


def main() -> None:
    """Train, and print each step's reward."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("url")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="openenv-trl")
    parser.add_argument("--rows", type=int, default=64)
    given = parser.parse_args()
    Calculation.url = given.url
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokenizer.response_template = qwen3_template  # of calls as <tool_call>{"name", "arguments"}
    rows = [
        {"prompt": [{"role": "user", "content": ""}], "seed": seed} for seed in range(given.rows)
    ]
    trainer = GRPOTrainer(
        model=given.model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=pack_reward,
        environment_factory=Calculation,
        args=GRPOConfig(
            output_dir=given.out,
            max_steps=given.steps,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=256,
            max_tool_calling_iterations=4,
            learning_rate=1e-4,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    trainer.train()
    for line in trainer.state.log_history:
        if "reward" in line:
            print(f"step {line['step']}: reward {line['reward']:.3f} loss {line['loss']:.4f}")
    trainer.save_model(given.out)


if __name__ == "__main__":
    main()
