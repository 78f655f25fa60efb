"""What users get wrong, one by one, through the command line: an exit code, a message, a hint, and nothing lost."""

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from agentrl_cli.errors import RunFailed
from agentrl_cli.store import RunRow, Store
from agentrl_cli.trainer.resume import wait_for_run
from agentrl_cli.types import Outcome
from tests.helpers.cli import Cli
from tests.helpers.train import PAD, TASK_PY, episodes_of, write_model, write_pack, write_project


@pytest.fixture
def project(cli: Cli, tmp_path: Path, model: Path) -> Path:
    cli.folder = write_project(tmp_path / "project", model)
    return cli.folder


def store_of(project: Path) -> Store:
    return Store.open(project / "runs" / "agentrl.db", readonly=True)


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "rollout", "eval"])
def test_no_configuration(tmp_path: Path, cli: Cli, command: str) -> None:
    cli(command, code=2, said=("No configuration", "agentrl init"))
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
    cli("train", code=2, said=said)
    assert not (project / "runs").exists()


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_missing_model(project: Path, cli: Cli) -> None:
    cli("train", "--model", "./no-such-model", code=2, said=("no-such-model", "--model tiny"))
    (project / "empty").mkdir()
    cli("train", "--model", "empty", code=2, said="config.json")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", b"{", "cannot be loaded"),
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
    project: Path, model: Path, cli: Cli, file: str, content: bytes | str | None, said: str
) -> None:
    shutil.copytree(model, project / "broken")
    broken = project / "broken" / file
    whole = broken.read_bytes()
    broken.unlink()
    if content is not None:
        broken.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    cli("train", "--model", "broken", code=2, said=said)
    with store_of(project) as store:
        assert store.runs.all() == [], "a run that could not begin is none"


def test_a_tokenizer_of_another_model(project: Path, model: Path, cli: Cli) -> None:
    """Its ids go beyond the embedding."""
    shutil.copytree(model, project / "broken")
    path = project / "broken" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["G"] = 9999
    path.write_text(json.dumps(data))
    cli("train", "--model", "broken", code=1, said="okenizer")


# --- data and the store ----------------------------------------------------------------------------------------------


def test_a_row_that_fails_its_schema(project: Path, cli: Cli) -> None:
    path = project / "data" / "train.jsonl"
    path.write_text(path.read_text() + '{"id": "train0", "prompt": "p"}\n')
    cli("train", code=2, said=(f"{path}:7", "line 1"))


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
        *(("ls",), ("replay", "last"), ("show", "last"), ("watch",)),
        ("train", "--resume", "last"),
    ):
        cli(*args, code=2, said="agentrl train")
    assert not (project / "runs").exists()


# --- episodes and terminals ------------------------------------------------------------------------------------------


def test_episodes_that_do_not_exist_and_no_terminal(project: Path, cli: Cli) -> None:
    cli("train", "--steps", "1")
    with store_of(project) as store:
        (run,) = store.runs.all()
        episode = episodes_of(store, run)[0].id
    typo = episode[:-1] + ("0" if episode[-1] != "0" else "1")
    for args in (("replay", typo), ("show", typo), ("replay", typo, "--plain")):
        assert cli(*args, code=2, said=(typo, "Did you mean", episode[:9])) == ""
    cli("replay", "zzz", code=2, said="agentrl ls")
    cli("replay", "last", "--run", "bandit-gpro", code=2, said=run.name)
    cli("train", "--resume", "bandit-gpro", code=2, said=run.name)
    cli("eval", "--checkpoint", f"{run.name}@7", code=2, said=("7", "last"))
    with store_of(project) as store:
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
    with store_of(project) as store:
        assert [row.name for row in store.runs.all()] == [run.name], (
            "a question without a terminal is answered with no"
        )


# --- what the model and the rewards do -------------------------------------------------------------------------------


def test_a_reward_function_that_always_raises(tmp_path: Path, model: Path, cli: Cli) -> None:
    """Nothing is graded: the run ends by itself instead of sampling for hours."""
    project = cli.folder = tmp_path / "project"
    write_pack(project, code=TASK_PY.replace("    return ctx.part(", "    return ctx.parts("))
    write_project(project, model, train={"steps": 50})
    cli("train", code=1, said=("AttributeError", "agentrl replay last"))
    with store_of(project) as store:
        (run,) = store.runs.all()
        assert run.status in ("failed", "stopped") and run.step < 5
        assert {e.outcome for e in episodes_of(store, run)} == {Outcome.ENV_ERROR}
    cli("eval", code=1, said=("could be graded", "AttributeError"))


def test_a_model_that_says_nothing_but_padding(project: Path, tmp_path: Path, cli: Cli) -> None:
    write_project(project, write_model(tmp_path / "padding", only=PAD))
    cli("train")
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
    cli("replay", "last")


@pytest.mark.parametrize("limit", [96, 4096], ids=["rollout.max_tokens", "context"])
def test_prompts_longer_than_the_context(tmp_path: Path, model: Path, cli: Cli, limit: int) -> None:
    """Where none fits, the run ends by itself and says why. The model's own context has 256 positions."""
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
