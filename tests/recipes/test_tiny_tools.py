"""The recipe of tiny-tools: its tokenizer, its size, and a training that stops and resumes."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import Tokenizer
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import UsageError
from agentrl_cli.models.load import require_undamaged
from agentrl_cli.sft.from_nothing import make_model
from agentrl_cli.sft.recipe import RecipeRun
from agentrl_cli.types import Message
from recipes.tiny_tools.recipe import Plan, encode, rate, train
from recipes.tiny_tools.stream import row
from tests.helpers.cli import Cli

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny_tools"

SMALL = Plan(
    architecture={
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    steps=6,
    rows=3,
    warmup=2,
    vocabulary=400,
    texts=80,
    threads=1,
    save_every=100,
)


def run(folder: Path, **more: Any) -> RecipeRun:
    return RecipeRun(settings={}, path=RECIPE / "recipe.yaml", folder=folder, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "model"
    assert train(SMALL, run(folder))
    return folder


def test_a_stopped_training_resumes_to_the_same_weights(trained: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = tmp_path / "stopped"

    def report(step: int, steps: int, loss: float) -> None:
        seen.append((step, steps))

    assert not train(SMALL, run(folder, report=report, stopped=lambda: len(seen) == 2))
    assert not (folder / "model.safetensors").exists()
    assert not train(SMALL, run(folder, report=report, resume=True, stopped=lambda: len(seen) == 5))
    assert train(SMALL, run(folder, report=report, resume=True))
    assert seen == [(step, 6) for step in (1, 2, 3, 4, 5, 6)]
    assert (folder / "model.safetensors").read_bytes() == (
        trained / "model.safetensors"
    ).read_bytes()


def test_only_the_number_of_steps_may_change_on_resuming(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No stopped training"):
        train(SMALL, run(tmp_path / "none", resume=True))
    counter = itertools.count(1)
    assert not train(SMALL, run(tmp_path / "a", stopped=lambda: next(counter) == 1))
    with pytest.raises(UsageError, match="another lr"):
        train(dataclasses.replace(SMALL, lr=1.0), run(tmp_path / "a", resume=True))
    assert train(dataclasses.replace(SMALL, steps=2), run(tmp_path / "a", resume=True))


def test_what_it_writes_is_a_hugging_face_folder(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    require_undamaged(trained)
    shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoint"))
    require_undamaged(tmp_path / "copy")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(trained),
        AutoTokenizer.from_pretrained(trained),
    )
    assert model.config.model_type == "qwen3" and model.config.max_position_embeddings == 2048
    asked = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    losses: list[float] = []
    plan = dataclasses.replace(SMALL, steps=40, rows=6)
    train(plan, run(tmp_path / "m", report=lambda step, steps, loss: losses.append(loss)))
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


def test_the_shipped_plan_fits_its_limits() -> None:
    plan = Plan(**load_yaml(RECIPE / "recipe.yaml"))
    model = make_model(plan.architecture, plan.vocabulary, plan.seed)
    count = sum(weight.numel() for weight in model.parameters())
    assert count <= 8_000_000 and 2 * count <= 11_500_000, (
        "two bytes each, and the tokenizer beside them"
    )
    assert plan.architecture["max_position_embeddings"] >= 2048
    second = plan.first_phase
    assert rate(plan, 0) < 0.1 and rate(plan, second // 2) == 1.0 and rate(plan, second - 1) == 0.02
    assert rate(plan, second) == plan.second_rate < 1.0 and rate(plan, plan.steps - 1) == 0.02


def test_a_word_has_the_same_tokens_wherever_it_stands(trained: Path) -> None:
    tokenizer = Tokenizer.load(trained)
    for word in ("lantern", "zqxv", "42", "k9"):
        own = tokenizer.encode(word)
        for before, after in ((" ", " "), ('{"', '": "'), ('": "', '"}'), ("_", "("), ("\n", ".")):
            around = tokenizer.encode(before + word + after)
            assert around[len(tokenizer.encode(before)) :][: len(own)] == own, (before, word)


def test_any_text_survives_the_tokenizer(trained: Path) -> None:
    tokenizer = Tokenizer.load(trained)
    for text in (
        "把“灯”倒过来写。",
        "naïve\t🙂 \x00",
        '{"a": {"b": [1, -2.5, null]}}',
        "    return x  # ok",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("1234")) == 4


def test_only_what_a_model_samples_counts_in_full_and_mistakes_do_not(trained: Path) -> None:
    chat = Chat(Tokenizer.load(trained))
    one = next(
        found
        for found in map(lambda n: row(0, n), itertools.count())
        if found.family == "corrected"
    )
    ids, weights = encode(chat, one, 0.1, 4096)
    said = chat.decode(ids[weights == 1.0].tolist())
    mistake = next(m for m in one.messages if m["role"] == "assistant")
    assert said.count("<|im_end|>") == 2 and said.endswith(
        str(one.messages[-1]["content"]) + "<|im_end|>"
    )
    assert chat.assistant_text(Message(**mistake)) not in said


def test_the_command_trains_and_resumes(cli: Cli) -> None:
    recipe = cli.folder / "a-copy"
    shutil.copytree(RECIPE, recipe)
    fields = {key: value for key, value in dataclasses.asdict(SMALL).items() if key != "extra"}
    (recipe / "recipe.yaml").write_text(json.dumps(fields), encoding="utf-8")
    own = ("--recipe", str(recipe))
    cli.json("sft", "model", *own, "--steps", "1")
    cli("sft", "model", *own, "--steps", "2", code=2, said="not empty")
    cli("sft", "model", *own, "--steps", "2", "--resume")
    cli("sft", "new", *own, "--resume", code=2, said="No stopped training")
    cli("sft", "new", *own, "--tool-rate", "0.5", code=2, said="tool_rate")
    (recipe / "recipe.yaml").write_text("architecture: {}\nstep: 3\n", encoding="utf-8")
    cli("sft", "bad", *own, code=2, said=("recipe.yaml", "'step'"))
