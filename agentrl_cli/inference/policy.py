"""The local policy: continuous batching over a Hugging Face causal LM, on CPU or GPU, in this process.

Episodes join and leave the batch at any step, a finished turn frees its place at once, an episode's keys and values are
kept between its turns, and a prompt that several episodes share is computed once. `generate` may be called by any
number of coroutines; one worker thread runs the forwards (serving_loop.py), so tools go on while tokens are made.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl_cli.errors import ModelError, PolicyError
from agentrl_cli.inference.engine import FixedEngine, PagedEngine
from agentrl_cli.inference.fallback import FallbackEngine
from agentrl_cli.inference.kv_cache import BLOCK, NotServed, blocks
from agentrl_cli.inference.memory import auto_memory, position_bytes
from agentrl_cli.inference.model_runner import ModelRunner
from agentrl_cli.inference.request import Request, check_context
from agentrl_cli.inference.sampler import check_sampling, uniforms
from agentrl_cli.inference.serving_loop import Engine, ServingLoop
from agentrl_cli.models.adapter import copy_trained, switch_length
from agentrl_cli.models.vision import reader_of
from agentrl_cli.types import Generation, Int32, Sampling, StopReason

_LOG = logging.getLogger(__name__)


class LocalPolicy:
    """A Policy over a transformers model that lives in this process.

    Args:
        model: Any causal LM of transformers, peft-wrapped or not.
        context_length: Most positions of one episode.
        rows: Most episodes in one decode batch; more wait.
        deterministic: Fixed slots: each episode has the row and the blocks of its slot, prompts are computed one by
            one, and every decode step has the same shape. An episode's numbers then depend on itself and its slot
            alone.
        slot_length: Positions of a slot; no episode may be longer.
        decode: Text of ids; needed for stop strings only.
        memory: Bytes that keys and values may take; None: half of the free memory of the model's device.
        runner: Makes what runs the forwards, if not ModelRunner; where it raises NotServed, the fallback samples.
        source: The model that is trained if `model` is a copy of it, which `publish` renews.

    Raises ModelError if the memory is too small.
    """

    name = "local"
    untrainable, separate_weights = "", False

    def __init__(
        self,
        model: Any,
        *,
        context_length: int,
        rows: int = 64,
        version: str = "base",
        deterministic: bool = False,
        slot_length: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
        memory: int | None = None,
        runner: Callable[[Any], ModelRunner] | None = None,
        source: Any = None,
    ) -> None:
        self.weights_version = version
        self.model, self.source = model, source
        self._decode = decode
        reader = reader_of(model)
        self._unsaid = (
            reader.unsaid if reader is not None else ()
        )  # a placeholder without an image means nothing
        length = (
            min(context_length, slot_length or context_length) if deterministic else context_length
        )
        self._engine = _make_engine(model, runner, length, rows, deterministic, memory)
        self.context_length = min(
            context_length, self._engine.limit
        )  # an episode must fit into the memory
        self._bounded = self.context_length < context_length
        self._orders = itertools.count()
        self._loop = ServingLoop(self._engine, lambda: self.weights_version)

    @property
    def engine(self) -> str:
        """What samples: paged or fallback."""
        return self._engine.name

    @property
    def engine_why(self) -> str:
        """Why the fallback samples; empty for the paged engine."""
        return self._engine.why

    def describe(self) -> str:
        """Return the engine, whether it replays CUDA graphs, and why a faster one does not serve
        the model, for people.
        """
        name = f"{self.engine} with CUDA graphs" if self._engine.records else self.engine
        return f"{name} ({self.engine_why})" if self.engine_why else name

    @property
    def metrics(self) -> dict[str, float]:
        """Memory for keys and values (blocks of positions; bytes with the fallback) and its cost."""
        return self._engine.metrics()

    def take_metrics(self) -> dict[str, float]:
        """`metrics`, counted from here on."""
        return self._engine.metrics(reset=True)

    # --- the Policy interface ----------------------------------------------------------------------------------------

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: Callable[[int], None] | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Sample one turn after `ids`, the whole context so far; only new tokens since the last turn are computed.

        `images`: those of the context in order, for a model that reads them.

        Raises:
            PolicyError: the context is empty or full, has ids that the model does not know, has images that the model
                does not read, the sampling means nothing, or the model failed.
            EnvError: the turn's own `Sampling.allow` raised, or allowed nothing; other turns go on.
        """
        context = np.asarray(ids, np.int32)
        check_context(context, self.context_length, self._engine.vocabulary, bounded=self._bounded)
        if self._unsaid:
            sampling = replace(sampling, bad_ids=(*sampling.bad_ids, *self._unsaid))
        elif images:
            raise PolicyError("This model reads no images.")
        check_sampling(sampling, self._engine.vocabulary)
        if sampling.max_new_tokens < 1:
            sampling = replace(sampling, max_new_tokens=0)
        request = Request(
            key=key,
            ids=context,
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            uniforms=uniforms(sampling.seed, sampling.max_new_tokens).tolist(),
            started=time.monotonic(),
            on_token=on_token,
            decode=self._decode,
            order=next(self._orders),
            images=tuple(images),
        )
        if not sampling.max_new_tokens:
            request.stop = StopReason.LENGTH
            return request.result(self.weights_version)
        self._loop.add(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            await self._loop.wait_for_step()  # the turn's own step: the model may be changed next
            raise

    async def release(self, key: str) -> None:
        """Forget an episode's keys and values."""
        self._loop.release(key)

    async def close(self) -> None:
        """Cancel what runs, wait for the step in progress, and free everything."""
        await self._loop.close()

    def set_version(self, version: str) -> None:
        """Take over changed weights: everything computed with the old ones is dropped."""
        self.weights_version = version
        self._engine.renew()

    async def swap(self, version: str, change: Callable[[], None]) -> None:
        """Change the weights between two turns: `change` runs while nothing is computed.

        Turns that are running end with the weights they began with; those that wait, and later turns of the same
        episodes, begin with the new ones, on keys and values that are computed again. So a turn has one version.
        """

        def apply_change() -> None:
            change()
            self.set_version(version)

        await self._loop.between_turns(apply_change)

    async def publish(self, version: str) -> None:
        """Sample with the weights as they are now, between two turns; a copy of `source` is renewed."""
        await self.swap(
            version, lambda: None if self.source is None else copy_trained(self.source, self.model)
        )

    async def rest(self) -> None:
        """Return when nothing is computed, with all keys and values freed. Turns that wait begin after an await."""
        await self._loop.between_turns(self._engine.rest)


def _make_engine(
    model: Any,
    runner: Callable[[Any], ModelRunner] | None,
    length: int,
    rows: int,
    deterministic: bool,
    memory: int | None,
) -> Engine:
    """Return the paged engine where it gives the model's own numbers, else the fallback."""
    weight = model.get_input_embeddings().weight
    most = auto_memory(weight.device) if memory is None else memory
    switch = switch_length(model)
    try:
        if 0 < switch < length:
            raise NotServed(
                f"a context of more than {switch} tokens changes the positions of all of them; no such one is made with"
                f" rollout.max_tokens={switch}"
            )
        made = ModelRunner(model, plain=deterministic) if runner is None else runner(model)
    except NotServed as why:
        _LOG.warning(
            "%s: episodes are sampled by the fallback engine, which is slower", why.message
        )
        return FallbackEngine(
            model, why=why.message, rows=1 if deterministic else rows, limit=length, memory=most
        )
    each = position_bytes(model.config.get_text_config(), weight.dtype)
    budget = most // (each * BLOCK)
    needed = rows * blocks(length) if deterministic else 2
    if budget < needed:
        raise ModelError(
            f"Keys and values need at least {needed * BLOCK * each / 2**20:.1f} MiB"
            f" and may take {most / 2**20:.1f} (rollout.memory).",
            hint="Raise rollout.memory, or lower rollout.concurrency or rollout.max_tokens.",
        )
    kind = FixedEngine if deterministic else PagedEngine
    return kind(made, limit=length, rows=rows, budget=needed if deterministic else budget)
