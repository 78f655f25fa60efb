"""The right pane of replay as lines of rich text: reward, token under the cursor, reasons. Pure."""

from __future__ import annotations

import math

import numpy as np
from rich.cells import set_cell_size
from rich.text import Text

from agentrl_cli.tui.common.episode_view import EpisodeView
from agentrl_cli.tui.common.layers import LAYERS, PUSH_STEPS, reference_kl
from agentrl_cli.tui.common.text import BAD, FAINT, HERE, TITLE, clip, num, pad, wrap
from agentrl_cli.tui.common.token_text import visible
from agentrl_cli.types import Float32, Origin
from agentrl_cli.types.tokens import NO_GRADIENT

STATUS = (
    (("logp policy", "logp"), ("trained", "trained")),
    (
        ("advantage", "adv"),
        ("push", "push"),
        ("ratio", "ratio"),
        ("KL ref", "KL"),
        ("entropy", "entropy"),
    ),
)
"""The numbers of a token in the two lines of a small terminal, and their names there."""


def reward_lines(view: EpisodeView, width: int = 28) -> list[Text]:
    """Return raw value × weight = share for every part, the primary one marked, and the total."""
    room = max(min(12, width - 16), 4)
    lines = [Text(f"{'REWARD':<{room}}{'raw':>5}{'w':>5}{'sum':>6}"[:width], TITLE)]
    e = view.episode
    if not e.reward_parts:
        what = "not graded yet" if view.running else f"not graded: {e.outcome}"
        return [
            *lines,
            Text(f" {what}"[:width], FAINT),
            *([Text(e.error[:width], BAD)] if e.error else []),
        ]
    for part in e.reward_parts:
        name = ("*" if part.primary else " ") + part.name
        share = part.value * part.weight + 0.0  # no minus before a zero
        row = f"{pad(clip(name, room), room)}{num(part.value, '5.2f'):>5}{part.weight:>5.2g}{num(share, '6.2f'):>6}"
        lines.append(Text(row[:width], BAD if share < 0 else ""))
        if part.fakeable:
            lines.append(Text("   FAKEABLE by the solution"[:width], BAD, no_wrap=True))
        if part.detail:
            lines += [
                Text(f"   {text}", FAINT, no_wrap=True)
                for text in wrap(visible(part.detail), width - 3)[:6]
            ]
    lines.append(Text(f"{' total':<{room + 10}}{num(e.reward, '.2f'):>6}"[:width], "bold"))
    rewards = [row.reward for row in view.siblings if row.reward is not None]
    if len(rewards) > 1:
        lines.append(
            Text(f" group mean {np.mean(rewards):.2f}  adv {num(e.advantage)}"[:width], FAINT)
        )
    return lines


def token_numbers(view: EpisodeView, token: int) -> list[tuple[str, str]]:
    """Return every stored number of one token as (name, value); missing ones are left out."""
    tokens, signals = view.tokens, view.signals
    out = [("origin", Origin(int(tokens.origin[token])).name.lower())]
    for name, logps in (("logp sampled", tokens.logp_sampled), ("logp policy", tokens.logp_policy)):
        if np.isfinite(logp := float(logps[token])):
            out.append((name, f"{num(logp, '+.3f')} p {num(math.exp(logp), '.3f').lstrip('0')}"))
    if np.isfinite(tokens.entropy[token]):
        found = np.flatnonzero(tokens.top_ids[token] == tokens.ids[token])
        rank = f" rank {found[0] + 1}" if len(found) else " rank > 5"
        known_rank = len(found) or tokens.top_ids[token, 0] >= 0
        out.append(("entropy", f"{tokens.entropy[token]:.3f}{rank if known_rank else ''}"))
    if signals is not None:
        teacher = signals.logp_teacher
        arrays: dict[str, Float32 | None] = {
            "logp trainer": signals.logp_train,
            "logp ref": signals.logp_ref,
            "KL ref": reference_kl(tokens, signals),
            "p teacher": None if teacher is None else np.exp(teacher),
            "teacher − own": None if teacher is None else teacher - signals.logp_train,
            "adv reward": signals.reward_advantage,
            "ratio": signals.ratio,
            "advantage": signals.advantage,
            "weight": signals.weight,
            "value": signals.value,
            "return": signals.returns,
        }
        out += [
            (name, num(float(array[token]), "+.4g"))
            for name, array in arrays.items()
            if array is not None and np.isfinite(array[token])
        ]
        if math.isfinite(push := float(signals.push[token])):
            out.append(("push", _push_words(view, token, push)))
    return [*out, ("trained", _disposition(view, token))]


def _push_words(view: EpisodeView, token: int, push: float) -> str:
    """Return `up, 3 of 7` by the token's glyph in the layer, with the multiple of the scale beyond the last step."""
    step = int(view.classes(LAYERS["push"])[token]) - 2
    if step < 0 or step >= 2 * PUSH_STEPS:
        return "hardly moved" if step < 0 else "none: clipped"
    size, many = step % PUSH_STEPS + 1, abs(push) / view.push_scale
    more = f" ({many:.1f}×)" if many >= 1.05 else ""
    return f"{'up' if push > 0 else 'down'}, {size} of {PUSH_STEPS}{more}"


def _disposition(view: EpisodeView, token: int) -> str:
    """Return whether a token was trained, and why not."""
    fact, kind, signals = view.episode.fact, view.episode.kind, view.signals
    kinds = {"train": "not yet", "eval": "an evaluation", "whatif": "a what-if"}
    state = "yes" if fact == "trained" else f"no: {fact or kinds.get(kind, f'a {kind}')}"
    if not view.tokens.trained_mask[token]:
        state = "no"
    if signals is not None and np.isfinite(signals.weight[token]):
        state += f", {NO_GRADIENT[signals.clipped[token]]}"
    return state


def top_alternatives(view: EpisodeView, token: int) -> list[tuple[str, float, bool]]:
    """Return (text, probability, was sampled) of the stored alternatives, most likely first."""
    out = []
    for token_id, logp in zip(
        view.tokens.top_ids[token], view.tokens.top_logps[token], strict=True
    ):
        if token_id >= 0 and np.isfinite(logp):
            text = visible(view.decoder.text([int(token_id)]))
            out.append((text, float(np.exp(logp)), int(token_id) == int(view.tokens.ids[token])))
    return out


def token_lines(view: EpisodeView, token: int, width: int = 28) -> list[Text]:
    """Return the inspector of the token under the cursor."""
    n = len(view.tokens)
    if not 0 <= token < n:
        return [Text("TOKEN", TITLE), Text(" no tokens stored", FAINT)]
    block = view.blocks[view.block_of(token)] if view.blocks else None
    place = f"{token - block.start + 1}/{len(block)}" if block else f"{token + 1}/{n}"
    lines = [
        Text(f"TOKEN {place}  id {int(view.tokens.ids[token])}"[:width], TITLE, no_wrap=True),
        Text(f' "{visible(view.texts[token])}"'[:width], HERE, no_wrap=True),
    ]
    for name, value in token_numbers(view, token):
        style = BAD if "CLIPPED" in value else ""
        lines.append(Text(f" {name:<12} {value}"[:width], style, no_wrap=True))
    alternatives = top_alternatives(view, token)
    if alternatives:
        lines.append(Text(" most likely", FAINT))
    for text, p, sampled in alternatives:
        bar = "█" * round(p * 8)
        lines.append(
            Text(
                f" {'>' if sampled else ' '}{set_cell_size(text, 10)} {p:5.3f} {bar}"[:width],
                HERE if sampled else "",
            )
        )
    return lines


def token_status(view: EpisodeView, token: int, width: int) -> list[Text]:
    """Return the inspector in two lines, for small terminals."""
    if not 0 <= token < len(view.tokens):
        return [Text("no tokens stored", FAINT), Text("")]
    numbers = dict(token_numbers(view, token))
    shown = clip(visible(view.texts[token]), 16)
    first = f'{token + 1}/{len(view.tokens)} id {int(view.tokens.ids[token])} "{shown}"  {numbers["origin"]}  '
    first += "  ".join(f"{label} {numbers[name]}" for name, label in STATUS[0] if name in numbers)
    second = [f"{label} {numbers[name]}" for name, label in STATUS[1] if name in numbers]
    second += [f"{clip(text, 8)} {p:.2f}"[:14] for text, p, _ in top_alternatives(view, token)[:5]]
    while (
        sum(map(len, second)) + 2 * len(second) > width + 2
    ):  # whole numbers with their names, as many as fit
        second.pop()
    return [Text(clip(first, width), no_wrap=True), Text("  ".join(second), FAINT, no_wrap=True)]


def reason_lines(view: EpisodeView, width: int = 28) -> list[Text]:
    """Return the flags and checks, each with its evidence."""
    solved, running = view.episode.solved, view.running
    lines = [Text("SO FAR" if running else "CHECKS" if solved else "WHY IT FAILED (rules)", TITLE)]
    for mark, text in view.reasons:
        for number, part in enumerate(wrap(text, width - 3)):
            prefix = f" {mark} " if number == 0 else "   "
            lines.append(Text(prefix + part, BAD if mark == "!" else FAINT))
    if view.decoder.problem:
        lines += [Text(f" ! {part}", BAD) for part in wrap(view.decoder.problem, width - 3)]
    if view.tags:
        lines.append(Text(f"TAGS {', '.join(view.tags)}"[:width], TITLE))
    if view.note:
        lines += [Text(part, FAINT) for part in wrap(f"NOTE {view.note}", width)]
    return lines
