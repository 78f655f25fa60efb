"""The words of `agentrl why EPISODE@t2.31`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl_cli.errors import NotFound
from agentrl_cli.plugins.taught.trace import Trace, trace
from agentrl_cli.store import Store

SHOWN = 5
"""Groups that are named: a training repeated without them shows how much they taught."""


def explain(
    store: Store, episode_id: str, place: tuple[int, int], base: Path
) -> tuple[list[str], dict[str, Any]]:
    """Return who taught a training the token at (turn, number within it), as lines and for --json.

    Raises NotFound if the token was not sampled, or the run has no checkpoint or no gradient weights.
    """
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
    text = store_text(store, episode_id, turn.start + at)
    named = [{**asdict(one), "share": found.share(one)} for one in found.groups[:SHOWN]]
    report = {"episode": episode_id, "turn": number, "token": at, "text": text, "probabilities": found.probabilities,
              "start": found.start, "end": found.end, "groups": named, "lost": found.lost,
              "command": repeat(found)}  # fmt: skip
    return list(words(found, text, f"{episode_id}@t{number}.{at}")), report


def repeat(found: Trace) -> str:
    """Return the command that trains without the groups named."""
    left_out = ",".join(one.group for one in found.groups[:SHOWN])
    return " ".join(["agentrl train", "--set", f"algo.skip.groups=[{left_out}]"])


def words(found: Trace, text: str, link: str) -> list[str]:
    """Return the lines of a trace."""
    most = max(found.probabilities.values())
    lines = [f"{link} {text!r}: its probability here, by the model after each step"]
    for step, p in found.probabilities.items():
        lines.append(f"  {step or 'base':>6} {p:8.4f} {'█' * round(30 * p / (most or 1.0))}")
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
    return [*lines, f"A training without them: {repeat(found)}"]


def store_text(store: Store, episode_id: str, position: int) -> str:
    """Return the text of a token."""
    from agentrl_cli.tui.common.reader import decoder_of

    ids = store.episodes.get(episode_id).tokens.ids
    return decoder_of(store, store.episodes.row(episode_id).tokenizer, {}).text(
        [int(ids[position])]
    )
