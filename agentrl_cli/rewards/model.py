"""A sequence-classification model as a reward: one forward pass over the conversation, its single output the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl_cli.config.yamlfile import read_as
from agentrl_cli.errors import EnvError, ModelError, describe_error
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.rewards.context import Gate, RewardContext, Scored, split_messages
from agentrl_cli.types import Episode
from agentrl_cli.types.content import content_text
from agentrl_cli.types.section import Positive


@dataclass(eq=False)
class RewardModel:
    """`model: {name, device, max_tokens, squash}` in task.yaml; a reward function. Loaded at the first episode.

    `name`: a Hugging Face id, or a folder. The conversation is rendered by the model's chat template, or as
    `role: text` lines if it has none. `squash: sigmoid` maps the output to 0…1. A conversation that is too long, a
    failure, or an output that is not a number is an EnvError.
    """

    name: Annotated[str, Field(min_length=1)]
    device: str = "cpu"
    max_tokens: Positive = 4096
    squash: Literal["none", "sigmoid"] = "none"
    revision: str | None = None

    def __post_init__(self) -> None:
        self._loaded: tuple[Any, Any] | None = None
        self._one_at_a_time = Gate(1)

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str, folder: Path) -> RewardModel:
        """Make it from a mapping; a folder beside task.yaml takes precedence over a hub name."""
        made = read_as(cls, given, where, [field.name for field in fields(cls)])
        path = folder / made.name
        made.name = str(path) if path.is_dir() else made.name
        return made

    async def __call__(self, episode: Episode, ctx: RewardContext) -> Scored:
        prompt, completion = split_messages(episode, ctx)
        async with self._one_at_a_time.here:
            try:
                value = await in_thread(self._score, [*prompt, *completion])
            except (ModelError, EnvError):
                raise
            except Exception as error:
                raise EnvError(
                    f"The reward model {self.name} raised {describe_error(error)}"
                ) from error
        return ctx.part(value)

    def _score(self, messages: list[dict[str, Any]]) -> float:
        import torch

        tokenizer, model = self._load()
        messages = [
            {**message, "content": content_text(message.get("content"))} for message in messages
        ]
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        else:
            text = "\n".join(
                f"{message['role']}: {message.get('content') or ''}" for message in messages
            )
        # A chat template writes the special tokens itself: a second BOS would change the score.
        ids = tokenizer(
            text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template
        ).input_ids
        most = min(
            self.max_tokens,
            getattr(model.config, "max_position_embeddings", None) or self.max_tokens,
        )
        if ids.shape[1] > most:
            raise EnvError(
                f"The conversation has {ids.shape[1]} tokens; the reward model takes {most}."
            )
        with torch.inference_mode():
            output = model(input_ids=ids.to(self.device)).logits
        if output.numel() != 1:
            raise EnvError(
                f"The reward model {self.name} has {output.numel()} outputs; a reward is one number."
            )
        value = float(output.item())
        if not math.isfinite(value):
            raise EnvError(f"The reward model {self.name} answered {value}.")
        return 1 / (1 + math.exp(-value)) if self.squash == "sigmoid" else value

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(self.name, revision=self.revision)
                model = AutoModelForSequenceClassification.from_pretrained(
                    self.name, revision=self.revision
                )
            except (OSError, ValueError) as error:
                raise ModelError(
                    f"The reward model {self.name} cannot be loaded: {error}"
                ) from error
            self._loaded = (tokenizer, model.eval().to(self.device))
        return self._loaded
