"""HumanEval's, MBPP's, BFCL's and Spider's rows with the graders that ship."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import ByteTokenizer, Chat, Outcome, Pack, ScriptedPolicy, load_pack
from agentrl_cli.config import Config, SandboxConfig
from agentrl_cli.errors import EnvError
from agentrl_cli.rewards import Reward, RewardContext, rules, score
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks.forms import detect
from tests.helpers.packs import call, play
from tests.helpers.rewards import context, episode, value

HUMANEVAL = {
    "task_id": "HumanEval/9000",
    "prompt": "import math\n\n\ndef half(n):\n    return n / 2\n\n\ndef area(r: float) -> float:\n"
    '    """ Half of a circle of radius r.\n    >>> round(area(1), 2)\n    1.57\n    """\n',
    "entry_point": "area",
    "canonical_solution": "    return half(math.pi * r * r)\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert abs(candidate(1) - 1.5708) < 1e-3\n"
    "    assert candidate(0) == 0\n",
}


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


async def test_humanevals_tests_decide_in_the_sandbox() -> None:
    pack = Pack.of("he", [HUMANEVAL], [Reward("passes", rules.humaneval)], sandbox=True)
    (task,) = pack.tasks("train")
    assert detect(HUMANEVAL) == "humaneval" and "```python\nimport math" in str(
        task.prompt[-1]["content"]
    )
    whole = "def area(r):\n    return half(math.pi * r * r)\n"
    said = {
        HUMANEVAL["canonical_solution"]: 1.0,
        f"I would write:\n```python\n{whole}```\nas asked.": 1.0,
        f"```python\nimport math\n{whole}```": 1.0,
        "```python\ndef area(r):\n    return 0\n```": 0.0,
        "```python\nprint('passed')\nraise SystemExit\ndef area(r):\n    return 0\n```": 0.0,
        "    def area_of(r):\n        return half(math.pi * r * r)\n\n    return area_of(r)\n": 1.0,
        "no code": 0.0,
    }
    async with await Sandbox.open(
        SandboxConfig(workers=1).replace(limits={"wall": 2.0})
    ) as sandbox:
        session = await sandbox.session(seed=0)

        async def open_session() -> Any:
            return session

        for text, expected in said.items():
            ctx = RewardContext(task, text, open_session)
            (part,) = await score(episode(), pack.rewards, ctx)
            assert (part.value, part.fakeable) == (expected, True), (text, part)
            assert bool(part.detail) == (expected == 0.0)
        await session.close()
    with pytest.raises(EnvError, match="has no entry_point"):
        await value(rules.humaneval, context(final_text="x"))
