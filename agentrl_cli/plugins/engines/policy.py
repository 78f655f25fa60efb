"""Policies on servers that take and return token ids, as vLLM and SGLang do (`wires.py`).

A policy of this kind can be trained with: after an update `publish` writes the weights (or the adapter) into a folder
that the server can read, too, and lets the server load them. That waits for running turns, so a turn has one version; a
server that was restarted loads them again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from agentrl_cli.errors import PolicyError
from agentrl_cli.plugins.engines.server import starting_at
from agentrl_cli.plugins.engines.wires import Wire
from agentrl_cli.policies.protocols import OnToken, PolicySource, Published
from agentrl_cli.policies.remote.http import (
    MAX_BODY,
    NO_IMAGES,
    Endpoint,
    RemotePolicy,
    ServerError,
    connection,
)
from agentrl_cli.types import Generation, Int32, Sampling

STABLE = "STABLE"
"""An empty file in a folder of weights, written last, for readers over a network that see the folder grow."""


class TurnGate:
    """Lets turns run together, and the weights change between them."""

    def __init__(self) -> None:
        self._running = 0
        self._idle = asyncio.Condition()
        self._held = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Run one turn, which begins when nothing holds it back."""
        async with self._idle:
            await self._idle.wait_for(lambda: not self._held)
            self._running += 1
        try:
            yield
        finally:
            async with self._idle:
                self._running -= 1
                self._idle.notify_all()

    async def hold(self) -> None:
        """Wait for running turns and let none begin until the next change has ended."""
        async with self._idle:
            self._held = True
            await self._idle.wait_for(lambda: not self._running)

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Change the weights while no turn runs.

        The condition's lock is held until the end: another change, or a `hold`, comes after this one.
        """
        async with self._idle:
            self._held = True
            try:
                await self._idle.wait_for(lambda: not self._running)
                yield
            finally:
                self._held = False
                self._idle.notify_all()


def drop_older(folder: Path) -> None:
    """Delete the folders of the run's earlier versions."""
    name = folder.name.rpartition("-")[0]
    for old in folder.parent.glob(f"{name}-*"):
        if old != folder and old.name.removeprefix(f"{name}-").isdigit():
            shutil.rmtree(old, ignore_errors=True)


class HttpPolicy(RemotePolicy):
    """A server that takes token ids; `wire` is its API."""

    untrainable = ""
    separate_weights = True

    def __init__(
        self,
        wire: Wire,
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
        self.wire, self.name = wire, wire.name
        self.endpoint = Endpoint(url, **{"start": wire.start, **connection})
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
        self.endpoint.starting = starting_at(url)
        self.sleeps = False
        """Whether `sleep` frees the server's memory (vLLM)."""
        self.mark = secrets.token_hex(3)
        """Part of adapter names on the server: another run of this name may have left one of the same version."""
        self._folder: Path | None = None
        self._gate = TurnGate()

    @classmethod
    def of(cls, wire: Wire, source: PolicySource, url: str = "") -> Self:
        """Return the policy that the configuration describes; `url`: one of several servers.

        Raises ConfigError, or PolicyError for a bad address.
        """
        config = source.config
        arguments = connection(config, url)
        vocabulary = source.chat.tokenizer.vocab_size
        if source.trainable:  # only the ids that the trained model has a row for can be trained
            model: Any = source.model()
            vocabulary = int(model.get_input_embeddings().weight.shape[0])
        return cls(
            wire,
            model=config.remote.model or config.model.name,
            context_length=source.context_length,
            processed=config.remote.backend.processed_logprobs,
            lora=config.adapter.enabled,
            vocabulary=vocabulary,
            save=source.save,
            sync_dir=(source.base / (config.remote.backend.sync_dir or "runs/remote")).resolve(),
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
        """Return one turn. Raises PolicyError if the server fails, BadAnswer if its answer cannot be used."""
        if images:
            raise PolicyError(NO_IMAGES)
        async with self._gate.turn():
            started, version = time.perf_counter(), self.weights_version
            made = await self._ask([int(id_) for id_ in ids], sampling)
        sampled, own = self.wire.known_logps(self.processed, sampling)
        unknown = np.full_like(made.logp_policy, np.nan)
        for id_ in made.ids.tolist() if on_token is not None else ():
            on_token(id_)  # type: ignore[misc]  # the loop is empty if it is None
        return replace(
            made,
            logp_sampled=made.logp_sampled if sampled else unknown,
            logp_policy=made.logp_policy if own else unknown,
            weights_version=version,
            seconds=time.perf_counter() - started,
        )

    async def publish(self, version: str) -> None:
        """Write the weights, or the adapter, and let the server load them.

        Only the newest folder stays: a server that was restarted loads it again.
        """
        folder = self.write(version)
        await self.load_weights(folder, version)
        drop_older(folder)

    def write(self, version: str) -> Path:
        """Return a new folder with the weights, or the adapter, as they are now: it gets its name once complete."""
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

    async def restore(self, folder: Path, version: str) -> None:
        """Load weights into a server that may be a new process: it has no earlier version to unload."""
        self._folder = None
        await self.load_weights(folder, version)

    async def load_weights(self, folder: str | Path, version: str) -> None:
        """Let the server load the weights in `folder` as `version`, between two turns.

        Raises PolicyError if it refuses; it then continues with the old version.
        """
        async with self._gate.changing():
            old = self.model if self._folder is not None else ""
            adopted = version == self.weights_version and self.model != self._base
            label = self.model if adopted else f"{version}-{self.mark}"
            if self.sleeps:
                await self.endpoint.command(f"{self.endpoint.root}/wake_up", {})
            await self._take(Path(folder), version, label, old)
            self._folder, self.weights_version = Path(folder), version

    async def sleep(self) -> None:
        if self.sleeps:  # as in Sleeping; level 1: with level 2 vLLM loses its adapters
            await self.hold()
            await self.endpoint.command(f"{self.endpoint.root}/sleep?level=1", {})

    def last_published(self) -> Published:
        """Return the weights of the last `publish`."""
        assert self._folder is not None, "nothing was published"
        return Published(self._folder, self.model)

    async def hold(self) -> None:
        """Wait for running turns and let none begin until `adopt`: another process changes the server's weights."""
        await self._gate.hold()

    async def adopt(self, version: str, published: Published | None) -> None:
        """Sample with the weights that another process had the server load; None: with those that it had."""
        async with self._gate.changing():
            self.weights_version = version
            if published is not None:
                self._folder = published.folder
                self.model = published.label if self.lora else self.model

    async def release(self, key: str) -> None:
        """Do nothing: the server has a prefix cache of its own."""

    async def rest(self) -> None:
        """Do nothing: there is nothing to free in this process."""

    def take_metrics(self) -> dict[str, float]:
        return {}

    def describe(self) -> str:
        return self.name

    async def _ask(self, ids: list[int], sampling: Sampling) -> Generation:
        """Return an answer that was made with the published weights; if the server lost them, it is given them again.

        A restart between two requests shows in the answer alone: the adapter is unknown, or other weights are named.
        """
        for last in (False, True):
            seen = self.endpoint.recoveries
            adapted = self.lora and self._folder is not None
            body = self.wire.body(self.model, adapted, ids, sampling)
            try:
                found = await self.endpoint.ask(
                    self.wire.path,
                    body,
                    lambda answer: self.wire.read(answer, sampling, self.vocabulary),
                )
            except ServerError as error:
                if last or error.status != 404 or self.model == self._base:
                    raise
            else:
                # Adapters are requested by name.
                version = found.weights_version
                if adapted or self._folder is None or version in ("", self.weights_version):
                    return found
                if last:
                    raise PolicyError(
                        f"The server samples with the weights {version!r} "
                        f"and was given {self.weights_version!r}.",
                        hint="Does another trainer write into the same server?",
                    )
            self.endpoint.note_loss(seen)
        raise AssertionError("unreachable")

    async def _take(self, folder: Path, version: str, label: str, old: str) -> None:
        """Let the server load weights, or an adapter under the name `label`, and drop all computed with the old ones.

        `old`: the adapter to unload; "" for none.
        """
        if not self.lora:
            for path, body in self.wire.update(str(folder), version):
                await self._command(f"{self.endpoint.root}{path}", body)
            return
        url = self.endpoint.url
        try:
            load = {"lora_name": label, "lora_path": str(folder)}
            await self._command(f"{url}/load_lora_adapter", load)
        except PolicyError as error:
            if "already" not in error.message:  # the server has it
                raise
        self.model = label
        try:
            if old:
                await self.endpoint.command(f"{url}/unload_lora_adapter", {"lora_name": old})
        except ServerError as error:
            if error.status >= 500:  # otherwise it was restarted since, and does not have it
                raise

    async def _command(self, url: str, body: dict[str, Any]) -> None:
        said = await self.endpoint.command(url, body)
        try:
            answer = json.loads(said) if self.wire.confirms else {"success": True}
        except ValueError:
            answer = {}
        if not isinstance(answer, dict) or not answer.get("success"):
            raise PolicyError(f"{url} did not take the weights: {said[:MAX_BODY]}")

    async def _recover(self) -> None:
        """Load the weights again after a lost connection: the server may be a new process with its first ones."""
        if self._folder is not None:
            await self._take(self._folder, self.weights_version, self.model, "")
