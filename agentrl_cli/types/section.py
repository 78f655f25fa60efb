"""The base classes of the settings: sections, and groups of settings under one key of a section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1, lt=2**63)]
Repeats = Annotated[int, Field(ge=1, le=2**16)]
"""Attempts at a task, or tasks of a step: each is an object in memory before the first begins."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Unit = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, BeforeValidator(lambda value: None if value is None else str(value))]
"""A text, or anything else as one: variables and arguments of programs may be numbers in a YAML file."""


def _on_or_off(value: Any) -> Any:
    return ("off", "on")[value] if isinstance(value, bool) else value


OnOff = BeforeValidator(_on_or_off)
"""For words among which are `on` and `off`: YAML reads these two as booleans."""


def refuse(*rules: tuple[object, str]) -> None:
    """Raise ValueError with the text of the first rule that is broken: (whether it is, the text)."""
    if text := next((text for broken, text in rules if broken), ""):
        raise ValueError(text)


class Section(BaseModel):
    """Base of every section: an unknown key is an error, and assignments are validated."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False
    )
    fixed: ClassVar[bool] = False
    """Whether a resume must keep a plugin's section as the run has it."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values, which are not validated; a mapping changes settings of a section."""
        return self.model_copy(
            update={
                name: inner.replace(**value)
                if isinstance(inner := getattr(self, name), Section) and isinstance(value, Mapping)
                else value
                for name, value in changes.items()
            }
        )


class Group(Section):
    """Base of settings that belong together under one key: `kl: {coef: 0.01, target: 0.1}`."""

    bare: ClassVar[bool] = False
    """Whether a plain value sets nothing; else it sets the first setting: `kl: 0.01`."""

    @classmethod
    def main(cls) -> str:
        """Return the setting that a plain value sets; empty if none."""
        return "" if cls.bare else next(iter(cls.model_fields), "")

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, given: Any) -> Any:
        plain = cls.main() and not isinstance(given, (Mapping, Group))
        return {cls.main(): given} if plain else given
