"""Supervised fine-tuning: demonstrations, drills, recipes by path, that a seed decides the weights.

On the store's best episodes: which ones, by their very ids; training goes on from the result.
"""

import csv
import dataclasses
import itertools
import json
import os
import random
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli import Chat, Outcome, Store, Tokenizer, load_pack
from agentrl_cli.config.models import ModelConfig
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import ConfigError, DataError, NotFound, UsageError
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.packing import Segment
from agentrl_cli.models.load import load_model
from agentrl_cli.paths import bundled_model, packs_dir
from agentrl_cli.sft import from_file
from agentrl_cli.sft import train as sft
from agentrl_cli.sft.demonstrations import (
    Lesson,
    Recipe,
    demonstrations,
    drill,
    encode,
    parse_recipe,
)
from agentrl_cli.sft.from_store import batches, choose
from agentrl_cli.sft.recipe import RecipeRun, find_recipe
from agentrl_cli.sft.train import _backward, lessons, make, use_recipe
from agentrl_cli.types import supports
from tests.helpers.cli import Cli
from tests.helpers.train import (
    TASK_PY,
    VOCABULARY,
    episodes_of,
    train_here,
    write_model,
    write_pack,
    write_project,
)
from tests.helpers.trees import episode, three_leaves

SMALL = Recipe(
    packs={"echo-task": 1.0},
    steps=3,
    rows=4,
    lr=3e-3,
    muon_lr=0.02,
    drills=2,
    vocabulary=320,
    texts=60,
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
    hi, more = ({"role": "assistant", "content": text} for text in ("Hi.", "More."))
    for talk in ([hi, task.prompt[-1], hi], [task.prompt[-1], hi, more]):
        whole, full = chat.conversation(talk), chat.render(talk)
        assert chat.decode(whole.ids) == chat.decode(full.ids).rstrip("\n")


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


def test_lessons_come_first_each_with_its_own_families_and_tool_rate(tmp_path: Path) -> None:
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
    shown = DEMONSTRATIONS.replace("generate", "_").replace('row["answer"]', '"5"')
    mixed = write_pack(tmp_path / "mixed", code=TASK_PY + shown)
    with (mixed / "data" / "train.jsonl").open("a") as file:
        file.write('{"id": "x", "prompt": "Go."}\n')
    recipe = dataclasses.replace(recipe, packs={"bandit": 1.0})
    drawn = demonstrations(recipe, {"bandit": load_pack(mixed)}, 0, ["even"])
    assert {row["family"] for _, row, _ in itertools.islice(drawn, 12)} == {"even"}
    (mixed / "task.py").write_text(TASK_PY + DEMONSTRATIONS)
    with pytest.raises(ConfigError, match="bandit generates no rows of even"):
        next(demonstrations(recipe, {"bandit": load_pack(mixed)}, 0, ["even"]))


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


def _tiny() -> Tokenizer:
    return Tokenizer.load(bundled_model())


OWN = """
import json
import os

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


def test_the_bundled_models_recipes_go_by_their_names_and_a_bad_one_is_named(
    tmp_path: Path,
) -> None:
    recipes = packs_dir().parent / "recipes"
    assert find_recipe("tiny-tools") == recipes / "tiny_tools" / "recipe.yaml"
    agent = find_recipe("tiny-agent")
    assert agent == recipes / "tiny_agent" / "recipe.yaml"
    assert {*parse_recipe(load_yaml(agent), agent).packs} == {"code-task", "calc-task", "echo-task"}
    with pytest.raises(NotFound, match="tiny-other is not a recipe") as found:
        find_recipe("tiny-other")
    assert "recipes/tiny_tools of a checkout" in found.value.hint
    for bad, said in (
        ({"steps": 3}, r"bad\.yaml is not a recipe.*packs"),
        ({"packs": {}, "step": 3}, r"No key in .*bad\.yaml named .step."),
        ({"packs": ["echo-task"]}, r"bad\.yaml\.packs: "),
        ({"packs": {}, "lessons": [{"steps": "many"}]}, r"bad\.yaml\.lessons\.0\.steps: "),
        ({"packs": {}, "lessons": [{"steps": 1, "famlies": []}]}, r"lessons\.0\.famlies: "),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_recipe(bad, tmp_path / "bad.yaml")
    read = parse_recipe(
        {"packs": {}, "lr": "3e-4", "lessons": [{"steps": 2}], "adapter": None, "drills": None},
        tmp_path,
    )
    assert (read.lr, read.lessons[0].steps) == (3e-4, 2), "YAML reads 3e-4 as a text"


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
    os.mkfifo(tmp_path / "rows.jsonl")  # `--data <(zcat rows.gz)`
    with ThreadPoolExecutor() as pool:
        read = pool.submit(from_file.read, tmp_path / "rows.jsonl")
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        ((messages, schemas),) = read.result()
    assert messages[-1]["role"] == "assistant" and messages[-1]["content"] in ("b", "5")
    assert bool(schemas) == (row.get("conversations", [None])[0] is SYSTEM)
    calls = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls") or ()]
    assert calls in ([], [{"expression": "2+3"}])
    (tmp_path / "lines.json").write_text(json.dumps(row) + "\n")
    (tmp_path / "rows.json").write_text(json.dumps([row], indent=1))
    arrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    names = ["lines.json", "rows.json", "rows.parquet"]
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()
    }
    if not isinstance(row.get("completion"), list):  # that column of texts has texts
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            csv.writer(file).writerows([texts, texts.values()])
        parquet.write_table(arrow.Table.from_pylist([texts]), tmp_path / "no-ending")
        names += ["rows.csv", "no-ending"]
    parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    for name in names:
        assert from_file.read(tmp_path / name) == [(messages, schemas)], name


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "a row to learn from has conversations.*this one has text"),
        ({"prompt": "a", "completion": None}, "a row to learn from .*this one has prompt"),
        ({"instruction": "a", "output": None}, "a row to learn from .*this one has instruction"),
        ({"prompt": 3, "completion": "b"}, "a conversation must be a list"),
        (
            {"conversations": [{"from": ["me"], "value": "a"}, {"from": "gpt", "value": "b"}]},
            r"the role of message 1 must be a text, not \['me'\]",
        ),
    ],
)
def test_a_row_that_cannot_be_learned_from_names_its_line(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    lines = (json.dumps(one) for one in ({"prompt": "a", "completion": "b"}, row))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"rows.jsonl:2: {said}"):
        from_file.read(tmp_path / "rows.jsonl")


# --- the store's best episodes ---


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of the bandit whose store holds a training of three steps."""
    folder = tmp_path_factory.mktemp("rft")
    model = write_model(folder / "model")
    train_here(folder / "project", model, train={"steps": 3})
    return write_project(folder / "project", model)


def hash_of(store: Store) -> str:
    return store.episodes.rows(store.episodes.ids("", limit=1))[0].tokenizer


def test_branches_of_an_episode_are_segments_that_train_each_token_once() -> None:
    one = episode(three_leaves())
    ((segments,),) = (next(batches([one], 1, 0)),)
    assert [s.ids[s.trained].tolist() for s in segments] == [[20, 21, 22], [23, 24], [25]]


def test_the_best_of_each_task(project: Path) -> None:
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        every = [e for e in episodes_of(store, store.runs.all()[0]) if e.outcome is not None]
        for best_of in (1, 2):
            found = choose(store, "kind:train", hash_of(store), best_of=best_of)
            for task in {e.task_id for e in every}:
                mine = [e for e in every if e.task_id == task]
                kept = [e for e in found if e.task_id == task]
                different = {e.tokens.ids.tobytes() for e in mine}
                assert len(kept) == min(best_of, len(different))
                taken = {k.tokens.ids.tobytes() for k in kept}
                left = [e.graded_reward for e in mine if e.tokens.ids.tobytes() not in taken]
                assert not left or min(e.graded_reward for e in kept) >= max(left)
        solved = [e for e in every if e.outcome is Outcome.SOLVED]
        if solved:
            assert {e.id for e in choose(store, "", hash_of(store))} <= {e.id for e in solved}
        with pytest.raises(NotFound, match="No episode to train on matches 'step:99'"):
            choose(store, "step:99", hash_of(store))
        with pytest.raises(UsageError, match="another tokenizer"):
            choose(store, "kind:train", "0" * 64)


def test_an_episode_that_no_model_can_have_sampled_is_left_out(
    project: Path, tmp_path: Path
) -> None:
    """One id outside the vocabulary ended the whole fine-tuning with an IndexError."""
    db = tmp_path / "a.db"
    with (
        closing(sqlite3.connect(project / "runs" / "agentrl.db")) as source,
        closing(sqlite3.connect(db)) as copy,
        copy,
    ):
        source.backup(copy)
    lines: list[str] = []
    with Store.open(db) as store:
        first, second = choose(store, "kind:train", hash_of(store))[:2]
        turn = first.turns[-1]
        tokens = first.tokens.slice(turn.start, turn.end)
        tokens.ids[0] = 5_000_000
        store.episodes.add_turn(first.id, turn, tokens)
        store.write("UPDATE episodes SET kind='eval', split='test' WHERE id=?", (second.id,))
        found = choose(
            store, "step:1..", hash_of(store), vocabulary=VOCABULARY, narrate=lines.append
        )
    kept = [e.id for e in found]
    assert (
        first.id not in kept
        and second.id in kept
        and "5000000" in lines[1]
        and first.id in lines[1]
        and re.match(r"1 of \d+ episodes are attempts of evaluations", lines[0])
    )


def test_ids_are_trained_as_they_were_sampled(project: Path) -> None:
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        episodes = choose(store, "kind:train", hash_of(store))
    count = len(episodes)
    stream = batches(episodes, count, seed=1)
    batch = next(stream)
    drawn = [segment.ids.tobytes() for group in batch for segment in group]
    assert sorted(drawn) == sorted(e.tokens.ids.tobytes() for e in episodes), "each once an epoch"
    assert drawn != [segment.ids.tobytes() for group in next(stream) for segment in group]
    masks = {e.tokens.ids.tobytes(): e.tokens.trained_mask for e in episodes}
    assert all(np.array_equal(s.trained, masks[s.ids.tobytes()]) for group in batch for s in group)
    again = next(batches(episodes, count, seed=1))
    assert [s.ids.tobytes() for g in again for s in g] == drawn
    few = batches(episodes, 3, seed=1)
    assert sum(len(group) for _ in range(4) for group in next(few)) == 12
    # Whatever `rollout.truncation.replay` kept of the draws.
    known = episodes[0].tokens
    drawn_from = supports([np.array([i], np.int32) for i in known.ids])
    replayed = episodes[0].with_(tokens=dataclasses.replace(known, support=drawn_from))
    assert next(batches([replayed], 1, seed=1))[0][0].support is None


def test_micro_batches_add_up(project: Path) -> None:
    folder = Path(json.loads((project / "agentrl.yaml").read_text())["model"]["name"])
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        groups = [[Segment.of(e)] for e in choose(store, "kind:train", hash_of(store))[:6]]
    gradients = []
    for budget in (None, 64):
        model = load_model(folder, ModelConfig(device="cpu", dtype="float32"), base=folder)
        loss = _backward(model, groups, budget)
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
        _, out = trained_logprobs(model, groups)
        assert loss == pytest.approx(-float(out.logp.mean().detach()), abs=1e-5)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)


@pytest.mark.parametrize("lora", [False, True])
def test_a_cold_start_and_then_training(project: Path, cli: Cli, lora: bool) -> None:
    out = cli.folder / ("cold-lora" if lora else "cold")
    more = ["--set", "adapter.enabled=true", "--set", "adapter.r=4"] if lora else []
    where = ["--project", str(project), *more]
    words = f"sft {out.name} --from-store kind:train --best-of 1 --steps 30 --lr 0.02".split()
    made = cli.json(*words, *where, said=f"tagged sft-{out.name}")
    assert made["loss"] < (5.45 if lora else 4.5), "a uniform guess costs ln 261 = 5.56"
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        tagged = store.episodes.rows(store.episodes.ids(f"tag:sft-{out.name}"))
        best = choose(store, "kind:train", hash_of(store), best_of=1)
        assert {row.id for row in tagged} == {e.id for e in best}
    assert (out / "adapter_model.safetensors").is_file() is lora
    lines = cli("train", "--model", str(out), "--steps", "1", "--json", *where).splitlines()
    assert json.loads(lines[-1])["status"] == "finished" and json.loads(lines[0])["step"] == 1


@pytest.fixture
def batches_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int | None]]:
    """The texts and the budget of each step, as they are trained; no output shows what a step was made of."""
    seen: list[tuple[list[str], int | None]] = []
    inner = sft._backward

    def look(model: Any, groups: list[list[Segment]], budget: int | None) -> float:
        rows = [segment.ids for group in groups for segment in group]
        texts = [bytes(i - 5 for i in ids if i >= 5).decode("latin1") for ids in rows]
        seen.append((texts, budget))
        return inner(model, groups, budget)

    monkeypatch.setattr(sft, "_backward", look)
    return seen


def test_episodes_and_demonstrations_in_one_step(
    project: Path, cli: Cli, batches_seen: list[tuple[list[str], int | None]]
) -> None:
    (project / "task.py").write_text((project / "task.py").read_text() + DEMONSTRATIONS)
    where = ["--project", str(project)]
    words = "sft both --from-store kind:train --demonstrations 0.25 --steps 2 --lr 0.01".split()
    cli(*words, *where)
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        count = min(12, len(choose(store, "kind:train", hash_of(store))))
    assert [len(texts) for texts, _ in batches_seen] == [count + 4] * 2
    assert len({text for texts, _ in batches_seen for text in texts[-4:]}) > 1, "fresh ones"


def test_demonstrations_have_the_texts_of_the_project(
    cli: Cli, model: Path, batches_seen: list[tuple[list[str], int | None]]
) -> None:
    folder = write_project(cli.folder, model, task={"packs": ["."], "prompts": "prompts.yaml"})
    (folder / "prompts.yaml").write_text('system: Be brief.\ntask.prompt: "Now: {prompt}"\n')
    (folder / "task.py").write_text((folder / "task.py").read_text() + DEMONSTRATIONS)
    cli("sft", "cold", "--steps", "1")
    ((texts, _),) = batches_seen
    # The tokenizer's first ids are the bytes from ! to ~.
    said = ["".join(chr(ord(c) + 33) if ord(c) < 94 else " " for c in text) for text in texts]
    assert all("Be brief." in text and "Now: say " in text for text in said)


def test_a_cold_start_from_demonstrations_alone(
    cli: Cli, model: Path, batches_seen: list[tuple[list[str], int | None]]
) -> None:
    folder = write_project(cli.folder, model, train={"token_budget": 64})
    words = "--steps 12 --lr 0.02".split()
    cli("sft", "none", *words, code=2, said="has no demonstrations")
    code, rows = (folder / "task.py").read_text(), folder / "data" / "train.jsonl"
    (folder / "task.py").write_text(code + "\n\ndef solve(row):\n    return []\n")
    given = rows.read_text()
    rows.write_text("")
    cli("sft", "none", *words, code=2, said="has no rows to train on")
    rows.write_text(given)
    (folder / "task.py").write_text(code + DEMONSTRATIONS)
    loss = cli.json("sft", "cold", *words)["loss"]
    assert loss < 5.2, "a uniform guess costs ln 261 = 5.56"
    assert {budget for _, budget in batches_seen} == {64}
    lines = cli("train", "--model", "cold", "--steps", "1", "--json").splitlines()
    assert json.loads(lines[-1])["status"] == "finished"
    again = cli.json("sft", "warmer", "--steps", "1", "--model", "bandit-grpo@last")
    assert again["loss"] < loss
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    batches_seen.clear()
    cli("sft", "few", "--data", "rows.jsonl", "--epochs", "4")
    assert [len(texts) for texts, _ in batches_seen] == [3] * 4, "fewer rows than a step holds"


DEMONSTRATIONS = """

def generate(seed):
    while True:
        seed += 1
        yield {"prompt": f"say {seed}", "answer": str(seed)}


def demonstrate(row, rng, tool_rate):
    return [{"role": "assistant", "content": row["answer"]}]
"""


def test_options_that_do_not_go_together(project: Path, cli: Cli) -> None:
    for more, said in (
        (["--best-of", "2", "--recipe", "tiny-agent"], "--recipe"),
        (["--recipe", "tiny-agent", "--model", "tiny"], "--model does nothing with --recipe"),
        (["--count", "8"], "--count and --group are of the attempts"),
        (["--epochs", "8"], "--epochs counts passes over"),
        (["--best-of", "2", "--steps", "9", "--epochs", "1"], "--epochs counts passes over"),
        (["--best-of", "2", "--tool-rate", "0.5"], "--tool-rate"),
        (["--data", "x.jsonl", "--tool-rate", "0.5"], "--tool-rate"),
        (["--demonstrations", "0.5"], "needs episodes from the store"),
    ):
        cli("sft", "x", *more, "--project", str(project), code=2, said=said)
    (cli.folder / "rows.jsonl").write_text("{}")
    for place in (
        "rows.jsonl",
        "rows.jsonl/below",
        os.devnull,
    ):  # reported before anything is trained
        for force in ([], ["--force"]):
            words = ("sft", place, "--best-of", "2", *force, "--project", str(project))
            cli(*words, code=2, said="is not a folder")
    assert (cli.folder / "rows.jsonl").read_text() == "{}"
