"""The frame of the command line: help, completion, errors, exit codes, old names, stdout for data.

What users get wrong, and small things that the command line said wrongly: a message, a hint, and nothing lost.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

from agentrl_cli import Episode, Outcome, RewardPart, __version__
from agentrl_cli.commands import commands, load_command, main
from agentrl_cli.commands.boundary import report
from agentrl_cli.commands.common import data_stdout, echo, echo_json, echo_jsonl
from agentrl_cli.commands.renamed import COMMANDS, OPTIONS, translate
from agentrl_cli.errors import GateNotMet, NotFound, StoreError
from agentrl_cli.store import RunRow, Store
from tests.helpers.cli import Cli
from tests.helpers.processes import ROOT, run_code
from tests.helpers.train import (
    spawn,
    start,
    write_project,
)


def run(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", "agentrl_cli", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=full, check=False)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agentrl.yaml").write_text("train:\n  lr: 0.5\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_project_without_runs_names_the_next_command(project: Path, cli: Cli) -> None:
    said = "This project has no runs yet: `agentrl train --watch` starts the first."
    assert said in cli()
    (project / "agentrl.yaml").write_text("store: [")
    page = cli()
    assert said not in page and "Usage: agentrl" in page
    (project / "agentrl.yaml").write_text("train: {}\n")
    Store.open(project / "runs" / "agentrl.db").close()
    assert said not in cli()


@pytest.mark.parametrize(
    "begin",
    [
        "from agentrl_cli.commands import main; main(['show', '--words'])",
        "from agentrl_cli import Config",
    ],
)
def test_threads_sleep_while_they_wait(begin: str) -> None:
    """OpenMP reads its variables when torch loads: before that they stand, whichever command or name comes first."""
    code = f"{begin}; import os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    assert run_code(code, env=bare).stdout.splitlines()[-1] == "PASSIVE False"


def test_the_front_page_names_every_command(cli: Cli) -> None:
    page = cli()
    assert page == cli("--help") == cli("-h")
    for name, (panel, _, text) in commands().items():
        assert f"\n  {name} " in page and text in page and f"\n{panel}\n" in page
    assert max(map(len, page.splitlines())) <= 110
    assert cli("--version") == f"agentrl {__version__}\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "Did you mean train"),
        (["--verbos"], "No such option: --verbos"),
        (["config", "show", "--nope"], "No such option: --nope"),
        (["config", "shwo"], "show"),
        (["config", "show", "train.lrr"], "train.lr"),
        (["init", "cod-task"], "code-task"),
        (["ls", "chekpoints"], "Did you mean checkpoints?"),
        (["ls", "run"], "Did you mean runs?"),
        (["db", "bakup"], "backup"),
        (["init"], "No pack given."),
    ],
)
def test_a_mistake_is_exit_2_with_the_nearest(
    args: list[str], words: str, cli: Cli, project: Path
) -> None:
    assert cli(*args, code=2, said=words) == ""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (NotFound.of("run", "a", ["ab"]), 2, "No run named 'a'.\nDid you mean ab?"),
        (StoreError("locked"), 3, "locked"),
        (GateNotMet("0.3 < 0.4"), 4, "0.3 < 0.4"),
        (KeyboardInterrupt(), 130, "Interrupted"),
        (typer.Abort(), 130, "Interrupted"),
        (ModuleNotFoundError("x", name="wandb"), 3, "wandb is not installed"),
    ],
)
def test_errors_become_messages(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == code
    assert words in capsys.readouterr().err


def test_an_unexpected_error_leaves_its_traceback_in_a_log(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise ValueError("first line\nsecond")
    except ValueError as error:
        assert report(error) == 1
    err = capsys.readouterr().err
    (log,) = (project / "runs" / "logs").iterdir()
    assert "ValueError: first line\n" in err and str(log) in err and "Traceback" not in err
    assert "Traceback" in log.read_text() and __version__ in log.read_text()


def test_debug_shows_the_traceback(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "agentrl.yaml").write_text("trian: 1\n")
    for debug, shown in (("", False), ("1", True)):
        monkeypatch.setenv("AGENTRL_DEBUG", debug)
        assert main(["config", "validate"]) == 2
        assert ("Traceback" in capsys.readouterr().err) is shown


SCHEMA = [sys.executable, "-m", "agentrl_cli", "config", "schema"]


def test_a_full_disk_is_a_message() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(SCHEMA, stdout=full, stderr=-1, text=True, cwd=ROOT, check=False)
    first, *rest = done.stderr.splitlines()
    assert (done.returncode, first, len(rest)) == (3, "Error: The disk is full.", 1)


def test_a_closed_pipe_is_quiet() -> None:
    with subprocess.Popen(SCHEMA, stdout=-1, stderr=-1, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


def test_config_show_validate_and_schema(project: Path, cli: Cli) -> None:
    shown = cli.json("config", "show", "--set", "train.steps=3")
    assert shown["train.lr"] == {"value": 0.5, "source": f"file:{project}/agentrl.yaml:2"}
    assert shown["train.steps"] == {"value": 3, "source": "--set"}
    assert shown["seed"]["source"] == "default"
    changed = cli("config", "show", "train", "--changed")
    assert changed.split() == ["train.lr", "0.5", "agentrl.yaml:2"]
    assert "train" in json.loads(cli("config", "schema"))["properties"]
    cli("config", "validate")
    named = ("agentrl.yaml", "--project", ".")
    cli("config", "validate", *named, code=2, said="--project does nothing with")
    (project / "agentrl.yaml").write_text("train:\n  stepz: 1\n")
    cli("config", "validate", code=2, said="agentrl.yaml:2: unknown key train.stepz")


def test_completion_knows_the_commands() -> None:
    done = run(_AGENTRL_COMPLETE="complete_bash", COMP_WORDS="agentrl r", COMP_CWORD="1")
    assert done.stdout.split() == [name for name in commands() if name.startswith("r")]


def test_data_stdout_keeps_others_out(capfd: pytest.CaptureFixture[str]) -> None:
    with data_stdout():
        print("a tool prints")
        os.write(1, b"and a child process\n")
        echo_json({"a": 1})
    echo("after")
    said = ('{\n  "a": 1\n}\nafter\n', "a tool prints\nand a child process\n")
    assert tuple(capfd.readouterr()) == said


def test_json_is_plain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:

    echo_jsonl(
        [
            {
                "part": RewardPart("a", 0.5),
                "path": tmp_path,
                "n": np.float32(1.5),
                "bad": float("nan"),
                "t": (1,),
            }
        ]
    )
    row = json.loads(capsys.readouterr().out)
    assert row["part"]["value"] == 0.5 and row["path"] == str(tmp_path) and row["n"] == 1.5
    assert row["bad"] is None and row["t"] == [1]


def test_episodes_of_a_dead_run_are_interrupted(tmp_path: Path, cli: Cli) -> None:
    db = tmp_path / "a.db"
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with Store.open(db) as store:
        for name, pid in (("dead", process.pid), ("alive", os.getpid())):
            store.runs.add(RunRow(id=name, name=name, pid=pid))
            for kind in ("train", "eval"):
                store.episodes.start(
                    Episode(f"{name}-{kind}", "t", run_id=name, step=1, group_id=kind, kind=kind)
                )

    def outcomes() -> dict[str, str]:
        lines = cli("ls", "--format", "csv", "--db", str(db)).splitlines()[1:]
        return {line.split(",")[0]: line.split(",")[5] for line in lines}

    dead = {"dead-train": "interrupted", "dead-eval": "interrupted"}
    assert outcomes() == {**dead, "alive-train": "running", "alive-eval": "running"}
    for name, state in (("dead-train", "interrupted"), ("alive-train", "running")):
        assert f"\n{state}   reward" in cli("show", name, "--db", str(db))
    with Store.open(db) as store:
        assert store.episodes.cancel("dead") == 2
        rows = [store.episodes.row(name) for name in dead]
    assert [(row.outcome, row.fact) for row in rows] == [
        (Outcome.CANCELLED, "skipped:unused: cancelled"),
        (Outcome.CANCELLED, ""),
    ]


def test_counts_that_no_memory_holds_are_refused_with_their_limit(project: Path, cli: Cli) -> None:
    for words in ("rollout -g 65537", "eval -k 65537", "train -g 65537", "sft OUT -g 65537"):
        cli(*words.split(), code=2, said="65536")
    for key in ("rollout.prompts_per_step", "rollout.group_size", "eval.k", "train.eval.samples"):
        cli("config", "show", "--set", f"{key}=65537", code=2, said=f"{key}: Input should be less")


@pytest.mark.parametrize(
    ("args", "packs", "reported"),
    [
        (
            ["-n", "5"],
            ["echo-task", "calc-task"] * 2 + ["echo-task"],
            "5 episodes of scripted, 1 at each of 5 tasks of train …",
        ),
        (
            ["-n", "5", "--set", "task.limit=2"],
            ["echo-task", "calc-task"] * 2,
            "has 4 tasks under task.limit; 5 were",
        ),
    ],
)
def test_rollout_takes_packs_in_turn(
    args: list[str], packs: list[str], reported: str, project: Path, cli: Cli
) -> None:
    rows = json.loads(
        cli(
            *(
                "rollout",
                "--model",
                "scripted",
                "--json",
                "--pack",
                "echo-task",
                "--pack",
                "calc-task",
            ),
            *args,
            said=reported,
        )
    )["episodes"]
    assert cli.err.startswith("Loading torch and scripted …\n")
    assert len(packs) < 5 or "were requested" not in cli.err
    tasks = [row["task"] for row in rows]
    assert [task.split("/")[0] for task in tasks] == packs and len(set(tasks)) == len(packs)
    listed = {row["id"]: row for row in cli.json("ls", "--limit", "0")}
    for row in rows:
        same = [listed[row["id"]][name] for name in ("n_turns", "n_tokens", "n_model_tokens")]
        assert [row[name] for name in ("turns", "tokens", "sampled")] == same


@pytest.mark.parametrize(
    ("args", "count"), [([], 3), (["--limit", "4"], 4), (["--set", "eval.limit=2"], 2)]
)
def test_eval_heeds_the_limit_of_tasks(
    args: list[str], count: int, project: Path, cli: Cli
) -> None:
    base = "eval --model scripted -k 1 --pack echo-task --split test --compare-to none".split()
    assert cli.json(*base, "--set", "task.limit=3", *args)["settings"]["tasks"] == count


def test_every_help_has_two_examples_and_describes_every_option(cli: Cli) -> None:
    groups = {name: load_command(name) for name in commands()}
    inner = {
        f"{name} {part}": child
        for name, command in groups.items()
        for part, child in getattr(command, "commands", {}).items()
    }
    for path, command in {**groups, **inner}.items():
        page = cli(*path.split(), "--help")
        examples = re.findall(r"^ +agentrl ", page.partition("Examples:")[2], re.MULTILINE)
        assert len(examples) >= 2 and "<bool>" not in page and "install-completion" not in page
        assert (command.help or "").strip(), f"{path} has no docstring"
        shown = re.sub(r"[\s│]", "", page)
        assert [
            part
            for part in re.findall(r"\[[^\[]+\]", command.help)
            if re.sub(r"\s", "", part) not in shown
        ] == []
        for parameter in command.params:
            assert parameter.help or parameter.name == "help", f"{path} {parameter.name}"


def complete(command: str, name: str, incomplete: str) -> list[str]:
    """The words that a shell offers for a parameter of a command."""
    found = load_command(command)
    (parameter,) = (one for one in found.params if one.name == name)
    return [item.value for item in parameter.shell_complete(typer.Context(found), incomplete)]


def test_completion_of_runs_episodes_checkpoints_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete("watch", "run", "") == [] and "last" in complete("replay", "episode", "")
    (tmp_path / "agentrl.yaml").write_text("train: {}\n")
    with Store.open(tmp_path / "runs" / "agentrl.db") as store:
        run = store.runs.add(RunRow(id="", name="first", kind="train"))
        store.episodes.add(
            [Episode("1m82d1n8xp7zet", "t/1", run_id=run.id, outcome=Outcome.SOLVED)]
        )
    for command, name, begun, wanted in (
        ("watch", "run", "f", ["first"]),
        ("show", "name", "f", ["first"]),
        ("eval", "checkpoint", "first@b", ["first@best"]),
        ("replay", "episode", "1m", ["1m82d1n8xp7zet"]),
        ("train", "sets", "train.zz", []),
        ("init", "pack", "code", ["code-task"]),
        ("ls", "filter", "flag:LOOP -rew", ["flag:LOOP -reward:"]),
    ):
        assert complete(command, name, begun) == wanted
    assert "train.lr=" in complete("train", "sets", "train.l")
    (tmp_path / "agentrl.yaml").write_text("store: [")
    assert complete("watch", "run", "") == []


OLD = {
    "query": "--param 1 -n 5 --timeout 3 --schema --format csv --json -p . --db a.db 'select ?'",
    "grep": "-i --role tool -f outcome:failed -r fox -n 3 -l --json -p . --db a.db pattern",
    "runs": "--json -p . --db a.db",
    "runs list": "--json -p . --db a.db",
    "runs rename": "fox hare --json -p . --db a.db",
    "runs delete": "fox hare -y --keep-files --force --json -p . --db a.db",
    "bench": "-m tiny --endpoint a@http://b --svg a.svg -k 2 -n 3 -T 0.5 --resume --seed 1 -p . --db a.db"
    " -c a.yaml --set train.lr=1 --json math",
    "report": "fox -o a.html --format html --force --no-mask --json -p . --db a.db",
    "rescore": "fox --set rewards.a=1 --reward a=b.py:c --advantage rloo -f step:1 --name a --no-keep -n 3"
    " -p . --db a.db --json",
    "words": "LOOP --json",
    "sandbox attack": "--level ns --json",  # --only chose among the 88 programs, which are the tests' now
    "eval --checkpoint": "best --json",
    "eval --families": "a,b --json",
    "export --html": "-o a.html",
    "sft --teacher-model": "big --teacher http://a out",
}


def test_the_table_is_tested() -> None:
    assert OLD.keys() == COMMANDS.keys() | {f"{name} {option}" for name, option in OPTIONS}


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_parses_with_all_its_options(old: str) -> None:
    words, said = translate(shlex.split(f"{old} {OLD[old]}"), load_command)
    command, rest = load_command(words[0]), words[1:]
    if hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    given = command.make_context(words[0], rest).params
    assert said.startswith(f"`agentrl {old}` is now `agentrl {words[0]}") and "\n" not in said
    first = {"query": ("sql", "select ?"), "grep": ("grep", "pattern"), "bench": ("bench", "math")}
    name, value = first.get(old, ("", None))
    assert given.get(name) == value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("grep -n 3 -- -x", "ls -n 3 --grep=-x"),
        ("query - --json", "ls --sql=- --json"),
        ("query --schema", "ls --schema"),
        ("grep --help", "ls --help"),
        ("grep", "ls --grep"),
        ("eval --families=a,b", "eval --set task.families=[a,b]"),
        ("chat --say query", "chat --say query"),
        ("ls", "ls"),
    ],
)
def test_the_first_argument_is_found_behind_options_and_dashes(old: str, new: str) -> None:
    words, said = translate(old.split(), load_command)
    assert words == new.split() and bool(said) == (old != new)


def test_an_old_name_runs_and_prints_one_line(cli: Cli) -> None:
    with Store.open(cli.folder / "a.db") as store:
        store.runs.add(RunRow("r", "fox", status="finished"))
    words = ("query", "select name from runs", "--format", "csv", "--db", "a.db")
    assert cli(*words) == "name\nfox\n"
    assert cli.err == "`agentrl query` is now `agentrl ls --sql`.\n"


def test_a_command_in_a_message_names_the_project_and_store_that_were_given(cli: Cli) -> None:
    cli("init", "echo-task", "my pack")
    at = ("--project", "my pack", "--db", "a b.db")
    where = "--project 'my pack' --db 'a b.db'"
    for words, code, said in (
        (
            ("rollout", "-n", "1", "--model", "scripted", *at),
            0,
            f"one: agentrl replay {where} last",
        ),
        (("replay", "last", "--plain", "--db", "a b.db"), 0, ""),
        (("train", "--resume", "last", *at), 2, f"`agentrl train {where}` starts"),
        (("ls", "--db", "none.db"), 2, "`agentrl rollout --db none.db` or `agentrl train"),
        (("ls", "--dbs", *at), 2, "`agentrl ls --help` lists"),
        (
            ("db", "prune", *at, "--yes", "--keep", ""),
            *(0, f"`agentrl db vacuum {where}` frees"),
        ),
    ):
        cli(*words, code=code, said=said)
    shown = cli("tools", "show", "calculator", *at[:2])
    assert "agentrl tools call --project 'my pack' calculator" in shown
    cli("train", "--resume", "last", code=2)
    assert "my pack" not in cli.err, "the place of an earlier command"


@pytest.mark.parametrize("module", ["typer", "pydantic"])  # before the boundary, and by Typer
def test_an_interrupt_of_an_import_ends_without_a_traceback(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    said = run("ls", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (said.returncode, said.stderr) == (130, "Error: Interrupted.\n")


def wait_for_lines() -> None:
    """Give this process an input in which nothing comes."""
    sys.stdin = os.fdopen(os.pipe()[0])


def test_an_interrupt_ends_a_model_that_loads_and_a_chat_that_reads(tmp_path: Path) -> None:
    (tmp_path / "agentrl.yaml").write_text("task: {packs: [echo-task]}\n")
    slow = "import pathlib, signal\ndef make(source):\n    signal.raise_signal(signal.SIGINT)\n"
    (tmp_path / "slow.py").write_text(slow + "    pathlib.Path('loaded').touch()\n")
    for words in (["rollout", "-n", "1"], ["serve", "--port", "0"]):
        code, said = spawn(tmp_path, *words, "--set", "remote.backend=slow.py:make")
        assert code == 130 and said.endswith("Error: Interrupted.\n")
        assert not (tmp_path / "loaded").exists(), "the first Ctrl-C waited for the model"
    words = ["chat", "--plain", "--model", "scripted"]
    chat = start(tmp_path, *words, before=wait_for_lines)
    chat.line("")
    os.kill(chat.process.pid, signal.SIGINT)
    assert chat.end()[0] == 130, "it waited for a line"


# --- what users get wrong: a message, a hint, and nothing lost ---


@pytest.fixture
def trainable(cli: Cli, tmp_path: Path, model: Path) -> Path:
    cli.folder = write_project(tmp_path / "project", model)
    return cli.folder


# --- the configuration -----------------------------------------------------------------------------------------------


# --- models ----------------------------------------------------------------------------------------------------------


# --- data and the store ----------------------------------------------------------------------------------------------


def test_mistakes_in_a_project_are_named(trainable: Path, cli: Cli) -> None:
    begins = ("ls", "replay last", "show last", "watch", "train --resume last")
    (trainable / "empty").mkdir()
    path = trainable / "data" / "train.jsonl"
    for words, *said in (
        *((words, "agentrl train") for words in begins),  # no store yet
        ("ls --db ~no-such-user/a.db", "A path begins with ~", "your own home"),
        ("show -p ~no-such-user/x", "A path begins with ~", "your own home"),
        ("train --model ./no-such-model", "no-such-model", "--model tiny"),
        ("train --model empty", "config.json"),
    ):
        cli(*words.split(), code=2, said=tuple(said))
        assert words not in begins or not (trainable / "runs").exists()
    path.write_text(path.read_text() + '{"id": "train0", "prompt": "p"}\n')
    cli("train", code=2, said=(f"{path}:7", "line 1"))


# --- episodes and terminals ------------------------------------------------------------------------------------------


# --- what the model and the rewards do -------------------------------------------------------------------------------


# --- folders whose names are not UTF-8, and terminals that can print ASCII alone ---
