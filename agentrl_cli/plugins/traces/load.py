"""Files of traces into a store: everything that can be read, in one transaction, with a sentence on the rest."""

from __future__ import annotations

import json
import os
import re
import time
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from agentrl_cli._version import __version__
from agentrl_cli.errors import DataError
from agentrl_cli.plugins.traces import atif_read
from agentrl_cli.plugins.traces.atif_read import Whole
from agentrl_cli.plugins.traces.messages import KNOWN, ROLES, messages_in, session_of, trace_of
from agentrl_cli.plugins.traces.spans import Span, read_span, spans_in, tools_in, traces_of
from agentrl_cli.plugins.traces.trace import (
    ERRORS,
    KIND,
    PACK,
    Note,
    Said,
    Trace,
    episode_of,
    say,
    tokenizer,
)
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Task
from agentrl_cli.types.plain import DEPTH, SURROGATE, is_text, parse_json

LARGEST = 64 * 2**20
"""Bytes of a JSON text that is read at once: a file, or a line of one."""
MOST_FILES = 100
"""Files of sub-agents and continuations that are read for one trajectory."""
Found = Trace | Whole


def values(path: Path, note: Note) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of a file with their places: the whole file, or its lines. Raises DataError."""
    try:
        if path.stat().st_size <= LARGEST:
            data = path.read_bytes().removeprefix(BOM_UTF8)
            with suppress(ValueError):
                yield path.name, _parse(path.name, data, note)
                return
            if len(parts := re.split(rb"(?<=\n\})\s*\n(?=\{\s*\n)", data)) > 1:
                for number, part in enumerate(parts, 1):  # documents on several lines each
                    yield from _read(f"{path.name}, document {number}", part, note)
                return
        with path.open("rb") as file:
            yield from _lines(path, file, note)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def _lines(path: Path, file: Any, note: Note) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(LARGEST):
        number += 1
        place = f"{path.name}:{number}"
        if len(line) == LARGEST and not line.endswith(b"\n"):
            note(f"{place} is left out: it is longer than {LARGEST // 2**20} MiB.")
            while line and not line.endswith(b"\n"):
                line = file.readline(LARGEST)
        elif line.strip():
            found = [*_read(place, line.removeprefix(BOM_UTF8), note)]
            yield from found
            if not found and path.suffix == ".json":
                return  # a damaged document, whose other lines mean nothing


def _read(place: str, data: bytes, note: Note) -> Iterator[tuple[str, Any]]:
    try:
        yield place, _parse(place, data, note)
    except ValueError as error:
        note(f"{place} is left out: {error}.")


def _parse(place: str, data: bytes, note: Note) -> Any:
    """Return a JSON value; a lone surrogate in it is U+FFFD, and noted. Raises ValueError."""
    try:
        return parse_json(data)
    except ValueError as error:
        if SURROGATE not in str(error):
            raise
        return _replace(place, json.loads(data), note, 0)


def _replace(place: str, value: Any, note: Note, depth: int) -> Any:
    if depth > DEPTH:
        raise ValueError(f"it is nested more than {DEPTH} levels deep")
    if isinstance(value, list):
        return [_replace(f"{place}[{n}]", one, note, depth + 1) for n, one in enumerate(value)]
    if isinstance(value, dict):
        return {
            _replace(place, name, note, depth): _replace(
                f"{place}.{ascii(name)[1:-1]:.40}", one, note, depth + 1
            )
            for name, one in value.items()
        }
    if not isinstance(value, str) or is_text(value):
        return value
    note(f"{place} has a {SURROGATE}, which is not a character: it is read as U+FFFD.")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def traces(path: Path, note: Note) -> Iterator[Found]:
    """Yield everything of a file that is a trace. Raises DataError."""
    spans: dict[str, list[Span]] = {}
    sessions: dict[str, list[Any]] = {}
    session = ""
    for place, value in _each(values(path, note)):
        try:
            if atif_read.is_atif(value):
                yield atif_read.read(value, place, note, _follow(path, note))
            elif records := [*spans_in(value)] if isinstance(value, dict) else []:
                for number, record in enumerate(records):
                    _add(spans, record, f"{place}, span {number}", note)
            elif isinstance(value, dict) and (name := session_of(value, session)) is not None:
                session = name
                if session:
                    sessions.setdefault(session, []).append(value)
            elif isinstance(value, dict) and isinstance(value.get("messages"), list):
                yield _row(value, place, note)
            else:
                note(f"{place} is left out: {_refuse(value)}.")
        except ERRORS as error:
            note(f"{place} is left out: {say(error)}.")
    yield from traces_of(spans, note)
    for name, lines in sessions.items():
        try:
            yield trace_of(name, lines)
        except ERRORS as error:
            note(f"Session {name} is left out: {say(error)}.")


def _each(found: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield values, the items of a list, or of the answer of an API, one by one."""
    for place, value in found:
        if isinstance(value, dict) and {"messages", "steps"}.isdisjoint(value):
            value = value["data"] if isinstance(value.get("data"), list) else value
        if isinstance(value, list):
            yield from ((f"{place}[{number}]", item) for number, item in enumerate(value))
        else:
            yield place, value


def _add(spans: dict[str, list[Span]], record: Any, place: str, note: Note) -> None:
    try:
        span = read_span(record)
    except ERRORS as error:
        return note(f"{place} is left out: {say(error)}.")
    return spans.setdefault(span.trace, []).append(span)


def _refuse(value: Any) -> str:
    """Return why a value is not a trace."""
    if isinstance(value, dict) and (version := value.get("schema_version")):
        return f"its schema_version is {str(version)[:40]!r}, and ATIF-v1 is read"
    if isinstance(value, dict) and isinstance(value.get("steps"), list):
        return "it has steps, but no schema_version, such as 'ATIF-v1.7'"
    return "it is not a trace of a known form"


def _row(value: dict[str, Any], place: str, note: Note) -> Trace:
    """Return a row {"messages", "tools", "reward" or "score"} as a trace."""
    found = Trace(value, [[Said(one) for one in messages_in(value["messages"])]])
    if not found.paths[0]:
        raise ValueError("it has no message")
    found.reward = atif_read.reward_in(place, note, value)
    found.tools = tools_in(value.get("tools"))
    for one in value["messages"]:
        role = one.get("role") if isinstance(one, dict) else None
        if role is not None and role not in (*KNOWN, *ROLES):
            note(f"{place}: the role {str(role)[:40]!r} is not known, and taken as user.")
    return found


def _follow(path: Path, note: Note) -> atif_read.Follow:
    """Return a function that reads the trajectories of a file beside, each file once."""
    read = {path.resolve()}

    def follow(name: str) -> list[Any]:
        given = path.parent / name
        beside = given.resolve() if os.path.isfile(given) else None
        if beside is None or beside.parent != path.parent.resolve():
            note(f"{name[:80]} is left out: it is not a file beside {path.name}.")
        elif beside in read:
            note(f"{name} is left out: it was read before, so trajectories form a circle.")
        elif len(read) > MOST_FILES:
            note(f"{name} is left out: {path.name} leads to more than {MOST_FILES} files.")
        else:
            read.add(beside)
            return [one for _, one in values(beside, note) if atif_read.is_atif(one)]
        return []

    return follow


def load(path: Path, store: Store) -> tuple[list[str], list[str]]:
    """Add the traces of a file to a store, all in one transaction; return their ids, and sentences on the rest."""
    problems: list[str] = []
    found = [*traces(path, problems.append)]
    return add(found, store, path, problems.append)[0], problems


def add(
    found: Iterable[Found], store: Store, path: Path, note: Note, run: str = ""
) -> tuple[list[str], str]:
    """Add traces to a store in one transaction; return their ids and the run, by default a new one named as `path`."""
    ids = dict[str, None]()
    with store.transaction():
        # a what-if comes after its parent, whose id is kept only if that is there
        for one in sorted(found, key=lambda one: 0 if isinstance(one, Trace) else one[0].started):
            if isinstance(one, Trace) and one.reward is not None and not isfinite(one.reward):
                note(f"A reward of {one.reward} is not a finite number: its trace is ungraded.")
                one.reward = None
            whole = (episode_of(one), None, tokenizer().hash, {}) if isinstance(one, Trace) else one
            id = whole[0].id
            if id in ids or store.select_one("SELECT 1 FROM episodes WHERE id=?", (id,)):
                note(f"Episode {id} is there already: it is kept as it is.")
            else:
                try:
                    with store.transaction():
                        run = _put(store, path, whole, run)
                except ERRORS as error:
                    note(f"Episode {id} is left out: {say(error)}.")
                    continue
            ids[id] = None
    return [*ids], run


def _put(store: Store, path: Path, whole: Whole, run: str) -> str:
    """Add an episode and its task; return its run, by default a new one. Raises ValueError and its like."""
    episode, signals, digest, about = whole
    split = str(about.get("split", ""))
    run = run or _begin(store, path, episode.weights_version, digest)
    prompt = tuple(episode.turns[0].messages) if episode.turns else ()
    if store.tasks.get(episode.task_id, episode.pack) is None:
        store.tasks.add([Task(episode.task_id, episode.pack, episode.family, split, prompt)])
    store.episodes.add([episode.with_(run_id=run)], split=split, tokenizer=digest)
    if signals is not None:
        store.signals.add(episode.id, signals)
    for tag in about.get("tags", ()):
        store.marks.tag(episode.id, str(tag))
    store.marks.note(episode.id, str(about.get("note", "")))
    return run


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
