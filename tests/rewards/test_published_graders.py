"""MBPP's and Spider's rows with the graders that ship; SQL on a file in place; search in Chinese."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config, SandboxConfig
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rewards import Reward, rules
from agentrl_cli.rewards.calls import _matched, _same
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks import Pack
from agentrl_cli.tasks.spec import load_pack
from agentrl_cli.tools import ToolContext
from agentrl_cli.tools.search import SearchTool
from agentrl_cli.tools.sql import SqlTool
from agentrl_cli.types import Outcome
from tests.tools.test_configured_tools import call, play

TESTS = ["assert first([3, 4]) == 3", "assert math.isclose(first([0.5]), 0.5)"]
FULL = {
    "task_id": 11,
    "text": "Write a function.",
    "code": "",
    "test_list": TESTS,
    "test_setup_code": "import math",
}
SANITIZED = {
    "task_id": 12,
    "prompt": "Write a function.",
    "test_list": TESTS,
    "test_imports": ["import math"],
}


@pytest.mark.parametrize("row", [FULL, SANITIZED], ids=["full", "sanitized"])
async def test_mbpp_in_both_forms(row: dict[str, Any]) -> None:
    pack = Pack.of("m", [row], [Reward("passes", rules.mbpp)], sandbox=True)
    (task,) = pack.tasks("train")
    assert task.id.startswith("m/") and TESTS[0] in str(task.prompt[0]["content"])
    chat = Chat(ByteTokenizer())
    good = "```python\ndef first(x):\n    return x[0]\n```"
    config = Config()
    config.rollout.max_tokens = 4000
    async with await Sandbox.open(SandboxConfig(workers=1)) as sandbox:
        done = []
        for text in (good, good.replace("[0]", "[-1]")):
            policy = ScriptedPolicy([text], chat.tokenizer)
            done.append(
                await Rollout(policy, chat, {"m": pack}, config, sandbox=sandbox).episode(
                    Job(task, 1)
                )
            )
    assert [one.reward for one in done] == [1.0, 0.0], [one.error for one in done]


AREA = {
    "name": "geometry.area",
    "description": "Area.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "integer"},
            "height": {"type": "float"},
            "unit": {"type": "string"},
        },
        "required": ["base", "height"],
    },
}
POSSIBLE = {"geometry.area": {"base": [10], "height": [5], "unit": ["square cm", ""]}}


@pytest.mark.parametrize(
    ("wanted", "said", "worth"),
    [
        ([POSSIBLE], call("geometry.area", base=10, height=5.0), 1),
        ([POSSIBLE], call("geometry.area", base=10, height=5, unit="Square-CM"), 1),
        ([POSSIBLE], call("geometry.area", base=10, height=6), 0),
        ([POSSIBLE], "The area is 25.", 0),
        ([POSSIBLE], call("geometry.area", base=10, height=5) * 2, 0),
        ([POSSIBLE, POSSIBLE], call("geometry.area", base=10, height=5) * 2, 1),
        (
            [{"name": "geometry.area", "arguments": {"base": 1, "height": 2}}],
            call("geometry.area", base=1, height=2),
            1,
        ),
        ([], "None of these can help.", 1),
        ([], call("geometry.area", base=10, height=5), 0),
    ],
)
async def test_bfcls_rows_and_calls(
    wanted: list[Any], said: str, worth: float, tmp_path: Path
) -> None:
    """Functions that only the row declares, with BFCL's names of types; calls in any order."""
    row = {
        "id": "simple_0",
        "question": [[{"role": "user", "content": "Area?"}]],
        "function": [AREA],
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(
        json.dumps({**row, "ground_truth": wanted}) + "\n"
    )
    (tmp_path / "task.yaml").write_text(
        "name: p\nsandbox: false\ntools: [declared]\n"
        "rewards: {calls: {primary: true, function: 'agentrl_cli.rewards.calls:same_calls'}}\n"
    )
    pack = load_pack(tmp_path)
    (task,) = pack.tasks("train")
    (shown,) = pack.tools_of(task)
    properties = shown.schema["function"]["parameters"]["properties"]
    assert (
        shown.schema["function"]["parameters"]["type"] == "object"
        and properties["height"]["type"] == "number"
    )
    episode = await play(pack, [said])
    assert (episode.reward, len(episode.turns)) == (worth, 3 if "tool_call" in said else 2), (
        episode.error
    )


async def test_spiders_rows_on_a_database_in_place(tmp_path: Path) -> None:
    database = tmp_path / "database" / "shop" / "shop.sqlite"
    database.parent.mkdir(parents=True)
    with sqlite3.connect(database) as made:
        made.execute(
            "CREATE TABLE goods AS SELECT 'pen' AS name, 2 AS price UNION ALL SELECT 'ink', 5"
        )
    row = {"db_id": "shop", "question": "Which goods?", "query": "SELECT name FROM goods"}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "task.yaml").write_text(
        "name: s\nsandbox: false\ntools: [sql]\n"
        "rewards: {rows: {primary: true, function: 'agentrl_cli.rewards.rules:same_rows'}}\n"
    )
    pack = load_pack(tmp_path)
    chat = Chat(ByteTokenizer())
    said = [
        "```sql\nSELECT name FROM goods ORDER BY price DESC;\n```",
        "SELECT price FROM goods",
        "I do not know.",
    ]
    config = Config()
    config.rollout.max_tokens = 4000
    outcomes = []
    for text in said:
        rollout = Rollout(ScriptedPolicy([text], chat.tokenizer), chat, {"s": pack}, config)
        outcomes.append((await rollout.episode(Job(pack.tasks("train")[0], 1))).outcome)
    assert outcomes == [Outcome.SOLVED, Outcome.FAILED, Outcome.FAILED]


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
    assert _matched([[0, 1], [0]]) == {0: 1, 1: 0} and _matched([[0], [0]]) == {0: 0}
    assert not _same(["N", "Y"], "NY") and not _same(["5"], "5") and _same([1, "a"], [1.0, "A"])
