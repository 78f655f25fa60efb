"""One training step's arithmetic: micro-batches add up, every token's weight is what it says, and NaN stops it."""

import copy
from collections.abc import Sequence
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
            group.append(
                Episode(
                    f"{g}-{m}",
                    f"t{g}",
                    group_id=f"g{g}",
                    sample=m,
                    tokens=tokens,
                    reward_parts=(RewardPart("r", value, 1.0, True),),
                    outcome=Outcome.FAILED,
                )
            )
        groups.append(group)
    return groups


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


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
        held = [t for one in parts for state in one.state.values() for t in state.values()]
        assert sum(t.numel() for t in held if t.device.type == "cpu" and t.ndim) == 0
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


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
        if advantage := update.advantages[episode.id]:
            assert (out == (ratio > 1.28 if advantage > 0 else ratio < 0.8)).all()
            assert (signals.weight[mask][out] == 0).all()
        clipped += int(out.sum())
    assert clipped > 0


def test_gradients_are_clipped_to_the_norm(start: Any) -> None:
    norms, moved = [], []
    begun = torch.cat([p.detach().flatten() for p in start.parameters()])
    for norm in (1e9, 1e-3):
        model = copy.deepcopy(start)
        compute = Compute(model, LearnerSettings.of(config()))  # with another norm, as another rank
        settings = config(train={"max_grad_norm": norm})
        learner: Any = Learner(model, settings, compute=compute)
        learner.compute.optimizer = torch.optim.SGD(model.parameters())
        norms.append(learner.update(episodes(start, SPREAD), 0).metrics["grad_norm"])
        now = torch.cat([p.detach().flatten() for p in model.parameters()])
        moved.append(float((now - begun).norm()))
    assert norms[0] == pytest.approx(norms[1]), "the metric is the norm before clipping"
    rate = 1e-2
    assert moved == pytest.approx([rate * norms[0], rate * 1e-3], rel=1e-2)


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
        assert not np.isfinite([metrics["grad_norm"], metrics["loss"]]).any()
    for name, weight in model.named_parameters():
        assert weight.grad is None
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0, equal_nan=True)


def test_nothing_to_train_on_is_nothing(model: Any) -> None:
    before = weights(model)
    update = Learner(model, config()).update([], 0)
    assert (update.metrics, update.signals, update.advantages) == ({}, {}, {})
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize(
    ("train", "rates"),
    [
        ({}, [0.5, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "cosine"}, [0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]),
        ({"warmup_steps": 0}, [1] * 7),
    ],
)
def test_schedules(train: dict[str, Any], rates: list[float]) -> None:
    settings = config(train={"lr": 1.0, "steps": 6, "warmup_steps": 2, **train})
    learner = Learner(torch.nn.Linear(2, 2), settings)
    assert [learner.learning_rate(step) for step in range(7)] == pytest.approx(rates)


def test_what_cannot_be(model: Any) -> None:
    with pytest.raises(ConfigError, match="frozen"):
        Learner(copy.deepcopy(model).requires_grad_(False), config())
    with pytest.raises(ConfigError, match="temperature"):
        Learner(model, config(rollout={"temperature": 0}))
    with pytest.raises(ConfigError, match="reference"):
        Learner(model, config(algo={"kl_coef": 0.1})).update(episodes(model, SPREAD), 0)


def test_paths_of_files_are_algorithms_too(model: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\n\ndef ones(given):\n    return [np.ones(n, np.float32) for n in given.lengths]\n"
    )
    learner = Learner(model, config(algo={"advantage": f"{tmp_path}/own.py:ones"}))
    assert learner.estimator.__name__ == "ones"


@pytest.mark.parametrize(("limits", "passes"), [((99, 99), 1.0), ((40, 99), 2.0), ((40, 40), 3.3)])
def test_a_long_prompt_costs_a_token_no_more_than_a_short_one_where_memory_allows(
    model: Any, limits: tuple[int, int], passes: float
) -> None:
    done: list[int] = []
    settings = LearnerSettings.of(config(train={"token_budget": 40}))

    def work(prompt: int) -> float:
        """Return how often a token of the group is computed in an update, recomputations included."""
        ids = np.arange(prompt + 4, dtype=np.int32) % VOCABULARY
        group = [
            Segment(np.append(ids[:prompt], [m] * 4), np.arange(len(ids)) >= prompt)
            for m in range(4)
        ]
        compute = Compute(model, settings, row_tokens=lambda: limits)
        done.clear()
        for row in compute.split([group]):
            batch = MicroBatch(select_segments([group], row))
            torch.autograd.backward(compute._logprobs(model, pack(batch.groups)).logp.sum())
        return sum(done) / pack([group]).tokens

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
CUT = episode("cut", 0.3, Outcome.TRUNCATED_TOKENS)
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
    # what its limit of tokens cut may be masked, and what its limit of turns ended is trained
    (
        [[*SPREAD_OF_TWO, CUT, episode("x", 0.2, Outcome.TRUNCATED_TURNS)]],
        {"mask_overlong": True},
        [TRAINED, TRAINED, Fact.SKIPPED_OVERLONG, TRAINED],
    ),
    (
        [[*group(1), CUT]],
        {"mask_overlong": True},
        [Fact.SKIPPED_GROUP_TOO_SMALL, Fact.SKIPPED_OVERLONG],
    ),
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
