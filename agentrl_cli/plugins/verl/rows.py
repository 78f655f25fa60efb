"""verl's rows: prompt (messages), data_source, reward_model.ground_truth, extra_info (tools_kwargs …)."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl_cli.errors import DataError
from agentrl_cli.tasks.forms import Form, Row, message_list

AGENTS = ("single_turn_agent", "tool_agent")


def convert(row: Row) -> Row:
    """Lift `ground_truth` to the row: https://verl.readthedocs.io/en/latest/preparation/prepare_data.html"""
    model = row.get("reward_model") or {}
    extra = row.get("extra_info") or {}
    if not isinstance(model, Mapping) or not isinstance(extra, Mapping):
        raise DataError("`reward_model` and `extra_info` must be objects.")
    if isinstance(row.get("prompt"), list):
        row["prompt"] = message_list(row["prompt"], "prompt")
    row.setdefault("family", str(row.get("data_source") or ""))
    row.setdefault("ground_truth", model.get("ground_truth"))
    agent, kwargs = row.get("agent_name"), extra.get("tools_kwargs")
    if agent not in (None, *AGENTS):
        raise DataError(
            f"`agent_name` is {agent!r}, one of verl's own agent loops; {' and '.join(AGENTS)} run here."
        )
    if agent == "single_turn_agent" or row.get("use_tool") is False:
        row["tools"] = []
    elif extra.get("need_tools_kwargs") and isinstance(kwargs, Mapping) and kwargs:
        row.setdefault(
            "tools", list(kwargs)
        )  # verl shows a row the tools that it has arguments for
    return row


FORM = Form(
    lambda row: "prompt" in row and ("reward_model" in row or "data_source" in row), convert
)
