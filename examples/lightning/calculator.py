"""A LitAgent with a calculator, trained by `VERL(config)`: the arithmetic of calc-task, asked with the openai client.

    python examples/lightning/calculator.py [--model tiny] [--steps 80]

The bundled model learns to call the calculator; `benchmarks/agents_learning.py` measures it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from openai import OpenAI

import agentrl_cli.plugins.lightning as agl
from agentrl_cli.tools.calculator import calculator

DATA = Path(__file__).resolve().parents[2] / "tasks" / "calc-task" / "data"
ABOUT = (
    "Numbers, + - * / // % **, parentheses, abs round min max sqrt floor ceil gcd lcm factorial."
)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression exactly, e.g. (12 + 3) * 4.5 ** 2.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": ABOUT}},
            "required": ["expression"],
        },
    },
}


class CalculatorAgent(agl.LitAgent[dict[str, Any]]):
    def rollout(
        self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float:
        llm: Any = resources["main_llm"]
        messages: list[Any] = [
            {"role": "system", "content": "Solve the arithmetic task. Use the calculator."},
            {"role": "user", "content": task["prompt"]},
        ]
        with OpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            for _ in range(4):
                said = client.chat.completions.create(
                    model=llm.model, messages=messages, tools=[TOOL]
                )
                message = said.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return float((message.content or "").strip() == f"Answer: {task['answer']}")
                for call in message.tool_calls:
                    try:
                        text = calculator(**json.loads(call.function.arguments)).text
                    except (TypeError, ValueError) as error:
                        text = f"Error: {error}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return 0.0


def verl_config(model: str, steps: int) -> dict[str, Any]:
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 8, "max_prompt_length": 320, "max_response_length": 64},
        "actor_rollout_ref": {
            "rollout": {"n": 8, "multi_turn": {"format": "hermes"}},
            "actor": {"optim": {"lr": 3e-4}, "use_kl_loss": False},
            "model": {"path": model},
        },
        "trainer": {"experiment_name": "calculator", "total_training_steps": steps, "test_freq": 0},
    }


def main(model: str = "tiny", steps: int = 80, project: str = ".") -> agl.Trainer:
    rows = [
        json.loads(line) for line in (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    trainer = agl.Trainer(
        algorithm=agl.VERL(verl_config(model, steps)), n_runners=64, project=project
    )
    trainer.fit(CalculatorAgent(), rows)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=80)
    agl.setup_logging("INFO")
    main(**vars(parser.parse_args()))
