"""`TRLTrainer(model, reward_function=…)`: TRL's GRPOTrainer makes the updates (`trainer.kind: trl`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl_cli.plugins.lightning.algorithm.mini import MiniGRPO
from agentrl_cli.rewards import Reward


class TRLTrainer(MiniGRPO):
    """`MiniGRPO` whose updates TRL makes. It needs the extra `trl`."""

    name = "trl"

    def __init__(
        self,
        model: Any = "tiny",
        tokenizer: Any = None,
        *,
        reward_function: Callable[..., Any] | None = None,
        **given: Any,
    ) -> None:
        """`reward_function`: with TRL's parameters, f(prompts, completions, <columns of the row>, **kwargs) → numbers,
        or any other that a pack may name; None: the agent returns its reward. `given`: see `MiniGRPO`.
        """
        super().__init__(model, tokenizer, **given)
        self.config["trainer"] = {"kind": "trl", **self.config.get("trainer", {})}
        if reward_function is not None:
            self.rewards = (Reward("reward", reward_function, primary=True),)
