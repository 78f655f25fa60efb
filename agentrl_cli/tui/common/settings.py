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
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError


class Settings(BaseModel, extra="forbid", frozen=True, coerce_numbers_to_str=True):
    """The contents of the file."""

    palette: Literal["blue-orange", "bright", "purple-green", "grey"] = "blue-orange"
    theme: Literal["auto", "dark", "light"] = "auto"
    keys: Mapping[str, str] = {}


def settings_path() -> Path:
    """Return the path of the file."""
    named, base = os.environ.get("AGENTRL_SCREENS"), os.environ.get("XDG_CONFIG_HOME")
    if named:
        return Path(named).expanduser()
    return (Path(base) if base else Path.home() / ".config") / "agentrl" / "screens.yaml"


def read_settings(path: Path) -> tuple[Settings, str]:
    """Read the settings; an entry with an error is left out, and the error returned beside them, as a message."""
    if not path.is_file():
        return Settings(), ""
    import yaml  # imported only if there is such a file

    try:
        found = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return Settings(), f"{path} cannot be read: {error}"
    try:
        return Settings.model_validate(found), ""
    except ValidationError as error:
        wrong = [(str(one["loc"][0]) if one["loc"] else "", one["msg"]) for one in error.errors()]
    good = found if isinstance(found, dict) else {}
    good = {name: value for name, value in good.items() if name not in dict(wrong)}
    name, problem = wrong[0]
    shown = f" {name} {good.get(name, found[name])!r}" if name else ""
    return Settings.model_validate(good), f"{path}:{shown}: {problem}"


def own_keys() -> Mapping[str, str]:
    """Return the user's keymap."""
    return read_settings(settings_path())[0].keys
