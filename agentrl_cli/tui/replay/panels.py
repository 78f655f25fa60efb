"""The panes around the transcript as lines of rich text: group, turns, reward, token, reasons, map. Pure.

Used by the replay screen and by `--plain`. Every function takes a view and returns lines, and accepts a view with
missing parts.
"""

from __future__ import annotations

import math
from collections.abc import Container

import numpy as np
from rich.text import Text

from agentrl_cli.tui.common.episode_view import EpisodeView, Fork
from agentrl_cli.tui.common.layers import reference_kl
from agentrl_cli.tui.common.text import BAD, FAINT, GOOD, HERE, TITLE, clip, flag_names, num, wrap
from agentrl_cli.tui.common.token_text import keep_end, visible
from agentrl_cli.tui.common.tree import branch_title, indentation
from agentrl_cli.types import Float32, Origin, TrainSignals
from agentrl_cli.types.signals import NO_GRADIENT

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
SHORT = {"assistant": "asst", "system": "sys"}


def head(view: EpisodeView, *, brief: bool) -> Text:
    """Return the screen's name and the `header`."""
    return Text("" if brief else "agentrl replay   ", TITLE) + header(view, brief=brief)


def header(view: EpisodeView, position: str = "", *, brief: bool = False) -> Text:
    """Return the first line of the screen: where this episode is, and how it ended. `brief`: for small terminals."""
    e = view.episode
    run, step = view.run or e.run_id or "", f"step {e.step}" if e.step is not None else e.kind
    if e.parent_id:
        step = f"what-if of {e.parent_id}@t{e.parent_turn}"
    where = [
        part
        for part in ("" if brief else run, step, keep_end(e.task_id, 24) if brief else e.task_id)
        if part
    ]
    if len(view.siblings) > 1:
        numbers = [row.id for row in view.siblings]
        if e.id in numbers:
            where.append(f"{numbers.index(e.id) + 1} of {len(numbers)}")
    text = Text(" > ".join(where), style="bold", no_wrap=True, overflow="ellipsis")
    if view.running:
        text.append("   RUNNING", HERE)
    else:
        text.append(f"   reward {num(e.reward, '.2f')}", GOOD if e.solved else BAD)
        text.append(f"   {e.outcome}")
    if not e.linear:
        text.append(f"   {len(e.branches)} branches", HERE)
    if e.advantage is not None:
        text.append(f"   adv {num(e.advantage)}")
    if e.fact:
        text.append(f"   {e.fact}", FAINT)
    if position:
        text.append(f"   {position}", FAINT)
    return text.append(f"   {run}" if brief else f"   ep {e.id}", FAINT)


def side_title(word: str, view: EpisodeView) -> Text:
    """One line over a transcript, if there are two side by side."""
    e = view.episode
    text = Text(f"{word} #{e.sample}", TITLE, no_wrap=True)
    text.append(f"  reward {num(e.reward, '.2f')}", GOOD if e.solved else BAD)
    return text.append(f"  {e.outcome or 'running'}  adv {num(e.advantage)}  {e.id}", FAINT)


GROUP_ROWS, TURN_ROWS = 16, 14
"""Lines of the group's and the turns' pane under their titles."""


def first_row(here: int, count: int, limit: int) -> int:
    """Return the first of `limit` rows out of `count`, so that `here` is among them."""
    return max(0, min(here - limit // 2, count - limit))


def group_lines(view: EpisodeView, width: int = 28, limit: int = GROUP_ROWS) -> list[Text]:
    """Return the table of the group's episodes, the current one marked."""
    rows = view.siblings
    lines = [Text(f"GROUP {keep_end(view.episode.task_id, max(width - 6, 8))}"[:width], TITLE)]
    rewards = [row.reward for row in rows if row.reward is not None]
    if len(rows) < 2:
        return [*lines, Text(" no group: a single episode"[:width], FAINT)]
    if rewards:
        spread = f"mean {np.mean(rewards):.2f} sd {np.std(rewards):.2f}".replace(" 0.", " .")
        lines.append(Text(clip(f"{len(rows)} attempts {spread}", width), FAINT))
    lines.append(Text("  #   rew   adv tr flags"[:width], FAINT))
    ids = [row.id for row in rows]
    here = ids.index(view.episode.id) if view.episode.id in ids else 0
    first = first_row(here, len(rows), limit)
    for index, row in list(enumerate(rows))[first : first + limit]:
        mark = ">" if index == here else " "
        turns = row.n_turns if row.n_turns is not None else 0
        line = f"{mark}{row.sample:>2} {num(row.reward, '5.2f'):>5} {num(row.advantage):>5} {turns:>2} "
        text = Text(clip(line + flag_names(row.flags), width), no_wrap=True)
        if index == here:
            text.stylize(HERE)
        elif row.reward is None:
            text.stylize(FAINT)
        lines.append(text)
    if len(rows) > limit:
        lines.append(Text(f"  … {len(rows)} in all", FAINT))
    return lines


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
    limit: int = TURN_ROWS,
    hidden: Container[int] = (),
) -> list[Text]:
    """Return the list of turns as a tree, the cursor's marked. `hidden`: blocks that are not on the branch that is
    shown.
    """
    lines = [Text("TURNS", TITLE)]
    before = indentation(view.episode)
    if not view.blocks:
        return [*lines, Text(" none yet", FAINT)]
    first = first_row(current, len(view.blocks), limit)
    for block in view.blocks[first : first + limit]:
        turn = block.turn
        kind = SHORT.get(block.role, block.role[:4])
        if turn is not None and turn.calls:
            kind += " !call" if any(call.error for call in turn.calls) else " +tool"
        if turn is not None and any(result.error for result in turn.results):
            kind += " ERR"
        if turn is not None:
            kind = before[turn.index] + kind
        mask = (
            "masked"
            if block.role != "assistant"
            else "trained"
            if view.episode.fact == "trained"
            else "sampled"
        )
        mark = ">" if block.number == current else " "
        mask = mask if width >= 27 else {"masked": ".", "trained": "T", "sampled": "s"}[mask]
        text = Text(
            f"{mark}{block.number:>2} {kind:<10.10}{len(block):>4}t {mask}"[:width], no_wrap=True
        )
        if block.number in hidden:
            text.stylize("dim strike" if block.number != current else HERE)
        else:
            text.stylize(
                HERE if block.number == current else "" if block.role == "assistant" else FAINT
            )
        lines.append(text)
    if view.running:
        lines.append(Text("  … still running", FAINT))
    return lines


def reward_lines(view: EpisodeView, width: int = 28) -> list[Text]:
    """Raw value × weight = share, for every part; the total; the primary part marked."""
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
        row = f"{clip(name, room):<{room}}{num(part.value, '5.2f'):>5}{part.weight:>5.2g}{num(share, '6.2f'):>6}"
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


def _probability(logp: float) -> str:
    return f"{num(logp, '+.3f')} p {num(math.exp(logp) if math.isfinite(logp) else None, '.3f').lstrip('0')}"


def token_numbers(view: EpisodeView, token: int) -> list[tuple[str, str]]:
    """Return every stored number of one token as (name, value); missing ones are left out."""
    tokens, signals = view.tokens, view.signals
    origin = int(tokens.origin[token])
    out = [
        (
            "origin",
            Origin(origin).name.lower() if origin in Origin._value2member_map_ else str(origin),
        )
    ]
    if np.isfinite(tokens.logp_sampled[token]):
        out.append(("logp sampled", _probability(float(tokens.logp_sampled[token]))))
    if np.isfinite(tokens.logp_policy[token]):
        out.append(("logp policy", _probability(float(tokens.logp_policy[token]))))
    if np.isfinite(tokens.entropy[token]):
        rank = _rank(view, token)
        out.append(("entropy", f"{tokens.entropy[token]:.3f}" + (f" rank {rank}" if rank else "")))
    if signals is not None:
        for name, array in (
            ("logp trainer", signals.logp_train),
            ("logp ref", signals.logp_ref),
            ("KL ref", reference_kl(tokens, signals)),
            ("p teacher", _exp(signals.logp_teacher)),
            ("teacher − own", distilled(signals)),
            ("adv reward", signals.reward_advantage),
            ("ratio", signals.ratio),
            ("advantage", signals.advantage),
            ("weight", signals.weight),
            ("value", signals.value),
            ("return", signals.returns),
        ):
            if array is not None and np.isfinite(array[token]):
                out.append((name, num(float(array[token]), "+.4g")))
        push = float(signals.push[token])
        if math.isfinite(push):
            out.append(
                (
                    "push",
                    f"{num(push / view.push_scale)} of p95"
                    if view.push_scale
                    else num(push, "+.4g"),
                )
            )
    trained, fact = bool(tokens.trained_mask[token]), view.episode.fact
    kind = view.episode.kind
    why = fact or {"train": "not yet", "eval": "an evaluation", "whatif": "a what-if"}.get(
        kind, f"a {kind}"
    )
    state = "no" if not trained else "yes" if fact == "trained" else f"no: {why}"
    if signals is not None and np.isfinite(signals.weight[token]):
        state += f", {NO_GRADIENT[signals.clipped[token]]}"
    out.append(("trained", state))
    return out


def _exp(values: Float32 | None) -> Float32 | None:
    return None if values is None else np.exp(values)


def distilled(signals: TrainSignals) -> Float32 | None:
    """[n] log p of the teacher − log p before the step: a distillation's advantage of each token."""
    return None if signals.logp_teacher is None else signals.logp_teacher - signals.logp_train


def _rank(view: EpisodeView, token: int) -> str:
    found = np.flatnonzero(view.tokens.top_ids[token] == view.tokens.ids[token])
    if len(found):
        return str(int(found[0]) + 1)
    return "> 5" if view.tokens.top_ids[token, 0] >= 0 else ""


def top_alternatives(view: EpisodeView, token: int) -> list[tuple[str, float, bool]]:
    """(text, probability, was sampled) of the stored alternatives, most likely first."""
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
    lines = [Text(f"TOKEN {place}  id {int(view.tokens.ids[token])}"[:width], TITLE, no_wrap=True)]
    lines.append(Text(f' "{visible(view.texts[token])}"'[:width], HERE, no_wrap=True))
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
                f" {'>' if sampled else ' '}{text[:10]:<10} {p:5.3f} {bar}"[:width],
                HERE if sampled else "",
            )
        )
    # as many lines for every token of an episode, so that what is below keeps its place
    return lines + [Text("")] * (_token_room(view) - len(lines))


def _token_room(view: EpisodeView) -> int:
    signals, sampled = view.signals, bool(view.tokens.trained_mask.any())
    optional: tuple[object, ...] = ()
    if signals is not None:
        optional = (signals.logp_ref, signals.logp_ref, signals.value, signals.returns)
        optional += (signals.logp_teacher, signals.logp_teacher, signals.reward_advantage)
    trained = 5 + sum(array is not None for array in optional) if signals is not None else 0
    return 4 + (3 + trained + 1 + view.tokens.top_ids.shape[1] if sampled else 0)


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
    """Flags and checks, each with its evidence."""
    solved, running = view.episode.solved, view.running
    lines = [Text("SO FAR" if running else "CHECKS" if solved else "WHY IT FAILED (rules)", TITLE)]
    for reason in view.reasons:
        for number, part in enumerate(wrap(reason.text, width - 3)):
            prefix = f" {reason.mark} " if number == 0 else "   "
            lines.append(Text(prefix + part, BAD if reason.mark == "!" else FAINT))
    if view.decoder.problem:
        lines += [Text(f" ! {part}", BAD) for part in wrap(view.decoder.problem, width - 3)]
    if view.tags:
        lines.append(Text(f"TAGS {', '.join(view.tags)}"[:width], TITLE))
    if view.note:
        lines += [Text(part, FAINT) for part in wrap(f"NOTE {view.note}", width)]
    return lines


def failure_lines(
    found: tuple[str, int, int] | None, step: int | None, width: int = 28
) -> list[Text]:
    """Return how many episodes of the step have the same first flag."""
    if found is None:
        return []
    flag, count, total = found
    return [Text(f" {flag}: {count} of {total} in step {step}, x"[:width], FAINT, no_wrap=True)]


def step_lines(
    kind: str, steps: list[tuple[int, float, int]], here: int | None, width: int
) -> list[Text]:
    """This task's mean reward at the steps that tried it, as many of the last as there is room for."""
    if not steps:
        return []
    what = "evaluations" if kind == "eval" else "training"
    cells = [f"{step}:{reward:.2f}" for step, reward, _ in steps]
    while len(cells) > 1 and sum(map(len, cells)) + 2 * len(cells) > width - 2:
        del cells[0]
    line = Text(" ", no_wrap=True)
    for (step, _, _), cell in zip(steps[-len(cells) :], cells, strict=True):
        line.append(f" {cell}", HERE if step == here else FAINT)
        line.append(" ")
    more = "" if len(cells) == len(steps) else f", the last {len(cells)} of {len(steps)}"
    return [
        Text(f"BY STEP  this task in {what}, mean reward{more}"[:width], TITLE, no_wrap=True),
        line,
    ]


def fork_lines(fork: Fork | None, view: EpisodeView, width: int) -> list[Text]:
    """Return the first differing token against a sibling."""
    if fork is None:
        return [Text("DIFF  no sibling differs: identical token ids", FAINT)]
    block = view.block_of(min(fork.position, max(len(view.tokens) - 1, 0)))
    title = f"DIFF with sibling #{fork.sample}: first fork turn {block}, token {fork.position}"
    lines = [Text(title[:width], TITLE, no_wrap=True)]
    for label, text in ((f"#{fork.sample}", fork.there), (f"#{view.episode.sample}", fork.here)):
        lines.append(Text(f"  {label:<4} {visible(text) or '(ends here)'}"[:width], no_wrap=True))
    if fork.p_here is not None or fork.p_there is not None:
        lines.append(
            Text(
                f"  policy: this p {num(fork.p_here, '.3f')}, the other's p {num(fork.p_there, '.3f')}"[
                    :width
                ],
                FAINT,
            )
        )
    return lines


def sibling_at(view: EpisodeView, line: int) -> str | None:
    """Return the sibling on a line of `group_lines`; None if there is none."""
    ids = [row.id for row in view.siblings]
    if len(ids) < 2:
        return None
    here = ids.index(view.episode.id) if view.episode.id in ids else 0
    head = 2 + any(row.reward is not None for row in view.siblings)
    index = line - head + first_row(here, len(ids), GROUP_ROWS)
    shown = head <= line < head + GROUP_ROWS and index < len(ids)
    return str(ids[index]) if shown else None


def turn_at(view: EpisodeView, current: int, line: int) -> int | None:
    """Return the first token of the turn on a line of `turn_lines`, `current` being the cursor's turn."""
    index = line - 1 + first_row(current, len(view.blocks), TURN_ROWS)
    shown = 1 <= line <= TURN_ROWS and index < len(view.blocks)
    return view.blocks[index].start if shown else None


def marks(view: EpisodeView, following: bool, branch: int | None, children: int) -> list[str]:
    """Return the second line: whether the episode is followed, its branch, tags, note and what-ifs."""
    found = ["FOLLOWING the newest episode"] if following else []
    found += [branch_title(view.episode, branch)] if branch is not None else []
    found += [f"TAGS {', '.join(view.tags)}"] if view.tags else []
    found += [f"NOTE {view.note}"] if view.note else []
    return found + ([f"{children} WHAT-IFS (R 4)"] if children else [])
