"""The local policy: continuous batching over a Hugging Face causal LM, on CPU or GPU, in this process.

Episodes join and leave the batch at any step, a finished row frees its place at once, an episode's keys and values are
kept between its turns, and a prompt that several episodes share is computed once. `generate` may be called by any number
of coroutines; one worker thread runs the forwards, so tools go on while tokens are made.

A request is admitted with the keys and values of all its context but the last token; that one is fed by the decode step
that draws its first token. Who waits, who is admitted and who left is decided in the event loop, between two steps:
the thread touches the batch only while the loop does not.

Not here: one turn's own data (local_request.py), masks (local_mask.py), drawing (local_sampling.py), and the training
forward (forward.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.base import generation
from agentrl_cli.policies.local_cache import Arena, Parked
from agentrl_cli.policies.local_mask import Masks
from agentrl_cli.policies.local_request import Request
from agentrl_cli.policies.local_sampling import Draw, draw, uniforms
from agentrl_cli.types import Generation, Int32, Sampling, StopReason

MIN_SHARED = 16
"""A common prefix shorter than this is not worth a copy."""
BLOCK = 32
"""Attention lengths are rounded up to this many positions, so that kernels see few shapes."""
PREFIXES = 16
"""How many shared prompts are kept."""
PIECE = 2048
"""Prompt tokens of one row in one forward; a longer prompt is computed in pieces."""
PREFILL = 8192
"""Prompt tokens of all rows together, padding included, in one forward."""

Kept = tuple[Int32, Parked]
"""Token ids, and their keys and values."""


class LocalPolicy:
    """A Policy over a transformers model that lives in this process.

    Args:
        model: Any causal LM whose forward takes `past_key_values` and a four-dimensional mask; peft-wrapped or not.
        context_length: Most positions of one episode.
        rows: Most episodes in one decode batch; more wait.
        lanes: Fixed batch shapes: each key has a lane of its own, prompts are computed one by one, and every decode step
            has the same shape. An episode's numbers then depend on nothing but itself (`deterministic: true`).
        lane_length: Positions that every lane attends to; no episode may be longer.
        decode: Text of ids; needed for stop strings only.
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
    ) -> None:
        self.model = model
        self.context_length = context_length
        self.weights_version = version
        self.rows = rows
        self.lanes = lanes
        self.lane_length = lane_length or context_length
        self.device = next(model.parameters()).device
        self.prefill_tokens = 0
        """Prompt positions computed so far; tests and metrics read it."""
        self._decode = decode
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._masks = Masks(model.config, model.get_input_embeddings().weight.dtype, context_length)
        self._live: list[Request | None] = []
        self._lane_of: dict[str, int] = {}
        self._waiting: list[Request] = []
        self._released: list[str] = []
        self._parked: dict[str, Kept] = {}
        self._prefixes: list[Kept] = []
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._arena = self._new_arena()

    # --- the Policy interface ----------------------------------------------------------------------------------------

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Sample one turn after `ids`, the whole context so far; only what is new since the last turn is computed.

        Raises:
            PolicyError: the context is empty or full, has ids that the model does not know, or the model failed.
        """
        context = np.asarray(ids, np.int32)
        self._check(context)
        if sampling.max_new_tokens < 1:
            return generation([], StopReason.LENGTH, weights_version=self.weights_version)
        request = Request(
            key,
            context,
            sampling,
            asyncio.get_running_loop().create_future(),
            on_token,
            uniforms(sampling.seed, sampling.max_new_tokens),
            time.monotonic(),
            self._decode,
        )
        self._waiting.append(request)
        self._wake()
        return await request.future

    async def release(self, key: str) -> None:
        """Forget an episode's keys and values."""
        self._released.append(key)
        if not self._running:
            self._tidy()
        self._wake()

    async def close(self) -> None:
        """Cancel what runs, wait for the step in progress, and free everything."""
        for request in self._requests():
            if not request.gone:
                request.future.cancel()
        if self._task is not None and self._running and self._task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._task])  # it ends by itself at the end of its step: nobody waits any more
        self._thread.shutdown(wait=True)
        self._forget()
        self.rest()

    def set_version(self, version: str) -> None:
        """Say that the weights changed: everything computed with the old ones is dropped."""
        self.weights_version = version
        self._parked.clear()
        self._prefixes.clear()

    def rest(self) -> None:
        """Free all keys and values, where no episode is running: training needs the memory."""
        if self._running or any(self._live):
            return
        self._parked.clear()
        self._prefixes.clear()
        self._arena = self._new_arena()

    # --- serving: all of this runs in the event loop, between two steps of the thread ---------------------------------

    @property
    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _wake(self) -> None:
        if self._waiting and not self._running:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        """Step the batch until nobody waits. A failure reaches every waiting episode."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._tidy()
                fresh = self._admit()
                if not fresh and not any(self._live):
                    return
                for request in await loop.run_in_executor(self._thread, self._step, fresh):
                    self._tell(request)
                # Let the coroutines that were waiting go on: their next turns then join the same step.
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - handed to every waiting episode, none may hang
            self._fail(error)

    def _tell(self, request: Request) -> None:
        """Hand on the newest token, and the whole turn where it is over."""
        if request.gone:
            return
        if request.on_token is not None:
            request.on_token(request.out[-1])
        if request.stop is not None:
            request.future.set_result(request.result(self.weights_version))

    def _fail(self, error: Exception) -> None:
        memory = "out of memory" in str(error).lower()
        hint = "Lower rollout.concurrency or rollout.max_tokens." if memory else ""
        for request in self._requests():
            if not request.gone:
                problem = PolicyError(f"The model could not generate: {error}", hint=hint)
                problem.__cause__ = error
                request.future.set_exception(problem)
        self._forget()
        self._arena = self._new_arena()

    def _tidy(self) -> None:
        """Drop the rows and the waiting of those who are gone, and what was released."""
        self._waiting = [r for r in self._waiting if not r.gone]
        for request in [r for r in self._live if r is not None and r.gone]:
            self._vacate(request)
        for key in self._released:
            self._parked.pop(key, None)
            self._lane_of.pop(key, None)
        self._released.clear()

    def _admit(self) -> list[Request]:
        """Take from those who wait as many as there is room for."""
        taken: list[Request] = []
        waiting: list[Request] = []
        for request in self._waiting:
            (taken if self._has_room(request, taken) else waiting).append(request)
        self._waiting = waiting
        return taken

    def _has_room(self, request: Request, taken: list[Request]) -> bool:
        if self.lanes:
            # A lane belongs to its episode until `release`, so a new episode needs one that nobody owns.
            new = {r.key for r in taken if r.key not in self._lane_of} | {request.key}
            return request.key in self._lane_of or len(self._lane_of) + len(new) <= self.rows
        return sum(r is not None for r in self._live) + len(taken) < self.rows

    def _check(self, ids: Int32) -> None:
        if not len(ids):
            raise PolicyError("There is nothing to continue: the context is empty.")
        if len(ids) >= self.context_length:
            raise PolicyError(f"The context of {len(ids)} tokens leaves no room in {self.context_length}.")
        if int(ids.max()) >= self._vocabulary or int(ids.min()) < 0:
            raise PolicyError(
                f"The context has token {int(ids.max())}, and the model knows {self._vocabulary}.",
                hint="The tokenizer does not belong to this model.",
            )

    def _requests(self) -> list[Request]:
        return [*self._waiting, *(r for r in self._live if r is not None)]

    def _forget(self) -> None:
        for kept in (self._waiting, self._live, self._lane_of, self._parked, self._prefixes, self._released):
            kept.clear()

    def _new_arena(self) -> Arena:
        arena = Arena(int(self.model.config.get_text_config().num_hidden_layers))
        if self.lanes:  # from the start at its full size: strides are shapes, too
            arena.reserve(self.rows, _rounded(self.lane_length))
        return arena

    # --- the batch: all of this runs in the thread, but for _vacate ---------------------------------------------------

    @torch.inference_mode()
    def _step(self, fresh: list[Request]) -> list[Request]:
        """Admit, then draw one token for every row. Returns the rows, finished ones too."""
        training = self.model.training
        if training:
            self.model.eval()
        try:
            if self.lanes:
                for request in fresh:
                    self._prefill([request])
            elif fresh:
                self._learn_common(fresh)
                self._learn_prompts(fresh)
                for batch in self._batches(fresh):
                    self._prefill(batch)
            return self._decode_step()
        finally:
            if training:
                self.model.train()

    def _decode_step(self) -> list[Request]:
        live = [r for r in self._live if r is not None]
        rows = self._live if self.lanes else live
        last = [np.asarray([r.last if r else 0], np.int32) for r in rows]
        starts = [r.length - 1 if r else 0 for r in rows]
        # Fixed lanes keep every shape fixed, the attended length too.
        reach = max(self.lane_length if self.lanes else 0, max(starts) + 1)
        logits = self._forward(0, last, starts, _rounded(reach))[:, -1]
        if self.lanes:
            logits = logits[[n for n, r in enumerate(self._live) if r is not None]]
        numbers = torch.tensor([r.number for r in live], dtype=torch.float64, device=self.device)
        self._take(live, draw(logits, [r.sampling for r in live], numbers))
        for request in [r for r in live if r.stop is not None]:
            row = self._live.index(request)
            held = request.held()
            self._parked[request.key] = (held, self._arena.park(row, len(held), self.weights_version))
            self._vacate(request)
        return live

    def _take(self, requests: list[Request], drawn: Draw) -> None:
        ids = drawn.ids.tolist()
        facts = torch.stack((drawn.logp_sampled, drawn.logp_policy, drawn.entropy), 1).cpu()
        if not bool(torch.isfinite(facts).all()):
            raise PolicyError(
                "The model's probabilities are not numbers.", hint="Its weights have diverged: take an older checkpoint."
            )
        top_ids, top_logps = drawn.top_ids.cpu().numpy(), drawn.top_logps.cpu().numpy()
        for n, (request, row) in enumerate(zip(requests, facts.tolist(), strict=True)):
            request.take(ids[n], tuple(row), (top_ids[n], top_logps[n]), self.context_length)

    @torch.inference_mode()
    def _vacate(self, request: Request) -> None:
        """Free a row; in a dense batch the last one moves into the gap."""
        row = self._live.index(request)
        if self.lanes:
            self._live[row] = None
            return
        mover = self._live.pop()
        if mover is not request:
            assert mover is not None
            self._arena.move(len(self._live), row, mover.length)
            self._live[row] = mover

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _known(self, request: Request) -> tuple[Parked, int] | None:
        """Stored keys and values that begin as the request does, and how many of its positions they give."""
        own = self._parked.get(request.key)
        entries = [own] if own is not None else []
        if not self.lanes:  # there a row's numbers must not depend on what others have computed
            entries += self._prefixes
        found = [(kept, _common(ids, request.ids)) for ids, kept in entries if kept.version == self.weights_version]
        best = max(found, key=lambda entry: entry[1], default=None)
        return best if best is not None and best[1] > 0 else None

    def _learn_common(self, fresh: list[Request]) -> None:
        """Compute once, and keep, what the new prompts have in common (the system prompt with its tools)."""
        prompts = list({r.ids.tobytes(): r.ids for r in fresh if r.key not in self._parked}.values())
        if len(prompts) > 1:
            ordered = sorted(prompts, key=lambda ids: ids.tolist())
            self._learn(ordered[0][: _common(ordered[0], ordered[-1])])

    def _learn_prompts(self, fresh: list[Request]) -> None:
        """Compute once, and keep, prompts that several of the new requests share."""
        same: dict[bytes, list[Request]] = {}
        for request in fresh:
            same.setdefault(request.ids.tobytes(), []).append(request)
        for requests in same.values():
            if len(requests) > 1:
                self._learn(requests[0].ids[:-1])

    def _learn(self, ids: Int32) -> None:
        """Compute a prefix in a row behind the batch and keep it, unless it is short or known."""
        if len(ids) < MIN_SHARED:
            return
        kept = [entry for entry in self._prefixes if entry[1].version == self.weights_version]
        known = max(kept, key=lambda entry: _common(entry[0], ids), default=None)
        start = _common(known[0], ids) if known is not None else 0
        if start == len(ids):
            return
        row = len(self._live)
        self._arena.reserve(row + 1, _rounded(len(ids)))
        if known is not None and start:
            self._arena.unpark(row, known[1], start)
        self._feed(row, [ids[start:]], [start])
        self._prefixes = [*kept[-PREFIXES + 1 :], (ids, self._arena.park(row, len(ids), self.weights_version))]

    def _batches(self, fresh: list[Request]) -> list[list[Request]]:
        """Requests whose missing prompts are of like length, as many as one forward may hold."""
        missing = {id(r): len(r.ids) - 1 - (known[1] if (known := self._known(r)) else 0) for r in fresh}
        batches: list[list[Request]] = []
        for request in sorted(fresh, key=lambda r: missing[id(r)]):
            width = min(max(missing[id(request)], 0), PIECE)
            if batches and (len(batches[-1]) + 1) * width <= PREFILL and len(batches[-1]) < self.rows:
                batches[-1].append(request)
            else:
                batches.append([request])
        return batches

    def _prefill(self, requests: list[Request]) -> None:
        """Put requests into the batch with keys and values of all their tokens but the last."""
        first = self._place(requests)
        known = [self._known(request) for request in requests]
        starts = [min(k[1], len(r.ids) - 1) if k else 0 for k, r in zip(known, requests, strict=True)]
        self._arena.reserve(first + len(requests), _rounded(max(len(r.ids) for r in requests)))
        for offset, (entry, start) in enumerate(zip(known, starts, strict=True)):
            if entry is not None:
                self._arena.unpark(first + offset, entry[0], start)
        self._feed(first, [r.ids[start:-1] for r, start in zip(requests, starts, strict=True)], starts)

    def _place(self, requests: list[Request]) -> int:
        """Rows for new requests: the end of the dense batch, or the one request's own lane."""
        if not self.lanes:
            self._live.extend(requests)
            return len(self._live) - len(requests)
        request = requests[0]
        if not self._live:
            self._live = [None] * self.rows
        lane = self._lane_of.get(request.key)
        if lane is None:
            used = set(self._lane_of.values())
            lane = next(n for n in range(self.rows) if n not in used and self._live[n] is None)
            self._lane_of[request.key] = lane
        self._live[lane] = request
        return lane

    def _feed(self, row: int, news: list[Int32], starts: list[int]) -> None:
        """Compute keys and values of new tokens of consecutive rows, in pieces."""
        self.prefill_tokens += sum(len(new) for new in news)
        while any(len(new) for new in news):
            pieces = [new[:PIECE] for new in news]
            self._forward(row, pieces, starts)
            starts = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
            news = [new[PIECE:] for new in news]

    # --- the forward -------------------------------------------------------------------------------------------------

    def _forward(self, row: int, news: list[Int32], starts: list[int], length: int = 0) -> torch.Tensor:
        """Feed new tokens of consecutive rows; logits at the last position, [rows, 1, vocabulary].

        Short rows are padded on the right: what the padding writes lies beyond the row's length, is masked here and
        overwritten by the tokens that come.
        """
        width = max(len(new) for new in news)
        length = max(length, max(starts) + width)
        self._arena.reserve(row + len(news), _rounded(length))
        padded = np.zeros((len(news), width), np.int64)
        for n, new in enumerate(news):
            padded[n, : len(new)] = new
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)[None]
        self._arena.window(row, len(news), length, positions)
        out = self.model(
            input_ids=torch.from_numpy(padded).to(self.device),
            position_ids=positions,
            attention_mask=self._masks(positions, length),
            past_key_values=self._arena,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = out.logits[:, -1:]
        return logits


def _common(a: Int32, b: Int32) -> int:
    """How many leading ids two arrays share."""
    n = min(len(a), len(b))
    differ = np.nonzero(a[:n] != b[:n])[0]
    return int(differ[0]) if len(differ) else n


def _rounded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
