"""The settings of a server that samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl_cli.config.base import Count, Seconds, Section


class RemoteConfig(Section):
    """A server that samples in place of this process; what is trained stays here."""

    backend: Literal["", "vllm", "sglang", "openai"] = Field(
        default="", description='"" samples here; vllm and sglang give token ids; openai gives text: eval and chat only'
    )
    url: str = Field(
        default="", description="its address: http://host:8000/v1 (vllm, openai), http://host:30000 (sglang)"
    )
    model: str = Field(default="", description='the name it serves the model under; "": model.name')
    api_key_env: str = Field(default="", description="environment variable that holds its key")
    mode: Literal["completions", "chat"] = Field(
        default="completions", description="openai: send the exact prompt text, or messages for its own template"
    )
    processed_logprobs: bool = Field(
        default=False,
        description="it reports log-probabilities of what it sampled from (--logprobs-mode processed_logprobs)",
    )
    sync_dir: str | None = Field(
        default=None, description="folder for new weights, which the server can read too; null: runs/remote"
    )
    timeout: Seconds = Field(default=600.0, description="seconds of one request")
    retries: Count = Field(default=3, description="times that a failed request is tried again")
    patience: float = Field(default=120.0, ge=0, description="seconds that an unreachable server is waited for")

    @model_validator(mode="after")
    def _has_url(self) -> RemoteConfig:
        if self.backend and not self.url:
            raise ValueError("remote.backend needs remote.url")
        return self
