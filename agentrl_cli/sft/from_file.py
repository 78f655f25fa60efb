"""Conversations of a file (JSONL, Parquet, CSV …) as demonstrations: OpenAI's, ShareGPT's, Alpaca's and others' rows.

{"conversations": [{"role": …, "content": …, "tools": "[…]", "tool_calls": "[…]"}, …]}
{"conversations": [{"from": "human", "value": …}, …]}                                       ShareGPT
{"messages": […], "tools": […]}                                                             OpenAI
{"prompt": text or messages, "completion": text or messages}
{"instruction": …, "input": …, "output": …}                                                 Alpaca
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import DataError, NotFound
from agentrl_cli.learning.packing import Segment
from agentrl_cli.sft.from_store import shuffled
from agentrl_cli.tasks.forms import conversation, plain_messages
from agentrl_cli.tasks.sources import read_file
from agentrl_cli.types import Origin


def read(path: Path) -> list[tuple[list[Any], list[Any]]]:
    """(messages, function schemas) of each row. Raises DataError with file and line, NotFound without the file."""
    if not path.exists() or path.is_dir():  # a pipe is read, too
        raise NotFound(f"No such file: {path}.")
    found = []
    for number, row in read_file(path):
        if isinstance(row, str):
            raise DataError(f"{path}:{number}: {row}")
        try:
            messages, schemas = _conversation(
                {name: value for name, value in row.items() if value is not None}
            )
            if not any(message.get("role") == "assistant" for message in messages):
                raise DataError("no message of the assistant to learn from.")
        except DataError as error:
            raise DataError(f"{path}:{number}: {error.message}") from error
        found.append((messages, schemas))
    if not found:
        raise DataError(f"{path} has no rows.")
    return found


def _conversation(row: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    if "conversations" in row or "messages" in row:
        said, schemas = conversation(
            row.get("conversations", row.get("messages")), row.get("tools")
        )
        return plain_messages(said), schemas
    if "prompt" in row and "completion" in row:
        asked = (
            [{"role": "user", "content": row["prompt"]}]
            if isinstance(row["prompt"], str)
            else row["prompt"]
        )
        answer = row["completion"]
        answered = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        both = (
            [*asked, *answered] if isinstance(asked, list) and isinstance(answered, list) else None
        )
        said, schemas = conversation(both, row.get("tools"))
        return plain_messages(said), schemas
    if "instruction" in row and "output" in row:
        text = "\n\n".join(filter(None, (str(row["instruction"]), str(row.get("input") or ""))))
        return [
            {"role": "user", "content": text},
            {"role": "assistant", "content": str(row["output"])},
        ], []
    near = "conversations, messages, prompt and completion, or instruction and output"
    raise DataError(
        f"a row to learn from has {near}; this one has {', '.join(sorted(row)) or 'nothing'}."
    )


def batches(
    chat: Chat, rows: Sequence[tuple[list[Any], list[Any]]], size: int, seed: int
) -> Iterator[Any]:
    """Endless batches of conversations, each once an epoch in a new order."""
    for batch in shuffled(len(rows), size, f"file {seed}"):
        rendered = [chat.conversation(*rows[number]) for number in batch]
        yield [
            [Segment(np.asarray(r.ids, np.int32), np.asarray(r.origin) == Origin.MODEL)]
            for r in rendered
        ]
