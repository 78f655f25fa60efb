"""Who taught the model a token: its probability at each checkpoint, and the groups that raised it most."""

from __future__ import annotations

OFFERS = {"explanations": {"token": "agentrl_cli.plugins.taught.command:explain"}}
