"""Arithmetic with a calculator, by an agent of pydantic-ai."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agentrl_cli.tools.calculator import calculator as compute

TURNS = 4


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly, e.g. (12 + 3) * 4.5 ** 2."""
    return compute(expression).text


async def solve(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Run the agent; 1.0 if its output is the answer."""
    system, question = (message["content"] for message in task.prompt)
    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(served, system_prompt=system, tools=[calculator], retries=TURNS)
    try:
        result = await agent.run(question, usage_limits=UsageLimits(request_limit=TURNS))
    except (UsageLimitExceeded, UnexpectedModelBehavior):  # the model's doing: no answer
        return 0.0
    return float(result.output.strip() == f"Answer: {task.data['answer']}")
