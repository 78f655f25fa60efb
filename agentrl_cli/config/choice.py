"""A setting that is a name with options: `algo.loss: clip_cov`, or `algo.loss: {name: clip_cov, fraction: 0.01}`.

Each named choice has its own options, a pydantic model. Old keys, from when the options of all losses and estimators
were directly under `algo`, are accepted: OLD maps them to their new names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl_cli.types.section import Section

OLD: Mapping[str, tuple[str, str]] = {
    "gamma": ("advantage", "gamma"),
    "lam": ("advantage", "lambda"),
    "pass_k": ("advantage", "k"),
    "turn_coef": ("advantage", "turn_coef"),
    "advantage_eps": ("advantage", "eps"),
    "clip_low": ("loss", "clip_low"),
    "clip_high": ("loss", "clip_high"),
    "clip_dual": ("loss", "clip_dual"),
    "sapo_positive": ("loss", "positive"),
    "sapo_negative": ("loss", "negative"),
    "cov_fraction": ("loss", "fraction"),
    "cov_low": ("loss", "low"),
    "cov_high": ("loss", "high"),
    "cov_kl_coef": ("loss", "kl_coef"),
}
"""Old key of `algo` → (its choice, the option's name there)."""


class Options(Section):
    """A chosen name and its options; a subclass declares the options."""

    model_config = Section.model_config | {
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
    given = (
        {"name": value}
        if isinstance(value, str)
        else dict(value)
        if isinstance(value, Mapping)
        else None
    )
    if given is None or not isinstance(given.setdefault("name", default), str):
        raise ValueError("expected a name, or a mapping with a name and options")
    kind = table[given["name"]].options if given["name"] in table else custom
    return kind.model_validate(given)


def renamed(algo: Any, tables: Mapping[str, tuple[Mapping[str, Algorithm], str]]) -> Any:
    """Return the settings of `algo` with old keys moved under their choice; options that the choice lacks are dropped.

    `tables`: for each choice its records and the default name. A value of None was the default of an old key.
    """
    if not isinstance(algo, Mapping) or not OLD.keys() & algo.keys():
        return algo
    out = {key: value for key, value in algo.items() if key not in OLD}
    for key in OLD.keys() & algo.keys():
        choice, option = OLD[key]
        table, default = tables[choice]
        chosen = out.get(choice, default)
        if isinstance(chosen, Options):
            chosen = chosen.model_dump()
        settings = dict(chosen) if isinstance(chosen, Mapping) else {"name": chosen}
        known = table.get(str(settings.get("name", default)))
        if algo[key] is not None and (known is None or option in option_names(known.options)):
            out[choice] = {option: algo[key], **settings}
    return out


def name_of(chosen: Any) -> str:
    """Return the name of a choice in stored settings: from a mapping, or in older runs the plain name."""
    return str(chosen.get("name", "")) if isinstance(chosen, Mapping) else str(chosen or "")
