"""Losses by hand, and their weights against autograd."""

from dataclasses import replace
from math import e, exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_cli.config.choice import Options, choose, option_names
from agentrl_cli.config.losses import LOSSES, CustomLoss
from agentrl_cli.learning.coefficients import adapt_entropy_coef, adapt_kl_coef
from agentrl_cli.learning.losses import (
    AGGREGATIONS,
    LossConfig,
    LossInput,
    PolicyTerm,
    Totals,
    policy_loss,
    select_tokens,
)
from agentrl_cli.learning.objective import KL, correction, objective
from agentrl_cli.learning.value import explained_variance, value_loss


def chosen(name: str, **options: Any) -> Options:
    """A loss with those of the options that it has; the bounds are 0.2 and 0.3 if not given."""
    given: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, **options}
    own = option_names(LOSSES[name].options)
    return choose(
        LOSSES, name, CustomLoss, {"name": name} | {key: given[key] for key in own if key in given}
    )


def term_of(name: str, x: LossInput, **options: Any) -> PolicyTerm:
    return policy_loss(name)(x, chosen(name, **options))


CONFIG = LossConfig(chosen("ppo_clip"))


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(
    ratios: list[float], advantages: list[float], segment: list[int] | None = None, **fields: Any
) -> LossInput:
    """Tokens whose old probability was e⁻¹."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    logp = (old + t(*ratios).log()).requires_grad_()
    return LossInput(
        logp, old, t(*advantages), torch.tensor(segment or [0] * len(ratios)), **fields
    )


def noisy(n: int = 60, sequences: int = 6, seed: int = 0) -> LossInput:
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(5, n, generator=g, dtype=torch.float64)
    old = -normal[0].abs()
    segment = torch.sort(torch.randint(0, sequences, (n,), generator=g)).values
    return LossInput(
        (old + 0.4 * normal[1]).requires_grad_(),
        old,
        2 * normal[2],
        segment,
        entropy=normal[3].abs().requires_grad_(),
        ref=old + 0.3 * normal[4],
        sampled=old + 0.1 * normal[3],
    )


def grad(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of, retain_graph=True)[0]


GMPO = {"clip_low": 0.4, "clip_high": 0.4}
LOGS = [0.2, 1.0, 0.2, -1.0, 0.1, -1.0]
GEO = [exp(0.3), exp(-0.1), exp(-0.45)]
# p from 0.368 to 0.736, 0.441, 0.184, 0.184
DPPO = tokens([2.0, 1.2, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0])
BY_HAND: list[tuple[str, LossInput, dict[str, Any], dict[str, list[Any]]]] = [
    (
        "ppo_clip",
        tokens([1.0, 1.5, 1.5, 0.5, 0.5, 1.1], [2.0, 2.0, -2.0, 2.0, -2.0, 0.0]),
        {},
        {
            "loss": [-2, -2.6, 3, -1, 1.6, 0],
            "weight": [2, 0, -3, 1, 0, 0],
            "clipped": [False, True, False, False, True, False],
            "ratio": [1, 1.5, 1.5, 0.5, 0.5, 1.1],
        },
    ),
    (
        "ppo_clip",
        tokens([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0]),
        {"clip_dual": 3.0},
        {"loss": [3, 2, -1.3], "weight": [0, -2, 0], "clipped": [True, False, True]},
    ),
    # sequence ratios: sqrt(1.5·1.5/1) … first (1.44·1)^½ = 1.2, second 1.5 alone, clipped for A > 0
    (
        "gspo",
        tokens([1.44, 1.0, 1.5], [1.0, 1.0, 1.0], [0, 0, 1]),
        {},
        {"ratio": [1.2, 1.2, 1.5], "loss": [-1.2, -1.2, -1.3], "weight": [1.2, 1.2, 0]},
    ),
    # two sequences with A < 0, of which the one that became unlikely is held
    (
        "gspo",
        tokens([0.5, 1.5], [-1.0, -1.0], [0, 1]),
        {},
        {"loss": [0.8, 1.5], "weight": [0, -1.5], "clipped": [True, False]},
    ),
    # log ratios 0.2 and 1 (held at 0.4) for A = 2: e^0.3; 0.2 and −1 (held at −0.4) for A = −1: e^−0.1; −1 is kept for
    # A > 0, since the bound on that side does not make it worse
    (
        "geo_mean",
        tokens([exp(v) for v in LOGS], [2.0, 2.0, -1.0, -1.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2]),
        GMPO,
        {
            "ratio": [GEO[0], GEO[0], GEO[1], GEO[1], GEO[2], GEO[2]],
            "loss": [-2 * GEO[0], -2 * GEO[0], GEO[1], GEO[1], -GEO[2], -GEO[2]],
            "clipped": [False, True, False, True, False, False],
            "weight": [2 * GEO[0], 0, -GEO[1], 0, GEO[2], GEO[2]],
        },
    ),
    # the mean advantage of a sequence; a token without an advantage counts as a ratio of 1
    (
        "geo_mean",
        tokens([1.0, 1.0, 1.0], [3.0, -1.0, 0.0], [0, 0, 0]),
        GMPO,
        {"loss": [-2 / 3] * 3, "weight": [2 / 3, 2 / 3, 0]},
    ),
    (
        "cispo",
        tokens([1.0, 2.0, 0.5], [1.0, 1.0, -1.0]),
        {},
        {
            "weight": [1, 1.3, -0.8],
            "loss": [1, -1.3 * (-1 + log(2)), 0.8 * (-1 - log(2))],
            "clipped": [False, True, True],
        },
    ),
    # 4·σ(0), 4·σ(log 3)
    (
        "sapo",
        tokens([1.0, 1 + log(3)], [1.0, 1.0]),
        {},
        {"loss": [-2, -3], "weight": [1, 4 * 0.75 * 0.25 * (1 + log(3))]},
    ),
    ("sapo", tokens([1.0], [-1.0]), {"negative": 2.0}, {"loss": [1], "weight": [-1]}),
    (
        "dppo",
        DPPO,
        {"threshold": 0.15},
        {
            "weight": [0, 1.2, 0, 0.5],
            "loss": [0, -1.2, 0, -0.5],
            "clipped": [True, False, True, False],
        },
    ),
    # 0.297, 0.011, 0.093, 0.093
    (
        "dppo",
        DPPO,
        {"divergence": "kl", "threshold": 0.1},
        {"clipped": [True, False, False, False]},
    ),
    ("reinforce", tokens([1.0, e], [2.0, -1.0]), {}, {"loss": [2, 0], "weight": [2, -1]}),
    # on policy all losses with a ratio push by the advantage
    *(
        (name, tokens([1.0] * 3, [0.5, -2.0, 1.0]), {}, {"weight": [0.5, -2.0, 1.0]})
        for name in ("ppo_clip", "dapo", "gspo", "cispo", "sapo", "reinforce")
    ),
]


@pytest.mark.parametrize(
    ("name", "x", "options", "wanted"), BY_HAND, ids=[name for name, *_ in BY_HAND]
)
def test_by_hand(
    name: str, x: LossInput, options: dict[str, Any], wanted: dict[str, list[Any]]
) -> None:
    term = term_of(name, x, **options)
    for part, numbers in wanted.items():
        assert getattr(term, part).tolist() == pytest.approx(numbers, rel=1e-6, abs=1e-9), part


def test_covariance_losses_by_hand() -> None:
    # log p − mean: -1 0 1, A − mean: -2 0 2: covariances 2 0 2 with the first a little higher
    x = tokens([exp(-1.01), 1.0, e], [-2.0, 0.0, 2.0])
    one: dict[str, Any] = {"fraction": 0.3, "clip_high": 9, "clip_low": 0.9}
    assert selected("clip_cov", x, **one, low=2.005) == [True, False, False]
    term = term_of("clip_cov", replace(x, selected=torch.tensor([True, False, False])), **one)
    torch.testing.assert_close(term.weight, t(0, 0, 2 * e))
    assert selected("kl_cov", x, **one) == [True, False, False]
    term = term_of("kl_cov", x, **one, kl_coef=0.5)
    torch.testing.assert_close(term.loss, t(2 * exp(-1.01) + 0.505, 0, -2 * e))
    torch.testing.assert_close(term.weight, t(-2 * exp(-1.01) + 0.5, 0, 2 * e))
    assert select_tokens(chosen("ppo_clip"), x.logp, x.advantage) is None


def selected(
    name: str, x: LossInput, seed: int = 0, old: Tensor | None = None, **options: Any
) -> list[bool]:
    found: Any = select_tokens(chosen(name, **options), x.logp, x.advantage, seed, old=old)
    return [bool(one) for one in found]


def test_the_tokens_that_covariance_losses_touch() -> None:
    x = noisy(10_000)
    assert [sum(selected(name, x, low=0.1)) for name in ("clip_cov", "kl_cov")] == [2, 20]
    # What the clip holds already is not drawn: covariances 2 0 2; the last ratio is e with a positive advantage, held
    # above 1.3, so only the first can be drawn.
    x = tokens([exp(-1), 1.0, e], [-2.0, 0.0, 2.0])
    free, held = (
        selected("clip_cov", x, old=old, fraction=1.0, clip_low=0.9) for old in (None, x.old)
    )
    assert (free, held) == ([True, False, True], [True, False, False])
    # the same tokens for the same seed
    first, second, other = (
        selected("clip_cov", noisy(400), seed, fraction=0.02, low=0.1) for seed in (1, 1, 2)
    )
    assert sum(first) == 8 and first == second != other


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("dual", [None, 1.6])
def test_weight_is_the_gradient(name: str, dual: float | None) -> None:
    x = noisy()
    c = chosen(name, clip_dual=dual, fraction=0.1, low=0.1, negative=1.3)
    term = policy_loss(name)(replace(x, selected=select_tokens(c, x.logp, x.advantage)), c)
    torch.testing.assert_close(term.weight, -grad(term.loss.sum(), x.logp))
    assert not term.weight.requires_grad and not term.ratio.requires_grad


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_absurd_ratio_stays_finite(name: str) -> None:
    logp, old = t(0, -900, -1).requires_grad_(), t(-900, 0, -1)
    term = term_of(name, LossInput(logp, old, t(-1, 1, 1), torch.tensor([0, 0, 0])))
    assert torch.isfinite(torch.stack([term.loss, term.weight])).all()
    torch.testing.assert_close(term.weight, -grad(term.loss.sum(), logp))


def test_aggregations_by_hand() -> None:
    x = tokens([1.0] * 4, [1.0] * 4, [0, 0, 0, 1])
    totals = Totals(tokens=4, sequences=2, max_tokens=8)
    assert Totals.of(x.segment, 8) == totals
    expected = {
        "token_mean": [1 / 4] * 4,
        "seq_mean": [1 / 6, 1 / 6, 1 / 6, 1 / 2],
        "seq_mean_norm": [1 / 16] * 4,
        "seq_mean_token_sum": [1 / 2] * 4,
        "episode_mean": [1 / 6, 1 / 6, 1 / 6, 1 / 2],
    }
    for name, coefficients in expected.items():
        torch.testing.assert_close(AGGREGATIONS[name](x, totals), t(*coefficients))
    of_one_episode = replace(x, episode_tokens=torch.tensor([4, 4]))  # two sequences
    found = AGGREGATIONS["episode_mean"](of_one_episode, replace(totals, episodes=1))
    torch.testing.assert_close(found, t(*[1 / 4] * 4))


def test_kl_by_hand() -> None:
    for name, value in (("k1", log(2)), ("k2", log(2) ** 2 / 2), ("k3", 0.5 + log(2) - 1)):
        torch.testing.assert_close(KL[name](t(log(0.5)), t(log(0.25))), t(value))
    logp = t(-1, -3).requires_grad_()
    found = KL["abs"](logp, t(-2, -1))
    torch.testing.assert_close(found, t(1, 2))
    torch.testing.assert_close(grad(found.sum(), logp), t(1, -1))
    # in expectation they are the divergence
    p, q = t(0.5, 0.3, 0.2), t(0.4, 0.4, 0.2)
    exact = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p * KL[name](p.log(), q.log())).sum(), exact)


@pytest.mark.parametrize(
    ("name", "cap", "floor", "weights"),
    [
        ("none", 3.0, None, [1, 1, 1]),
        ("tis", 3.0, None, [3, 0.5, 1]),
        ("tis_sequence", 3.0, None, [2, 2, 1]),
        ("mis", 3.0, None, [0, 0.5, 1]),
        ("mis_sequence", 3.0, None, [2, 2, 1]),
        ("mis_sequence", 1.5, None, [0, 0, 1]),
        ("tis_sequence", 1.5, None, [1.5, 1.5, 1]),
        ("none", 3.0, 0.8, [1, 1, 1]),
        ("tis", 3.0, 0.8, [3, 0.8, 1]),
        ("mis", 3.0, 0.8, [0, 0, 1]),
        ("tis_sequence", 3.0, 1.5, [2, 2, 1.5]),
        ("mis_sequence", 3.0, 1.5, [2, 2, 0]),
    ],
)
def test_corrections_by_hand(
    name: str, cap: float, floor: float | None, weights: list[float]
) -> None:
    sampled, segment = t(-1, -1, -1), torch.tensor([0, 0, 1])
    old = sampled + t(4, 0.5, 1).log()
    torch.testing.assert_close(correction(name, old, sampled, segment, cap, floor), t(*weights))


def test_value_loss_by_hand() -> None:
    value, old, returns = t(1, 1), t(0, 0.9), t(2, 0)
    # ½·max(1, (0.5 − 2)²) and ½·max(1, 1): the second did not move further than the clip
    torch.testing.assert_close(value_loss(value, old, returns, 0.5)[0], t(1.125, 0.5))
    torch.testing.assert_close(value_loss(value, old, returns, None)[0], t(0.5, 0.5))
    # moved beyond the clip: away from the return the loss itself is larger, towards it that at the bound
    moved = t(1, 1, 0.2), t(0, 0, 0), t(2, -2, 2)
    assert value_loss(*moved, 0.5)[1].tolist() == [True, False, False]
    assert not value_loss(*moved, None)[1].any()


@pytest.mark.parametrize(
    ("values", "returns", "share"),
    [
        ((0, 2), (0, 2), 1),
        ((1, 1), (0, 2), 0),
        ((0, 1), (0, 2), 0.75),
        ((0, 2), (1, 1), float("nan")),
    ],
)
def test_explained_variance_by_hand(
    values: tuple[float, ...], returns: tuple[float, ...], share: float
) -> None:
    assert explained_variance(t(*values), t(*returns)) == pytest.approx(share, nan_ok=True)


@pytest.mark.parametrize(
    ("kl", "tokens", "factor"),
    [(0.02, 1000, 1.02), (0.009, 1000, 0.99), (0.0, 100_000, 0.8), (1.0, 100_000, 1.2)],
)
def test_the_kl_controller_by_hand(kl: float, tokens: int, factor: float) -> None:
    """However long the step, by a fifth at most: the coefficient is never below 0."""
    assert adapt_kl_coef(0.1, kl=kl, target=0.01, tokens=tokens) == pytest.approx(0.1 * factor)


def test_the_entropy_controller_by_hand() -> None:
    assert adapt_entropy_coef(0.01, entropy=0.1, target=0.2) == pytest.approx(0.015)
    assert adapt_entropy_coef(0.001, entropy=0.3, target=0.2) == 0


def test_objective_by_hand() -> None:
    x = tokens(
        [1.5, 1.0],
        [1.0, -1.0],
        entropy=t(0.5, 1.5),
        ref=t(-1 + log(1.5), -1 - log(2)),
        sampled=t(-2, -1),
    )
    c = replace(
        CONFIG, kl_coef=0.1, kl="k1", entropy_coef=0.01, correction="tis", correction_cap=2.0
    )
    got = objective(
        x, c, Totals.of(x.segment, 9), policy_loss("ppo_clip"), AGGREGATIONS["token_mean"]
    )
    # policy ½(2·−1.3 + 1), KL ½(0 + log 2), entropy mean 1
    assert got.loss.item() == pytest.approx(-0.8 + 0.05 * log(2) - 0.01)
    torch.testing.assert_close(got.weight, t(0, -1))
    wanted = {
        "clip_ratio/high_mean": 0.5,
        "clip_ratio/low_mean": 0,
        "kl": log(2) / 2,
        "entropy": 1,
        "policy_loss": -0.8,
        "sampling/correction": 1.5,
    }
    assert {name: got.metrics[name] for name in wanted} == pytest.approx(wanted)


def test_an_unbiased_kl_has_the_gradient_of_the_divergence() -> None:
    """Over the whole vocabulary, each token as likely as it is sampled: Σ old · ratio · k3 is the divergence itself."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    logp, ref = logits.log_softmax(0), t(0.2, 0.5, 0.3).log()
    old = logp.detach()
    x = LossInput(logp, old, torch.zeros_like(old), torch.tensor([0, 0, 0]), ref=ref)
    got, biased = (
        objective(
            x,
            replace(CONFIG, kl_coef=1.0, kl_unbiased=unbiased),
            Totals.of(x.segment, 1),
            policy_loss("ppo_clip"),
            lambda x, totals: old.exp(),
        ).loss
        for unbiased in (True, False)
    )
    exact = (logp.exp() * (logp - ref)).sum()
    torch.testing.assert_close(got, exact)
    torch.testing.assert_close(grad(got, logits), grad(exact, logits))
    assert not torch.allclose(grad(biased, logits), grad(exact, logits))


def test_objective_weight_times_coefficient_is_the_policy_gradient() -> None:
    x = noisy()
    got = objective(
        x,
        replace(CONFIG, correction="tis"),
        Totals.of(x.segment, 9),
        policy_loss("ppo_clip"),
        AGGREGATIONS["seq_mean"],
    )
    torch.testing.assert_close(got.weight * got.coefficient, -grad(got.loss, x.logp))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_empty_micro_batch_is_zero(name: str) -> None:
    none = torch.zeros(0)
    x = LossInput(none.clone().requires_grad_(), none, none, torch.zeros(0, dtype=torch.int64))
    c = LossConfig(chosen(name), correction="tis_sequence")
    for aggregation in AGGREGATIONS.values():
        assert objective(x, c, Totals(5, 1, 5), policy_loss(name), aggregation).loss.item() == 0
