"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from pathlib import Path
from types import SimpleNamespace

from agentrl_cli import load_pack
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.rewards import RewardContext
from agentrl_cli.types import ToolResult

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    assert asyncio.run(check_pack(PACK, None)) == []


def test_only_the_rows_of_the_last_good_query_count() -> None:
    task = next(
        task
        for task in PACK.tasks("heldout")
        if task.family == "listing" and task.data["answer"].count("\n") > 1
    )
    header, *rows = task.data["answer"].splitlines()
    texts = {
        "\n".join(["other", *rows]): 1.0,
        "\n".join([header, *reversed(rows)]): 0.0,
        header: 0.0,
    }
    for text, expected in texts.items():
        results = [ToolResult("x\n1"), ToolResult(text), ToolResult("Error: no", error="exception")]
        episode = SimpleNamespace(turns=[SimpleNamespace(results=results)])
        assert PACK.module.result(episode, RewardContext(task, "")).value == expected


def test_no_wording_of_the_test_split_stands_in_training() -> None:
    def wordings(split: str) -> set[str]:
        return {
            _masked(task.prompt[-1]["content"], task.data["query"]) for task in PACK.tasks(split)
        }

    assert not wordings("train") & wordings("test") and len(wordings("train")) > 20
    schemas = {task.prompt[-1]["content"].splitlines()[0] for task in PACK.tasks("test")}
    assert len(schemas) > 50, "tables and columns differ from task to task"


def _masked(prompt: str, query: str) -> str:
    """A question without what differs from one database to the next: the words of its query, and numbers."""
    words = set(re.findall(r"[a-z]+", query)) - {
        "select",
        "from",
        "where",
        "order",
        "by",
        "limit",
        "name",
        "desc",
    }
    question = re.sub(r"\d+", "N", prompt.splitlines()[1])
    return " ".join("_" if word.strip(".,:?") in words else word for word in question.split())


def test_a_demonstration_may_be_wrong() -> None:
    ways = set()
    for task in PACK.tasks("train")[:40]:
        row = dict(task.data) | {"prompt": task.prompt[-1]["content"]}
        assert PACK.module.demonstrate(row, random.Random(0), 1.0) == PACK.module.solve(row)
        wrong = PACK.module.demonstrate(row, random.Random(task.id), 0.0)
        ways.add(wrong[1]["content"].rpartition(":")[0] if len(wrong) > 1 else "no query")
    assert ways == {"no query", "Error: no such table", "Error: no such column"}


def test_the_harder_level_is_solved_too() -> None:
    for row in itertools.islice(PACK.module.rich(0), 30):
        assert PACK.module.solve(row)[1]["content"] == row["answer"] and not row[
            "answer"
        ].startswith("Error")
        assert " text, " in row["prompt"]
