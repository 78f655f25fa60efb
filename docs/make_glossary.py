"""Writes docs/glossary.md from the legend: python docs/make_glossary.py. A test fails where it is stale."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.reports.legend import LEGEND

TARGET = Path(__file__).with_name("glossary.md")
HEAD = """\
# Words

<!-- Written by docs/make_glossary.py from agentrl_cli/reports/legend.py; edit that. -->

The words of the screens, the store and the commands: `agentrl show --words WORD` explains one, `W` in a screen (`F6` in
the chat) shows those of all. A filter takes the class of a fact, `agentrl ls -f fact:skipped:no_signal`; after a
colon stands its reason. An episode without a fact was not part of a training step.
"""


def render() -> str:
    """The page."""
    lines = [HEAD.rstrip()]
    for title, section in LEGEND.items():
        lines += ["", f"## {title}", "", "| word | means |", "| --- | --- |"]
        lines += [f"| {name} | {text} |" for name, text in section.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
