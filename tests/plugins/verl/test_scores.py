"""verl's scorers here and in verl: a table of hard answers, and 3,000 random ones each where verl is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.plugins.verl import scorers
from tests.plugins.verl import answers

SCORERS: dict[str, Callable[..., float]] = {
    "gsm8k": scorers.gsm8k,
    "math_reward": scorers.math_reward,
}
FAR = "x" * 300

HARD: list[tuple[str, str, Any, float]] = [
    # The last mark counts, within the last 300 characters; `format_score` is 0.25.
    ("gsm8k", "#### 70 wrong #### 72", "72", 1.0),
    ("gsm8k", "#### 72, no: #### 70", "72", 0.25),
    ("gsm8k", f"#### 72 {FAR}", "72", 0.0),
    ("gsm8k", f"{FAR} #### 72", "72", 1.0),
    ("gsm8k", "#### 1,234", "1234", 1.0),
    ("gsm8k", "#### 72.", "72", 0.25),
    ("gsm8k", "#### $72", "72", 0.0),
    ("gsm8k", "####72", "72", 0.0),
    ("gsm8k", "#### -", "72", 0.0),
    ("gsm8k", "#### .", "72", 0.25),
    ("math_reward", "\\boxed 72", "72", 1.0),
    ("math_reward", "$\\boxed 72$ is it", "72", 1.0),
    ("math_reward", "\\boxed{70}, no: \\boxed{72}", "72", 1.0),
    ("math_reward", "\\boxed {72}", "72", 0.0),
    ("math_reward", "\\boxed{72\\%}", "72", 1.0),
    ("math_reward", "\\boxed{72\\%}", "72%", 0.0),
    ("math_reward", "\\boxed{72%}", "72%", 1.0),
    ("math_reward", "\\fbox{72}", "72", 0.0),
    ("math_reward", "\\boxed 1 \\boxed{2}", "2", 0.0),
    ("math_reward", "\\boxed{0.5}", "\\frac12", 1.0),
    ("math_reward", "\\boxed{1/2}", "\\dfrac{1}{2}", 1.0),
    ("math_reward", "\\boxed{01/2}", "1/2", 0.0),
    ("math_reward", "\\boxed{x=5}", "5", 1.0),
    ("math_reward", "\\boxed{a=b=5}", "b=5", 0.0),
    ("math_reward", "\\boxed{5 \\text{ cm}}", "5", 1.0),
    ("math_reward", "\\boxed{5\\text{ a}\\text{ b}}", "5", 0.0),
    ("math_reward", "\\boxed{5\\text{ a}\\text{ b}}", "5\\text{ a}\\text{ b}", 1.0),
    ("math_reward", "\\boxed{\\sqrt3}", "\\sqrt{3}", 1.0),
    ("math_reward", "\\boxed{\\sqrt}", "\\sqrt", 1.0),
    ("math_reward", "\\boxed{\\frac}", "\\frac1", 0.0),
    ("math_reward", "\\boxed{.5}", "0.5", 1.0),
    ("math_reward", "\\boxed{(.5)}", "(0.5)", 0.0),
    ("math_reward", "\\boxed{72", "72", 0.0),
    ("math_reward", "72", "72", 0.0),
]


@pytest.mark.parametrize(("module", "text", "truth", "score"), HARD)
def test_hard_answers_are_scored_as_verl_does(
    module: str, text: str, truth: Any, score: float
) -> None:
    """The scores are those of verl 0.9.1."""
    given = {"format_score": 0.25} if module == "gsm8k" else {}
    assert SCORERS[module](text, truth, **given) == score


def test_thousands_of_random_answers_are_scored_as_verl_does() -> None:
    python = os.environ.get("VERL_PYTHON", "")
    if not python and importlib.util.find_spec("verl") is not None:
        python = sys.executable
    if not python:
        pytest.skip(
            "verl is not installed: VERL_PYTHON names an interpreter with it (pip install --no-deps verl)"
        )
    command = [python, answers.__file__]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout)
    for module, scorer in SCORERS.items():
        ours, asked = answers.scores(module, scorer), answers.answers(module)
        both = zip(asked, theirs[module], ours, strict=True)
        different = [(answer, real, mine) for answer, real, mine in both if real != mine]
        assert len(ours) == answers.COUNT and not different, different[:5]
        assert sum(score == 1.0 for score in ours) > 300, (
            "the answers must be right often enough to compare anything"
        )
