"""The section `trainer` of agentrl.yaml."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from agentrl_cli.types.section import Section


class TrainerConfig(Section):
    """The trainer that computes the updates."""

    fixed: ClassVar[bool] = True

    kind: Literal["agentrl", "trl"] = Field(
        default="agentrl",
        description="agentrl: this package's trainer; trl: TRL's GRPOTrainer (extra trl)",
    )
    options: dict[str, Any] = Field(
        default={},
        description="trl: fields of GRPOConfig over what the other settings give, e.g. {loss_type: cispo}",
    )
