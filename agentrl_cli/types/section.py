"""The base class of the settings' sections."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Unit = Annotated[float, Field(ge=0, le=1)]


def _on_or_off(value: Any) -> Any:
    return ("off", "on")[value] if isinstance(value, bool) else value


OnOff = BeforeValidator(_on_or_off)
"""For words among which are `on` and `off`: YAML reads these two as booleans."""


class Section(BaseModel):
    """Base of every section: an unknown key is an error, and assignments are validated."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False
    )
    fixed: ClassVar[bool] = False
    """Whether a resume must keep a plugin's section as the run has it."""
