"""Families of reasoning-gym as worlds."""

from pathlib import Path

import pytest

from agentrl_cli.types import Outcome
from tests.helpers.chat import call
from tests.helpers.programs import check_curve, compare, play_published

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
for family, choices in (("syllogism", ["No", "Yes"]), ("ransom_note", ["False", "True"]), ("chain_sum", [])):
    data = reasoning_gym.create_dataset(family, seed=3, size=100)
    options = {"seed": 3, "size": 100}
    ours = W.WORKER({"package": family, "task": "", "score": "", "tool": True, "options": options})
    for place in range(EPISODES):
        entry = data[place]
        for answer in (entry["answer"], "12", *choices):
            world = ours.open(place)
            (tool,) = world.tools
            given = tool["function"]["parameters"]["properties"]["answer"]
            text = f"\\nCall submit with answer: {', '.join(choices)}." if choices else ""
            question = entry["question"].rstrip() if choices else entry["question"]
            same((world.prompt[1]["content"], question + text), (given.get("enum", []), choices))
            same((world.call("submit", {"answer": answer}), ("", True)))
            same((world.reward(), data.score_answer(answer, entry)))
"""
# An unknown name comes with those that there are, of which the nearest is shown. An answer on which the package's own
# scorer raises has no score: the exception masks the attempt.
REFUSED = """
(kind, name, names), option = refusal("chain_sm").args, refusal("chain_sum", max_trms=2).args
same((kind, "family of reasoning-gym"), (name, "chain_sm"), ("chain_sum" in names, True))
same((option[:2], ("option of chain_sum", "max_trms")), ({"max_terms", "system"} <= {*option[2]}, True))
world = worker("prime_factorization", seed=3, size=1).open(0)
try:
    world.say("2 x 3")
except ValueError:
    pass
else:
    raise AssertionError("a score that the package does not give")
"""


def test_questions_and_scores_of_texts_and_calls_are_the_packages() -> None:
    compare("reasoning-gym", "reasoning_gym", SAME + REFUSED)


async def test_a_family_becomes_a_project_whose_tool_takes_the_answer(tmp_path: Path) -> None:
    source = "reasoning-gym:syllogism?tool=true&size=60"
    said = [call("submit", answer="Yes")]
    episode = await play_published(source, "reasoning_gym", said, tmp_path / "s")
    assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED) and episode.tool_calls == 1
    asked = episode.turns[1].messages[0]["content"]
    assert asked.endswith("\nCall submit with answer: No, Yes.")


@pytest.mark.parametrize(
    "family", ["syllogism?tool=true", "calendar_arithmetic?tool=true&tasks=[is_leap_year]"]
)
def test_the_shipped_curves_count_for_their_rows(family: str, tmp_path: Path) -> None:
    check_curve(f"reasoning-gym:{family}", "reasoning_gym", tmp_path / "p")
