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

from jinja2 import Environment
from markupsafe import Markup

from agentrl_cli.errors import writing
from agentrl_cli.reports.export import write_lines
from agentrl_cli.reports.html import POLICY, PUSH_STEPS, push_step
from agentrl_cli.reports.report import RunReport
from agentrl_cli.reports.svg import OPTIONS


def write_report(report: RunReport, path: Path, *, markdown: bool) -> None:
    """Write a report; the pictures of Markdown go into a folder beside it: its name without `.md`.

    The folder is NAME-pictures for a file without a suffix. Raises StoreError.
    """
    if not markdown:
        looks = {"policy": POLICY, "push_steps": PUSH_STEPS, "push_step": push_step}
        page = _render("report.html.jinja", report, _text, **looks)
        write_lines([page.removesuffix("\n")], path)
        return
    folder = path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-pictures")
    with writing(str(folder), hint="Choose another place."):
        folder.mkdir(parents=True, exist_ok=True)
    for name, svg in report.pictures:
        write_lines([svg], folder / f"{name}.svg")
    page = _render("report.md.jinja", report, _cell, folder=folder.name)
    write_lines([page.removesuffix("\n")], path)


def _render(name: str, report: RunReport, escape: Callable[[object], str], **more: Any) -> str:
    def escape_value(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape(value))

    environment = Environment(finalize=escape_value, **OPTIONS)
    environment.filters |= {"number": _number, "fenced": _fence}
    return environment.get_template(name).render(report=report, **more)


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


def _fence(pieces: Sequence[tuple[str, float]]) -> Markup:
    """Return a turn as a code block, whose fence is longer than any in the text."""
    text = "".join(text for text, _ in pieces)
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(longest + 1, 3)
    return Markup(f"{fence}text\n{text}\n{fence}")


def _number(value: float | None) -> str:
    return "none" if value is None or not math.isfinite(value) else f"{value:.3f}"
