"""Policy backends: one file each, one line here. Importing this imports no model library."""

from __future__ import annotations

from agentrl_cli.policies.protocols import OnToken, Policy, generation, require_trainable

POLICIES: dict[str, str] = {
    "local": "agentrl_cli.inference.policy:LocalPolicy",
    "scripted": "agentrl_cli.policies.scripted:ScriptedPolicy",
    "openai": "agentrl_cli.policies.remote.policy:OpenAIPolicy",
    "sglang": "agentrl_cli.policies.remote.sglang:SGLangPolicy",
    "vllm": "agentrl_cli.policies.remote.policy:VLLMPolicy",
}
"""Name to the module and class of a backend; `registry.resolve("policies", POLICIES, name)`."""

__all__ = ["POLICIES", "OnToken", "Policy", "generation", "require_trainable"]
