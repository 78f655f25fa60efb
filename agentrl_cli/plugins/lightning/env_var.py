"""Environment variables of Agent-Lightning."""

from __future__ import annotations

import os
from enum import Enum

TRUE, FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


LightningEnvVar = Enum(
    "LightningEnvVar",
    {
        "AGL_EMITTER_DEBUG": "AGL_EMITTER_DEBUG",
        "AGL_MANAGED_STORE": "AGL_MANAGED_STORE",
        "AGL_CURRENT_ROLE": "AGL_CURRENT_ROLE",
        "AGL_SERVER_HOST": "AGL_SERVER_HOST",
        "AGL_SERVER_PORT": "AGL_SERVER_PORT",
    },
)
"""The variables that are read. `AGL_EMITTER_DEBUG` logs every span at level DEBUG."""


def resolve_str_env_var(
    env_var: LightningEnvVar, override: str | None = None, fallback: str | None = None
) -> str | None:
    """Return `override`, else the variable, else `fallback`."""
    return override if override is not None else os.environ.get(env_var.value, fallback)


def resolve_int_env_var(
    env_var: LightningEnvVar, override: int | None = None, fallback: int | None = None
) -> int | None:
    """Return it as a number. Raises ValueError."""
    text = os.environ.get(env_var.value)
    if override is not None or text is None:
        return override if override is not None else fallback
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{env_var.value} must be an integer") from error


def resolve_bool_env_var(
    env_var: LightningEnvVar, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """Return it as yes or no. Raises ValueError."""
    text = os.environ.get(env_var.value)
    if override is not None or text is None:
        return override if override is not None else fallback
    if text.strip().lower() in TRUE | FALSE:
        return text.strip().lower() in TRUE
    raise ValueError(f"{env_var.value} must be one of {sorted(TRUE)} or {sorted(FALSE)}")
