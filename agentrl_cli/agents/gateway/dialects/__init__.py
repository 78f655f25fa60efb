"""The wire formats: one module each, one line here."""

from __future__ import annotations

from agentrl_cli.agents.gateway.dialects import chat, completions, messages, responses
from agentrl_cli.agents.gateway.dialects.base import Dialect

DIALECTS: dict[str, Dialect] = {
    "chat": chat.DIALECT,
    "completions": completions.DIALECT,
    "responses": responses.DIALECT,
    "messages": messages.DIALECT,
}
