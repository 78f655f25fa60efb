"""The local policy: continuous batching over a Hugging Face causal LM, on CPU or GPU, in this process.

Episodes join and leave the batch at any step, a finished row frees its place at once, an episode's keys and values are
kept between its turns, and a prompt that several episodes share is computed once. `generate` may be called by any
number of coroutines; one worker thread runs the forwards, so tools go on while tokens are made.

A request is admitted with the keys and values of all its context but the last token; that one is fed by the decode step
that draws its first token. Who waits, who is admitted and who left is decided in the event loop, between two steps:
the thread touches the batch only while the loop does not.

Not here: which engine runs the forwards (local_engine.py), the batch itself (local_batch.py, local_rows.py), one turn's
own data (local_request.py), drawing (local_sampling.py), and the training forward (forward.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl_cli.errors import AgentRLError, ModelError, PolicyError
from agentrl_cli.policies.local_attention import NotServed
from agentrl_cli.policies.local_batch import DecodeBatch
from agentrl_cli.policies.local_cache import BLOCK, blocks
from agentrl_cli.policies.local_engine import choose_engine
from agentrl_cli.policies.local_graphs import Capture
from agentrl_cli.policies.local_memory import auto_memory, graphs_fit, position_bytes
from agentrl_cli.policies.local_paged import PagedBatch, check_pages
from agentrl_cli.policies.local_plain import PlainBatch
from agentrl_cli.policies.local_request import Request, check_sampling
from agentrl_cli.policies.local_sampling import uniforms
from agentrl_cli.policies.local_vision import reader_of
from agentrl_cli.policies.protocols import generation
from agentrl_cli.types import Generation, Int32, Sampling, StopReason

_LOG = logging.getLogger(__name__)


class LocalPolicy:
    """A Policy over a transformers model that lives in this process.

    Args:
        model: Any causal LM of transformers, peft-wrapped or not.
        context_length: Most positions of one episode.
        rows: Most episodes in one decode batch; more wait.
        lanes: Fixed batch shapes: each episode has the lane of its slot, prompts are computed one by one, and every
            decode step has the same shape. An episode's numbers then depend on itself and its slot alone
            (`deterministic: true`).
        lane_length: Positions that every lane attends to; no episode may be longer.
        decode: Text of ids; needed for stop strings only.
        memory: Bytes that keys and values may take; None: half of what is free on the model's device.
        record: Makes what records decode steps (local_graphs.py); None: they are not recorded. Lanes never are, and
            nothing is where it would take much of the memory.
        trains: The model is trained in between: pages and recordings stay meanwhile, and count for that.

    Attributes:
        engine: What runs the forwards: fused, shared or plain (local_engine.py).
        copies_weights: True where episodes are sampled from a copy of the weights that `set_version` renews: an
            optimizer may then work on the model's own while they are.

    Raises ModelError where the memory does not hold what it must.
    """

    name = "local"
    trainable = True

    def __init__(
        self,
        model: Any,
        *,
        context_length: int,
        rows: int = 64,
        version: str = "base",
        lanes: bool = False,
        lane_length: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
        memory: int | None = None,
        record: Callable[[], Capture] | None = None,
        trains: bool = False,
    ) -> None:
        self.weights_version = version
        self._decode = decode
        reader = reader_of(model)
        self._unsaid = reader.unsaid if reader is not None else ()  # a placeholder without an image means nothing
        self._batch = _make_batch(model, version, context_length, rows, lanes, lane_length, memory, record, trains)
        self.context_length = min(context_length, self._batch.limit)  # an episode must fit into the memory
        self._bounded = self.context_length < context_length
        if isinstance(self._batch, PlainBatch):
            self.engine, self.copies_weights = "plain", False
        else:
            self.engine, self.copies_weights = self._batch.engine.name, self._batch.engine.copies
        self._orders = itertools.count()
        self._waiting: list[Request] = []
        self._fresh: list[Request] = []
        """Those whom the newest steps were to begin with: a failure reaches them too."""
        self._released: list[str] = []
        self._task: asyncio.Task[None] | None = None
        self._stepping = False
        """True while the thread has the batch."""
        self._called = False
        """True where the event loop wants the batch: somebody came, left or waits."""
        self._held = False
        """True while new weights wait for the running turns: no turn is begun then."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    @property
    def engine_why(self) -> str:
        """Why no faster engine runs this model; empty for the fastest."""
        return self._batch.why

    @property
    def engine_line(self) -> str:
        """The engine, whether its steps are recorded, and why it is no faster one, for people."""
        recorded = isinstance(self._batch, PagedBatch) and not self._batch.steps.why
        name = f"{self.engine} with CUDA graphs" if recorded else self.engine
        return f"{name} ({self.engine_why})" if self.engine_why else name

    @property
    def prefill_tokens(self) -> int:
        """Prompt positions computed so far; tests and metrics read it."""
        return self._batch.prefill_tokens

    @property
    def metrics(self) -> dict[str, float]:
        """Memory for keys and values (blocks of positions; bytes with the engine plain) and what it cost."""
        unit = "bytes" if isinstance(self._batch, PlainBatch) else "blocks"
        return {
            f"rollout/kv_{unit}": float(self._batch.used),
            f"rollout/kv_{unit}_peak": float(self._batch.peak),
            "rollout/preemptions": float(self._batch.preemptions),
            "rollout/prefill_tokens": float(self._batch.prefill_tokens),
        }

    def take_metrics(self) -> dict[str, float]:
        """`metrics`, counted anew from here on."""
        found = self.metrics
        self._batch.peak = self._batch.preemptions = self._batch.prefill_tokens = 0
        return found

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
        """Sample one turn after `ids`, the whole context so far; only what is new since the last turn is computed.

        `images`: those of the context in order, for a model that reads them.

        Raises:
            PolicyError: the context is empty or full, has ids that the model does not know, has images that the model
                does not read, the sampling means nothing, or the model failed.
            EnvError: the turn's own `Sampling.allow` raised, or allowed nothing; other turns go on.
        """
        context = np.asarray(ids, np.int32)
        self._check(context)
        if self._unsaid:
            sampling = replace(sampling, bad_ids=(*sampling.bad_ids, *self._unsaid))
        elif images:
            raise PolicyError("This model reads no images.")
        check_sampling(sampling, self._batch.vocabulary)
        if sampling.max_new_tokens < 1:
            return generation([], StopReason.LENGTH, weights_version=self.weights_version)
        request = Request(
            key,
            context,
            sampling,
            asyncio.get_running_loop().create_future(),
            on_token,
            uniforms(sampling.seed, sampling.max_new_tokens).tolist(),
            time.monotonic(),
            self._decode,
            next(self._orders),
            images=tuple(images),
        )
        self._waiting.append(request)
        self._called = True
        self._wake()
        return await request.future

    async def release(self, key: str) -> None:
        """Forget an episode's keys and values."""
        self._released.append(key)
        self._called = True
        if not self._stepping:
            self._tidy()
        self._wake()

    async def close(self) -> None:
        """Cancel what runs, wait for the step in progress, and free everything."""
        self._called = True
        for request in self._requests():
            if not request.gone:
                request.future.cancel()
        if self._task is not None and self._running and self._task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._task])  # it ends by itself at the end of its step: nobody waits any more
        self._thread.shutdown(wait=True)
        self._waiting.clear()
        self._batch.clear()

    def set_version(self, version: str) -> None:
        """Say that the weights changed: everything computed with the old ones is dropped."""
        self.weights_version = version
        self._batch.renew(version)

    async def swap(self, version: str, change: Callable[[], None]) -> None:
        """Change the weights between two turns: `change` runs while nothing is computed.

        Turns that are running end with the weights they began with; those that wait, and later turns of the same
        episodes, begin with the new ones, on keys and values that are computed again. So a turn has one version.
        """
        self._held = self._called = True
        try:
            while self._task is not None and self._running:
                await asyncio.wait([self._task])
            change()
            self.set_version(version)
        finally:
            self._held = False
            self._wake()

    def rest(self) -> None:
        """Free all keys and values, where no episode is running: training needs the memory."""
        if not self._stepping and not self._requests():
            self._batch.rest()

    # --- serving: all of this runs in the event loop, between two steps of the thread ---------------------------------

    @property
    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _wake(self) -> None:
        if self._waiting and not self._running and not self._held:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        """Step the batch until nobody waits. A failure reaches every waiting episode."""
        try:
            while True:
                self._tidy()
                fresh = self._admit()
                if not fresh and not self._batch.requests:
                    return
                for request in await self._step(fresh):
                    self._tell(request)
                self._waiting[:0] = sorted(self._batch.preempted, key=lambda r: r.order)
                self._batch.preempted.clear()
                # Let the coroutines that were waiting go on: their next turns then join the same step.
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - handed to every waiting episode, none may hang
            self._fail(error)

    async def _step(self, fresh: list[Request]) -> list[Request]:
        """Steps in the thread, which has the batch to itself meanwhile."""
        self._called = False
        self._fresh = fresh
        step = self._thread.submit(self._steps, fresh)
        self._stepping = True
        try:
            return await asyncio.wrap_future(step)
        finally:
            wait([step])  # where we were cancelled: the thread leaves the batch before anybody else touches it
            self._stepping = False

    def _steps(self, fresh: list[Request]) -> list[Request]:
        """In the thread: steps until there is something to tell the event loop, or it calls. Returns the rows."""
        while True:
            rows = self._batch.step(fresh)
            quiet = not self._called and not self._batch.preempted
            if not (rows and quiet and all(r.stop is None and r.on_token is None and not r.gone for r in rows)):
                return rows
            fresh = []

    def _tell(self, request: Request) -> None:
        """Hand on the newest token, and the whole turn where it is over."""
        if request.gone:
            return
        if request.error is not None:
            request.future.set_exception(request.error)
            return
        if request.on_token is not None:
            request.on_token(request.out[-1])
        if request.stop is not None:
            request.future.set_result(request.result(self.weights_version))

    def _fail(self, error: Exception) -> None:
        memory = "out of memory" in str(error).lower()
        hint = "Lower rollout.concurrency or rollout.max_tokens." if memory else getattr(error, "hint", "")
        for request in [*self._requests(), *self._fresh, *self._batch.preempted]:
            if not request.gone:
                what = error.message if isinstance(error, AgentRLError) else f"{type(error).__name__}: {error}"
                problem = PolicyError(f"The model could not generate: {what}", hint=hint)
                problem.__cause__ = error
                request.future.set_exception(problem)
        self._waiting.clear()
        self._batch.clear()

    def _tidy(self) -> None:
        """Drop the rows and the waiting of those who are gone, and what was released."""
        self._waiting = [r for r in self._waiting if not r.gone]
        for request in self._batch.requests:
            if request.gone:
                self._batch.vacate(request)
        for key in self._released:
            self._batch.forget(key)
        self._released.clear()

    def _admit(self) -> list[Request]:
        """Take from those who wait as many as there is room for."""
        taken: list[Request] = []
        waiting: list[Request] = []
        for request in self._waiting:
            may = not self._held or bool(request.out)  # a turn that has begun ends with the weights it began with
            (taken if may and self._batch.has_room(request, taken) else waiting).append(request)
        self._waiting = waiting
        return taken

    def _check(self, ids: Int32) -> None:
        if not len(ids):
            raise PolicyError("There is nothing to continue: the context is empty.")
        if len(ids) >= self.context_length and self._bounded:
            raise PolicyError(
                f"The context of {len(ids)} tokens does not fit into the memory for keys and values, which holds"
                f" {self.context_length}.",
                hint="Raise rollout.memory, or lower rollout.max_tokens.",
            )
        if len(ids) >= self.context_length:
            raise PolicyError(f"The context of {len(ids)} tokens leaves no room in {self.context_length}.")
        if int(ids.max()) >= self._batch.vocabulary or int(ids.min()) < 0:
            raise PolicyError(
                f"The context has token {int(ids.max())}, and the model knows {self._batch.vocabulary}.",
                hint="The tokenizer does not belong to this model.",
            )

    def _requests(self) -> list[Request]:
        return [*self._waiting, *self._batch.requests]


def _make_batch(
    model: Any,
    version: str,
    length: int,
    rows: int,
    lanes: bool,
    lane_length: int | None,
    memory: int | None,
    record: Callable[[], Capture] | None,
    trains: bool,
) -> DecodeBatch | PlainBatch:
    """The batch with the fastest engine that gives the model's own numbers."""
    weight = model.get_input_embeddings().weight
    most = auto_memory(weight.device) if memory is None else memory
    try:
        engine = choose_engine(model, own=record is not None)
    except NotServed as why:
        _LOG.warning("%s: episodes are sampled one by one (engine plain), which is slower", why.message)
        plain = PlainBatch(model, version=version, rows=rows, limit=length, memory=most, lanes=lanes)
        plain.why = why.message
        return plain
    each = position_bytes(model.config.get_text_config(), weight.dtype)
    budget = most // (each * BLOCK)
    needed = rows * blocks(lane_length or length) if lanes else 2
    if budget < needed:
        raise ModelError(
            f"Keys and values need at least {needed * BLOCK * each / 2**20:.1f} MiB"
            f" and may take {most / 2**20:.1f} (rollout.memory).",
            hint="Raise rollout.memory, or lower rollout.concurrency or rollout.max_tokens.",
        )
    limits: dict[str, Any] = {"version": version, "rows": rows, "limit": length, "budget": budget}
    if record is not None and not lanes:
        try:
            if not graphs_fit(model, most if trains else 0, rows, length):
                what = "what would stay beside a training" if trains else "what recorded steps take"
                raise NotServed(f"no CUDA graphs: {what} is more than an eighth of the free memory")
            check_pages(engine, model, record)
        except NotServed as why:
            engine.why = "; ".join(filter(None, [engine.why, why.message]))
        else:
            return PagedBatch(model, engine, make=record, lanes=False, lane_length=length, **limits)
    return DecodeBatch(model, engine, lanes=lanes, lane_length=lane_length or length, **limits)
