"""Attacks find what planted graders pay for nothing, and leave sound ones alone."""

from pathlib import Path

import pytest

from benchmarks.grader_attacks import attack, planted, sound_ones, write

WORDS = {
    "substring": "counts as solved",
    "tolerance fails on nan": "the constant 'nan' counts as solved",
    "raises on a huge number": "makes the grader fail",
    "a judge that reads a score": "an order to the judge counts as solved",
    "exit status alone": "leaves before the tests run",
    "pays calls": "lower its weight",
    "every other time": "graded differently",
}
PLANTED = dict(planted())


def test_there_are_fifty_planted_graders() -> None:
    assert len(PLANTED) == 50


@pytest.mark.parametrize("name", WORDS)
async def test_a_faulty_grader_is_named(name: str, tmp_path: Path) -> None:
    rows, code, rewards = PLANTED[name]
    found = await attack(write(tmp_path / "p", rows[:3], code, rewards), None)
    assert any(WORDS[name] in text for text in found), found


@pytest.mark.parametrize("number", range(4))
async def test_a_sound_grader_is_left_alone(number: int, tmp_path: Path) -> None:
    _, (rows, code, rewards) = list(sound_ones(None))[number]
    assert await attack(write(tmp_path / "p", rows[:4], code, rewards), None) == []
