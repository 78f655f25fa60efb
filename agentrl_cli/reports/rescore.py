"""Score a run's episodes again, without generating: other weights, other reward functions, another estimator.

The stored episodes do not change: new rewards and advantages form a score set beside them (`scores`). A run can have
several; filters read the newest (`rescored:>0.5 delta:<0`), `show` and replay list all.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentrl_cli.chat.drift import KINDS
from agentrl_cli.config import AlgoConfig
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.learning.advantages import drops_equal, needs, options
from agentrl_cli.learning.advantages import estimate as estimate_advantages
from agentrl_cli.learning.dispositions import CUT, decide
from agentrl_cli.learning.estimator_inputs import AdvantageInput, turn_lengths
from agentrl_cli.learning.turn_advantages import token_paths
from agentrl_cli.registry import resolve
from agentrl_cli.rewards import Reward, RewardContext, finite, score
from agentrl_cli.rewards.adapt import adapt_reward
from agentrl_cli.rewards.context import answer_turns
from agentrl_cli.rollout.greedy import KIND, SUFFIX
from agentrl_cli.rollout.greedy import rewards as rewards_of
from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Fact, Float32, RewardPart, Task

LEFT_OUT = {str(fact) for fact in Fact} - {
    str(Fact.TRAINED),
    str(Fact.SKIPPED_ZERO_VARIANCE),
    str(Fact.SKIPPED_STALE),
}
"""Facts that no reward changes. A group that was too small stays so: its others were skipped for these reasons."""


@dataclass(frozen=True, slots=True)
class Change:
    """One episode before and after."""

    episode: Episode
    parts: tuple[RewardPart, ...]
    advantage: float | None
    """Mean over its trained tokens; None if it would not be trained."""
    fact: str
    """Its disposition in a training step now."""
    turns: tuple[float, ...] = ()
    """Mean advantage of each assistant turn."""

    @property
    def reward(self) -> float | None:
        """None if it was not graded."""
        return self.episode.with_(reward_parts=self.parts).reward

    @property
    def delta(self) -> float | None:
        before, now = self.episode.reward, self.reward
        return None if before is None or now is None else now - before

    def report(self) -> dict[str, Any]:
        """Return plain values."""
        e = self.episode
        return {
            "episode": e.id, "task": e.task_id, "step": e.step, "group": e.group_id, "sample": e.sample,
            "reward_before": e.reward, "reward": self.reward, "delta": self.delta,
            "advantage_before": e.advantage, "advantage": self.advantage, "turns": list(self.turns),
            "fact_before": e.fact, "fact": self.fact,
            "parts": {part.name: {"value": part.value, "weight": part.weight} for part in self.parts},
        }  # fmt: skip


def reward_of(text: str, base: Any, weights: Mapping[str, float]) -> Reward:
    """Return a reward function as a user names it: `module:object`, `file.py:fn`, or `NAME=…` to replace the part NAME.

    Its weight is `rewards.NAME`, else 1. Raises NotFound, EnvError, or ConfigError if it is not callable.
    """
    name, equals, target = text.partition("=")
    if not equals:
        name, target = "", text
    function = resolve("rewards", {}, target, base=base)
    if not callable(function):
        raise ConfigError(
            f"{target} is not a function.",
            hint="A reward is `def name(episode, ctx): return number`.",
        )
    name = name or str(getattr(function, "__name__", type(function).__name__))
    grade = adapt_reward(function)
    wanted = [p for p in inspect.signature(grade).parameters.values() if p.default is p.empty]
    both = grade if len(wanted) > 1 else lambda episode, ctx: grade(episode)
    return Reward(name, both, weights.get(name, 1.0))


async def rescore_parts(
    episode: Episode,
    task: Task | None,
    weights: Mapping[str, float],
    rewards: Sequence[Reward],
    open_session: Callable[[], Awaitable[Any]] | None = None,
) -> tuple[RewardPart, ...]:
    """Return the stored parts under new weights; parts of the functions replace those of the same name.

    A function gets the stored episode, its task and last text, a fresh sandbox session, and of the tools' states only
    the submitted answer. Raises EnvError if a function fails.
    """
    parts = [
        replace(part, weight=weights.get(part.name, part.weight)) for part in episode.reward_parts
    ]
    if not rewards:
        return tuple(parts)
    if task is None:
        raise NotFound(f"The store has no task {episode.task_id!r}, which a reward function needs.")
    main = episode.chain(episode.main)
    said = [str(t.messages[0].get("content") or "") for t in answer_turns(main.turns) if t.messages]
    calls = [call for turn in episode.turns for call in turn.calls if call.arguments]
    answers = [
        call.arguments["answer"] for call in calls if call.arguments and "answer" in call.arguments
    ]
    state = {"answer": answers[-1]} if answers else {}
    ctx = RewardContext(task, said[-1] if said else "", open_session, state)
    given = {part.name: part for part in await score(episode, rewards, ctx)}
    primary = {part.name for part in parts if part.primary}
    new = {name: finite(replace(part, primary=name in primary)) for name, part in given.items()}
    kept = [replace(new.pop(part.name, part), weight=part.weight) for part in parts]
    return tuple([*kept, *new.values()])


def changes(
    episodes: Sequence[Episode],
    parts: Mapping[str, tuple[RewardPart, ...]],
    algo: AlgoConfig,
    store: Store,
) -> list[Change]:
    """Return the facts and advantages of episodes in a training step with other reward parts.

    Episodes may be of any steps and in any order; one that was skipped for its own reason stays skipped.
    """
    steps: dict[int, dict[str, list[Episode]]] = {}
    for episode in episodes:
        groups = steps.setdefault(episode.step or 0, {})
        groups.setdefault(episode.group_id or episode.id, []).append(episode)
    found: dict[str, Change] = {}
    for groups in steps.values():
        found |= _step(list(groups.values()), parts, algo, store)
    return [found[episode.id] for episode in episodes]


def _step(
    groups: Sequence[Sequence[Episode]],
    parts: Mapping[str, tuple[RewardPart, ...]],
    algo: AlgoConfig,
    store: Store,
) -> dict[str, Change]:
    """Score one step: `decide` as in the trainer, then the estimator over the trained episodes."""
    new = [[e.with_(reward_parts=parts[e.id]) for e in group] for group in groups]
    kinds = {e.id: [row.kind for row in store.marks.drift(e.id)] for group in groups for e in group}
    facts = decide(
        new,
        drift={name: max(kind, key=KINDS.index) for name, kind in kinds.items() if kind},
        train_drifted=not algo.skip.drift,
        drop_zero_variance=drops_equal(algo),
        mask_overlong=algo.skip.overlong,
        mask_void=algo.skip.void,
    )
    old = {e.id: e for group in groups for e in group}
    trained = [
        e
        for group in new
        for e in group
        if facts[e.id] is Fact.TRAINED and old[e.id].fact not in LEFT_OUT
    ]
    found_advantages = estimate(trained, algo, store, [old[e.id] for e in trained])
    advantages = dict(zip([e.id for e in trained], found_advantages, strict=True))
    found = {}
    for group in groups:
        for e in group:
            values = advantages.get(e.id)
            fact = e.fact if values is None and e.fact in LEFT_OUT else str(facts[e.id])
            mean = None if values is None else float(values.mean()) if len(values) else 0.0
            turns: tuple[float, ...] = ()
            if values is not None:
                pieces = np.split(values, np.cumsum(turn_lengths(e))[:-1])
                turns = tuple(float(piece.mean()) if len(piece) else 0.0 for piece in pieces)
            found[e.id] = Change(e, parts[e.id], mean, fact, turns)
    return found


def estimate(
    episodes: Sequence[Episode],
    algo: AlgoConfig,
    store: Store,
    was: Sequence[Episode] | None = None,
) -> list[Float32]:
    """Return N × [trained tokens] advantages of a step's episodes by `algo.advantage`.

    `was`: the same episodes under their old rewards. Critic values are those stored in training. Raises ConfigError
    if the estimator's inputs are missing.
    """
    if not episodes:
        return []
    given = options(algo)
    signals = [store.signals.get(e.id) for e in episodes]
    stored = [
        (s, e.tokens.trained_mask) for s, e in zip(signals, episodes, strict=True) if s is not None
    ]
    values = [np.asarray(s.value[mask], np.float64) for s, mask in stored if s.value is not None]
    if len(values) == len(episodes):
        given["values"] = tuple(values)
    for field, name in (("logp_teacher", "logp_teacher"), ("logp_student", "logp_train")):
        found = [getattr(s, name)[mask] for s, mask in stored if s.logp_teacher is not None]
        if needs(algo) == "teacher" and len(found) == len(episodes):
            given[field] = tuple(np.asarray(values, np.float64) for values in found)
    if needs(algo) == "baseline":
        given["baseline"] = _greedy_rewards(episodes, store)
    if algo.kl.coef and algo.kl.where == "reward":
        pairs = [
            (s.logp_train[mask], s.logp_ref[mask]) for s, mask in stored if s.logp_ref is not None
        ]
        if len(pairs) < len(episodes):
            raise ConfigError(
                "The KL is part of the reward, and the run stored no reference log-probabilities."
            )
        coefficient = _kl_coef(episodes[0], algo, store)
        given["token_penalty"] = tuple(coefficient * KL[algo.kl.estimate](*pair) for pair in pairs)
    if algo.value_head.value_bootstrap and "values" in given:
        x = AdvantageInput.of(episodes if was is None else was, **given)
        returns = [
            np.asarray(s.returns[mask], np.float64) for s, mask in stored if s.returns is not None
        ]
        given["bootstrap"] = _left_in(x, returns, episodes)
    return estimate_advantages(algo, AdvantageInput.of(episodes, **given))


def _kl_coef(episode: Episode, algo: AlgoConfig, store: Store) -> float:
    """Return the KL coefficient in an episode's step; with `algo.kl.target`, the one that the step stored."""
    if algo.kl.target is None:
        return algo.kl.coef
    rows = [
        row
        for row in store.runs.steps(episode.run_id or "", episode.step or 0)
        if row["step"] == episode.step
    ]
    return float(rows[0].get("kl_coef", algo.kl.coef)) if rows else algo.kl.coef


def _left_in(
    x: AdvantageInput,
    returns: Sequence[np.ndarray[Any, np.dtype[np.float64]]],
    episodes: Sequence[Episode],
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the [N] values of the last states of truncated episodes, from the last stored return = r + gamma · value.

    Of an episode that branches, the last branch was cut.
    """
    out = np.zeros(x.size)
    for i, (target, episode) in enumerate(zip(returns, episodes, strict=True)):
        last = token_paths(x, i)[-1:]
        if episode.outcome in CUT and last and len(last[0].tokens) and x.gamma:
            out[i] = (target[last[0].tokens[-1]] - last[0].rewards[-1]) / x.gamma
    return out


def _greedy_rewards(
    episodes: Sequence[Episode], store: Store
) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Return the [N] rewards of the greedy attempts at each task; None if one is missing."""
    run, step = episodes[0].run_id or "", episodes[0].step or 0
    greedy = [
        store.episodes.get(name) for name in store.episodes.find_finished(run, step, KIND).values()
    ]
    known = rewards_of({(e.group_id or "").removesuffix(SUFFIX): e for e in greedy})
    found = [known.get(e.group_id or "") for e in episodes]
    return None if None in found else np.array(found, np.float64)


KL: Mapping[str, Callable[[Float32, Float32], Any]] = {
    "k1": lambda p, ref: np.asarray(p - ref, np.float64),
    "k2": lambda p, ref: np.asarray(p - ref, np.float64) ** 2 / 2,
    "abs": lambda p, ref: np.abs(np.asarray(p - ref, np.float64)),
    "k3": lambda p, ref: (
        np.expm1(np.asarray(ref - p, np.float64)) - np.asarray(ref - p, np.float64)
    ),
}
"""learning.objective.KL without torch: this command needs none."""


def summary(found: Sequence[Change]) -> dict[str, Any]:
    """Return totals before and after; episodes without a reward are left out of the means."""
    graded = [c for c in found if c.delta is not None]
    flips = [
        c for c in graded if c.advantage is not None and c.episode.advantage is not None
        and c.advantage * c.episode.advantage < 0
    ]  # fmt: skip

    def mean(values: Sequence[float]) -> float | None:
        return float(np.mean(values)) if len(values) else None

    return {
        "episodes": len(found),
        "changed": sum(abs(c.delta or 0.0) > 1e-12 for c in graded),
        "reward_before": mean([c.episode.graded_reward for c in graded]),
        "reward": mean([c.reward for c in graded if c.reward is not None]),
        "trained_before": sum(c.episode.fact == Fact.TRAINED for c in found),
        "trained": sum(c.fact == Fact.TRAINED for c in found),
        "sign_flips": len(flips),
    }
