"""A pack's options for its sandbox sessions, over the configuration: `sandbox:` in its task.yaml.

sandbox: false                              no code runs: neither tools nor rewards need one
sandbox: {imports: [numpy], seed: 0, wall: 10, memory_mb: 4096}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.sandbox.results import Limits


def read_options(value: Any, where: str) -> dict[str, Any]:
    """Arguments of `Sandbox.session`: limits as in the configuration, `imports`, `seed`. Raises ConfigError.

    `imports`: packages besides the standard library, imported before the first execution (a warm runner for each set).
    `seed`: of `random` and `numpy.random` in every session; without it each episode's own.
    """
    from pydantic import ValidationError

    from agentrl_cli.config.models import SandboxConfig

    if value is None or isinstance(value, bool):
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where} must be true, false, or limits, such as {{wall: 10, imports: [numpy]}}."
        )
    known = ["imports", "seed", *(limit.name for limit in fields(Limits))]
    for key in value:
        if key not in known:
            unknown = NotFound.of(f"key in {where}", str(key), known)
            raise ConfigError(unknown.message, hint=unknown.hint)
    imports = value.get("imports", [])
    if not isinstance(imports, list) or not all(isinstance(name, str) for name in imports):
        raise ConfigError(
            f"{where}.imports must be a list of packages, e.g. [numpy], not {imports!r}."
        )
    try:
        settings = SandboxConfig.model_validate(dict(value))
    except ValidationError as error:
        found = error.errors()[0]
        raise ConfigError(f"{where}.{found['loc'][0]}: {found['msg']}.") from None
    options = {key: getattr(settings, key) for key in value}
    return options | (
        {"imports": package_names(settings.imports, where)} if settings.imports else {}
    )


def package_names(names: list[str], where: str) -> tuple[str, ...]:
    """Return the unique top-level package names. Raises ConfigError for anything else."""
    if not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names):
        raise ConfigError(
            f"{where}: imports must be a list of package names, e.g. [numpy], not {names!r}."
        )
    return tuple(dict.fromkeys(names))
