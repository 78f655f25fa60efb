"""Losses by hand, their weights against autograd, and micro-batches against the whole."""

from dataclasses import replace
from math import e, exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_cli.config.choice import Options, choose, option_names
from agentrl_cli.config.estimators import ESTIMATORS
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


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_sequence_losses_have_the_gradient_of_the_sequence_form(name: str) -> None:
    x = noisy()
    x = replace(x, advantage=torch.arange(-2, 4).double()[x.segment])  # one advantage per sequence
    term = term_of(name, x, **(GMPO if name == "geo_mean" else {}))
    total = (AGGREGATIONS["seq_mean"](x, Totals.of(x.segment, 1)) * term.loss).sum()
    each = []
    for s in range(6):
        a, d = torch.tensor(s - 2.0).double(), (x.logp - x.old)[x.segment == s]
        bounded = d.clamp(-0.4, 0.4)
        kept = torch.minimum(d, bounded) if a > 0 else torch.maximum(d, bounded)
        ratio = d.mean().exp()
        gspo = torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.3) * a)
        each.append(gspo if name == "gspo" else -a * kept.mean().exp())
    expected = torch.stack(each).mean()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(grad(total, x.logp), grad(expected, x.logp))


def test_covariance_losses_by_hand() -> None:
    # log p − mean: -1 0 1, A − mean: -2 0 2: covariances 2 0 2 with the first a little higher
    x = tokens([exp(-1.01), 1.0, e], [-2.0, 0.0, 2.0])
    one: dict[str, Any] = {"fraction": 0.3, "clip_high": 9, "clip_low": 0.9}
    clip = select_tokens(chosen("clip_cov", **one, low=2.005), x.logp, x.advantage)
    assert clip is not None and clip.tolist() == [True, False, False]
    term = term_of("clip_cov", replace(x, selected=clip), **one)
    torch.testing.assert_close(term.weight, t(0, 0, 2 * e))
    kl = select_tokens(chosen("kl_cov", **one), x.logp, x.advantage)
    assert kl is not None and kl.tolist() == [True, False, False]
    term = term_of("kl_cov", x, **one, kl_coef=0.5)
    torch.testing.assert_close(term.loss, t(2 * exp(-1.01) + 0.505, 0, -2 * e))
    torch.testing.assert_close(term.weight, t(-2 * exp(-1.01) + 0.5, 0, 2 * e))
    assert select_tokens(chosen("ppo_clip"), x.logp, x.advantage) is None


def test_the_tokens_that_covariance_losses_touch() -> None:
    x = noisy(10_000)
    found = [
        select_tokens(chosen(name, low=0.1), x.logp, x.advantage) for name in ("clip_cov", "kl_cov")
    ]
    assert [int(one.sum()) for one in found if one is not None] == [2, 20], "by default"
    # What the clip holds already is not drawn: covariances 2 0 2; the last ratio is e with a positive advantage, held
    # above 1.3, so only the first can be drawn.
    x = tokens([exp(-1), 1.0, e], [-2.0, 0.0, 2.0])
    c = chosen("clip_cov", fraction=1.0, clip_low=0.9)
    free, held = (select_tokens(c, x.logp, x.advantage, old=old) for old in (None, x.old))
    assert free is not None and free.tolist() == [True, False, True]
    assert held is not None and held.tolist() == [True, False, False]
    # the same tokens for the same seed
    x = noisy(400)
    c = chosen("clip_cov", fraction=0.02, low=0.1)
    first, second, other = (select_tokens(c, x.logp, x.advantage, seed) for seed in (1, 1, 2))
    assert first is not None and second is not None and other is not None
    assert int(first.sum()) == 8 and torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("dual", [None, 1.6])
def test_weight_is_the_gradient(name: str, dual: float | None) -> None:
    x = noisy()
    c = chosen(name, clip_dual=dual, fraction=0.1, low=0.1, negative=1.3)
    x = replace(x, selected=select_tokens(c, x.logp, x.advantage))
    term = policy_loss(name)(x, c)
    torch.testing.assert_close(term.weight, -grad(term.loss.sum(), x.logp))
    assert not term.weight.requires_grad and not term.ratio.requires_grad
    assert term.clipped.dtype == torch.bool


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_absurd_ratio_stays_finite(name: str) -> None:
    x = LossInput(
        t(0, -900, -1).requires_grad_(), t(-900, 0, -1), t(-1, 1, 1), torch.tensor([0, 0, 0])
    )
    term = term_of(name, x)
    assert torch.isfinite(term.loss).all() and torch.isfinite(grad(term.loss.sum(), x.logp)).all()
    torch.testing.assert_close(term.weight, -grad(term.loss.sum(), x.logp))


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
    # two sequences of one episode
    x = tokens([1.0] * 4, [1.0] * 4, [0, 0, 0, 1], episode_tokens=torch.tensor([4, 4]))
    totals = Totals(tokens=4, sequences=2, max_tokens=8, episodes=1)
    torch.testing.assert_close(AGGREGATIONS["episode_mean"](x, totals), t(*[1 / 4] * 4))


def test_kl_by_hand() -> None:
    logp, ref = t(log(0.5)), t(log(0.25))
    torch.testing.assert_close(KL["k1"](logp, ref), t(log(2)))
    torch.testing.assert_close(KL["k2"](logp, ref), t(log(2) ** 2 / 2))
    torch.testing.assert_close(KL["k3"](logp, ref), t(0.5 + log(2) - 1))
    logp = t(-1, -3).requires_grad_()
    torch.testing.assert_close(KL["abs"](logp, t(-2, -1)), t(1, 2))
    torch.testing.assert_close(grad(KL["abs"](logp, t(-2, -1)).sum(), logp), t(1, -1))
    # in expectation they are the divergence
    p, q = t(0.5, 0.3, 0.2), t(0.4, 0.4, 0.2)
    exact = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p * KL[name](p.log(), q.log())).sum(), exact)
    assert (KL["k3"](p.log(), q.log()) >= 0).all()


def test_corrections_by_hand() -> None:
    sampled, segment = t(-1, -1, -1), torch.tensor([0, 0, 1])
    old = sampled + t(4, 0.5, 1).log()
    expected: dict[str, list[float]] = {
        "none": [1, 1, 1],
        "tis": [3, 0.5, 1],
        "tis_sequence": [2, 2, 1],
        "mis": [0, 0.5, 1],
        "mis_sequence": [2, 2, 1],
    }
    for name, weights in expected.items():
        torch.testing.assert_close(correction(name, old, sampled, segment, 3.0), t(*weights))
    torch.testing.assert_close(correction("mis_sequence", old, sampled, segment, 1.5), t(0, 0, 1))
    torch.testing.assert_close(
        correction("tis_sequence", old, sampled, segment, 1.5), t(1.5, 1.5, 1)
    )
    bounded: dict[str, list[float]] = {"none": [1, 1, 1], "tis": [3, 0.8, 1], "mis": [0, 0, 1]}
    for name, weights in bounded.items():
        torch.testing.assert_close(correction(name, old, sampled, segment, 3.0, 0.8), t(*weights))
    for name, low in (("tis_sequence", [2, 2, 1.5]), ("mis_sequence", [2, 2, 0])):
        torch.testing.assert_close(correction(name, old, sampled, segment, 3.0, 1.5), t(*low))


def test_value_loss_by_hand() -> None:
    value, old, returns = t(1, 1), t(0, 0.9), t(2, 0)
    # ½·max(1, (0.5 − 2)²) and ½·max(1, 1): the second did not move further than the clip
    torch.testing.assert_close(value_loss(value, old, returns, 0.5)[0], t(1.125, 0.5))
    torch.testing.assert_close(value_loss(value, old, returns, None)[0], t(0.5, 0.5))
    # moved beyond the clip: away from the return the loss itself is larger, towards it that at the bound
    value, old, returns = t(1, 1, 0.2), t(0, 0, 0), t(2, -2, 2)
    assert value_loss(value, old, returns, 0.5)[1].tolist() == [True, False, False]
    assert not value_loss(value, old, returns, None)[1].any()


def test_explained_variance_by_hand() -> None:
    returns = t(0, 2)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(t(1, 1), returns) == 0
    assert explained_variance(t(0, 1), returns) == pytest.approx(0.75)
    assert explained_variance(returns, t(1, 1)) != explained_variance(returns, t(1, 1))  # NaN


def test_controllers_by_hand() -> None:
    assert adapt_kl_coef(0.1, kl=0.02, target=0.01, tokens=1000) == pytest.approx(0.1 * 1.02)
    assert adapt_kl_coef(0.1, kl=0.009, target=0.01, tokens=1000) == pytest.approx(0.1 * 0.99)
    assert adapt_kl_coef(0.1, kl=0.0, target=0.01, tokens=100_000) == pytest.approx(0.08), (
        "never below 0"
    )
    assert adapt_kl_coef(0.1, kl=1.0, target=0.01, tokens=100_000) == pytest.approx(0.12)
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
    torch.testing.assert_close(
        got.loss, torch.tensor(-0.8 + 0.05 * log(2) - 0.01, dtype=torch.float64)
    )
    torch.testing.assert_close(got.weight, t(0, -1))
    assert got.metrics["clip_ratio/high_mean"] == 0.5 and got.metrics["clip_ratio/low_mean"] == 0
    assert got.metrics["kl"] == pytest.approx(log(2) / 2) and got.metrics["entropy"] == 1
    assert got.metrics["policy_loss"] == pytest.approx(-0.8)
    assert got.metrics["sampling/correction"] == pytest.approx(1.5)


def part(x: LossInput, sequences: list[int]) -> LossInput:
    """The tokens of some sequences as a micro-batch with its own numbering, leaves shared with the whole."""
    rows = torch.cat([torch.nonzero(x.segment == s)[:, 0] for s in sequences])
    number = torch.cat(
        [torch.full((int((x.segment == s).sum()),), i) for i, s in enumerate(sequences)]
    )

    def take(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[rows]

    return LossInput(
        x.logp[rows],
        x.old[rows],
        x.advantage[rows],
        number,
        take(x.entropy),
        take(x.ref),
        take(x.sampled),
        take(x.selected),
        None if x.episode_tokens is None else x.episode_tokens[sequences],
    )


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_micro_batches_add_up_to_the_whole(name: str, aggregation: str) -> None:
    x = noisy()
    c = LossConfig(
        chosen(name, fraction=0.1, low=0.1),
        kl_coef=0.1,
        entropy_coef=0.02,
        correction="mis_sequence",
    )
    sizes = torch.bincount(x.segment)
    owners = torch.tensor([0, 0, 1, 1, 2, 2])
    of_episode = torch.zeros(3, dtype=torch.int64).index_add_(0, owners, sizes)[owners]
    x = replace(
        x, selected=select_tokens(c.options, x.logp, x.advantage), episode_tokens=of_episode
    )
    totals = replace(Totals.of(x.segment, 100), episodes=3)
    whole = objective(x, c, totals, policy_loss(name), AGGREGATIONS[aggregation])
    parts = [
        objective(part(x, s), c, totals, policy_loss(name), AGGREGATIONS[aggregation])
        for s in ([4, 0], [1], [5, 2, 3])
    ]
    summed = parts[0].loss + parts[1].loss + parts[2].loss
    torch.testing.assert_close(summed, whole.loss, rtol=1e-9, atol=1e-12)
    assert x.entropy is not None
    for leaf in (x.logp, x.entropy):
        torch.testing.assert_close(
            grad(summed, leaf), grad(whole.loss, leaf), rtol=1e-6, atol=1e-12
        )
    for metric, value in whole.metrics.items():
        assert sum(p.metrics[metric] for p in parts) == pytest.approx(value), metric


def test_an_unbiased_kl_has_the_gradient_of_the_divergence() -> None:
    """Over the whole vocabulary, each token as likely as it is sampled: Σ old · ratio · k3 is the divergence itself."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    logp, ref = logits.log_softmax(0), t(0.2, 0.5, 0.3).log()
    old = logp.detach()
    x = LossInput(logp, old, torch.zeros_like(old), torch.tensor([0, 0, 0]), ref=ref)
    c = replace(CONFIG, kl_coef=1.0, kl_unbiased=True)
    chance = {"here": lambda x, totals: old.exp()}
    got = objective(x, c, Totals.of(x.segment, 1), policy_loss("ppo_clip"), chance["here"]).loss
    exact = (logp.exp() * (logp - ref)).sum()
    torch.testing.assert_close(got, exact)
    torch.testing.assert_close(grad(got, logits), grad(exact, logits))
    biased = objective(
        x,
        replace(c, kl_unbiased=False),
        Totals.of(x.segment, 1),
        policy_loss("ppo_clip"),
        chance["here"],
    )
    assert not torch.allclose(grad(biased.loss, logits), grad(exact, logits))


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


def test_the_aggregations_of_records_exist() -> None:
    assert {record.aggregation for record in (*LOSSES.values(), *ESTIMATORS.values())} <= {
        "",
        *AGGREGATIONS,
    }


def test_an_empty_micro_batch_is_zero() -> None:
    none = torch.zeros(0)
    x = LossInput(none.clone().requires_grad_(), none, none, torch.zeros(0, dtype=torch.int64))
    for name in LOSSES:
        for aggregation in AGGREGATIONS.values():
            c = LossConfig(chosen(name), correction="tis_sequence")
            assert (
                objective(x, c, Totals(5, 1, 5), policy_loss(name), aggregation).loss.item() == 0
            ), name
