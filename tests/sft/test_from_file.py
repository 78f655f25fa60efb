"""Conversations of a file as demonstrations."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.sft import from_file

SYSTEM = {
    "role": "system",
    "content": "",
    "tools": json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": "calculate_math",
                    "description": "计算数学表达式",
                    "parameters": {
                        "type": "object",
                        "properties": {"expression": {"type": "string"}},
                    },
                },
            }
        ]
    ),
}
CALLS = json.dumps([{"name": "calculate_math", "arguments": {"expression": "2+3"}}])
CALLED = [
    {"role": "user", "content": "2+3?", "reasoning_content": "", "tools": "", "tool_calls": ""},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": '{"result": "5"}'},
    {"role": "assistant", "content": "5"},
]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [SYSTEM, *CALLED]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "completion": "b"},
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [{"role": "assistant", "content": "b"}],
        },
        {"instruction": "a", "input": "", "output": "b"},
    ],
)
def test_rows_to_learn_from(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    ((messages, schemas),) = from_file.read(tmp_path / "rows.jsonl")
    assert messages[-1]["role"] == "assistant" and messages[-1]["content"] in ("b", "5")
    assert bool(schemas) == (row.get("conversations", [None])[0] is SYSTEM)
    calls = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls") or ()]
    assert calls in ([], [{"expression": "2+3"}])


def test_a_row_of_no_known_form_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"text": "a"}\n')
    with pytest.raises(
        Exception, match=r"rows.jsonl:2: a row to learn from has conversations.*this one has text"
    ):
        from_file.read(tmp_path / "rows.jsonl")
