"""The reflection model: the served policy, an endpoint, or a function."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import AgentRLError, ConfigError, PolicyError
from agentrl_cli.plugins.prompts.search import Reflect
from agentrl_cli.policies.load import Loaded
from agentrl_cli.registry import resolve
from agentrl_cli.rewards.llm_client import Asked, ask
from agentrl_cli.rollout import seed_of
from agentrl_cli.types import Sampling

MOST = 1024
"""Tokens of an answer."""


def reflection(named: str, model: str, loaded: Loaded, seed: int, base: Path) -> Reflect:
    """Open the model of `--reflect-with`: `served`, an address (with the model's name there), or file.py:function.

    Raises ConfigError or NotFound.
    """
    if named == "served":
        return _ask_served(loaded, seed)
    if named.startswith(("http://", "https://")):
        if not model:
            raise ConfigError(
                "--reflect-with names an endpoint without a model.",
                hint="Add --reflect-model NAME.",
            )
        asked = Asked.of(
            {"url": named, "model": model, "max_tokens": MOST, "temperature": 1.0, "cache": None},
            named,
        )

        async def endpoint(prompt: str) -> str:
            return await ask(asked, [{"role": "user", "content": prompt}])

        return endpoint
    return _function(resolve("reflection models", {}, named, base=base), named)


def _function(found: Callable[[str], Any], named: str) -> Reflect:
    async def call(prompt: str) -> str:
        try:
            answer = found(prompt)
            answer = await answer if inspect.isawaitable(answer) else answer
        except AgentRLError:
            raise
        except Exception as error:
            raise PolicyError(
                f"The reflection model {named} failed: {type(error).__name__}: {error}"
            ) from error
        return str(answer or "")

    return call


def _ask_served(loaded: Loaded, seed: int) -> Reflect:
    """Return the policy itself, without tools."""
    numbers = itertools.count()
    chat: Chat = loaded.chat

    async def sample(prompt: str) -> str:
        number = next(numbers)
        ids = chat.prompt([{"role": "user", "content": prompt}]).ids
        limit = getattr(loaded.policy, "context_length", 4096)
        if len(ids) + 16 > limit:
            raise PolicyError(
                f"The reflection prompt has {len(ids)} tokens, and the served model reads {limit}.",
                hint="Name a reflection model: --reflect-with http://…, or lower --minibatch.",
            )
        sampling = Sampling(
            max_new_tokens=min(MOST, limit - len(ids)), temperature=1.0, stop_ids=chat.stop_ids,
            seed=seed_of(seed, "reflection", number),
        )  # fmt: skip
        made = await loaded.policy.generate(f"reflection-{number}", ids, sampling)
        await loaded.policy.release(f"reflection-{number}")
        return chat.tokenizer.plain(made.ids)

    return sample
