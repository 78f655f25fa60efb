"""Families of reasoning-gym as worlds."""

from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.types import Outcome
from tests.helpers.programs import compare, play_published, python_with

SAME = """
import reasoning_gym
for family in ("chain_sum", "countdown", "syllogism", "word_sorting"):
    data = reasoning_gym.create_dataset(family, seed=3, size=EPISODES)
    ours = worker(family, seed=3, size=EPISODES)
    for place, entry in enumerate(data):
        same((ours.open(place).prompt[1]["content"], entry["question"]))
        for answer in (entry["answer"], "12", "Yes"):
            for text in (answer, f"So: <answer>{answer}</answer>", f"Well.\\nAnswer: {answer}"):
                world = ours.open(place)
                same((world.say(text), ("", True)))
                same((world.reward(), data.score_answer(answer, entry)))
"""


def test_questions_and_scores_are_the_packages() -> None:
    compare("reasoning-gym", "reasoning_gym", SAME)


async def test_a_family_becomes_a_project(tmp_path: Path) -> None:
    source = "reasoning-gym:chain_sum?max_terms=2&max_digits=1&seed=1"
    episode = await play_published(source, "reasoning_gym", ["<answer>no</answer>"], tmp_path / "s")
    assert episode.outcome is Outcome.FAILED and episode.reward == 0 and len(episode.turns) == 3


@pytest.mark.parametrize(
    ("source", "text"), [("chain_sm", "chain_sum"), ("chain_sum?max_trms=2", "max_terms")]
)
def test_an_unknown_name_names_the_nearest(
    source: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = python_with("reasoning-gym", "reasoning_gym")
    given = ["--from", f"reasoning-gym:{source}", "--python", python]
    assert main(["init", str(tmp_path / "p"), *given]) == 2
    read = capsys.readouterr().err
    assert f"Did you mean {text}" in read and "There are: " in read
