"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from agentrl_cli import load_pack
from agentrl_cli.evaluate.pack_check import check_pack

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    assert asyncio.run(check_pack(PACK, None)) == []


def test_the_corpus_is_what_the_generator_makes() -> None:
    lines = (
        (Path(__file__).parent / "corpus" / "facts.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert [json.loads(line) for line in lines] == PACK.module.documents()


def test_every_fact_is_found_first() -> None:
    for task in PACK.tasks("test")[:20]:
        found = PACK.module.solve(task.data)[-2]["content"].splitlines()[0]
        assert task.data["answer"] in found


def test_no_fact_of_the_test_split_stands_in_training() -> None:
    found = {
        split: {tuple(task.data["search"]) for task in PACK.tasks(split)}
        for split in ("train", "test")
    }
    # Facts that no demonstration uses are few: the test split asks for 40 of them, two rows each.
    assert len(found["test"]) == 40 and not found["train"] & found["test"]


def test_answers_and_guesses() -> None:
    assert (
        PACK.module.answer_of("Answer: 1,234.") == "1234" and PACK.module.answer_of("1234") is None
    )
    row = dict(PACK.tasks("train")[0].data)
    assert len(PACK.module.demonstrate(row, random.Random(0), 0.0)) == 1
