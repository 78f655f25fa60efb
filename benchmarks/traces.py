"""A planted set of an agent's traces: what `init --from traces:FILE` and a training make of them on held-out requests.

    python benchmarks/traces.py FOLDER [STEPS]

The agent looks things up with two tools; four of five traces are right and scored 1, the others are wrong and scored 0.
Printed is pass@1 of the test split, base against trained, with intervals.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

SYSTEM = "Use the tools where they help. End with a line `Answer: …`."
ASKS = {
    "price": ("How much is the {}?", "What does the {} cost?", "Tell me the price of the {}."),
    "stock": ("How many of the {} are left?", "What is the stock of the {}?"),
}
WORDS = "lamp chair table stand mirror carpet kettle basket candle pillow drawer ladder bucket clock vase".split()
COLOURS = "red blue green black white brown grey pink".split()


def traces(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of messages with a score, as a service might have kept them."""
    dice = random.Random(seed)
    found = []
    for item in dice.sample([f"{one} {two}" for one in COLOURS for two in WORDS], count):
        tool = dice.choice([*ASKS])
        value, right = dice.randrange(10, 900), dice.random() < 0.8
        call = {"id": "c1", "function": {"name": tool, "arguments": json.dumps({"item": item})}}
        said = value if right else value + 1
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": dice.choice(ASKS[tool]).format(item)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": str(value)},
            {"role": "assistant", "content": f"Answer: {said}"},
        ]
        found.append({"messages": messages, "tools": TOOLS, "score": int(right)})
    return found


def _tool(name: str, about: str) -> dict[str, Any]:
    item = {"type": "string", "description": "The item."}
    parameters = {"type": "object", "properties": {"item": item}, "required": ["item"]}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


TOOLS = [_tool("price", "The price of an item."), _tool("stock", "How many of an item are left.")]


def agentrl(folder: Path, *words: str) -> str:
    """Run a command in the folder and return its output."""
    line = [sys.executable, "-m", "agentrl_cli", *words]
    return subprocess.run(line, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(folder: Path, steps: str = "12") -> None:
    """Make the set and the project, train, and print both evaluations."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = traces(110)
    (folder / "traces.jsonl").write_text("\n".join(map(json.dumps, rows)))
    agentrl(folder, "init", "shop", "--from", "traces:traces.jsonl")
    project = folder / "shop"
    agentrl(project, "sft", "warm", "--steps", "12")
    agentrl(project, "train", "--model", "warm", "--steps", steps, "--set", "train.eval=12")
    print(agentrl(project, "eval", "shop-grpo@best", "-k", "2", "--json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
