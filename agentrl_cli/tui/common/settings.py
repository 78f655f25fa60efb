"""The user's keys and colours: `~/.config/agentrl/screens.yaml` (or the file that AGENTRL_SCREENS names).

    palette: purple-green
    theme: light              # or dark; auto follows the terminal
    keys:
      replay.tag: ctrl+t
      replay.layer.logp: "3,p"

Key ids are SCREEN.ACTION or SCREEN.ACTION.ARGUMENT; the command palette (ctrl+p) shows them. No textual here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_cli.errors import nearest
from agentrl_cli.tui.common.layers import PALETTES

THEMES = ("auto", "dark", "light")
"""auto follows the terminal."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The contents of the file, and what is wrong with it."""

    palette: str = ""
    theme: str = "auto"
    keys: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def settings_path() -> Path:
    """Return the path of the file."""
    named = os.environ.get("AGENTRL_SCREENS")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "agentrl" / "screens.yaml"


def read_settings(path: Path) -> Settings:
    """Reads the settings; an unreadable file is reported as a `problem`."""
    if not path.is_file():
        return Settings()
    import yaml  # imported only if there is such a file

    try:
        found = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return Settings(problem=f"{path} cannot be read: {error}")
    if not isinstance(found, dict):
        return Settings(problem=f"{path} must hold `palette:`, `theme:` and `keys:`")
    palette, keys, problem = str(found.get("palette") or ""), found.get("keys") or {}, ""
    unknown = [str(name) for name in found if name not in ("palette", "theme", "keys")]
    if unknown:
        problem = f"{path}: unknown setting {unknown[0]!r}"
    if palette and palette not in PALETTES:
        near = nearest(palette, PALETTES)
        problem = f"{path}: unknown palette {palette!r}; there are {', '.join(near or PALETTES)}"
        palette = ""
    theme = str(found.get("theme") or "auto")
    if theme not in THEMES:
        problem, theme = f"{path}: unknown theme {theme!r}; known are {', '.join(THEMES)}", "auto"
    if not isinstance(keys, dict):
        return Settings(palette, theme, problem=f"{path}: `keys` must map ids to keys")
    return Settings(
        palette, theme, {str(name): str(value) for name, value in keys.items()}, problem
    )
