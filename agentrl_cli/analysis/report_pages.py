"""A run's report as one HTML file without scripts, and as Markdown with SVG pictures beside it. Pure.

Every text of a run passes through `_text` (HTML) or `_cell` and `_fenced` (Markdown): none can become markup. The HTML
also forbids scripts and everything from elsewhere by its content security policy.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence

from agentrl_cli.analysis.html import POLICY, PUSH_STEPS, push_step
from agentrl_cli.analysis.report import RunReport, Sample

STYLE = """
:root { color-scheme: light dark; }
body { max-width: 62em; margin: 0 auto; padding: 1em; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; } .why { color: #666; }
table { border-collapse: collapse; } td, th { padding: .15em .8em .15em 0; text-align: left; vertical-align: top; }
.pictures svg { margin: 0 .8em .8em 0; border: 1px solid #ccc; }
.turn { border-left: 3px solid #bbb; margin: .5em 0; padding-left: .6em; }
.assistant { border-color: #3f7fd0; } .tool { border-color: #b07030; }
.role { color: #777; font-size: .85em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 13px/1.5 ui-monospace, monospace; }
summary { cursor: pointer; }
"""


def _text(value: object) -> str:
    """A text as HTML, control characters as pictures of them."""
    shown = re.sub(
        r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", lambda found: chr(0x2400 + min(ord(found[0]), 0x21)), str(value)
    )
    return html.escape(shown)


def html_page(report: RunReport) -> str:
    """The whole report in one file."""
    title = _text(f"agentrl report {report.run.name}")
    body = [
        f"<h1>{_text(report.run.name)}</h1><p>{_text(report.verdict)}</p>",
        _table([], report.facts),
        f'<h2>Curves</h2><div class="pictures">{"".join(svg for _, svg in report.pictures)}</div>',
        f"<h2>Evaluations</h2>{_table(EVAL_HEAD, _evals(report)) if report.evals else '<p>none</p>'}",
        f"<h2>Flipped tasks</h2><p>{_text(_compared(report))}</p>",
        _table(FLIP_HEAD, _flips(report)) if report.flipped else "",
        "<h2>Episodes</h2><p>Under a trained token: blue and a solid line where the step pushed it up, orange and a"
        " dashed line where it pushed it down; the stronger, the fuller.</p>",
        *(_sample(sample) for sample in report.samples),
        _section(
            "Alerts", f"<ul>{''.join(f'<li>{_text(text)}</li>' for text in report.alerts)}</ul>" * bool(report.alerts)
        ),
        _section("Machine", _table([], report.machine)),
        f"<h2>Settings</h2><details><summary>{len(report.settings)} settings</summary>",
        f"{_table([], report.settings)}</details>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}{_push_style()}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>{content}" if content else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    top = f"<tr>{''.join(f'<th>{_text(cell)}</th>' for cell in head)}</tr>" if head else ""
    return f"<table>{top}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _push_style() -> str:
    """A class for every step of the push: a colour and a line, so that it survives a printer."""
    rules = []
    for step in range(1, PUSH_STEPS + 1):
        share, line = round(step / PUSH_STEPS * 0.75, 2), "double" if step > PUSH_STEPS // 2 else "solid"
        rules.append(f".u{step} {{ background: rgba(63,127,208,{share}); text-decoration: underline {line}; }}")
        line = "wavy" if step > PUSH_STEPS // 2 else "dashed"
        rules.append(f".d{step} {{ background: rgba(208,120,30,{share}); text-decoration: underline {line}; }}")
    return "\n".join(rules)


def _sample(sample: Sample) -> str:
    row = sample.row
    head = f"{sample.why}: {row.task_id} #{row.sample}, step {row.step}, reward {_number(row.reward)}, {row.outcome}"
    parts = [f"<h3>{_text(head)}</h3><p class='why'>episode {_text(row.id)}</p>"]
    parts.append(_table(PART_HEAD, [(n, f"{v:.3f}", f"{w:g}", d) for n, v, w, d in sample.parts]))
    if sample.flags:
        parts.append(f"<p>{_text('; '.join(sample.flags))}</p>")
    if sample.masked:
        parts.append("<p>Something here looks like a secret and was masked.</p>")
    for role, pieces in sample.turns:
        inside = "".join(_piece(text, push) for text, push in pieces)
        parts.append(
            f'<div class="turn {_role(role)}"><span class="role">{_text(role)}</span><pre>{inside}</pre></div>'
        )
    return "".join(parts)


def _role(role: str) -> str:
    return role if role in ("system", "user", "assistant", "tool") else "other"


def _piece(text: str, push: float) -> str:
    step = push_step(push)
    if not step:
        return _text(text)
    return f'<span class="{"u" if step > 0 else "d"}{abs(step)}">{_text(text)}</span>'


EVAL_HEAD = ("weights", "step", "split", "tasks", "attempts each", "share solved", "95 % interval")
FLIP_HEAD = ("", "task", "before", "after", "episode before", "episode after")
PART_HEAD = ("reward part", "value", "weight", "")


def _evals(report: RunReport) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for row in report.evals:
        span = f"{row.low:.3f} to {row.high:.3f}" if row.low is not None and row.high is not None else "none stored"
        step = "" if row.step is None else row.step
        rows.append((row.name, step, row.split, row.n_tasks, row.n_samples, _number(row.pass_rate), span))
    return rows


def _flips(report: RunReport) -> list[tuple[object, ...]]:
    return [
        (line.flip, line.task_id, f"{line.before[0]}/{line.before[1]}", f"{line.after[0]}/{line.after[1]}",
         line.episode_before, line.episode_after)
        for line in report.flipped
    ]  # fmt: skip


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


def markdown_page(report: RunReport, folder: str) -> str:
    """The report as Markdown; its pictures are `folder`/NAME.svg."""
    lines = [f"# {_cell(report.run.name)}", "", _cell(report.verdict), "", *_rows(("", ""), report.facts), ""]
    lines += ["## Curves", "", *(f"![{name}]({folder}/{name}.svg)" for name, _ in report.pictures), ""]
    lines += ["## Evaluations", "", *(_rows(EVAL_HEAD, _evals(report)) if report.evals else ["none"]), ""]
    lines += ["## Flipped tasks", "", _cell(_compared(report)), ""]
    lines += [*_rows(FLIP_HEAD, _flips(report)), ""] if report.flipped else []
    lines += ["## Episodes", ""]
    for sample in report.samples:
        row = sample.row
        lines += [f"### {sample.why}: {_cell(row.task_id)} #{row.sample}, reward {_number(row.reward)}", ""]
        lines += [*_rows(PART_HEAD, [(n, f"{v:.3f}", f"{w:g}", d) for n, v, w, d in sample.parts]), ""]
        lines += [_cell("; ".join(sample.flags)), ""] if sample.flags else []
        for role, pieces in sample.turns:
            lines += [f"{_cell(role)}:", "", *_fenced("".join(text for text, _ in pieces)), ""]
    lines += ["## Alerts", "", *(f"- {_cell(text)}" for text in report.alerts), ""] if report.alerts else []
    lines += ["## Machine", "", *_rows(("", ""), report.machine), ""] if report.machine else []
    return "\n".join([*lines, "## Settings", "", *_rows(("setting", "value"), report.settings), ""])


def _rows(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *lines] if lines else []


def _cell(value: object) -> str:
    """A text in one line of Markdown: nothing in it is markup or HTML."""
    text = " ".join(_text(value).split())
    return re.sub(r"([\\`*_{}\[\]<>|#!~])", r"\\\1", text.replace("&quot;", '"').replace("&#x27;", "'"))


def _fenced(text: str) -> list[str]:
    """A text as a code block, whose fence is longer than any in the text."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(longest + 1, 3)
    return [f"{fence}text", text, fence]
