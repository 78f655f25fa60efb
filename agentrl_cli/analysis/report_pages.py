"""A run's report as one HTML file without scripts, and as Markdown with SVG pictures beside it. Pure.

Every value that a template writes passes through `_text` (HTML) or `_cell` (Markdown): no text of a run can become
markup. The HTML also forbids scripts and everything from elsewhere by its content security policy.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agentrl_cli.analysis.html import POLICY, PUSH_STEPS, push_step
from agentrl_cli.analysis.report import RunReport, Sample

EVAL_HEAD = ("weights", "step", "split", "tasks", "attempts each", "share solved", "95 % interval")
FLIP_HEAD = ("", "task", "before", "after", "episode before", "episode after")
PART_HEAD = ("reward part", "value", "weight", "")


def html_page(report: RunReport) -> str:
    """Return the whole report in one file."""
    return _render(
        "report.html.jinja",
        report,
        _text,
        policy=POLICY,
        push_steps=PUSH_STEPS,
        push_step=push_step,
    )


def markdown_page(report: RunReport, folder: str) -> str:
    """Return the report as Markdown; its pictures are `folder`/NAME.svg."""
    return _render("report.md.jinja", report, _cell, folder=folder)


def _render(name: str, report: RunReport, escape: Callable[[object], str], **more: Any) -> str:
    def escaped(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape(value))

    folder = FileSystemLoader(Path(__file__).parent)
    options: dict[str, Any] = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "undefined": StrictUndefined,
    }
    environment = Environment(loader=folder, autoescape=True, finalize=escaped, **options)
    environment.filters |= {"number": _number, "fenced": _fenced}
    heads = {"eval_head": EVAL_HEAD, "flip_head": FLIP_HEAD, "part_head": PART_HEAD}
    rows = {
        "evals": _evals(report),
        "flips": _flips(report),
        "parts": _parts,
        "compared": _compared(report),
    }
    return environment.get_template(name).render(report=report, **heads, **rows, **more)


def _text(value: object) -> str:
    """Return a text as HTML, control characters as pictures of them."""
    shown = re.sub(
        r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]",
        lambda found: chr(0x2400 + min(ord(found[0]), 0x21)),
        str(value),
    )
    return html.escape(shown)


def _cell(value: object) -> str:
    """Return a text in one line of Markdown: nothing in it is markup or HTML."""
    text = " ".join(_text(value).split())
    return re.sub(
        r"([\\`*_{}\[\]<>|#!~])", r"\\\1", text.replace("&quot;", '"').replace("&#x27;", "'")
    )


def _fenced(pieces: Sequence[tuple[str, float]]) -> Markup:
    """Return a turn as a code block, whose fence is longer than any in the text."""
    text = "".join(text for text, _ in pieces)
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(longest + 1, 3)
    return Markup(f"{fence}text\n{text}\n{fence}")


def _evals(report: RunReport) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for row in report.evals:
        span = (
            f"{row.low:.3f} to {row.high:.3f}"
            if row.low is not None and row.high is not None
            else "none stored"
        )
        step = "" if row.step is None else row.step
        rows.append(
            (row.name, step, row.split, row.n_tasks, row.n_samples, _number(row.pass_rate), span)
        )
    return rows


def _flips(report: RunReport) -> list[tuple[object, ...]]:
    return [
        (line.flip, line.task_id, f"{line.before[0]}/{line.before[1]}", f"{line.after[0]}/{line.after[1]}",
         line.episode_before, line.episode_after)
        for line in report.flipped
    ]  # fmt: skip


def _parts(sample: Sample) -> list[tuple[object, ...]]:
    return [
        (name, f"{value:.3f}", f"{weight:g}", detail)
        for name, value, weight, detail in sample.parts
    ]


def _compared(report: RunReport) -> str:
    if not report.tasks:
        return "No two evaluations of this run with episodes have tasks in common."
    gained = sum(line.flip == "gained" for line in report.flipped)
    first, last = report.compared
    return (
        f"{first} against {last}, {report.tasks} tasks: {gained} gained, {len(report.flipped) - gained} lost."
        " A task is solved if more than half of its attempts are."
    )


def _number(value: float | None) -> str:
    return "none" if value is None or not math.isfinite(value) else f"{value:.3f}"
