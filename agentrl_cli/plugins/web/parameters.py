"""Where an operation's arguments go in a request, and how lists and mappings are written there.

OpenAPI 3.1, Parameter Object, `style` and `explode`: https://spec.openapis.org/oas/v3.1.0#style-values
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STYLES = {
    "path": ("simple",),
    "header": ("simple",),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
}
"""The styles of a place, its default first."""
JOINTS = {"spaceDelimited": " ", "pipeDelimited": "|"}


class NotOffered(Exception):
    """Why an operation cannot be a tool, as the end of a sentence about it."""


@dataclass(frozen=True)
class Place:
    """Where an argument goes, and in which form."""

    where: str
    """path, query, header, body (a field of it) or whole (the body itself)."""
    name: str
    """Its name there."""
    style: str = ""
    explode: bool = False

    def write(self, value: Any) -> list[tuple[str, str]]:
        """Return a value as (name, text) of this place: several for what the style writes as several."""
        several = self.explode and self.where == "query"
        if self.style == "json":
            return [(self.name, json.dumps(value, ensure_ascii=False))]
        if isinstance(value, Mapping):
            pairs = [(str(key), write_text(item)) for key, item in value.items()]
            if self.style == "deepObject":
                return [(f"{self.name}[{key}]", text) for key, text in pairs]
            if several:
                return pairs
            parts = (
                [*map("=".join, pairs)] if self.explode else [text for two in pairs for text in two]
            )
        else:
            parts = [write_text(item) for item in (value if isinstance(value, list) else [value])]
            if several:
                return [(self.name, text) for text in parts]
        return [(self.name, JOINTS.get(self.style, ",").join(parts))] * bool(parts)


def read_place(parameter: Mapping[str, Any]) -> Place:
    """Return the place of a parameter. Raises NotOffered for a place or style that is not written."""
    where, name = str(parameter["in"]), str(parameter["name"])
    if where not in STYLES:
        raise NotOffered(f"needs {name} in a {where}")
    style = str(parameter.get("style") or STYLES[where][0])
    if style not in STYLES[where]:
        raise NotOffered(f"has a parameter {name} of the style {style}")
    if parameter.get("content"):
        style = "json"
    return Place(where, name, style, bool(parameter.get("explode", style == "form")))


def write_text(value: Any) -> str:
    """Return an argument in an address: a text as it is, others as JSON, numbers without a needless fraction."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
