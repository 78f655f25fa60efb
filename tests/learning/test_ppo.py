"""PPO's value head: by hand, multi-turn, with LoRA and full weights; the greedy baseline; both resume to the bit.

On-policy distillation: numbers against a plain computation, hints, servers, and what is refused.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.config.estimators import Gae
from agentrl_cli.learning.forward import logprobs
from agentrl_cli.learning.packing import Segment, pack
from agentrl_cli.learning.update import Learner
from agentrl_cli.learning.value import Critic
from agentrl_cli.reports.rescore import estimate
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Fact, Origin, Outcome, Turn
from tests.helpers.train import (
    after_training,
    episodes_of,
    spawn,
    spawn_well,
)
from tests.learning.test_update import config, episodes
from tests.trainer.test_resume import ending, plan, project_of

GAE = {"advantage": "gae", "value_lr": 1e-2}


def multi_turn(episode: Episode) -> Episode:
    """The same tokens with a tool's answer of two tokens in the middle of what was said, if it is long enough."""
    mask = episode.tokens.trained_mask
    first, n = int(np.flatnonzero(mask)[0]), len(mask)
    if n - first <= 3:
        return episode
    origin = episode.tokens.origin.copy()
    origin[first + 1 : first + 3] = Origin.TOOL
    ends = [0, first, first + 1, first + 3, n]
    roles = ("user", "assistant", "tool", "assistant")
    turns = tuple(Turn(i, role, (), ends[i], ends[i + 1]) for i, role in enumerate(roles))
    return episode.with_(tokens=replace(episode.tokens, origin=origin), turns=turns)


def critical(start: Any, algo: dict[str, Any], seed: int = 0, **train: Any) -> Any:
    """A learner whose value head says something."""
    learner: Any = Learner(copy.deepcopy(start), config(algo={**GAE, **algo}, train=train))
    generator = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(learner.compute.critic.head.out.weight, generator=generator)
    return learner


@pytest.mark.parametrize("coef", [0.0, 0.25])
def test_how_much_of_the_value_loss_reaches_the_policy(coef: float) -> None:
    torch.manual_seed(0)
    critic = Critic(3, Gae(name="gae", value_coef=coef))
    torch.nn.init.normal_(critic.head.out.weight)
    states = torch.randn(5, 3, requires_grad=True)
    plain, values = critic.head(states), critic.values(states)
    assert torch.equal(values, plain)
    (whole,) = torch.autograd.grad(plain.sum(), states)
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert critic.head.inner.weight.grad is not None and (states.grad is None) == (coef == 0)
    if states.grad is not None:
        torch.testing.assert_close(states.grad, coef * whole)


def test_values_and_returns_of_a_multi_turn_episode(start: Any) -> None:
    groups = [[multi_turn(e) for e in group] for group in episodes(start, [[0, 1, 1], [1, 0, 0.5]])]
    learner = critical(start, {})
    head = copy.deepcopy(learner.compute.critic.head)
    update = learner.update(groups, 0)
    raw, gains, returns = [], [], []
    for episode in (episode for group in groups for episode in group):
        mask, found = episode.tokens.trained_mask, update.signals[episode.id]
        with torch.no_grad():
            values = head(logprobs(start, pack([[Segment.of(episode)]])).states).numpy()
        np.testing.assert_allclose(found.value[mask], values, atol=1e-5)
        np.testing.assert_allclose(found.returns[mask], episode.graded_reward, atol=1e-5)
        assert np.isnan(found.value[~mask]).all()
        raw.append(found.returns[mask] - found.value[mask])
        gains.append(found.advantage[mask])
        returns.append(found.returns[mask])
    gaps = np.concatenate(raw)
    whitened = (gaps - gaps.mean()) / gaps.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(gains), whitened, atol=1e-4)
    wanted = {
        "value/explained_variance": 1 - gaps.var() / np.concatenate(returns).var(),
        "value/loss": 0.5 * float((gaps**2).mean()),
    }
    assert {name: update.metrics[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("on", [True, False])
def test_an_episode_that_was_cut_off_continues_from_the_value_of_where_it_was_left(
    start: Any, tmp_path: Path, on: bool
) -> None:
    """Of three attempts two were cut off: their return is the reward and the discounted value behind the last token.

    The one that ended gets its reward alone; without the option all do.
    """
    (made,) = episodes(start, [[1, 0.5, 0.25]])
    outcomes = (Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS, Outcome.FAILED)
    group = [
        e.with_(
            outcome=outcome,
            turns=(Turn(0, "user", (), 0, 10), Turn(1, "assistant", (), 10, len(e.tokens))),
        )
        for e, outcome in zip(made, outcomes, strict=True)
    ]
    learner = critical(start, {"gamma": 0.9, "value_bootstrap": on})
    head = copy.deepcopy(learner.compute.critic.head)
    signals = learner.update([group], 0).signals
    for episode in group:
        ids, mask = np.append(episode.tokens.ids, 7).astype(np.int32), episode.tokens.trained_mask
        behind = pack([[Segment(ids, np.arange(len(ids)) == len(ids) - 1)]])
        with torch.no_grad():
            left = float(head(logprobs(start, behind).states))
        more = 0.9 * left if on and episode.outcome is not Outcome.FAILED else 0.0
        expected = 0.9 ** np.arange(mask.sum())[::-1] * (episode.graded_reward + more)
        assert abs(left) > 1e-3 and len(signals[episode.id].logp_train) == len(mask)
        np.testing.assert_allclose(signals[episode.id].returns[mask], expected, atol=1e-5)
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow(id="", name="r", model="m", pack="p", total_steps=1))
        store.episodes.add(episode.with_(run_id=run.id, step=1) for episode in group)
        for episode in group:
            store.signals.add(episode.id, signals[episode.id])
        again = estimate(group, learner.config.algo, store)
    kept = [signals[e.id].advantage[e.tokens.trained_mask] for e in group]
    np.testing.assert_allclose(np.concatenate(again), np.concatenate(kept), atol=1e-4)


@pytest.mark.parametrize("value_coef", [0.0, 0.5])
def test_packing_and_micro_batches_give_the_gradient_of_one_episode_at_a_time(
    start: Any, value_coef: float
) -> None:
    groups = [[multi_turn(e) for e in g] for g in episodes(start, [[0, 1, 1], [1, 0, 0.5]])]
    found = []
    for budget in (4096, 1):
        torch.manual_seed(3)
        algo = {"value_coef": value_coef, "aggregation": "seq_mean"}
        learner = critical(start, algo, seed=1, token_budget=budget, lr=1e3)
        compute, critic = learner.compute, learner.compute.critic
        compute.optimizer = torch.optim.SGD(compute.model.parameters())
        critic.optimizer = torch.optim.SGD(critic.head.parameters(), lr=1.0)
        trained = [*compute.model.parameters(), *critic.head.parameters()]
        before = torch.cat([p.detach().flatten() for p in trained])
        learner.update(groups, 0)
        found.append(before - torch.cat([p.detach().flatten() for p in trained]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


def test_several_epochs_and_mini_batches_fit_the_values(start: Any) -> None:
    groups = episodes(start, [[1, 1, 1], [0, 0, 0]])
    settings = config(algo={**GAE, "epochs": 4, "minibatches": 2, "value_clip": None})
    learner: Any = Learner(copy.deepcopy(start), settings)
    first, *_, last = (learner.update(groups, step).metrics for step in range(6))
    state = learner.compute.critic.optimizer.state_dict()["state"]
    assert {int(s["step"]) for s in state.values()} == {6 * 4 * 2}
    assert "value/clip_ratio" in first
    assert first["value/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert last["value/explained_variance"] > 0.5 and last["value/loss"] < first["value/loss"]


@pytest.mark.parametrize(("clip", "held"), [(1e-4, True), (10.0, False)])
def test_values_are_held_near_the_old_ones(start: Any, clip: float, held: bool) -> None:
    groups = episodes(start, [[1, 1, 1], [1, 1, 1]])  # all values rise towards the returns
    algo = {**GAE, "epochs": 4, "value_clip": clip, "value_lr": 5e-3}
    metrics = Learner(copy.deepcopy(start), config(algo=algo)).update(groups, 0).metrics
    assert metrics["value/clip_ratio"] > 0.5 if held else metrics["value/clip_ratio"] == 0


# --- in the trainer --------------------------------------------------------------------------------------------------


PPO = {
    "advantage": "gae",
    "epochs": 2,
    "minibatches": 2,
    "entropy_coef": 0.01,
    "entropy_target": 4.0,
}


@pytest.mark.parametrize(
    ("algo", "adapter"),
    [(PPO, {"enabled": True, "r": 4}), ({"advantage": "remax"}, {"enabled": False})],
    ids=str,
)
def test_killed_and_resumed_is_never_interrupted(
    tmp_path: Path, model: Path, algo: dict[str, Any], adapter: dict[str, Any]
) -> None:
    whole, cut = (
        project_of(tmp_path / name, model, algo=algo, adapter=adapter) for name in ("whole", "cut")
    )
    spawn_well(whole, "train")
    for event, call, words in (("update", 3, ()), ("batch", 2, ("--resume", "last"))):
        plan(cut, event, call)
        assert spawn(cut, "train", *words)[0] == -9
    spawn_well(cut, "train", "--resume", "last")
    found = ending(cut)
    assert found == ending(whole) and ("critic" in found["state"]) == (algo is PPO)


async def test_remax_compares_with_a_greedy_attempt_that_is_stored_and_not_trained(
    tmp_path: Path, model: Path
) -> None:
    async with after_training(tmp_path, model, algo={"advantage": "remax"}) as (trainer, run):
        store, algo = trainer.store, trainer.config.algo
        rows = store.episodes.rows(store.episodes.ids("kind:baseline step:1", "time", run=run.id))
        trained = episodes_of(store, run, step=1)
        later = [float(a.mean()) for a in estimate(trained, algo, store)]
        again = store.episodes.get(rows[0].id).tokens
    assert [row.fact for row in rows] == [Fact.SKIPPED_BASELINE] * 2
    greedy = {(row.group_id or "").removesuffix("-greedy"): row.reward or 0 for row in rows}
    assert [e.fact for e in trained] == ["trained"] * 8
    advantages = pytest.approx([e.advantage for e in trained], abs=1e-6)
    assert [e.graded_reward - greedy[e.group_id or ""] for e in trained] == advantages
    assert later == advantages, "rescore finds them"
    mask = again.trained_mask
    assert again.ids[mask].tolist() == again.top_ids[mask][:, 0].tolist()


# --- on-policy distillation ---


TEMPERATURE = 0.8


def plain(model: Any, ids: Any) -> Any:
    """[n − 1, V] log-probabilities after each token but the last, by transformers alone."""
    logits = model(
        input_ids=torch.as_tensor(np.asarray(ids, np.int64))[None], use_cache=False
    ).logits[0, :-1]
    return torch.log_softmax(logits.double() / TEMPERATURE, -1)


# --- through the trainer ---------------------------------------------------------------------------------------------
