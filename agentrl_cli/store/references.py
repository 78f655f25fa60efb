"""Tasks and tokenizers: episodes refer to them, and each is stored once."""

from __future__ import annotations

import base64
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from agentrl_cli.store.codec import decoding, dumps, loads, marks
from agentrl_cli.store.episode_decode import image_of
from agentrl_cli.store.episode_sql import put_images
from agentrl_cli.store.file import Part
from agentrl_cli.store.rows import TokenizerRow, build
from agentrl_cli.types import Task
from agentrl_cli.types.content import HASH, data_uri, digest

_COLUMNS = ("pack", "id", "family", "split", "prompt", "data", "tools")
_PUT = (
    f"INSERT INTO tasks ({','.join(_COLUMNS)}) VALUES ({marks(len(_COLUMNS))}) ON CONFLICT (pack, id) DO UPDATE SET "
    + ",".join(f"{name}=excluded.{name}" for name in _COLUMNS[2:])
)


class Tasks(Part):
    """Tasks by pack and id."""

    def add(self, tasks: Iterable[Task]) -> None:
        """Store tasks, replacing those with the same pack and id."""
        with self.file.transaction() as conn:
            rows = [
                (
                    task.pack,
                    task.id,
                    task.family,
                    task.split,
                    dumps(_replace_images(task.prompt, "data:", partial(_put_image, conn))),
                    dumps(dict(task.data)),
                    None if task.tools is None else dumps(task.tools),
                )
                for task in tasks
            ]
            conn.executemany(_PUT, rows)

    def get(self, task_id: str, pack: str | None = None) -> Task | None:
        """Return a stored task, None if absent or known by name alone."""
        row = self.file.select_one(
            "SELECT id, pack, family, split, prompt, data, tools FROM tasks"
            " WHERE id=?1 AND (?2 IS NULL OR pack=?2) AND data<>'null'",
            (task_id, pack),
        )
        if row is None:
            return None
        tools = None if row[6] is None else tuple(loads(row[6]))
        prompt = _replace_images(
            loads(row[4]), HASH, lambda name: data_uri(image_of(self.file, name.removeprefix(HASH)))
        )
        return build(Task, row, prompt=tuple(prompt), data=loads(row[5]), tools=tools)


def _put_image(conn: sqlite3.Connection, uri: str) -> str:
    """Store an image of a data: URL. Returns its name; the URL itself if it cannot be decoded."""
    try:
        data = base64.b64decode(uri.partition(",")[2], validate=True)
    except ValueError:
        return uri
    put_images(conn, [data])
    return HASH + digest(data)


def _replace_images(value: Any, start: str, new: Callable[[str], str], key: str = "") -> Any:
    """Return a copy of messages with other texts for images (and frames of videos) whose text begins with `start`."""
    if isinstance(value, Mapping):
        return {name: _replace_images(item, start, new, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_images(item, start, new, key) for item in value]
    return (
        new(value)
        if key in ("image", "video") and isinstance(value, str) and value.startswith(start)
        else value
    )


class Tokenizers(Part):
    """Tokenizers by hash."""

    def add(
        self,
        hash: str,
        tokenizer_json: str,
        chat_template: str | None = "",
        specials: Mapping[str, Any] | None = None,
    ) -> None:
        """Store a tokenizer, once per hash."""
        if self.file.select(
            "SELECT 1 FROM tokenizers WHERE hash=? AND tokenizer_json<>x''", (hash,)
        ):
            return
        packed = zlib.compress(tokenizer_json.encode(), 6)
        self.file.write(
            "INSERT INTO tokenizers VALUES (?,?,?,?) ON CONFLICT (hash) DO UPDATE SET"
            " tokenizer_json=excluded.tokenizer_json, chat_template=excluded.chat_template,"
            " specials=excluded.specials",
            (hash, packed, chat_template or "", dumps(dict(specials or {}))),
        )

    def get(self, hash: str) -> TokenizerRow | None:
        """Return a stored tokenizer, None if absent or known by its hash alone."""
        row = self.file.select_one(
            "SELECT hash, tokenizer_json, chat_template, specials FROM tokenizers"
            " WHERE hash=? AND tokenizer_json<>x''",
            (hash,),
        )
        if row is None:
            return None
        with decoding("A stored tokenizer"):
            return TokenizerRow(row[0], zlib.decompress(row[1]).decode(), row[2], loads(row[3]))
