"""Classes written for verl, loaded unchanged where verl is not installed.

Their modules begin with `from verl.tools.base_tool import BaseTool` and the like. While such a module loads, small
stubs replace the modules that it imports; afterwards `sys.modules` is restored, so no other code sees a stub of
`verl`. If the real verl is installed, it is used.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict


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
        """The schema."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """A new instance for a trajectory."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """One call: (answer, reward of the step, metrics)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The tool's reward for its state."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free the instance."""


class BaseInteraction:
    """verl.interactions.base.BaseInteraction."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """A new instance for a trajectory."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """(ended, text, score of the turn, other data)."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """The score of the interaction."""
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
STAND_INS: dict[str, dict[str, Any]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": BaseTool, "ToolResponse": ToolResponse, **SCHEMAS},
    "verl.tools.schemas": SCHEMAS,
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
    "verl.utils.reward_score": {},
}


class Verl:
    """Context manager that makes the stubs (if verl is missing) and the modules of `folder` importable."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = str(folder.absolute()) if folder else ""
        self._put: list[str] = []

    def __enter__(self) -> None:
        if self.folder:
            sys.path.insert(0, self.folder)
        if importlib.util.find_spec("verl") is not None:
            return
        for name, content in STAND_INS.items():
            module = ModuleType(name)
            module.__dict__.update({"__path__": [], **content})
            sys.modules[name] = module
            self._put.append(name)
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, module)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._put:
            sys.modules.pop(name, None)
        self._put.clear()
        if self.folder in sys.path:
            sys.path.remove(self.folder)


def wants_verl(kind: Any, method: str) -> bool:
    """True for a class of verl's making: one of its bases is from verl, or a stand-in, and it has the method."""
    if not isinstance(kind, type):
        return False
    from_verl = any(base in (BaseTool, BaseInteraction) or base.__module__.startswith("verl.") for base in kind.__mro__)
    return from_verl and hasattr(kind, method)
