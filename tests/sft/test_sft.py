"""Supervised fine-tuning: demonstrations, drills, and that a seed decides the weights."""

import dataclasses
import itertools
import random
import re
from pathlib import Path

import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import Tokenizer
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import ConfigError
from agentrl_cli.paths import bundled_model, packs_dir
from agentrl_cli.sft.demonstrations import (
    Lesson,
    Recipe,
    demonstrations,
    drill,
    encode,
    parse_recipe,
)
from agentrl_cli.sft.train import lessons, make
from agentrl_cli.tasks import load_pack

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
