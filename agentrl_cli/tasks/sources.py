"""Sources of rows: JSONL, JSON, CSV, TSV or parquet files, the Hugging Face hub, a dataset class, a generator.

`data:` of task.yaml names a source for each split; without it `data/<split>.jsonl` (or .json, .parquet …) is read:

    data:
      train: data/train.parquet
      test: {path: rows.json, form: messages, limit: 200}
      heldout: {hub: openai/gsm8k, config: main, split: test}   # or a folder of files, or of save_to_disk
      fresh: {generate: "task.py:generate", seed: 7, count: 1000}
      mine: {dataset: "task.py:Rows", args: {size: 10}}
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import datetime
import decimal
import inspect
import io
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_cli.errors import (
    AgentRLError,
    ConfigError,
    DataError,
    EnvError,
    EnvironmentProblem,
    NotFound,
    describe_error,
    needs_extra,
)
from agentrl_cli.registry import resolve
from agentrl_cli.tasks.forms import all_forms
from agentrl_cli.types.plain import describe_json_error, parse_json

Numbered = tuple[int, Mapping[str, Any] | str]
"""(number from 1, row or the text of its error)."""

JSON_COLUMNS = {
    "prompt",
    "messages",
    "conversations",
    "tools",
    "tool_choice",
    "reward_model",
    "extra_info",
}
"""Columns of a table that may hold JSON."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
KINDS = ("path", "hub", "dataset", "generate")
KEYS = {
    "path": {"form", "limit"},
    "hub": {"form", "limit", "config", "split", "revision"},
    "dataset": {"form", "limit", "args"},
    "generate": {"form", "seed", "count", "args"},
}


@dataclass(frozen=True)
class Source:
    """One split's rows."""

    kind: str
    """path | hub | dataset | generate"""
    name: str
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in messages: for a file, its path."""
        return str(self.folder / self.name) if self.kind == "path" else f"{self.kind} {self.name}"

    @property
    def form(self) -> str:
        return str(self.options.get("form") or "auto")

    def rows(self) -> Iterator[Numbered]:
        """Return the rows in order, numbered from 1. Raises what opening the source raises."""
        return itertools.islice(READERS[self.kind](self), self.options.get("limit"))


def source_of(folder: Path, split: str, value: Any) -> Source:
    """Return the source that task.yaml names for a split. Raises ConfigError for an invalid one."""
    where = f"{folder / 'task.yaml'}: data.{split}"
    if isinstance(value, str):
        value = {"path": value}
    if not isinstance(value, Mapping) or sum(kind in value for kind in KINDS) != 1:
        raise ConfigError(f"{where} must be a path, or have one of {', '.join(KINDS)}.")
    kind = next(kind for kind in KINDS if kind in value)
    unknown = sorted(set(value) - KEYS[kind] - {kind})
    if unknown:
        raise ConfigError(
            f"{where} has unknown keys: {', '.join(unknown)}.",
            hint=f"Besides {kind}: {', '.join(sorted(KEYS[kind]))}.",
        )
    if str(value.get("form", "auto")) not in ("auto", *all_forms()):
        known = NotFound.of("form", str(value["form"]), ["auto", *all_forms()])
        raise ConfigError(f"{where}: {known.message}", hint=known.hint)
    for key in ("limit", "count"):
        if value.get(key) is not None and not (isinstance(value[key], int) and value[key] > 0):
            raise ConfigError(f"{where}: `{key}` must be a number above 0.")
    if kind == "generate" and value.get("count") is None:
        raise ConfigError(
            f"{where}: `count` is missing: the number of rows to take from the generator."
        )
    return Source(
        kind, str(value[kind]), folder, {key: v for key, v in value.items() if key != kind}
    )


def default_source(folder: Path, split: str) -> Source:
    """`data/<split>` with the first ending that exists, else JSONL."""
    found = [ending for ending in ENDINGS if (folder / "data" / f"{split}{ending}").is_file()]
    return Source("path", f"data/{split}{(found or ENDINGS)[0]}", folder)


def default_splits(folder: Path) -> list[str]:
    """Return the splits that have a file in `data/`."""
    return sorted({path.stem for path in (folder / "data").glob("*") if path.suffix in ENDINGS})


# --- readers ----------------------------------------------------------------------------------------------------------


def _path(source: Source) -> Iterator[Numbered]:
    path = source.folder / source.name
    if path.suffix not in FILES:
        raise ConfigError(f"{path}: rows are read from {', '.join(ENDINGS)} files.")
    if not path.is_file():
        if path.exists() or path.is_symlink():
            hint = "It is a folder, a pipe, or a link that leads nowhere."
            raise DataError(f"{path} is not a regular file.", hint=hint)
        raise NotFound.of(
            "data file", str(path), [str(p) for p in path.parent.glob("*") if p.suffix in FILES]
        )
    return FILES[path.suffix](path)


def jsonl(path: Path) -> Iterator[Numbered]:
    """Yield the rows of the non-empty lines, or the text of a line's error."""
    data, wrong = path.read_bytes().removeprefix(codecs.BOM_UTF8), ""
    lines = data.split(b"\n")[: 1 if data.startswith(UTF_16) else None]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except UnicodeDecodeError:
            wrong = wrong or f"not UTF-8. {_convert_hint(path, data)}"
            yield number, wrong
        except json.JSONDecodeError as error:
            yield number, f"not JSON: {describe_json_error(error)} at column {error.colno}."
        except ValueError as error:
            yield number, f"{error}."
        else:
            yield number, row if isinstance(row, dict) else "a row must be a JSON object."


def _json(path: Path) -> Iterator[Numbered]:
    """Yield a JSON array of objects, or an object whose only list (`data`, `rows` …) is one."""
    try:
        value = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except UnicodeDecodeError as error:
        text = f"{path}: not UTF-8: {error.reason} at byte {error.start}."
        raise DataError(text, hint=_convert_hint(path, error.object)) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not JSON: {describe_json_error(error)} at column {error.colno}."
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: {error}.") from error
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DataError(f"{path} must hold a list of rows.")
    for number, row in enumerate(value, 1):
        yield number, row if isinstance(row, dict) else "a row must be a JSON object."


def _parquet(path: Path) -> Iterator[Numbered]:
    """Rows of a parquet file. Fields that only other rows have are null, and are left out."""
    with needs_extra(f"{path}: parquet needs pyarrow.", "data"):
        import pyarrow
        import pyarrow.parquet as parquet
    try:
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=256))
            for number, row in enumerate(itertools.chain.from_iterable(batches), 1):
                yield number, as_json(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _table(path: Path) -> Iterator[Numbered]:
    """Rows of a CSV or TSV file with a head line, numbered by their lines; empty cells are left out."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text = f"{path}: not UTF-8: {error.reason} at byte {error.start}."
        raise DataError(text, hint=_convert_hint(path, error.object)) from error
    head = text.partition("\n")[0]
    mark = (
        "\t" if path.suffix == ".tsv" else max(",;\t", key=head.count)
    )  # some countries' CSV has semicolons
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # of the process; 131,072 at first
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
    line = 0
    try:
        names, line = [name.strip() for name in next(reader, [])], reader.line_num
        if twice := {name for name in names if names.count(name) > 1 or not name}:
            raise DataError(
                f"{path}: the head line has a column twice or without a name: {sorted(twice)}."
            )
        for cells in reader:
            line, number = reader.line_num, line + 1
            row = {
                name: _cell(name, cell)
                for name, cell in zip(names, cells, strict=False)
                if cell.strip()
            }
            if row:
                many = f"{len(cells)} cells, and the head line names {len(names)} columns."
                yield number, many if len(cells) > len(names) else row
    except csv.Error as error:
        raise DataError(f"{path}:{line + 1}: not CSV: {error}.") from error


def _convert_hint(path: Path, data: bytes) -> str:
    """Return how to make a file UTF-8: a command for the encoding that its bytes suggest; for a table also Excel's."""
    runs = re.findall(rb"[\x80-\xff]+", data)
    name = "WINDOWS-1252"
    if data.startswith(UTF_16):
        name = "UTF-16"
    elif sum(map(len, runs)) >= 2 * len(runs):  # letters of the West stand alone between others
        with contextlib.suppress(UnicodeDecodeError):
            data.decode("gb18030")
            name = "GB18030"
    target = path.with_name(f"{path.stem}-utf8{path.suffix}")
    source, made = shlex.quote(str(path)), shlex.quote(str(target))
    command = f"iconv -f {name} -t UTF-8 {source} > {made}"
    if path.parent.name == "data":  # of a pack, where another file is another split
        command += f" && mv {made} {source}"
    table = "Save it as `CSV UTF-8` (Excel), or, if" if path.suffix in (".csv", ".tsv") else "If"
    return f"{table} it is {name}: {command}"


def _cell(name: str, text: str) -> Any:
    if name in JSON_COLUMNS and text.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError):
            return parse_json(text)
    return text


FILES = {".jsonl": jsonl, ".json": _json, ".parquet": _parquet, ".csv": _table, ".tsv": _table}
ENDINGS = tuple(FILES)


def read_file(path: Path) -> Iterator[Numbered]:
    """Return the rows of a file or a pipe by its ending; JSON Lines of any other, and of a .json file that has them.

    Raises DataError if it cannot be read.
    """
    reader = FILES.get(path.suffix, jsonl)
    if path.is_file():
        with path.open("rb") as file, contextlib.suppress(ValueError):
            first = file.readline()
            if first.startswith(b"PAR1"):
                reader = _parquet
            elif reader is _json and isinstance(parse_json(first), dict):
                reader = jsonl
    return reader(path)


def _hub(source: Source) -> Iterator[Numbered]:
    """Yield a dataset of the Hugging Face hub or its cache, a folder of data files, or the output of `save_to_disk`."""
    with needs_extra(f"The dataset {source.name} needs the package `datasets`.", "data"):
        import datasets
    datasets.disable_progress_bars()
    options = source.options
    split, local = str(options.get("split") or "train"), source.folder / source.name
    try:
        if any((local / name).is_file() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(local))
            if isinstance(found, dict):  # one saved without splits serves as every split
                if split not in found:
                    raise NotFound.of(f"split of {source.name}", split, found)
                found = found[split]
        else:
            found = datasets.load_dataset(
                str(local) if local.is_dir() else source.name,
                options.get("config"),
                split=split,
                revision=options.get("revision"),
            )
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise NotFound(
            f"The dataset {source.name} cannot be loaded: {_first_line(error)}"
        ) from error
    except (OSError, ConnectionError) as error:
        raise EnvironmentProblem(
            f"The dataset {source.name} cannot be reached: {_first_line(error)}",
            hint="Offline? Download it once with a connection, or save its rows as JSONL or parquet and name the file.",
        ) from error
    for number, row in enumerate(found, 1):
        yield number, as_json(dict(row))


def _dataset(source: Source) -> Iterator[Any]:
    """Return the rows of a class (or function) of the project: iterated, or indexed up to its length."""
    made = _call(source, dict(source.options.get("args") or {}))
    if not hasattr(made, "__iter__"):
        if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
            raise ConfigError(
                f"{source.name} returns {type(made).__name__}, neither iterable nor indexable."
            )
        return map(made.__getitem__, range(len(made)))
    return iter(made)


def _generate(source: Source) -> Iterable[Any]:
    """Return the first `count` rows of `generate(seed)`; deterministic, so a run resumes by position."""
    args = {**dict(source.options.get("args") or {}), "seed": int(source.options.get("seed") or 0)}
    return itertools.islice(_call(source, args), int(source.options["count"]))


def _call(source: Source, args: Mapping[str, Any]) -> Any:
    name = source.name if ":" in source.name else f"task.py:{source.name}"
    function = resolve("tasks", {}, name, base=source.folder)
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise ConfigError(
            f"{source.name}: {error}.", hint="`args` under data.SPLIT are its arguments."
        ) from error
    return function(**args)


def _check_rows(make: Callable[[Source], Iterable[Any]], source: Source) -> Iterator[Numbered]:
    """Yield the rows that a project's code makes. Raises EnvError for what it raises, from its first call on."""
    try:
        for number, row in enumerate(make(source), 1):
            yield number, dict(row) if isinstance(row, Mapping) else "a row must be a mapping."
    except (AgentRLError, ModuleNotFoundError):  # `main` reports which package to install
        raise
    except Exception as error:
        raise EnvError(f"{source.name} raised {describe_error(error)}") from error


READERS: Mapping[str, Callable[[Source], Iterator[Numbered]]] = {
    "path": _path,
    "hub": _hub,
    "dataset": partial(_check_rows, _dataset),
    "generate": partial(_check_rows, _generate),
}


def as_json(value: Any) -> Any:
    """Return a value of a columnar file as a line of JSON has it, at any depth; bytes, of an image, stay.

    Null fields of objects are left out. Decimals are numbers; dates, times and durations are texts.
    """
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return str(value)
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
