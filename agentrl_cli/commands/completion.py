"""Completions of the shell: runs, episodes, checkpoints and settings, from the project in the working folder.

Typer leaves out what does not begin as the word that is typed. Completion never fails aloud: without a readable store
there is nothing to complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import AgentRLError
from agentrl_cli.paths import models_dir

if TYPE_CHECKING:
    from agentrl_cli.store import Store

MOST = 50
"""Episodes that are offered: the newest."""


def runs() -> list[str]:
    """Names of runs."""
    return [run.name for run in _read(lambda store: store.runs.all())]


def filters(incomplete: str) -> list[str]:
    """Return the filter so far, with each field that may begin its last term."""
    from agentrl_cli.store.filters import fields

    before, space, last = incomplete.rpartition(" ")
    return [f"{before}{space}{'-' * last.startswith('-')}{name}:" for name in fields()]


def episodes_and_runs() -> list[str]:
    """Ids of the newest episodes, and names of runs."""
    return [name for name, _ in episodes()] + runs()


def episodes() -> list[tuple[str, str]]:
    """Ids of the newest episodes, with task and outcome, and the words for some of them."""
    words = [(word, "an episode") for word in ("last", "best", "worst")]
    rows = _read(lambda store: store.episodes.rows(store.episodes.ids("", "-time", limit=MOST)))
    return words + [(row.id, f"{row.task_id} {row.outcome}") for row in rows]


def checkpoints() -> list[str]:
    """Names of checkpoints: best, last and base, and those of each training run."""
    trained = [run for run in _read(lambda store: store.runs.all()) if run.kind == "train"]
    named = [f"{run.name}@{which}" for run in trained for which in ("best", "last")]
    return ["best", "last", "base", *named]


def models() -> list[str]:
    """Names of models: the bundled ones, and checkpoints."""
    bundled = [path.parent.name for path in models_dir().glob("*/config.json")]
    return ["tiny", *bundled, *(name for name in checkpoints() if "@" in name)]


def presets() -> list[str]:
    """Names of presets."""
    from agentrl_cli.config.presets import preset_names

    return preset_names()


def settings() -> list[tuple[str, str]]:
    """Keys of settings with `=`, and their descriptions."""
    from agentrl_cli.config.models import fields

    return [(f"{key}=", field.description or "") for key, field in fields()]


def _read(read: Callable[[Store], list[Any]]) -> list[Any]:
    """Return the rows that `read` takes from the project's store; none if it cannot be read."""
    from agentrl_cli.commands.place import find_db
    from agentrl_cli.store import Store

    try:
        with Store.open(find_db(), readonly=True) as store:
            return read(store)
    except AgentRLError:
        return []
