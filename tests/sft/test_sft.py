"""Supervised fine-tuning: demonstrations, drills, recipes by path, and that a seed decides the weights."""

import dataclasses
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Chat, Tokenizer, load_pack
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.paths import bundled_model, packs_dir
from agentrl_cli.sft import from_file
from agentrl_cli.sft.demonstrations import (
    Lesson,
    Recipe,
    demonstrations,
    drill,
    encode,
    parse_recipe,
)
from agentrl_cli.sft.recipe import RecipeRun, find_recipe
from agentrl_cli.sft.train import lessons, make, use_recipe
from tests.helpers.cli import Cli

SMALL = Recipe(
    packs={"echo-task": 1.0},
    steps=6,
    rows=4,
    lr=3e-3,
    muon_lr=0.02,
    drills=2,
    vocabulary=320,
    texts=150,
    architecture={
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
)


def test_a_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make(dataclasses.replace(SMALL, seed=seed), tmp_path / name)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
        tmp_path / "b" / "tokenizer.json"
    ).read_bytes()


def test_only_what_a_model_would_sample_is_trained() -> None:
    pack = load_pack("calc-task")
    task = next(task for task in pack.tasks("train") if task.data["probe"])
    chat = Chat(_tiny())
    segment = encode(chat, pack, [*task.prompt, *pack.solution(task)])
    said = chat.decode(segment.ids[segment.trained].tolist())
    call = '{"name": "calculator", "arguments": {"expression": "' + task.data["expression"] + '"}}'
    assert (
        said
        == f"<tool_call>\n{call}\n</tool_call><|im_end|>Answer: {task.data['answer']}<|im_end|>"
    )


def test_demonstrations_guess_as_often_as_the_recipe_says_and_avoid_heldout_families() -> None:
    pack = load_pack("calc-task")
    recipe = dataclasses.replace(SMALL, packs={"calc-task": 1.0}, tool_rate=0.25)
    drawn = [
        messages
        for *_, messages in itertools.islice(demonstrations(recipe, {"calc-task": pack}, 0), 600)
    ]
    needing = [m for m in drawn if " + " not in m[1]["content"] or len(m[1]["content"]) > 24]
    share = sum(any(message["role"] == "tool" for message in m) for m in needing) / len(needing)
    assert 0.2 < share < 0.3
    assert not any("%" in m[1]["content"] or "**" in m[1]["content"] for m in drawn)


def test_lessons_come_first_each_with_its_own_families_and_tool_rate() -> None:
    packs, chat = {"calc-task": load_pack("calc-task")}, Chat(_tiny())
    wanted = [Lesson(steps=2, families=["small"]), Lesson(steps=1)]
    recipe = Recipe(packs={"calc-task": 1.0}, steps=3, rows=24, tool_rate=0.0, lessons=wanted)
    assert recipe.total == 6
    batches = [
        [chat.decode(one.ids.tolist()) for one in batch[0]]
        for batch in itertools.islice(lessons(chat, packs, recipe), 6)
    ]
    short = [all(re.search(r"\D\d\d? \+ \d[.?]", text) for text in batch) for batch in batches]
    assert short == [True, True, False, False, False, False]
    called = [sum("</tool_call><|im_end|>" in text for text in batch) for batch in batches]
    assert called[2] > 12 and called[3:] == [0, 0, 0]
    recipe = dataclasses.replace(recipe, lessons=[Lesson(steps=1, families=["nowhere"])])
    with pytest.raises(ConfigError, match="calc-task does not train on: nowhere"):
        next(lessons(chat, packs, recipe))


def test_a_drill_is_a_copy() -> None:
    for group in drill(random.Random(1), list(range(20, 30)), 300, 12):
        (segment,) = group
        copied = segment.ids[segment.trained][:-1].tolist()
        before = segment.ids[~segment.trained].tolist()
        assert any(before[i : i + len(copied)] == copied for i in range(len(before)))


def test_rate_warms_up_stays_and_falls_to_a_twentieth() -> None:
    recipe = Recipe(packs={}, steps=100, warmup=10, decay=0.4)
    rates = [recipe.rate(step, recipe.total, 0.05) for step in (0, 50, 80, 99)]
    assert rates == pytest.approx([0.1, 1.0, 0.5, 0.05])


def test_the_bundled_recipe_loads_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = packs_dir().parent / "recipes" / "tiny_agent" / "recipe.yaml"
    assert set(parse_recipe(load_yaml(path), path).packs) == {"code-task", "calc-task", "echo-task"}
    with pytest.raises(ConfigError, match=r"bad\.yaml is not a recipe.*step"):
        parse_recipe({"packs": {}, "step": 3}, tmp_path / "bad.yaml")


def _tiny() -> Tokenizer:
    return Tokenizer.load(bundled_model())


OWN = """
import json

from . import words
from agentrl_cli.sft.recipe import RecipeRun


def make(run: RecipeRun) -> bool:
    for step in range(run.settings["steps"]):
        run.report(step + 1, run.settings["steps"], 2.0 - step)
    run.folder.mkdir(exist_ok=True)
    said = [words.WORD, run.settings["seed"], run.resume, run.stopped()]
    (run.folder / "made.json").write_text(json.dumps(said))
    return run.settings["seed"] != 5
"""


def write_recipe(folder: Path, word: str) -> Path:
    folder.mkdir()
    (folder / "recipe.yaml").write_text("steps: 2\nseed: 3\n")
    (folder / "words.py").write_text(f"WORD = {word!r}\n")
    (folder / "recipe.py").write_text(OWN)
    return folder


def test_a_strangers_recipe_runs_with_the_modules_beside_it(cli: Cli) -> None:
    for word in ("lantern", "copper"):  # two folders with modules of the same names
        write_recipe(cli.folder / f"a-{word}", word)
        made = cli.json("sft", word, "--recipe", f"a-{word}")
        assert made == {"folder": word, "loss": 1.5}
        said = json.loads((cli.folder / word / "made.json").read_text())
        assert said == [word, 3, False, False]


def test_options_replace_settings_and_a_stopped_recipe_is_resumed(cli: Cli) -> None:
    write_recipe(cli.folder / "mine", "x")
    again = "agentrl sft out --recipe mine --resume"
    cli("sft", "out", "--recipe", "mine", "--seed", "5", code=130, said=again)
    cli("sft", "out", "--recipe", "mine/recipe.yaml", "--seed", "6", "--resume")
    said = json.loads((cli.folder / "out" / "made.json").read_text())
    assert said == ["x", 6, True, False]


def test_a_recipe_without_make_or_with_a_mistake_is_named(cli: Cli) -> None:
    folder = write_recipe(cli.folder / "mine", "x")
    for code, said, status in (
        ("", "has no function `make`", 2),
        ("from .nowhere import x\n", "has no nowhere.py", 1),
    ):
        (folder / "recipe.py").write_text(code)
        cli("sft", "out", "--recipe", "mine", code=status, said=said)
    (folder / "recipe.yaml").write_text("")
    empty = "recipe.yaml is not a recipe: it has no settings"
    cli("sft", "out", "--recipe", "mine", code=2, said=empty)


def test_the_bundled_models_recipes_go_by_their_names_in_a_checkout() -> None:
    recipes = packs_dir().parent / "recipes"
    assert find_recipe("tiny-tools") == recipes / "tiny_tools" / "recipe.yaml"
    assert find_recipe("tiny-agent") == recipes / "tiny_agent" / "recipe.yaml"
    with pytest.raises(NotFound, match="tiny-other is not a recipe") as found:
        find_recipe("tiny-other")
    assert "recipes/tiny_tools of a checkout" in found.value.hint


def test_a_recipe_of_packs_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    adapter = {"r": 2, "alpha": 4}
    settings = {"packs": {"echo-task": 1.0}, "steps": 3, "rows": 2, "adapter": adapter}
    steps: list[tuple[int, int]] = []

    def report(step: int, total: int, loss: float) -> None:
        steps.append((step, total))

    run = RecipeRun(
        settings=settings,
        path=tmp_path / "recipe.yaml",
        folder=tmp_path / "out",
        report=report,
        stopped=lambda: len(steps) == 2,
    )
    with pytest.raises(KeyboardInterrupt):
        use_recipe(run)
    assert steps == [(1, 3), (2, 3)] and not list(tmp_path.iterdir())


SYSTEM = {
    "role": "system",
    "content": "",
    "tools": json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": "calculate_math",
                    "description": "计算数学表达式",
                    "parameters": {
                        "type": "object",
                        "properties": {"expression": {"type": "string"}},
                    },
                },
            }
        ]
    ),
}
CALLS = json.dumps([{"name": "calculate_math", "arguments": {"expression": "2+3"}}])
CALLED = [
    {"role": "user", "content": "2+3?", "reasoning_content": "", "tools": "", "tool_calls": ""},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": '{"result": "5"}'},
    {"role": "assistant", "content": "5"},
]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [SYSTEM, *CALLED]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "completion": "b"},
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [{"role": "assistant", "content": "b"}],
        },
        {"instruction": "a", "input": "", "output": "b"},
    ],
)
def test_rows_to_learn_from(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    ((messages, schemas),) = from_file.read(tmp_path / "rows.jsonl")
    assert messages[-1]["role"] == "assistant" and messages[-1]["content"] in ("b", "5")
    assert bool(schemas) == (row.get("conversations", [None])[0] is SYSTEM)
    calls = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls") or ()]
    assert calls in ([], [{"expression": "2+3"}])


def test_a_row_of_no_known_form_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"text": "a"}\n')
    with pytest.raises(
        Exception, match=r"rows.jsonl:2: a row to learn from has conversations.*this one has text"
    ):
        from_file.read(tmp_path / "rows.jsonl")
