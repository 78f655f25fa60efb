"""Packs as folders, from scripts and with adapters; what a mistake in one says; the data of those that ship.

Rows are in test_rows.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from agentrl_cli import Config, Reward, Store, Task, load_config
from agentrl_cli.commands import main
from agentrl_cli.commands.common import open_project
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import (
    AgentRLError,
    ConfigError,
    DataError,
    EnvError,
    ModelError,
    NotFound,
)
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.models.merge import merge
from agentrl_cli.models.save import save_model
from agentrl_cli.paths import bundled_model, pack_names, packs_dir
from agentrl_cli.policies.load import load_policy
from agentrl_cli.sft.demonstrations import Recipe, demonstrations, parse_recipe
from agentrl_cli.sft.train import make
from agentrl_cli.tasks import Pack, draw_splits, load_pack, load_packs, question
from agentrl_cli.trainer.memory_plan import plan
from agentrl_cli.types.content import content_text
from tests.helpers.train import after_training, write_model

YAML = """\
name: words
description: Say a word.
system: Be brief.
sandbox: false
tools: [calculator, shout]
rewards:
  exact: {weight: 2.0, primary: true}
  brief: 0.5
families: {train: [one], heldout: [two]}
defaults: {train: {lr: 3.0e-4}}
"""
CODE = """\
def shout(text: str) -> str:
    '''Shout.

    Args:
        text: What.
    '''
    return text.upper()


def exact(episode, ctx):
    return float(ctx.final_text == ctx.task.data["answer"])


def brief(episode, ctx):
    return 1.0


def solve(row):
    return [{"role": "assistant", "content": row["answer"]}]


REWARDS = {"exact": exact, "brief": brief}
TOOLS = [shout]
"""
ROWS: list[dict[str, Any]] = [
    {"id": "a", "family": "one", "prompt": "Say ant.", "answer": "ant"},
    {
        "id": "b",
        "family": "two",
        "prompt": [{"role": "user", "content": "Say bee."}],
        "answer": "bee",
    },
    {"id": "c", "family": "one", "prompt": "Say cow.", "answer": "cow", "tools": ["shout"]},
    {
        "id": "d",
        "family": "one",
        "prompt": [{"role": "system", "content": "Own."}, {"role": "user", "content": "D"}],
    },
]


def write(folder: Path, yaml: str = YAML, code: str = CODE) -> Path:
    (folder / "data").mkdir(parents=True)
    (folder / "task.yaml").write_text(yaml)
    (folder / "task.py").write_text(code)
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_a_pack_and_its_rows_become_tasks(tmp_path: Path) -> None:
    pack = load_pack(write(tmp_path / "words"))
    assert (pack.name, pack.description, pack.system, pack.sandbox) == (
        "words",
        "Say a word.",
        "Be brief.",
        False,
    )
    assert [schema["function"]["name"] for schema in pack.schemas] == ["calculator", "shout"]
    assert [(r.name, r.weight, r.primary) for r in pack.rewards] == [
        ("exact", 2.0, True),
        ("brief", 0.5, False),
    ]
    assert pack.primary == "exact" and pack.defaults == {"train": {"lr": 3e-4}}
    assert [r.weight for r in pack.reweight({"brief": 0.0})] == [2.0, 0.0]
    shown = {
        task.id: (
            [(message["role"], message["content"]) for message in task.prompt],
            [tool.name for tool in pack.tools_of(task)],
        )
        for task in pack.tasks("train")
    }
    brief, both = ("system", "Be brief."), ["calculator", "shout"]
    assert shown == {
        "words/a": ([brief, ("user", "Say ant.")], both),
        "words/b": ([brief, ("user", "Say bee.")], both),
        "words/c": ([brief, ("user", "Say cow.")], ["shout"]),
        "words/d": ([("system", "Own."), ("user", "D")], both),  # its own system message stays
    }
    a, b, *_ = pack.tasks("train")
    assert (a.pack, a.family, a.split, a.data["answer"]) == ("words", "one", "train", "ant")
    assert a.data["prompt"] == "Say ant.", "a text"
    assert pack.solution(a) == [{"role": "assistant", "content": "ant"}]
    assert pack.tasks("train", families=["two"]) == [b] and pack.tasks("train", limit=2) == [a, b]
    with pytest.raises(NotFound, match="'tow'"):
        pack.tasks("train", families=["tow"])
    with pytest.raises(NotFound, match="'trian'") as caught:
        pack.tasks("trian")
    assert "train" in caught.value.hint
    with pytest.raises(NotFound, match="'shuot'"):
        pack.tools_of(Task("x", "words", "", "train", (), tools=("shuot",)))


def test_a_pack_in_a_script() -> None:
    def right(episode: Any, ctx: Any) -> float:
        return 1.0

    pack = Pack.of(
        "mine",
        [{"prompt": "p"}, {"prompt": "q", "id": "own"}],
        [Reward("right", right)],
        tools=["submit"],
    )
    assert [task.id for task in pack.tasks("train")] == [
        "mine/0000",
        "mine/own",
    ] and pack.primary == "right"
    assert [task.split for task in pack.tasks("test")] == ["test", "test"]
    for rewards in ([], [Reward("a", right), Reward("b", right)]):
        with pytest.raises(ConfigError, match="exactly one primary"):
            Pack.of("mine", [{"prompt": "p"}], rewards)
    with pytest.raises(ConfigError, match="no `solve"):
        pack.solution(pack.tasks("train")[0])


NUMBER = "weight: Input should be a valid number"
FAMILIES = "families: {train: [one], heldout: [two]}"
WRONG_VALUES = (
    ("primary: true", "primary: maybe", "rewards.exact.primary: Input should be a valid boolean"),
    ("primary: true", "primary: 1", "exact.primary: Input should be a valid boolean (it is 1)"),
    ("weight: 2.0", "weight: lots", f"rewards.exact.{NUMBER} (it is 'lots')"),
    ("weight: 2.0", "weight: true", NUMBER),
    ("weight: 2.0", "weight: .nan", "weight: Input should be a finite number"),
    ("brief: 0.5", "brief: true", NUMBER),
    ("brief: 0.5", "brief: words", "rewards.brief must be a weight or a mapping"),
    ("sandbox: false", "sandbox: maybe", "sandbox must be true, false"),
    (FAMILIES, "families: 5", "`families` must be a mapping"),
    (FAMILIES, "families: {train: even}", "must map splits to lists"),
    ("defaults: {train: {lr: 3.0e-4}}", "defaults: [1]", "`defaults` must be a mapping"),
    ("sandbox: false", "sandbox: false\ndata: 5", "`data` must be a mapping"),
    *(
        ("sandbox: false", f"sandbox: false\nrow: {row}", "`row` must be a list of names")
        for row in ("answer", "[1]", "{answer: text}")
    ),
)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (("tools:", "tool:"), ConfigError, "tools"),
        (("tools: [calculator,", "tools: [5,"), ConfigError, "a tool is a name or a mapping"),
        (("calculator", "calculater"), NotFound, "calculator"),
        (("primary: true", "primary: false"), ConfigError, "exactly one"),
        (("primary: true", "primry: true"), ConfigError, "primry"),
        (("exact:", "exakt:"), NotFound, "exact"),
        (("brief: 0.5", "brief: {primary: true}"), ConfigError, "exactly one"),
        (("name: words", "name: [words"), ConfigError, "task.yaml:2: expected"),
        *((change, ConfigError, says) for *change, says in WRONG_VALUES),
    ],
)
def test_a_bad_task_yaml(
    tmp_path: Path, change: tuple[str, str], error: type[AgentRLError], says: str
) -> None:
    assert change[0] in YAML
    folder = write(tmp_path / "words", yaml=YAML.replace(*change))
    with pytest.raises(error) as caught:
        load_pack(folder)
    assert says in caught.value.message + caught.value.hint


def test_code_that_fails_is_named_with_its_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "words", code="x = 1\ny = x.nothing\n")
    with pytest.raises(EnvError, match=r"task\.py:2: AttributeError"):
        load_pack(folder)
    (folder / "task.py").unlink()
    with pytest.raises(NotFound, match=r"task\.py"):
        load_pack(folder)


def test_names_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "words")
    assert (
        load_pack("./words", base=tmp_path).name
        == load_pack(".", base=tmp_path / "words").name
        == "words"
    )
    with pytest.raises(NotFound) as caught:
        load_pack("calc-tsk")
    assert "calc-task" in caught.value.hint
    assert list(load_packs(["echo-task", "./words"], base=tmp_path)) == ["echo-task", "words"]
    with pytest.raises(ConfigError, match="Two packs are named 'words'"):
        load_packs(["./words", "words"], base=tmp_path)


def test_a_packs_own_limits_of_the_sandbox(tmp_path: Path) -> None:
    assert load_pack(write(tmp_path / "none")).session == {}
    some = YAML.replace("sandbox: false", "sandbox: {wall: 10, memory_mb: 2048, imports: [numpy]}")
    pack = load_pack(write(tmp_path / "some", some))
    assert pack.sandbox and dict(pack.session) == {
        "wall": 10.0,
        "memory_mb": 2048,
        "imports": ("numpy",),
    }
    assert pack.open_session(None) is None


# Bytes of a pack's adapter, its tokenizer included.
MOST = 1_000_000


def small(steps: int = 2) -> Recipe:
    adapter = {"r": 2, "alpha": 4}
    return Recipe(packs={"echo-task": 1.0}, steps=steps, rows=2, lr=1e-2, warmup=1, adapter=adapter)


@pytest.mark.parametrize(
    ("pack", "name"), {"sql-task": "tiny-sql", "search-task": "tiny-search"}.items()
)
def test_what_a_pack_brings(pack: str, name: str) -> None:
    folder = packs_dir() / pack / name
    files = {path.name: path for path in folder.iterdir()}
    assert sum(path.stat().st_size for path in files.values()) <= MOST
    assert {tensor.dtype for tensor in load_file(files["adapter_model.safetensors"]).values()} == {
        torch.float16
    }
    reported = json.loads(files["adapter_config.json"].read_text())
    assert reported["base_model_name_or_path"] == "tiny"
    for own in ("tokenizer.json", "chat_template.jinja"):
        assert files[own].read_bytes() == (bundled_model() / own).read_bytes()
    recipe = parse_recipe(yaml.safe_load((folder / "recipe.yaml").read_text()), folder)
    assert list(recipe.packs) == [pack] and recipe.adapter is not None
    assert (recipe.adapter["r"], recipe.adapter["alpha"]) == (reported["r"], reported["lora_alpha"])
    base = hashlib.sha256((bundled_model() / "model.safetensors").read_bytes()).hexdigest()
    assert recipe.extra["base_sha256"] == base, (
        "another bundled model: make the adapter again by its recipe"
    )
    assert yaml.safe_load((packs_dir() / pack / "task.yaml").read_text())["defaults"]["model"] == {
        "name": name
    }


def test_a_project_starts_from_the_packs_adapter_and_trains_it(tmp_path: Path) -> None:
    assert main(["init", "--min-level", "ns", "sql-task", str(tmp_path / "p")]) == 0
    config = open_project(tmp_path / "p").config
    assert config.model.name == "tiny-sql"
    loaded = load_policy(None, config, base=tmp_path / "p", trainable=True)
    assert loaded.folder == tmp_path / "p" / "tiny-sql"
    trained = [name for name, p in loaded.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert (
        main(["init", "--min-level", "ns", "sql-task", str(tmp_path / "q"), "--model", "tiny"]) == 0
    )
    assert open_project(tmp_path / "q").config.model.name == "tiny"


def test_without_a_project_the_packs_folder_is_named(tmp_path: Path) -> None:
    config, sources = load_config(sets=["task.packs=[search-task]"], base=tmp_path)
    assert Path(config.model.name) == packs_dir() / "search-task" / "tiny-search"
    assert sources["model.name"] == "pack:search-task"
    assert load_config(sets=["task.packs=[search-task]", "model.name=tiny"])[0].model.name == "tiny"


def test_a_recipe_makes_the_same_adapter_again(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make(dataclasses.replace(small(), seed=seed), tmp_path / name)
    weights = {name: (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    found = load_policy(str(tmp_path / "a"), Config(), base=tmp_path)
    assert found.hash == load_policy("tiny", Config(), base=tmp_path).hash
    with pytest.raises(ConfigError, match="neither `architecture` nor `adapter`"):
        make(dataclasses.replace(small(), adapter=None), tmp_path / "d")


def test_an_adapter_is_planned_for_on_its_base(tmp_path: Path) -> None:
    make(small(1), tmp_path / "a")
    found = plan(Config(), tmp_path / "a")
    fresh = plan(Config.model_validate({"adapter": {"enabled": True, "r": 2}}), bundled_model())
    assert (found.parameters, found.trainable) == (fresh.parameters, fresh.trainable)
    pulled = Config.model_validate({"algo": {"kl_coef": 0.1}})
    assert "reference" in plan(pulled, tmp_path / "a").update
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        plan(Config(), tmp_path / "a")


async def test_the_reference_is_what_the_training_started_from(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    start = tmp_path / "start"
    config = Config.model_validate(
        {
            "model": {"name": str(base), "device": "cpu"},
            "adapter": {"enabled": True, "r": 2},
            "seed": 1,
        }
    )
    loaded: Any = load_policy(None, config, base=tmp_path, trainable=True)
    with torch.no_grad():
        for name, weights in loaded.model.named_parameters():
            if "lora_B" in name:
                weights.normal_(0, 0.2)
    start.mkdir()
    save_model(loaded.model, base, start)
    sections: dict[str, Any] = {
        "algo": {"kl_coef": 0.1, "drop_zero_variance": False},
        "train": {"steps": 1, "lr": 1e-9},
        "deterministic": True,
    }
    async with after_training(tmp_path / "run", start, **sections) as (trainer, run):
        (row,) = trainer.store.runs.steps(run.id)
        with Store.open(trainer.store.path, readonly=True) as store:
            assert store.runs.get(run.name).model == str(start)
    assert abs(row["kl"]) < 1e-6, "nothing has moved yet"


def test_merged_it_is_the_same_model(tmp_path: Path) -> None:
    """Its adapter is on the tied head too, which must not change the embedding."""
    folder = packs_dir() / "sql-task" / "tiny-sql"
    done = merge(str(folder), tmp_path / "out", Config().model, base=tmp_path, dtype="float32")
    ids = torch.arange(5, 60)[None]
    wanted, whole = (
        load_policy(str(where), Config(), base=tmp_path).model(ids).logits
        for where in (folder, done.folder)
    )
    assert torch.allclose(wanted, whole, atol=1e-4)


# --- the packs that ship: their data is what their generators make ---

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
    assert pack.description and pack.rewards and (pack.dir / "README.md").is_file()
    built = {split: rows for split, rows in pack.module.build().items() if rows}
    assert {"train", "test"} <= set(built)
    families = {split: {task.family for task in pack.tasks(split)} for split in built}
    assert families["train"].isdisjoint(families.get("heldout", ()))
    for split, rows in built.items():
        asked = [
            (row["id"], row.get("prompt") or row["conversations"][1]["content"]) for row in rows
        ]  # conversations
        shown = [(t.data["id"], content_text(t.prompt[-1]["content"])) for t in pack.tasks(split)]
        assert shown == asked


def test_fields_are_declared_and_the_code_pack_is_as_large_as_promised() -> None:
    assert {name: load_pack(name).row for name in pack_names() if name in FIELDS} == FIELDS
    code = load_pack("code-task")
    assert len(code.tasks("train")) >= 400 and len(code.tasks("test")) >= 150


@pytest.mark.parametrize("name", ["sql-task", "parallel-task"])
async def test_the_check_finds_nothing_in_a_pack_that_ships(name: str) -> None:
    """Solutions, played by the real loop, are solved, and empty answers are not."""
    assert await check_pack(load_pack(name), None) == []


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
    few = cycle([{"prompt": "0"}, {"prompt": "1"}])
    with pytest.raises(DataError, match="The split b has 1 of 2 rows, and the next 100,000 drawn"):
        draw_splits({"a": 1, "b": 2}, lambda split, n: few)
