"""Policy backends: one file each, one line here. Importing this imports no model library."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl_cli.config.remote import RemoteConfig

POLICIES: dict[str, str] = {
    "local": "agentrl_cli.policies.load:local_policy",
    "scripted": "agentrl_cli.policies.scripted:ScriptedPolicy.of",
    "openai": "agentrl_cli.policies.remote.text:OpenAIPolicy.of",
}
"""Name to the function that makes a backend's policy from a PolicySource.

`remote.backend` is a key of this table or of a plugin's, a "module:object" or "file.py:object", or an entry point
of `agentrl.policies`.
"""


def backend_name(spec: str | None, model: str, remote: RemoteConfig) -> str:
    """Return the configured backend of `model`; one that is asked for by another name runs in this process."""
    if (spec or model) == "scripted":
        return "scripted"
    return remote.backend.name if remote.backend.name and spec in (None, model) else "local"
