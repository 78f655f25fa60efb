"""Model calls of an attempt as OpenAI's messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypedDict

from agentrl_cli.plugins.lightning.adapter.base import TraceAdapter
from agentrl_cli.plugins.lightning.spans import Span
from agentrl_cli.plugins.lightning.utils.otel import filter_and_unflatten_attributes


class OpenAIMessages(TypedDict):
    """A conversation and the tools that were offered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """One conversation for each model call, its answer included."""

    def adapt(self, source: Sequence[Span], /) -> list[OpenAIMessages]:
        """Return the calls in the order of the spans. Raises ValueError unless messages are a list."""
        found: list[OpenAIMessages] = []
        for span in source:
            parts = {
                name: _under(span, f"gen_ai.{name}")
                for name in ("prompt", "completion", "request", "response")
            }
            if not any(parts.values()):
                continue
            for name in ("prompt", "completion"):
                if not isinstance(parts[name] or [], list):
                    raise ValueError(f"Extracted {name} from trace is not a list: {parts[name]}")
            messages = [
                _message(item) for item in [*(parts["prompt"] or []), *(parts["completion"] or [])]
            ]
            traced = [
                _call(_under(child, "tool")) for child in source if child.parent_id == span.span_id
            ]
            calls = [call for call in traced if call]
            if calls and messages:
                messages[-1]["tool_calls"] = calls
            functions = (
                (parts["request"] or {}).get("functions")
                if isinstance(parts["request"], dict)
                else None
            )
            found.append(
                {
                    "messages": messages,
                    "tools": [_tool(item) for item in functions] if functions else None,
                }
            )
        return found


def _under(span: Span, prefix: str) -> Any:
    return filter_and_unflatten_attributes(span.attributes, prefix)


def _message(held: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": held["role"], "content": held.get("content", "")}
    if calls := held.get("tool_calls"):
        made["tool_calls"] = [
            {
                "id": c.get("id", ""),
                "type": "function",
                "function": {"name": c["name"], "arguments": c["arguments"]},
            }
            for c in calls
        ]
        made["content"] = made["content"] or None
    if held["role"] == "tool":
        made["tool_call_id"] = held.get("tool_call_id", "")
    return made


def _call(held: Any) -> dict[str, Any] | None:
    """Return a call that a tracer has put into a span of its own."""
    if not isinstance(held, dict) or not held:
        return None
    call = held["call"]
    function = {"name": held["name"], "arguments": held["parameters"]}
    return {"id": call["id"], "type": call["type"], "function": function}


def _tool(held: dict[str, Any]) -> dict[str, Any]:
    parameters = held["parameters"]
    parameters = json.loads(parameters) if isinstance(parameters, str) else parameters
    function = {
        "name": held["name"],
        "description": held.get("description", ""),
        "parameters": parameters,
    }
    return {"type": "function", "function": function}
