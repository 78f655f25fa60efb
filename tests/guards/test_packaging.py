"""What is installed works outside the checkout: wheel, sdist → wheel, editable. Without a network.

The fresh environments have no packages of their own: a .pth lends them those of the environment that runs the tests.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from agentrl_cli._version import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(kind: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = target.iterdir()
    return made


def fresh_venv(folder: Path) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run(
            [python, "-c", where], check=True, capture_output=True, text=True
        ).stdout.strip()
    )
    (site / "zz_lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def pip(python: Path, *args: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "--disable-pip-version-check",
        "install",
    ]
    # An editable install of the tests' own environment is lent, too, and must not count as the package being there.
    command += ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", *args]
    subprocess.run(command, check=True, capture_output=True)


def agentrl(python: Path, *args: str, cwd: Path) -> str:
    return output([python.parent / "agentrl", *args], cwd)


def output(command: list[str | Path], cwd: Path) -> str:
    """What a command prints, run without our environment's variables."""
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def where_is(python: Path, cwd: Path) -> tuple[Path, Path, Path]:
    code = "import agentrl_cli.paths as p; print(p.__file__, p.packs_dir(), p.sandbox_dir())"
    module, packs, sandbox = map(Path, output([python, "-c", code], cwd).split())
    return module, packs, sandbox


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_carries_packs_sandbox_and_model(wheel: Path) -> None:
    inside = names(wheel)
    for pack in ("code-task", "calc-task", "echo-task"):
        assert f"agentrl_cli/_data/tasks/{pack}/task.yaml" in inside
        assert f"agentrl_cli/_data/tasks/{pack}/task.py" in inside
    for file in (
        "main.py",
        "isolation/seccomp.py",
        "filesystem/files.py",
        "protocol/framing.py",
    ):
        assert f"agentrl_cli/_data/sandbox/{file}" in inside
    assert {
        "agentrl_cli/py.typed",
        "agentrl_cli/doctor/attacks.txt",
        "agentrl_cli/models/tiny-agent/config.json",
        "agentrl_cli/_data/tasks/calc-task/reference.json",
        *(f"{path.relative_to(ROOT)}" for path in ROOT.glob("agentrl_cli/plugins/*/curves/*.json")),
    } <= inside
    assert {name.split("/")[0] for name in inside} == {
        "agentrl_cli",
        f"agentrl_cli-{__version__}.dist-info",
    }
    assert not [name for name in inside if "__pycache__" in name or name.endswith((".db", ".pyc"))]
    assert not [name for name in inside if "tiny_tools" in name], "recipes/ is in the sdist alone"


def test_the_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    python = fresh_venv(tmp_path / "venv")
    pip(python, str(wheel))
    module, packs, sandbox = where_is(python, tmp_path)
    assert (
        module.is_relative_to(tmp_path)
        and packs.is_relative_to(tmp_path)
        and sandbox.is_relative_to(tmp_path)
    )
    assert agentrl(python, "--version", cwd=tmp_path) == f"agentrl {__version__}\n"
    agentrl(python, "init", "echo-task", "mine", "--min-level", "ns", cwd=tmp_path)
    assert (tmp_path / "mine" / "task.py").read_bytes() == (
        ROOT / "tasks" / "echo-task" / "task.py"
    ).read_bytes()
    command = [str(python.parent / "agentrl"), "sft", "out", "--recipe", "tiny-tools"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "recipes/tiny_tools of a checkout" in done.stderr


def test_an_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert names(build("wheel", source, tmp_path / "wheel")) == names(wheel)
    assert (source / "recipes" / "tiny_tools" / "recipe.py").is_file()


def test_an_editable_install_uses_the_checkout(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    skipped = (".git", ".venv", "runs", "demo", "__pycache__", "*_cache", "tiny-*", "tests", "data")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*skipped))
    python = fresh_venv(tmp_path / "venv")
    pip(python, "--editable", str(copy))
    module, packs, sandbox = where_is(python, tmp_path)
    assert (module.parent.parent, packs, sandbox) == (copy, copy / "tasks", copy / "sandbox")
    shutil.copytree(copy / "tasks" / "echo-task", copy / "tasks" / "new-task")
    assert "new-task" in agentrl(python, "init", "--list", cwd=tmp_path)


def test_every_dependency_is_pinned_once() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines) and "+" not in "".join(lines)
    assert pins["torch"] == "2.13.0"
    groups: list[list[str]] = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = [line for group in groups for line in group]
    bare = {re.split(r"[<>=\[]", line)[0].lower() for line in wanted} - {"agentrl-cli"}
    assert bare <= {name.lower() for name in pins}
