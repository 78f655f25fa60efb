"""Writes docs/config.md from the settings themselves: python docs/make_config.py. A test fails where it is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl_cli.config import Config, Sources
from agentrl_cli.config.algo import CHOICES
from agentrl_cli.config.choice import option_names
from agentrl_cli.config.models import fields, groups, options
from agentrl_cli.config.show import FIRST, rows, scalar

TABLE = ["| key | default | |", "| --- | --- | --- |"]
FIRST_TEXT = (
    "The settings that people change first. The tables after it have all of them, by section."
)
CHOICE_TEXT = "`{key}: NAME`, or with options `{key}: {{name: NAME, OPTION: VALUE}}`, or `--set {key}.OPTION=VALUE`."
GROUP_TEXT = "`{key}: VALUE` sets `{main}`; the others with `{key}: {{OPTION: VALUE}}`, or `--set {key}.OPTION=VALUE`."
BARE_TEXT = "`{key}: {{OPTION: VALUE}}`, or `--set {key}.OPTION=VALUE`."
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
    lines += [_row(key, values.get(key), info) for key, info in fields() if key in FIRST]
    section = None
    for key, info in fields():
        head, _, leaf = key.partition(".")
        if (head if leaf else "") != section:
            section = head if leaf else ""
            lines += ["", f"## {section or 'top level'}", "", *TABLE]
        lines.append(_row(key, values.get(key), info))
    for key, kind in groups().items():
        if key not in CHOICES:
            head = GROUP_TEXT if kind.main() else BARE_TEXT
            lines += [
                "",
                f"## Options of {key}",
                "",
                head.format(key=key, main=kind.main()),
                "",
                *TABLE,
            ]
            main = {kind.main(): kind.model_fields[kind.main()]} if kind.main() else {}
            lines += [
                _row(f"{key}.{name}", values.get(f"{key}.{name}", values.get(key)), info)
                for name, info in (main | options(key)).items()
            ]
    return "\n".join([*lines, *_choices()]) + "\n"


def _row(key: str, value: object, info: Any) -> str:
    text = str(info.description).replace("|", "\\|")
    default = "" if key in groups() and not groups()[key].main() else f"`{scalar(value)}`"
    return f"| `{key}` | {default} | {text} |"


def _choices() -> list[str]:
    """The estimators and losses with their options."""
    lines = []
    for key, (table, _) in CHOICES.items():
        lines += [
            "",
            f"## Names of {key}",
            "",
            CHOICE_TEXT.format(key=key),
            "",
            "| name | | options |",
            "| --- | --- | --- |",
        ]
        described: dict[tuple[str, str], list[str]] = {}
        for name, record in table.items():
            infos = record.options.model_fields.values()
            own = dict(
                zip(option_names(record.options), [i for i in infos if i.description], strict=True)
            )
            shown = ", ".join(f"`{option}: {scalar(info.default)}`" for option, info in own.items())
            text = record.text.replace("|", chr(92) + "|")
            lines.append(f"| [`{name}`]({record.source}) | {text} | {shown} |")
            for option, info in own.items():
                described.setdefault((option, str(info.description)), []).append(name)
        lines += ["", "| option | | of |", "| --- | --- | --- |"]
        lines += [
            f"| `{key}.{option}` | {text} | {', '.join(of)} |"
            for (option, text), of in described.items()
        ]
    return lines


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
