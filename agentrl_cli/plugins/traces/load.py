"""Files of traces into a store: everything that can be read, in one transaction, with a sentence on the rest."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl_cli._version import __version__
from agentrl_cli.errors import DataError
from agentrl_cli.plugins.traces import atif_read
from agentrl_cli.plugins.traces.atif_read import Whole
from agentrl_cli.plugins.traces.trace import KIND, PACK, Note, Trace, episode_of, tokenizer
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Task
from agentrl_cli.types.plain import parse_json

LARGEST = 64 * 2**20
"""Bytes of a JSON text that is read at once: a file, or a line of one."""
Found = Trace | Whole


def values(path: Path, note: Note) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of a file with their places: the whole file, or its lines. Raises DataError."""
    try:
        if path.stat().st_size <= LARGEST:
            try:
                yield path.name, parse_json(path.read_bytes())
                return
            except ValueError as error:
                whole = str(error)
        with path.open("rb") as file:
            yield from _lines(path, file, note, whole if path.suffix == ".json" else "")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def _lines(path: Path, file: Any, note: Note, whole: str) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(LARGEST):
        number += 1
        place = f"{path.name}:{number}"
        if len(line) == LARGEST and not line.endswith(b"\n"):
            note(f"{place} is left out: it is longer than {LARGEST // 2**20} MiB.")
            while line and not line.endswith(b"\n"):
                line = file.readline(LARGEST)
        elif line.strip():
            try:
                yield place, parse_json(line)
            except ValueError as error:
                note(f"{place} is left out: {error}.")
                if whole:  # a damaged document, whose other lines mean nothing
                    return


def traces(path: Path, note: Note) -> Iterator[Found]:
    """Yield everything of a file that is a trace. Raises DataError."""
    for place, value in values(path, note):
        read = {path.resolve()}

        def follow(name: str, read: set[Path] = read) -> list[Any]:
            beside = (path.parent / name).resolve()
            if beside.parent != path.parent.resolve() or not beside.is_file():
                note(f"{name} is left out: it is not a file beside {path.name}.")
            elif beside in read:
                note(f"{name} is left out: it was read before, so trajectories form a circle.")
            else:
                read.add(beside)
                return [one for _, one in values(beside, note) if atif_read.is_atif(one)]
            return []

        try:
            if atif_read.is_atif(value):
                yield atif_read.read(value, place, note, follow)
            else:
                note(f"{place} is left out: it is not a trace of a known form.")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            note(f"{place} is left out: {error}.")


def load(path: Path, store: Store) -> tuple[list[str], list[str]]:
    """Add the traces of a file to a store, all in one transaction; return their ids, and sentences on the rest."""
    problems: list[str] = []
    found = [*traces(path, problems.append)]
    ids: list[str] = []
    with store.transaction():
        run = None
        for one in found:
            whole = (episode_of(one), None, tokenizer().hash) if isinstance(one, Trace) else one
            episode, signals, digest = whole
            if episode.id in ids or store.select_one(
                "SELECT 1 FROM episodes WHERE id=?", (episode.id,)
            ):
                problems.append(f"Episode {episode.id} is there already: it is kept as it is.")
            else:
                run = run or _begin(store, path, episode.weights_version, digest)
                prompt = tuple(episode.turns[0].messages) if episode.turns else ()
                if store.tasks.get(episode.task_id, episode.pack) is None:
                    store.tasks.add(
                        [Task(episode.task_id, episode.pack, episode.family, "", prompt)]
                    )
                store.episodes.add([episode.with_(run_id=run)], tokenizer=digest)
                if signals is not None:
                    store.signals.add(episode.id, signals)
            ids.append(episode.id)
    return [*dict.fromkeys(ids)], problems


def _begin(store: Store, path: Path, model: str, digest: str) -> str:
    """Return the id of a run for the episodes of a file."""
    used = tokenizer()
    if digest == used.hash:
        store.tokenizers.add(used.hash, used.json, used.chat_template or "", used.specials)
    name = re.sub(r"[^\w.-]+", "-", path.stem) or KIND
    row = RunRow(
        "",
        name,
        kind=KIND,
        status="finished",
        model=model,
        pack=PACK,
        tokenizer=digest,
        version=__version__,
        ended=time.time(),
    )
    return store.runs.add(row).id
