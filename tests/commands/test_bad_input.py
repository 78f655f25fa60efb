"""What users get wrong, and small things that the command line said wrongly: a message, a hint, and nothing lost."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_cli import Episode, Outcome, Task, load_pack
from agentrl_cli.errors import NotFound, RunFailed
from agentrl_cli.registry import resolve
from agentrl_cli.store import RunRow, Store
from agentrl_cli.trainer.resume import wait_for_run
from tests.helpers.cli import Cli
from tests.helpers.train import (
    PAD,
    TASK_PY,
    episodes_of,
    write_model,
    write_pack,
    write_project,
)


@pytest.fixture
def trainable(cli: Cli, tmp_path: Path, model: Path) -> Path:
    cli.folder = write_project(tmp_path / "project", model)
    return cli.folder


def store_of(trainable: Path) -> Store:
    return Store.open(trainable / "runs" / "agentrl.db", readonly=True)


@pytest.mark.parametrize("command", ["train", "rollout", "eval"])
def test_no_configuration(tmp_path: Path, cli: Cli, command: str) -> None:
    cli(command, code=2, said=("No configuration", "agentrl init"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", b"{", "cannot be loaded"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b'{"model_type": "\xff"}', "config.json cannot be read"),
        ("config.json", b'{"model_type": "no-such-architecture"}', "cannot be loaded"),
        ("model.safetensors", b"nonsense", "corrupt"),
        ("model.safetensors", None, "cannot be loaded"),
        ("model.safetensors", "half", "again"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer_config.json", b"{", "not JSON"),
        ("chat_template.jinja", None, "no chat template"),
        ("chat_template.jinja", b"{% for m in messages %}", "template"),
    ],
)
def test_a_corrupt_model_folder(
    trainable: Path, model: Path, cli: Cli, file: str, content: bytes | str | None, said: str
) -> None:
    shutil.copytree(model, trainable / "broken")
    broken = trainable / "broken" / file
    whole = broken.read_bytes()
    broken.unlink()
    if content is not None:
        broken.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    cli("train", "--model", "broken", code=2, said=said)
    with store_of(trainable) as store:
        assert store.runs.all() == [], "a run that could not begin is none"


def test_a_tokenizer_of_another_model(trainable: Path, model: Path, cli: Cli) -> None:
    shutil.copytree(model, trainable / "broken")
    path = trainable / "broken" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["G"] = 9999
    path.write_text(json.dumps(data))
    cli("train", "--model", "broken", code=1, said="okenizer")


def test_a_new_process_whose_store_is_still_being_made(tmp_path: Path) -> None:
    """`train --watch` in a fresh project looks at a file that exists but is not a store yet."""
    db, log = tmp_path / "agentrl.db", tmp_path / "log"
    log.write_text("it broke\n")
    process: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: None)

    def make() -> None:
        db.touch()
        time.sleep(0.3)
        with Store.open(db) as store:
            store.runs.add(RunRow(id="x", name="fox", pid=process.pid))

    maker = threading.Thread(target=make)
    maker.start()
    assert wait_for_run(process, "x", db, log).name == "fox"
    maker.join()
    process.poll = lambda: 1
    with pytest.raises(RunFailed, match="it broke"):
        wait_for_run(process, "y", db, log)


def test_episodes_that_do_not_exist_and_no_terminal(trainable: Path, cli: Cli) -> None:
    cli("train", "--steps", "1")
    with store_of(trainable) as store:
        (run,) = store.runs.all()
        episode = episodes_of(store, run)[0].id
    typo = episode[:-1] + ("0" if episode[-1] != "0" else "1")
    for args in (("replay", typo), ("show", typo), ("replay", typo, "--plain")):
        assert cli(*args, code=2, said=(typo, "Did you mean", episode[:9])) == ""
    cli("replay", "zzz", code=2, said="agentrl ls")
    cli("replay", "last", "--run", "bandit-gpro", code=2, said=run.name)
    cli("train", "--resume", "bandit-gpro", code=2, said=run.name)
    cli("eval", "--checkpoint", f"{run.name}@7", code=2, said=("7", "last"))
    with store_of(trainable) as store:
        assert len(store.runs.all()) == 1, "nothing was evaluated before the mistake was found"
    # Without a terminal the screens print the same as text.
    for words, text in (
        (["replay", episode], episode),
        (["watch", run.name, "--once"], "step 1"),
        (["watch"], "step 1"),
    ):
        out = cli(*words)
        assert text in out and "\x1b" not in out
    cli("runs", "delete", "bandit-grpo", code=1, said="--yes")
    with store_of(trainable) as store:
        assert [row.name for row in store.runs.all()] == [run.name], (
            "a question without a terminal is answered with no"
        )


def test_a_reward_function_that_always_raises(tmp_path: Path, model: Path, cli: Cli) -> None:
    trainable = cli.folder = tmp_path / "project"
    write_pack(trainable, code=TASK_PY.replace("    return ctx.part(", "    return ctx.parts("))
    write_project(trainable, model, train={"steps": 50})
    cli("train", code=1, said=("AttributeError", "agentrl replay last"))
    with store_of(trainable) as store:
        (run,) = store.runs.all()
        assert run.status in ("failed", "stopped") and run.step < 5
        assert {e.outcome for e in episodes_of(store, run)} == {Outcome.ENV_ERROR}
    cli("rollout", "-n", "2", code=1, said=("No episode could be graded (of 2)", "AttributeError"))
    cli("eval", code=1, said=("No attempt could be graded (of 24)", "AttributeError"))
    with store_of(trainable) as store:
        assert [run.status for run in store.runs.all() if run.kind == "eval"] == ["failed"]


def test_a_model_that_says_nothing_but_padding(trainable: Path, tmp_path: Path, cli: Cli) -> None:
    write_project(trainable, write_model(tmp_path / "padding", only=PAD))
    cli("train")
    with store_of(trainable) as store:
        (run,) = store.runs.all()
        episodes = episodes_of(store, run)
        assert (run.status, len(episodes)) == ("finished", 16)
        for episode in episodes:
            said = episode.tokens.ids[episode.tokens.trained_mask]
            assert said.tolist() == [PAD] * 4, "every token of it is stored"
            assert episode.fact == "skipped:no_signal: all rewards of the group are equal"
        assert "stop" in {alert["name"] for alert in store.journal.folded_alerts(run.id)}
        assert all(row["frac_reward_zero_std"] == 1 for row in store.runs.steps(run.id))
    cli("replay", "last")


@pytest.mark.parametrize("limit", [96, 4096], ids=["rollout.max_tokens", "context"])
def test_prompts_longer_than_the_context(tmp_path: Path, model: Path, cli: Cli, limit: int) -> None:
    cli.folder = tmp_path / "project"
    write_pack(cli.folder, rows=2, prompt="long " * 60 + "{n}")
    write_project(cli.folder, model, rollout={"max_tokens": limit}, train={"steps": 50})
    cli("train", code=1, said=("too_long", "does not fit"))
    with store_of(cli.folder) as store:
        (run,) = store.runs.all()
        for episode in episodes_of(store, run):
            reason = (episode.outcome, episode.fact)
            assert reason == (Outcome.TOO_LONG, "skipped:limit: the prompt is too long")
            assert len(episode.tokens) > 300 and not episode.trained_tokens
            assert not episode.reward_parts
    assert "too_long" in cli("rollout", "-n", "1", code=1)


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
    cli("check", "x" * 5000, code=2, said="A path is longer than this system allows")


def test_settings_for_a_finished_run_are_not_dropped_in_silence(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    write_project(tmp_path, model, train={"steps": 1, "eval_every": 1, "eval_tasks": 1})
    cli("train", said=("evaluating the base on 1 task …", "step 1: sampling 8 episodes …"))
    cli("train", "--resume", "last", said="nothing left to do")
    assert "Not applied" not in cli.err
    more = ("--set", "train.save.every=7", "--lr", "0.5")
    dropped = "Not applied, since no steps are left: train.save.every=7, train.lr=0.5"
    cli("train", "--resume", "last", *more, said=dropped)


SMALL = [
    word
    for one in (
        "rollout.group_size=2",
        "rollout.prompts_per_step=2",
        "rollout.max_new_tokens=16",
        "train.eval=0",
    )
    for word in ("--set", one)
]


def test_a_project_whose_folders_name_is_not_utf8(cli: Cli) -> None:
    cli.folder /= os.fsdecode(b"caf\xe9")
    try:
        cli.folder.mkdir()
    except (OSError, UnicodeError):
        pytest.skip("this file system takes no such names")
    cli("init", "calc-task", ".")
    for path in cli.folder.glob("data/*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    for command in (
        ["check", "--rollouts", "1"],
        ["train", *SMALL, "--set", "train.steps=1"],
        ["train", "--resume", "last", *SMALL, "--set", "train.steps=2"],
        ["eval", "--limit", "1", "-k", "1", "--set", "rollout.max_new_tokens=8"],
        ["ls", "--json"],
        ["show", "last"],
        ["db", "status", "--json"],
    ):
        cli(*command)


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    prompt = ({"role": "user", "content": "Grüße, 日本, 🙂"},)
    with Store.open(db) as store:
        store.tasks.add([Task("t", "p", "", "train", prompt, {})])
        store.episodes.add([Episode("e" * 26, "t", outcome=Outcome.FAILED, error="für nichts")])

    def said(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl_cli", *command, "--db", str(db)],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode("ascii")

    assert r"f\u00fcr nichts" in said("show", "last")
    found: Any = json.loads(said("ls", "--json"))
    assert "für nichts" in json.dumps(found, ensure_ascii=False)
