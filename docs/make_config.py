"""Writes docs/config.md from the settings themselves: python docs/make_config.py. A test fails where it is stale."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.config import Config, Sources
from agentrl_cli.config.models import fields
from agentrl_cli.config.show import rows, scalar

TARGET = Path(__file__).with_name("config.md")

HEAD = """\
# Configuration

<!-- Written by docs/make_config.py from the settings' own descriptions; edit those. -->

`agentrl.yaml` holds what differs from the defaults. Later layers win: defaults, the pack's `defaults`, files in order
(`agentrl.yaml`, then each `--config`), `AGENTRL_SECTION__KEY`, `--set section.key=value`, flags. An unknown key is an
error that names the nearest one. Relative paths are relative to the project folder. `agentrl config show` says where
each value came from, `agentrl config schema` prints the JSON Schema for editors.
"""


def render() -> str:
    """The whole page."""
    values = {key: value for key, value, _ in rows(Config(), Sources())}
    lines = [HEAD.rstrip()]
    section = None
    for key, info in fields():
        head, _, leaf = key.partition(".")
        if (head if leaf else "") != section:
            section = head if leaf else ""
            lines += ["", f"## {section or 'top level'}", "", "| key | default | |", "| --- | --- | --- |"]
        text = str(info.description).replace("|", "\\|")
        lines.append(f"| `{key}` | `{scalar(values[key])}` | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
