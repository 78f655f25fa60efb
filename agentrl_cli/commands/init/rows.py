"""The rows that a user has: which column is the question and which the answer, and rows that ask the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.errors import DataError
from agentrl_cli.tasks.drawing import Row, question
from agentrl_cli.tasks.forms import detect, normal
from agentrl_cli.tasks.sources import FILES

ANSWERS = ("answer", "ground_truth", "expected", "target", "label", "solution", "output", "gt")
"""Fields that hold a row's right answer, in this order."""
QUESTION_NAMES = (
    *("question", "problem", "q", "query", "input", "instruction", "task", "text", "user"),
    *("问题", "题目", "问", "提问"),
)
"""Other names of the column `prompt`, for rows of no known form."""
ANSWER_NAMES = (
    "a",
    "ans",
    "result",
    "response",
    "reply",
    "reference",
    "correct",
    "答案",
    "回答",
    "答",
)
"""Other names of the column `answer`."""
KNOWN = {"id", "prompt", "messages", "conversations", *ANSWERS, *QUESTION_NAMES, *ANSWER_NAMES}
HOW = (
    "Name the column with the question `prompt` (or question, q, input, 问题 …) and the one with the right answer"
    " `answer` (or a, expected, target, label, 答案 …)."
)
SHOWN = 5
"""Rows that a message names."""


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of a file in AgentRL's own form, and where each stands. Raises DataError."""
    rows: list[Row] = []
    places: list[str] = []
    ids: dict[str, int] = {}
    endless: list[str] = []
    for number, row in FILES[path.suffix](path):
        if isinstance(row, str):
            raise DataError(f"{path}:{number}: {row}")
        try:
            named = _rename_columns(row)
            made = normal(named)
        except DataError as problem:
            raise DataError(f"{path}:{number}: {problem.message}") from problem
        if not made.get("prompt"):
            there = ", ".join(map(str, row)) or "none"
            text = f"{path}:{number}: no column is the question; there are: {there}."
            raise DataError(text, hint=HOW)
        floats = (named[name] for name in ANSWERS if isinstance(named.get(name), float))
        if not all(map(math.isfinite, floats)):
            endless.append(f"{path}:{number}")
        if "id" in made:
            made["id"] = str(made["id"])
            if (first := ids.setdefault(made["id"], number)) != number:
                text = f"{path}:{number}: the id {made['id']!r} is also in line {first}."
                raise DataError(text, hint="Correct one of the two, or leave the ids out.")
        rows.append(made)
        places.append(f"{path}:{number}")
    if not rows:
        raise DataError(f"{path} has no rows.")
    if endless:
        more = f" and {len(endless) - SHOWN} more" * (len(endless) > SHOWN)
        raise DataError(
            f"{', '.join(endless[:SHOWN])}{more}: the answer is NaN or infinite, which no model can be right about.",
            hint="Correct or delete them; an answer that is a text stands in quotes.",
        )
    return rows, places


def _rename_columns(row: Mapping[str, Any]) -> Row:
    """Return a row with the names of `KNOWN` columns in lower case, and of question and answer as AgentRL has them."""
    made = {
        key.strip().lower() if key.strip().lower() in KNOWN else key: value
        for key, value in row.items()
    }
    other = next((name for name in ANSWER_NAMES if name in made), None)
    if other is not None and not any(name in made for name in ANSWERS):
        made["answer"] = made.pop(other)
    asked = next((name for name in QUESTION_NAMES if name in made), None)
    if asked is not None and "prompt" not in made and detect(made) == "own":
        made["prompt"] = made.pop(asked)
    return made


def distinct(
    rows: Sequence[Row], places: Sequence[str], answer: str, notes: list[str]
) -> list[Row]:
    """Return the rows without those that are there twice, which `notes` counts.

    Raises DataError if two ask the same and have different answers.
    """
    first: dict[str, list[int]] = {}
    again, differ = [], []
    for index, row in enumerate(rows):
        group = first.setdefault(question(row["prompt"], row), [])
        if any({**row, "id": ""} == {**rows[other], "id": ""} for other in group):
            again.append(index)
            continue
        if (
            answer
            and len({str(rows[other].get(answer)).strip() for other in (index, *group[:1])}) > 1
        ):
            differ.append((group[0], index))
        group.append(index)
    where = [*places, *(f"row {number}" for number in range(len(places) + 1, len(rows) + 1))]
    if differ:
        lines = [
            f"{where[one]} and {where[other]} ask the same and have the answers {rows[one][answer]!r} and"
            f" {rows[other][answer]!r}."
            for one, other in differ
        ]
        more = [f"And {len(lines) - SHOWN} more pairs."] * (len(lines) > SHOWN)
        raise DataError(
            "\n".join(lines[:SHOWN] + more),
            hint="Correct or delete one of each: no model can learn both.",
        )
    if again:
        shown = ", ".join(where[index] for index in again[:SHOWN]) + " …" * (len(again) > SHOWN)
        notes.append(
            f"Rows that repeat another word for word were left out: {len(again)} of {len(rows)} ({shown})."
        )
    left = set(again)
    return [row for index, row in enumerate(rows) if index not in left]
