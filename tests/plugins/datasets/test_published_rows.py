"""HumanEval's, MBPP's, BFCL's and Spider's rows with the graders that ship."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Outcome, Pack
from agentrl_cli.config import SandboxConfig
from agentrl_cli.errors import EnvError
from agentrl_cli.rewards import Reward, rules
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks.forms import detect
from tests.helpers.chat import call
from tests.helpers.packs import pack, play
from tests.helpers.rewards import context, value

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
async def test_mbpp_in_both_forms(row: dict[str, Any], sandbox: Sandbox) -> None:
    made = Pack.of("m", [row], [Reward("passes", rules.mbpp)], sandbox=True)
    (task,) = made.tasks("train")
    assert task.id.startswith("m/") and TESTS[0] in str(task.prompt[0]["content"])
    good = "```python\ndef first(x):\n    return x[0]\n```"
    said = (good, good.replace("[0]", "[-1]"))
    done = [await play(made, [text], sandbox=sandbox) for text in said]
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
    question = [[{"role": "user", "content": "Area?"}]]
    row = {"id": "simple_0", "question": question, "function": [AREA], "ground_truth": wanted}
    rewards = {"calls": {"primary": True, "function": "agentrl_cli.rewards.calls:same_calls"}}
    made = pack(tmp_path, {"tools": ["declared"], "rewards": rewards}, [row])
    (tmp_path / "openai").mkdir()
    tools = [{"type": "function", "function": AREA}]
    row = {"messages": question[0], "tools": tools, "ground_truth": wanted}
    same = pack(tmp_path / "openai", {"tools": ["declared"], "rewards": rewards}, [row])
    assert [one.name for one in same.tools_of(same.tasks("train")[0])] == [AREA["name"]]
    (shown,) = made.tools_of(made.tasks("train")[0])
    parameters = shown.schema["function"]["parameters"]
    assert parameters["type"] == "object"
    assert parameters["properties"]["height"]["type"] == "number"
    done = await play(made, [said])
    assert done.reward == worth, done.error
    assert len(done.turns) == (3 if "tool_call" in said else 2)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("```sql\nSELECT name FROM goods ORDER BY price DESC;\n```", Outcome.SOLVED),
        ("SELECT price FROM goods", Outcome.FAILED),
        ("I do not know.", Outcome.FAILED),
    ],
)
async def test_spiders_rows_on_a_database_in_place(
    said: str, outcome: Outcome, tmp_path: Path
) -> None:
    database = tmp_path / "database" / "shop" / "shop.sqlite"
    database.parent.mkdir(parents=True)
    goods = "CREATE TABLE goods AS SELECT 'pen' AS name, 2 AS price UNION ALL SELECT 'ink', 5"
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(goods)
    row = {"db_id": "shop", "question": "Which goods?", "query": "SELECT name FROM goods"}
    rewards = {"rows": {"primary": True, "function": "agentrl_cli.rewards.rules:same_rows"}}
    made = pack(tmp_path, {"tools": ["sql"], "rewards": rewards}, [row])
    assert (await play(made, [said])).outcome is outcome


async def test_humanevals_tests_decide_in_the_sandbox() -> None:
    made = Pack.of("he", [HUMANEVAL], [Reward("passes", rules.humaneval)], sandbox=True)
    (task,) = made.tasks("train")
    assert detect(HUMANEVAL) == "humaneval"
    assert "```python\nimport math" in str(task.prompt[-1]["content"])
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
    limits = SandboxConfig(workers=1).replace(limits={"wall": 2.0})
    async with await Sandbox.open(limits) as sandbox:
        for text, expected in said.items():
            (part,) = (await play(made, [text], sandbox=sandbox)).reward_parts
            assert (part.value, part.fakeable) == (expected, True), (text, part)
            assert bool(part.detail) == (expected == 0.0)
    with pytest.raises(EnvError, match="has no entry_point"):
        await value(rules.humaneval, context(final_text="x"))
