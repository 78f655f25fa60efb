"""A policy that emits given texts: for tests, demonstrations and checking a pack's reference solutions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from agentrl_cli.chat.tokenizer import BaseTokenizer
from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.protocols import OnToken, PolicySource, generation
from agentrl_cli.types import Generation, Int32, Sampling, StopReason

Replies = Sequence[str] | Mapping[str, Sequence[str]] | Callable[[str, Sequence[int]], str]


class ScriptedPolicy:
    """Emits given texts, one a turn, each with a stop token; log-probabilities are 0.

    `replies`: texts that every episode goes through from the start; or a mapping from episode key to its texts; or a
    function of (key, context ids). When the texts are used up, a turn is a bare stop token. A text is encoded as a
    model would write it (`<tool_call>` becomes its token) and cut after the first stop token in it, or at
    `max_new_tokens`.
    """

    name = "scripted"
    untrainable = ""
    separate_weights = False

    def __init__(
        self,
        replies: Replies,
        tokenizer: BaseTokenizer,
        *,
        context_length: int = 32768,
        weights_version: str = "scripted",
        logp: float | None = None,
        delay: float = 0.0,
    ) -> None:
        """Set the texts; `logp`: the log-probability of every token (None: 0). `delay`: seconds a turn takes."""
        self.replies = replies
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.weights_version = weights_version
        self.logp = logp
        self.delay = delay
        self._turns: dict[str, int] = {}

    @classmethod
    def of(cls, source: PolicySource) -> ScriptedPolicy:
        """Return a policy that greets: `--model scripted`."""
        return cls(["Hello."], source.chat.tokenizer)

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Return the episode's next text, whatever `images` show.

        Raises PolicyError if the context is longer than `context_length`.
        """
        started = time.perf_counter()
        if len(ids) >= self.context_length:
            raise PolicyError(
                f"A context of {len(ids)} tokens does not fit into {self.context_length}."
            )
        stops = sampling.stop_ids or self.tokenizer.eos_ids
        out = self.tokenizer.encode(self._reply(key, ids))
        end = next((place + 1 for place, id_ in enumerate(out) if id_ in stops), None)
        if end is not None:
            out = out[:end]
        elif stops:
            out = [*out, stops[0]]
        room = min(sampling.max_new_tokens, self.context_length - len(ids))
        reason = StopReason.STOP if len(out) <= room and stops else StopReason.LENGTH
        out = out[:room]
        await asyncio.sleep(self.delay)
        for id_ in out if on_token is not None else ():
            on_token(id_)  # type: ignore[misc]  # the loop is empty if it is None
        return generation(
            out,
            reason,
            weights_version=self.weights_version,
            logps=None if self.logp is None else [self.logp] * len(out),
            seconds=time.perf_counter() - started,
        )

    async def release(self, key: str) -> None:
        self._turns.pop(key, None)

    async def close(self) -> None:
        self._turns.clear()

    async def rest(self) -> None:
        """Do nothing: there is nothing to free."""

    async def publish(self, version: str) -> None:
        """Name the version; the texts stay."""
        self.weights_version = version

    def take_metrics(self) -> dict[str, float]:
        return {}

    def describe(self) -> str:
        return "given texts"

    def _reply(self, key: str, ids: Sequence[int] | Int32) -> str:
        if callable(self.replies):
            return self.replies(key, [int(id_) for id_ in ids])
        turn = self._turns.get(key, 0)
        self._turns[key] = turn + 1
        texts = self.replies.get(key, ()) if isinstance(self.replies, Mapping) else self.replies
        return texts[turn] if turn < len(texts) else ""
