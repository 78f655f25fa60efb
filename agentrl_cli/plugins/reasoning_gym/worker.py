"""Asks the questions of a reasoning-gym family (0.1); its `score_answer` is the reward."""

from __future__ import annotations

import dataclasses
import re
from typing import Any


class Family:
    """A family's questions, of one seed."""

    def __init__(self, config: dict[str, Any]) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import SYSTEM_PROMPTS

        name, options = config["package"], {"seed": 0, **config["options"]}
        system = str(options.pop("system", "direct"))
        if name not in DATASETS:
            raise LookupError("family of reasoning-gym", name, sorted(DATASETS))
        fields = [field.name for field in dataclasses.fields(DATASETS[name][1])]
        for option in set(options) - set(fields):
            raise LookupError(f"option of {name}", option, [*fields, "system"])
        self.system = SYSTEM_PROMPTS.get(system, system)
        self.data = reasoning_gym.create_dataset(name, **options)
        self.size, self.distinct = len(self.data), True

    def open(self, sample: int) -> Question:
        """Return a question by its place."""
        return Question(self, self.data[sample])


class Question:
    """One question; the first answer is the last."""

    def __init__(self, family: Family, entry: dict[str, Any]) -> None:
        self._family, self._entry = family, entry
        self._score = 0.0
        self.prompt = [
            {"role": "system", "content": family.system.strip()},
            {"role": "user", "content": entry["question"]},
        ]

    def say(self, text: str) -> tuple[str, bool]:
        """Score the answer: the text of its last <answer> tag, else after `Answer:`, else all of it."""
        from reasoning_gym.utils import extract_answer

        line = re.findall(r"^\W*Answer:(.*)$", text, re.MULTILINE)
        answer = extract_answer(text) or (line[-1] if line else text).strip()
        self._score = float(self._family.data.score_answer(answer, self._entry))
        return "", True

    def reward(self) -> float:
        """Return the score."""
        return self._score


WORKER, FORKED = Family, True
