"""Keys of the screens, and their ids in the user's file.

The file is `~/.config/agentrl/screens.yaml`, or the one that AGENTRL_SCREENS names:

    palette: purple-green
    theme: light              # or dark; auto follows the terminal
    keys:
      replay.tag: ctrl+t
      replay.layer.logp: "3,p"

Key ids are SCREEN.ACTION or SCREEN.ACTION.ARGUMENT; the command palette (ctrl+p) shows them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from textual.binding import Binding, BindingType
from textual.screen import Screen


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
    if isinstance(found, dict):
        found = {str(name): value for name, value in found.items()}
    try:
        return Settings.model_validate(found), ""
    except ValidationError as error:
        wrong = [(str(one["loc"][0]) if one["loc"] else "", one["msg"]) for one in error.errors()]
    name, problem = wrong[0]
    good = {key: found[key] for key in found if key not in dict(wrong)} if name else {}
    shown = f" {name} {found[name]!r}" if name else ""
    return Settings.model_validate(good), f"{path}:{shown}: {problem}"


CLOSING = (
    Binding("question_mark", "help", "keys"),
    Binding("W", "words", "words"),
    Binding("q", "back", "back"),
    Binding("escape", "leave", "back, never out", show=False),
)
"""The last keys of a screen."""
FINDING = (
    Binding("slash", "find_text", "find"),
    Binding("full_stop", "find_again", "find again", show=False),
)
"""The keys that find text on a page."""


def moving(action: str, *, page: int = 0, end: int = 0) -> list[BindingType]:
    """Return keys that call `action` with the lines to move by; none for a page or an end if that is 0."""
    keys = (
        *(("j,down", 1, "down"), ("k,up", -1, "up")),
        *(("pagedown", page, "a page down"), ("pageup", -page, "a page up")),
        *(("g,home", -end, "first"), ("G,end", end, "last")),
    )
    return [
        Binding(key, f"{action}({step})", words, show=False) for key, step, words in keys if step
    ]


def with_ids(screen: str, bindings: Iterable[BindingType]) -> list[BindingType]:
    """Return the bindings with ids as a keymap file uses them: `replay.tag`, `replay.turn.-1`, `replay.layer.logp`."""
    out: list[BindingType] = []
    for binding in bindings:
        assert isinstance(binding, Binding)
        action, _, rest = binding.action.removeprefix("focused.").partition("(")
        parts = (screen, action, rest.rstrip(")").strip("'"))
        out.append(replace(binding, id=".".join(filter(None, parts))))
    return out


def keys_of(screen: Screen[object]) -> list[Binding]:
    """Return the keys of a screen, those of the user's keymap in place of its own."""
    own = read_settings(settings_path())[0].keys
    keys = (key for key in type(screen).BINDINGS if isinstance(key, Binding))
    return [replace(key, key=own.get(key.id or "", key.key)) for key in keys]
