"""Recipes: folders that say how a model is made, each read by its path.

`recipe.yaml` holds the settings. `recipe.py` beside it has `make(run: RecipeRun) -> bool`, which writes a model in
Hugging Face's form into `run.folder` and returns False if it was stopped before. It may import the modules beside it
(`from .rows import row`). Without a recipe.py the settings are those of `demonstrations.Recipe`, whose data is packs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.paths import packs_dir

SETTINGS = "recipe.yaml"


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """One use of a recipe: what `make` gets."""

    settings: Mapping[str, Any]
    """Those of recipe.yaml, and those given on the command line: `steps`, `lr`, `seed`, `tool_rate`."""
    path: Path
    """The file of the settings, for messages."""
    folder: Path
    """Where the model is written."""
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None
    """Called after every step with its number, counted from 1, the number of all steps, and the loss."""
    stopped: Callable[[], bool] = lambda: False
    """Whether to end after this step; what `resume` continues from is saved first."""
    resume: bool = False
    """Whether to continue a run that was stopped in `folder`."""


def find_recipe(name: str) -> Path:
    """Return the settings file of a recipe: a folder, a file, or the name of one in `recipes/` of a checkout.

    Raises NotFound.
    """
    given = Path(name).expanduser()
    checkout = packs_dir().parent / "recipes"  # beside tasks/; a wheel has tasks/ alone
    for path in (given, given / SETTINGS, checkout / name.replace("-", "_") / SETTINGS):
        if path.is_file():
            return path
    raise NotFound(
        f"{name} is not a recipe: a recipe is a folder with a {SETTINGS}.",
        hint="Those of tiny-agent and tiny-tools are not installed with the package: they are the folders"
        " recipes/tiny_agent and recipes/tiny_tools of a checkout.",
    )


def load_settings(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file, some of them replaced. Raises NotFound, ConfigError."""
    settings = load_yaml(path)
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} is not a recipe: it has no settings.")
    return {**settings, **given}


@contextmanager
def stop_on_signal(narrate: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield whether SIGINT or SIGTERM came: the first asks for a stop, a second one does what it did before."""
    stopped = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: object) -> None:
        restore()
        stopped.set()
        narrate("stopping after this step; again to stop now")

    for number in before:
        signal.signal(number, stop)
    try:
        yield stopped.is_set
    finally:
        restore()
