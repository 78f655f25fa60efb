"""Advantage estimators: pure functions from rewards to one number per trained token (numpy).

Each takes an `AdvantageInput` and returns N float32 arrays, one per episode over its trained tokens. The ones that
compute one number per episode spread it. A group of one carries no comparison: its advantage is 0 in every
group-relative estimator. What else is known of each is its record in config/estimators.py.

Not here: which episodes are trained on (dispositions.py), and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from math import comb
from typing import Any, get_args

import numpy as np

from agentrl_cli.config import AlgoConfig
from agentrl_cli.config.estimators import ESTIMATORS, CustomEstimator, Estimator, Needs
from agentrl_cli.errors import ConfigError
from agentrl_cli.learning.dispositions import SAME
from agentrl_cli.learning.estimator_inputs import (
    AdvantageInput,
    Float64,
    group_mean,
    group_sums,
    need,
    normalise,
    over,
    parts_apart,
    spread,
    spread_turns,
    whiten,
)
from agentrl_cli.learning.turn_advantages import rewards_to_go
from agentrl_cli.registry import resolve
from agentrl_cli.types import Episode, Float32


def grpo(x: AdvantageInput) -> list[Float32]:
    """(R − group mean) / (group std + eps). https://arxiv.org/abs/2402.03300"""
    return spread(normalise(x.returns, x.groups, x.eps), x)


def dr_grpo(x: AdvantageInput) -> list[Float32]:
    """R − group mean, no standard deviation. https://arxiv.org/abs/2503.20783"""
    return spread(x.returns - group_mean(x.returns, x.groups), x)


def batch(x: AdvantageInput) -> list[Float32]:
    """(R − group mean) / (std of the whole batch + eps). https://arxiv.org/abs/2508.08221 (Lite PPO)."""
    r = x.returns
    std = r.std(ddof=1) if len(r) > 1 else 0.0
    return spread(over(r - group_mean(r, x.groups), std + x.eps), x)


def rloo(x: AdvantageInput) -> list[Float32]:
    """R − mean of the group's other episodes. https://arxiv.org/abs/2402.14740"""
    r = x.returns
    total, n = group_sums(r, x.groups)
    return spread(np.where(n > 1, n / np.maximum(n - 1, 1), 0.0) * (r - total / n), x)


def reinforce_pp(x: AdvantageInput) -> list[Float32]:
    """Discounted return of each token, whitened over the batch's tokens. https://arxiv.org/abs/2501.03262."""
    return whiten(rewards_to_go(x, x.gamma), x)


def reinforce_pp_baseline(x: AdvantageInput) -> list[Float32]:
    """R − group mean, then whitened over the batch's tokens. https://arxiv.org/abs/2501.03262 (w/ baseline)."""
    return whiten([np.asarray(a, np.float64) for a in dr_grpo(x)], x)


def remax(x: AdvantageInput) -> list[Float32]:
    """Reward still to come at each token − reward of the greedy attempt. https://arxiv.org/abs/2310.10505.

    As verl has it: with a reward at the end alone, R − the greedy attempt's on every token; rewards of turns and
    penalties of tokens count from where they lie backwards.
    """
    greedy = need(x.baseline, "the greedy attempt's reward (baseline)", "remax")
    pairs = zip(rewards_to_go(x, 1.0), greedy, strict=True)
    return [(r - base).astype(np.float32) for r, base in pairs]


def opo(x: AdvantageInput) -> list[Float32]:
    """R − length-weighted group mean, the variance-optimal baseline. https://arxiv.org/abs/2505.23585."""
    r, n = x.returns, x.lengths.astype(np.float64)
    weight = group_mean(n, x.groups)
    base = np.where(weight > 0, group_mean(n * r, x.groups) / np.where(weight > 0, weight, 1.0), r)
    return spread(r - base, x)


def gdpo(x: AdvantageInput) -> list[Float32]:
    """Return each reward part normalised in its group, weighted sum, then over the batch.
    https://arxiv.org/abs/2601.05242.

    NaN marks a part that does not apply to an episode: left out of the statistics and of the sum.
    """
    total = parts_apart(x, "gdpo")
    std = total.std(ddof=1) if x.size > 1 else 0.0
    return spread(over(total - (total.mean() if x.size else 0.0), std + x.eps), x)


def pass_at_k(x: AdvantageInput) -> list[Float32]:
    """(E[best of k | episode in it] − E[best of k]) / std of the best of k. https://arxiv.org/abs/2508.10751.

    Exact over all subsets of size k of the group; written for any reward, and for rewards 0 and 1 the paper's closed
    form. k = 1 is GRPO with the population standard deviation. k is cut to the group's size − 1: of a whole group
    there is one subset only, which does not compare its members.
    """
    return _by_group(x, lambda r: _best_of_k(r, max(1, min(x.k, len(r) - 1)), x.eps))


def grpo_passk(x: AdvantageInput) -> list[Float32]:
    """(Best − second best) / (group std + eps) for the best of its group, 0 for the others.

    https://arxiv.org/abs/2503.19595 with k the group's size, under verl's name: pass@k gains by the best alone, and by
    what it is better than the next. A tie for the best gives 0.
    """

    def lead(r: Float64) -> Float64:
        second, best = np.sort(r)[-2:]
        first = np.arange(len(r)) == r.argmax()
        return over(first * (best - second), r.std(ddof=1) + x.eps)

    return _by_group(x, lead)


def _by_group(x: AdvantageInput, estimate: Callable[[Float64], Float64]) -> list[Float32]:
    """Estimate from the returns of each group; 0 in a group of one."""
    out = np.zeros(x.size)
    for group in np.unique(x.groups):
        rows = np.flatnonzero(x.groups == group)
        if len(rows) > 1:
            out[rows] = estimate(x.returns[rows])
    return spread(out, x)


def maxrl(x: AdvantageInput) -> list[Float32]:
    """(R − group mean) / group mean, 0 where the mean is not above 0: maximum-likelihood RL.

    https://arxiv.org/abs/2602.02710, algorithm 1, up to the 1/N of the group. Derived for rewards of 0 and 1.
    """
    mean = group_mean(x.returns, x.groups)
    return spread(over(x.returns - mean, np.maximum(mean, 0.0)), x)


def rae(x: AdvantageInput) -> list[Float32]:
    """R of the player − the running mean of its game and player. https://arxiv.org/abs/2506.24119

    Each episode in its order: compared with the mean of those before it, which starts at 0, and then counted in it.
    """
    rewards = x.player_rewards or tuple({"": float(reward)} for reward in x.returns)
    players = x.turn_players or tuple(("",) * len(counts) for counts in x.turn_counts)
    found = []
    for own, turns in zip(rewards, players, strict=True):
        gains = {player: reward - x.means.get(player, 0.0) for player, reward in own.items()}
        for player, gain in gains.items():
            x.means[player] = x.means.get(player, 0.0) + (1 - x.decay) * gain
        found.append(np.array([gains.get(player, 0.0) for player in turns], np.float64))
    return spread_turns(found, x)


def distill(x: AdvantageInput) -> list[Float32]:
    """coef × (log p_teacher − log p) of each sampled token + reward_coef × grpo.

    One sample's estimate of −KL(student || teacher), on the student's own tokens. https://arxiv.org/abs/2306.13649
    (on-policy, reverse KL); as an advantage: https://thinkingmachines.ai/blog/on-policy-distillation/
    """
    if not x.size:
        return []
    teacher = need(x.logp_teacher, "the teacher's log-probabilities", "distill")
    student = need(x.logp_student, "the student's log-probabilities", "distill")
    rows = zip(grpo(x), teacher, student, strict=True)
    return [np.asarray(x.reward_coef * r + x.coef * (t - s), np.float32) for r, t, s in rows]


def _best_of_k(rewards: Float64, k: int, eps: float) -> Float64:
    """[n] pass@k advantages of one group."""
    n = len(rewards)
    order = np.argsort(rewards, kind="stable")
    r = rewards[order]
    best = np.array([comb(j, k - 1) for j in range(n)]) / comb(n, k)
    """best[j]: chance that the j-th smallest is the best of a random subset"""
    mean = float(best @ r)
    std = float(np.sqrt(max(float(best @ (r - mean) ** 2), 0.0)))
    given = np.empty(n)
    for j in range(n):
        chance = np.array(
            [comb(i - 1, k - 2) if i > j and k > 1 else 0 for i in range(n)], np.float64
        )
        chance[j] = comb(j, k - 1)
        given[j] = chance @ r / comb(n - 1, k - 1)
    out = np.empty(n)
    out[order] = over(given - mean, std + eps)
    return out


def episode_advantage(tokens: Sequence[Float32]) -> Float32:
    """[N] one number per episode to list and sort by: the mean over its trained tokens, 0 where it has none."""
    return np.array([float(a.mean()) if len(a) else 0.0 for a in tokens], np.float32)


NOTHING = 1e-6
"""An advantage up to this is rounding."""


def find(name: str) -> Estimator:
    """Return the record of a name or path. Raises NotFound with the nearest names.

    A path may name an Estimator, or a function: then `needs` is the function's attribute of that name, if it has one.
    Raises ConfigError if it needs anything that is not in `Needs`.
    """
    found = resolve("advantages", ESTIMATORS, name)
    if not isinstance(found, Estimator):
        needs = str(getattr(found, "needs", ""))
        found = Estimator(found, CustomEstimator, "", name, "", "nothing", needs)  # type: ignore[arg-type]
    if found.needs not in get_args(Needs):
        known = ", ".join(filter(None, get_args(Needs)))
        raise ConfigError(
            f"The advantage {name!r} needs {found.needs!r}.", hint=f"There are {known}."
        )
    return found


def function(name: str) -> Callable[[AdvantageInput], list[Float32]]:
    """Return the function of a name or path. Raises as `find` does."""
    given = find(name).function
    found: Callable[[AdvantageInput], list[Float32]] = (
        resolve("advantages", {}, given) if isinstance(given, str) else given
    )
    return found


def estimate(algo: AlgoConfig, x: AdvantageInput) -> list[Float32]:
    """N × [lengths_i] advantages by the configured estimator."""
    return function(algo.advantage.name)(x)


def needs(algo: AlgoConfig) -> Needs:
    """Return the inputs that the configured estimator needs. Raises as `find` does."""
    return find(algo.advantage.name).needs


def drops_equal(algo: AlgoConfig) -> bool:
    """Whether groups of equal rewards are left out: with most estimators there is nothing to learn from them.

    Not if advantages do not compare within the group, or if the KL is part of the reward.
    """
    return algo.skip.zero_variance and compares_groups(algo)


def compares_groups(algo: AlgoConfig) -> bool:
    """Whether episodes teach nothing but by the difference of their reward to that of their group."""
    return find(algo.advantage.name).compares == "rewards" and not (
        algo.kl.coef and algo.kl.where == "reward"
    )


def has_signal(algo: AlgoConfig, episodes: Sequence[Episode]) -> bool:
    """Whether a group's usable episodes teach the configured estimator anything: dynamic sampling counts such groups.

    One that compares parts or turns within the group is asked for its advantages. Others (gae, reinforce_pp, remax,
    your own) and a KL in the reward learn from every group, also where all rewards are equal.
    """
    if find(algo.advantage.name).compares not in ("rewards", "group") or (
        algo.kl.coef and algo.kl.where == "reward"
    ):
        return bool(episodes)
    if compares_groups(algo):
        rewards = [episode.graded_reward for episode in episodes]
        return bool(rewards) and max(rewards) - min(rewards) >= SAME
    found = estimate(algo, AdvantageInput.of(episodes, **options(algo)))
    return any(float(np.abs(a).max()) > NOTHING for a in found if len(a))


def options(algo: AlgoConfig) -> dict[str, Any]:
    """Return the estimator's options, as fields of AdvantageInput."""
    names = {field.name for field in fields(AdvantageInput)}
    return {
        name: value
        for name, value in algo.advantage.model_dump(by_alias=False).items()
        if name in names
    }
