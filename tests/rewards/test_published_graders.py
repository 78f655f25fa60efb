"""SQL on a file in place, search in Chinese, and calls matched with those expected."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from agentrl_cli.rewards.calls import _match_calls, _same
from agentrl_cli.tools import ToolContext
from agentrl_cli.tools.search import SearchTool
from agentrl_cli.tools.sql import SqlTool


async def test_a_database_larger_than_its_memory_is_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "large.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE t AS SELECT 1 AS n, zeroblob(3000000) AS padding")
    before = path.stat().st_mtime_ns
    tool = SqlTool(str(path), memory_mb=1)
    state = await tool.create(ToolContext())
    assert (await tool.call(state, {"query": "SELECT n FROM t"})).text == "n\n1"
    for query in ("UPDATE t SET n = 2", "CREATE TEMP TABLE u (a)", "ATTACH ':memory:' AS x"):
        assert (await tool.call(state, {"query": query})).error == "refused"
    await tool.release(state)
    assert path.stat().st_mtime_ns == before and [item.name for item in tmp_path.iterdir()] == [
        "large.db"
    ]
    with pytest.raises(Exception, match="database or disk is full") as caught:
        await SqlTool(str(path), memory_mb=1, writable=True).create(ToolContext())
    assert "memory_mb" in str(getattr(caught.value, "hint", ""))


async def test_search_finds_chinese_japanese_and_korean(tmp_path: Path) -> None:
    texts = [
        "土星最大的卫星是土卫六。",
        "秘鲁的河流很多。",
        "東京は日本の首都です。",
        "서울은 한국의 수도이다.",
        "The moon Titan.",
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tool = SearchTool("c.jsonl").at(tmp_path)
    state = await tool.create(ToolContext())
    for query, number in (
        ("土星的卫星", 0),
        ("秘鲁有哪些河流", 1),
        ("日本の首都", 2),
        ("한국의 수도", 3),
        ("titan moon", 4),
    ):
        found = await tool.call(state, {"query": query, "top_k": 1})
        assert texts[number] in found.text, query
    assert "No passage" in (await tool.call(state, {"query": "zebra 飞机"})).text


def test_calls_are_matched_each_with_its_own_and_texts_are_not_lists() -> None:
    assert _match_calls([[0, 1], [0]]) == {0: 1, 1: 0} and _match_calls([[0], [0]]) == {0: 0}
    assert not _same(["N", "Y"], "NY") and not _same(["5"], "5") and _same([1, "a"], [1.0, "A"])
