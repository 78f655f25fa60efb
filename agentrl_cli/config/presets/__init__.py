"""Settings for a model on a kind of hardware (`agentrl train --preset NAME`): one YAML file each."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.errors import NotFound

FOLDER = Path(__file__).resolve().parent


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def preset_file(name: str) -> Path:
    """Return the file of a preset. Raises NotFound, which names the nearest."""
    if name not in preset_names():
        raise NotFound.of("preset", name, preset_names())
    return FOLDER / f"{name}.yaml"
