"""One training step's arithmetic: micro-batches add up, every token's weight is what it says, and NaN stops it."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.errors import ConfigError, TrainingStopped
from agentrl_cli.learning.compute import Compute, MicroBatch
from agentrl_cli.learning.dispositions import decide
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.optimizers import move_state
from agentrl_cli.learning.packing import Segment, pack, select_segments
from agentrl_cli.learning.update import Learner
from agentrl_cli.types import TOP_K, Episode, Fact, Origin, Outcome, RewardPart, Tokens
from tests.helpers.train import VOCABULARY


@pytest.fixture
def model(start: Any) -> Any:
    return copy.deepcopy(start)


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {"train": {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e9}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


def episodes(model: Any, rewards: Sequence[Sequence[float]], seed: int = 0) -> list[list[Episode]]:
    """Groups of episodes that share a prompt of ten tokens and say three to nine of their own."""
    rng = np.random.default_rng(seed)
    groups = []
    for g, values in enumerate(rewards):
        prompt = rng.integers(5, VOCABULARY, 10)
        group = []
        for m, value in enumerate(values):
            said = rng.integers(5, VOCABULARY, int(rng.integers(3, 10)))
            ids = np.concatenate([prompt, said]).astype(np.int32)
            mask = np.arange(len(ids)) >= 10
            with torch.no_grad():
                _, out = trained_logprobs(model, [[Segment(ids, mask)]])
            logp = np.full(len(ids), np.nan, np.float32)
            logp[mask] = out.logp.numpy()
            tokens = Tokens(
                ids,
                np.where(mask, Origin.MODEL, Origin.USER).astype(np.int8),
                *(logp, logp.copy(), np.zeros(len(ids), np.float32)),
                np.full((len(ids), TOP_K), -1, np.int32),
                np.full((len(ids), TOP_K), np.nan, np.float32),
            )
            parts = (RewardPart("r", value, 1.0, True),)
            group.append(
                Episode(
                    f"{g}-{m}",
                    f"t{g}",
                    group_id=f"g{g}",
                    sample=m,
                    tokens=tokens,
                    reward_parts=parts,
                    outcome=Outcome.FAILED,
                )
            )
        groups.append(group)
    return groups


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float = 0.0) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=0, atol=atol) for name in a)


SPREAD: list[list[float]] = [[0, 1, 1], [1, 0, 0.5]]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizers_state_that_waits_elsewhere_changes_nothing(start: Any, name: str) -> None:
    groups, after = episodes(start, SPREAD), []
    for aside in (False, True):
        model = copy.deepcopy(start)
        learner = Learner(model, config(train={"optimizer": name}), aside=aside)
        for step in range(3):
            learner.update(groups, step)
            if step == 1:
                learner.load_state(learner.state())
        after.append(weights(model))
        # what a GPU would get back: every number of the state, counts of steps apart
        parts = getattr(learner.compute.optimizer, "optimizers", [learner.compute.optimizer])
        move_state(learner.compute.optimizer, "meta")
        left = [
            t
            for one in parts
            for state in one.state.values()
            for t in state.values()
            if t.device.type == "cpu"
        ]
        assert sum(t.numel() * t.element_size() for t in left if t.ndim) == 0
    assert same(after[0], after[1])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_later_epochs_are_clipped_against_the_first_log_probabilities(
    model: Any, dropout: float
) -> None:
    groups = episodes(model, SPREAD)
    model.config.attention_dropout = dropout
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    learner = Learner(model, config(algo={"epochs": 6, "minibatches": 2}, train={"lr": 5e-2}))
    update = learner.update(groups, 0)
    assert {int(state["step"]) for state in learner.compute.optimizer.state.values()} == {12}
    clipped = 0
    for episode in [episode for group in groups for episode in group]:
        signals, mask = update.signals[episode.id], episode.tokens.trained_mask
        assert signals.logp_train[mask] == pytest.approx(episode.tokens.logp_policy[mask], abs=1e-4)
        ratio, out = signals.ratio[mask], signals.clipped[mask].astype(bool)
        advantage = update.advantages[episode.id]
        beyond = ratio > 1.28 if advantage > 0 else ratio < 0.8
        if advantage:
            assert (out == beyond).all() and (signals.weight[mask][out] == 0).all()
        clipped += int(out.sum())
    assert clipped > 0


def test_truncated_sampling_is_corrected(model: Any) -> None:
    groups = episodes(model, SPREAD)
    plain = Learner(copy.deepcopy(model), config()).update(groups, 0)
    higher = [
        [
            e.with_(
                tokens=replace(e.tokens, logp_sampled=e.tokens.logp_sampled + np.float32(np.log(2)))
            )
            for e in group
        ]
        for group in groups
    ]
    learner = Learner(model, config(rollout={"top_p": 0.9}))
    for name, signals in learner.update(higher, 0).signals.items():
        mask = ~np.isnan(signals.weight)
        assert signals.weight[mask] == pytest.approx(plain.signals[name].weight[mask] / 2, rel=1e-3)


def test_gradients_are_clipped_to_the_norm(start: Any) -> None:
    moved = []
    for norm in (1e9, 1e-3):
        model = copy.deepcopy(start)
        compute = Compute(model, LearnerSettings.of(config()))  # with another norm, as another rank
        settings = config(train={"max_grad_norm": norm})
        learner: Any = Learner(model, settings, compute=compute)
        learner.compute.optimizer = torch.optim.SGD(model.parameters())
        metrics = learner.update(episodes(start, SPREAD), 0).metrics
        change = [
            (p.detach() - q.detach()).square().sum()
            for p, q in zip(model.parameters(), start.parameters(), strict=True)
        ]
        moved.append((metrics["grad_norm"], float(torch.stack(change).sum().sqrt())))
    assert moved[0][0] == pytest.approx(moved[1][0]), "the metric is the norm before clipping"
    rate = 1e-2
    assert moved[0][1] == pytest.approx(rate * moved[0][0], rel=1e-2)
    assert moved[1][1] == pytest.approx(rate * 1e-3, rel=1e-2)


@pytest.mark.parametrize("stop", [True, False])
def test_a_loss_that_is_no_number_leaves_the_weights_alone(model: Any, stop: bool) -> None:
    groups = episodes(model, SPREAD)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    before = weights(model)
    learner = Learner(model, config(train={"stop_on": ["nan"] if stop else []}))
    if stop:
        with pytest.raises(TrainingStopped, match="nan") as caught:
            learner.update(groups, 0)
        assert "train.lr" in caught.value.hint
    else:
        metrics = learner.update(groups, 0).metrics
        assert not np.isfinite(metrics["grad_norm"]) and not np.isfinite(metrics["loss"])
    after = weights(model)
    assert all(torch.equal(after[n].nan_to_num(9), before[n].nan_to_num(9)) for n in before)
    assert all(p.grad is None for p in model.parameters())


def test_nothing_to_train_on_is_nothing(model: Any) -> None:
    before = weights(model)
    update = Learner(model, config()).update([], 0)
    assert (update.metrics, update.signals, update.advantages) == ({}, {}, {})
    assert same(weights(model), before)


def test_schedules() -> None:
    def rates(**train: Any) -> list[float]:
        learner = Learner(
            torch.nn.Linear(2, 2), config(train={"lr": 1.0, "steps": 6, "warmup_steps": 2, **train})
        )
        return [learner.learning_rate(step) for step in range(7)]

    assert rates() == pytest.approx([0.5, 1, 1, 1, 1, 1, 1])
    assert rates(schedule="linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates(schedule="cosine") == pytest.approx(
        [0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]
    )
    assert rates(warmup_steps=0)[0] == 1.0


def test_what_cannot_be(model: Any) -> None:
    with pytest.raises(ConfigError, match="frozen"):
        Learner(copy.deepcopy(model).requires_grad_(False), config())
    with pytest.raises(ConfigError, match="temperature"):
        Learner(model, config(rollout={"temperature": 0}))
    with pytest.raises(ConfigError, match="reference"):
        Learner(model, config(algo={"kl_coef": 0.1})).update(episodes(model, SPREAD), 0)


def test_a_reference_pulls_back(model: Any, start: Any) -> None:
    groups = episodes(model, [[1, 1]])
    learner = Learner(model, config(algo={"kl_coef": 1.0}), reference=start)
    found = learner.update(groups, 0)
    assert found.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert found.signals["0-0"].logp_ref is not None
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.05 * torch.randn_like(tensor)
    kl = [learner.update(groups, step).metrics["kl"] for step in range(1, 6)]
    assert kl[0] > 1e-3 and kl[-1] < kl[0]


def test_paths_of_files_are_algorithms_too(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\n\ndef ones(given):\n    return [np.ones(n, np.float32) for n in given.lengths]\n"
    )
    monkeypatch.chdir(tmp_path)
    learner = Learner(model, config(algo={"advantage": "own.py:ones"}))
    assert learner.estimator.__name__ == "ones"


@pytest.mark.parametrize(("limits", "passes"), [((99, 99), 1.0), ((40, 99), 2.0), ((40, 40), 3.3)])
def test_a_long_prompt_costs_a_token_no_more_than_a_short_one_where_memory_allows(
    model: Any, limits: tuple[int, int], passes: float
) -> None:
    def work(prompt: int) -> float:
        """Return how often a token of the group is computed in an update, recomputations included."""
        ids = np.arange(prompt + 4, dtype=np.int32) % VOCABULARY
        group = [
            Segment(np.append(ids[:prompt], [m] * 4), np.arange(len(ids)) >= prompt)
            for m in range(4)
        ]
        compute = Compute(model, LearnerSettings.of(settings), row_tokens=lambda: limits)
        done.clear()
        for row in compute.split([group]):
            batch = MicroBatch(select_segments([group], row))
            logp = compute._logprobs(model, pack(batch.groups)).logp
            torch.autograd.backward(logp.sum())
        return sum(done) / pack([group]).tokens

    done: list[int] = []
    settings = config(train={"token_budget": 40})
    work(20)  # the model is tried first
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, given: done.append(given[0].shape[1])
    )
    assert work(20) == 1 and work(39) == pytest.approx(passes, rel=0.15)


# --- a fact for every episode of a step ---


SAMPLED = Tokens.from_ids([1, 2, 3], [Origin.USER, Origin.MODEL, Origin.MODEL])
GIVEN = Tokens.from_ids([1, 2], [Origin.USER, Origin.TEMPLATE])


def episode(
    name: str, reward: float = 0.0, outcome: Outcome = Outcome.FAILED, tokens: Tokens = SAMPLED
) -> Episode:
    return Episode(
        name, "t", reward_parts=(RewardPart("r", reward),), outcome=outcome, tokens=tokens
    )


def group(*rewards: float, name: str = "e") -> list[Episode]:
    return [episode(f"{name}{n}", reward) for n, reward in enumerate(rewards)]


SPREAD_OF_TWO, TRAINED, EQUAL = group(0, 1), Fact.TRAINED, Fact.SKIPPED_ZERO_VARIANCE
ENDS = {
    Outcome.ENV_ERROR: Fact.SKIPPED_ENV_ERROR,
    Outcome.SANDBOX_ERROR: Fact.SKIPPED_SANDBOX_ERROR,
    Outcome.TIMEOUT: Fact.SKIPPED_TIMEOUT,
    Outcome.CANCELLED: Fact.SKIPPED_CANCELLED,
    Outcome.TOO_LONG: Fact.SKIPPED_TOO_LONG,
    Outcome.SOLVED: TRAINED,
    Outcome.TRUNCATED_TURNS: TRAINED,
    Outcome.TRUNCATED_TOKENS: TRAINED,
}
LATE = episode("x", 0.0, Outcome.TIMEOUT)
DRIFTED: dict[str, Any] = {"drift": {"e1": "structural"}}
FACTS: list[tuple[list[list[Episode]], dict[str, Any], list[Fact]]] = [
    ([group(0, 1, 0)], {}, [TRAINED] * 3),
    ([group(1, 1, 1)], {}, [EQUAL] * 3),
    ([group(1, 1)], {"drop_zero_variance": False}, [TRAINED] * 2),
    ([group(0.3, 0.1 + 0.2)], {}, [EQUAL] * 2),  # rounding is not spread
    ([group(0, 1, name="a"), group(0, 0, name="b")], {}, [TRAINED] * 2 + [EQUAL] * 2),
    *(
        ([[*SPREAD_OF_TWO, episode("x", 1, outcome)]], {}, [TRAINED, TRAINED, fact])
        for outcome, fact in ENDS.items()
    ),
    # an error gives a group no spread
    (
        [[*group(1, 1), episode("x", 0.0, Outcome.ENV_ERROR)]],
        {},
        [EQUAL, EQUAL, Fact.SKIPPED_ENV_ERROR],
    ),
    # a group that errors left with one is too small, and a group of one by choice is not
    ([[*group(1), LATE]], {}, [Fact.SKIPPED_GROUP_TOO_SMALL, Fact.SKIPPED_TIMEOUT]),
    ([group(0.0)], {}, [TRAINED]),
    ([[LATE]], {}, [Fact.SKIPPED_TIMEOUT]),
    ([group(0, 1, 1)], DRIFTED, [TRAINED, Fact.SKIPPED_DRIFT, TRAINED]),
    ([SPREAD_OF_TWO], {**DRIFTED, "train_drifted": True}, [TRAINED] * 2),
    *(
        ([SPREAD_OF_TWO], {"drift": {"e1": mild}}, [TRAINED] * 2)
        for mild in ("resegmented", "reserialised", "by_design")
    ),
    ([SPREAD_OF_TWO], DRIFTED, [Fact.SKIPPED_GROUP_TOO_SMALL, Fact.SKIPPED_DRIFT]),
    # nothing sampled is nothing to train
    (
        [[*SPREAD_OF_TWO, episode("x", 1.0, tokens=GIVEN)]],
        {},
        [TRAINED, TRAINED, Fact.SKIPPED_NO_MODEL_TOKENS],
    ),
    ([], {}, []),
    ([[]], {}, []),
    # what is stale is skipped and its group decided without it
    (
        [group(1.0, 0.0, 0.5), group(1.0, 0.0, name="f")],
        {"stale": {"e1", "f0"}},
        [TRAINED, Fact.SKIPPED_STALE, TRAINED, Fact.SKIPPED_STALE, Fact.SKIPPED_GROUP_TOO_SMALL],
    ),
]


@pytest.mark.parametrize(("groups", "given", "wanted"), FACTS)
def test_every_episode_of_a_step_has_its_fact(
    groups: list[list[Episode]], given: dict[str, Any], wanted: list[Fact]
) -> None:
    found = decide(groups, **{"drift": {}, **given})
    assert list(found.items()) == [
        (one.id, fact) for one, fact in zip((e for g in groups for e in g), wanted, strict=True)
    ], "no silent drops"
    # Facts of errors and the list of outcomes that are masked agree.
    assert all(outcome.is_error <= (fact is not TRAINED) for outcome, fact in ENDS.items())
