"""Families of reasoning-gym as worlds."""

from pathlib import Path

from agentrl_cli.types import Outcome
from tests.helpers.cli import Cli
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


def test_an_unknown_name_names_the_nearest(cli: Cli) -> None:
    python = python_with("reasoning-gym", "reasoning_gym")
    for source, near in (("chain_sm", "chain_sum"), ("chain_sum?max_trms=2", "max_terms")):
        said = (f"Did you mean {near}", "There are: ")
        cli("init", "p", "--from", f"reasoning-gym:{source}", "--python", python, code=2, said=said)
