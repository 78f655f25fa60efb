"""`agentrl init`: a pack becomes a project, and nothing that was there is lost."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_cli.commands.common import open_project
from agentrl_cli.commands.init import NOT_COPIED
from agentrl_cli.config import load_config
from agentrl_cli.doctor.sandbox import sandbox_level
from agentrl_cli.paths import find_pack, pack_names, packs_dir
from agentrl_cli.registry.plugins import spread_settings
from tests.helpers.cli import Cli


@pytest.fixture
def init(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs commands in `tmp_path`, for isolation by namespaces at least."""
    return Cli(capfd, tmp_path, "--min-level", "ns")


@pytest.mark.parametrize("pack", pack_names())
def test_every_pack_becomes_a_valid_project(pack: str, init: Cli) -> None:
    folder = init.folder / "mine"
    lines = [line.strip() for line in init("init", pack, "mine").splitlines()]
    assert lines == ["cd mine", "agentrl check", "agentrl train --watch"]
    for path in find_pack(pack).rglob("*"):
        inside = path.relative_to(find_pack(pack))
        if path.is_file() and NOT_COPIED.isdisjoint(inside.parts):
            assert (folder / inside).read_bytes() == path.read_bytes()
    project = open_project(folder)
    expected, _ = load_config(sets=[f"task.packs=[{pack}]"])
    own = Path(expected.model.name)  # the pack's adapter, or the bundled model
    assert project.config.task.packs == ["."] and project.config.model.name == own.name
    adapted = (folder / own.name / "adapter_config.json").is_file()
    whole = own.name in ("tiny", "tiny-tools") or (folder / own.name / "config.json").is_file()
    assert adapted or whole
    at = ("train", "--project", "mine")
    if adapted:
        train = "agentrl train --project mine --full --model merged"
        said = f"agentrl merge --project mine {own.name} merged && {train}"
        Cli(init.capture, init.folder)(*at, "--full", code=2, said=said)
    nothing = "The scripted policy has no weights."
    Cli(init.capture, init.folder)(*at, "--full", "--model", "scripted", code=2, said=nothing)
    assert project.config.rollout == expected.rollout and project.config.train == expected.train
    assert "#" in (folder / "agentrl.yaml").read_text().splitlines()[0]


def test_another_model_gets_an_adapter_and_a_weaker_sandbox_is_written_down(
    init: Cli, cli: Cli, tmp_path: Path
) -> None:
    init("init", "echo-task", "model", "--model", "Qwen/Qwen2.5-0.5B-Instruct")
    config = open_project(tmp_path / "model").config
    assert config.model.name == "Qwen/Qwen2.5-0.5B-Instruct" and config.adapter.enabled
    assert config.rollout.max_new_tokens == 256
    cli("init", "echo-task", "p", "--min-level", "bare")
    sandbox = open_project(tmp_path / "p").config.sandbox
    pinned = "bare" if sandbox_level()[0] == "bare" else "auto"
    assert (sandbox.backend, sandbox.min_level) == (pinned, "bare")
    assert pinned == "bare" or "backend" not in (tmp_path / "p" / "agentrl.yaml").read_text()
    cli("init", "echo-task", "q", "--min-level", "nns", code=2)
    cli("init", "echo-task", "q", "--python", "x", code=2, said="--python does nothing without")
    idle = "--min-level does nothing with --blank or --from"
    cli("init", "--blank", "q", "--min-level", "ns", code=2, said=idle)


def test_files_that_differ_are_kept_unless_forced(init: Cli) -> None:
    folder = init.folder / "p"
    for _ in range(2):  # the same again changes nothing
        reported = init.json("init", "echo-task", "p")
        assert reported["project"] == "p" and "agentrl.yaml" in reported["files"]
    (folder / "task.py").write_text("mine = 1\n")
    (folder / "task.yaml").unlink()
    init("init", "echo-task", "p", code=2, said="task.py")
    assert (folder / "task.py").read_text() == "mine = 1\n" and not (folder / "task.yaml").exists()
    init("init", "echo-task", "p", "--force")
    assert (folder / "task.py").read_text() != "mine = 1\n"
    (init.folder / "file").touch()
    init("init", "echo-task", "file", code=2, said="is a file")


def test_a_project_is_a_pack_that_can_be_copied_again_and_packs_are_listed(init: Cli) -> None:
    init("init", "echo-task", "a")
    (init.folder / "a" / "runs").mkdir()
    (init.folder / "a" / "runs" / "agentrl.db").touch()
    init("init", "./a", "b")
    assert (init.folder / "b" / "task.py").exists() and not (init.folder / "b" / "runs").exists()
    assert [row["name"] for row in init.json("init", "--list")] == pack_names()


# As in a container that forbids user namespaces: an ordinary user, and no namespace can be made
# below.
WITHOUT_NAMESPACES = """
echo 0 > /proc/sys/user/max_user_namespaces
exec setpriv --inh-caps=-all --ambient-caps=-all --bounding-set=-all "$@"
"""
JAIL = "unshare -U --map-user=1000 --map-group=1000 --keep-caps sh -c".split()
# Commands one after the other in one process: what each printed, and its exit status.
SEVERAL = """
import json, os, sys
from agentrl_cli.commands import main
for number, words in enumerate(json.loads(sys.argv[1])):
    for file in (1, 2):
        os.dup2(os.open(f"{number}.{file}", os.O_CREAT | os.O_WRONLY), file)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(f"{number}.0", "w") as status:
        status.write(str(code))
    if not number and not code:  # the first is refused, or the others would do what they are for
        break
"""


def test_where_only_weaker_isolation_is_to_be_had(tmp_path: Path) -> None:
    jail = [*JAIL, WITHOUT_NAMESPACES, "sh"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*jail, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no user namespace can be made here, so none can be forbidden in one")
    around = {
        **os.environ,
        "DOCKER_HOST": f"unix://{tmp_path}/none.sock",
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }
    (tmp_path / "hello.py").write_text("print('hello')")
    content = shutil.copytree(packs_dir() / "echo-task", tmp_path / "own") / "task.yaml"
    content.write_text(content.read_text() + "  sandbox: {min_level: landlock}\n")
    commands = [
        ["init", "echo-task", "refused"],
        ["demo"],
        ["init", "echo-task", "p", "--yes"],
        ["init", "own", "q"],
        # A minimum that is not met is an error wherever code would run, and never a fallback.
        ["sandbox", "run", "hello.py", "--set", "sandbox.min_level=ns"],
        ["sandbox", "run", "hello.py", "--project", "p"],
    ]
    line = [*jail, sys.executable, "-c", SEVERAL, json.dumps(commands)]
    subprocess.run(line, env=around, cwd=tmp_path, check=True)
    if "isolation than namespaces: landlock" not in (first := (tmp_path / "0.2").read_text()):
        pytest.skip(f"neither is Landlock to be had here: {first}")
    asked, demo, taken, own, refused, accepted = (
        [(tmp_path / f"{number}.{file}").read_text() for file in range(3)]
        for number in range(len(commands))
    )
    assert asked[0] == "2" and "To get a stronger one: " in asked[2] and "--yes" in asked[2]
    assert ("max_user_namespaces" if shutil.which("bwrap") else "Install bubblewrap") in asked[2]
    assert not (tmp_path / "refused").exists()
    assert demo[0] == "2" and "make demo WEAK=1" in demo[2] and "WEAK" not in asked[2]
    assert taken[0] == "0", taken
    assert open_project(tmp_path / "p").config.sandbox.min_level == "landlock"
    assert own[0] == "0", "strong enough for this pack"
    assert open_project(tmp_path / "q").config.sandbox.min_level == "landlock"
    assert refused[0] == "3" and "hello" not in refused[1] and "ns or stronger" in refused[2]
    assert accepted[:2] == ["0", "hello\n"] and "level landlock" in accepted[2]


def test_a_demo_that_ends_before_its_training_has_its_steps_the_next_time(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_MODEL__NAME", "none")
    cli("demo", "new", "--yes", code=2, said="none")
    text = (cli.folder / "new" / "agentrl.yaml").read_text()
    for line in ("steps: 40 ", "lr: 0.0006 ", "eval: 20 ", "loss: cispo ", "schedule: linear "):
        assert f"\n  {line}" in text, text


FAILING = """
from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.load import local_policy


def failing(source):
    policy = local_policy(source)
    sample = policy.generate

    async def generate(*args, **given):
        if policy.weights_version.endswith("@1"):
            raise PolicyError("broken on purpose")
        return await sample(*args, **given)

    policy.generate = generate
    return policy
"""


def test_the_demo_is_one_command_and_cut_short_it_names_what_continues_it(
    cli: Cli, init: Cli
) -> None:
    (cli.folder / "full").mkdir()
    (cli.folder / "full" / "file").touch()
    cli("demo", "full", code=2, said="is not a project")
    init("init", "echo-task", "my demo")
    project = cli.folder / "my demo"
    small: dict[str, object] = {
        "task": {"packs": ["."]},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_new_tokens": 16},
        "eval": {"limit": 1, "k": 1},
        "train": {"eval_every": 3, "save_every": 1, "steps": 3},
        "remote": {"backend": "fails.py:failing"},
        "cluster": {"worker_gpus": 0.5},
    }
    (project / "agentrl.yaml").write_text(json.dumps(small))
    (project / "fails.py").write_text(FAILING)
    if spread_settings():  # two processes, unless the project says otherwise
        cli("demo", "my demo", code=2, said="a process takes whole GPUs")
    cli("demo", "my demo", "--pack", "calc-task", code=2, said="--pack does nothing where my demo")
    small["cluster"] = {"worker_gpus": 0.5, "kind": "here"}
    (project / "agentrl.yaml").write_text(json.dumps(small))
    cli("demo", "my demo", code=1, said=("my demo is a project already", "broken on purpose"))
    assert "WEAK" not in cli.err
    line = cli.err.partition("It continues with: ")[2].splitlines()[0]
    subprocess.run(f"{line} --help", shell=True, stdout=-1, check=True, cwd="/")
    (project / "fails.py").write_text(FAILING.replace("@1", "@2"))
    _, folder, _, _, *words = shlex.split(line)
    Cli(cli.capture, Path(folder))(*words, code=1, said=("resumed at step 1", "step 2/3"))
    (project / "fails.py").write_text(FAILING.replace("@1", "@none"))
    out = cli("demo", "my demo", said=("resumed at step 2", "step 3/3"))
    assert "step 2/3" not in cli.err and "agentrl replay best" in out
