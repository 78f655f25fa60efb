"""`tool_choice`, as in OpenAI's API: the prefix of an assistant turn that must call a tool.

The prefix is appended to the context before the model generates: its tokens are how the template writes a call, have
the origin FORCED and are never trained. `required` forces a call and leaves its name to the model; naming a function
forces the name too. It applies to the first assistant turn: an episode whose every turn must call never ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.thinking import THINK_END
from agentrl_cli.types import ToolSchema

NAME = "qzxname"
"""Stands for the name in a parser's example; not the name of any tool."""


def forced_text(chat: Chat, schemas: Sequence[ToolSchema], choice: Any) -> str:
    """Return the text that a turn must begin with; empty for `none` and `auto`, and without tools."""
    name = choice.get("function", {}).get("name") if isinstance(choice, Mapping) else None
    if not schemas or (choice != "required" and name is None):
        return ""
    head, _, rest = chat.parser.example(NAME, {}).partition(NAME)
    if name is not None:
        empty = rest.find("{}")
        head += str(name) + (rest[:empty] if empty >= 0 else rest[:1])
    # If the generation prompt opens a thinking block, close it: calls inside it do not count.
    return (f"\n{THINK_END}\n\n" if chat.opens else "") + head
