"""The settings of a backend that samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl_cli.config.base import Count, Seconds, Section, Unit


class EngineConfig(Section):
    """A vLLM server on this machine, in an environment of its own."""

    start: bool = Field(default=False, description="a run starts it for itself, and ends it (backend vllm)")
    env: str | None = Field(
        default=None, description="its environment, see `agentrl engine install`; null: ~/.cache/agentrl/PACKAGE"
    )
    package: str = Field(default="vllm==0.32.0", description="what is installed there")
    memory: Unit = Field(default=0.45, description="share of the GPU's memory that it takes")
    options: list[str] = Field(default=[], description="further arguments of `vllm serve`")


class RemoteConfig(Section):
    """What samples in place of this process's own engine; the trained weights stay here."""

    backend: str = Field(
        default="",
        description='what samples: "" this process; vllm, sglang (token ids), openai (text: eval and chat only); or'
        ' "module:object", "file.py:object", a name of the entry-point group agentrl.policies',
    )
    url: str = Field(
        default="", description="its address: http://host:8000/v1 (vllm, openai), http://host:30000 (sglang)"
    )
    urls: list[str] = Field(
        default=[], description="addresses of several vllm or sglang servers of the same model, in place of url"
    )
    model: str = Field(default="", description='its name of the model; "": model.name')
    api_key_env: str = Field(default="", description="environment variable that holds its key")
    mode: Literal["completions", "chat"] = Field(
        default="completions", description="openai: send the exact prompt text, or messages for its own template"
    )
    processed_logprobs: bool = Field(
        default=False,
        description="it reports log-probabilities of its sampling distribution (--logprobs-mode processed_logprobs)",
    )
    sync_dir: str | None = Field(
        default=None, description="folder for new weights, readable by the server; null: runs/remote"
    )
    sleep: bool = Field(
        default=False,
        description="vllm: the server frees its GPU memory during updates (--enable-sleep-mode and"
        " VLLM_SERVER_DEV_MODE=1): one GPU for both",
    )
    timeout: Seconds = Field(default=600.0, description="seconds of one request")
    retries: Count = Field(default=3, description="times that a failed request is tried again")
    patience: float = Field(default=120.0, ge=0, description="seconds that an unreachable server is waited for")
