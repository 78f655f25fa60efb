"""verl's `data` section: `train_files`, `val_files`, and `custom_cls`, a dataset class of a file, as it is.

data:
  train_files: data/train.parquet        # one or a list
  val_files: [data/test.parquet]         # the splits validation and test
  custom_cls: {path: retool.py, name: CustomRLHFDataset}
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.errors import ConfigError, DataError, NotFound
from agentrl_cli.registry import load_file
from agentrl_cli.registry.adapters import foreign_imports
from agentrl_cli.tasks.sources import Source

SPLITS = {"train_files": ("train",), "val_files": ("validation", "test")}
ROWS = "agentrl_cli.plugins.verl.data:read_rows"


class Options(dict[str, Any]):
    """A mapping with attributes, as verl's configuration is."""

    __getattr__ = dict.get


class RLHFDataset:
    """verl.utils.dataset.rl_dataset.RLHFDataset: rows of files, with their messages as `raw_prompt`.

    The tokenizer is None: rows are read before a model is loaded.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer, self.processor = tokenizer, processor
        self.config, self.max_samples = config, max_samples
        self.prompt_key = config.get("prompt_key", "prompt")
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Do nothing: files are local."""

    def _read_files_and_tokenize(self) -> None:
        rows: list[dict[str, Any]] = []
        for file in self.data_files:
            for number, row in Source("path", file, Path()).rows():
                if isinstance(row, str):
                    raise DataError(f"{file}:{number}: {row}")
                rows.append(dict(row))
        self.dataframe: Any = rows
        with contextlib.suppress(ImportError):
            import datasets

            self.dataframe = datasets.Dataset.from_list(rows)
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return all rows: prompts that are too long end their episodes as `too_long`."""
        return dataframe

    def _build_messages(self, example: dict[str, Any]) -> Any:
        return example.pop(self.prompt_key)

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        row["raw_prompt"] = self._build_messages(row)
        return row


def adapt_data(folder: Path, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section as one that names a source for each split; None of any other section. Raises ConfigError."""
    if not {"custom_cls", *SPLITS} & set(data):
        return None
    found: dict[str, Any] = {}
    for key, names in SPLITS.items():
        files = data.get(key)
        if files is not None:
            places = [files] if isinstance(files, str) else list(files)
            args = {"folder": str(folder), "files": places, "config": dict(data)}
            found |= {name: {"dataset": ROWS, "args": args} for name in names}
    if "train" not in found:
        raise ConfigError(
            f"{folder / 'task.yaml'}: data.custom_cls needs `train_files` beside it, as in verl."
        )
    return found


def read_rows(folder: str, files: list[str], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of verl's dataset, or of the class that replaces it. Raises NotFound, ConfigError, DataError."""
    custom, base = config.get("custom_cls") or {}, Path(folder)
    kind: Any = RLHFDataset
    places = [str(base / Path(file).expanduser()) for file in files]
    with foreign_imports(base):
        if custom.get("path"):
            module = load_file(base / Path(custom["path"]).expanduser())
            kind = getattr(module, str(custom.get("name")), None)
            if not isinstance(kind, type):
                known = [name for name, value in vars(module).items() if isinstance(value, type)]
                raise NotFound.of(
                    f"class in {custom['path']} (data.custom_cls)", str(custom.get("name")), known
                )
        made = kind(data_files=places, tokenizer=None, config=Options(config), processor=None)
        return [_plain(made[index]) for index in range(len(made))]


def _plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the columns that verl's loader adds for its batches."""
    row = {
        key: value for key, value in item.items() if not type(value).__module__.startswith("torch")
    }
    if "raw_prompt" in row:
        row["prompt"] = [dict(message) for message in row.pop("raw_prompt")]
    return row
