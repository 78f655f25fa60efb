"""Completions of the shell: runs, episodes, checkpoints and settings, from the project in the working folder.

Completion never fails aloud: without a readable store there is nothing to complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentrl_cli.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl_cli.store import Store

MOST = 50
"""Episodes that are offered: the newest."""


def runs(incomplete: str) -> list[str]:
    """Names of runs."""
    with _store() as store:
        return (
            [run.name for run in store.runs.all() if run.name.startswith(incomplete)]
            if store
            else []
        )


def packs(incomplete: str) -> list[str]:
    """Names of the packs that ship."""
    from agentrl_cli.paths import pack_names

    return [name for name in pack_names() if name.startswith(incomplete)]


def filters(incomplete: str) -> list[str]:
    """Return the filter so far, and each field that may begin its last term."""
    from agentrl_cli.store.filters import fields

    before, space, last = incomplete.rpartition(" ")
    sign = "-" * last.startswith("-")
    terms = (f"{sign}{name}:" for name in fields())
    return [f"{before}{space}{term}" for term in terms if term.startswith(last)]


def episodes_and_runs(incomplete: str) -> list[str]:
    """Ids of the newest episodes, and names of runs."""
    return [name for name, _ in episodes(incomplete)] + runs(incomplete)


def episodes(incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest episodes, with task and outcome, and the words for some of them."""
    words = [
        (word, "an episode") for word in ("last", "best", "worst") if word.startswith(incomplete)
    ]
    with _store() as store:
        if store is None:
            return words
        rows = store.episodes.rows(store.episodes.ids("", "-time")[:MOST])
        return words + [
            (row.id, f"{row.task_id} {row.outcome}")
            for row in rows
            if row.id.startswith(incomplete)
        ]


def checkpoints(incomplete: str) -> list[str]:
    """Names of checkpoints: best, last and base, and those of each training run."""
    found = ["best", "last", "base"]
    with _store() as store:
        for run in store.runs.all() if store else ():
            if run.kind == "train":
                found += [f"{run.name}@best", f"{run.name}@last"]
    return [name for name in found if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Names of models: the bundled ones, and checkpoints."""
    from agentrl_cli.paths import models_dir

    bundled = [path.parent.name for path in models_dir().glob("*/config.json")]
    return [
        name
        for name in ("tiny", *bundled, *(c for c in checkpoints("") if "@" in c))
        if name.startswith(incomplete)
    ]


def presets(incomplete: str) -> list[str]:
    """Names of presets."""
    from agentrl_cli.config.presets import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def settings(incomplete: str) -> list[tuple[str, str]]:
    """Keys of settings with `=`, and their descriptions."""
    from agentrl_cli.config.models import fields

    return [
        (f"{key}=", field.description or "")
        for key, field in fields()
        if key.startswith(incomplete)
    ]


@contextmanager
def _store() -> Iterator[Store | None]:
    from agentrl_cli.commands.place import find_db
    from agentrl_cli.store import Store

    try:
        store = Store.open(find_db(), readonly=True)
    except AgentRLError:
        yield None
        return
    with store:
        yield store
