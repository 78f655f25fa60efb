"""After Agent-Lightning's calc_x, without its framework and tool: a function under `@rollout`, `VERL(config)`.

    python examples/lightning/calc_x.py [--model tiny] [--steps 20]

The model is asked for a sum; the reward is whether its answer has it.
"""

import argparse
import re
from typing import TypedDict

import httpx2  # any client of the address will do: openai, LangChain, an agent framework

import agentrl_cli.plugins.lightning as agl


class MathProblem(TypedDict):
    id: str
    question: str
    result: str


def verl_config(model: str, steps: int) -> dict:
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 4, "max_prompt_length": 192, "max_response_length": 24},
        "actor_rollout_ref": {
            "rollout": {
                "n": 4,
                "name": "vllm",
                "multi_turn": {"format": "hermes"},
                "gpu_memory_utilization": 0.6,
            },
            "actor": {
                "ppo_mini_batch_size": 4,
                "optim": {"lr": 1e-3},
                "use_kl_loss": False,
                "entropy_coeff": 0,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.3,
            },
            "model": {"path": model, "use_remove_padding": True},
        },
        "trainer": {
            "logger": ["console"],
            "experiment_name": "calc_x",
            "total_training_steps": steps,
            "nnodes": 1,
        },
    }


@agl.rollout
async def calc_agent(task: MathProblem, llm: agl.LLM) -> None:
    async with httpx2.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"model": llm.model, "messages": [{"role": "user", "content": task["question"]}]}
        answer = await client.post(f"{llm.endpoint}/chat/completions", json=body)
    text = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
    digits = re.findall(r"\d", text)
    agl.emit_reward(
        {"right": float(task["result"] in text), "digits": len(digits) / max(1, len(text))},
        primary_key="right",
    )


def main(model: str = "tiny", steps: int = 20, project: str = ".") -> agl.Trainer:
    tasks = [
        MathProblem(id=str(n), question=f"{n} + {n + 1} =", result=str(2 * n + 1)) for n in range(8)
    ]
    trainer = agl.Trainer(
        algorithm=agl.VERL(verl_config(model, steps)), n_runners=16, project=project
    )
    trainer.fit(calc_agent, tasks)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    agl.setup_logging("INFO")
    main(**vars(parser.parse_args()))
