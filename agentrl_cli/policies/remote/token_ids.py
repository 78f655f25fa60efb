"""Servers that take and give token ids: what vLLM and SGLang have in common.

A policy of this kind can be trained with: after an update the trainer writes the weights (or the adapter) into a folder
that the server can read, too, and `publish` lets the server take them. That waits for the turns that are running, so a
turn has one version; a server that was restarted gets them again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.protocols import OnToken
from agentrl_cli.policies.remote.http import Endpoint, ServerError
from agentrl_cli.types import TOP_K, Float32, Generation, Int32, Sampling, StopReason

Answer = tuple[list[int], Float32, list[list[tuple[int, float]]], StopReason]
"""Ids, their log-probabilities as reported, the likeliest (id, log-probability) at each, why it stopped."""


class IdServer:
    """Base of the policies. A subclass says how its server is asked (`_ask`) and given weights (`_take`)."""

    name = "remote"
    trainable = True
    start = ""
    """How such a server is started, for those who have none."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        context_length: int = 32768,
        weights_version: str = "",
        processed: bool = False,
        lora: bool = False,
        vocabulary: int | None = None,
        **connection: Any,
    ) -> None:
        """`vocabulary`: ids that the model has; None: as many as there are integers.

        `processed`: log-probabilities are those of the distribution that is sampled from; else of temperature 1.

        `lora`: published folders are adapters. `connection`: see Endpoint.
        """
        self.endpoint = Endpoint(url, **{"start": self.start, **connection})
        self.endpoint.mend = self._mend
        self.model = model
        self.context_length = context_length
        self.weights_version = weights_version or model
        self.processed = processed
        self.lora = lora
        self.vocabulary = vocabulary
        self._base = model
        self._folder: Path | None = None
        self._running = 0
        self._idle = asyncio.Condition()
        self._held = False

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: OnToken | None = None,
    ) -> Generation:
        """One turn. Raises PolicyError where the server fails, BadAnswer where what it sends cannot be used."""
        async with self._idle:
            await self._idle.wait_for(lambda: not self._held)
            self._running += 1
        started, version = time.perf_counter(), self.weights_version
        try:
            out, logps, tops, reason = await self._ask([int(id_) for id_ in ids], sampling)
        finally:
            async with self._idle:
                self._running -= 1
                self._idle.notify_all()
        sampled, own = self._meaning(logps, sampling)
        top_ids, top_logps = _alternatives(tops, len(out))
        for id_ in out if on_token is not None else ():
            on_token(id_)  # type: ignore[misc]  # the loop is empty where there is none
        return Generation(
            ids=np.asarray(out, np.int32),
            logp_sampled=sampled,
            logp_policy=own,
            entropy=np.full(len(out), np.nan, np.float32),
            top_ids=top_ids,
            top_logps=top_logps,
            stop_reason=reason,
            weights_version=version,
            seconds=time.perf_counter() - started,
        )

    async def publish(self, folder: str | Path, version: str) -> None:
        """Let the server take the weights in `folder` as `version`, between two turns.

        Raises PolicyError where it does not; then the old version goes on.
        """
        async with self._idle:
            self._held = True
            try:
                await self._idle.wait_for(lambda: not self._running)
                old = self.weights_version if self._folder is not None else ""
                await self._take(Path(folder), version, old)
                self._folder, self.weights_version = Path(folder), version
            finally:
                self._held = False
                self._idle.notify_all()

    async def release(self, key: str) -> None:
        """Nothing to forget: the server keeps its own prefix cache."""

    def rest(self) -> None:
        """Nothing to free here."""

    async def close(self) -> None:
        self.endpoint.close()

    async def _ask(self, ids: list[int], sampling: Sampling) -> Answer:
        raise NotImplementedError

    async def _take(self, folder: Path, version: str, old: str) -> None:
        """Give the server new weights, or an adapter, and drop what the old ones computed. `old`: "" for none."""
        raise NotImplementedError

    async def _mend(self) -> None:
        """The server was lost: it may be a new process with its first weights."""
        if self._folder is not None:
            await self._take(self._folder, self.weights_version, "")

    async def _load_adapter(self, url: str, folder: Path, version: str) -> str:
        """Both servers' command for an adapter; its answer, "" where the server has it already."""
        try:
            said = await self.endpoint.command(url, {"lora_name": version, "lora_path": str(folder)})
        except ServerError as error:
            if "already" not in error.message:
                raise
            said = ""
        self.model = version
        return "" if "already" in said else said

    def _meaning(self, logps: Float32, sampling: Sampling) -> tuple[Float32, Float32]:
        """(logp_sampled, logp_policy) of what the server reported; NaN where it does not say."""
        unknown = np.full_like(logps, np.nan)
        if self.processed:
            return logps, unknown if sampling.truncated else logps.copy()
        if sampling.temperature != 1.0:
            return unknown, unknown.copy()
        return (unknown, logps) if sampling.truncated else (logps, logps.copy())


def narrowed(sampling: Sampling) -> dict[str, Any]:
    """What both servers call alike. Raises PolicyError for what no server can be asked.

    All of it is said, also where it is at rest: what is not said a server takes from the model's own
    `generation_config.json` (Qwen2.5's has a repetition penalty of 1.1), and samples from another distribution.
    """
    if sampling.problem:
        raise PolicyError(f"{sampling.problem}.")
    if sampling.allow is not None:
        raise PolicyError("Forced tokens need a local policy.")
    found: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_strings),
        "skip_special_tokens": False,
    }
    if sampling.bad_ids:
        found["logit_bias"] = {str(id_): -100.0 for id_ in sampling.bad_ids}
    return found


def _alternatives(tops: Sequence[Sequence[tuple[int, float]]], n: int) -> tuple[Int32, Float32]:
    """[n, TOP_K] ids (-1 where there is none) and log-probabilities (NaN), best first."""
    ids = np.full((n, TOP_K), -1, np.int32)
    logps = np.full((n, TOP_K), np.nan, np.float32)
    for row, top in enumerate(tops[:n]):
        for column, (id_, logp) in enumerate(sorted(top, key=lambda pair: -pair[1])[:TOP_K]):
            ids[row, column], logps[row, column] = id_, logp
    return ids, logps
