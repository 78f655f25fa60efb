"""A checkpoint is whole or not there, wherever the process that wrote it was killed.

Damaged checkpoints and model folders are found before they are used, named in a sentence, and an older one is taken.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.commands import main
from agentrl_cli.config import Config
from agentrl_cli.errors import ModelError, StoreError, UsageError
from agentrl_cli.models import checkpoint
from agentrl_cli.models.checkpoint import (
    CHECKSUMS,
    damage,
    load_state,
    load_weights,
    replace_folder,
    save_checkpoint,
    sweep,
    whole,
    written_whole,
)
from agentrl_cli.models.load import load_model
from agentrl_cli.models.merge import merge
from agentrl_cli.models.output_lock import writing
from agentrl_cli.store import RunRow, Store
from tests.helpers.train import as_bytes, train_here, trainer_of, write_model, write_project


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


def test_a_save_sweeps_and_one_that_fails_keeps_the_one_before(
    model: Path, tmp_path: Path, dead: int
) -> None:
    fake(tmp_path / f".best.old-{dead}")
    fake(tmp_path / f".step-000004.partial-{dead}")
    folder = tmp_path / "last"
    save_checkpoint(folder, model_of(model), model, {"step": 1})

    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="disk is full"):
        save_checkpoint(folder, Full(), model, {"step": 2})  # type: ignore[arg-type]  # a model of which only this is used
    assert names(tmp_path) == ["best", "last"] and load_state(folder) == {"step": 1}


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


# --- damaged checkpoints and model folders ---


PPO = {"advantage": "gae", "drop_zero_variance": False}
FULL: dict[str, Any] = {"enabled": False}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def behead(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(b"\xff" * min(16, len(data)) + data[16:])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": partial(Path.write_bytes, data=b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "garbage": partial(Path.write_bytes, data=bytes(range(256)) * 8),
    "header": behead,
    "bit": flip,
    "pickle": partial(torch.save, {"something": "else"}),
    "code": partial(Path.write_bytes, data=pickle.dumps(print)),
}


def train(project: Path, model: Path, **sections: Any) -> RunRow:
    return train_here(project, model, algo=PPO, train={"save_every": 1}, **sections)


def resume(
    project: Path, model: Path, run: RunRow, **sections: Any
) -> tuple[int, list[str], dict[str, Any]]:
    """What a resume would begin with: the step, what was said, and weights with the learner's state as bytes."""

    async def go() -> tuple[int, list[str], dict[str, Any]]:
        said: list[str] = []
        async with trainer_of(
            project, model, run=run, algo=PPO, train={"save_every": 1}, **sections
        ) as trainer:
            held, learner = trainer.loaded.model, trainer.learner
            trainer.checkpoints.narrate = said.append
            state = trainer.checkpoints.restore()
            now = {"weights": as_bytes(held.state_dict()), "learner": as_bytes(learner.state())}
            return int(state.get("step", 0)), said, now

    return asyncio.run(go())


@pytest.mark.parametrize("adapter", [FULL, {"enabled": True, "r": 4}], ids=["full", "lora"])
def test_every_damage_of_every_file_falls_back(
    tmp_path: Path, model: Path, adapter: dict[str, Any]
) -> None:
    run = train(tmp_path, model, adapter=adapter)
    last = Path(run.dir) / "checkpoints" / "last"
    files = sorted(path.name for path in last.iterdir() if path.name != "README.md")
    assert {"trainer.pt", CHECKSUMS, "tokenizer.json"} < set(files) and len(files) >= 6
    shutil.copytree(last, tmp_path / "intact")
    whole = resume(tmp_path, model, run, adapter=adapter)
    assert whole[:2] == (2, [])
    shutil.move(last, tmp_path / "away")
    before = resume(tmp_path, model, run, adapter=adapter)
    assert before[0] == 1 and before[2] != whole[2]
    kinds = {"trainer.pt": list(DAMAGES), "model.safetensors": list(DAMAGES)[:-2]}
    cases = [(name, kind) for name in files for kind in kinds.get(name, ["missing", "bit"])]
    for name, kind in cases:
        shutil.rmtree(last, ignore_errors=True)
        shutil.copytree(tmp_path / "intact", last)
        DAMAGES[kind](last / name)
        found = damage(last)
        if (name, kind) == (CHECKSUMS, "missing"):
            assert found == "" and resume(tmp_path, model, run, adapter=adapter) == whole
            continue
        assert name in found or (name == CHECKSUMS and found), (name, kind)
        if kind == "bit":
            step, said, now = resume(tmp_path, model, run, adapter=adapter)
            assert (step, now) == (1, before[2]), (name, kind)
            assert len(said) == 1 and found in said[0] and "an older one is taken" in said[0], said


def test_older_checkpoints_without_checksums(tmp_path: Path, model: Path) -> None:
    run = train(tmp_path, model)
    last = Path(run.dir) / "checkpoints" / "last"
    for folder in last.parent.iterdir():
        (folder / CHECKSUMS).unlink()
    shutil.copytree(last, tmp_path / "intact")
    assert resume(tmp_path, model, run)[:2] == (2, [])
    for name in ("trainer.pt", "model.safetensors"):
        for kind in ("cut", "garbage", "missing"):
            shutil.rmtree(last)
            shutil.copytree(tmp_path / "intact", last)
            DAMAGES[kind](last / name)
            step, said, _ = resume(tmp_path, model, run)
            assert step == 1 and len(said) == 1 and "not whole" in said[0], (name, kind)


def test_without_a_usable_one(tmp_path: Path, model: Path) -> None:
    run = train(tmp_path, model)
    folders = sorted((Path(run.dir) / "checkpoints").iterdir())
    for folder in folders:
        flip(folder / "model.safetensors")
    step, said, now = resume(tmp_path, model, run)
    assert step == 0 and len(said) == len(folders) and "its first step" in said[-1]
    fresh = load_model(
        model, Config.model_validate({"model": {"dtype": "float32"}}).model, base=tmp_path
    )
    assert now["weights"] == as_bytes(fresh.state_dict())
    for folder in folders:
        flip(folder / "model.safetensors")
        (folder / CHECKSUMS).unlink()
        torch.save({"step": 1, "optimizer": {}}, folder / "trainer.pt")
    with pytest.raises(ModelError, match="No checkpoint") as error:
        resume(tmp_path, model, run)
    assert "Delete that folder" in error.value.hint


def test_a_damaged_checkpoint_is_neither_merged_nor_used(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, model)
    last = Path(run.dir) / "checkpoints" / "last"
    write_project(tmp_path, model)
    db = str(tmp_path / "runs" / "agentrl.db")
    merged = tmp_path / "merged"
    assert main(["merge", f"{run.name}@last", str(merged), "--db", db]) == 0
    assert damage(merged) == "" and CHECKSUMS in {path.name for path in merged.iterdir()}
    flip(last / "trainer.pt")  # not needed for this
    assert main(["merge", f"{run.name}@last", str(merged), "--db", db, "--force"]) == 0
    flip(last / "model.safetensors")
    capsys.readouterr()
    assert main(["merge", f"{run.name}@last", str(merged), "--db", db, "--force"]) == 2
    assert "model.safetensors has changed since it was written" in capsys.readouterr().err
    flip(merged / "config.json")
    with (
        Store.open(Path(db), readonly=True) as store,
        pytest.raises(ModelError, match=r"config\.json has changed"),
    ):
        merge(str(merged), tmp_path / "again", Config().model, base=tmp_path, store=store)
    (merged / "README.md").write_text("Mine.")
    flip(merged / "config.json")
    assert damage(merged) == ""


def test_sft_leaves_a_folder_whole_or_known_to_be_damaged(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ["--pack", "calc-task", "--steps", "1", "--project", str(tmp_path)]
    (tmp_path / "agentrl.yaml").write_text("model: {device: cpu}\n")
    assert main(["sft", str(out), *given]) == 0
    assert damage(out) == "" and (out / CHECKSUMS).is_file()
    (out / "mine.txt").write_text("stays")
    old = (out / "model.safetensors").read_bytes()
    assert main(["sft", str(out), *given, "--seed", "1", "--force"]) == 0
    assert damage(out) == "" and (out / "mine.txt").read_text() == "stays"
    assert (out / "model.safetensors").read_bytes() != old
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    (out / "model.safetensors").write_bytes(
        old
    )  # what a kill among the files leaves: new checksums, an old file
    assert "model.safetensors" in damage(out)


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    held = AutoModelForCausalLM.from_pretrained(model)
    before = as_bytes(held.state_dict())
    other = write_model(tmp_path / "other", head_dim=8)
    with pytest.raises(ModelError, match="do not fit the model"):
        load_weights(held, other)
    assert as_bytes(held.state_dict()) == before


def test_a_checkpoint_that_is_replaced_while_it_is_checked_is_not_damaged(tmp_path: Path) -> None:
    place, stop = tmp_path / "last", threading.Event()

    def write(number: int) -> None:
        with written_whole(place) as beside:
            (beside / "model.safetensors").write_bytes(bytes([number % 256]) * (1_000 + number))

    def go() -> None:
        for number in itertools.count(1):
            write(number)
            if stop.is_set():
                return

    write(0)
    trainer = threading.Thread(target=go)
    trainer.start()
    try:
        assert {damage(place) for _ in range(300)} == {""}
    finally:
        stop.set()
        trainer.join()


def test_checksums_that_lie(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    for text in (
        "",
        "[" * 50_000,
        "[]",
        "5",
        '{"files": 3}',
        '{"files": {"a": 1}}',
        '{"files": {"a": {"bytes": 1}}}',
    ):
        (tmp_path / CHECKSUMS).write_text(text)
        assert CHECKSUMS in damage(tmp_path), text
    (tmp_path / CHECKSUMS).write_text(json.dumps({"files": {"b": {"bytes": 1, "sha256": ""}}}))
    assert damage(tmp_path) == "b is missing"
