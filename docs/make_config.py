"""Writes docs/config.md from the settings themselves: python docs/make_config.py. A test fails where it is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl_cli.config import Config, Sources
from agentrl_cli.config.models import fields
from agentrl_cli.config.show import CHOSEN, FIRST, option_rows, rows, scalar

TABLE = ["| key | default | |", "| --- | --- | --- |"]
FIRST_TEXT = (
    "The settings that people change first. The tables after it have all of them, by section."
)
CHOICE_TEXT = "`{key}: NAME`, or with options `{key}: {{name: NAME, OPTION: VALUE}}`, or `--set {key}.OPTION=VALUE`."
TARGET = Path(__file__).with_name("config.md")

HEAD = """\
# Configuration

<!-- Written by docs/make_config.py from the settings' own descriptions; edit those. -->

`agentrl.yaml` holds what differs from the defaults. Later layers win: defaults, the pack's `defaults`, files in order
(`agentrl.yaml`, then each `--config`), `AGENTRL_SECTION__KEY`, `--set section.key=value`, flags. An unknown key is an
error that names the nearest one. Relative paths are relative to the project folder. `agentrl config show` prints where
each value came from, `agentrl config schema` prints the JSON Schema for editors.
"""


def render() -> str:
    """The whole page."""
    values = {key: value for key, value, _ in rows(Config(), Sources())}
    lines = [HEAD.rstrip(), "", "## First", "", FIRST_TEXT, "", *TABLE]
    lines += [_row(key, values[key], info) for key, info in fields() if key in FIRST]
    section = None
    for key, info in fields():
        head, _, leaf = key.partition(".")
        if (head if leaf else "") != section:
            section = head if leaf else ""
            lines += ["", f"## {section or 'top level'}", "", *TABLE]
        lines.append(_row(key, values[key], info))
    return "\n".join([*lines, *_choices()]) + "\n"


def _row(key: str, value: object, info: Any) -> str:
    text = str(info.description).replace("|", "\\|")
    return f"| `{key}` | `{scalar(value)}` | {text} |"


def _choices() -> list[str]:
    """The estimators and losses with their options."""
    lines = []
    for key, table in CHOSEN.items():
        lines += [
            "",
            f"## Names of {key}",
            "",
            CHOICE_TEXT.format(key=key),
            "",
            "| name | | options |",
            "| --- | --- | --- |",
        ]
        for name, record in table.items():
            own = {
                option: info
                for choice, of, option, info in option_rows()
                if (choice, of) == (key, name)
            }
            options = ", ".join(
                f"`{option}: {scalar(info.default)}`" for option, info in own.items()
            )
            lines.append(
                f"| [`{name}`]({record.source}) | {record.text.replace('|', chr(92) + '|')} | {options} |"
            )
        described = {
            f"{option}\0{info.description}": (option, info)
            for _, of, option, info in option_rows()
            if of in table
        }
        lines += ["", "| option | | of |", "| --- | --- | --- |"]
        for option, info in described.values():
            of = [
                n
                for c, n, o, i in option_rows()
                if (c, o, i.description) == (key, option, info.description)
            ]
            lines.append(f"| `{key}.{option}` | {info.description} | {', '.join(of)} |")
    return lines


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
