"""PPO's value head: by hand, multi-turn, with LoRA and full weights; the greedy baseline; both resume to the bit."""

import asyncio
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
from tests.helpers.train import episodes_of, spawn, trainer_of
from tests.learning.test_update import config, episodes
from tests.trainer.test_resume import ending, plan, project_of

GAE = {"advantage": "gae", "value_lr": 1e-2}


def multi_turn(episode: Episode) -> Episode:
    """The same tokens with a tool's answer of two tokens in the middle of what was said."""
    mask = episode.tokens.trained_mask
    first, n = int(np.flatnonzero(mask)[0]), len(mask)
    origin = episode.tokens.origin.copy()
    origin[first + 1 : first + 3] = Origin.TOOL if n - first > 3 else origin[first + 1 : first + 3]
    spans = [("user", 0, first), ("assistant", first, first + 1), ("tool", first + 1, first + 3)]
    turns = tuple(
        Turn(i, role, (), a, b)
        for i, (role, a, b) in enumerate([*spans, ("assistant", first + 3, n)])
    )
    return episode.with_(
        tokens=replace(episode.tokens, origin=origin), turns=turns if n - first > 3 else ()
    )


def test_how_much_of_the_value_loss_reaches_the_policy() -> None:
    for coef in (0.0, 0.25):
        torch.manual_seed(0)
        critic = Critic(3, Gae(name="gae", value_coef=coef))
        torch.nn.init.normal_(critic.head.out.weight)
        states = torch.randn(5, 3, requires_grad=True)
        torch.manual_seed(1)
        (whole,) = torch.autograd.grad(critic.head(states).sum(), states)
        values = critic.values(states)
        assert torch.equal(values, critic.head(states))
        values.sum().backward()  # type: ignore[no-untyped-call]
        if coef:
            torch.testing.assert_close(states.grad, coef * whole)
        else:
            assert states.grad is None
        assert critic.head.inner.weight.grad is not None


def test_values_and_returns_of_a_multi_turn_episode(start: Any) -> None:
    groups = [[multi_turn(e) for e in group] for group in episodes(start, [[0, 1, 1], [1, 0, 0.5]])]
    learner = Learner(copy.deepcopy(start), config(algo=GAE))
    assert learner.compute.critic is not None
    torch.nn.init.normal_(learner.compute.critic.head.out.weight)
    head = copy.deepcopy(learner.compute.critic.head)
    update = learner.update(groups, 0)
    flat = [episode for group in groups for episode in group]
    whitened = []
    for episode in flat:
        mask, found = episode.tokens.trained_mask, update.signals[episode.id]
        assert found.value is not None and found.returns is not None
        with torch.no_grad():
            expected = head(logprobs(start, pack([[Segment.of(episode)]])).states)
        np.testing.assert_allclose(found.value[mask], expected.numpy(), atol=1e-5)
        np.testing.assert_allclose(found.returns[mask], episode.graded_reward, atol=1e-5)
        assert np.isnan(found.value[~mask]).all()
        whitened.append(found.returns[mask] - found.value[mask])
    raw = np.concatenate(whitened)
    advantages = np.concatenate(
        [update.signals[e.id].advantage[e.tokens.trained_mask] for e in flat]
    )
    np.testing.assert_allclose(advantages, (raw - raw.mean()) / raw.std(ddof=1), atol=1e-4)
    returns = np.concatenate([np.full(e.trained_tokens, e.reward) for e in flat])
    assert update.metrics["value/explained_variance"] == pytest.approx(
        1 - raw.var() / returns.var(), abs=1e-4
    )
    assert update.metrics["value/loss"] == pytest.approx(0.5 * float((raw**2).mean()), rel=1e-4)


def test_an_episode_that_was_cut_off_continues_from_the_value_of_where_it_was_left(
    start: Any, tmp_path: Path
) -> None:
    """Two attempts, one cut off: its return is its reward and the discounted value of the state behind its last token.

    The one that ended gets its reward alone; without the option both do.
    """
    (group,) = episodes(start, [[1, 0.5, 0.25]])
    outcomes = (Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS, Outcome.FAILED)
    spans = [
        (Turn(0, "user", (), 0, 10), Turn(1, "assistant", (), 10, len(e.tokens))) for e in group
    ]
    group = [
        e.with_(outcome=o, turns=turns) for e, o, turns in zip(group, outcomes, spans, strict=True)
    ]
    for on in (True, False):
        learner = Learner(
            copy.deepcopy(start), config(algo={**GAE, "gamma": 0.9, "value_bootstrap": on})
        )
        assert learner.compute.critic is not None
        torch.nn.init.normal_(
            learner.compute.critic.head.out.weight, generator=torch.Generator().manual_seed(0)
        )
        head = copy.deepcopy(learner.compute.critic.head)
        signals = learner.update([group], 0).signals
        for episode, cut in zip(group, (True, True, False), strict=True):
            ids = np.append(episode.tokens.ids, 7).astype(np.int32)
            with torch.no_grad():
                left = float(
                    head(
                        logprobs(
                            start, pack([[Segment(ids, np.arange(len(ids)) == len(ids) - 1)]])
                        ).states
                    )
                )
            mask = episode.tokens.trained_mask
            back = 0.9 ** np.arange(mask.sum())[::-1]
            expected = back * (episode.graded_reward + (0.9 * left if cut and on else 0.0))
            found = signals[episode.id].returns
            assert found is not None and abs(left) > 1e-3
            np.testing.assert_allclose(found[mask], expected, atol=1e-5)
            assert len(signals[episode.id].logp_train) == len(mask)
        with Store.open(tmp_path / f"{on}.db") as store:
            run = store.runs.add(RunRow(id="", name="r", model="m", pack="p", total_steps=1))
            store.episodes.add(episode.with_(run_id=run.id, step=1) for episode in group)
            for episode in group:
                store.signals.add(episode.id, signals[episode.id])
            again = estimate(group, learner.config.algo, store)
        for episode, advantages in zip(group, again, strict=True):
            kept = signals[episode.id].advantage[episode.tokens.trained_mask]
            np.testing.assert_allclose(
                advantages, kept, atol=1e-4, err_msg="rescore finds the same"
            )


@pytest.mark.parametrize("value_coef", [0.0, 0.5])
def test_packing_and_micro_batches_give_the_gradient_of_one_episode_at_a_time(
    start: Any, value_coef: float
) -> None:
    groups, found = (
        [[multi_turn(e) for e in g] for g in episodes(start, [[0, 1, 1], [1, 0, 0.5]])],
        [],
    )
    for budget in (4096, 1):
        torch.manual_seed(3)
        model = copy.deepcopy(start)
        algo = {**GAE, "value_coef": value_coef, "aggregation": "seq_mean"}
        learner: Any = Learner(model, config(algo=algo, train={"token_budget": budget, "lr": 1e3}))
        torch.nn.init.normal_(
            learner.compute.critic.head.out.weight, generator=torch.Generator().manual_seed(1)
        )
        learner.compute.optimizer = torch.optim.SGD(model.parameters())
        learner.compute.critic.optimizer = torch.optim.SGD(
            learner.compute.critic.head.parameters(), lr=1.0
        )
        before = [
            p.detach().clone()
            for p in (*model.parameters(), *learner.compute.critic.head.parameters())
        ]
        learner.update(groups, 0)
        after = [
            p.detach() for p in (*model.parameters(), *learner.compute.critic.head.parameters())
        ]
        found.append(torch.cat([(b - a).flatten() for a, b in zip(after, before, strict=True)]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


def test_several_epochs_and_mini_batches_fit_the_values(start: Any) -> None:
    groups = episodes(start, [[1, 1, 1], [0, 0, 0]])
    learner = Learner(
        copy.deepcopy(start),
        config(algo={**GAE, "epochs": 4, "minibatches": 2, "value_clip": None}),
    )
    seen = [learner.update(groups, step).metrics for step in range(6)]
    assert learner.compute.critic is not None
    assert {
        int(s["step"]) for s in learner.compute.critic.optimizer.state_dict()["state"].values()
    } == {6 * 4 * 2}
    assert "value/clip_ratio" in seen[0] and seen[0]["value/explained_variance"] == pytest.approx(
        0, abs=1e-6
    )
    assert seen[-1]["value/explained_variance"] > 0.5
    assert seen[-1]["value/loss"] < seen[0]["value/loss"]


def test_values_are_held_near_the_old_ones(start: Any) -> None:
    groups = episodes(start, [[1, 1, 1], [1, 1, 1]])  # all values rise towards the returns
    ratios = []
    for clip in (1e-4, 10.0):
        algo = {**GAE, "epochs": 4, "value_clip": clip, "value_lr": 5e-3}
        ratios.append(
            Learner(copy.deepcopy(start), config(algo=algo))
            .update(groups, 0)
            .metrics["value/clip_ratio"]
        )
    assert ratios[0] > 0.5 and ratios[1] == 0


# --- in the trainer --------------------------------------------------------------------------------------------------


FULL = {"enabled": False}
PPO = {
    "advantage": "gae",
    "epochs": 2,
    "minibatches": 2,
    "entropy_coef": 0.01,
    "entropy_target": 4.0,
}


@pytest.mark.parametrize(
    ("algo", "adapter"), [(PPO, {"enabled": True, "r": 4}), ({"advantage": "remax"}, FULL)], ids=str
)
def test_killed_and_resumed_is_never_interrupted(
    tmp_path: Path, model: Path, algo: dict[str, Any], adapter: dict[str, Any]
) -> None:
    found = []
    for name in ("whole", "cut"):
        project, words = project_of(tmp_path / name, model, algo=algo, adapter=adapter), ["train"]
        for event, call in [("update", 3), ("batch", 2)] if name == "cut" else []:
            plan(project, event, call)
            assert spawn(project, *words)[0] == -9
            words = ["train", "--resume", "last"]
        code, said = spawn(project, *words)
        assert code == 0, said
        found.append(ending(project))
    assert found[0] == found[1]
    assert ("critic" in found[0]["state"]) == (algo is PPO)


def test_remax_compares_with_a_greedy_attempt_that_is_stored_and_not_trained(
    tmp_path: Path, model: Path
) -> None:
    async def run() -> None:
        async with trainer_of(tmp_path / "p", model, algo={"advantage": "remax"}) as trainer:
            done = await trainer.train()
            store = trainer.store
            rows = store.episodes.rows(
                store.episodes.ids("kind:baseline step:1", "time", run=done.id)
            )
            assert len(rows) == 2 and {row.fact for row in rows} == {Fact.SKIPPED_BASELINE}
            greedy = {(row.group_id or "").removesuffix("-greedy"): row.reward for row in rows}
            trained = episodes_of(store, done, step=1)
            assert len(trained) == 8 and {e.fact for e in trained} == {"trained"}
            for episode in trained:
                assert episode.advantage == pytest.approx(
                    episode.graded_reward - (greedy[episode.group_id or ""] or 0), abs=1e-6
                )
            later = [float(a.mean()) for a in estimate(trained, trainer.config.algo, store)]
            assert later == pytest.approx([episode.advantage for episode in trained], abs=1e-6), (
                "rescore finds them"
            )
            again = store.episodes.get(rows[0].id)
            best = again.tokens.top_ids[again.tokens.trained_mask][:, 0]
            assert again.tokens.ids[again.tokens.trained_mask].tolist() == best.tolist()

    asyncio.run(run())
