"""`tool_choice` as at OpenAI's: how an assistant turn begins that must call a tool.

A forced beginning is appended to the context before the model goes on: its tokens are the template's way to write a
call, are marked FORCED and are never trained. `required` forces a call and leaves its name to the model; naming a
function forces the name too. It holds for the first assistant turn: an episode whose every turn must call never ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parse import THINK_END
from agentrl_cli.chat.render import Chat
from agentrl_cli.types import ToolSchema

NAME = "qzxname"
"""Stands for the name in a parser's example; no tool is called so."""


def forced_text(chat: Chat, schemas: Sequence[ToolSchema], choice: Any) -> str:
    """What a turn begins with under this choice; empty for `none`, `auto`, and where there are no tools."""
    name = choice.get("function", {}).get("name") if isinstance(choice, Mapping) else None
    if not schemas or (choice != "required" and name is None):
        return ""
    example = chat.parser.example(NAME, {})
    head, _, rest = example.partition(NAME)
    if name is not None:
        empty = rest.find("{}")
        head += str(name) + (rest[:empty] if empty >= 0 else rest[:1])
    # A generation prompt that opens a thinking block has it closed: calls inside it are no calls.
    return (f"\n{THINK_END}\n\n" if chat.opens else "") + head
