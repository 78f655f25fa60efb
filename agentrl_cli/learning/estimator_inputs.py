"""The inputs of advantage estimators, and the few group operations that all of them share (numpy, float64).

Not here: any estimator. Notation: N episodes, G groups, `lengths[i]` trained tokens and K_i assistant turns in
episode i. Tokens that were not sampled (tool results, templates) do not exist for an estimator: arrays per token
hold the trained tokens only, in order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrl_cli.errors import ConfigError
from agentrl_cli.learning.dispositions import SAME
from agentrl_cli.types import Episode, Float32, Turn

Float64 = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdvantageInput:
    """Everything an estimator may use; the optional fields are None if the caller lacks them."""

    rewards: Float64
    """[N] reward of the whole episode."""
    groups: Ints
    """[N] group index; episodes of one group attempt the same task. Any integers, in any order."""
    lengths: Ints
    """[N] number of trained tokens."""
    turn_lengths: tuple[Ints, ...] | None = None
    """N × [K_i] trained tokens per assistant turn; they sum to `lengths`. None: one turn each."""
    turn_rewards: tuple[Float64, ...] | None = None
    """N × [K_i] reward of each assistant turn on top of `rewards`, NaN where the turn has none."""
    turn_states: tuple[tuple[Hashable, ...], ...] | None = None
    """N × K_i keys of the state that each assistant turn answered (GiGPO's anchor states)."""
    parts: Float64 | None = None
    """[N, P] unweighted reward parts, NaN where a part does not apply (GDPO)."""
    part_weights: Float64 | None = None
    """[P] weights of the parts; None: all 1."""
    baseline: Float64 | None = None
    """[N] reward of the greedy attempt at the same task (ReMax)."""
    values: tuple[Float64, ...] | None = None
    """N × [lengths_i] value estimates at the state before each trained token (GAE)."""
    bootstrap: Float64 | None = None
    """[N] value after the last token of an episode that was cut off; None or 0: it ended (GAE)."""
    token_penalty: tuple[Float64, ...] | None = None
    """N × [lengths_i] amount taken off each token's reward (KL in the reward: coefficient × estimate)."""
    gamma: float = 1.0
    lam: float = 1.0
    k: int = 2
    """k of pass@k."""
    turn_coef: float = 1.0
    """Weight of the turn term beside the episode term (MT-GRPO's turn advantage, GiGPO's omega)."""
    logp_teacher: tuple[Float64, ...] | None = None
    """N × [lengths_i] log-probability of each trained token under the teacher (distill)."""
    logp_student: tuple[Float64, ...] | None = None
    """N × [lengths_i] the same before the step (distill)."""
    coef: float = 1.0
    """Weight of the teacher (distill)."""
    reward_coef: float = 0.0
    """Weight of the reward's advantage beside the teacher's (distill)."""
    eps: float = 1e-4
    """Added to standard deviations (TRL's 1e-4)."""
    branches: tuple[tuple[Ints, ...], ...] | None = None
    """N × branches: numbers of the assistant turns on each, root first. None: every episode has one, of all turns."""
    player_rewards: tuple[Mapping[str, float], ...] | None = None
    """N × the reward of each player that the model played, by the name of game and player (rae)."""
    turn_players: tuple[tuple[str, ...], ...] | None = None
    """N × K_i the game and player of each assistant turn (rae)."""
    means: MutableMapping[str, float] = field(default_factory=dict)
    """The running mean of each game and player, which rae moves."""
    decay: float = 0.95
    """Share of a running mean that one more episode leaves (rae)."""
    accepted: tuple[NDArray[np.bool_], ...] | None = None
    """N × [lengths_i] False: `algo.off_policy.reject` left the token out of the batch. None: it left out none."""
    turn_parts: tuple[Float64, ...] | None = None
    """N × [K_i, S] turn_rewards by who gave it, one column for each tool and one for the world, NaN where nothing."""

    @property
    def size(self) -> int:
        return len(self.rewards)

    @property
    def returns(self) -> Float64:
        """[N] undiscounted return of each episode: its reward less the token penalties."""
        less = [0.0] * self.size if self.token_penalty is None else map(np.sum, self.token_penalty)
        return np.asarray(self.rewards, np.float64) - np.array([*less], np.float64)

    @property
    def turn_counts(self) -> tuple[Ints, ...]:
        """N × [K_i] trained tokens per assistant turn, one turn each if none were given."""
        return self.turn_lengths or tuple(np.array([n], np.int64) for n in self.lengths)

    @property
    def turn_paths(self) -> tuple[tuple[Ints, ...], ...]:
        """`branches`, the one of all turns if none were given."""
        return self.branches or tuple((np.arange(len(counts)),) for counts in self.turn_counts)

    @classmethod
    def of(cls, episodes: Sequence[Episode], **fields: Any) -> AdvantageInput:
        """Read rewards, groups, turns, turn rewards, anchor states and parts off finished episodes.

        Groups are the distinct `group_id`s (an episode without one is alone). `fields` sets the rest: gamma, k, values…
        """
        index: dict[str, int] = {}
        groups = [
            index.setdefault(e.group_id or f"\0{i}", len(index)) for i, e in enumerate(episodes)
        ]
        names = sorted({part.name for e in episodes for part in e.reward_parts})
        parts = np.full((len(episodes), len(names)), np.nan)
        weights = np.ones(len(names))
        for row, episode in enumerate(episodes):
            for part in episode.reward_parts:
                parts[row, names.index(part.name)] = part.value
                weights[names.index(part.name)] = part.weight
        given = cls(
            rewards=np.array([e.graded_reward for e in episodes], np.float64),
            groups=np.array(groups, np.int64),
            lengths=np.array([e.trained_tokens for e in episodes], np.int64),
            turn_lengths=tuple(turn_lengths(e) for e in episodes),
            turn_rewards=tuple(turn_rewards(e) for e in episodes),
            turn_parts=turn_parts(episodes),
            turn_states=tuple(anchor_states(e) for e in episodes),
            branches=None
            if all(e.linear for e in episodes)
            else tuple(turn_paths(e) for e in episodes),
            parts=parts,
            part_weights=weights,
            player_rewards=tuple(player_rewards(e) for e in episodes),
            turn_players=tuple(
                tuple(_player(e, t.player) for t in _model_turns(e)) for e in episodes
            ),
        )
        return replace(given, **fields)


def turn_lengths(episode: Episode) -> Ints:
    """[K] trained tokens per assistant turn."""
    mask = episode.tokens.trained_mask
    return np.array([int(mask[t.start : t.end].sum()) for t in _model_turns(episode)], np.int64)


def player_rewards(episode: Episode) -> dict[str, float]:
    """Return the episode's reward as each player has it: with its own in place of the primary part, their mean."""
    whole = episode.graded_reward
    primary = next((part for part in episode.reward_parts if part.primary), None)
    if not episode.players or primary is None:
        own = (
            t.player for t, n in zip(_model_turns(episode), turn_lengths(episode), strict=True) if n
        )
        return {_player(episode, player): whole for player in own}
    return {
        _player(episode, player): whole + (value - primary.value) * primary.weight
        for player, value in episode.players.items()
    }


def _model_turns(episode: Episode) -> list[Turn]:
    return [turn for turn in episode.turns if turn.role == "assistant"]


def _player(episode: Episode, player: str) -> str:
    return f"{episode.pack}/{episode.family}/{player}"


WORLD = ""
"""Who gives a turn's reward if no tool does: user or environment."""


def turn_rewards(episode: Episode) -> Float64:
    """[K] sum of what tools, user and environment gave to each assistant turn, NaN if nothing."""
    return np.array(
        [sum(given.values()) if given else np.nan for given in _split_rewards(episode)], np.float64
    )


def turn_parts(episodes: Sequence[Episode]) -> tuple[Float64, ...]:
    """N × [K_i, S] the same apart, by the tool that gave it or the world; S over all episodes, sorted."""
    given = [_split_rewards(episode) for episode in episodes]
    names = sorted({name for turns in given for turn in turns for name in turn})
    rows = ([[turn.get(name, np.nan) for name in names] for turn in turns] for turns in given)
    return tuple(np.array(row, np.float64).reshape(len(row), len(names)) for row in rows)


def _split_rewards(episode: Episode) -> list[dict[str, float]]:
    """For each assistant turn, who gave it how much.

    A turn's reward belongs to the nearest assistant turn on its path; forks after one turn add up.
    """
    out: list[dict[str, float]] = []
    asked: list[int] = []
    """For each turn the number of that assistant turn, −1 if there is none."""
    for turn, parent in zip(episode.turns, episode.parents, strict=True):
        if turn.role == "assistant":
            asked.append(len(out))
            out.append({})
        else:
            asked.append(asked[parent] if parent >= 0 else -1)
        if asked[-1] < 0:
            continue
        calls = (
            [call.name for call in episode.turns[parent].calls]
            if turn.results and parent >= 0
            else []
        )
        names = [*calls, *[WORLD] * (len(turn.results) - len(calls))]
        named = [
            (WORLD, turn.reward),
            *zip(names, (result.reward for result in turn.results), strict=False),
        ]
        for name, reward in named:
            if reward is not None:
                out[asked[-1]][name] = out[asked[-1]].get(name, 0.0) + reward
    return out


def turn_paths(episode: Episode) -> tuple[Ints, ...]:
    """Numbers of the assistant turns on each branch, root first."""
    number = np.cumsum([turn.role == "assistant" for turn in episode.turns]) - 1
    model = [turn.role == "assistant" for turn in episode.turns]
    return tuple(
        np.array([number[t] for t in path if model[t]], np.int64) for path in episode.branches
    )


def anchor_states(episode: Episode) -> tuple[Hashable, ...]:
    """K keys: the token ids of everything between the previous assistant turn and this one (the observation).

    The previous turn is that of the path, in the first branch that holds this one.
    """
    states: dict[int, Hashable] = {}
    for branch in episode.sequences:
        chain, start, first = episode.chain(branch), 0, True
        for index, turn in zip(branch.turns, chain.turns, strict=True):
            if turn.role == "assistant":
                states.setdefault(index, (first, chain.tokens.ids[start : turn.start].tobytes()))
                start, first = turn.end, False
    return tuple(states[index] for index in sorted(states))


def group_sums(values: Float64, groups: Ints) -> tuple[Float64, Ints]:
    """[N] sum over each one's group, and [N] members of it."""
    _, inverse, count = np.unique(groups, return_inverse=True, return_counts=True)
    total: Any = np.bincount(inverse, values)
    return total[inverse], count[inverse]


def group_mean(values: Float64, groups: Ints) -> Float64:
    """[N] mean of each one's group."""
    total, count = group_sums(values, groups)
    return total / count


def normalise(values: Float64, groups: Ints, eps: float) -> Float64:
    """[N] (value − group mean) / (group std + eps): the sample deviation (n − 1), 0 in a group of one."""
    off = values - group_mean(values, groups)
    squares, count = group_sums(off**2, groups)
    return over(off, np.sqrt(squares / np.maximum(count - 1, 1)) + eps)


def parts_apart(x: AdvantageInput, estimator: str) -> Float64:
    """[N] weighted sum of the reward parts, each normalised in its group; a part that is NaN does not apply."""
    parts = need(x.parts, "reward parts", estimator)
    weights = np.ones(parts.shape[1]) if x.part_weights is None else x.part_weights
    total = np.zeros(x.size)
    for column, weight in zip(parts.T, weights, strict=True):
        there = ~np.isnan(column)
        total[there] += weight * normalise(column[there], x.groups[there], x.eps)
    return total


def over(numerator: Float64, scale: Float64 | float) -> Float64:
    """numerator / scale, and 0 where the scale is 0, by rounding too: what does not vary carries no signal."""
    scale = np.broadcast_to(np.asarray(scale, np.float64), numerator.shape)
    return np.divide(numerator, scale, out=np.zeros_like(numerator), where=scale > SAME)


def spread(scalars: Float64, x: AdvantageInput) -> list[Float32]:
    """One scalar per episode onto all of its trained tokens: N × [lengths_i]."""
    return [np.full(int(n), a, np.float32) for a, n in zip(scalars, x.lengths, strict=True)]


def spread_turns(scalars: Sequence[Float64], x: AdvantageInput) -> list[Float32]:
    """One scalar per assistant turn onto the turn's trained tokens: N × [lengths_i]."""
    return [np.repeat(a, n).astype(np.float32) for a, n in zip(scalars, x.turn_counts, strict=True)]


def whiten(arrays: Sequence[Float64], x: AdvantageInput) -> list[Float32]:
    """Zero mean and unit sample variance over the batch's accepted tokens (verl's masked_whiten, variance + 1e-8)."""
    flat = np.concatenate([np.zeros(0), *arrays])
    if x.accepted is not None:
        flat = flat[np.concatenate(x.accepted)]
    if flat.size < 2:
        return [np.zeros(len(a), np.float32) for a in arrays]
    scale = 1.0 / np.sqrt(flat.var(ddof=1) + 1e-8)
    return [((a - flat.mean()) * scale).astype(np.float32) for a in arrays]


def need(value: T | None, field: str, estimator: str) -> T:
    """Return an input that the estimator needs. Raises ConfigError if it is missing."""
    if value is None:
        raise ConfigError(
            f"Advantage {estimator!r} needs {field}.", hint="Choose another algo.advantage."
        )
    return value
