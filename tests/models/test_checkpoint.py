"""A checkpoint is whole or not there, wherever the process that wrote it was killed."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import ModelError, StoreError, UsageError
from agentrl_cli.models import checkpoint
from agentrl_cli.models.checkpoint import (
    load_state,
    replace_folder,
    save_checkpoint,
    sweep,
    whole,
    written_whole,
)
from agentrl_cli.models.output_lock import writing


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def fake(folder: Path, text: str = "") -> Path:
    folder.mkdir(parents=True)
    for name in ("trainer.pt", "config.json", "model.safetensors"):
        (folder / name).write_text(text)
    return folder


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_a_failed_save_keeps_the_one_before(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "last"
    save_checkpoint(folder, model_of(model), model, {"step": 1})

    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="disk is full"):
        save_checkpoint(folder, Full(), model, {"step": 2})  # type: ignore[arg-type]  # a model of which only this is used
    assert names(tmp_path) == ["last"] and load_state(folder) == {"step": 1}


def test_sweeping_puts_back_what_was_aside_and_deletes_the_rest(tmp_path: Path, dead: int) -> None:
    fake(tmp_path / "last", "new")
    fake(tmp_path / f".last.old-{dead}", "old")  # killed while the old one was deleted
    fake(tmp_path / f".best.old-{dead}", "best")  # killed between the two renames
    fake(tmp_path / f".best.partial-{dead}")
    (tmp_path / f".step-000004.partial-{dead}").mkdir()  # killed while it was written
    (tmp_path / f".step-000002.old-{dead}").mkdir()  # not whole: nothing to put back
    fake(tmp_path / f".step-000006.partial-{os.getppid()}")  # another process is writing it
    (tmp_path / ".cache-1").mkdir()  # not one of this project's
    sweep(tmp_path)
    assert names(tmp_path) == [".cache-1", f".step-000006.partial-{os.getppid()}", "best", "last"]
    assert (tmp_path / "best" / "trainer.pt").read_text() == "best"
    assert (tmp_path / "last" / "trainer.pt").read_text() == "new"
    sweep(tmp_path / "missing")


def test_saving_sweeps(model: Path, tmp_path: Path, dead: int) -> None:
    fake(tmp_path / f".last.old-{dead}")
    fake(tmp_path / f".step-000004.partial-{dead}")
    save_checkpoint(tmp_path / "best", model_of(model), model, {"step": 1})
    assert names(tmp_path) == ["best", "last"]


class Fatal:
    """Stands in for shutil: deletes one file of a folder, and kills this process."""

    def rmtree(self, path: Path, **rest: Any) -> None:
        if Path(path).exists():
            next(Path(path).iterdir()).unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def replace_and_die(new: Path, place: Path) -> None:
    checkpoint.shutil = Fatal()  # type: ignore[assignment,attr-defined]
    replace_folder(new, place)


def test_the_place_is_never_a_torn_folder(tmp_path: Path) -> None:
    folders = fake(tmp_path / "next", "new"), fake(tmp_path / "last", "old")
    process = multiprocessing.get_context("fork").Process(target=replace_and_die, args=folders)
    process.start()
    process.join()
    assert process.exitcode == -9
    assert whole(tmp_path / "last") and (tmp_path / "last" / "trainer.pt").read_text() == "new"
    sweep(tmp_path)
    assert names(tmp_path) == ["last"]


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path) -> None:
    old = fake(tmp_path / "last", "old")
    with pytest.raises(OSError):
        replace_folder(tmp_path / "never written", old)
    assert names(tmp_path) == ["last"] and (old / "config.json").read_text() == "old"


def test_another_model_s_weights_do_not_stay_in_a_folder_that_is_written_into(
    tmp_path: Path,
) -> None:
    folder = fake(tmp_path / "out", "old")
    for name in (
        "adapter_config.json",
        "adapter_model.safetensors",
        "model-00002-of-00002.safetensors",
        "notes.txt",
    ):
        (folder / name).write_text("old")
    with written_whole(folder, keep=True) as beside:
        for name in ("config.json", "model.safetensors"):
            (beside / name).write_text("new")
    assert names(folder) == ["checksums.json", "config.json", "model.safetensors", "notes.txt"]
    assert (folder / "model.safetensors").read_text() == "new"


def test_what_a_killed_merge_left_is_tidied_up_by_the_next(tmp_path: Path, dead: int) -> None:
    for name in (f".out.partial-{dead}", f".out.old-{dead}", f".other.partial-{dead}"):
        fake(tmp_path / name, name)
    with writing(tmp_path / "out", "merge", None):
        assert (tmp_path / "out" / "config.json").read_text() == f".out.old-{dead}"
    assert names(tmp_path) == [f".other.partial-{dead}", "out"]


def test_a_link_stays_one_and_its_folder_is_locked(tmp_path: Path) -> None:
    place, link = fake(tmp_path / "disk" / "out", "old"), tmp_path / "link"
    link.symlink_to("disk/out")
    with writing(link, "merge", None):
        with pytest.raises(UsageError, match="is being written"):
            writing(place, "sft", None).__enter__()
        with written_whole(link) as beside:
            (beside / "config.json").write_text("new")
    assert names(tmp_path) == ["disk", "link"] and names(place.parent) == ["out"]
    assert link.is_symlink() and (place / "config.json").read_text() == "new"


@pytest.mark.parametrize("missing", ["trainer.pt", "config.json", "model.safetensors"])
def test_whole(model: Path, tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "last"
    save_checkpoint(folder, model_of(model), model, {"step": 1})
    assert whole(folder)
    (folder / missing).unlink()
    assert not whole(folder) and not whole(tmp_path / "missing")


def test_every_shard_and_an_adapter_count(model: Path, tmp_path: Path) -> None:
    (tmp_path / "trainer.pt").touch()
    shutil.copy(model / "config.json", tmp_path / "adapter_config.json")
    assert not whole(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    assert whole(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    model_of(model).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1 and whole(tmp_path)
    shards[-1].unlink()
    assert not whole(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert not whole(tmp_path)


def test_a_corrupt_state_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "trainer.pt").write_bytes(b"no")
    with pytest.raises(ModelError, match="cannot be resumed from"):
        load_state(tmp_path)
