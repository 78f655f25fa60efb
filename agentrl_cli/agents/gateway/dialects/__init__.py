"""The wire formats: one module each, one line here."""

from __future__ import annotations

from agentrl_cli.agents.gateway.dialects import chat, messages, responses
from agentrl_cli.agents.gateway.dialects.base import Dialect

DIALECTS: dict[str, Dialect] = {
    "chat": chat.DIALECT,
    "completions": chat.COMPLETIONS,
    "responses": responses.DIALECT,
    "messages": messages.DIALECT,
}
