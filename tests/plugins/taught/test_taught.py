"""Who taught a token, in a real training of the bundled model."""

import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl_cli.commands import main
from agentrl_cli.learning.forward import logprobs
from agentrl_cli.learning.packing import pack
from agentrl_cli.plugins.taught.trace import (
    Teacher,
    Trace,
    reaches,
    read_step,
    repeat,
    teachers,
    token_segment,
)
from agentrl_cli.plugins.taught.weights import RunWeights
from agentrl_cli.store import Store
from agentrl_cli.types import Origin
from tests.helpers.cli import Cli

REWARD = """

import zlib


def tests(episode, ctx):
    return float(zlib.crc32(episode.tokens.ids.tobytes()) % 2)


REWARDS = {"tests": tests}
"""
SETS = ("rollout.group_size=4", "rollout.prompts_per_step=2", "rollout.max_turns=1", "rollout.max_new_tokens=24",
        "train.eval=0", "train.save=1", "train.schedule.warmup_steps=0", "train.lr=0.001")  # fmt: skip


TRAIN = ("train", "--steps", "2", *(word for one in SETS for word in ("--set", one)))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taught") / "p"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        assert main(["init", "code-task", "p", "--yes"]) == 0
        patch.chdir(folder)
        task, settings = folder / "task.py", folder / "task.yaml"
        task.write_text(task.read_text() + REWARD)
        lines = settings.read_text().splitlines(keepends=True)
        settings.write_text("".join(one for one in lines if "weight: 0.1" not in one))
        assert main([*TRAIN]) == 0
    return folder


def sampled(project: Path) -> tuple[str, int]:
    """An episode of the last step and its assistant turn."""
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        row = store.episodes.rows(store.episodes.ids("step:2 kind:train fact:trained", "time"))[0]
        return row.id, store.episodes.get(row.id).turns[-1].index


def test_the_first_gradients_act_longest() -> None:
    """Moments of β = 1/2: after one step g1; after two (g1 / 4 + g2 / 2) / (1 - 1/4)."""
    assert reaches({1: 1.0, 2: 1.0}, 0.5) == pytest.approx({1: 1 + 1 / 3, 2: 2 / 3})
    assert reaches({3: 0.2, 4: 0.1}, 0.0) == {3: 0.2, 4: 0.1}


def test_two_forwards_measure_the_dot_product_of_both_gradients(project: Path) -> None:
    id, turn = sampled(project)
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run = store.runs.training("last")
        weights = RunWeights(store, run, project)
        table, lost = read_step(store, run, 1)
        assert table is not None and lost == 0
        segment = token_segment(store.episodes.get(id), turn, 0)
        weights.put(1)
        toward = weights.direction(segment, 1)
        unit = torch.cat([one.flatten() for one in toward.change]) * toward.unit
        bundles = [n for n, one in enumerate(table.bundles) if one]
        out = logprobs(weights.model, pack(table.segments(bundles)), temperature=1.0).logp
        rows = np.concatenate([table.rows([m]) for b in bundles for m in table.bundles[b]])
        loss = (out * torch.tensor(table.columns.advantage[rows], dtype=out.dtype)).sum()
        grads = torch.autograd.grad(loss, weights.trained, allow_unused=True)
        flat = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                          for g, p in zip(grads, weights.trained, strict=True)])  # fmt: skip
        (slope,) = weights.slopes([table], toward)
        groups = list(teachers(table, slope))
    assert sum(one.raised for one in groups) == pytest.approx(float(flat @ unit), rel=0.02)
    assert len({one.group for one in groups}) == len(groups)


def test_a_direction_leaves_out_what_the_optimizer_has_not_moved(project: Path, cli: Cli) -> None:
    """An adapter's B begins at zero, so A has no gradient in the first step."""
    cli.folder = project
    cli(*TRAIN, "--set", "adapter.enabled=true")
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run = store.runs.training("last")
        weights = RunWeights(store, run, project)
        found = store.episodes.rows(store.episodes.ids("step:2 fact:trained", "time", run.id))
        episode = store.episodes.get(found[0].id)
        weights.put(1)
        toward = weights.direction(token_segment(episode, episode.turns[-1].index, 0), 1)
    names = [name for name, p in weights.model.named_parameters() if p.requires_grad]
    moved = {name for name, one in zip(names, toward.change, strict=True) if one.any()}
    assert moved == {name for name in names if "lora_B" in name}


def test_the_command_names_groups_and_a_training_leaves_them_out(project: Path, cli: Cli) -> None:
    cli.folder = project
    id, turn = sampled(project)
    found = cli.json("why", f"{id}@t{turn}.0")
    assert list(found["probabilities"]) == ["0", "1", "2"] and found["lost"] == 0
    assert all(0 < p < 1 for p in found["probabilities"].values())
    text = cli("why", f"{id}@t{turn}.0")
    assert "base" in text and (found["command"] in text or "never rose" in text)
    cli("why", f"{id}@t0.0", code=2, said="did not sample")
    cli("why", f"{id}@t{turn}.999", code=2, said="no token 999")
    group = found["groups"][0]["group"]
    assert shlex.split(found["command"])[:3] == ["agentrl", "train", "--config"]
    cli(*shlex.split(found["command"])[1:-1], f"algo.skip.groups=[{group}]")
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        first, run = store.runs.all()[-1], store.runs.training("last")
        assert {
            row.group_id for row in store.episodes.used("fact:skipped:unused", "time", run.id)
        } == {group}
        first.config["algo"]["skip"]["groups"] = [group]
        assert run.config == first.config, "another training of the same settings"
        again = repeat(Trace({}, 0, 1, [Teacher("000002-001", 2, "", "", 1.0)], 0), run)
        assert again.endswith(f"'algo.skip.groups=[{group},000002-001]'")


def test_a_segment_ends_at_its_turn_and_trains_one_token(project: Path) -> None:
    id, turn = sampled(project)
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        episode = store.episodes.get(id)
    segment, own = token_segment(episode, turn, 1), episode.turns[turn]
    assert len(segment.ids) == own.end and segment.trained.sum() == 1
    assert segment.trained[own.start + 1] and episode.tokens.origin[own.start + 1] == Origin.MODEL


def test_a_step_without_a_gradient_is_no_error(project: Path, cli: Cli) -> None:
    cli.folder = project
    id, turn = sampled(project)
    with closing(sqlite3.connect(project / "runs" / "agentrl.db")) as db, db:
        db.execute("UPDATE steps SET metrics = json_set(metrics, '$.grad_norm', 0.0)")
    assert cli.json("why", f"{id}@t{turn}.0")["groups"]
