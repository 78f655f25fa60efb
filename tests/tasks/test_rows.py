"""Rows in several forms, from every kind of file, and from code; a bad one is reported with its place."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Reward, Task
from agentrl_cli.errors import (
    ConfigError,
    DataError,
    EnvError,
    EnvironmentProblem,
    MissingDependency,
    NotFound,
)
from agentrl_cli.paths import packs_dir
from agentrl_cli.tasks import BadLine, Pack, check_weights, load_pack
from agentrl_cli.tasks.forms import normal
from agentrl_cli.tasks.sources import Source, as_json

MESSAGES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Look up a."}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "lookup",
                "description": "Look.",
                "parameters": {"type": "object"},
            },
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "lookup"}},
}
GSM8K = {"question": "How many?", "answer": "2 + 1000 = <<2+1000=1002>>\n#### 1,002"}
OWN = {"prompt": [{"role": "user", "content": "Say a."}], "solution": "a"}
GOOD = {"id": "a", "family": "say", "prompt": "Say: a", "answer": "a"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(packs_dir() / "echo-task", tmp_path / "p")
    spec = (tmp_path / "p" / "task.yaml").read_text().replace("row: [answer]\n", "")
    (tmp_path / "p" / "task.yaml").write_text(spec)
    for path in (tmp_path / "p" / "data").iterdir():
        path.unlink()
    return tmp_path / "p"


def write(folder: Path, *rows: object) -> Path:
    path = folder / "data" / "train.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def tasks(folder: Path, *rows: object) -> list[Task]:
    write(folder, *rows)
    return load_pack(folder).tasks("train")


def messages(**changed: Any) -> dict[str, Any]:
    first = {"role": "system", "content": "Be short."}
    return {**GOOD, "prompt": [first, {"role": "user", "content": "a", **changed}]}


def with_data(folder: Path, **data: Any) -> Path:
    with (folder / "task.yaml").open("a") as file:
        file.write(f"\ndata: {json.dumps(data)}\n")
    return folder


# --- forms -----------------------------------------------------------------------------------------------------------


def test_messages_rows(folder: Path) -> None:
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "lookup", "arguments": '{"key": "a"}'},
    }
    history = [
        {"role": "user", "content": "Look up a."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
        {"role": "user", "content": "And b?"},
    ]
    first, second = tasks(folder, MESSAGES, {"messages": history})
    assert first.tools == ("lookup",) and first.data["tool_choice"] == MESSAGES["tool_choice"]
    said = second.prompt[2]
    assert said["content"] == "" and said["tool_calls"][0]["function"]["arguments"] == {"key": "a"}
    assert second.tools is None and second.prompt[0]["role"] == "system"


def test_gsm8k_and_own_rows(folder: Path) -> None:
    count, say, both = tasks(folder, GSM8K, OWN, {**GSM8K, "prompt": "p"})
    assert both.prompt[-1]["content"] == "p", "a pack's row may well have a question, too"
    assert count.prompt[-1]["content"] == "How many?" and count.data["answer"] == "1002"
    assert count.data["solution"] == GSM8K["answer"]
    assert say.data["solution"] == "a" and say.id.endswith("train-00002")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "a row must be a JSON object"),
        ({"id": "a", "answer": "a"}, "the row lacks prompt"),
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
        ({"messages": []}, "must be a list of messages"),
        ({**OWN, "images": ["no.png"]}, "no.png does not exist"),
        ({**OWN, "image": {"bytes": 3}}, "An image is a int"),
        (
            {**OWN, "prompt": [{"role": "user", "content": [{"type": "image", "image": 3}]}]},
            "An image is a int",
        ),
        ({**OWN, "prompt": "<image> or <image>", "images": ["a.png"]}, "2 places for 1 images"),
        ({**OWN, "images": ["https://a.b/c.png"]}, "is not downloaded"),
        ({**OWN, "images": ["~no-such-user.png"]}, "'~no-such-user.png' is not a path"),
        (
            {**OWN, "prompt": [{"role": "user", "content": None}], "images": ["a.png"]},
            "does not fit the form 'own'",
        ),
        ({**OWN, "videos": [{"video": "a.gif", "nframes": "many"}]}, "does not fit the form 'own'"),
        ({**MESSAGES, "tools": [{"function": {}}]}, "a schema in `tools` has no name"),
        (
            {**MESSAGES, "tools": [{"function": {"name": "look"}}], "tool_choice": "auto"},
            "no tool 'look'",
        ),
        (
            {**MESSAGES, "tool_choice": "always"},
            "`tool_choice` must be none, auto, required or name a function",
        ),
        ({**MESSAGES, "tools": [], "tool_choice": "required"}, "but the task has no tools"),
        ({**MESSAGES, "tool_choice": {"function": {"name": "x"}}}, "names 'x'; the tools are"),
        ({**OWN, "tool_choice": {"function": {"name": "x"}}}, "names 'x'; the tools are lookup"),
        ({**GSM8K, "question": 3}, "`question` must be a text"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "are not JSON",
        ),
    ],
)
def test_bad_rows_of_every_form_are_reported_with_file_and_line(
    folder: Path, row: object, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        tasks(folder, OWN, row)
    assert (
        caught.value.message.startswith(f"{folder}/data/train.jsonl:2: ")
        and words in caught.value.message
    )


def test_a_form_may_be_said(folder: Path) -> None:
    with pytest.raises(DataError, match="needs the field 'problem'"):
        normal({"prompt": []}, "math")
    (folder / "rows.jsonl").write_text(json.dumps({**GSM8K, "prompt": "p", "id": "1"}) + "\n")
    with_data(folder, train={"path": "rows.jsonl", "form": "gsm8k", "limit": 1})
    assert load_pack(folder).tasks("train")[0].data["answer"] == "1002"


# --- places ----------------------------------------------------------------------------------------------------------


def test_json_files(folder: Path) -> None:
    (folder / "data" / "train.json").write_text(json.dumps([MESSAGES, OWN]))
    (folder / "data" / "test.json").write_text(json.dumps({"version": 1, "data": [GSM8K, 3]}))
    pack = load_pack(folder)
    assert pack.splits() == ["train", "test"] and len(pack.tasks("train")) == 2
    with pytest.raises(DataError, match=r"data/test\.json:2: a row must be a JSON object"):
        pack.tasks("test")
    (folder / "data" / "train.json").write_text('[{"a": 1},\n"b')
    with pytest.raises(
        DataError, match=r"train\.json:2: not JSON: Untermin\w+ string starting at column"
    ):
        load_pack(folder).tasks("train")


def test_parquet_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    one = {**OWN, "extra_info": {"index": 0, "tools_kwargs": {"lookup": {"a": "5"}}}}
    other = {**OWN, "extra_info": {"tools_kwargs": {"other": {"create_kwargs": {"a": 1}}}}}
    parquet.write_table(pyarrow.Table.from_pylist([one, other]), folder / "data" / "train.parquet")
    first, second = load_pack(folder).tasks("train")
    assert (
        first.data["extra_info"] == one["extra_info"]
    )  # fields of the other row are not nulls of this one
    assert second.data["extra_info"] == other["extra_info"]
    (folder / "data" / "train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"train\.parquet cannot be read as parquet"):
        load_pack(folder).tasks("train")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    with pytest.raises(MissingDependency) as caught:
        load_pack(folder).tasks("train")
    assert "agentrl-cli[data]" in caught.value.hint


def test_a_dataset_of_the_hub(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps(GSM8K) + "\n")
    with_data(
        folder,
        train={"hub": str(tmp_path / "set"), "split": "train"},
        test={"hub": "no-one/nothing-here"},
    )
    assert load_pack(folder).tasks("train")[0].data["answer"] == "1002"
    with pytest.raises(
        EnvironmentProblem, match=r"no-one/nothing-here cannot be reached"
    ) as caught:
        load_pack(folder).tasks("test")
    assert "save its rows as JSONL or parquet" in caught.value.hint


def test_a_dataset_that_was_saved_to_disk(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([GSM8K, {**GSM8K, "answer": "#### 7"}])
    rows.save_to_disk(str(folder / "alone"))
    bad = datasets.Dataset.from_list([GSM8K, {"question": "Where is the answer?"}])
    datasets.DatasetDict({"train": rows, "bad": bad}).save_to_disk(str(folder / "all"))
    with_data(
        folder,
        train={"hub": "alone"},
        test={"hub": "all", "split": "train"},
        bad={"hub": "all", "split": "bad"},
        none={"hub": "all", "split": "tset"},
    )
    pack = load_pack(folder)
    for split in ("train", "test"):
        assert [task.data["answer"] for task in pack.tasks(split)] == ["1002", "7"]
    with pytest.raises(DataError, match=r"hub all:2: "):
        pack.tasks("bad")
    with pytest.raises(NotFound, match=r"No split of all named 'tset'"):
        pack.tasks("none")


def test_without_datasets_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(MissingDependency, match="needs the package `datasets`"):
        list(Source("hub", "a/b", folder).rows())


ROWS = """
import random

class Rows:
    def __init__(self, size=3):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"prompt": f"row {index}"}

class Closed(Rows):
    def __init__(self):
        raise OSError("no such server")

class Listed(Rows):
    def __iter__(self):
        return iter([{"prompt": "a"}, 5])

def fresh(seed, low=0):
    rng = random.Random(seed)
    while True:
        yield {"prompt": f"Say {rng.randint(low, 999)}."}

def short(seed):
    yield {"prompt": "only"}
    raise RuntimeError("no more")
"""


# What `data` says of a split, and the rows' questions, or what is wrong.
SOURCES: dict[str, tuple[Any, list[str] | tuple[type[Exception], str]]] = {
    "generated": (
        {"generate": "fresh", "seed": 7, "count": 3, "args": {"low": 900}},
        ["Say 941.", "Say 919.", "Say 950."],
    ),
    "another seed": (
        {"generate": "fresh", "seed": 8, "count": 3, "args": {"low": 900}},
        ["Say 929.", "Say 947.", "Say 948."],
    ),
    "a class": ({"dataset": "task.py:Rows", "args": {"size": 2}}, ["row 0", "row 1"]),
    "a row that is none": (
        {"dataset": "Listed"},
        (DataError, "dataset Listed:2: a row must be a mapping"),
    ),
    "a generator that raises": (
        {"generate": "short", "count": 2},
        (EnvError, "short raised RuntimeError: no more"),
    ),
    "a class that raises": (
        {"dataset": "Closed"},
        (EnvError, "Closed raised OSError: no such server"),
    ),
    "an argument that is none": ({"dataset": "Rows", "args": {"sice": 4}}, (ConfigError, "sice")),
    "another file": (
        "rows.xlsx",
        (ConfigError, r"rows are read from \.jsonl, \.json, \.parquet"),
    ),
    "a missing file": ("missing.jsonl", (NotFound, r"missing\.jsonl")),
    "no path": (3, (ConfigError, "must be a path, or have one of")),
    "two places": (
        {"path": "a.jsonl", "hub": "b"},
        (ConfigError, "must be a path, or have one of"),
    ),
    "a key that is none": ({"path": "a.jsonl", "seed": 1}, (ConfigError, "unknown keys: seed")),
    "a form that is none": (
        {"path": "a.jsonl", "form": "verk"},
        (ConfigError, "No form named 'verk'"),
    ),
    "no rows": (
        {"path": "a.jsonl", "limit": 0},
        (ConfigError, "`limit` must be a number above 0"),
    ),
    "no count": ({"generate": "g"}, (ConfigError, "`count` is missing")),
}


@pytest.mark.parametrize(("source", "wanted"), SOURCES.values(), ids=SOURCES)
def test_where_rows_come_from(
    folder: Path, source: Any, wanted: list[str] | tuple[type[Exception], str]
) -> None:
    with (folder / "task.py").open("a") as file:
        file.write(ROWS)
    with_data(folder, train=source)
    if isinstance(wanted, tuple):
        with pytest.raises(wanted[0], match=wanted[1]):
            load_pack(folder).tasks("train")
    else:
        pack = load_pack(folder)
        assert [task.prompt[-1]["content"] for task in pack.tasks("train")] == wanted
        # a longer run begins with the same rows
        assert pack.tasks("train", limit=1) == pack.tasks("train")[:1]


def test_nulls_of_columnar_files() -> None:
    assert as_json({"a": None, "b": [{"c": None, "d": 1}, None]}) == {"b": [{"d": 1}, None]}


@pytest.fixture
def pack_folder(tmp_path: Path) -> Path:
    return shutil.copytree(packs_dir() / "echo-task", tmp_path / "echo-task")


def test_read_gives_good_rows_and_every_bad_line(pack_folder: Path) -> None:
    others = [{**GOOD, "id": "b", "tools": []}, GOOD, {**GOOD, "id": "c", "family": 1}]
    path = write(pack_folder, GOOD, "", "{", *others, {**GOOD, "id": "d", "answer": None})
    path.write_bytes(path.read_bytes() + b'{"id": "\xff"}\n')
    tasks, bad = load_pack(pack_folder).read("train")
    assert [task.data["id"] for task in tasks] == ["a", "b"]
    assert [line.number for line in bad] == [3, 5, 6, 7, 8]
    assert bad[1] == BadLine(5, "the id 'a' is also in line 1.") and bad[4].text.startswith(
        "not UTF-8"
    )
    assert bad[3].text == "the row lacks answer."
    with pytest.raises(DataError) as caught:
        load_pack(pack_folder).tasks("train")
    assert caught.value.hint.startswith("5 rows are invalid")
    subprocess.run(bad[4].text[bad[4].text.index("iconv -f") :], shell=True, check=True)
    assert "train-utf8" not in load_pack(pack_folder).splits()
    assert [line.number for line in load_pack(pack_folder).read("train")[1]] == [3, 5, 6, 7, 8]


def test_rows_of_a_script_are_checked_too() -> None:
    rewards = [Reward("exact", lambda episode, ctx: 1.0)]
    pack = Pack.of("mine", [GSM8K, OWN], rewards)  # of any form
    assert [task.prompt[-1]["content"] for task in pack.tasks("train")] == ["How many?", "Say a."]
    with pytest.raises(DataError, match=r"the pack mine, row 2: the row lacks prompt\."):
        Pack.of("mine", [{"prompt": "a"}, {}], rewards).tasks("train")


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
