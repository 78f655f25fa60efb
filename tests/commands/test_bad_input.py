"""What users get wrong, one by one, through the command line: an exit code, a message, a hint, and nothing lost."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.errors import RunFailed
from agentrl_cli.store import RunRow, Store
from agentrl_cli.trainer.resume import wait_for_run
from agentrl_cli.types import Outcome
from tests.helpers.train import PAD, TASK_PY, episodes_of, write_model, write_pack, write_project

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Path:
    return write_project(tmp_path / "project", model)


@pytest.fixture
def cli(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli(project, ...)` runs a command there: (code, stdout, stderr), and never a traceback."""

    def call(folder: Path, *args: str) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        capfd.readouterr()
        code = main(list(args))
        done = capfd.readouterr()
        assert "Traceback" not in done.err + done.out and "Something went wrong" not in done.err, (
            done.err
        )
        if code in (2, 3):
            _, _, said = done.err.rpartition("Error: ")
            assert said.strip(), "what happened"
        return code, done.out, done.err

    return call


def store_of(project: Path) -> Store:
    return Store.open(project / "runs" / "agentrl.db", readonly=True)


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "rollout", "eval"])
def test_no_configuration(tmp_path: Path, cli: Cli, command: str) -> None:
    code, _, err = cli(tmp_path, command)
    assert code == 2 and "No configuration" in err and "agentrl init" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: {learning_rat: 1}", "train.learning_rat"),
        ("train: {steps: -3}", "train.steps"),
        ("train: [", "agentrl.yaml"),
    ],
)
def test_a_key_or_value_that_cannot_be(project: Path, cli: Cli, text: str, said: str) -> None:
    (project / "agentrl.yaml").write_text(text)
    code, _, err = cli(project, "train")
    assert code == 2 and said in err
    assert not (project / "runs").exists()


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_missing_model(project: Path, cli: Cli) -> None:
    code, _, err = cli(project, "train", "--model", "./no-such-model")
    assert code == 2 and "no-such-model" in err and "--model tiny" in err
    (project / "empty").mkdir()
    code, _, err = cli(project, "train", "--model", "empty")
    assert code == 2 and "config.json" in err


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", b"{", "cannot be loaded"),
        ("config.json", b'{"model_type": "no-such-architecture"}', "cannot be loaded"),
        ("model.safetensors", b"nonsense", "corrupt"),
        ("model.safetensors", None, "cannot be loaded"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer_config.json", b"{", "not JSON"),
        ("chat_template.jinja", None, "no chat template"),
        ("chat_template.jinja", b"{% for m in messages %}", "template"),
    ],
)
def test_a_corrupt_model_folder(
    project: Path, model: Path, cli: Cli, file: str, content: bytes | None, said: str
) -> None:
    broken = project / "broken"
    shutil.copytree(model, broken)
    (broken / file).unlink() if content is None else (broken / file).write_bytes(content)
    code, _, err = cli(project, "train", "--model", "broken")
    assert code == 2 and said in err, err
    with store_of(project) as store:
        assert store.runs.all() == [], "a run that could not begin is none"


def test_half_a_weight_file(project: Path, model: Path, cli: Cli) -> None:
    broken = project / "broken"
    shutil.copytree(model, broken)
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    code, _, err = cli(project, "train", "--model", "broken")
    assert code == 2 and "broken" in err and "again" in err, err


def test_a_tokenizer_of_another_model(project: Path, model: Path, cli: Cli) -> None:
    """Its ids go beyond the embedding: the message reports it, and the episodes are kept as cancelled."""
    broken = project / "broken"
    shutil.copytree(model, broken)
    data = json.loads((broken / "tokenizer.json").read_text())
    data["model"]["vocab"]["G"] = 9999
    (broken / "tokenizer.json").write_text(json.dumps(data))
    code, _, err = cli(project, "train", "--model", "broken")
    assert code in (1, 2) and "tokenizer" in err.lower(), err


# --- data ------------------------------------------------------------------------------------------------------------


def test_a_row_that_fails_its_schema(project: Path, cli: Cli) -> None:
    path = project / "data" / "train.jsonl"
    path.write_text(path.read_text() + '{"id": "train0", "prompt": "p"}\n')
    code, _, err = cli(project, "train")
    assert code == 2 and f"{path}:7" in err and "line 1" in err, err


# --- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [("train",), ("replay", "last")])
def test_a_store_from_a_newer_version(project: Path, cli: Cli, args: tuple[str, ...]) -> None:
    path = project / "runs" / "agentrl.db"
    with Store.open(path):
        pass
    with sqlite3.connect(path) as conn:
        conn.execute("PRAGMA user_version=999")
    conn.close()
    before = path.read_bytes()
    code, _, err = cli(project, *args)
    assert code == 3 and "newer" in err and "Upgrade" in err
    assert path.read_bytes() == before, "nothing was changed"


def test_a_store_that_is_none(project: Path, cli: Cli) -> None:
    path = project / "runs" / "agentrl.db"
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to have been one " * 20)
    for args in (("train",), ("ls",), ("replay", "last")):
        code, _, err = cli(project, *args)
        assert code == 3 and "agentrl.db" in err
    assert path.read_bytes().startswith(b"not a database")


def test_a_new_process_whose_store_is_still_being_made(tmp_path: Path) -> None:
    """`train --watch` in a fresh project looks at a file that exists but is not a store yet."""
    db, log = tmp_path / "agentrl.db", tmp_path / "log"
    log.write_text("it broke\n")
    process = subprocess.Popen(["sleep", "3600"])

    def make() -> None:
        db.touch()
        time.sleep(0.3)
        with Store.open(db) as store:
            store.runs.add(RunRow(id="x", name="fox", pid=process.pid))

    maker = threading.Thread(target=make)
    maker.start()
    try:
        assert wait_for_run(process, "x", db, log).name == "fox"
    finally:
        maker.join()
        process.kill()
        process.wait()
    with pytest.raises(RunFailed, match="it broke"):
        wait_for_run(process, "y", db, log)


def test_no_store_yet(project: Path, cli: Cli) -> None:
    for args in (
        ("ls",),
        ("replay", "last"),
        ("show", "last"),
        ("watch",),
        ("train", "--resume", "last"),
    ):
        code, _, err = cli(project, *args)
        assert code == 2 and "agentrl train" in err, args
    assert not (project / "runs").exists()


# --- episodes and terminals ------------------------------------------------------------------------------------------


def test_episodes_that_do_not_exist_and_no_terminal(project: Path, cli: Cli) -> None:
    assert cli(project, "train", "--steps", "1")[0] == 0
    with store_of(project) as store:
        (run,) = store.runs.all()
        episode = episodes_of(store, run)[0].id
    typo = episode[:-1] + ("0" if episode[-1] != "0" else "1")
    for args in (("replay", typo), ("show", typo), ("replay", typo, "--plain")):
        code, out, err = cli(project, *args)
        assert (
            code == 2 and typo in err and "Did you mean" in err and episode[:9] in err and out == ""
        )
    code, _, err = cli(project, "replay", "zzz")
    assert code == 2 and "agentrl ls" in err
    code, _, err = cli(project, "replay", "last", "--run", "bandit-gpro")
    assert code == 2 and run.name in err
    code, _, err = cli(project, "train", "--resume", "bandit-gpro")
    assert code == 2 and run.name in err
    code, _, err = cli(project, "eval", "--checkpoint", f"{run.name}@7")
    assert code == 2 and "7" in err and "last" in err
    with store_of(project) as store:
        assert len(store.runs.all()) == 1, "nothing was evaluated before the mistake was found"
    # Without a terminal the screens print the same as text.
    code, out, _ = cli(project, "replay", episode)
    assert code == 0 and episode in out and "\x1b" not in out
    code, out, err = cli(project, "watch", run.name, "--once")
    assert code == 0 and "step 1" in out and "\x1b" not in out
    code, out, err = cli(project, "watch")
    assert code == 0 and "step 1" in out


# --- what the model and the rewards do -------------------------------------------------------------------------------


def test_a_reward_function_that_always_raises(tmp_path: Path, model: Path, cli: Cli) -> None:
    """Nothing is graded: the run ends by itself instead of sampling for hours."""
    project = tmp_path / "project"
    write_pack(project, code=TASK_PY.replace("    return ctx.part(", "    return ctx.parts("))
    write_project(project, model, train={"steps": 50})
    code, _, err = cli(project, "train")
    assert code == 1 and "AttributeError" in err and "agentrl replay last" in err, err
    with store_of(project) as store:
        (run,) = store.runs.all()
        assert run.status in ("failed", "stopped") and run.step < 5
        assert {e.outcome for e in episodes_of(store, run)} == {Outcome.ENV_ERROR}
    code, _, err = cli(project, "eval")
    assert code == 1 and "could be graded" in err and "AttributeError" in err


def test_a_model_that_says_nothing_but_padding(tmp_path: Path, cli: Cli) -> None:
    folder = write_model(tmp_path / "padding", only=PAD)
    project = write_project(tmp_path / "project", folder)
    code, _, err = cli(project, "train")
    assert code == 0, err
    with store_of(project) as store:
        (run,) = store.runs.all()
        episodes = episodes_of(store, run)
        assert (run.status, len(episodes)) == ("finished", 16)
        for episode in episodes:
            said = episode.tokens.ids[episode.tokens.trained_mask]
            assert said.tolist() == [PAD] * 4, "every token of it is stored"
            assert episode.fact == "skipped:no_signal: all rewards of the group are equal"
        assert "stop" in {alert["name"] for alert in store.journal.alerts(run.id)}
        assert all(row["frac_reward_zero_std"] == 1 for row in store.runs.steps(run.id))
    assert cli(project, "replay", "last")[0] == 0


@pytest.mark.parametrize("limit", ["rollout.max_tokens", "context"])
def test_prompts_longer_than_the_context(tmp_path: Path, model: Path, cli: Cli, limit: str) -> None:
    """Where none fits, the run ends by itself and says why."""
    project = tmp_path / "project"
    write_pack(project, rows=2, prompt="long " * 60 + "{n}")
    long = (
        96 if limit == "rollout.max_tokens" else 4096
    )  # the model's own context has 256 positions
    write_project(project, model, rollout={"max_tokens": long}, train={"steps": 50})
    code, _, err = cli(project, "train")
    assert code == 1 and "too_long" in err and "does not fit" in err, err
    with store_of(project) as store:
        (run,) = store.runs.all()
        for episode in episodes_of(store, run):
            assert (episode.outcome, episode.fact) == (
                Outcome.TOO_LONG,
                "skipped:limit: the prompt is too long",
            )
            assert (
                len(episode.tokens) > 300
                and episode.trained_tokens == 0
                and not episode.reward_parts
            )
    code, out, _ = cli(project, "rollout", "-n", "1")
    assert code == 1 and "too_long" in out


def test_a_question_without_a_terminal_is_answered_with_no(project: Path, cli: Cli) -> None:
    assert cli(project, "train", "--steps", "1")[0] == 0
    code, _, err = cli(project, "runs", "delete", "bandit-grpo")
    with store_of(project) as store:
        assert [run.name for run in store.runs.all()] == ["bandit-grpo"]
    assert code == 1 and "--yes" in err
