"""Sampling beside the update: whole versions of the weights, bounded staleness, stragglers, resume."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli import Config, Hook
from agentrl_cli.config.models import LoraConfig, ModelConfig
from agentrl_cli.config.records import TrainerSettings
from agentrl_cli.errors import TrainingStopped
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.learning.update import Learner
from agentrl_cli.models.adapter import add_adapter, copy_trained, twin
from agentrl_cli.models.load import load_model
from agentrl_cli.policies.load import load_policy
from agentrl_cli.trainer.memory_plan import plan
from agentrl_cli.trainer.prefetch import Prefetcher, age_metrics, run_in_thread, stale
from agentrl_cli.types import Episode, Outcome, Sampling, Turn
from tests.helpers.train import (
    TASK_PY,
    after_training,
    episodes_of,
    trainer_of,
    write_pack,
)

SLOW = (
    TASK_PY
    + """

import asyncio
from agentrl_cli import Env
from agentrl_cli.envs.tool_env import Step

class Slow(Env):
    async def reset(self, task):
        await asyncio.sleep(DELAY)
        return list(task.prompt)

    async def step(self, turn):
        return Step()

def make_env(task):
    return Slow()
"""
)


def teacher_forced(
    weights: torch.nn.Module, ids: Sequence[int], start: int
) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        logits = (
            weights(torch.tensor([list(ids)])).logits[0, start - 1 : -1].float().log_softmax(-1)
        )
    return np.asarray(logits.gather(-1, torch.tensor(list(ids[start:]))[:, None])[:, 0])


@pytest.mark.parametrize("adapter", [False, True])
async def test_no_forward_sees_half_updated_weights(model: Path, adapter: bool) -> None:
    """Weights change in a thread while turns are sampled; each turn's log-probs are those of its own version.

    With a twin of the model, and with a second adapter on the same base.
    """
    torch.manual_seed(1)
    base = load_model(model, ModelConfig(dtype="float32"), base=model)
    trained: Any = add_adapter(base, LoraConfig(r=2), model) if adapter else base
    sampler = twin(trained)
    for ours, theirs in zip(trained.parameters(), sampler.parameters(), strict=True):
        assert (ours is theirs) == (not ours.requires_grad) and not theirs.requires_grad
    policy = LocalPolicy(sampler, context_length=256, version="v0")
    versions = {"v0": copy.deepcopy(trained)}
    turns: list[tuple[str, list[int], int, np.ndarray[Any, Any]]] = []

    async def episode(number: int) -> set[str]:
        ids, seen = [10 + number, 11, 12, 13], set[str]()
        for turn in range(6):
            sampling = Sampling(max_new_tokens=5, seed=100 * number + turn)
            out = await policy.generate(str(number), ids, sampling)
            said = [*ids, *out.ids.tolist()]
            turns.append((out.weights_version, said, len(ids), out.logp_policy))
            seen.add(out.weights_version)
            ids = [*said, 20 + turn]
            await asyncio.sleep(0.001 * number)
        await policy.release(str(number))
        return seen

    async def updates() -> None:
        for number in range(1, 4):
            await asyncio.sleep(0.01)
            await run_in_thread(lambda: shift(trained))
            versions[f"v{number}"] = copy.deepcopy(trained)
            await policy.swap(f"v{number}", lambda: copy_trained(trained, sampler))
            trained.train()  # as an update leaves it: the engine does not touch what is being trained

    seen, _ = await asyncio.gather(asyncio.gather(*(episode(n) for n in range(6))), updates())
    await policy.close()
    assert any(len(one) > 1 for one in seen), "no episode lived through an update"
    others = []
    for version, ids, start, logps in turns:
        own, first = (teacher_forced(versions[v], ids, start) for v in (version, "v0"))
        np.testing.assert_allclose(logps, own, atol=1e-4)
        others.append(float(np.abs(logps - first).max()))
    assert max(others) > 1e-2, "the versions do not differ, so this proves nothing"


def shift(model: Any) -> None:
    with torch.no_grad():
        for weights in model.parameters():
            if weights.requires_grad:
                weights.add_(0.2 * torch.randn_like(weights))


async def test_a_run_that_samples_ahead(tmp_path: Path, model: Path) -> None:
    write_pack(tmp_path, code=SLOW.replace("DELAY", "0.02"))
    sections: dict[str, Any] = {
        "adapter": {"enabled": True, "r": 2},
        "train": {"steps": 4, "lr": 1e-2},
        "rollout": {"async_staleness": 1},
    }
    async with after_training(tmp_path, model, **sections) as (trainer, run):
        metrics = trainer.store.runs.steps(run.id)
        episodes = episodes_of(trainer.store, run)
    assert run.status == "finished" and [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert len(episodes) == 4 * 8 and all(e.fact for e in episodes)
    assert max(m["staleness/max"] for m in metrics) == 1
    wanted = {"sampling/sampling_logp_difference/max", "sampling/kl", "sampling/correction"}
    assert all(wanted <= set(m) for m in metrics), "auto is tis"
    versions = {t.weights_version for e in episodes for t in e.turns if t.role == "assistant"}
    assert len(versions) > 1
    assert versions <= {str(model), *(f"{run.name}@{step}" for step in range(1, 4))}


@pytest.mark.parametrize(("staleness", "expected"), [(0, 8), (2, 24)])
async def test_the_next_step_begins_before_the_update_is_done(
    tmp_path: Path, model: Path, staleness: int, expected: int
) -> None:
    begun: list[int] = []

    class Order(Hook):
        def on_rollout_start(self, task: Any, run: Any) -> None:
            begun.append(0)

        async def on_update(self, metrics: Any, step: int) -> None:
            while step == 1 and begun.count(0) < expected:
                await asyncio.sleep(0.01)  # they begin beside the update, which may be the faster
            begun.append(step)

    rollout, steps = {"async_staleness": staleness}, max(2, staleness + 1)
    given: dict[str, Any] = {"rollout": rollout, "train": {"steps": steps}}
    async with after_training(tmp_path, model, [Order()], **given):
        assert begun.index(1) == expected and begun.count(0) == 8 * steps


async def test_a_straggler_is_cut_off_and_its_group_trains_without_it(
    tmp_path: Path, model: Path
) -> None:
    code = SLOW.replace("sleep(DELAY)", "sleep(30 * (COUNT.pop() == 0))")
    write_pack(tmp_path, code="COUNT = [1] * 500 + [0] + [1] * 3\n" + code)
    rollout = {"async_staleness": 1, "episode_timeout": 1.0}
    async with after_training(tmp_path, model, rollout=rollout) as (trainer, run):
        episodes = episodes_of(trainer.store, run)
    (late,) = [e for e in episodes if e.outcome is Outcome.TIMEOUT]
    siblings = [e.fact for e in episodes if e.group_id == late.group_id and e is not late]
    assert (late.fact, siblings) == ("skipped:fault: timeout", ["trained"] * 3)


def episode_of(*versions: str) -> Episode:
    turns = [
        Turn(n, "assistant", (), 0, 0, weights_version=version)
        for n, version in enumerate(versions)
    ]
    return Episode("e" + "".join(versions), "t", "p", turns=tuple(turns))


def test_staleness_is_measured_and_bounded() -> None:
    versions = [("tiny", "was@1"), ("r@3",), ("r@2", "r@3"), ("other@1",)]
    groups, names = [[episode_of(*one) for one in versions]], {"r", "was"}
    assert stale(groups, names, 3, 1) == {"etinywas@1"} and not stale(groups, names, 3, 2)
    assert age_metrics(groups, names, 3) == {
        "staleness/mean": pytest.approx((3 + 2 + 0 + 1 + 0 + 3) / 6),
        "staleness/max": 3.0,
        "staleness/overtaken": 2.0,
    }


async def test_ahead_begins_no_step_twice_and_none_beyond_the_last() -> None:
    begun: list[int] = []

    async def sample(step: int) -> list[list[Episode]]:
        begun.append(step)
        await asyncio.sleep(0)
        if step == 2:
            raise TrainingStopped("no more")
        return [[episode_of(f"r@{step}")]]

    sections = {"rollout": {"async_staleness": 2}, "train": {"steps": 3}}
    ahead = Prefetcher(sample, TrainerSettings.of(Config.model_validate(sections)))
    for step in range(2):
        assert (await ahead.take(step))[0][0].id == f"er@{step}" and begun == [0, 1, 2]
    with pytest.raises(TrainingStopped):
        await ahead.take(2)
    await ahead.stop()


def test_the_plan_counts_the_second_copy_and_determinism_refuses(model: Path) -> None:
    def planned(staleness: int, dtype: str = "float32", lora: bool = False) -> Any:
        sections = {
            "model": {"name": str(model), "dtype": dtype},
            "rollout": {"async_staleness": staleness},
            "adapter": {"enabled": lora},
        }
        return plan(Config.model_validate(sections), model)

    ahead, half, lora = planned(1), planned(1, "bfloat16"), planned(1, "bfloat16", lora=True)
    assert ahead.update["sampler"] == ahead.parameters * 4
    assert half.update["sampler"] == half.parameters * 2
    assert lora.update["sampler"] == lora.trainable * 4
    assert "sampler" not in planned(0).update and ahead.peak > planned(0).peak
    with pytest.raises(ValueError, match="async_staleness"):
        Config.model_validate({"rollout": {"async_staleness": 1}, "deterministic": True})


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_training_ahead_alone_samples_from_a_twin(model: Path, staleness: int) -> None:
    named = {"name": str(model), "dtype": "bfloat16"}
    settings = Config.model_validate({"model": named, "rollout": {"async_staleness": staleness}})
    policy: Any = load_policy(None, settings, base=model, trainable=True).policy
    assert policy.engine == "paged" and (policy.source is not None) == bool(staleness)
    assert next((policy.source or policy.model).parameters()).dtype == torch.bfloat16
    asyncio.run(policy.close())


# --- agreement of sampler and trainer --------------------------------------------------------------------------------


def check_weights(rows: list[Episode], signals: list[Any], factor: Any) -> list[float]:
    """Compare each token's weight with its advantage times `factor` of the difference between the stored
    log-probabilities, by hand; returns the differences."""
    total, seen = sum(int(e.trained_tokens) for e in rows), []
    for episode, own in zip(rows, signals, strict=True):
        mask = episode.tokens.trained_mask
        gap = (own.logp_train - episode.tokens.logp_sampled)[mask].astype(np.float64)
        expected = factor(gap) * own.advantage[mask]
        np.testing.assert_allclose(own.weight[mask] * total, expected, rtol=1e-3, atol=1e-6)
        seen += gap.tolist()
    return seen


@pytest.mark.parametrize("correction", ["tis", "mis_sequence"])
async def test_an_edited_model_is_measured_alerted_and_corrected(
    tmp_path: Path, model: Path, correction: str
) -> None:
    """Between sampling and the update of step 2 the output layer is changed behind the policy's back."""

    class Edits(Hook):
        def on_batch(self, batch: Any, step: int) -> None:
            if step == 2:
                with torch.no_grad():
                    trainer.loaded.model.lm_head.weight.mul_(30.0)

    algo, name = {"correction": correction}, "sampling/sampling_logp_difference/max"
    async with trainer_of(tmp_path, model, [Edits()], algo=algo, train={"steps": 3}) as trainer:
        run = await trainer.train()
        one, two, three = trainer.store.runs.steps(run.id)
        alerts = trainer.store.journal.folded_alerts(run.id)
        rows = [e for e in episodes_of(trainer.store, run, 2) if e.fact == "trained"]
        signals = [trainer.store.signals.get(e.id) for e in rows]
    (mismatch,) = (a for a in alerts if a["name"] == "mismatch")
    assert (mismatch["count"], mismatch["value"]) == (1, pytest.approx(two[name]))
    assert max(one[name], three[name]) < 1e-4 and two[name] > 1
    assert abs(one["sampling/kl"]) < 1e-6 and two["sampling/kl"] > 0.1

    def factor(gap: Any) -> Any:
        if correction == "tis":
            return np.exp(gap).clip(max=2)
        return np.full_like(gap, np.exp(gap.sum()) * (np.exp(gap.sum()) <= 2))

    check_weights(rows, signals, factor)


@pytest.mark.parametrize("hooked", [True, False])
async def test_a_hook_that_changes_what_is_drawn_is_corrected(
    tmp_path: Path, model: Path, hooked: bool
) -> None:
    """`on_sample` takes half of all tokens away: `auto` is truncated importance sampling then, and nothing without."""
    some = tuple(range(5, 133))
    odd = SimpleNamespace(on_sample=lambda sampling: replace(sampling, bad_ids=some))
    hooks, once = [odd] * hooked, {"steps": 1}
    async with after_training(tmp_path, model, hooks, train=once) as (trainer, run):
        assert isinstance(trainer.learner, Learner)
        assert trainer.learner.loss_config.correction == ("tis" if hooked else "none")
        (metrics,) = trainer.store.runs.steps(run.id)
        rows = [e for e in episodes_of(trainer.store, run) if e.fact == "trained"]
        signals = [trainer.store.signals.get(e.id) for e in rows]
    seen = check_weights(rows, signals, lambda gap: np.exp(gap * hooked).clip(max=2))
    sampled = {int(id_) for e in rows for id_ in e.tokens.ids[e.tokens.trained_mask]}
    assert not hooked or not sampled & set(some)
    # Half of the tokens are cut off, so what is left was sampled at about twice the policy's probability.
    assert np.isclose(np.mean(seen), np.log(0.5), atol=0.2) if hooked else np.abs(seen).max() < 1e-4
    assert ("sampling/correction" in metrics) == hooked
