"""Asks the questions of a reasoning-gym family (0.1); its `score_answer` is the reward."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

MOST_CHOICES, LOOKED = 8, 100
"""A family with at most so many answers to its first questions is one of choices."""
SYSTEM = "Answer the question by calling submit."
"""With the option `tool=true`: the package's prompts ask for tags."""


class Family:
    """A family's questions, of one seed. With `tool`, the tool `submit` takes the answer."""

    def __init__(self, config: dict[str, Any]) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import SYSTEM_PROMPTS

        name, options = config["package"], {"seed": 0, **config["options"]}
        self.tool = config["tool"]
        system = str(options.pop("system", SYSTEM if self.tool else "direct"))
        if name not in DATASETS:
            raise LookupError("family of reasoning-gym", name, sorted(DATASETS))
        fields = [field.name for field in dataclasses.fields(DATASETS[name][1])]
        for option in set(options) - set(fields):
            raise LookupError(f"option of {name}", option, [*fields, "system"])
        self.system = SYSTEM_PROMPTS.get(system, system)
        self.data = reasoning_gym.create_dataset(name, **options)
        self.size, self.distinct = len(self.data), True
        self.choices = self._find_choices() if self.tool else []

    def open(self, sample: int) -> Question:
        """Return a question by its place."""
        return Question(self, self.data[sample])

    def _find_choices(self) -> list[str]:
        """Return the answers of a family that has few (Yes and No, True and False); else none."""
        found: set[str] = set()
        for place in range(min(self.size, LOOKED)):
            answer = self.data[place]["answer"]
            if not isinstance(answer, str):  # perhaps a list, which no set takes
                return []
            found.add(answer)
            if len(found) > MOST_CHOICES:
                return []
        return sorted(found)


def _make_tool(choices: list[str]) -> dict[str, Any]:
    """Return the schema of the tool `submit`."""
    answer: dict[str, Any] = {"type": "string", "description": "The answer."}
    answer |= {"enum": choices} if choices else {}
    parameters = {"type": "object", "properties": {"answer": answer}, "required": ["answer"]}
    function = {"name": "submit", "description": "Submit the answer.", "parameters": parameters}
    return {"type": "function", "function": function}


class Question:
    """One question; the first answer is the last."""

    def __init__(self, family: Family, entry: dict[str, Any]) -> None:
        self._family, self._entry = family, entry
        self._score = 0.0
        text, self.tools = entry["question"], [_make_tool(family.choices)] * family.tool
        if family.choices:
            text = f"{text.rstrip()}\nCall submit with answer: {', '.join(family.choices)}."
        self.prompt = [
            {"role": "system", "content": family.system.strip()},
            {"role": "user", "content": text},
        ]

    def say(self, text: str) -> tuple[str, bool]:
        """Score the answer: the text of its last <answer> tag, else after `Answer:`, else all of it."""
        from reasoning_gym.utils import extract_answer

        line = re.findall(r"^\W*Answer:(.*)$", text, re.MULTILINE)
        answer = extract_answer(text) or (line[-1] if line else text).strip()
        return self.call("submit", {"answer": answer})

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Score the answer of a call, as it is. An exception of the family's own code masks the attempt."""
        answer = str(arguments["answer"])
        self._score = float(self._family.data.score_answer(answer, self._entry))
        return "", True

    def reward(self) -> float:
        """Return the score."""
        return self._score


WORKER, FORKED = Family, True
