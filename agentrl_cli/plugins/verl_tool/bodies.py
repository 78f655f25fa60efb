"""The bodies of a tool server's requests and answers. Those that cannot be used raise UsageError and ValueError."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl_cli.errors import EnvError, SandboxFault, UsageError
from agentrl_cli.plugins.verl_tool.trajectories import Call, Text
from agentrl_cli.types import ToolResult

M = TypeVar("M", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


# --- requests ---------------------------------------------------------------------------------------------------------


class TaskBody(_Body):
    """A trajectory's task."""

    data: dict[str, Any] = {}
    prompt: list[dict[str, Any]] = []
    pack: str = ""
    family: str = ""
    split: str = ""


class OpenBody(_Body):
    """`/v1/open`; all but the id is the trajectory's spec."""

    trajectory: Text | None = None
    tools: list[str] | None = None
    seed: int = Field(default=0, ge=0, lt=2**63)
    task: TaskBody | None = None


class CallsBody(_Body):
    """`/v1/call`."""

    calls: list[Call]


class NamesBody(_Body):
    """`/v1/rewards` and `/v1/close`."""

    trajectories: list[str]


class ObserveBody(_Body):
    """`/get_observation`: the body's other lists are further fields of each action."""

    trajectory_ids: list[Any] = Field(min_length=1)
    actions: list[Any]
    extra_fields: list[dict[str, Any] | None] | None = None

    def fields(self) -> list[dict[str, Any]]:
        """Return the fields of each action.

        Null flags, and fields that are not lists, are ignored, as verl-tool does.
        """
        found = [dict(one or {}) for one in self.extra_fields or [{}] * len(self.actions)]
        if not len(self.trajectory_ids) == len(self.actions) == len(found):
            raise UsageError("trajectory_ids, actions and extra_fields must have the same length.")
        for key, values in (self.model_extra or {}).items():
            if isinstance(values, list):
                for one, value in zip(found, values, strict=False):
                    one[key] = value
        return found


def read(model: type[M], data: bytes) -> M:
    """Return a request's body. Raises UsageError."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise UsageError(f"The body cannot be used: {first_problem(error)}.") from error


# --- answers: a 200 may be a proxy's page. Unchecked, it would be an observation that the model is trained on. --------


class Function(_Body):
    """A tool's function, of which only the name is looked at."""

    name: str


class Offered(_Body):
    """One tool of the server."""

    function: Function


class ToolsAnswer(_Body):
    """Answer of `/v1/tools`."""

    tools: list[Offered]


class OpenAnswer(_Body):
    """Answer of `/v1/open`."""

    opening: list[str] = []
    """Text that tools add to the task's prompt."""


class Fault(_Body):
    """A call that could not be made."""

    fault: str
    message: str = ""


class Result(BaseModel):
    """A call's result, and the shared state of the tools."""

    model_config = ConfigDict(**_Body.model_config | {"extra": "forbid"}, val_json_bytes="base64")
    result: ToolResult
    state: dict[str, Any]


class CallAnswer(_Body):
    """Answer of `/v1/call` for one call."""

    results: list[Result | Fault] = Field(min_length=1, max_length=1)

    def result(self) -> Result:
        """Return the result. Raises EnvError or SandboxFault for a fault."""
        [found] = self.results
        if isinstance(found, Fault):
            kind = SandboxFault if found.fault == "sandbox_error" else EnvError
            raise kind(found.message)
        return found


class RewardsAnswer(_Body):
    """Answer of `/v1/rewards`."""

    rewards: dict[str, dict[str, float | None]]


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a body, and where it is."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(map(str, problem["loc"]))
    return f"`{place}`: {problem['msg']}" if place else problem["msg"]
