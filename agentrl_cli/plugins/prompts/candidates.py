"""The candidates of `agentrl optimize` as its screen shows them. No textual."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from textwrap import wrap

from rich.text import Text

from agentrl_cli.plugins.prompts.store import PromptRow, Prompts
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tui.common.charts import chart
from agentrl_cli.tui.common.text import BAD, FAINT, GOOD, TITLE, clip, num

COLUMNS = f"  {'from':<5}{'valid':>6} {'test':>6}{'eps':>5}  candidate"
DEEPEST = 8
"""Levels that indentation shows at most."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """A search as far as it is stored."""

    run: RunRow
    rows: tuple[tuple[PromptRow, int], ...]
    """Candidates with their depth, each below its parent."""
    best: str
    """The id with the best validation score, the first of equals; empty if none has one."""
    episodes: dict[str, int]
    spent: int
    """Episodes of the search, without those of the test split."""
    budget: int
    points: tuple[tuple[float, float], ...]
    """(episodes spent, validation score), in the order of evaluation."""


def load_candidates(store: Store, name: str) -> Candidates:
    """Return the candidates of a run. Raises NotFound."""
    run = store.runs.get(name)
    found = Prompts(store).all(run.id)
    plan = store.journal.newest_event(run.id, "optimize") or {}
    test = run.config.get("eval", {}).get("split", "test")
    episodes: dict[str, int] = {}
    spent: set[tuple[str, str]] = set()
    for row in store.episodes.rows(store.episodes.ids("kind:eval", "time", run=run.id)):
        candidate = (row.group_id or "").partition("/")[0]
        episodes[candidate] = episodes.get(candidate, 0) + 1
        if row.split != test:
            spent.add((candidate, row.task_id))
    scored = [row for row in found if "validation" in row.scores]
    points = [
        (row.scores.get("validation_episodes", 0), row.scores["validation"]) for row in scored
    ]
    best = max(scored, key=lambda row: row.scores["validation"]).id if scored else ""
    tree, budget = tuple(sort_by_parent(found)), int(plan.get("budget", 0))
    return Candidates(run, tree, best, episodes, len(spent), budget, tuple(sorted(points)))


def sort_by_parent(rows: list[PromptRow]) -> list[tuple[PromptRow, int]]:
    """Return each candidate with its depth, after its parent; one whose parent is unknown is a root."""
    below: dict[str | None, list[PromptRow]] = {}
    known: set[str] = set()
    for row in rows:
        below.setdefault(row.parent_id if row.parent_id in known else None, []).append(row)
        known.add(row.id)
    out, open_rows = [], [(row, 0) for row in reversed(below.get(None, []))]
    while open_rows:
        row, depth = open_rows.pop()
        out.append((row, depth))
        open_rows += [(child, depth + 1) for child in reversed(below.get(row.id, []))]
    return out


def head_line(found: Candidates) -> str:
    """Return the run, its state, how many candidates, and the episodes spent."""
    of = f"/{found.budget}" if found.budget else ""
    return f"{found.run.name}   {found.run.state}   {len(found.rows)} candidates   {found.spent}{of} episodes"


def plain_lines(found: Candidates, width: int) -> list[str]:
    """Return the screen as text: the candidates, the curve, and the best one against its parent."""
    rows = {row.id: row for row, _ in found.rows}
    lines = tree_lines(found, "", width)
    if found.points:
        lines += [Text(), *curve_lines(found, width, 8)]
    if best := rows.get(found.best):
        lines += [Text(), *diff_lines(rows.get(best.parent_id or ""), best, width)]
    return [head_line(found), COLUMNS, *(str(line).rstrip() for line in lines)]


def tree_lines(found: Candidates, marked: str, width: int) -> list[Text]:
    """Return a line for each candidate: place in the tree, origin, scores, episodes; the best has a `★`."""
    lines = []
    for row, depth in found.rows:
        indent = "  " * (min(depth, DEEPEST) - 1) + "└ " if depth else ""
        sign = ("*" if row.id == marked else " ") + ("★" if row.id == found.best else " ")
        scores = (
            f"{num(row.scores.get('validation'), '.3f'):>6} {num(row.scores.get('test'), '.3f'):>6}"
        )
        text = f"{sign}{row.origin:<5}{scores}{found.episodes.get(row.id, 0):>5}  {indent}{row.id}"
        lines.append(Text(clip(text, width), GOOD if row.id == found.best else "", no_wrap=True))
    return lines


def curve_lines(found: Candidates, width: int, height: int) -> list[Text]:
    """Return the best validation score so far over the episodes spent; dim: each candidate's."""
    best = [(x, max(y for _, y in found.points[: n + 1])) for n, (x, _) in enumerate(found.points)]
    column = found.spent / max(
        width, 1
    )  # the level before ends a column earlier: a chart shows the mean of each
    steps = [
        point
        for n, (x, y) in enumerate(best)
        for point in ((x - column, best[n - 1][1] if n else y), (x, y))
    ]
    if best and found.spent > best[-1][0]:
        steps.append((found.spent, best[-1][1]))
    return chart(
        "VALIDATION over episodes: best (dim: each)",
        steps,
        width,
        height,
        unit=True,
        others=[found.points],
    )


def diff_lines(old: PromptRow | None, new: PromptRow, width: int) -> list[Text]:
    """Return the texts of a candidate against another's; without another, the texts themselves."""
    lines = [Text(f"TEXT of {new.id}" if old is None else f"DIFF {old.id} -> {new.id}", TITLE)]
    for name, text in new.parts.items():
        before = [] if old is None else old.parts.get(name, "").splitlines()
        lines.append(Text(name, FAINT))
        for line in (
            text.splitlines() if old is None else list(difflib.ndiff(before, text.splitlines()))
        ):
            if old is not None and line.startswith("?"):
                continue
            sign, rest = ("  ", line) if old is None else (line[:2], line[2:])
            style = GOOD if sign == "+ " else BAD if sign == "- " else ""
            lines += [
                Text(sign + part, style, no_wrap=True)
                for part in wrap(rest, max(width - 2, 10)) or [""]
            ]
    return lines
