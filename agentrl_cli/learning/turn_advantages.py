"""Advantages below the episode: per token (GAE) and per assistant turn (discounted returns, MT-GRPO, GiGPO).

Discounts count trained tokens in `gae` and `discounted`, and assistant turns in the rest; tool tokens in between
cost no discount, since the policy did not choose them. Not here: what the value head learns (value.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from agentrl_cli.learning.estimator_inputs import (
    AdvantageInput,
    Float64,
    Ints,
    need,
    normalise,
    spread_turns,
    whiten,
)
from agentrl_cli.types import Float32


def token_rewards(x: AdvantageInput) -> list[Float64]:
    """N × [lengths_i] reward per token: an episode's at its last, a turn's at the turn's last, less penalties."""
    out = []
    for i, n in enumerate(x.lengths):
        r = np.zeros(int(n))
        if x.token_penalty is not None:
            r -= x.token_penalty[i]
        ends = np.cumsum(x.turn_counts[i]) - 1
        if x.turn_rewards is not None and n:
            np.add.at(r, np.maximum(ends, 0), np.nan_to_num(x.turn_rewards[i]))
        if n:
            r[-1] += x.rewards[i]
        out.append(r)
    return out


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
    need(x.values, "a value head (values)", "gae")
    assert x.values is not None
    out = []
    for i, rewards in enumerate(token_rewards(x)):
        values = np.asarray(x.values[i], np.float64)
        last = 0.0 if x.bootstrap is None else float(x.bootstrap[i])
        delta = rewards + x.gamma * np.append(values[1:], last)[: len(values)] - values
        out.append(discounted(delta, x.gamma * x.lam))
    return out


def gae(x: AdvantageInput) -> list[Float32]:
    """Generalised advantage estimation over trained tokens, whitened over the batch (PPO as in verl)."""
    return whiten(gae_raw(x))


def value_targets(x: AdvantageInput) -> list[Float32]:
    """N × [lengths_i] returns that the value head regresses to: unwhitened advantage + value."""
    raw = gae_raw(x)
    return [(a + v).astype(np.float32) for a, v in zip(raw, x.values or (), strict=True)]


def _returns_per_turn(x: AdvantageInput) -> list[Float64]:
    """N × [K_i] discounted return from each assistant turn on; the episode's reward comes with its last turn."""
    out = []
    for i, counts in enumerate(x.turn_counts):
        r = np.zeros(len(counts))
        if x.turn_rewards is not None:
            r += np.nan_to_num(x.turn_rewards[i])
        if len(r):
            r[-1] += x.returns[i]
        out.append(discounted(r, x.gamma))
    return out


def turn_returns(x: AdvantageInput) -> list[Float32]:
    """Discounted return of each turn, normalised against the siblings at the same turn.

    REINFORCE with reward-to-go (http://incompleteideas.net/book/the-book.html, section 13.3) and GRPO's group
    baseline per turn number; a sibling that ended earlier counts with the return of its last turn. One turn each and
    no turn rewards: GRPO.
    """
    returns = _returns_per_turn(x)
    out = [np.zeros(len(r)) for r in returns]
    for group in np.unique(x.groups):
        rows = [i for i in np.flatnonzero(x.groups == group) if len(returns[i])]
        for turn in range(max((len(returns[i]) for i in rows), default=0)):
            column = np.array([returns[i][min(turn, len(returns[i]) - 1)] for i in rows])
            scaled = normalise(column, np.zeros(len(rows), np.int64), x.eps)
            for i, a in zip(rows, scaled, strict=True):
                if turn < len(out[i]):
                    out[i][turn] = a
    return spread_turns(out, x)


def mt_grpo(x: AdvantageInput) -> list[Float32]:
    """GRPO's advantage plus turn_coef × what turns still earn, normalised over the group at the same turn.

    https://arxiv.org/abs/2505.11821 for any number of turns; of its two turns with a reward at the first it is the
    paper's. A turn counts with the discounted rewards from it on, and a sibling that has ended with 0, which is what it
    still earns. Each turn's own reward over the siblings that reach it would be biased where the policy decides when
    to stop: going on to a turn of mean reward would look like nothing gained.
    """
    need(x.turn_rewards, "rewards per turn (turn_rewards)", "mt_grpo")
    assert x.turn_rewards is not None
    episode = normalise(x.returns, x.groups, x.eps)
    earned = [discounted(np.nan_to_num(rewards), x.gamma) for rewards in x.turn_rewards]
    out = [np.full(len(counts), episode[i]) for i, counts in enumerate(x.turn_counts)]
    for turn in range(max(map(len, earned), default=0)):
        column = np.array([rewards[turn] if turn < len(rewards) else 0.0 for rewards in earned])
        for i, a in enumerate(normalise(column, x.groups, x.eps)):
            if turn < len(out[i]):
                out[i][turn] += x.turn_coef * a
    return spread_turns(out, x)


def gigpo(x: AdvantageInput) -> list[Float32]:
    """Episode advantage + turn_coef × advantage among turns that started from the same state.

    https://arxiv.org/abs/2505.10978: turns of one group are grouped again by the state they answered (anchor
    state) and their discounted returns normalised there; a state met once adds nothing. The episode's return is the
    sum over its turns, what the world gave to single turns included.
    """
    need(x.turn_states, "the state before each turn (turn_states)", "gigpo")
    assert x.turn_states is not None
    earned = [0.0] * x.size if x.turn_rewards is None else [float(np.nansum(r)) for r in x.turn_rewards]
    episode = normalise(x.returns + np.array(earned, np.float64), x.groups, x.eps)
    returns = _returns_per_turn(x)
    keys = _state_index(x.turn_states, x.groups)
    flat_keys = np.array([key for row in keys for key in row], np.int64)
    step = normalise(np.concatenate([np.zeros(0), *returns]), flat_keys, x.eps)
    ends = np.cumsum([len(r) for r in returns])
    return spread_turns([episode[i] + x.turn_coef * a for i, a in enumerate(np.split(step, ends)[: x.size])], x)


def _state_index(states: Sequence[tuple[Hashable, ...]], groups: Ints) -> list[list[int]]:
    """N × [K_i] a number per distinct (group, state)."""
    index: defaultdict[tuple[int, Hashable], int] = defaultdict(lambda: len(index))
    return [[index[int(group), state] for state in row] for row, group in zip(states, groups, strict=True)]
