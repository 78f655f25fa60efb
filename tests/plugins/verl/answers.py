"""Answers to score, made by chance from what scorers stumble over, and verl's own scores of them.

VERL_PYTHON tests/plugins/verl/answers.py    scores of both modules as JSON, by the verl of that interpreter
"""

import contextlib
import importlib.util
import io
import json
import random
from pathlib import Path
from typing import Any

COUNT = 3000
NUMBERS = ["72", "-3", "1,234", "0.5", ".", "3.", "1,", "-", "100", "7.25", ".5", "١"]
MARKED = [
    "#### {n}", "####{n}", "#### ${n}", "####  {n}", "#### {n}.", "### {n}", "#### -{n}", "so {n}.", "{n} apples", "\n",
    "#### {n} wrong", "the answer is", "####", " ", "{n},{n}", "x" * 140,
]  # fmt: skip
VALUES = [
    "72", "72\\%", "72%", "\\frac12", "\\frac{1}{2}", "\\dfrac{1}{2}", "1/2", "-1/2", "01/2", "0.5", ".5", "\\sqrt3",
    "\\sqrt{3}", "\\frac1{2}", "\\frac", "\\frac1", "\\sqrt", "x=5", "xyz=5", "a=b=5", "5 \\text{ cm}", "90^\\circ",
    "\\text{ a}\\text{ b}", "\\$5", "\\left(1,2\\right)", "(1, 2)", "{.5}", "a .5", "1\\\\2", "3\\!4", "", " 72 ",
    "\\frac{1}{2}\\frac34", "5\\\\\\%", "{", "1/0", "-0/1", "1/2/3",
]  # fmt: skip
BOXES = [
    "\\boxed{{{n}}}", "\\boxed {n}", "\\boxed {n}$ done", "$\\boxed{{{n}}}$", "\\fbox{{{n}}}", "\\boxed{n}",
    "\\boxed{{{n}", "so \\boxed{{\\boxed{{{n}}}}}", "the answer {n}", "\\boxed", "}}", " and ", "\\boxed {{{n}}}", "$",
]  # fmt: skip


def answers(module: str, count: int = COUNT) -> list[tuple[str, str, str]]:
    """Made-up answers of a scorer: (text, truth, method)."""
    chance = random.Random(f"verl {module}")
    parts, values = (MARKED, NUMBERS) if module == "gsm8k" else (BOXES, VALUES)
    made = []
    for _ in range(count):
        truth = chance.choice(values)
        near = [truth, truth, chance.choice(values)]
        text = " ".join(
            chance.choice(parts).format(n=chance.choice(near)) for _ in range(chance.randint(1, 4))
        )
        method = chance.choice(["strict", "flexible"]) if module == "gsm8k" else ""
        made.append((text, truth.replace(",", "") if method else truth, method))
    return made


def scores(module: str, compute_score: Any) -> list[float]:
    found = []
    for text, truth, method in answers(module):
        given = {"method": method, "format_score": 0.25} if method else {}
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found.append(float(compute_score(text, truth, **given)))
        except Exception:  # noqa: BLE001 - counted like any other score
            found.append(-1.0)
    return found


def main() -> None:
    """Print verl's scores. Its files are loaded by path: the package itself imports ray."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None, "verl is not installed"
    out = {}
    for module in ("gsm8k", "math_reward"):
        path = Path(spec.origin).parent / "utils" / "reward_score" / f"{module}.py"
        loading = importlib.util.spec_from_file_location(module, path)
        assert loading is not None and loading.loader is not None
        loaded = importlib.util.module_from_spec(loading)
        loading.loader.exec_module(loaded)
        out[module] = scores(module, loaded.compute_score)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
