"""Checkpoints: a Hugging Face model folder (or a peft adapter folder) that also holds the trainer's state.

A checkpoint is written beside its place, under a hidden name, and renamed into it; an older one of the same name is
renamed aside before and deleted after. So a folder with this name is always whole, wherever the process is killed.
Its files reach the disk before the rename does, and their checksums lie among them, so that a torn or changed folder is
found before it is used: `checksums.json` lists the size and the SHA-256 of every file, {"files": {name: {"bytes": n,
"sha256": hex}}}. Folders that older versions wrote have none, and neither have models from elsewhere: those are loaded
without this check.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl_cli.errors import ModelError, writing
from agentrl_cli.models.adapter import ADAPTER_FILE
from agentrl_cli.models.save import BASE, save_model
from agentrl_cli.paths import utf8_name
from agentrl_cli.store.holder import start_of

CHECKSUMS = "checksums.json"
FREE = frozenset({CHECKSUMS, "README.md"})
"""Files without a checksum: people edit a model card."""
STATE = "trainer.pt"
"""Optimizer, random numbers and step; the rest of the folder is the model."""
OF_ONE_MODEL = (
    STATE,
    BASE,
    ADAPTER_FILE,
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin*",
)
"""Files that mean nothing beside another model's."""
LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|old)-(?P<pid>[0-9]+)")
"""What a checkpoint is called while it is written, and while it is replaced."""


class DamagedCheckpoint(ModelError):
    """A checkpoint that a run cannot continue from; `why` is the reason."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(
            f"The checkpoint {folder} cannot be resumed from: {why}",
            hint="An older one may be usable.",
        )
        self.why = why


def save_checkpoint(folder: Path, model: nn.Module, tokenizer: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; an older one of the same name is replaced. Raises StoreError if it cannot be written.

    What dead processes left in the same parent folder is swept first.
    """
    sweep(folder.parent)
    with writing(f"the checkpoint {folder}"), written_whole(folder) as beside:
        save_model(model, tokenizer, beside)
        with (beside / STATE).open(
            "wb"
        ) as file:  # given a path, torch would not say what went wrong
            torch.save(state, file)


@contextlib.contextmanager
def written_whole(folder: Path, *, keep: bool = False) -> Iterator[Path]:
    """Yield a folder beside `folder` to write into; if the block ends well, it is sealed and takes that place.

    With `keep`, what `folder` holds under other names stays there. Raises OSError.
    """
    folder = folder.resolve()  # "." has no name, and a link stays one
    beside = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        yield beside
        seal(beside)
        if keep and folder.is_dir() and any(folder.iterdir()):
            _move_files(beside, folder)
        else:
            replace_folder(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _move_files(new: Path, folder: Path) -> None:
    """Move the checksums first: killed among the files, this leaves a folder that is known to be damaged.

    Weights and trainer's state of an earlier model go: a reader would take its adapter or its shards for the new one's.
    """
    stale = {path.name for pattern in OF_ONE_MODEL for path in folder.glob(pattern)}
    stale -= {path.name for path in new.iterdir()}
    for path in sorted(new.iterdir(), key=lambda path: path.name != CHECKSUMS):
        path.replace(folder / path.name)
        to_disk(folder)
    for name in stale:
        (folder / name).unlink()


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`, which may exist: two renames, then the old one is deleted.

    Raises OSError; the old one is back in its place then.
    Killed between the two, the old one lies aside under a hidden name; `sweep` puts it back.
    """
    aside = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    try:
        new.rename(folder)
    except OSError:
        if aside.exists():
            aside.rename(folder)
        raise
    to_disk(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sweep(parent: Path, name: str = "") -> None:
    """Tidy up after processes that died while they wrote checkpoints into `parent`, which may not exist.

    An old checkpoint that was renamed aside is put back where its replacement did not come; everything else goes.
    `name`: only what belongs to this folder.
    """
    for path in sorted(parent.glob(".*-*")) if parent.is_dir() else ():
        found = LEFTOVER.fullmatch(path.name)
        if found is None or (name and found["name"] != name):
            continue
        # Our own leftovers are those of a save that failed.
        if int(found["pid"]) != os.getpid() and start_of(int(found["pid"])) is not None:
            continue
        place = path.with_name(found["name"])
        if (
            found["kind"] == "old"
            and not place.exists()
            and (whole(path) or (path / CHECKSUMS).is_file())
        ):
            path.rename(place)
        else:
            shutil.rmtree(path, ignore_errors=True)


def load_state(folder: Path) -> dict[str, Any]:
    """Return the trainer's state of a checkpoint. Raises DamagedCheckpoint."""
    if why := damage(folder):
        raise DamagedCheckpoint(folder, why)
    with _reading(folder):
        state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise DamagedCheckpoint(folder, f"{STATE} holds something else than a trainer's state")
    return state


def load_weights(model: nn.Module, folder: Path) -> None:
    """Put a checkpoint's weights into a model of the same shape, in place.

    All is read and compared before the first weight changes. Raises DamagedCheckpoint.
    """
    if (folder / ADAPTER_FILE).is_file():
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        weights = _read(folder, folder / "adapter_model.safetensors")
        _require_fit(
            folder, weights, get_peft_model_state_dict(model, save_embedding_layers=False), set()
        )
        set_peft_model_state_dict(model, weights)
        return
    weights = _read(folder, *sorted(folder.glob("*.safetensors")))
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    own = model.state_dict()
    if set(weights) - set(own) and hasattr(model, "from_pretrained"):
        # Published names (vision-language models) become the model's own by transformers' conversion.
        with _reading(folder), utf8_name(folder) as name:
            kind: Any = type(model)
            weights = kind.from_pretrained(name, local_files_only=True).state_dict()
    _require_fit(folder, weights, own, tied)
    model.load_state_dict(weights, strict=False)


def _read(folder: Path, *files: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for path in files:
        with _reading(folder, f"{path.name}: "), utf8_name(path.parent) as place:
            weights |= load_file(place / path.name)
    return weights


@contextlib.contextmanager
def _reading(folder: Path, file: str = "") -> Iterator[None]:
    """Raise DamagedCheckpoint for any error of a reader: damaged bytes break it in any way."""
    try:
        yield
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DamagedCheckpoint(folder, f"{file}{line}") from error


def _require_fit(
    folder: Path, weights: Mapping[str, Any], own: Mapping[str, Any], tied: set[str]
) -> None:
    """Raise DamagedCheckpoint unless names and shapes are the model's; tied weights may be missing."""
    wrong = [*(set(own) - set(weights) - tied), *(set(weights) - set(own))]
    wrong += [name for name in set(weights) & set(own) if weights[name].shape != own[name].shape]
    if wrong:
        shown = ", ".join(sorted(wrong)[:3]) + (" …" if len(wrong) > 3 else "")
        raise DamagedCheckpoint(folder, f"its weights do not fit the model ({shown})")


def whole(folder: Path) -> bool:
    """Whether a checkpoint folder has both its state and all its weights; one torn by a crash does not.

    For checkpoints of versions that wrote no checksums.
    """
    if not (folder / STATE).is_file():
        return False
    if (folder / ADAPTER_FILE).is_file():
        return (folder / "adapter_model.safetensors").is_file()
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    try:
        shards = (
            set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if index.is_file()
            else set()
        )
    except (OSError, ValueError, KeyError):
        return False
    return all((folder / shard).is_file() for shard in shards or {"model.safetensors"})


def seal(folder: Path) -> None:
    """Write the checksums of a finished folder, and everything in it to the disk. Raises OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {
        path.relative_to(folder).as_posix(): _facts(path) for path in files if path.name not in FREE
    }
    manifest = folder / CHECKSUMS
    manifest.write_text(json.dumps({"files": sums}, indent=1) + "\n", encoding="utf-8")
    for path in (*files, manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        to_disk(path)


def seal_of(folder: Path) -> str:
    """Return a hash of a model folder's files by its checksums, the trainer's state aside; empty without checksums."""
    try:
        files = json.loads((folder / CHECKSUMS).read_bytes())["files"]
        return hashlib.sha256(
            json.dumps({**files, STATE: None}, sort_keys=True).encode()
        ).hexdigest()
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, have reached the disk. Raises OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def damage(folder: Path, *, skip: Collection[str] = ()) -> str:
    """Return the fault of a folder by its checksums, in words; empty if it has none, or no checksums."""
    manifest = folder / CHECKSUMS
    while manifest.exists():
        written = _when_written(manifest)
        why = _damage(folder, manifest, skip)
        if not why or _when_written(manifest) == written:
            return why  # else a training has put a newer checkpoint in this place meanwhile
    return ""


def _when_written(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _damage(folder: Path, manifest: Path, skip: Collection[str]) -> str:
    try:
        files = json.loads(manifest.read_bytes())["files"]
        for name, facts in files.items():
            why = "" if name in skip else _differs(folder / name, facts)
            if why:
                return f"{name} {why}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{CHECKSUMS} cannot be read ({type(error).__name__})"
    return ""


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _differs(path: Path, facts: Any) -> str:
    """Return how a file differs from its checksum. The size comes first: it costs nothing."""
    size = path.stat().st_size
    if size != facts["bytes"]:
        return f"has {size:,} of {facts['bytes']:,} bytes"
    return "" if _facts(path)["sha256"] == facts["sha256"] else "has changed since it was written"
