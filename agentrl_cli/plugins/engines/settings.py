"""The section `engine` of agentrl.yaml."""

from __future__ import annotations

from pydantic import Field

from agentrl_cli.types.section import Section, Unit


class EngineConfig(Section):
    """A vLLM server on this machine, in an environment of its own."""

    start: bool = Field(
        default=False, description="a run starts it for itself, and ends it (backend vllm)"
    )
    env: str | None = Field(
        default=None,
        description="its environment, see `agentrl engine install`; null: ~/.cache/agentrl/PACKAGE",
    )
    package: str = Field(default="vllm==0.32.0", description="what is installed there")
    memory: Unit = Field(default=0.45, description="share of the GPU's memory that it takes")
    options: list[str] = Field(default=[], description="further arguments of `vllm serve`")
