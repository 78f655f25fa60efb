"""Client for a model behind an OpenAI-compatible endpoint, for judges and simulated users.

Answers are cached (in memory, and in a file if configured), calls count against a budget, and every failure is an
EnvError: the episode is masked, never scored zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakValueDictionary

from pydantic import Field

from agentrl_cli.config.yamlfile import read_as
from agentrl_cli.errors import BadAnswer, ConfigError, EnvError, PolicyError
from agentrl_cli.policies.remote.checked import choice_of, excerpt, part
from agentrl_cli.policies.remote.http import Endpoint, check_address
from agentrl_cli.rewards.context import Gate
from agentrl_cli.types import Message
from agentrl_cli.types.plain import is_text
from agentrl_cli.types.section import Count, Positive, Seconds


@dataclass
class Asked:
    """An endpoint with its model, limits, cache and budget; one is shared by all episodes."""

    url: str
    model: Annotated[str, Field(min_length=1)]
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; its value is never stored."""
    temperature: float | None = 0.0
    """None, and so for `max_tokens`: the server's."""
    max_tokens: Positive | None = 512
    timeout: Seconds = 60.0
    """Timeout of one attempt, in seconds."""
    retries: Count = 3
    concurrency: Positive = 8
    budget_calls: Count | None = None
    """Maximum number of requests; cached answers are free."""
    budget_tokens: Count | None = None
    """Tokens (prompt and answer, as counted by the server) after which no request is sent."""
    cache: str | None = ""
    """A JSONL file to cache answers in, beside the file that names it; "": in memory only; None: no cache."""

    def __post_init__(self) -> None:
        self.calls = self.tokens = 0
        self._answers: dict[str, str] = {}
        self.gate = Gate(self.concurrency)
        self._locks = WeakValueDictionary[Any, asyncio.Lock]()

    def lock(self, key: str) -> asyncio.Lock:
        """Return the lock of a question in the running event loop."""
        return self._locks.setdefault((asyncio.get_running_loop(), key), asyncio.Lock())

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str, folder: Path) -> Asked:
        """Make it from a mapping of a file in `folder`. Raises ConfigError for one that it cannot be made of."""
        asked = read_as(cls, given, where, [field.name for field in fields(cls)])
        asked.cache = asked.cache and str(folder / asked.cache)
        try:
            check_address(asked.url)
        except PolicyError as error:
            raise ConfigError(f"{where}: {error}") from error
        if asked.cache and Path(asked.cache).is_file():
            for line in Path(asked.cache).read_text(encoding="utf-8").splitlines():
                # A line cut by a crash is requested again.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    kept = json.loads(line)
                    asked._answers[kept["key"]] = kept["text"]
        return asked


async def ask(asked: Asked, messages: Sequence[Message]) -> str:
    """Return the model's answer to a conversation. Identical requests are sent once, also from concurrent episodes.

    Raises EnvError if the endpoint fails after its retries, returns no text, or the budget is exhausted.
    """
    body: dict[str, Any] = {"model": asked.model, "messages": list(messages)}
    limits = {"temperature": asked.temperature, "max_tokens": asked.max_tokens}
    body |= {name: value for name, value in limits.items() if value is not None}
    if asked.cache is None:
        return await _send(asked, body)
    key = hashlib.sha256(json.dumps([asked.url, body], sort_keys=True).encode()).hexdigest()
    async with asked.lock(key):
        if key in asked._answers:
            return asked._answers[key]
        text = asked._answers[key] = await _send(asked, body)
    if asked.cache:
        Path(asked.cache).parent.mkdir(parents=True, exist_ok=True)
        with Path(asked.cache).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "text": text}, ensure_ascii=False) + "\n")
    return text


async def _send(asked: Asked, body: Mapping[str, Any]) -> str:
    if asked.budget_calls is not None and asked.calls >= asked.budget_calls:
        raise EnvError(f"The budget of {asked.budget_calls} calls to {asked.model} is exhausted.")
    if asked.budget_tokens is not None and asked.tokens >= asked.budget_tokens:
        raise EnvError(f"The budget of {asked.budget_tokens} tokens of {asked.model} is exhausted.")
    asked.calls += 1
    endpoint = Endpoint(
        asked.url,
        api_key=os.environ.get(asked.api_key_env, ""),
        concurrency=1,
        timeout=asked.timeout,
        retries=asked.retries,
    )
    try:
        async with asked.gate.here:
            text, tokens = await endpoint.ask("/chat/completions", body, _read)
    except PolicyError as error:
        raise EnvError(
            f"{asked.model} cannot be reached: {error.message}", hint=error.hint
        ) from error
    finally:
        await endpoint.close()
    asked.tokens += tokens
    return text


def _read(answer: Mapping[str, Any]) -> tuple[str, int]:
    """Return the text of an answer, and how many tokens the server counts. Raises BadAnswer without a text."""
    message = part(choice_of(dict(answer)), "message")
    text, tokens = message.get("content"), part(dict(answer), "usage").get("total_tokens", 0)
    if not isinstance(text, str) or not is_text(text):
        raise BadAnswer(f"answered no text: {excerpt(answer)}")
    counted = isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens < 2**31
    return text, tokens if counted else 0
