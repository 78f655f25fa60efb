"""One episode, ready to show: decoded, cut into blocks, with its siblings and reasons. Pure; no textual, no torch.

A half-written run is fine: turns without tokens, a missing tokenizer and missing signals are shown as such.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.store.display import short_runs
from agentrl_cli.store.marks import Score
from agentrl_cli.tui.common.layers import Classes, Layer, find_leaks
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.tui.common.tree import on_path, place_in, spans
from agentrl_cli.types import TOP_K, Episode, Int32, Tokens, TrainSignals, Turn


@dataclass(frozen=True, slots=True)
class Block:
    """A run of tokens shown under one header: a turn, or tokens that no turn claims (turn is None)."""

    number: int
    role: str
    start: int
    end: int
    turn: Turn | None = None

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Fork:
    """Where two episodes of one task differ first."""

    sample: int
    position: int
    here: str
    there: str
    p_here: float | None
    p_there: float | None
    """Probability of the other's token at the fork under this policy, if it is among the stored alternatives."""
    other_position: int
    """The place in the other episode: another one where either branches."""


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """Everything that a screen shows of one episode."""

    episode: Episode
    texts: list[str]
    blocks: tuple[Block, ...]
    signals: TrainSignals | None = None
    siblings: tuple[Any, ...] = ()
    """Rows of the group's episodes (this one too), by sample number."""
    reasons: tuple[tuple[str, str], ...] = ()
    """(mark, text) of flags with their evidence, and of checks: `!` needs a look, `.` is fine."""
    decoder: TokenTexts = field(default_factory=TokenTexts)
    tags: tuple[str, ...] = ()
    note: str = ""
    run: str = ""
    """Name of its run."""
    picked: str = ""
    """Why its task was picked, if not in turn."""
    scores: Sequence[Score] = ()
    """Its scores in the run's score sets (`agentrl compare --rewards`)."""
    live: str = ""
    """Text being generated right now, if the episode is running."""
    images: Path | None = None
    """The folder with its images."""
    temperature: float | None = None
    """The sampling temperature of its run, if known."""
    push_scale: float = 0.0
    """The 95th percentile of |push| over the run's trained tokens; 0 if nothing was trained."""

    def classes(self, layer: Layer) -> Classes:
        """Return the [n] classes of the tokens in a layer."""
        return layer.classify(self.tokens, self.signals, self.push_scale)

    @property
    def tokens(self) -> Tokens:
        return self.episode.tokens

    @property
    def running(self) -> bool:
        return self.episode.outcome is None

    def block_of(self, token: int) -> int:
        """Return the index of the block that holds a token (the last one that starts at or before it)."""
        return max(bisect_right(self.blocks, token, key=lambda block: block.start) - 1, 0)


def blocks_of(turns: Sequence[Turn], n_tokens: int) -> tuple[Block, ...]:
    """Return the turns as blocks over [0, n_tokens), gaps and overhangs repaired, in order."""
    out: list[Block] = []
    at = 0
    for turn in turns:
        start, end = min(max(turn.start, at), n_tokens), min(max(turn.end, at), n_tokens)
        if start > at:
            out.append(Block(len(out), "tokens", at, start))
        out.append(Block(len(out), turn.role, start, end, turn))
        at = end
    if at < n_tokens:
        out.append(Block(len(out), "tokens", at, n_tokens))
    return tuple(out)


def first_difference(a: Int32, b: Int32) -> int | None:
    """Return the first position where two sequences of ids differ; None if they are equal.

    If one continues the other, the shorter length."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    if len(different):
        return int(different[0])
    return None if len(a) == len(b) else n


def token_probability(tokens: Tokens, position: int, token: int) -> float | None:
    """Return the policy's probability of `token` at `position`, where it was sampled or is a stored alternative."""
    if position >= len(tokens):
        return None
    if int(tokens.ids[position]) == token and np.isfinite(tokens.logp_policy[position]):
        return float(np.exp(tokens.logp_policy[position]))
    found = np.flatnonzero(tokens.top_ids[position, :TOP_K] == token)
    if len(found) and np.isfinite(tokens.top_logps[position, found[0]]):
        return float(np.exp(tokens.top_logps[position, found[0]]))
    return None


def fork_of(view: EpisodeView, other: Episode) -> Fork | None:
    """Return the first differing token between the shown episode and another, with a line of text around it.

    Of episodes that branch the main branches are compared: only the tokens before it there led to a token.
    """
    main = view.episode.main
    tokens, theirs = view.episode.chain(main).tokens, other.chain(other.main).tokens.ids
    mine = tokens.ids
    at = first_difference(mine, theirs)
    if at is None:
        return None
    p_here = token_probability(tokens, at, int(mine[at])) if at < len(mine) else None
    p_there = token_probability(tokens, at, int(theirs[at])) if at < len(theirs) else None
    return Fork(
        other.sample,
        at if view.episode.linear else place_in(main, at),
        view.decoder.text(mine[at : at + 40]),
        view.decoder.text(theirs[at : at + 40]),
        p_here,
        p_there,
        at if other.linear else place_in(other.main, at),
    )


def reasons_of(view: EpisodeView, flags: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return flags first, then checks over the stored numbers, each with its evidence."""
    found = [("!", f"{name} {evidence}".strip()) for name, evidence in flags]
    callers = [row for row in view.siblings if getattr(row, "n_calls", 0)]
    if any(name == "NOTOOL" for name, _ in flags) and callers:
        right = sum(row.outcome == "solved" for row in callers)
        found.append(
            ("!", f"{len(callers)} of its siblings called one, {right} of these are solved")
        )
    found += [(".", f"task: {view.picked}")] * bool(view.picked)
    for one in view.scores:
        own = "not trained" if one.advantage is None else f"adv {one.advantage:+.2f}"
        turns = " ".join(f"{value:+.2f}" for value in one.turns)
        each = f" by turn {turns}" if len(one.turns) > 1 else ""
        found.append(
            (".", f'rescored "{one.name}": {one.reward:.2f} ({one.delta:+.2f}), {own}{each}')
        )
    rewards = [row.reward for row in view.siblings if row.reward is not None]
    ended = all(getattr(row, "outcome", None) is not None for row in view.siblings)
    if len(rewards) > 1 and ended:
        spread = float(np.std(rewards))
        equal = "!", "all rewards of the group are equal: nothing to learn from it"
        differ = ".", f"the group's rewards differ (sd {spread:.2f})"
        found.append(differ if spread > 1e-9 else equal)
    if not view.episode.linear:
        paths = ", ".join(spans(branch) for branch in view.episode.branches)
        found.append((".", f"{len(view.episode.branches)} branches, B: turns {paths}"))
    found += [("!", view.episode.fact)] * view.episode.fact.startswith("skipped")
    if view.signals is not None:
        return (*found, *_signal_reasons(view.tokens, view.signals))
    return (*found, (".", "not trained: no numbers of a training are stored"))


def _signal_reasons(tokens: Tokens, signals: TrainSignals) -> list[tuple[str, str]]:
    """Check the training: the mask, the sampler against the trainer, the tokens without a gradient."""
    wrong = find_leaks(tokens, signals)
    bug = f"mask bug: weight on {int(wrong.sum())} foreign tokens"
    found = [("!", bug) if wrong.any() else (".", "only what the model sampled is trained")]
    sampler = tokens.logp_policy if tokens.support is None else tokens.logp_sampled
    gap = np.abs(signals.logp_train - sampler)
    gap = gap[np.isfinite(gap) & tokens.trained_mask]
    if len(gap):
        mean = float(gap.mean())
        found.append(
            ("." if mean < 0.1 else "!", f"sampler and trainer differ by {mean:.3f} nats a token")
        )
    kinds = ("clipped", "rejected", "masked as certain", "masked as off-policy")
    counts = np.bincount(signals.clipped[tokens.trained_mask].clip(0), minlength=5)[1:].tolist()
    named = zip(counts, kinds, strict=False)
    return found + [(".", f"{count} tokens {kind}") for count, kind in named if count]


def make_view(
    episode: Episode,
    decoder: TokenTexts,
    *,
    signals: TrainSignals | None = None,
    siblings: Sequence[Any] = (),
    flags: Sequence[tuple[str, str]] = (),
    **facts: Any,
) -> EpisodeView:
    """Build a view. `facts`: its other fields."""
    ids = episode.tokens.ids
    view = EpisodeView(
        episode=episode,
        texts=short_runs(decoder.texts(ids), ids.tolist()),
        blocks=blocks_of(episode.turns, len(ids)),
        signals=signals,
        siblings=tuple(sorted(siblings, key=lambda row: (row.sample, row.id))),
        decoder=decoder,
        **facts,
    )
    return replace(view, reasons=reasons_of(view, flags))


def place_of(view: EpisodeView, token: int) -> tuple[int, int]:
    """Return (turn, token in the turn) of a token."""
    index = view.block_of(token)
    return index, token - view.blocks[index].start if view.blocks else 0


def token_at(view: EpisodeView, place: tuple[int, int] | None) -> int:
    """Return the token at a place, clamped; without one the first sampled token."""
    if not view.blocks:
        return 0
    if place is None:
        return next(
            (block.start for block in view.blocks if block.role == "assistant" and len(block)), 0
        )
    block = view.blocks[min(max(place[0], 0), len(view.blocks) - 1)]
    return min(block.start + max(place[1], 0), max(block.end - 1, block.start))


def contrasting_sibling(view: EpisodeView) -> str | None:
    """Return the sibling to compare with: the best of another reward, else any other."""
    here, others = view.episode.reward, [row for row in view.siblings if row.id != view.episode.id]
    far = [row for row in others if None not in (here, row.reward) and row.reward != here]
    best = max(far, key=lambda row: (abs(row.reward - (here or 0)), -row.sample), default=None)
    chosen = others[0] if best is None and others else best
    return None if chosen is None else str(chosen.id)


def next_flagged(view: EpisodeView, after: int) -> int | None:
    """Return the next sampled token that stands out. Wraps.

    It does with p < .1, if it was pushed as hard as the run's hardest 5 %, was clipped, or is trained without being the
    model's.
    """
    tokens = view.tokens
    odd = tokens.trained_mask & (tokens.logp_policy < -2.3)
    if view.signals is not None:
        odd |= view.signals.clipped > 0
        if view.push_scale > 0:
            odd |= tokens.trained_mask & (abs(view.signals.push) >= view.push_scale)
        odd |= find_leaks(tokens, view.signals)
    found: list[int] = odd.nonzero()[0].tolist()
    return next((t for t in found if t > after), found[0] if found else None)


def whatif_turn(view: EpisodeView, token: int) -> int | None:
    """Return the assistant turn to continue from: the cursor's, else the next one; None if none follows."""
    here = view.block_of(token)
    blocks = [block for block in view.blocks[here:] if block.turn is not None]
    first = _index(view.blocks[here]) if view.blocks else None
    turns = [
        block.turn.index for block in blocks if block.turn is not None and block.role == "assistant"
    ]
    return next(
        (turn for turn in turns if first is None or on_path(view.episode, first, turn)), None
    )


def off_branch(view: EpisodeView, number: int | None) -> frozenset[int]:
    """Return the numbers of the blocks whose turns are not on a branch; none for all branches."""
    if number is None:
        return frozenset()
    turns = set(view.episode.branches[number])
    return frozenset(block.number for block in view.blocks if _index(block) not in turns)


def own_token(view: EpisodeView, number: int) -> int:
    """Return the first token that a branch does not share with an earlier one."""
    branches = view.episode.branches
    earlier = {turn for branch in branches[:number] for turn in branch}
    own = [turn for turn in branches[number] if turn not in earlier]
    return next((block.start for block in view.blocks if own and _index(block) == own[0]), 0)


def _index(block: Block) -> int | None:
    return None if block.turn is None else block.turn.index


def text_of_turn(view: EpisodeView, turn: int) -> str:
    """Return the model's text of a turn, without the special tokens that close it (the mark that ends a call stays)."""
    block = next((block for block in view.blocks if _index(block) == turn), Block(0, "", 0, 0))
    end, closed = block.end, False
    while end > block.start:
        text, special = view.texts[end - 1], int(view.tokens.ids[end - 1]) in view.decoder.specials
        closes = special and (text.startswith("<|") or not closed)
        if not closes and text.strip():
            break
        end, closed = end - 1, closed or closes
    return "".join(view.texts[block.start : end])
