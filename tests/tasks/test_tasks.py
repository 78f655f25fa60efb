"""Rows are checked to the last field, and a mistake is reported with its place; so is a weight of no reward."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import ConfigError, DataError
from agentrl_cli.paths import packs_dir
from agentrl_cli.rewards import Reward
from agentrl_cli.tasks import BadLine, Pack, check_weights, load_pack

GOOD = {"id": "a", "family": "say", "prompt": "Say: a", "answer": "a"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(packs_dir() / "echo-task", tmp_path / "echo-task")
    return tmp_path / "echo-task"


def write(folder: Path, *rows: object) -> Path:
    path = folder / "data" / "train.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def messages(**changed: Any) -> dict[str, Any]:
    return {
        **GOOD,
        "prompt": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "a", **changed},
        ],
    }


@pytest.mark.parametrize(
    "row", [GOOD, messages(), {**GOOD, "tools": []}, {**GOOD, "tools": ["lookup"]}]
)
def test_good_rows(folder: Path, row: dict[str, Any]) -> None:
    write(folder, row)
    (task,) = load_pack(folder).tasks("train")
    assert task.id == "echo-task/a" and task.prompt[0]["role"] == "system"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "a row must be a JSON object"),
        ({"id": "a", "answer": "a"}, "the row lacks prompt"),
        ({"id": "a", "prompt": "p"}, "the row lacks answer"),
        ({**GOOD, "answer": None}, "the row lacks answer"),
        ({**GOOD, "id": 3}, "`id` must be a text"),
        ({**GOOD, "family": 3}, "`family` must be a text, not 3"),
        ({**GOOD, "prompt": []}, "`prompt` must be a text or a list"),
        ({**GOOD, "prompt": ["hello"]}, "message 0: a message has role and content"),
        (
            messages(role="usr"),
            "message 1: the role 'usr' is not one of system, user, assistant, tool",
        ),
        (
            messages(content=["a"]),
            "message 1: a part of a content is a text, an image or a video, not 'a'",
        ),
        (messages(content=None), "message 1: `content` must be a text, not NoneType"),
        ({**GOOD, "tools": "lookup"}, "`tools` must be a list of names"),
        ({**GOOD, "tools": ["lokup"]}, "the pack has no tool 'lokup'; it has lookup"),
    ],
)
def test_bad_rows_are_reported_with_file_and_line(folder: Path, row: object, words: str) -> None:
    path = write(folder, {**GOOD, "id": "first"}, row)
    with pytest.raises(DataError) as caught:
        load_pack(folder).tasks("train")
    assert caught.value.message.startswith(f"{path}:2: ") and words in caught.value.message


def test_read_gives_good_rows_and_every_bad_line(folder: Path) -> None:
    path = write(folder, GOOD, "", "{", {**GOOD, "id": "b"}, GOOD, {**GOOD, "id": "c", "family": 1})
    path.write_bytes(path.read_bytes() + b'{"id": "\xff"}\n')
    tasks, bad = load_pack(folder).read("train")
    assert [task.data["id"] for task in tasks] == ["a", "b"]
    assert [line.number for line in bad] == [3, 5, 6, 7]
    assert bad[1] == BadLine(5, "the id 'a' is also in line 1.") and bad[3].text.startswith(
        "not UTF-8"
    )
    with pytest.raises(DataError) as caught:
        load_pack(folder).tasks("train")
    assert caught.value.hint.startswith("4 rows are invalid")


def test_rows_of_a_script_are_checked_too() -> None:
    rewards = [Reward("exact", lambda episode, ctx: 1.0)]
    assert len(Pack.of("mine", [{"prompt": "a"}, {"prompt": "b"}], rewards).tasks("train")) == 2
    with pytest.raises(DataError, match=r"the pack mine, row 2: the row lacks prompt\."):
        Pack.of("mine", [{"prompt": "a"}, {}], rewards).tasks("train")


@pytest.mark.parametrize("value", ["answer", [1], {"answer": "text"}])
def test_declared_fields_are_a_list_of_names(folder: Path, value: object) -> None:
    text = (folder / "task.yaml").read_text().replace("row: [answer]", f"row: {json.dumps(value)}")
    (folder / "task.yaml").write_text(text)
    with pytest.raises(ConfigError, match="`row` must be a list of names"):
        load_pack(folder)


def test_a_weight_of_no_reward_names_the_nearest() -> None:
    packs = {name: load_pack(name) for name in ("calc-task", "echo-task")}
    check_weights(packs, {})
    passing = ("exact", "format", "tool:calculator", "hook:Mine", "interaction", "env")
    check_weights(packs, dict.fromkeys(passing, 0.5))
    with pytest.raises(ConfigError, match="'fromat'") as caught:
        check_weights(packs, {"exact": 1.0, "fromat": 0.5})
    assert "Did you mean format?" in caught.value.hint
    with pytest.raises(ConfigError, match="'format'"):  # a reward of a pack that is not loaded
        check_weights({"echo-task": packs["echo-task"]}, {"format": 1.0})
