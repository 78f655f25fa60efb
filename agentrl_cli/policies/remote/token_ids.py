"""Servers that take and return token ids: what vLLM and SGLang have in common.

A policy of this kind can be trained with: after an update `publish` writes the weights (or the adapter) into a folder
that the server can read, too, and lets the server load them. That waits for running turns, so a turn has one version; a
server that was restarted loads them again.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.protocols import OnToken, PolicySource
from agentrl_cli.policies.remote.base import RemotePolicy, connection
from agentrl_cli.policies.remote.http import Endpoint, ServerError
from agentrl_cli.types import TOP_K, Float32, Generation, Int32, Sampling, StopReason

STABLE = "STABLE"
"""Marks a folder of weights as complete."""
NO_IMAGES = "Servers are sent token ids alone, without images."
Answer = tuple[list[int], Float32, list[list[tuple[int, float]]], StopReason]
"""Ids, their log-probabilities as reported, the likeliest (id, log-probability) at each, why it stopped."""


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that one process had the servers load, for other processes that sample from the same servers."""

    folder: Path
    label: str
    """The servers' name of an adapter."""
    lost: frozenset[str] = frozenset()
    """Addresses of the servers that do not have them yet."""


class IdServer(RemotePolicy):
    """Base of the policies. A subclass implements how its server samples (`_ask`) and loads weights (`_take`)."""

    name = "remote"
    untrainable = ""
    separate_weights = True
    start = ""
    """How to start such a server, for the hint of an error."""

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
        save: Callable[[Path], None] | None = None,
        sync_dir: Path | None = None,
        **connection: Any,
    ) -> None:
        """`vocabulary`: ids that the model has; None: as many as there are integers.

        `processed`: log-probabilities are those of the distribution that is sampled from; else of temperature 1.

        `lora`: published folders are adapters. `save` writes the weights, or the adapter, into a folder; `sync_dir`
        holds the folders for the server. `connection`: see Endpoint.
        """
        self.endpoint = Endpoint(url, **{"start": self.start, **connection})
        self.endpoint.recover = self._recover
        self.model = model
        self.context_length = context_length
        self.weights_version = weights_version or model
        self.processed = processed
        self.lora = lora
        self.vocabulary = vocabulary
        self.save = save
        self.sync_dir = sync_dir
        self._base = model
        self.sleeps = False
        """Whether `sleep` frees the server's memory (vLLM)."""
        self.mark = secrets.token_hex(3)
        """Part of adapter names on the server: another run of this name may have left one of the same version."""
        self._folder: Path | None = None
        self._running = 0
        self._idle = asyncio.Condition()
        self._held = False

    @classmethod
    def of(cls, source: PolicySource, url: str = "") -> Self:
        """As the configuration describes the server; `url`: one of several.

        Raises ConfigError, or PolicyError for a bad address.
        """
        config, tokenizer = source.config, source.chat.tokenizer
        arguments = connection(config, url)
        vocabulary = max([tokenizer.vocab_size, *(token.id + 1 for token in tokenizer.added)])
        if source.trainable:  # only the ids that the trained model has a row for can be trained
            model: Any = source.model()
            vocabulary = int(model.get_input_embeddings().weight.shape[0])
        return cls(
            model=config.remote.model or config.model.name,
            context_length=source.context_length,
            processed=config.remote.processed_logprobs,
            lora=config.adapter.enabled,
            vocabulary=vocabulary,
            save=source.save,
            sync_dir=(source.base / (config.remote.sync_dir or "runs/remote")).resolve(),
            **arguments,
        )

    def servers(self) -> list[Self]:
        """Return itself, the only one."""
        return [self]

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
        """One turn. Raises PolicyError if the server fails, BadAnswer if its answer cannot be used."""
        if images:
            raise PolicyError(NO_IMAGES)
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
            on_token(id_)  # type: ignore[misc]  # the loop is empty if it is None
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

    async def publish(self, version: str) -> None:
        """Write the weights, or the adapter, and let the server load them.

        Only the newest folder stays: a server that was restarted loads it again.
        """
        folder = self.write(version)
        await self.load_weights(folder, version)
        self.drop_older(folder)

    def write(self, version: str) -> Path:
        """Return the folder with the weights, or the adapter, as they are now. It is complete once it has this name.

        The empty file STABLE in it is written last, for readers over a network that see a folder grow.
        """
        assert self.save is not None and self.sync_dir is not None, "made without what is trained"
        name, _, step = version.rpartition("@")
        folder = self.sync_dir / f"{name}-{step}"
        beside = self.sync_dir / f".{folder.name}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        self.save(beside)
        (beside / STABLE).touch()
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
        return folder

    def drop_older(self, folder: Path) -> None:
        """Delete the folders of this run's earlier versions."""
        name = folder.name.rpartition("-")[0]
        for old in folder.parent.glob(f"{name}-*"):
            if old != folder and old.name.removeprefix(f"{name}-").isdigit():
                shutil.rmtree(old, ignore_errors=True)

    async def restore(self, folder: Path, version: str) -> None:
        """Load weights into a server that may be a new process: it has no earlier version to unload."""
        self._folder = None
        await self.load_weights(folder, version)

    async def load_weights(self, folder: str | Path, version: str) -> None:
        """Let the server load the weights in `folder` as `version`, between two turns.

        Raises PolicyError if it refuses; it then continues with the old version.
        """
        async with self._idle:
            self._held = True
            try:
                await self._idle.wait_for(lambda: not self._running)
                old = self.model if self._folder is not None else ""
                adopted = version == self.weights_version and self.model != self._base
                label = self.model if adopted else f"{version}-{self.mark}"
                if self.sleeps:
                    await self.endpoint.command(f"{self.endpoint.root}/wake_up", {})
                await self._take(Path(folder), version, label, old)
                self._folder, self.weights_version = Path(folder), version
            finally:
                self._held = False
                self._idle.notify_all()

    async def sleep(self) -> None:
        if self.sleeps:  # as in Sleeping; level 1: with level 2 vLLM loses its adapters
            await self.hold()
            await self.endpoint.command(f"{self.endpoint.root}/sleep?level=1", {})

    def published(self) -> Published:
        """Return the weights of the last `publish`."""
        assert self._folder is not None, "nothing was published"
        return Published(self._folder, self.model)

    async def hold(self) -> None:
        """Wait for running turns and let none begin until `adopt`: another process changes the server's weights."""
        async with self._idle:
            self._held = True
            await self._idle.wait_for(lambda: not self._running)

    async def adopt(self, version: str, published: Published | None) -> None:
        """Sample with the weights that another process had the server load; None: with those that it had."""
        async with self._idle:
            self.weights_version = version
            if published is not None:
                self._folder = published.folder
                self.model = published.label if self.lora else self.model
            self._held = False
            self._idle.notify_all()

    async def release(self, key: str) -> None:
        """Nothing to forget: the server has a prefix cache of its own."""

    async def rest(self) -> None:
        """Nothing to free in this process."""

    def take_metrics(self) -> dict[str, float]:
        return {}

    def describe(self) -> str:
        return self.name

    async def _ask(self, ids: list[int], sampling: Sampling) -> Answer:
        raise NotImplementedError

    async def _take(self, folder: Path, version: str, label: str, old: str) -> None:
        """Let the server load weights, or an adapter under the name `label`, and drop what the old ones computed.

        `old`: the adapter to unload; "" for none.
        """
        raise NotImplementedError

    async def _recover(self) -> None:
        """After a lost connection: the server may be a new process with its first weights."""
        if self._folder is not None:
            await self._take(self._folder, self.weights_version, self.model, "")

    async def _load_adapter(self, url: str, folder: Path, label: str) -> str:
        """Both servers' command for an adapter; its answer, "" if the server has it already."""
        try:
            said = await self.endpoint.command(url, {"lora_name": label, "lora_path": str(folder)})
        except ServerError as error:
            if "already" not in error.message:
                raise
            said = ""
        self.model = label
        return "" if "already" in said else said

    async def _unload_adapter(self, url: str, old: str) -> None:
        """Both servers' command; no error if the server, restarted since, does not have it."""
        try:
            await self.endpoint.command(url, {"lora_name": old})
        except ServerError as error:
            if error.status >= 500:
                raise

    def _meaning(self, logps: Float32, sampling: Sampling) -> tuple[Float32, Float32]:
        """(logp_sampled, logp_policy) of what the server reported; NaN if unknown."""
        unknown = np.full_like(logps, np.nan)
        if self.processed:
            return logps, unknown if sampling.truncated else logps.copy()
        if sampling.temperature != 1.0:
            return unknown, unknown.copy()
        return (unknown, logps) if sampling.truncated else (logps, logps.copy())


def narrowed(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters that both servers name alike. Raises PolicyError for what no server supports.

    All of them are sent, neutral values too: a server takes a missing one from the model's own
    `generation_config.json` (Qwen2.5's has a repetition penalty of 1.1), and samples from another distribution.
    """
    if sampling.problem:
        raise PolicyError(f"{sampling.problem}.")
    if sampling.keep_support:
        raise PolicyError(
            "A server does not report the tokens that it drew from.",
            hint="Leave out rollout.replay_truncation.",
        )
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
    """[n, TOP_K] ids (-1 if absent) and log-probabilities (NaN), best first."""
    ids = np.full((n, TOP_K), -1, np.int32)
    logps = np.full((n, TOP_K), np.nan, np.float32)
    for row, top in enumerate(tops[:n]):
        for column, (id_, logp) in enumerate(sorted(top, key=lambda pair: -pair[1])[:TOP_K]):
            ids[row, column], logps[row, column] = id_, logp
    return ids, logps
