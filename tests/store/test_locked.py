"""A store that another process has locked, in a folder whose name is not UTF-8."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentrl_cli.errors import StoreError
from agentrl_cli.store import RunRow, Store


def test_a_locked_store_in_a_folder_that_is_not_utf8_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes no such names")
    path = folder / "a.db"
    Store.open(path).close()
    with closing(sqlite3.connect(os.fsencode(path), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with (
            Store.open(path, busy_ms=20) as store,
            pytest.raises(StoreError, match="locked by another process"),
        ):
            store.runs.add(RunRow("r", "r", "train"))
        other.execute("ROLLBACK")
