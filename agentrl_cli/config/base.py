"""The base class of the settings' sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Unit = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: an unknown key is an error, and assignments are validated."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)
