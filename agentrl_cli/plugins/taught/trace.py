"""A token's way through a training: its probability at each checkpoint, and the groups that raised it most.

`agentrl why EPISODE@t2.31` prints it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.errors import NotFound
from agentrl_cli.learning.estimator_inputs import Float64
from agentrl_cli.learning.packing import Segment
from agentrl_cli.learning.step_table import StepTable
from agentrl_cli.plugins.taught.weights import RunWeights
from agentrl_cli.reports.advice import keep_settings
from agentrl_cli.reports.reference import get_setting
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Float32


@dataclass(frozen=True, slots=True)
class Teacher:
    """A group of a step, and how much its part of the update raised the token."""

    group: str
    step: int
    task: str
    episode: str
    """Of its episodes the one that raised the token most."""
    raised: float
    """In log-odds, to first order."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Who taught a token."""

    probabilities: dict[int, float]
    """By step; 0 is the model that the training began with."""
    start: int
    end: int
    """The steps between which it rose most."""
    groups: list[Teacher]
    """Every trained group between the two, those that raised it most first."""
    lost: int
    """Trained episodes without their gradient weights: `agentrl db prune` dropped them."""

    def share(self, one: Teacher) -> float:
        """Return a group's part of all that raised the token."""
        return one.raised / (sum(max(other.raised, 0.0) for other in self.groups) or 1.0)


def trace(store: Store, run: RunRow, episode: Episode, place: tuple[int, int], base: Path) -> Trace:
    """Return who taught a run the token at (turn, number within it) of an episode.

    Of the steps between the two checkpoints where it rose most, each group's policy gradient is made again, from the
    stored tokens and gradient weights, at the nearer of the two. Raises NotFound without checkpoints or trained groups.
    """
    segment, weights = token_segment(episode, *place), RunWeights(store, run, base)
    found: dict[int, float] = {}
    for step in weights.folders:
        weights.put(step)
        found[step] = float(np.exp(float(weights.logp(segment).detach())))
    if len(found) < 2:
        raise NotFound(
            f"{run.name} has no checkpoint.", hint="train.save.every sets how often one is kept."
        )
    start, end = max(pairwise(found), key=lambda two: found[two[1]] - found[two[0]])
    steps = [row for row in store.runs.steps(run.id, start + 1) if row["step"] <= end]
    groups, lost = list[Teacher](), 0
    reach = reaches(
        {row["step"]: row.get("learning_rate", 1.0) for row in steps}, weights.momentum(end)
    )
    for at in (start, end):  # a step's gradient is made at the nearer one of the weights before it
        nearer = [row for row in steps if (2 * (row["step"] - 1) <= start + end) == (at == start)]
        weights.put(at)
        toward = weights.direction(segment, at or end)
        read = [read_step(store, run, row["step"]) for row in nearer]
        lost += sum(without for _, without in read)
        tables = [table for table, _ in read if table is not None]
        slopes = weights.slopes(tables, toward)
        most = weights.config.train.max_grad_norm
        size = {  # a step whose advantages were all equal has no gradient
            row["step"]: reach[row["step"]] * min(1.0, most / (row.get("grad_norm") or most))
            for row in nearer
        }
        for table, slope in zip(tables, slopes, strict=True):
            groups += teachers(table, slope * size[table.number])
    if not groups:
        raise NotFound(
            f"{run.name} has no trained group with gradient weights in the steps {start + 1} to {end}."
        )
    groups.sort(key=lambda one: -one.raised)
    return Trace(found, start, end, groups, lost)


def reaches(rates: Mapping[int, float], beta: float) -> dict[int, float]:
    """Return the sum of the learning rates with which each step's gradient moves the weights up to the last step.

    `rates`: learning rate by step, from 1 on. Adam moves by m_s / (1 - β^s), m_s = β m_(s-1) + (1 - β) g_s
    (https://arxiv.org/abs/1412.6980, algorithm 1): a gradient goes on to act, and the first ones act most.
    """
    return {
        at: sum(
            rate * (1 - beta) * beta ** (step - at) / (1 - beta**step)
            for step, rate in rates.items()
            if step >= at
        )
        for at in rates
    }


def read_step(store: Store, run: RunRow, step: int) -> tuple[StepTable | None, int]:
    """Return the table of a step's trained tokens with a gradient, their weights as advantages; and how many episodes
    lack them.
    """
    ids = store.episodes.ids(f"step:{step} kind:train fact:trained", "time", run.id)
    groups: dict[str, list[Episode]] = {}
    weights, lost = list[Float32](), 0
    for row in sorted(store.episodes.rows(ids), key=lambda row: (row.group_id or "", row.sample)):
        signals, episode = store.signals.get(row.id), store.episodes.get(row.id)
        if signals is None or not np.isfinite(signals.weight).any():
            lost += 1
            continue
        groups.setdefault(row.group_id or "", []).append(episode)
        weights.append(np.nan_to_num(signals.weight[episode.tokens.trained_mask]))
    if not groups:
        return None, lost
    table = StepTable.of(step, list(groups.values()))
    table.columns.advantage = np.concatenate(weights)
    table.reject([table.columns.advantage[one.rows] != 0 for one in table.sequences])
    return table, lost


def teachers(table: StepTable, slope: Float64) -> Iterator[Teacher]:
    """Yield the groups of a step; `slope` [N]: how much the token rises where the step raises each trained token."""
    raised = [float(part.sum()) for part in table.by_episode(slope * table.columns.advantage)]
    both = zip(table.episodes, raised, strict=True)
    for group, members in groupby(both, key=lambda one: one[0].group_id or ""):
        found = list(members)
        best, _ = max(found, key=lambda one: one[1])
        yield Teacher(group, table.number, best.task_id, best.id, sum(part for _, part in found))


def token_segment(episode: Episode, turn: int, number: int) -> Segment:
    """Return the sequence up to the end of a token's turn, with that token alone trained."""
    branch = next(one for one in episode.sequences if turn in one.turns)
    chain, at = episode.chain(branch), branch.turns.index(turn)
    last = chain.turns[at]
    cut = chain.with_(turns=chain.turns[: at + 1], tokens=chain.tokens.slice(0, last.end))
    whole = Segment.of(cut)
    trained = np.zeros(len(whole.ids), np.bool_)
    trained[last.start + number] = True
    return replace(whole, trained=trained)


SHOWN = 5
"""Groups that are named: a training repeated without them shows how much they taught."""


def explain(
    store: Store, episode_id: str, place: tuple[int, int], base: Path
) -> tuple[list[str], dict[str, Any]]:
    """Return who taught a training the token at (turn, number within it), as lines and for --json.

    Raises NotFound if the token was not sampled, or the run has no checkpoint or no gradient weights.
    """
    from agentrl_cli.tui.common.reader import decoder_of

    episode, (number, at) = store.episodes.get(episode_id), place
    turn = next((one for one in episode.turns if one.index == number), None)
    if turn is None or turn.start + at >= turn.end:
        raise NotFound(f"{episode_id} has no token {at} in turn {number}.")
    if not episode.tokens.trained_mask[turn.start + at]:
        raise NotFound(
            f"The model did not sample token {at} of turn {number}.",
            hint="Replay shows which it did.",
        )
    run = store.runs.get(episode.run_id or "")
    if run.kind != "train":
        raise NotFound(f"{episode_id} is not of a training, whose checkpoints are compared.")
    found = trace(store, run, episode, place, base)
    decoder = decoder_of(store, store.episodes.row(episode_id).tokenizer)
    text = decoder.text([int(episode.tokens.ids[turn.start + at])])
    named = [{**asdict(one), "share": found.share(one)} for one in found.groups[:SHOWN]]
    command = repeat(found, run)
    report = {"episode": episode_id, "turn": number, "token": at, "text": text, "probabilities": found.probabilities,
              "start": found.start, "end": found.end, "groups": named, "lost": found.lost,
              "command": command}  # fmt: skip
    return words(found, text, f"{episode_id}@t{number}.{at}", command), report


def repeat(found: Trace, run: RunRow) -> str:
    """Return the command that repeats a run without the groups named, and without those that it left out itself."""
    groups = [
        *(get_setting(run.config, "algo.skip.groups") or ()),
        *(one.group for one in found.groups[:SHOWN]),
    ]
    line = ["agentrl", "train", "--set", f"algo.skip.groups=[{','.join(groups)}]"]
    return keep_settings(shlex.join(line), run)


def words(found: Trace, text: str, link: str, command: str) -> list[str]:
    """Return the lines of a trace; `command` repeats the training."""
    most = max(found.probabilities.values())
    lines = [f"{link} {text!r}: its probability here, by the model after each step"]
    lines += [
        f"  {step or 'base':>6} {p:8.4f} {'█' * round(30 * p / (most or 1.0))}"
        for step, p in found.probabilities.items()
    ]
    rose = found.probabilities[found.end] - found.probabilities[found.start]
    if rose <= 0:
        return [*lines, "It never rose between two checkpoints: the training did not teach it."]
    between = f"from {found.start or 'the base'} to step {found.end}"
    lines += [
        f"It rose most, by {rose:.4f}, {between}.",
        f"Of {len(found.groups)} trained groups between the two those that raised it most:",
    ]
    for one in found.groups[:SHOWN]:
        much = f"{one.raised:+8.4f} log-odds, {found.share(one):4.0%} of what raised it"
        where = f"{one.task}  agentrl replay {one.episode}"
        lines.append(f"  group {one.group}  step {one.step:>4}  {much}  {where}")
    if found.lost:
        gap = "trained episodes have no gradient weights any more (`agentrl db prune`) and are not counted"
        lines.append(f"{found.lost} {gap}.")
    return [*lines, f"A training without them: {command}"]
