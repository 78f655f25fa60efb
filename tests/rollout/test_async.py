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
from tests.helpers.train import TASK_PY, episodes_of, trainer_of, write_pack

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


def slow(folder: Path, delay: float = 0.0) -> Path:
    return write_pack(folder, code=SLOW.replace("DELAY", str(delay)))


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
    trained = load_model(model, ModelConfig(dtype="float32"), base=model)
    if adapter:
        trained = add_adapter(trained, LoraConfig(r=2), model)
    sampler = twin(trained)
    policy = LocalPolicy(sampler, context_length=256, version="v0")
    assert policy.engine == "paged"
    versions = {"v0": copy.deepcopy(trained)}
    turns: list[tuple[str, list[int], int, np.ndarray[Any, Any]]] = []

    async def episode(number: int) -> list[str]:
        ids, seen = [10 + number, 11, 12, 13], []
        for turn in range(6):
            out = await policy.generate(
                str(number), ids, Sampling(max_new_tokens=5, seed=100 * number + turn)
            )
            turns.append(
                (out.weights_version, [*ids, *out.ids.tolist()], len(ids), out.logp_policy)
            )
            seen.append(out.weights_version)
            ids = [*ids, *out.ids.tolist(), 20 + turn]
            await asyncio.sleep(0.001 * number)
        await policy.release(str(number))
        return seen

    async def updates() -> None:
        def update() -> None:
            with torch.no_grad():
                for weights in trained.parameters():
                    if weights.requires_grad:
                        weights.add_(0.2 * torch.randn_like(weights))

        for number in range(1, 4):
            await asyncio.sleep(0.01)
            await run_in_thread(update)
            versions[f"v{number}"] = copy.deepcopy(trained)
            await policy.swap(f"v{number}", lambda: copy_trained(trained, sampler))
            trained.train()  # as an update leaves it: the engine does not touch what is being trained

    torch.manual_seed(1)
    seen, _ = await asyncio.gather(asyncio.gather(*(episode(n) for n in range(6))), updates())
    await policy.close()
    assert len({version for episode in seen for version in episode}) > 1
    assert any(len(set(episode)) > 1 for episode in seen), "no episode lived through an update"
    for version, ids, start, logps in turns:
        np.testing.assert_allclose(logps, teacher_forced(versions[version], ids, start), atol=1e-4)
    worst = max(
        float(np.abs(p - teacher_forced(versions["v0"], i, s)).max())
        for v, i, s, p in turns
        if v != "v0"
    )
    assert worst > 1e-2, "the versions do not differ, so this proves nothing"


def test_a_twin_has_adapter_weights_of_its_own_on_the_same_base(model: Path) -> None:
    trained = add_adapter(
        load_model(model, ModelConfig(dtype="float32"), base=model), LoraConfig(r=2), model
    )
    other = twin(trained)
    pairs = list(zip(trained.parameters(), other.parameters(), strict=True))
    assert all((ours is theirs) == (not ours.requires_grad) for ours, theirs in pairs)
    assert not any(theirs.requires_grad for _, theirs in pairs)
    with torch.no_grad():
        for ours, _ in pairs:
            if ours.requires_grad:
                ours.add_(0.1)
    ids = torch.tensor([[10, 11, 12]])
    before = other(ids).logits
    assert not torch.equal(trained(ids).logits, before)
    copy_trained(trained, other)
    assert torch.equal(trained(ids).logits, other(ids).logits)


async def test_without_staleness_it_is_the_synchronous_algorithm_bit_by_bit(
    tmp_path: Path, model: Path
) -> None:
    write_pack(tmp_path)
    weights = []
    async with trainer_of(tmp_path, model, deterministic=True, train={"steps": 3}) as trainer:
        await trainer.train()
        assert isinstance(trainer.policy, LocalPolicy) and trainer.policy.source is None
        weights.append({name: w.clone() for name, w in trainer.loaded.model.state_dict().items()})
    async with trainer_of(tmp_path, model, deterministic=True, train={"steps": 3}) as trainer:
        for step in range(3):
            await trainer.learn(await trainer.collector.sample(step), step)
        weights.append(trainer.loaded.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


async def test_a_run_that_samples_ahead(tmp_path: Path, model: Path) -> None:
    slow(tmp_path, 0.02)
    sections: dict[str, Any] = {
        "adapter": {"enabled": True, "r": 2},
        "train": {"steps": 4, "lr": 1e-2},
    }
    async with trainer_of(tmp_path, model, rollout={"async_staleness": 1}, **sections) as trainer:
        run = await trainer.train()
        store = trainer.store
        metrics = {row["step"]: row for row in store.runs.steps(run.id)}
        episodes = episodes_of(store, run)
    assert run.status == "finished" and sorted(metrics) == [1, 2, 3, 4]
    assert len(episodes) == 4 * 8 and all(e.fact for e in episodes)
    assert all(m["staleness/max"] <= 1 for m in metrics.values())
    assert max(m["staleness/max"] for m in metrics.values()) == 1
    assert all(
        "sampling/sampling_logp_difference/max" in m and "sampling/kl" in m
        for m in metrics.values()
    )
    assert all("sampling/correction" in m for m in metrics.values()), "auto is tis"
    versions = {t.weights_version for e in episodes for t in e.turns if t.role == "assistant"}
    assert len(versions) > 1 and versions <= {
        str(model),
        *(f"{run.name}@{step}" for step in range(1, 4)),
    }


async def test_the_next_step_begins_before_the_update_is_done(tmp_path: Path, model: Path) -> None:
    begun: list[tuple[str, int]] = []

    class Order(Hook):
        def on_rollout_start(self, task: Any, run: Any) -> None:
            begun.append(("episode", 0))

        async def on_update(self, metrics: Any, step: int) -> None:
            while step == 1 and begun.count(("episode", 0)) < expected:
                await asyncio.sleep(0.01)  # they begin beside the update, which may be the faster
            begun.append(("update", step))

    for staleness, expected in ((0, 8), (1, 16), (2, 24)):
        begun.clear()
        folder = tmp_path / str(staleness)
        rollout, steps = {"async_staleness": staleness}, max(2, staleness + 1)
        async with trainer_of(
            folder, model, hooks=[Order()], rollout=rollout, train={"steps": steps}
        ) as trainer:
            await trainer.train()
        assert begun.index(("update", 1)) == expected
        assert sum(what == "episode" for what, _ in begun) == 8 * steps


async def test_a_straggler_is_cut_off_and_its_group_trains_without_it(
    tmp_path: Path, model: Path
) -> None:
    code = SLOW.replace(
        "await asyncio.sleep(DELAY)", "await asyncio.sleep(30 * (COUNT.pop() == 0))"
    )
    write_pack(tmp_path, code="COUNT = [1] * 500 + [0] + [1] * 3\n" + code)
    rollout = {"async_staleness": 1, "episode_timeout": 1.0}
    async with trainer_of(tmp_path, model, rollout=rollout, train={"steps": 2}) as trainer:
        episodes = episodes_of(trainer.store, await trainer.train())
    late = [e for e in episodes if e.outcome is Outcome.TIMEOUT]
    assert [e.fact for e in late] == ["skipped:fault: timeout"]
    siblings = [e for e in episodes if e.group_id == late[0].group_id and e is not late[0]]
    assert [e.fact for e in siblings] == ["trained"] * 3


def episode_of(*versions: str) -> Episode:
    turns = [
        Turn(n, "assistant", (), 0, 0, weights_version=version)
        for n, version in enumerate(versions)
    ]
    return Episode("e" + "".join(versions), "t", "p", turns=tuple(turns))


def test_staleness_is_measured_and_bounded() -> None:
    groups = [
        [
            episode_of("tiny", "r@1"),
            episode_of("r@3"),
            episode_of("r@2", "r@3"),
            episode_of("other@1"),
        ]
    ]
    assert stale(groups, "r", 3, 1) == {"etinyr@1"} and not stale(groups, "r", 3, 2)
    assert age_metrics(groups, "r", 3) == {
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

    ahead = Prefetcher(
        sample,
        TrainerSettings.of(
            Config.model_validate({"rollout": {"async_staleness": 2}, "train": {"steps": 3}})
        ),
    )
    assert (await ahead.take(0))[0][0].id == "er@0" and begun == [0, 1, 2]
    assert (await ahead.take(1))[0][0].id == "er@1" and begun == [0, 1, 2]
    with pytest.raises(TrainingStopped):
        await ahead.take(2)
    await ahead.stop()


def test_the_plan_counts_the_second_copy_and_determinism_refuses(model: Path) -> None:
    small = {"model": {"name": str(model)}, "rollout": {"async_staleness": 1}}
    ahead, turns = plan(Config.model_validate(small), model), plan(Config(), model)
    assert ahead.update["sampler"] == ahead.parameters * 4 and "sampler" not in turns.update
    assert ahead.peak > turns.peak
    half: dict[str, Any] = {**small, "model": {"name": str(model), "dtype": "bfloat16"}}
    shared = plan(Config.model_validate(half), model)
    assert shared.update["sampler"] == shared.parameters * 2
    lora = plan(Config.model_validate({**half, "adapter": {"enabled": True}}), model)
    assert lora.update["sampler"] == lora.trainable * 4
    with pytest.raises(ValueError, match="async_staleness"):
        Config.model_validate({**small, "deterministic": True})


def test_a_training_ahead_samples_from_a_twin(model: Path) -> None:
    settings = {
        "model": {"name": str(model), "dtype": "bfloat16"},
        "rollout": {"async_staleness": 1},
    }
    loaded = load_policy(None, Config.model_validate(settings), base=model, trainable=True)
    policy = loaded.policy
    assert isinstance(policy, LocalPolicy) and policy.engine == "paged"
    assert policy.source is not None and next(policy.source.parameters()).dtype == torch.bfloat16
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
    found: list[Any] = []

    class Edits(Hook):
        def on_batch(self, batch: Any, step: int) -> None:
            if step == 2:
                with torch.no_grad():
                    found[0].loaded.model.lm_head.weight.mul_(30.0)

    algo = {"correction": correction}
    async with trainer_of(
        tmp_path, model, hooks=[Edits()], algo=algo, train={"steps": 3}
    ) as trainer:
        found.append(trainer)
        run = await trainer.train()
        metrics = {row["step"]: row for row in trainer.store.runs.steps(run.id)}
        alerts = [
            a["value"] for a in trainer.store.journal.alerts(run.id) if a["name"] == "mismatch"
        ]
        rows = [e for e in episodes_of(trainer.store, run, 2) if e.fact == "trained"]
        signals = [trainer.store.signals.get(e.id) for e in rows]
    name = "sampling/sampling_logp_difference/max"
    assert (
        alerts == [pytest.approx(metrics[2][name])]
        and metrics[1][name] < 1e-4
        and metrics[2][name] > 1
        and metrics[3][name] < 1e-4
    )
    assert abs(metrics[1]["sampling/kl"]) < 1e-6 and metrics[2]["sampling/kl"] > 0.1

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

    odd = SimpleNamespace(
        on_sample=lambda sampling: replace(sampling, bad_ids=tuple(range(5, 133)))
    )
    hooks = [odd] if hooked else []
    async with trainer_of(tmp_path, model, hooks=hooks, train={"steps": 1}) as trainer:
        run = await trainer.train()
        assert isinstance(trainer.learner, Learner)
        assert trainer.learner.loss_config.correction == ("tis" if hooked else "none")
        metrics = trainer.store.runs.steps(run.id)[0]
        rows = [e for e in episodes_of(trainer.store, run) if e.fact == "trained"]
        signals = [trainer.store.signals.get(e.id) for e in rows]
    seen = check_weights(
        rows, signals, lambda gap: np.exp(gap).clip(max=2) if hooked else np.ones_like(gap)
    )
    sampled = {int(id_) for e in rows for id_ in e.tokens.ids[e.tokens.trained_mask]}
    assert not hooked or not sampled & set(range(5, 133))
    # Half of the tokens are cut off, so what is left was sampled at about twice the policy's probability.
    assert np.isclose(np.mean(seen), np.log(0.5), atol=0.2) if hooked else np.abs(seen).max() < 1e-4
    assert ("sampling/correction" in metrics) == hooked
