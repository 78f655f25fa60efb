"""The bundled model's data: what is in it, that its calls are right, and that nothing of a pack or a benchmark is."""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.paths import find_pack, pack_names
from agentrl_cli.registry import load_file
from agentrl_cli.tasks import load_pack
from recipes.tiny_tools.recipe import Plan
from recipes.tiny_tools.rows import Row
from recipes.tiny_tools.stream import drill, row
from recipes.tiny_tools.words import HELD_OUT

ROOT = Path(__file__).resolve().parents[2]
SOME = 4000
PLAN = Plan(**load_yaml(ROOT / "recipes" / "tiny_tools" / "recipe.yaml"))
ROWS = "8739ae1d8993b26dacb47316c3b38202fe1a67135e88c72d3e8814620fe969f2"
"""Of 200 rows and 200 drills."""
SHARED = {"run_python", "crop"}
"""Tools of packs that the data may have by name: code-task's, with programs of other wordings, and that of shapes-task,
whose model is another."""


@cache
def drawn() -> list[Row]:
    return [row(PLAN.seed, number) for number in range(SOME)]


def calls(one: Row) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number of the assistant turn, tool, arguments)"""
    turns = [message for message in one.messages if message["role"] == "assistant"]
    for number, message in enumerate(turns):
        for each in message.get("tool_calls", ()):
            yield number, each["function"]["name"], each["function"]["arguments"]


def properties(one: Row) -> Iterator[dict[str, Any]]:
    for tool in one.tools:
        yield from tool["function"]["parameters"]["properties"].values()


def test_a_seed_and_a_number_decide_a_row() -> None:
    assert row(3, 17) == row(3, 17) != row(4, 17)
    assert row(3, 17) != row(3, 18)


def test_the_rows_are_those_that_the_bundled_model_learned_from() -> None:
    rows = [make(0, number) for make in (row, drill) for number in range(200)]
    text = json.dumps([[one.family, one.tools, one.messages, sorted(one.muted)] for one in rows])
    assert hashlib.sha256(text.encode()).hexdigest() == ROWS


def test_every_kind_of_tool_and_task_is_in_it() -> None:
    rows = drawn()
    families = Counter(one.family for one in rows)
    wanted = "one conversion choose list record two_steps parallel corrected fails say read greeting abstain look_up"
    assert all(
        families[name] > 10
        for name in f"{wanted} expression program loaded secret function".split()
    ), families
    assert len({tool["function"]["name"] for one in rows for tool in one.tools}) > 3000
    kinds = Counter(field["type"] for one in rows for field in properties(one))
    assert all(
        kinds[name] > 30 for name in ("integer", "number", "string", "boolean", "array", "object")
    ), kinds
    more = [field for one in rows for field in properties(one)]
    assert any("enum" in field for field in more) and any("default" in field for field in more)
    assert {bool(field.get("description")) for field in more} == {True, False}
    sizes = Counter(
        len(tool["function"]["parameters"]["properties"]) for one in rows for tool in one.tools
    )
    assert set(sizes) >= {0, 1, 2, 3, 4}
    assert set(Counter(len(one.tools) for one in rows)) >= {0, 1, 2, 3, 4, 5}
    chinese = [
        one
        for one in rows
        if re.search(r"[\u4e00-\u9fff]", json.dumps(one.messages, ensure_ascii=False))
    ]
    assert 0.15 < len(chinese) / len(rows) < 0.5
    assert (
        len({one.messages[0]["content"] for one in rows if one.messages[0]["role"] == "system"})
        > 200
    )


def test_every_call_that_is_learned_fits_its_schema_and_is_to_a_tool_of_the_prompt() -> None:
    for one in drawn()[:1500]:
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in one.tools}
        for turn, name, arguments in calls(one):
            if turn not in one.muted:
                jsonschema.Draft202012Validator(
                    {**offered[name], "additionalProperties": False}
                ).validate(arguments)


def test_arguments_stand_in_the_conversation_before_the_call() -> None:
    """A model can read them, but for a capital at the beginning; those of a second step are the first one's result."""
    for one in drawn():
        if one.family not in (
            "one",
            "conversion",
            "choose",
            "fails",
            "list",
            "two_steps",
            "look_up",
            "corrected",
        ):
            continue
        before, turns = "", itertools.count()
        for message in one.messages:
            muted = message["role"] == "assistant" and next(turns) in one.muted
            for each in () if muted else message.get("tool_calls", ()):
                for value in each["function"]["arguments"].values():
                    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
                        assert str(value).lower() in before.lower(), (one.family, value, before)
            before += str(message["content"]) + "\n"


def test_a_mistake_is_corrected_and_not_learned() -> None:
    rows = [one for one in drawn() if one.family == "corrected"]
    for one in rows:
        assert one.muted == {0}
        first, second = (arguments for _, _, arguments in calls(one))
        names = [name for _, name, _ in calls(one)]
        assert first != second or names[0] != names[1]
        answered = next(message for message in one.messages if message["role"] == "tool")["content"]
        assert answered.startswith(("Error: ", "Bad tool call: "))


def test_no_row_of_a_pack_is_in_it() -> None:
    """Over every 16th row that the recipe trains on: no question of any split, and no 13 words in a row of one."""
    questions, grams = set(), set()
    for name in pack_names():
        for path in sorted((find_pack(name) / "data").glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                fields = json.loads(line)
                asked = (
                    fields.get("prompt") or fields["conversations"][1]["content"]
                )  # conversations
                questions.add(" ".join(asked.split()))
                for text in fields.values():
                    grams |= set(thirteens(text)) if isinstance(text, str) else set()
    assert len(questions) > 1500 and len(grams) > 3000
    for number in range(0, PLAN.steps * PLAN.rows, 16):
        for text in row(PLAN.seed, number).texts:
            assert " ".join(text.split()) not in questions, text
            assert grams.isdisjoint(thirteens(text)), text


def test_no_name_of_a_measured_tool_is_in_it() -> None:
    packs = {tool["function"]["name"] for name in pack_names() for tool in load_pack(name).schemas}
    subjects = load_file(ROOT / "benchmarks" / "bundled_subjects.py").SUBJECTS
    functions = {tool.__name__ for subject in subjects for tool in subject.tools}
    assert packs - SHARED <= HELD_OUT and functions <= HELD_OUT
    for one in drawn():
        named = {tool["function"]["name"].lower() for tool in one.tools} | {
            name.lower() for _, name, _ in calls(one)
        }
        assert not named & HELD_OUT


def thirteens(text: str) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[at : at + 13]) for at in range(len(words) - 12)]
