"""Arithmetic with a calculator, by smolagents' ToolCallingAgent.

It sends earlier calls back as text of its own, so every turn is a branch of its episode; each is trained once.
"""

from __future__ import annotations

from typing import Any

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool

from agentrl_cli.tools.calculator import calculator as compute

TURNS = 4


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly, e.g. (12 + 3) * 4.5 ** 2.

    Args:
        expression: Numbers, + - * / // % **, parentheses, abs round min max sqrt floor ceil gcd lcm factorial.
    """
    return compute(expression).text


def solve(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Run the agent; 1.0 if its final answer is right. Its own system prompt is replaced by the pack's short one."""
    system, question = (message["content"] for message in task.prompt)
    served = OpenAIServerModel(model_id=model, api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(
        tools=[calculator], model=served, max_steps=TURNS - 1, verbosity_level=LogLevel.OFF
    )
    agent.prompt_templates["system_prompt"] = f"{system} Give the result to final_answer."
    return float(str(agent.run(question)).strip() == task.data["answer"])
