"""The recipe of tiny-tools: its data, tokenizer and size, and a training that stops and resumes; no pack is in it."""

import dataclasses
import hashlib
import itertools
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from agentrl_cli import Chat, Tokenizer, load_pack
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import UsageError
from agentrl_cli.models.load import require_undamaged
from agentrl_cli.paths import find_pack, pack_names
from agentrl_cli.registry import load_file
from agentrl_cli.sft.from_nothing import make_model
from agentrl_cli.sft.recipe import RecipeRun
from agentrl_cli.types import Message
from recipes.tiny_tools.recipe import Plan, encode, train
from recipes.tiny_tools.rows import Row
from recipes.tiny_tools.sessions import bind
from recipes.tiny_tools.stream import drill, row
from recipes.tiny_tools.words import HELD_OUT
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
    steps=4,
    rows=3,
    warmup=2,
    vocabulary=400,
    texts=40,
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
    assert not train(SMALL, run(folder, report=report, resume=True, stopped=lambda: len(seen) == 3))
    assert train(SMALL, run(folder, report=report, resume=True))
    assert seen == [(step, 4) for step in (1, 2, 3, 4)]
    assert (folder / "model.safetensors").read_bytes() == (
        trained / "model.safetensors"
    ).read_bytes()


def test_compiling_without_a_compiler_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match="no C\\+\\+ compiler no-such-compiler here") as error:
        train(dataclasses.replace(SMALL, compile=True), run(tmp_path / "model"))
    assert "`compile: false`" in error.value.hint and not (tmp_path / "model").exists()


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
    plan = dataclasses.replace(SMALL, steps=16, rows=3, lr=0.02)
    train(plan, run(tmp_path / "m", report=lambda step, steps, loss: losses.append(loss)))
    assert sum(losses[-3:]) < 0.75 * sum(losses[:3])


def test_the_shipped_plan_fits_its_limits() -> None:
    plan = Plan(**load_yaml(RECIPE / "recipe.yaml"))
    model = make_model(plan.architecture, plan.vocabulary, plan.seed)
    count = sum(weight.numel() for weight in model.parameters())
    assert count <= 8_000_000 and 2 * count <= 11_500_000, (
        "two bytes each, and the tokenizer beside them"
    )
    assert plan.architecture["max_position_embeddings"] >= 2048


def test_questions_name_their_arguments_in_every_order() -> None:
    rng = random.Random(0)
    orders: Counter[tuple[str, ...]] = Counter()
    one = next(
        tool
        for tool in iter(lambda: bind(rng), None)
        if len(tool.named) == 2
        and all(p.default is None for p in tool.tool.parameters)
        and {p.schema["type"] for p in tool.tool.parameters} == {"integer"}
    )
    first, second = (parameter.name for parameter in one.tool.parameters)
    for _ in range(200):
        question, arguments = one.ask(rng, zh=False)
        said = re.findall(r"-?\d+", question)
        assert sorted(said) == sorted(str(value) for value in arguments.values())
        if arguments[first] != arguments[second]:
            orders[tuple(n for v in said for n in arguments if str(arguments[n]) == v)] += 1
    assert min(orders[first, second], orders[second, first]) > 60


def test_any_text_survives_the_tokenizer_and_a_word_has_the_same_tokens_everywhere(
    trained: Path,
) -> None:
    tokenizer = Tokenizer.load(trained)
    for word in ("lantern", "zqxv", "42", "k9"):
        own = tokenizer.encode(word)
        for before, after in ((" ", " "), ('{"', '": "'), ('": "', '"}'), ("_", "("), ("\n", ".")):
            around = tokenizer.encode(before + word + after)
            assert around[len(tokenizer.encode(before)) :][: len(own)] == own, (before, word)
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


def test_the_command_trains_and_resumes_and_only_the_number_of_steps_may_change(cli: Cli) -> None:
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
    (recipe / "recipe.yaml").write_text(json.dumps({**fields, "lr": 1.0}), encoding="utf-8")
    cli("sft", "model", *own, "--steps", "3", "--resume", code=2, said="another lr")
    (recipe / "recipe.yaml").write_text("architecture: {}\nstep: 3\n", encoding="utf-8")
    cli("sft", "bad", *own, code=2, said=("recipe.yaml", "'step'"))


ROOT = Path(__file__).resolve().parents[2]
SOME = 4000
PLAN = Plan(**load_yaml(ROOT / "recipes" / "tiny_tools" / "recipe.yaml"))
ROWS = "59cd2712a1d1abc2c219ae2aad35bcb9218aa87b39a17610bd42b967e6ebc9a9"
# Tools of packs that the data may have by name: code-task's, with programs of other wordings, and
# that of shapes-task, whose model is another.
SHARED = {"run_python", "crop"}


@cache
def drawn() -> list[Row]:
    return [row(PLAN.seed, number) for number in range(SOME)]


def calls(one: Row) -> Iterator[tuple[int, str, dict[str, Any]]]:
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
    wanted = "one conversion choose list record two_steps chain parallel corrected fails say read"
    assert all(
        families[name] > 10
        for name in f"{wanted} greeting abstain look_up expression program loaded secret function".split()
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
    for one in drawn():
        if one.family not in (
            "one",
            "conversion",
            "choose",
            "fails",
            "list",
            "two_steps",
            "chain",
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
    for one in [one for one in drawn() if one.family == "corrected"]:
        assert one.muted == {0}
        first, second = (arguments for _, _, arguments in calls(one))
        names = [name for _, name, _ in calls(one)]
        assert first != second or names[0] != names[1]
        answered = next(message for message in one.messages if message["role"] == "tool")["content"]
        assert answered.startswith(("Error: ", "Bad tool call: "))


def test_no_row_of_a_pack_is_in_it() -> None:
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
