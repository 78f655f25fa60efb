"""The inputs of a run besides its settings: its rows, its code, its tokenizer and the checkpoint it begins from.

A run keeps their hashes as an event. A resume reports differences. It is refused where a group that the
interruption cut would hold episodes of both versions, unless the change is accepted: then such a group is retired,
and a new one takes its place.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import UsageError, pluralise
from agentrl_cli.paths import PROJECT_FILE
from agentrl_cli.reports.reference import EVENT as REFERENCE
from agentrl_cli.reports.reference import read_reference
from agentrl_cli.rollout.greedy import SUFFIX
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.codec import dumps
from agentrl_cli.store.journal import INPUTS
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Task

DIGITS = 8
"""Hexadecimal digits of a row's name, and of its content, in the event."""
TEXTS = ("description", "defaults", "families", "data", "variants")
"""Keys of task.yaml that change no episode of a task."""
SHOWN = 3
_INSTALLED = (
    Path(__file__).resolve().parent.parent,
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")),
)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run now, by their hashes."""

    tasks: tuple[str, ...]
    """Ids of the training tasks, in order."""
    rows: tuple[str, ...]
    """Name and content of each."""
    code: Mapping[str, str]
    """Maps the name of a file to its content."""
    tokenizer: str
    folders: tuple[Path, ...] = ()
    """The folders of the packs."""
    model: str = ""
    """The model's name, of a checkpoint with its step: RUN@last changes as the run continues."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings by which episodes are sampled and scored."""

    @classmethod
    def of(
        cls,
        tasks: Sequence[Task],
        packs: Iterable[Pack],
        tokenizer: str,
        base: Path,
        model: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> Inputs:
        """Return the inputs of this process, which has loaded the packs; `base` is the project folder."""
        packs, base = [pack for pack in packs if pack.dir != Path()], base.resolve()
        rows = (
            _name(t.pack, t.id) + _hash(dumps([t.prompt, dict(t.data), t.tools])) for t in tasks
        )
        hashes = {_show(path, base): _hash_file(path) for path in sorted(set(_files(packs, base)))}
        code = {name: found for name, found in hashes.items() if found is not None}
        for pack in packs:
            spec = load_yaml(pack.dir / "task.yaml")
            kept = {key: value for key, value in spec.items() if key not in TEXTS}
            code[_show(pack.dir.resolve() / "task.yaml", base)] = _hash(dumps(kept))
        folders = tuple(pack.dir for pack in packs)
        ids = tuple(task.id for task in tasks)
        return cls(ids, tuple(rows), code, tokenizer, folders, model, settings or {})

    def keep_reference(self, store: Store, run: RunRow) -> None:
        """Keep the reference curves of the only pack of a run that begins, if they are of its model and these rows.

        Raises DataError if they cannot be read.
        """
        if len(self.folders) == 1 and store.journal.newest_event(run.id, INPUTS) is None:
            rows = hash_rows("".join(self.rows))
            if (kept := read_reference(self.folders[0], run.model, rows)) is not None:
                store.journal.add_event(run.id, REFERENCE, kept)

    def settle(
        self,
        store: Store,
        run: RunRow,
        done: int,
        size: int,
        *,
        greedy: bool = False,
        accept: bool = False,
    ) -> str:
        """Compare with those that the run had, and keep these. Returns what changed, in sentences; empty if nothing.

        Args:
            done: The steps that are done.
            size: The episodes of a group.
            greedy: Whether a group needs a greedy attempt too.
            accept: Retire cut groups that would mix two versions; with other settings all later ones are.

        Raises UsageError if there are such groups and `accept` is False; nothing is stored then.
        """
        rest = {"code": dict(self.code), "tokenizer": self.tokenizer, "model": self.model}
        now = {"rows": "".join(self.rows), **rest, "settings": dict(self.settings)}
        stored = store.journal.newest_event(run.id, INPUTS)
        before = stored or {**now, "tokenizer": run.tokenizer or self.tokenizer}
        contents = _contents(before["rows"])
        each = ((row[:DIGITS], row[DIGITS:]) for row in self.rows)
        rows = {name for name, content in each if contents.get(name, content) != content}
        files = [name for name, now_ in self.code.items() if before["code"].get(name, now_) != now_]
        other = before["tokenizer"] != self.tokenizer
        found = [*self._about_rows(rows, list(contents)), *self._about_others(files, before)]
        text = f"Changed since this run was last started: {'; '.join(found)}." * bool(found)
        begun = _cut_groups(store, run.id, done, size, greedy=greedy)
        cut = [group for group, task in begun if files or other or task in rows]
        if before.get("settings", self.settings) != self.settings:
            cut = [group for group, *_ in store.stats.groups(run.id, done)]
        elif cut and not accept:
            text += f" Groups that the interruption cut would hold episodes of both versions: {_list(cut)}."
            again = f"agentrl train --resume {run.name} --accept-changes"
            raise UsageError(
                text, hint=f"Undo the change, or let new groups take their places: {again}"
            )
        with store.transaction():
            retired = [group + end for group in cut for end in ("", SUFFIX)]
            count = sum(store.marks.retire(run.id, group) for group in retired)
            if other:
                store.runs.update(run.id, tokenizer=self.tokenizer)
            if now != stored:
                store.journal.add_event(run.id, INPUTS, now)
        replaced = f" {count} episodes of unfinished steps are replaced: {_list(cut)}."
        return text + replaced * bool(cut)

    def _about_rows(self, changed: Collection[str], before: Sequence[str]) -> Iterator[str]:
        """Clauses about the rows; `before` are the names that the run had, in order."""
        now = [row[:DIGITS] for row in self.rows]
        if changed:
            ids = [task for task, name in zip(self.tasks, now, strict=True) if name in changed]
            yield f"{pluralise(len(ids), 'row')} of the same id with another content ({_list(ids)})"
        missing, new = set(before) - set(now), set(now) - set(before)
        if missing:
            yield f"{pluralise(len(missing), 'row')} fewer"
        if new:
            yield f"{pluralise(len(new), 'row')} more"
        moved = [n for n in before if n not in missing] != [n for n in now if n not in new]
        if moved:
            yield "the rows are in another order"
        if missing or new or moved:
            yield "the next steps draw other tasks than planned"

    def _about_others(self, files: Sequence[str], before: Mapping[str, Any]) -> Iterator[str]:
        """Clauses about the code, the tokenizer, the model and the settings."""
        if files:
            yield f"the code of {_list(files)} is different"
        for name, now in (("tokenizer", self.tokenizer), ("model", self.model)):
            if (was := before.get(name, now)) != now:
                yield f"the {name} is another ({was} before, {now} now)"
        if before.get("settings", self.settings) != self.settings:
            yield "episodes are sampled, or scored, by other settings"


def _cut_groups(
    store: Store, run_id: str, done: int, size: int, *, greedy: bool
) -> Iterator[tuple[str, str]]:
    """Yield (group, name of its task) of the groups of a step that was not completed."""
    baselines = {group for group, *_ in store.stats.groups(run_id, done, "baseline")}
    for group, pack, task, count in store.stats.groups(run_id, done):
        if count < size or (greedy and group + SUFFIX not in baselines):
            yield group, _name(pack, task)


def hash_rows(rows: str) -> str:
    """Return one hash of the contents of stored rows, in any order."""
    return _hash("".join(sorted(_contents(rows).values())))


def _contents(rows: str) -> dict[str, str]:
    """Name to content of the stored rows."""
    each = [rows[at : at + 2 * DIGITS] for at in range(0, len(rows), 2 * DIGITS)]
    return {row[:DIGITS]: row[DIGITS:] for row in each}


def _files(packs: Iterable[Pack], base: Path) -> Iterator[Path]:
    """Yield the files of code that this process imported from the project and its packs, and agents' words."""
    folders = {base, *(pack.dir.resolve() for pack in packs)}
    within = tuple(os.path.join(folder, "") for folder in folders)
    real = functools.cache(os.path.realpath)  # thousands of modules lie in some hundred folders
    for module in list(sys.modules.values()):
        name = str(getattr(module, "__file__", None) or "")
        folder, file = os.path.split(name)
        found = real(name) if os.path.islink(name) else os.path.join(real(folder), file)
        if name.endswith(".py") and found.startswith(within):
            path = Path(found)
            installed = {"site-packages", "dist-packages"} & set(path.parts) or any(
                path.is_relative_to(place) for place in _INSTALLED
            )
            if not installed and path.is_file():
                yield path
    for pack in packs:
        yield from (
            path.resolve()
            for path in pack.dir.glob("*.y*ml")
            if path.name not in (PROJECT_FILE, "task.yaml")
        )
        if agent := pack.agent:
            words = filter(None, (agent.function.partition(":")[0], *agent.command))
            yield from (agent.folder / agent.cwd / word for word in words)


def _show(path: Path, base: Path) -> str:
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def _name(pack: str, task: str) -> str:
    return _hash(f"{pack}\0{task}")


def _hash(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=DIGITS // 2).hexdigest()


def _hash_file(path: Path) -> str | None:
    """Return the hash of a file; None for a word that names none, or one that cannot be read."""
    try:
        with path.resolve().open("rb") as file:
            kind = functools.partial(hashlib.blake2b, digest_size=DIGITS // 2)
            return hashlib.file_digest(file, kind).hexdigest()
    except (OSError, ValueError):  # an agent's command may hold any text: too long, with a NUL
        return None


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
