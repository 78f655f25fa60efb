"""The panes around the transcript as lines of rich text: group, turns, legend, map, forks. Pure.

Used by the replay screen and by `--plain`. Every function takes a view and returns lines, and accepts a view with
missing parts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Container, Sequence
from itertools import groupby

import numpy as np
from rich.text import Text

from agentrl_cli.errors import pluralise
from agentrl_cli.tui.common.episode_view import EpisodeView, Fork
from agentrl_cli.tui.common.layers import LAYERS, Classes, Layer, layer_key, map_line, shade
from agentrl_cli.tui.common.text import (
    BAD,
    FAINT,
    GOOD,
    HERE,
    TITLE,
    clip,
    keep_end,
    line,
    num,
    pad,
    wrap,
)
from agentrl_cli.tui.common.token_text import visible
from agentrl_cli.tui.common.tree import branch_title, indentation


def header(view: EpisodeView, *, brief: bool = False) -> Text:
    """Return the first line of the screen: where this episode is, and how it ended. `brief`: for small terminals."""
    e, ids = view.episode, [row.id for row in view.siblings]
    run, step = view.run or e.run_id or "", f"step {e.step}" if e.step is not None else e.kind
    step = f"what-if of {e.parent_id}@t{e.parent_turn}" if e.parent_id else step
    place = f"{ids.index(e.id) + 1} of {len(ids)}" if len(ids) > 1 and e.id in ids else ""
    where = ("" if brief else run, step, keep_end(e.task_id, 24) if brief else e.task_id, place)
    text = Text(" > ".join(filter(None, where)), "bold", no_wrap=True, overflow="ellipsis")
    ended = (
        (f"   reward {num(e.reward, '.2f')}", GOOD if e.solved else BAD),
        (f"   {e.outcome}", ""),
    )
    for part, style in (
        *(ended if not view.running else [("   RUNNING", HERE)]),
        ("" if e.linear else f"   {len(e.branches)} branches", HERE),
        ("" if e.advantage is None else f"   adv {num(e.advantage)}", ""),
        (f"   {e.fact}" if e.fact else "", FAINT),
        (f"   {run}" if brief else f"   ep {e.id}", FAINT),
    ):
        text.append(part, style)
    return text


def side_title(word: str, view: EpisodeView) -> Text:
    """Return one line over a transcript, if there are two side by side."""
    e = view.episode
    text = Text(f"{word} #{e.sample}", TITLE, no_wrap=True)
    text.append(f"  reward {num(e.reward, '.2f')}", GOOD if e.solved else BAD)
    return text.append(f"  {e.outcome or 'running'}  adv {num(e.advantage)}  {e.id}", FAINT)


def first_row(here: int, count: int, limit: int) -> int:
    """Return the first of `limit` rows out of `count`, so that `here` is among them."""
    return max(0, min(here - limit // 2, count - limit))


def group_lines(view: EpisodeView, width: int = 28, limit: int = 16) -> list[Text]:
    """Return the table of the group's episodes, the current one marked; each line holds its episode for a click."""
    rows, ids = view.siblings, [row.id for row in view.siblings]
    lines = [Text(f"GROUP {keep_end(view.episode.task_id, max(width - 6, 8))}"[:width], TITLE)]
    rewards = [row.reward for row in rows if row.reward is not None]
    if len(rows) < 2:
        return [*lines, Text(" no group: a single episode"[:width], FAINT)]
    if rewards:
        spread = f"mean {np.mean(rewards):.2f} sd {np.std(rewards):.2f}".replace(" 0.", " .")
        lines.append(Text(clip(f"{pluralise(len(rows), 'attempt')} {spread}", width), FAINT))
    lines.append(Text("  #   rew   adv tr flags"[:width], FAINT))
    here = ids.index(view.episode.id) if view.episode.id in ids else 0
    first = first_row(here, len(rows), limit)
    for index, row in list(enumerate(rows))[first : first + limit]:
        text = f"{'>' if index == here else ' '}{row.sample:>2} {num(row.reward, '5.2f'):>5}"
        text += f" {num(row.advantage):>5} {row.n_turns or 0:>2} {' '.join(row.flags)}"
        lines.append(line(text, width, HERE if index == here else FAINT * (row.reward is None)))
        lines[-1].apply_meta({"episode": row.id})
    return lines + [Text(f"  … {len(rows)} in all", FAINT)] * (len(rows) > limit)


def group_strip(view: EpisodeView) -> Text:
    """Return the group in one line, for small terminals: `1* 2. 3> 4*` (solved, not, here)."""
    text = Text("group ", FAINT, no_wrap=True)
    for row in view.siblings:
        here = row.id == view.episode.id
        solved = str(getattr(row, "outcome", "") or "") == "solved"
        mark = ">" if here else "*" if solved else "?" if row.reward is None else "."
        text.append(f"{row.sample}{mark} ", HERE if here else GOOD if solved else "")
    return text


def turn_lines(
    view: EpisodeView,
    current: int,
    width: int = 28,
    limit: int = 14,
    hidden: Container[int] = (),
) -> list[Text]:
    """Return the list of turns as a tree, the cursor's marked. `hidden`: blocks that are not on the branch that is
    shown.
    """
    lines, before = [Text("TURNS", TITLE)], indentation(view.episode)
    if not view.blocks:
        return [*lines, Text(" none yet", FAINT)]
    first = first_row(current, len(view.blocks), limit)
    for block in view.blocks[first : first + limit]:
        turn, here = block.turn, block.number == current
        kind = {"assistant": "asst", "system": "sys"}.get(block.role, block.role[:4])
        if turn is not None:
            bad = any(call.error for call in turn.calls)
            failed = any(result.error for result in turn.results)
            kind += (" !call" if bad else " +tool") * bool(turn.calls) + " ERR" * failed
            kind = before[turn.index] + kind
        sampled = "trained" if view.episode.fact == "trained" else "sampled"
        own = view.tokens.trained_mask[block.start : block.end].any() or not len(block)
        mask = (sampled if own else "forced") if block.role == "assistant" else "context"
        short = {"context": ".", "trained": "T", "sampled": "s", "forced": "f"}
        mask = mask if width >= 27 else short[mask]
        row = f"{'>' if here else ' '}{block.number:>2} {kind:<10.10}{len(block):>4}t {mask}"
        off = "dim strike" if block.number in hidden else FAINT * (block.role != "assistant")
        lines.append(Text(row[:width], HERE if here else off, no_wrap=True))
        lines[-1].apply_meta({"token": block.start})
    return lines + [Text("  … still running", FAINT)] * view.running


def step_lines(
    kind: str, steps: Sequence[tuple[int, float, int]], here: int | None, width: int
) -> list[Text]:
    """Return this task's mean reward at the steps that tried it, as many of the last as there is room for."""
    if not steps:
        return []
    what = "evaluations" if kind == "eval" else "training"
    cells = [f"{step}:{reward:.2f}" for step, reward, _ in steps]
    while len(cells) > 1 and sum(map(len, cells)) + 2 * len(cells) > width - 2:
        del cells[0]
    line = Text(" ", no_wrap=True)
    for (step, _, _), cell in zip(steps[-len(cells) :], cells, strict=True):
        line.append(f" {cell} ", HERE if step == here else FAINT)
    more = "" if len(cells) == len(steps) else f", the last {len(cells)} of {len(steps)}"
    return [
        Text(f"BY STEP  this task in {what}, mean reward{more}"[:width], TITLE, no_wrap=True),
        line,
    ]


def fork_lines(
    fork: Fork | None, view: EpisodeView, width: int, sides: tuple[str, str] | None = None
) -> list[Text]:
    """Return the first differing token against a sibling. `sides`: the names of this one and the other."""
    if fork is None:
        return [Text("DIFF  no sibling differs: identical token ids", FAINT)]
    block = view.block_of(min(fork.position, max(len(view.tokens) - 1, 0)))
    here, there = num(fork.p_here, ".3f"), f"p {num(fork.p_there, '.3f')}"
    there = there if fork.p_there is not None else "below its top five"
    known = fork.p_here is not None or fork.p_there is not None
    mine, theirs = sides or (f"#{view.episode.sample}", f"#{fork.sample}")
    other, room = (theirs, 5) if sides else (f"sibling {theirs}", 4)
    rows = [
        (f"DIFF with {other}: first fork turn {block}, token {fork.position}", TITLE),
        (f"  {pad(theirs, room)} {visible(fork.there) or '(ends here)'}", ""),
        (f"  {pad(mine, room)} {visible(fork.here) or '(ends here)'}", ""),
        *[(f"  policy: this p {here}, the other's {there}", FAINT)] * known,
    ]
    return [Text(text[:width], style, no_wrap=True) for text, style in rows]


def marks(view: EpisodeView, following: bool, branch: int | None, children: int) -> list[str]:
    """Return the second line: whether the episode is followed, its branch, tags, note and what-ifs."""
    found = (
        "FOLLOWING the newest episode" if following else "",
        branch_title(view.episode, branch) if branch is not None else "",
        f"TAGS {', '.join(view.tags)}" if view.tags else "",
        f"NOTE {view.note}" if view.note else "",
        f"{children} WHAT-IFS (R)" if children else "",
    )
    return list(filter(None, found))


MAP_GUTTER = 5
"""Columns before the map."""


def legend_lines(layer: Layer, width: int = 28) -> list[Text]:
    """Return the layer's classes with their glyphs, and the keys of all layers."""
    lines = [Text(f"LAYER {layer.title}"[:width], TITLE)]
    lines += [Text(f" {part}", FAINT) for part in wrap(layer.text, width - 1)]
    for label, levels in groupby(layer.levels, lambda level: level.label):
        if label:
            text = Text(" ", no_wrap=True)
            for level in (shown := list(levels)):
                glyph = level.glyph * (2 if len(shown) == 1 else 1)
                text.append(glyph, f"#ffffff on {shade(level.color)}" if level.color else FAINT)
            lines.append(text.append(f" {label}", FAINT))
    names = (f"{layer_key(n)}~{name}{'*' * (name == layer.name)}" for n, name in enumerate(LAYERS))
    keys = textwrap.wrap(" ".join(names), width, break_on_hyphens=False)
    return lines + [Text(part.replace("~", " "), FAINT) for part in keys]


def legend_strip(layer: Layer, width: int) -> Text:
    """Return the layer's legend in one line, for small terminals."""
    line = Text(f"{layer.name} ", TITLE, no_wrap=True)
    for label, levels in groupby(layer.levels, lambda level: level.label):
        if label and line.cell_len + len(label) + 4 <= width:
            for level in levels:
                line.append(
                    level.glyph, f"#ffffff on {shade(level.color)}" if level.color else FAINT
                )
            line.append(f" {label}  ", FAINT)
    return line


def map_lines(
    view: EpisodeView, layer: Layer, classes: Classes, cursor: int, width: int
) -> list[Text]:
    """Return the whole episode in one line: the layer, the turns under it, and where the cursor is."""
    n = len(view.tokens)
    if not n:
        return [Text("MAP  no tokens stored", FAINT)]
    inner = min(max(width - MAP_GUTTER, 8), n)
    columns = map_line(classes, len(layer.levels), inner)
    title = Text(f"MAP  {n:,} tokens, {view.episode.trained_tokens:,} sampled", TITLE, no_wrap=True)
    loss = Text(f"{layer.name[:4]:<5}", FAINT, no_wrap=True)
    for level in columns:
        color = shade(layer.levels[level].color)
        loss.append(layer.levels[level].glyph, f"#ffffff on {color}" if color else FAINT)
    row = ["."] * inner
    for block in view.blocks:
        column = min(block.start * inner // n, inner - 1)
        for offset, char in enumerate(str(block.number)):
            if column + offset < inner:
                row[column + offset] = char
    caret = " " * (5 + min(cursor * inner // n, inner - 1)) + "^"
    return [
        title,
        loss,
        Text("turn " + "".join(row), FAINT, no_wrap=True),
        Text(caret, HERE, no_wrap=True),
    ]


def token_on_map(view: EpisodeView, column: int, width: int) -> int | None:
    """Return the token at a column of `map_lines`, drawn `width` wide."""
    n = len(view.tokens)
    inner = min(max(width - MAP_GUTTER, 8), n)
    at = column - MAP_GUTTER
    return min(at * n // inner, n - 1) if n and 0 <= at < inner else None
