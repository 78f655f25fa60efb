"""verl's `data` section: `train_files`, `val_files`, and `custom_cls`, a dataset class of a file, as it is.

data:
  train_files: data/train.parquet        # one or a list
  val_files: [data/test.parquet]         # the splits validation and test
  custom_cls: {path: retool.py, name: CustomRLHFDataset}
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.compat.verl import Verl
from agentrl_cli.errors import ConfigError, DataError, NotFound
from agentrl_cli.registry import load_file
from agentrl_cli.tasks.sources import FILES

SPLITS = {"train_files": ("train",), "val_files": ("validation", "test")}
ROWS = "agentrl_cli.compat.verl_data:rows"


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
        self.data_files = (
            list(data_files) if isinstance(data_files, (list, tuple)) else [data_files]
        )
        self.original_data_files = copy.deepcopy(self.data_files)
        self.tokenizer, self.processor, self.config, self.max_samples = (
            tokenizer,
            processor,
            config,
            max_samples,
        )
        self.prompt_key = config.get("prompt_key", "prompt")
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Files are local."""

    def _read_files_and_tokenize(self) -> None:
        rows = [dict(row) for file in self.data_files for row in _read(Path(file))]
        try:
            import datasets
        except ImportError:
            self.dataframe: Any = rows
        else:
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


MODULES: Mapping[str, Mapping[str, Any]] = {
    "verl.utils.dataset": {"RLHFDataset": RLHFDataset},
    "verl.utils.dataset.rl_dataset": {"RLHFDataset": RLHFDataset},
}


def splits(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section as one that names a source for each split; any other section as it is. Raises ConfigError."""
    if not {"custom_cls", *SPLITS} & set(data):
        return dict(data)
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


def rows(folder: str, files: list[str], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of verl's dataset, or of the class that replaces it. Raises NotFound, ConfigError, DataError."""
    custom, base = config.get("custom_cls") or {}, Path(folder)
    kind: Any = RLHFDataset
    places = [str(base / Path(file).expanduser()) for file in files]
    with Verl(base, MODULES):
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
    """Return a row without what verl's loader adds for its own batches."""
    row = {
        key: value for key, value in item.items() if not type(value).__module__.startswith("torch")
    }
    if "raw_prompt" in row:
        row["prompt"] = [dict(message) for message in row.pop("raw_prompt")]
    return row


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix not in FILES:
        raise ConfigError(f"{path}: rows are read from {', '.join(FILES)} files.")
    if not path.is_file():
        raise NotFound.of(
            "data file",
            str(path),
            [str(one) for one in path.parent.glob("*") if one.suffix in FILES],
        )
    for number, row in FILES[path.suffix](path):
        if isinstance(row, str):
            raise DataError(f"{path}:{number}: {row}")
        yield row
