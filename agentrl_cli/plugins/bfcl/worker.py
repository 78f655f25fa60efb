"""Plays the multi-turn tasks of the Berkeley Function Calling Leaderboard (bfcl_eval 2026): its classes are the tools,
and its own checker compares the states that the model and the right calls leave."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CATEGORIES = [f"multi_turn_{kind}" for kind in ("base", "miss_func", "miss_param", "long_context")]
_NUMBERS = itertools.count()


class Category:
    """A category's tasks. `turns`: only so many of the user's; `tools: needed` offers the functions of the solution."""

    def __init__(self, config: dict[str, Any]) -> None:
        import bfcl_eval
        from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker  # noqa: F401 - now, once

        self.name, options = config["package"], config["options"]
        if self.name not in CATEGORIES:
            raise LookupError("multi-turn category of BFCL", self.name, CATEGORIES)
        for option in set(options) - {"turns", "tools"}:
            raise LookupError(f"option of {self.name}", option, ["turns", "tools"])
        if (tools := options.get("tools", "all")) not in ("all", "needed"):
            raise LookupError(f"tools of {self.name}", str(tools), ["all", "needed"])
        self.turns, self.needed = options.get("turns"), tools == "needed"
        if self.turns is not None and (type(self.turns) is not int or self.turns < 1):
            raise ValueError(f"turns of {self.name} is a number from 1, not {self.turns!r}")
        self._data, file = Path(bfcl_eval.__file__).with_name("data"), f"BFCL_v4_{self.name}.json"
        self.entries = self._read(file)
        self.truths = {
            row["id"]: row["ground_truth"] for row in self._read(f"possible_answer/{file}")
        }
        self._docs = {
            name: self._read(f"multi_turn_func_doc/{path}")
            for name, path in MULTI_TURN_FUNC_DOC_FILE_MAPPING.items()
            if (self._data / "multi_turn_func_doc" / path).is_file()
        }
        self.size = len(self.entries)

    def open(self, sample: int) -> World:
        """Return a task by its place."""
        return World(self, self.entries[sample])

    def functions(self, entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the schemas of an entry's functions by name."""
        docs = [doc for name in entry["involved_classes"] for doc in self._docs[name]]
        right = [call for turn in self.truths[entry["id"]][: self.turns] for call in turn]
        wanted = {call.partition("(")[0] for call in right}
        return {
            doc["name"]: {
                "type": "function",
                "function": _schema({k: v for k, v in doc.items() if k != "response"}),
            }
            for doc in docs
            if doc["name"] not in entry.get("excluded_function", ())
            and (doc["name"] in wanted or not self.needed)
        }

    def _read(self, file: str) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in (self._data / file).read_text(encoding="utf-8").splitlines()
        ]


def _schema(doc: Any) -> Any:
    """Return a function's description with JSON Schema's names of types."""
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI

    if isinstance(doc, list):
        return [_schema(part) for part in doc]
    if not isinstance(doc, dict):
        return doc
    made = {key: _schema(value) for key, value in doc.items()}
    if isinstance(made.get("type"), str):
        made["type"] = GORILLA_TO_OPENAPI.get(made["type"], made["type"])
    return made


class World:
    """One task: its user's turns, each of which the model ends with a text."""

    def __init__(self, category: Category, entry: Mapping[str, Any]) -> None:
        self._entry, self._name = entry, f"agentrl{next(_NUMBERS)}"
        """A name of its own, as instances are kept by it."""
        self._truth = category.truths[entry["id"]][: category.turns]
        self._questions = entry["question"][: category.turns]
        self._missing = entry.get("missed_function", {})
        self._functions = category.functions(entry)
        self._steps: list[list[list[str]]] = [[] for _ in self._questions]
        self._turn = 0
        self.prompt = [dict(message) for message in self._questions[0]]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Those that the user has given by now."""
        later = {
            name
            for turn, names in self._missing.items()
            if int(turn) > self._turn
            for name in names
        }
        return [tool for name, tool in self._functions.items() if name not in later]

    def say(self, text: str) -> tuple[str, bool]:
        """End the turn; the user's next one follows."""
        from bfcl_eval.constants.default_prompts import (
            DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC,
        )

        self._turn += 1
        if self._turn >= len(self._questions):
            return "", True
        messages = self._questions[self._turn]
        if not messages:
            return DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC, False
        return "\n".join(message["content"] for message in messages), False

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a function of the classes."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import (
            execute_multi_turn_func_call,
        )

        call = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        self._steps[self._turn].append([call])
        entry = self._entry
        results, _ = execute_multi_turn_func_call(
            [call],
            entry["initial_config"],
            entry["involved_classes"],
            self._name,
            entry["id"],
            "long_context" in entry["id"],
        )
        return results[0], False

    def reward(self) -> float:
        """Return 1 if the checker accepts the calls of every turn."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

        entry = dict(self._entry)
        category = entry["id"].rpartition("_")[0]
        checked = multi_turn_checker(self._steps, self._truth, entry, category, self._name)
        return float(checked["valid"])


WORKER, FORKED = Category, True
