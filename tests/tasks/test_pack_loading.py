"""Packs as folders and from scripts: what they become, and what a mistake in one says. Rows are in test_tasks."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import AgentRLError, ConfigError, EnvError, NotFound
from agentrl_cli.paths import pack_names
from agentrl_cli.rewards import Reward
from agentrl_cli.tasks import Pack, load_pack, load_packs
from agentrl_cli.types import Task

YAML = """\
name: words
description: Say a word.
system: Be brief.
sandbox: false
tools: [calculator, shout]
rewards:
  exact: {weight: 2.0, primary: true}
  brief: 0.5
families: {train: [one], heldout: [two]}
defaults: {train: {lr: 3.0e-4}}
"""
CODE = """\
def shout(text: str) -> str:
    '''Shout.

    Args:
        text: What.
    '''
    return text.upper()


def exact(episode, ctx):
    return float(ctx.final_text == ctx.task.data["answer"])


def brief(episode, ctx):
    return 1.0


def solve(row):
    return [{"role": "assistant", "content": row["answer"]}]


REWARDS = {"exact": exact, "brief": brief}
TOOLS = [shout]
"""
ROWS: list[dict[str, Any]] = [
    {"id": "a", "family": "one", "prompt": "Say ant.", "answer": "ant"},
    {
        "id": "b",
        "family": "two",
        "prompt": [{"role": "user", "content": "Say bee."}],
        "answer": "bee",
    },
    {"id": "c", "family": "one", "prompt": "Say cow.", "answer": "cow", "tools": ["shout"]},
    {
        "id": "d",
        "family": "one",
        "prompt": [{"role": "system", "content": "Own."}, {"role": "user", "content": "D"}],
    },
]


def write(folder: Path, yaml: str = YAML, code: str = CODE) -> Path:
    (folder / "data").mkdir(parents=True)
    (folder / "task.yaml").write_text(yaml)
    (folder / "task.py").write_text(code)
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def test_a_pack(tmp_path: Path) -> None:
    pack = load_pack(write(tmp_path / "words"))
    assert (pack.name, pack.description, pack.system, pack.sandbox) == (
        "words",
        "Say a word.",
        "Be brief.",
        False,
    )
    assert [schema["function"]["name"] for schema in pack.schemas] == ["calculator", "shout"]
    assert [(r.name, r.weight, r.primary) for r in pack.rewards] == [
        ("exact", 2.0, True),
        ("brief", 0.5, False),
    ]
    assert pack.primary == "exact" and pack.defaults == {"train": {"lr": 3e-4}}
    assert [r.weight for r in pack.reweight({"brief": 0.0})] == [2.0, 0.0]


def test_rows_become_tasks(tmp_path: Path) -> None:
    pack = load_pack(write(tmp_path / "words"))
    a, b, c, d = pack.tasks("train")
    assert (a.id, a.pack, a.family, a.split) == ("words/a", "words", "one", "train")
    assert a.prompt == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say ant."},
    )
    assert b.prompt[0]["role"] == "system" and b.prompt[1]["content"] == "Say bee."
    assert d.prompt[0]["content"] == "Own."  # its own system message stays
    assert a.data["answer"] == "ant" and a.data["prompt"] == "Say ant."  # a text
    assert [tool.name for tool in pack.tools_of(a)] == ["calculator", "shout"]
    assert [tool.name for tool in pack.tools_of(c)] == ["shout"]
    assert pack.solution(a) == [{"role": "assistant", "content": "ant"}]
    assert pack.tasks("train", families=["two"]) == [b] and pack.tasks("train", limit=2) == [a, b]
    with pytest.raises(NotFound, match="'tow'"):
        pack.tasks("train", families=["tow"])
    with pytest.raises(NotFound, match="'trian'") as caught:
        pack.tasks("trian")
    assert "train" in caught.value.hint
    with pytest.raises(NotFound, match="'shuot'"):
        pack.tools_of(Task("x", "words", "", "train", (), tools=("shuot",)))


def test_a_pack_in_a_script() -> None:
    def right(episode: Any, ctx: Any) -> float:
        return 1.0

    pack = Pack.of(
        "mine",
        [{"prompt": "p"}, {"prompt": "q", "id": "own"}],
        [Reward("right", right)],
        tools=["submit"],
    )
    assert [task.id for task in pack.tasks("train")] == [
        "mine/0000",
        "mine/own",
    ] and pack.primary == "right"
    assert [task.split for task in pack.tasks("test")] == ["test", "test"]
    for rewards in ([], [Reward("a", right), Reward("b", right)]):
        with pytest.raises(ConfigError, match="exactly one primary"):
            Pack.of("mine", [{"prompt": "p"}], rewards)
    with pytest.raises(ConfigError, match="no `solve"):
        pack.solution(pack.tasks("train")[0])


@pytest.mark.parametrize("name", pack_names())
def test_packs_that_ship(name: str) -> None:
    pack = load_pack(name)
    assert pack.description and pack.rewards and (pack.dir / "README.md").is_file()
    # What makes two tasks with one prompt two: set-up code, and what a pack says its world is made of.
    world = ("setup", *getattr(pack.module, "WORLD", ()))
    asked = [
        {repr((t.prompt, [t.data.get(key) for key in world])) for t in pack.tasks(split)}
        for split in ("train", "test")
    ]
    assert all(asked)
    if name != "echo-task":
        assert not asked[0] & asked[1], "what is evaluated was never trained on"


def test_the_code_pack_is_as_large_as_promised() -> None:
    pack = load_pack("code-task")
    assert len(pack.tasks("train")) >= 400 and len(pack.tasks("test")) >= 150
    heldout = {task.family for task in pack.tasks("heldout")}
    assert heldout and not heldout & {task.family for task in pack.tasks("train")}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (("tools:", "tool:"), ConfigError, "tools"),
        (("calculator", "calculater"), NotFound, "calculator"),
        (("primary: true", "primary: false"), ConfigError, "exactly one"),
        (("primary: true", "primry: true"), ConfigError, "primry"),
        (("exact:", "exakt:"), NotFound, "exact"),
        (("brief: 0.5", "brief: {primary: true}"), ConfigError, "exactly one"),
        (("name: words", "name: [words"), ConfigError, "task.yaml:2: expected"),
    ],
)
def test_a_bad_task_yaml(
    tmp_path: Path, change: tuple[str, str], error: type[AgentRLError], says: str
) -> None:
    folder = write(tmp_path / "words", yaml=YAML.replace(*change))
    with pytest.raises(error) as caught:
        load_pack(folder)
    assert says in caught.value.message + caught.value.hint


def test_code_that_fails_is_named_with_its_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "words", code="x = 1\ny = x.nothing\n")
    with pytest.raises(EnvError, match=r"task\.py:2: AttributeError"):
        load_pack(folder)
    (folder / "task.py").unlink()
    with pytest.raises(NotFound, match=r"task\.py"):
        load_pack(folder)


def test_names_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "words")
    assert (
        load_pack("./words", base=tmp_path).name
        == load_pack(".", base=tmp_path / "words").name
        == "words"
    )
    with pytest.raises(NotFound) as caught:
        load_pack("calc-tsk")
    assert "calc-task" in caught.value.hint
    assert list(load_packs(["echo-task", "./words"], base=tmp_path)) == ["echo-task", "words"]
    with pytest.raises(ConfigError, match="Two packs are named 'words'"):
        load_packs(["./words", "words"], base=tmp_path)


def test_a_packs_own_limits_of_the_sandbox(tmp_path: Path) -> None:
    assert load_pack(write(tmp_path / "none")).session == {}
    some = YAML.replace("sandbox: false", "sandbox: {wall: 10, memory_mb: 2048, imports: [numpy]}")
    pack = load_pack(write(tmp_path / "some", some))
    assert pack.sandbox and dict(pack.session) == {
        "wall": 10.0,
        "memory_mb": 2048,
        "imports": ("numpy",),
    }
    assert pack.open_session(None) is None
