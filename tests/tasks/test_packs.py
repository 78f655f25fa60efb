"""The packs that ship: their data is what their generators make, and every row has what its pack declares."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, ScriptedPolicy
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.paths import pack_names, packs_dir
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sft.demonstrations import Recipe, demonstrations, parse_recipe
from agentrl_cli.tasks import Pack, draw_splits, load_pack, question
from agentrl_cli.types.content import content_text
from tests.helpers.chat import CHAT

FIELDS = {
    "calc-task": ("expression", "answer"),
    "code-task": ("kind", "answer"),
    "echo-task": ("answer",),
    "file-task": ("setup", "path", "wrong", "right", "tests"),
    "guess-task": ("low", "high", "secret"),
    "math-task": ("answer",),
    "parallel-task": ("first", "second", "prices", "stocks", "answer"),
    "search-task": ("search", "answer"),
    "shapes-task": ("scene", "answer"),
    "sql-task": ("database", "query", "answer"),
}


@pytest.mark.parametrize("name", pack_names())
def test_data_is_what_the_generator_makes(name: str) -> None:
    pack = load_pack(name)
    built = {split: rows for split, rows in pack.module.build().items() if rows}
    assert {"train", "test"} <= set(built)
    for split, rows in built.items():
        assert [task.data["id"] for task in pack.tasks(split)] == [row["id"] for row in rows]
        asked = [
            row.get("prompt") or row["conversations"][1]["content"] for row in rows
        ]  # conversations
        assert [content_text(task.prompt[-1]["content"]) for task in pack.tasks(split)] == asked


def test_fields_are_declared() -> None:
    assert {name: load_pack(name).row for name in pack_names() if name in FIELDS} == FIELDS


async def test_packs_mix_in_one_run_with_results_per_pack() -> None:
    names = ("sql-task", "parallel-task", "guess-task")
    packs = {name: load_pack(name) for name in names}
    config = Config()
    config.rollout.max_tokens, config.rollout.max_turns = 20_000, 10
    tasks = [task for pack in packs.values() for task in pack.tasks("test", limit=3)]
    prompts = {task.prompt[-1]["content"]: task for task in tasks}
    turns: dict[str, int] = {}

    def reply(key: str, ids: Sequence[int]) -> str:
        task = next(task for text, task in prompts.items() if text in CHAT.decode(list(ids)))
        said = [m for m in packs[task.pack].solution(task) if m["role"] == "assistant"]
        turns[key] = turns.get(key, -1) + 1
        if task.pack == "guess-task":
            return "no number"
        return CHAT.assistant_text(said[turns[key]], packs[task.pack].schemas)

    rollout = Rollout(ScriptedPolicy(reply, CHAT.tokenizer), CHAT, packs, config)
    done = await rollout.run([Job(task, 1) for task in tasks])
    by_pack = {
        name: [episode.primary for episode in done if episode.pack == name] for name in names
    }
    assert by_pack == {"sql-task": [1.0] * 3, "parallel-task": [1.0] * 3, "guess-task": [0.0] * 3}


TINY_AGENT = packs_dir().parent / "recipes" / "tiny_agent" / "recipe.yaml"
RECIPES = [TINY_AGENT, *sorted(packs_dir().glob("*/*/recipe.yaml"))]


def key(pack: Pack, prompt: object, data: dict[str, object]) -> str:
    return question(prompt, data, getattr(pack.module, "WORLD", ()))


def shown(path: Path) -> dict[str, set[str]]:
    """Pack → the questions of an eighth of what a recipe draws, its tokenizer's texts among them.

    That none of a pack's rows is drawn is made so, and tested, below; here it is looked at for what ships.
    """
    recipe = parse_recipe(load_yaml(path), path)
    packs = {name: load_pack(name) for name in recipe.packs}
    found: dict[str, set[str]] = {name: set() for name in packs}
    texts = recipe.texts if recipe.architecture else 0
    for seed, count in ((1, texts), (2, recipe.steps * recipe.rows)):
        for pack, row, _ in islice(demonstrations(recipe, packs, recipe.seed + seed), count // 8):
            found[pack.name].add(key(pack, row["prompt"], row))
    return found


def test_no_question_stands_in_two_splits_or_in_a_warm_up() -> None:
    demonstrated = {recipe.parent.name: shown(recipe) for recipe in RECIPES}
    for name in pack_names():
        pack = load_pack(name)
        rows = {split: pack.tasks(split) for split in pack.splits()}
        assert {"train", "validation", "test"} <= set(rows)
        every = [
            key(pack, t.prompt[-1]["content"], dict(t.data))
            for tasks in rows.values()
            for t in tasks
        ]
        assert [text for text, count in Counter(every).items() if count > 1] == []
        for where, questions in demonstrated.items():
            assert not set(every) & questions.get(name, set()), (
                f"{name} shares rows with the warm-up in {where}"
            )


def test_the_shipped_recipes_demonstrate_what_they_did_before_rows_were_left_out() -> None:
    recipe = parse_recipe(load_yaml(TINY_AGENT), TINY_AGENT)
    packs = {name: load_pack(name) for name in recipe.packs}
    bare = {name: dataclasses.replace(pack, rows=()) for name, pack in packs.items()}
    both = (demonstrations(recipe, group, 2) for group in (packs, bare))
    assert all(one[1:] == other[1:] for one, other in islice(zip(*both, strict=True), 3000))


def test_a_warm_up_leaves_out_the_questions_of_the_packs_data() -> None:
    recipe = Recipe(packs={"echo-task": 1.0})
    pack = load_pack("echo-task")
    first = [row for _, row, _ in islice(demonstrations(recipe, {"echo-task": pack}, 5), 20)]
    kept = tuple({"id": str(n), **row} for n, row in enumerate(first[::2]))
    again = [
        row
        for _, row, _ in islice(
            demonstrations(recipe, {"echo-task": dataclasses.replace(pack, rows=kept)}, 5), 10
        )
    ]
    assert again == first[1::2]


def test_rows_are_drawn_until_they_are_new() -> None:
    def count(start: int) -> Iterator[dict[str, Any]]:
        return ({"prompt": f"{n // 2}", "setup": ""} for n in range(start, 10_000))

    splits = draw_splits(
        {"a": 2, "b": 3, "c": 0}, lambda split, n: count(0), generate=count, shown={3: 2}
    )
    assert [[row["prompt"] for row in splits[name]] for name in ("a", "b")] == [
        ["0", "3"],
        ["4", "5", "6"],
    ]
    assert [row["id"] for row in splits["b"]] == ["b-0000", "b-0001", "b-0002"] and set(splits) == {
        "a",
        "b",
    }
