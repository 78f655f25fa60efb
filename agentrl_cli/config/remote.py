"""The settings of a backend that samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl_cli.types.section import Count, Group, Seconds, Section


class BackendConfig(Group):
    """The kind of server that samples, and options of one kind."""

    name: str = Field(
        default="",
        description='what samples: "" this process; vllm, sglang (token ids), openai (text: eval and chat only); or'
        ' "module:object", "file.py:object", a name of the entry-point group agentrl.policies',
    )
    mode: Literal["completions", "chat"] = Field(
        default="completions",
        description="openai: send the exact prompt text, or messages for its own template",
    )
    processed_logprobs: bool = Field(
        default=False,
        description="it reports log-probabilities of its sampling distribution (--logprobs-mode processed_logprobs)",
    )
    sync_dir: str | None = Field(
        default=None,
        description="folder for new weights, readable by the server; null: runs/remote",
    )
    sleep: bool = Field(
        default=False,
        description="vllm: the server frees its GPU memory during updates (--enable-sleep-mode and"
        " VLLM_SERVER_DEV_MODE=1): one GPU for both",
    )


class RequestConfig(Group):
    """Limits of a request to the server."""

    timeout: Seconds = Field(default=600.0, description="seconds of one request")
    retries: Count = Field(default=3, description="times that a failed request is tried again")
    patience: float = Field(
        default=120.0,
        ge=0,
        description="seconds that an unreachable server is waited for, or a busy one that asks for it (Retry-After)",
    )


class RemoteConfig(Section):
    """What samples in place of this process's own engine; the trained weights stay here."""

    backend: BackendConfig = Field(
        default_factory=BackendConfig,
        description='what samples: "" this process; vllm, sglang, openai, or another; with options: {name: vllm, sleep:'
        " true}",
    )
    url: str | list[str] = Field(
        default="",
        description="its address: http://host:8000/v1 (vllm, openai), http://host:30000 (sglang); or a list of several"
        " vllm or sglang servers of the same model",
    )
    model: str = Field(default="", description='its name of the model; "": model.name')
    api_key_env: str = Field(default="", description="environment variable that holds its key")
    request: RequestConfig = Field(
        default_factory=RequestConfig,
        description="seconds of one request; with options: {timeout: 600, retries: 3, patience: 120}",
    )

    @property
    def urls(self) -> list[str]:
        """Return the addresses of several servers; empty if there is one."""
        return self.url if isinstance(self.url, list) else []

    @property
    def address(self) -> str:
        """Return the address, the first of several; empty if none."""
        return self.url if isinstance(self.url, str) else next(iter(self.url), "")
