"""Fine-tuning on the store's best episodes: which ones, by their very ids; training goes on from the result."""

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli import Outcome, Store
from agentrl_cli.config.models import ModelConfig
from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.packing import Segment
from agentrl_cli.models.load import load_model
from agentrl_cli.sft import train as sft
from agentrl_cli.sft.from_store import batches, choose
from agentrl_cli.sft.train import _backward
from tests.helpers.cli import Cli
from tests.helpers.train import VOCABULARY, episodes_of, trainer_of, write_model, write_project
from tests.helpers.trees import episode, three_leaves


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of the bandit whose store holds a training of three steps."""
    folder = tmp_path_factory.mktemp("rft")
    model = write_model(folder / "model")

    async def train() -> None:
        async with trainer_of(folder / "project", model, train={"steps": 3}) as trainer:
            await trainer.train()

    asyncio.run(train())
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
    with sqlite3.connect(project / "runs" / "agentrl.db") as source, sqlite3.connect(db) as copy:
        source.backup(copy)
    lines: list[str] = []
    with Store.open(db) as store:
        first, second = choose(store, "kind:train", hash_of(store))[:2]
        turn = first.turns[-1]
        tokens = first.tokens.slice(turn.start, turn.end)
        tokens.ids[0] = 5_000_000
        store.episodes.add_turn(first.id, turn, tokens)
        store.flush()
        found = choose(
            store, "kind:train", hash_of(store), vocabulary=VOCABULARY, narrate=lines.append
        )
    kept = [e.id for e in found]
    assert (
        first.id not in kept
        and second.id in kept
        and "5000000" in lines[0]
        and first.id in lines[0]
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


def test_a_cold_start_from_demonstrations_alone(
    cli: Cli, model: Path, batches_seen: list[tuple[list[str], int | None]]
) -> None:
    folder = write_project(cli.folder, model, train={"token_budget": 64})
    words = "--steps 12 --lr 0.02".split()
    cli("sft", "none", *words, code=2, said="has no demonstrations")
    (folder / "task.py").write_text((folder / "task.py").read_text() + DEMONSTRATIONS)
    loss = cli.json("sft", "cold", *words)["loss"]
    assert loss < 5.2, "a uniform guess costs ln 261 = 5.56"
    assert {budget for _, budget in batches_seen} == {64}
    lines = cli("train", "--model", "cold", "--steps", "1", "--json").splitlines()
    assert json.loads(lines[-1])["status"] == "finished"


DEMONSTRATIONS = """

def generate(seed):
    while True:
        seed += 1
        yield {"prompt": f"say {seed}", "answer": str(seed)}


def demonstrate(row, rng, tool_rate):
    return [{"role": "assistant", "content": row["answer"]}]
"""


def test_options_that_do_not_go_together(project: Path, cli: Cli) -> None:
    (cli.folder / "table").write_bytes(b"PAR1\x15\x04")
    for more, said in (
        (["--best-of", "2", "--recipe", "tiny-agent"], "--recipe"),
        (["--best-of", "2", "--tool-rate", "0.5"], "--tool-rate"),
        (["--demonstrations", "0.5"], "needs episodes from the store"),
        (["--data", "rows.csv"], "agentrl init NAME --from rows.csv"),
        (["--data", "table"], "--data takes JSONL"),
    ):
        cli("sft", "x", *more, "--project", str(project), code=2, said=said)
    (cli.folder / "rows.jsonl").write_text("{}")
    for place in ("rows.jsonl", "rows.jsonl/below"):  # reported before anything is trained
        for force in ([], ["--force"]):
            words = ("sft", place, "--best-of", "2", *force, "--project", str(project))
            cli(*words, code=2, said="is not a folder")
    assert (cli.folder / "rows.jsonl").read_text() == "{}"
