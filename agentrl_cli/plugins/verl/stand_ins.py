"""Classes written for verl, loaded unchanged where verl is not installed.

Their modules begin with `from verl.tools.base_tool import BaseTool`, or with `from .base_tool` as in its own folders.
While such a module loads, small stubs replace the modules that it imports; afterwards `sys.modules` is restored, so no
other code sees a stub of `verl`. If the real verl is installed, it is used.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any, Self
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, create_model

from agentrl_cli.errors import DataError
from agentrl_cli.plugins.verl import scorers
from agentrl_cli.registry import dotted_target
from agentrl_cli.tasks.sources import Source


class ToolResponse(BaseModel):
    """A verl tool's answer."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether it has no content."""
        return not self.text and not self.image and not self.video


def _schema(title: str, /, **fields: Any) -> Any:
    """Return a part of OpenAI's function schema: fields with their defaults, and any others."""
    return create_model(title, __config__=ConfigDict(extra="allow"), **fields)


_PROPERTY = _schema(
    "OpenAIFunctionPropertySchema",
    type=(str | list[str], "string"),
    description=(str | None, None),
    enum=(list[Any] | None, None),
)
_PARAMETERS = _schema(
    "OpenAIFunctionParametersSchema",
    type=(str, "object"),
    properties=(GenericAlias(dict, (str, _PROPERTY)), {}),
    required=(list[str], []),
)
_FUNCTION = _schema(
    "OpenAIFunctionSchema",
    name=(str, ...),
    description=(str, ""),
    parameters=(_PARAMETERS, _PARAMETERS()),
    strict=(bool, False),
)
OpenAIFunctionToolSchema = _schema(
    "OpenAIFunctionToolSchema", type=(str, "function"), function=(_FUNCTION, ...)
)


class BaseTool:
    """verl.tools.base_tool.BaseTool: https://verl.readthedocs.io/en/latest/sglang_multiturn/multiturn.html"""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the schema."""
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Return a new instance for a trajectory."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return (answer, reward of the step, metrics)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the tool's reward for its state."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free the instance."""


class BaseInteraction:
    """verl.interactions.base.BaseInteraction."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Return a new instance for a trajectory."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return (ended, text, score of the turn, other data)."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """Return the score of the interaction."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """Free the instance."""


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

            columns = dict.fromkeys(key for row in rows for key in row)
            self.dataframe = datasets.Dataset.from_list([columns | row for row in rows])
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


def rollout_trace_op(function: Any) -> Any:
    """Return the function: verl's tracing decorator does nothing here."""
    return function


SCHEMAS = {
    kind.__name__: kind
    for kind in (OpenAIFunctionToolSchema, _FUNCTION, _PARAMETERS, _PROPERTY, ToolResponse)
}
DATASET = {"RLHFDataset": RLHFDataset}
SCORERS = "verl.utils.reward_score"
STAND_INS: dict[str, Mapping[str, Any]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": BaseTool, "ToolResponse": ToolResponse, **SCHEMAS},
    "verl.tools.schemas": SCHEMAS,
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.utils": {},
    "verl.utils.dataset": DATASET,
    "verl.utils.dataset.rl_dataset": DATASET,
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
    SCORERS: scorers.PACKAGE,
    **{f"{SCORERS}.{name}": functions for name, functions in scorers.MODULES.items()},
}
COPIED = ("verl.tools", "verl.interactions", SCORERS)
"""Packages of verl whose modules may be copied beside a pack."""
_RELATIVE = re.compile(r"^\s*from \.", re.MULTILINE)


class _StandIn(Loader):
    """Loads a module that holds given objects."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._content)


class Verl(MetaPathFinder):
    """Context manager that makes verl's modules and those of `folder` importable.

    Without verl its base classes are the stubs, and a module such as `verl.tools.gsm8k_tool` is the file
    `gsm8k_tool.py` of the folder, or `verl/tools/gsm8k_tool.py`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.installed = importlib.util.find_spec("verl") is not None
        self._named: dict[str, Path] = {}

    def target(self, name: str, kind: str) -> str | None:
        """Return the class of a file with verl's relative imports as of a module of `verl.KIND`; None for others."""
        file, _, attribute = dotted_target(name, self.folder).partition(":")
        path = self.folder / file
        if not file.endswith(".py") or not _RELATIVE.search(
            path.read_text(encoding="utf-8", errors="replace")
        ):
            return None
        module = f"verl.{kind}.copied_{path.stem}"  # a name that verl does not have itself
        self._named[module] = path
        return f"{module}:{attribute}"

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, leaf = fullname.rpartition(".")
        scorer = f"{SCORERS}.{leaf}"
        # A package that stands for a folder, and the file is not beside the one that was copied.
        own = getattr(sys.modules.get(package), "__spec__", self) is None
        if own and not package.startswith("verl") and scorer in STAND_INS:
            content = vars(importlib.import_module(scorer)) if self.installed else STAND_INS[scorer]
            return ModuleSpec(fullname, _StandIn(content))
        beside = [self.folder / f"{leaf}.py", self.folder / f"{fullname.replace('.', '/')}.py"]
        places = beside if package in COPIED and not self.installed else []
        for file in (self._named.get(fullname), *places):
            if file is not None and file.is_file():
                return spec_from_file_location(fullname, file)
        return None

    def __enter__(self) -> Self:
        sys.meta_path.append(self)
        for name, content in {} if self.installed else STAND_INS.items():
            module = ModuleType(name)
            module.__dict__.update({"__path__": [], **content})
            sys.modules[name] = module
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, module)
        return self

    def __exit__(self, *raised: object) -> None:
        stubs = [name for name in sys.modules if name.partition(".")[0] == "verl"]
        for name in self._named if self.installed else stubs:
            sys.modules.pop(name, None)
        sys.meta_path.remove(self)


def wants_verl(kind: Any, method: str) -> bool:
    """Whether a class is of verl's making: one of its bases is from verl, or a stand-in, and it has the method."""
    if not isinstance(kind, type):
        return False
    from_verl = any(
        base in (BaseTool, BaseInteraction) or base.__module__.startswith("verl.")
        for base in kind.__mro__
    )
    return from_verl and hasattr(kind, method)
