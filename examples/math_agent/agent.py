"""Arithmetic with a calculator, by an agent that knows its model as any other: an address for the openai client."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

from agentrl_cli.tools.calculator import calculator

ABOUT = (
    "Numbers, + - * / // % **, parentheses, abs round min max sqrt floor ceil gcd lcm factorial."
)
TOOL = {
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
TURNS = 4


def solve(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Ask until there is an answer; 1.0 if it is right."""
    messages: list[Any] = list(task.prompt)
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(TURNS):
            said = (
                client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
                .choices[0]
                .message
            )
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return float((said.content or "").strip() == f"Answer: {task.data['answer']}")
            for call in said.tool_calls:
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": run(call.function.arguments),
                    }
                )
    return 0.0


def run(arguments: str) -> str:
    """What the model reads after a call; it may have written anything."""
    try:
        return calculator(**json.loads(arguments)).text
    except (TypeError, ValueError, AttributeError) as error:
        return f"Error: {error}"
