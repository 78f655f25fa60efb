"""Small things that the command line said wrongly, or not at all."""

from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat_session.session import save
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.registry import resolve
from agentrl_cli.store import Store
from agentrl_cli.tasks import load_pack
from agentrl_cli.tools.configured import load_tools
from agentrl_cli.tui.common.plain_text import align_rows
from tests.helpers.cli import Cli
from tests.helpers.train import TASK_YAML, write_pack, write_project
from tests.tui.test_chat import session


def test_an_empty_split(tmp_path: Path, model: Path, cli: Cli) -> None:
    write_project(tmp_path, model)
    cli("check", code=1)  # tasks of two splits are the same
    assert "has no rows" not in cli.err
    for name in ("test", "train"):
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n")
    cli("check", code=1, said=("the split train has no rows", "the split test has no rows"))
    assert not cli("rollout", code=2, said="No tasks in split train")
    with Store.open(tmp_path / "runs" / "agentrl.db", readonly=True) as store:
        assert not store.runs.all()
    for command in ("train", "eval"):
        cli(command, code=2, said="Error: ")


def test_replay_prints_json(tmp_path: Path, model: Path, cli: Cli) -> None:
    write_project(tmp_path, model)
    cli("rollout", "-n", "2")
    shown = cli.json("show", "last")
    assert cli.json("replay", "last") == cli.json("replay", shown["id"]) == shown
    assert cli.json("replay") == shown
    rows = cli("replay", "last", "--tokens", "--json").splitlines()
    assert len(rows) == len(cli.json("show", "last", "--tokens")["tokens"]["ids"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "primary: true",
            "primary: maybe",
            "rewards.even: `primary` must be true or false, not 'maybe'",
        ),
        ("primary: true", "primary: 1", "`primary` must be true or false"),
        ("weight: 1.0", "weight: lots", "rewards.even: `weight` must be a number, not 'lots'"),
        ("weight: 1.0", "weight: true", "`weight` must be a number"),
        ("weight: 1.0", "weight: .nan", "`weight` must be a number"),
        ("{weight: 0.0}", "true", "`weight` must be a number"),
        ("{weight: 0.0}", "words", "rewards.length must be a weight or a mapping"),
        ("sandbox: false", "sandbox: maybe", "sandbox must be true, false"),
        ("sandbox: false", "sandbox: false\nfamilies: 5", "`families` must be a mapping"),
        ("sandbox: false", "sandbox: false\nfamilies: {train: even}", "must map splits to lists"),
        ("sandbox: false", "sandbox: false\ndefaults: [1]", "`defaults` must be a mapping"),
        ("sandbox: false", "sandbox: false\ndata: 5", "`data` must be a mapping"),
    ],
)
def test_a_task_yaml_means_what_it_says(tmp_path: Path, old: str, new: str, said: str) -> None:
    write_pack(tmp_path / "pack")
    load_pack(tmp_path / "pack")
    assert old in TASK_YAML
    (tmp_path / "pack" / "task.yaml").write_text(TASK_YAML.replace(old, new))
    with pytest.raises(ConfigError) as error:
        load_pack(tmp_path / "pack")
    assert said in error.value.message


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("pure", "maybe", "a valid boolean"),
        ("external", 1, "a valid boolean"),
        ("timeout", "soon", "a valid number"),
        ("rate", 0, "greater than 0"),
        ("concurrency", True, "a valid integer"),
    ],
)
def test_limits_of_a_tool_are_what_they_say(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    load_tools([{"name": "calculator", "pure": True, "timeout": 3}], tmp_path)
    with pytest.raises(ConfigError, match=f"tool 1.{key}: Input should be {said}"):
        load_tools([{"name": "calculator", key: value}], tmp_path)


def test_a_name_that_does_not_exist_is_a_sentence(tmp_path: Path) -> None:
    for kind, one in (("losses", "loss"), ("policies", "policy"), ("hooks", "hook")):
        with pytest.raises(NotFound, match=f"^No {one} named 'foo'"):
            resolve(kind, {}, "foo")
    write_pack(tmp_path / "pack")
    (tmp_path / "pack" / "data" / "train.jsonl").write_text('{"id": "a", "prompt": "x"}\n')
    with pytest.raises(NotFound) as error:
        load_pack(tmp_path / "pack").tasks("train", families=["foo"])
    assert error.value.hint == "None exist."
    assert NotFound.of("thing", "a", [], hint="Make one.").hint == "None exist. Make one."


def test_a_missing_task_yaml_is_named(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "agentrl.yaml").write_text("task: {packs: [.]}\n")
    for args in (("check",), ("check", "."), ("train",), ("rollout",), ("init", ".", "new")):
        cli(*args, code=2, said=f"{tmp_path} has no task.yaml")
    cli("check", "./nowhere", code=2, said="nowhere does not exist")
    cli("check", "calc-tsk", code=2, said="Did you mean calc-task")


def test_settings_for_a_finished_run_are_not_dropped_in_silence(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    write_project(tmp_path, model, train={"steps": 1})
    cli("train")
    cli("train", "--resume", "last", said="nothing left to do")
    assert "Not applied" not in cli.err
    more = ("--set", "train.save.every=7", "--lr", "0.5")
    dropped = "Not applied, since no steps are left: train.save.every=7, train.lr=0.5"
    cli("train", "--resume", "last", *more, said=dropped)


async def test_a_call_by_hand_is_saved(tmp_path: Path) -> None:
    made, _ = session(["hi", "ho"])
    await made.begin()
    await made.user("?")
    await made.call("calculator", {"expression": "6*7"})
    await made.call("calculator", {"nope": 1})
    with Store.open(tmp_path / "s.db") as store:
        saved = save(made, store)
        first, second = store.episodes.row(saved).note.splitlines()
        assert first == "by hand before turn 2: calculator(expression='6*7') → 42"
        assert second.startswith("by hand before turn 2: calculator(nope=1) → bad_arguments")
        store.marks.note(saved, f"mine\n{first}\n{second}")
        await made.user("again")
        await made.call("calculator", {"expression": "1+1"})
        await made.undo()  # the third call came after what is taken back
        save(made, store)
        assert store.episodes.row(saved).note == f"mine\n{first}\n{second}"
        assert len(store.episodes.get(saved).turns) == 2


def test_columns_are_aligned_where_a_character_is_two_cells_wide() -> None:
    lines = list(align_rows(["name", "steps"], [["数学", 1], ["calc", 22]]))
    assert lines == ["name  steps", "数学      1", "calc     22"]
