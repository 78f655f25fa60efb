"""minimind-task: calculations as minimind's agent training has them, with its table of tools and its lists of answers.

A row is a conversation whose system message carries the schemas of its tools, as text, and `gt`, the numbers that the
last turn must have, one for each call that is needed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from agentrl_cli.tools.calculator import compute, show

Row = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate_math",
            "description": "计算数学表达式",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "unit_converter",
            "description": "单位换算",
            "parameters": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "from_unit": {"type": "string"},
                    "to_unit": {"type": "string"},
                },
                "required": ["value", "from_unit", "to_unit"],
            },
        },
    },
]
UNITS = {"km_miles": 0.621371, "kg_pounds": 2.20462, "meters_feet": 3.28084}
SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "（": "(", "）": ")"})


def _calculate(args: dict[str, Any]) -> dict[str, str]:
    text = str(args.get("expression", "0")).replace("^", "**").translate(SIGNS)
    return {"result": show(compute(text))}


def _convert(args: dict[str, Any]) -> dict[str, float]:
    rate = UNITS[f"{args.get('from_unit', '').lower()}_{args.get('to_unit', '').lower()}"]
    return {"result": round(float(args.get("value", 0)) * rate, 4)}


MOCK_RESULTS = {"calculate_math": _calculate, "unit_converter": _convert}
"""minimind's table: a function of the arguments for each name."""

ASK = ("计算 {}。", "{} 等于多少？", "帮我算一下 {}。", "What is {}?", "Compute {}.")
BOTH = ("分别计算 {} 和 {}。", "What is {}, and what is {}?")
MEASURE = {
    "km_miles": ("{} 公里是多少英里？", "How many miles are {} km?"),
    "kg_pounds": ("{} 公斤是多少磅？", "How many pounds are {} kg?"),
    "meters_feet": ("{} 米是多少英尺？", "How many feet are {} meters?"),
}


def _expression(rng: random.Random) -> str:
    a, b, c = rng.randint(112, 9899), rng.randint(13, 989), rng.randint(12, 98)
    return rng.choice(
        (f"{a} * {b}", f"{a} + {b} * {c}", f"({a} - {b}) * {c}", f"{a * 7} - {b} * {c}")
    )


def generate(seed: int) -> Iterator[Row]:
    """Yields endless rows; deterministic in the seed. Of five, three need one calculation, one two, one a unit."""
    rng = random.Random(f"minimind-task {seed}")
    while True:
        kind = rng.choice(("one", "one", "one", "two", "unit"))
        if kind == "unit":
            name = rng.choice(sorted(MEASURE))
            source, target = name.split("_")
            value = rng.randint(3, 950)
            calls = [("unit_converter", {"value": value, "from_unit": source, "to_unit": target})]
            question = rng.choice(MEASURE[name]).format(value)
        else:
            sums = [_expression(rng) for _ in range(1 + (kind == "two"))]
            calls = [("calculate_math", {"expression": one}) for one in sums]
            question = rng.choice(BOTH if kind == "two" else ASK).format(*sums)
        yield {
            "conversations": [
                {"role": "system", "content": "", "tools": json.dumps(TOOLS, ensure_ascii=False)},
                {"role": "user", "content": question},
                {"role": "assistant", "content": ""},
            ],
            "gt": [str(MOCK_RESULTS[name](arguments)["result"]) for name, arguments in calls],
            "calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
        }


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: 20 to train on, 10 to validate and 20 to test."""
    found = {
        row["conversations"][1]["content"]: row
        for row, _ in zip(generate(1), range(60), strict=False)
    }
    rows = [*found.values()]
    splits = {"train": rows[:20], "validation": rows[40:50], "test": rows[20:40]}
    return {
        split: [{"id": f"{split}-{n:02d}"} | row for n, row in enumerate(part)]
        for split, part in splits.items()
    }


def solve(row: Row) -> list[dict[str, Any]]:
    """Return the messages of a full solution, the tools' answers included."""
    messages: list[dict[str, Any]] = []
    for call in row["calls"]:
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            }
        )
        result = json.dumps(MOCK_RESULTS[call["name"]](call["arguments"]), ensure_ascii=False)
        messages.append({"role": "tool", "name": call["name"], "content": result})
    return [*messages, {"role": "assistant", "content": "Answer: " + ", ".join(row["gt"])}]


def calls(episode: Any, ctx: Any) -> float:
    """1 if there are as many good calls as numbers are wanted, and no failed one: minimind's rule."""
    return float(not episode.tool_errors and episode.tool_calls == len(ctx.task.data["gt"]))


REWARDS = {"calls": calls}


if __name__ == "__main__":
    from pathlib import Path

    for split, rows in build().items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (Path(__file__).parent / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")
