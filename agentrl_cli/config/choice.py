"""A setting that is a name with options: `algo.loss: clip_cov`, or `algo.loss: {name: clip_cov, fraction: 0.01}`.

Each named choice has its own options, a pydantic model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl_cli.types.section import Group


class Options(Group):
    """A chosen name and its options; a subclass declares the options."""

    model_config = Group.model_config | {
        "frozen": True,
        "validate_by_name": True,
        "serialize_by_alias": True,
    }

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The common fields of estimators and losses. Every field is required: a missing one is a type error."""

    function: str | Callable[..., Any]
    """`module:object`, so that reading the settings does not import torch; or the function itself."""
    options: type[Options]
    aggregation: str
    """The aggregation of its paper; "": that of the other choice, else token_mean."""
    text: str
    """One line for the docs: the formula."""
    source: str
    """URL of the paper."""


def option_names(options: type[Options]) -> list[str]:
    """Return the names of the options as written in a file."""
    return [info.alias or name for name, info in options.model_fields.items() if name != "name"]


def choose(
    table: Mapping[str, Algorithm], default: str, custom: type[Options], value: Any
) -> Options:
    """Return the options of a choice, from a name or a mapping with a name. `custom`: the options of a user's own
    function.
    """
    if isinstance(value, Options):
        value = value.model_dump()
    given = dict(value) if isinstance(value, Mapping) else {"name": value}
    if not isinstance(given.setdefault("name", default), str):
        raise ValueError("expected a name, or a mapping with a name and options")
    kind = table[given["name"]].options if given["name"] in table else custom
    return kind.model_validate(given)


def name_of(chosen: Any) -> str:
    """Return the name of a choice in stored settings: from a mapping, or in older runs the plain name."""
    return str(chosen.get("name", "")) if isinstance(chosen, Mapping) else str(chosen or "")
