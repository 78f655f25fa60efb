"""Classes written for verl, loaded unchanged where verl is not installed.

Their modules begin with `from verl.tools.base_tool import BaseTool`, or with `from .base_tool` as in its own folders.
While such a module loads, small stubs replace the modules that it imports; afterwards `sys.modules` is restored, so no
other code sees a stub of `verl`. If the real verl is installed, it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from agentrl_cli.compat import verl_scorers
from agentrl_cli.registry import dotted_target


class ToolResponse(BaseModel):
    """A verl tool's answer."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """True if it has no content."""
        return not self.text and not self.image and not self.video


class _Open(BaseModel):
    """An object of OpenAI's function schema: declared fields, and any others."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """One parameter."""

    type: str | list[str] = "string"
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """The parameters."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Open):
    """A function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """A function as a tool."""

    type: str = "function"
    function: OpenAIFunctionSchema


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
        """One call: (answer, reward of the step, metrics)."""
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
        """(ended, text, score of the turn, other data)."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """Return the score of the interaction."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """Free the instance."""


def rollout_trace_op(function: Any) -> Any:
    """verl's tracing decorator; does nothing here."""
    return function


def initialize_system_prompt(*args: Any, **kwargs: Any) -> list[int]:
    """Part of verl's agent loop; unused by tools."""
    return []


SCHEMAS = {
    kind.__name__: kind
    for kind in (
        OpenAIFunctionToolSchema,
        OpenAIFunctionSchema,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionPropertySchema,
        ToolResponse,
    )
}
SCORERS = "verl.utils.reward_score"
STAND_INS: dict[str, Mapping[str, Any]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": BaseTool, "ToolResponse": ToolResponse, **SCHEMAS},
    "verl.tools.schemas": SCHEMAS,
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
    SCORERS: verl_scorers.PACKAGE,
    **{f"{SCORERS}.{name}": functions for name, functions in verl_scorers.MODULES.items()},
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

    def __init__(
        self, folder: Path | None = None, more: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """`more` are stubs besides STAND_INS, with what they hold."""
        self.folder = (folder or Path()).absolute()
        self.stubs = {**STAND_INS, **(more or {})}
        self.installed = importlib.util.find_spec("verl") is not None
        self._named: dict[str, Path] = {}

    def target(self, name: str, package: str) -> str:
        """Return a class name as `resolve` takes it. A file with verl's relative imports is a module of `package`."""
        found = dotted_target(name, self.folder)
        file, _, attribute = found.partition(":")
        path = self.folder / file
        if not file.endswith(".py") or not _RELATIVE.search(
            path.read_text(encoding="utf-8", errors="replace")
        ):
            return found
        module = f"{package}.copied_{path.stem}"  # a name that verl does not have itself
        self._named[module] = path
        return f"{module}:{attribute}"

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, leaf = fullname.rpartition(".")
        scorer = f"{SCORERS}.{leaf}"
        own = (
            getattr(sys.modules.get(package), "__spec__", self) is None
        )  # a package that stands for a folder
        if (
            own and not package.startswith("verl") and scorer in STAND_INS
        ):  # the file is not beside the copied one
            content = vars(importlib.import_module(scorer)) if self.installed else STAND_INS[scorer]
            return ModuleSpec(fullname, _StandIn(content))
        beside = [self.folder / f"{leaf}.py", self.folder / f"{fullname.replace('.', '/')}.py"]
        places = beside if package in COPIED and not self.installed else []
        file = next(
            (place for place in (self._named.get(fullname), *places) if place and place.is_file()),
            None,
        )
        return None if file is None else spec_from_file_location(fullname, file)

    def __enter__(self) -> Self:
        sys.path.insert(0, str(self.folder))
        sys.meta_path.append(self)
        for name, content in {} if self.installed else self.stubs.items():
            module = ModuleType(name)
            module.__dict__.update({"__path__": [], **content})
            sys.modules[name] = module
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, module)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stubs = (
            []
            if self.installed
            else [name for name in sys.modules if name == "verl" or name.startswith("verl.")]
        )
        for name in [*stubs, *self._named]:
            sys.modules.pop(name, None)
        sys.meta_path.remove(self)
        if str(self.folder) in sys.path:
            sys.path.remove(str(self.folder))


def wants_verl(kind: Any, method: str) -> bool:
    """True for a class of verl's making: one of its bases is from verl, or a stand-in, and it has the method."""
    if not isinstance(kind, type):
        return False
    from_verl = any(
        base in (BaseTool, BaseInteraction) or base.__module__.startswith("verl.")
        for base in kind.__mro__
    )
    return from_verl and hasattr(kind, method)
