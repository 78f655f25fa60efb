"""`MiniGRPO(model, tokenizer)`: GRPO on a model that the script has loaded, or names; `TRLTrainer` too."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config, load_config
from agentrl_cli.plugins.lightning.algorithm.training import GRPO
from agentrl_cli.rewards import Reward
from agentrl_cli.store import RunRow


class MiniGRPO(GRPO):
    """GRPO with few settings."""

    name = "mini"

    def __init__(
        self,
        model: Any = "tiny",
        tokenizer: Any = None,
        *,
        steps: int | None = None,
        lr: float | None = None,
        group_size: int | None = None,
        prompts_per_step: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`model`: a loaded transformers model, whose weights are the trained ones afterwards, or a name or folder.

        `tokenizer`: that of a loaded model; a name brings its own. `config`: settings of this package by section, such
        as `{"rollout": {"max_turns": 3}}`; the arguments before it go over them.
        """
        if not isinstance(model, (str, Path)) and tokenizer is None:
            raise TypeError("A loaded model needs its tokenizer: MiniGRPO(model, tokenizer).")
        self.model, self.tokenizer = model, tokenizer
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        given = {"train": {"steps": steps, "lr": lr}}
        given["rollout"] = {"group_size": group_size, "prompts_per_step": prompts_per_step}
        self.config: dict[str, dict[str, Any]] = {
            name: dict(section) for name, section in (config or {}).items()
        }
        for name, section in given.items():
            values = {key: value for key, value in section.items() if value is not None}
            self.config[name] = {**self.config.get(name, {}), **values}

    def settings(self, tasks: int) -> Config:
        """Return the configuration. A loaded model is written to a folder first. Raises ConfigError."""
        name = str(self.model)
        if not isinstance(self.model, (str, Path)):
            self._folder = tempfile.TemporaryDirectory(prefix="agentrl-mini-")
            name = self._folder.name
            self.model.save_pretrained(name)
            self.tokenizer.save_pretrained(name)
        flags = {
            f"{section}.{key}": value
            for section, held in self.config.items()
            for key, value in held.items()
        }
        return load_config((), (), os.environ, {**flags, "model.name": name})[0]

    def finish(self, config: Config, run: RunRow) -> None:
        """Give the script's model the trained weights."""
        if self._folder is None:
            return
        from agentrl_cli.models.checkpoint import load_weights

        load_weights(self.model, Path(run.dir) / "checkpoints" / "last")
        self._folder.cleanup()


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
