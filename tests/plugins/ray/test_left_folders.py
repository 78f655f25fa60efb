"""The folder with the workers' weights does not outlive a run that was killed, however it was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentrl_cli.config import Config
from agentrl_cli.plugins.ray.processes import open_links
from agentrl_cli.sandbox import owner

DRIVER = """
from pathlib import Path
from agentrl_cli.plugins.ray.processes import open_links
from agentrl_cli.config import Config
with open_links(Config.model_validate({"cluster": {"kind": "processes", "workers": 1}}), Path()) as (links, save):
    save.args[0].joinpath("m@1.safetensors").write_bytes(b"weights")
    print(save.args[0], flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, for this process and those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def driver() -> tuple[subprocess.Popen[str], Path]:
    """A run with workers, and where their weights are."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_weights_of_a_killed_run_go_at_the_next_start(temporary: Path) -> None:
    killed, left = driver()
    alive, kept = driver()
    try:
        killed.kill()
        killed.communicate()
        assert left.parent == temporary and left.joinpath("m@1.safetensors").is_file()
        foreign = temporary / left.name.replace(
            owner._machine(), "-00000000-"
        )  # of a machine that shares the folder
        link = temporary / left.name.replace(left.name[-8:], "aaaaaaaa")
        foreign.mkdir()
        link.symlink_to(foreign)
        config = Config.model_validate({"cluster": {"kind": "processes", "workers": 1}})
        with open_links(config, temporary):
            assert not left.exists()
        assert kept.is_dir() and foreign.is_dir() and link.is_symlink()
    finally:
        alive.communicate("\n")
    assert not kept.exists()
