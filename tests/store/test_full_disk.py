"""Disks that are full or read-only, real ones: one sentence that says which, exit status 3, and no traceback."""

import ctypes
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.train import spawn, write_model, write_project

NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000
RECURSIVE, PRIVATE, BIND, REMOUNT, READ_ONLY = 1 << 14, 1 << 18, 1 << 12, 1 << 5, 1
NOT_ALLOWED = 77


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        print(f"{name}: {os.strerror(number)}", flush=True)
        os._exit(NOT_ALLOWED)


def _own_mounts() -> None:
    """A mount namespace for this process, and one of users where it is not root's."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEW_MOUNTS if user == 0 else NEW_MOUNTS | NEW_USERS)
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)


def small(folder: str, spare: int) -> None:
    """For a process that starts: what `folder` holds on a disk of its own, with `spare` KiB left."""
    _own_mounts()
    with tempfile.TemporaryDirectory() as aside:
        shutil.copytree(folder, aside, dirs_exist_ok=True)
        files = [path for path in Path(aside).rglob("*") if path.is_file()]
        pages = sum(-(-path.stat().st_size // 4096) for path in files)
        _call(
            "mount",
            b"none",
            os.fsencode(folder),
            b"tmpfs",
            0,
            f"size={4 * pages + spare}k".encode(),
        )
        shutil.copytree(aside, folder, dirs_exist_ok=True)


def read_only(folder: str) -> None:
    """For a process that starts: `folder` cannot be written to, by root neither."""
    _own_mounts()
    place = os.fsencode(folder)
    _call("mount", place, place, None, BIND, None)
    _call("mount", place, place, None, BIND | REMOUNT | READ_ONLY, None)
    os.chdir(folder)  # the same place on the new mount


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_model(tmp_path_factory.mktemp("model") / "random")
    train = {"steps": 2, "save_every": 1, "keep_last": 9}
    project = write_project(tmp_path_factory.mktemp("full") / "project", model, train=train)
    code, output = spawn(project, "train")
    assert code == 0, output
    (project / "small").mkdir()
    return project


def sentence(found: tuple[int, str]) -> str:
    code, output = found
    if code == NOT_ALLOWED:
        pytest.skip(f"no file system may be mounted here: {output}")
    assert code == 3, output
    assert (
        "Traceback" not in output
        and "Something went wrong" not in output
        and "never retrieved" not in output
    ), output
    assert output.lower().count("disk is") == 1, output
    (line,) = (line for line in output.splitlines() if line.startswith("Error: "))
    return line.removeprefix("Error: ")


@pytest.mark.parametrize(
    ("command", "folder", "spare", "what"),
    [
        ("train --resume last --steps 40", "runs", 20, "the store"),
        ("train --resume last --steps 40", "runs", 300, "the checkpoint"),
        ("merge last@2 small/out", "small", 30, "small/out"),
        ("db backup small/copy.db", "small", 30, "the store small/copy.db"),
        ("db prune --what half --keep= --yes", "runs", 0, "the store"),
        ("db vacuum", "runs", 0, "the store"),
    ],
)
def test_a_full_disk_is_one_sentence(
    trained: Path, command: str, folder: str, spare: int, what: str
) -> None:
    output = sentence(spawn(trained, *command.split(), before=partial(small, folder, spare)))
    assert output.startswith(f"The disk is full: {what}") and output.endswith(
        "could not be written."
    )


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("train", "the store"),
        ("train --resume last --steps 3", ""),
        ("merge last@2 small/out", "small/out"),
        ("init code-task small/new", "small/new"),
        ("runs rename last other", "the store"),
        ("db vacuum", "the store"),
        ("db backup small/copy.db", "the store small/copy.db"),
    ],
)
def test_a_read_only_disk_is_called_that(trained: Path, command: str, what: str) -> None:
    output = sentence(spawn(trained, *command.split(), before=partial(read_only, str(trained))))
    assert output.startswith(f"The disk is read-only: {what}") and output.endswith(
        "could not be written."
    )
