"""minimind's agent files as they are: https://github.com/jingyaogong/minimind (trainer/train_agent.py).

MOCK_RESULTS       a table of names and functions of one mapping, `{"calculate_math": lambda args: {...}}`
TOOLS              their function schemas; a row's own schemas, in its system message, take precedence
rows               conversations (tools in the system message), gt; the last message is a placeholder
calculate_rewards  (prompts, completions, gt_batch, tools_batch, num_gen, …) → a tensor of one number each
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl_cli.errors import ConfigError, DataError, EnvError
from agentrl_cli.hooks.threads import call
from agentrl_cli.rewards.adapt import Parameters, accept_arguments
from agentrl_cli.rewards.context import RewardContext
from agentrl_cli.tasks.forms import Form, Row, conversation, plain_messages, tool_names
from agentrl_cli.tools.base import Tool, ToolContext
from agentrl_cli.types import Episode, Origin, Task, ToolResult, Turn
from agentrl_cli.types.content import content_text

FAILED = '{"error": "tool not found"}'
"""minimind's answer if a tool fails or answers nothing."""
MOST = 2048
"""Characters of an answer."""


class TableTool(Tool):
    """An entry of a table: a function of one mapping, the arguments."""

    def __init__(
        self,
        name: str,
        function: Callable[[Mapping[str, Any]], Any],
        schema: Mapping[str, Any] | None,
    ) -> None:
        self.name = name
        self.function = function
        self.schema = _schema(name, schema or {"parameters": {"type": "object", "properties": {}}})

    def for_task(self, task: Task) -> Tool | None:
        for given in task.data.get("tool_schemas") or ():
            if _function(given).get("name") == self.name:
                shown = copy.copy(self)
                shown.schema = _schema(self.name, given)
                return shown
        return self

    async def execute(self, state: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        try:
            value = await call(self.function, arguments)
        except Exception:  # noqa: BLE001 - minimind shows no error of a tool to the model
            return ToolResult(FAILED, error="exception")
        return ToolResult((json.dumps(value, ensure_ascii=False) if value else FAILED)[:MOST])


def table_tools(where: str, table: Mapping[Any, Any], schemas: Sequence[Any]) -> list[Tool]:
    """Return the tools of a table of names and functions. Raises ConfigError for anything else."""
    wrong = [
        name
        for name, function in table.items()
        if not isinstance(name, str) or not callable(function)
    ]
    if wrong or not table:
        raise ConfigError(
            f"{where}: a table of tools maps names to functions of the arguments, not {wrong[:1]}."
        )
    known = {
        str(_function(schema).get("name")): schema
        for schema in schemas
        if isinstance(schema, Mapping)
    }
    return [TableTool(name, function, known.get(name)) for name, function in table.items()]


def _function(schema: Any) -> Mapping[str, Any]:
    inner = schema.get("function", schema) if isinstance(schema, Mapping) else {}
    return inner if isinstance(inner, Mapping) else {}


def _schema(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"description": name, **_function(given), "name": name}}


def adapt_reward(
    function: Callable[..., Any], parameters: Parameters, extra: dict[str, Any]
) -> Any:
    """Return the function as one of (episode, ctx); None if it does not have minimind's parameters."""
    if not {"completions", "gt_batch"} <= set(parameters):
        return None

    async def reward(episode: Episode, ctx: RewardContext) -> Any:
        main = episode.chain(episode.main)
        turns = [turn for turn in main.turns if turn.role == "assistant"]
        outputs = [_decode_turn(main, turn, ctx) for turn in turns]
        shown = "\n".join(
            f"<|im_start|>{m['role']}\n{content_text(m.get('content'))}<|im_end|>"
            for m in ctx.task.prompt
        )
        given = {
            "prompts": [shown],
            "completions": [outputs[-1] if outputs else ""],
            "gt_batch": [list(ctx.task.data.get("gt") or ())],
            "tools_batch": [list(ctx.task.data.get("tool_schemas") or ())],
            "num_gen": 1,
            "device": "cpu",
            "turn_outputs_batch": [outputs],
            "unfinished_batch": [bool(turns and turns[-1].calls)],
            **extra,
        }
        (value,) = await call(function, **accept_arguments(given, parameters))
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise EnvError(
                f"The reward function returned {value!r}; one number is expected."
            ) from error

    return reward


def _decode_turn(episode: Episode, turn: Turn, ctx: RewardContext) -> str:
    """Return the text that the model wrote in a turn, with its tags."""
    if ctx.decode is None:
        return content_text(turn.messages[0].get("content"))
    tokens = zip(
        episode.tokens.ids[turn.start : turn.end],
        episode.tokens.origin[turn.start : turn.end],
        strict=True,
    )
    return ctx.decode([int(id_) for id_, origin in tokens if origin == Origin.MODEL])


def convert(row: Row) -> Row:
    """Drop the last message of agent RL and RLAIF rows, as in https://github.com/jingyaogong/minimind"""
    said, schemas = conversation(row.pop("conversations"), None)
    if len(said) < 2:
        raise DataError(
            "`conversations` must be a list of at least two messages, the last one a placeholder."
        )
    row["prompt"] = plain_messages(said[:-1])
    row["tools"] = tool_names(schemas) if schemas else None
    row["tool_schemas"] = schemas
    if not isinstance(row.get("gt", []), list):
        row["gt"] = [row["gt"]]
    return row


FORM = Form(lambda row: "conversations" in row, convert)
