"""Advantages below the episode: per token (GAE) and per assistant turn (discounted returns, MT-GRPO, GiGPO).

Discounts count trained tokens in `gae` and `discounted`, and assistant turns in the rest; tool tokens in between
cost no discount, since the policy did not choose them. The targets of the value head are in value.py.

Where an episode branches, what follows a token or turn is what follows on its path, and each branch ends with the
episode's reward. A token or turn on several branches counts as in the first, where it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentrl_cli.learning.estimator_inputs import (
    AdvantageInput,
    Float64,
    Ints,
    need,
    normalise,
    over,
    parts_apart,
    spread_turns,
    whiten,
)
from agentrl_cli.types import Float32


@dataclass(frozen=True, slots=True)
class TokenPath:
    """The trained tokens of an episode that lie on one branch."""

    tokens: Ints
    """[n] their numbers among the episode's trained tokens."""
    own: np.ndarray[Any, np.dtype[np.bool_]]
    """[n] those that no earlier branch has."""
    rewards: Float64
    """[n] the episode's at the last, a turn's at the turn's last, less penalties."""


def token_paths(x: AdvantageInput, i: int) -> list[TokenPath]:
    """Return the branches of episode i as tokens, in order."""
    counts, n = x.turn_counts[i], int(x.lengths[i])
    starts = np.cumsum(counts) - counts
    seen: set[int] = set()
    out = []
    for path in x.turn_paths[i]:
        size = counts[path]
        spans = [np.arange(a, a + k) for a, k in zip(starts[path], size, strict=True)]
        whole = len(path) == len(counts)  # of an episode without turns, too
        tokens = np.arange(n) if whole else np.concatenate([np.zeros(0, np.int64), *spans])
        own = np.ones(len(tokens), np.bool_)
        if seen:
            own = np.repeat([t not in seen for t in path.tolist()], size)
        r = np.zeros(len(tokens))
        if x.token_penalty is not None:
            r -= x.token_penalty[i][tokens]
        if x.turn_rewards is not None and len(r):
            np.add.at(r, np.maximum(np.cumsum(size) - 1, 0), np.nan_to_num(x.turn_rewards[i][path]))
        if len(r):
            r[-1] += x.rewards[i]
        out.append(TokenPath(tokens, own, r))
        seen.update(path.tolist())
    return out


def along(x: AdvantageInput, value: Callable[[int, TokenPath, bool], Float64]) -> list[Float64]:
    """N × [lengths_i] from `value(episode, path, last)`, [n] over a path's tokens, each token from its first branch."""
    out = []
    for i, n in enumerate(x.lengths):
        values, paths = np.zeros(int(n)), token_paths(x, i)
        for number, path in enumerate(paths, 1):
            values[path.tokens[path.own]] = value(i, path, number == len(paths))[path.own]
        out.append(values)
    return out


def rewards_to_go(x: AdvantageInput, gamma: float) -> list[Float64]:
    """N × [lengths_i] discounted sum of the rewards from each token on.

    An episode's reward is at its last token, a turn's at the turn's last, less penalties.
    """
    return along(x, lambda i, path, last: discounted(path.rewards, gamma))


def discounted(rewards: Float64, gamma: float) -> Float64:
    """[n] G_t = r_t + gamma · G_{t+1}."""
    out = np.zeros(len(rewards))
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + gamma * running
        out[t] = running
    return out


def gae_raw(x: AdvantageInput) -> list[Float64]:
    """N × [lengths_i] A_t = Σ (gamma·lam)^l δ_{t+l}, δ_t = r_t + gamma·V_{t+1} − V_t. https://arxiv.org/abs/1506.02438."""
    given = need(x.values, "a value head (values)", "gae")

    def path_gae(i: int, path: TokenPath, last: bool) -> Float64:
        values = np.asarray(given[i], np.float64)[path.tokens]
        after = 0.0 if x.bootstrap is None or not last else float(x.bootstrap[i])
        delta = path.rewards + x.gamma * np.append(values[1:], after)[: len(values)] - values
        return discounted(delta, x.gamma * x.lam)

    return along(x, path_gae)


def gae(x: AdvantageInput) -> list[Float32]:
    """Generalised advantage estimation over trained tokens, whitened over the batch (PPO as in verl)."""
    return whiten(gae_raw(x), x)


def value_targets(x: AdvantageInput) -> list[Float32]:
    """N × [lengths_i] returns that the value head regresses to: unwhitened advantage + value."""
    raw = gae_raw(x)
    return [(a + v).astype(np.float32) for a, v in zip(raw, x.values or (), strict=True)]


def _turns_to_go(x: AdvantageInput, rewards: Float64) -> list[Float64]:
    """N × [K_i] discounted rewards from each assistant turn on; a path's last turn gets the episode's of `rewards`.

    A turn is then what a token is in `rewards_to_go`.
    """
    counts = tuple(np.ones(len(each), np.int64) for each in x.turn_counts)
    lengths = np.array([len(each) for each in counts], np.int64)
    turns = replace(x, rewards=rewards, lengths=lengths, turn_lengths=counts, token_penalty=None)
    return rewards_to_go(turns, x.gamma)


def _by_depth(x: AdvantageInput, rows: Sequence[int]) -> Iterator[list[tuple[int, int, bool]]]:
    """For each depth of the paths of some episodes (episode, turn, True) of the turns there, each once.

    A path that ended before stands there with its last turn and False; −1 if it has none.
    """
    paths = [(i, path.tolist()) for i in rows for path in x.turn_paths[i]]
    for depth in range(max((len(path) for _, path in paths), default=0)):
        found = [
            (i, path[depth], True) if depth < len(path) else (i, path[-1] if path else -1, False)
            for i, path in paths
        ]
        yield list(dict.fromkeys(found))


def turn_returns(x: AdvantageInput) -> list[Float32]:
    """Discounted return of each turn, normalised against the siblings at the same turn.

    REINFORCE with reward-to-go (http://incompleteideas.net/book/the-book.html, section 13.3) and GRPO's group
    baseline per turn number; a sibling that ended earlier counts with the return of its last turn. One turn each and
    no turn rewards: GRPO.
    """
    returns = _turns_to_go(x, x.returns)
    out = [np.zeros(len(r)) for r in returns]
    for group in np.unique(x.groups):
        rows = [int(i) for i in np.flatnonzero(x.groups == group) if len(returns[i])]
        for entries in _by_depth(x, rows):
            column = np.array([returns[i][turn] for i, turn, _ in entries])
            scaled = normalise(column, np.zeros(len(column), np.int64), x.eps)
            for (i, turn, reached), a in zip(entries, scaled, strict=True):
                if reached:
                    out[i][turn] = a
    return spread_turns(out, x)


def mt_grpo(x: AdvantageInput) -> list[Float32]:
    """GRPO's advantage plus turn_coef × what turns still earn, normalised over the group at the same turn.

    https://arxiv.org/abs/2505.11821 for any number of turns; of its two turns with a reward at the first it is the
    paper's. A turn counts with the discounted rewards from it on, and a sibling that has ended with 0, which is what it
    still earns. Each turn's own reward over the siblings that reach it would be biased where the policy decides when
    to stop: going on to a turn of mean reward would look like nothing gained.
    """
    rewards = need(x.turn_rewards, "rewards per turn (turn_rewards)", "mt_grpo")
    return spread_turns(_with_turns(x, normalise(x.returns, x.groups, x.eps), [rewards]), x)


def turn_gdpo(x: AdvantageInput) -> list[Float32]:
    """gdpo with turns: each reward part, and each tool's turn rewards, normalised apart, summed, then over the batch.

    https://arxiv.org/abs/2601.05242 with the turn term of mt_grpo for every source of turn rewards by itself: a tool
    that gives 100 and a user who gives 1 weigh the same. Without turn rewards: gdpo. No mean of the batch is taken off,
    since an episode of many turns would shift it; each episode counts once in the standard deviation.
    """
    if not x.size:
        return []
    parts = need(x.turn_parts, "turn rewards by source (turn_parts)", "turn_gdpo")
    sources = [tuple(part[:, s] for part in parts) for s in range(parts[0].shape[1])]
    turns = _with_turns(x, parts_apart(x, "turn_gdpo"), sources)
    means = np.array([values.mean() if len(values) else 0.0 for values in turns])
    squares = [np.mean((values - means.mean()) ** 2) if len(values) else 0.0 for values in turns]
    std = float(np.sqrt(sum(squares) / (x.size - 1))) if x.size > 1 else 0.0
    return spread_turns([over(values, std + x.eps) for values in turns], x)


def _with_turns(
    x: AdvantageInput, episode: Float64, sources: Sequence[tuple[Float64, ...]]
) -> list[Float64]:
    """N × [K_i] the episode's advantage + turn_coef × each source's rewards from the turn on, normalised by depth."""
    out = [np.full(len(counts), episode[i]) for i, counts in enumerate(x.turn_counts)]
    for rewards in sources:
        earned = _turns_to_go(replace(x, turn_rewards=rewards), np.zeros(x.size))
        for entries in _by_depth(x, range(x.size)):
            column = np.array([earned[i][turn] if reached else 0.0 for i, turn, reached in entries])
            scaled = normalise(column, x.groups[[i for i, _, _ in entries]], x.eps)
            for (i, turn, reached), a in zip(entries, scaled, strict=True):
                if reached:
                    out[i][turn] += x.turn_coef * a
    return out


def gigpo(x: AdvantageInput) -> list[Float32]:
    """Episode advantage + turn_coef × advantage among turns that started from the same state.

    https://arxiv.org/abs/2505.10978: turns of one group are grouped again by the state they answered (anchor
    state) and their discounted returns normalised there; a state met once adds nothing. The episode's return is the
    sum over its turns, rewards of the environment for single turns included.
    """
    states = need(x.turn_states, "the state before each turn (turn_states)", "gigpo")
    earned = (
        [0.0] * x.size if x.turn_rewards is None else [float(np.nansum(r)) for r in x.turn_rewards]
    )
    episode = normalise(x.returns + np.array(earned, np.float64), x.groups, x.eps)
    returns = _turns_to_go(x, x.returns)
    index: dict[tuple[int, Hashable], int] = {}
    pairs = [(int(g), state) for g, row in zip(x.groups, states, strict=True) for state in row]
    keys = np.array([index.setdefault(pair, len(index)) for pair in pairs], np.int64)
    step = normalise(np.concatenate([np.zeros(0), *returns]), keys, x.eps)
    ends = np.cumsum([len(r) for r in returns])
    return spread_turns(
        [episode[i] + x.turn_coef * a for i, a in enumerate(np.split(step, ends)[: x.size])], x
    )
