"""Algorithms that train: the tasks become a pack, the agent its agent, and this package's trainer does the rest.

Every model call goes through the gateway, so the episodes in `runs/agentrl.db` have the very tokens that were sampled,
and the LightningStore of the script has the same calls as spans.

`MiniGRPO(model, tokenizer)`: GRPO on a model that the script has loaded, or names; `TRLTrainer` too.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config, load_config
from agentrl_cli.errors import ConfigError
from agentrl_cli.plugins.lightning.algorithm.base import Algorithm, plain, rows
from agentrl_cli.plugins.lightning.emitter import find_final_reward
from agentrl_cli.plugins.lightning.runner import Runner
from agentrl_cli.plugins.lightning.types import LLM
from agentrl_cli.rewards import Reward
from agentrl_cli.runtime import to_stderr, train
from agentrl_cli.store import RunRow
from agentrl_cli.tasks import AgentSpec, BadLine, Pack
from agentrl_cli.types import Task

_LOG = logging.getLogger(__name__)
TEXTS = ("prompt", "question", "query", "instruction", "input", "problem")
"""Fields of a task that screens show as its prompt; the agent makes its own."""


@dataclass(frozen=True)
class DatasetPack(Pack):
    """A pack whose rows are items of datasets, of any kind."""

    items: Mapping[str, Sequence[Any]] = field(default_factory=dict, repr=False)
    """Split → items."""

    def splits(self) -> list[str]:
        """Return the splits that have items."""
        return list(self.items)

    def read(self, split: str) -> tuple[list[Task], list[BadLine]]:
        """Return the items of a split as tasks."""
        found = []
        for number, item in enumerate(self.items.get(split, ())):
            held = plain(item)
            columns = held if self.rewards and isinstance(held, dict) else {}
            row = {**columns, "id": f"{split}-{number:05d}", "prompt": _prompt(held), "input": held}
            found.append(self.task(row, split))
        return found, []

    def item(self, task: Task) -> Any:
        """Return the item that a task was made of."""
        return self.items[task.split][int(task.id.rpartition("-")[2])]


class GRPO(Algorithm):
    """Trains with a configuration of this package. `VERL` and `MiniGRPO` make one from theirs."""

    name = "lightning"
    rewards: tuple[Reward, ...] = ()
    """Rewards of an episode; empty: the agent returns it."""
    last: RunRow | None = None
    """The run, once it has ended."""

    def settings(self, tasks: int) -> Config:
        """Return the configuration for so many training tasks."""
        raise NotImplementedError

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Train the trainer's agent. Raises AgentRLErrors; ConfigError without tasks."""
        if train_dataset is None or not len(train_dataset):
            raise ConfigError("Training needs a train_dataset with tasks.")
        trainer, config = self.get_trainer(), self.settings(len(train_dataset))
        if self.get_llm_proxy() is not None:
            _LOG.warning("llm_proxy has no effect: each episode has an address of its own.")
        config = config.replace(rollout={"concurrency": trainer.n_runners})
        items = {config.task.split_train: rows(train_dataset)}
        if held := rows(val_dataset):
            items[config.train.eval.split] = held
        pack = DatasetPack(
            self.name,
            Path(),
            "Tasks of a script.",
            "",
            (),
            self.rewards,
            {},
            {},
            None,
            sandbox=False,
            items=items,
        )
        episodes = Episodes(trainer, pack, config)
        name = str(getattr(trainer.agent, "__name__", type(trainer.agent).__name__))
        spec = AgentSpec("function", Path(), function=name, target=episodes.play)
        pack = replace(pack, agent=spec)
        narrate = _LOG.info if _LOG.isEnabledFor(logging.INFO) else to_stderr
        with contextlib.ExitStack() as stack:
            for number, runner in enumerate(episodes.runners):
                given = {"agent": trainer.agent, "store": trainer.store, "hooks": trainer.hooks}
                stack.enter_context(runner.run_context(**given, worker_id=number))
            self.last = train(config, packs=[pack], project=trainer.project, narrate=narrate)
        self.finish(config, self.last)

    def finish(self, config: Config, run: RunRow) -> None:
        """Called with the run at its end."""


class Episodes:
    """The trainer's runners as the agent of a pack: each episode is one `step` of a free runner."""

    def __init__(self, trainer: Any, pack: DatasetPack, config: Config) -> None:
        self._trainer, self._pack, self._config = trainer, pack, config
        self.runners: list[Runner[Any]] = [
            copy.copy(trainer.runner) for _ in range(trainer.n_runners)
        ]
        self._free = list(self.runners)

    async def play(self, task: Task, base_url: str, api_key: str, model: str) -> float | None:
        """Run one episode; returns its final reward, None if there was none."""
        while not self._free:
            await asyncio.sleep(0.01)
        runner, rollout = self._free.pop(), self._config.rollout
        try:
            sampling = {"temperature": rollout.temperature, "max_tokens": rollout.max_new_tokens}
            llm = LLM(endpoint=base_url, model=model, api_key=api_key, sampling_parameters=sampling)
            resources = {**(self._trainer.initial_resources or {}), "main_llm": llm}
            ended = await runner.step(
                self._pack.item(task),
                resources={"main_llm": llm, **resources},  # functions get the first of its kind
                mode="train" if task.split == self._config.task.split_train else "val",
            )
            if self._pack.rewards:  # the agent's own would replace them
                return None
            spans = await self._trainer.store.query_spans(ended.rollout_id, "latest")
            return find_final_reward(spans)
        finally:
            self._free.append(runner)


def _prompt(held: Any) -> str:
    if isinstance(held, Mapping):
        held = next(
            (held[name] for name in TEXTS if isinstance(held.get(name), str) and held[name]), held
        )
    return held if isinstance(held, str) and held else json.dumps(held, ensure_ascii=False)


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
        self.config: dict[str, dict[str, Any]] = dict(config or {})
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
        flags["model.name"] = name
        return load_config((), (), os.environ, flags)[0]

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
