"""Arithmetic with a calculator, by an agent of the OpenAI Agents SDK, which speaks OpenAI's responses."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from agents import set_tracing_disabled as without_tracing
from openai import AsyncOpenAI

from agentrl_cli.tools.calculator import calculator as compute

TURNS = 4
without_tracing(True)  # its traces would go to OpenAI


@function_tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly, e.g. (12 + 3) * 4.5 ** 2."""
    return compute(expression).text


async def solve(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Run the agent; 1.0 if its final output is the answer."""
    system, question = (message["content"] for message in task.prompt)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        served = OpenAIResponsesModel(model=model, openai_client=client)
        agent = Agent(name="Calculator", instructions=system, model=served, tools=[calculator])
        try:
            result = await Runner.run(agent, question, max_turns=TURNS)
        except (MaxTurnsExceeded, ModelBehaviorError):  # the model's doing: no answer
            return 0.0
    return float(str(result.final_output).strip() == f"Answer: {task.data['answer']}")
