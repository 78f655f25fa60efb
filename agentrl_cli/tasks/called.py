"""Rows whose answers come from calling a tool, for packs made of functions; and writing rows as a pack's splits."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentrl_cli.errors import DataError
from agentrl_cli.tasks.drawing import Row, question
from agentrl_cli.tools import Tool, ToolContext, as_tool
from agentrl_cli.types import ToolResult

Ask = Callable[[random.Random], tuple[str, Any, dict[str, Any]]]
"""Draws a question: its text, the tool that answers it, and the arguments of the call."""

SPLIT = {"train": 200, "validation": 40, "test": 80}
"""Rows of each split; the shares if there are fewer."""
FAILURES = 50
"""Questions in a row that cannot be used before drawing ends."""
LONGEST = 200
"""Characters of an answer at most."""


def called_rows(asks: Sequence[Ask], seed: int) -> Iterator[Row]:
    """Endless rows without ids, `answer` being the tool's result; deterministic in the seed.

    A question whose call fails, or returns nothing or a long text, is dropped.
    Raises DataError with the last reason after FAILURES of them in a row.
    """
    rng = random.Random(seed)
    failures = 0
    while True:
        prompt, function, arguments = rng.choice(list(asks))(rng)
        tool = as_tool(function)
        result = _call(tool, arguments)
        answer = " ".join(result.text.split())
        unusable = result.error or not answer or len(answer) > LONGEST
        failures = failures + 1 if unusable else 0
        if not unusable:
            call = {"name": tool.name, "arguments": arguments, "result": result.text}
            yield {"family": tool.name, "prompt": prompt, "answer": answer, "call": call}
        elif failures >= FAILURES:
            why = result.text if result.error else f"an answer of {len(answer)} characters"
            raise DataError(
                f"{tool.name} does not answer the questions that are drawn for it: {why}",
                hint=f"Edit how its arguments are drawn. The last ones: {arguments}",
            )


def called_solution(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages of the solution of a row of `called_rows`: the call, its result, the answer."""
    function = {"name": row["call"]["name"], "arguments": row["call"]["arguments"]}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": function["name"], "content": row["call"]["result"]},
        {"role": "assistant", "content": f"Answer: {row['answer']}"},
    ]


def _call(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    """Return the result of one call, outside of an episode; in a thread, as the caller may be inside a running loop."""

    async def run() -> ToolResult:
        state = await tool.create(ToolContext())
        try:
            return await tool.call(state, arguments)
        finally:
            await tool.release(state)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, run()).result()


def split_rows(rows: Iterable[Row], sizes: Mapping[str, int] | None = None) -> dict[str, list[Row]]:
    """Rows as splits, each question once, with ids; by shares if there are fewer than `sizes` ask for.

    Reads endless rows too: it ends once new questions become rare.
    """
    sizes = sizes or SPLIT
    total = sum(sizes.values())
    found: dict[str, Row] = {}
    for number, row in enumerate(rows):
        found.setdefault(question(row["prompt"], row), row)
        if len(found) == total or number >= 10 * total:
            break
    return shares([[row] for row in found.values()], sizes)


def shares(
    groups: Sequence[Sequence[Row]], sizes: Mapping[str, int] | None = None
) -> dict[str, list[Row]]:
    """Rows as splits in the proportions of `sizes`, with ids; those of a group are in one split."""
    sizes, kept = sizes or SPLIT, list(groups)
    splits: dict[str, list[Row]] = {}
    for split in [
        *(name for name in sizes if name != "train"),
        "train",
    ]:  # what is left over is for training
        count = len(kept) if split == "train" else len(groups) * sizes[split] // sum(sizes.values())
        part, kept = kept[:count], kept[count:]
        if part:
            rows = (row for group in part for row in group)
            splits[split] = [{"id": f"{split}-{n:04d}", **row} for n, row in enumerate(rows)]
    return splits


def write_rows(folder: Path, rows: Iterable[Row], sizes: Mapping[str, int] | None = None) -> None:
    """Write rows as `data/<split>.jsonl` of a pack's folder."""
    (folder / "data").mkdir(exist_ok=True)
    for split, part in split_rows(rows, sizes).items():
        (folder / "data" / f"{split}.jsonl").write_text(as_jsonl(part), encoding="utf-8")


def as_jsonl(rows: Iterable[Row]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
