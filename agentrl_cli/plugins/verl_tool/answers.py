"""Checks of a tool server's answers: one that cannot be used is a ValueError, and the request is sent again.

A 200 may be a proxy's page. Unchecked, it would be an observation that the model reads and is trained on.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from types import NoneType
from typing import Any

from agentrl_cli.errors import EnvError, SandboxFault
from agentrl_cli.types import ToolResult, ToolSchema

Answer = Mapping[str, Any]

FAULTS = {"sandbox_error": SandboxFault, "env_error": EnvError, "usage_error": EnvError}
FIELDS: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "error": (str, NoneType),
    "reward": (int, float, NoneType),
    "metrics": (dict,),
    "images": (list,),
    "seconds": (int, float),
    "level": (str,),
    "truncated": (bool,),
    "done": (bool,),
    "value": (list, NoneType),
}
"""Fields of a ToolResult, as JSON carries them."""
MOST = 1e300
"""Size of a number: infinity is none."""
SHOWN = 80
"""Characters of an answer that a message repeats."""


def read_object(data: bytes) -> Answer:
    """Return a body as a JSON object."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {data[:SHOWN]!r}") from error
    return _object(answer, "the answer")


def schemas(answer: Answer) -> list[ToolSchema]:
    """Return the schemas of the server's tools."""
    tools = [_object(tool, "a tool") for tool in _list(answer.get("tools"), "`tools`")]
    for tool in tools:
        if not isinstance(_object(tool.get("function"), "a tool's function").get("name"), str):
            raise ValueError("a tool without a name")
    return tools


def opening(answer: Answer) -> list[str]:
    """Return text that tools add to the task's prompt."""
    return [str(text) for text in _list(answer.get("opening", []), "`opening`")]


def result(answer: Answer) -> tuple[ToolResult, dict[str, Any]]:
    """Return a call's result and the shared state of the tools. Raises EnvError or SandboxFault for a fault."""
    results = _list(answer.get("results"), "`results`")
    if len(results) != 1:
        raise ValueError(f"{len(results)} results of one call")
    said = _object(results[0], "the result")
    if "fault" in said:
        raise FAULTS.get(str(said["fault"]), EnvError)(str(said.get("message", "")))
    state, given = _object(said.get("state"), "`state`"), _object(said.get("result"), "`result`")
    if wrong := next(
        (name for name in given if not _fits(name, given[name])), "" if "text" in given else "text"
    ):
        raise ValueError(f"`{wrong}` of a result is {str(given.get(wrong))[:SHOWN]!r}")
    images = [base64.b64decode(str(image), validate=True) for image in given.get("images", [])]
    return ToolResult(**{**given, "images": tuple(images)}), state


def reward(answer: Answer, trajectory: str, name: str) -> float | None:
    """Return a tool's own reward; None if it gives none."""
    rewards = _object(
        _object(answer.get("rewards"), "`rewards`").get(trajectory), "the trajectory's rewards"
    )
    value = rewards.get(f"tool:{name}")
    if not _fits("reward", value):
        raise ValueError(f"the reward of {name} is {str(value)[:SHOWN]!r}")
    return None if value is None else float(value)


def _fits(name: str, value: Any) -> bool:
    finite = not isinstance(value, (int, float)) or abs(value) <= MOST  # NaN is not
    return finite and isinstance(value, FIELDS.get(name, ()))


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is {type(value).__name__}, not a list")
    return value
