"""Runs batches of sequences through a model's own forward, over the paged KV cache.

Whether a model can be run so is decided by its structure and by comparing numbers with the model itself when the runner
is made. Every other model takes the fallback (fallback.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from agentrl_cli.inference.attention import NAME, PrefillView, View, attention_in, paged_attention
from agentrl_cli.inference.cached_forward import CAUGHT, cache_name, short_windows
from agentrl_cli.inference.decode_attention import DecodeView, Tables
from agentrl_cli.inference.decode_batch import Layout, decode_batch
from agentrl_cli.inference.kv_cache import BLOCK, BlockPool, KVCache, NotServed
from agentrl_cli.inference.llama_step import LlamaStep, is_llama
from agentrl_cli.inference.memory import prefill_tokens
from agentrl_cli.inference.request import TokenSequence
from agentrl_cli.inference.sampling_weights import SamplingWeights, linear_layers
from agentrl_cli.inference.tolerance import TOLERANCE, logp_difference
from agentrl_cli.models.adapter import eval_mode, short, transformer
from agentrl_cli.models.unusable import find_obstacle
from agentrl_cli.models.vision import reader_of
from agentrl_cli.types import Int32

PIECE = 2048
"""Prompt tokens of one sequence in one forward; a longer prompt is computed in pieces."""


class ModelRunner:
    """Prefill and decode over a pool of blocks.

    Args:
        plain: Every product is the module's own, to the last bit, but for adapters, which are added.

    Raises NotServed if its numbers would differ from the model's.
    """

    why = ""
    """Why it is slower than it was to be."""

    def __init__(self, model: nn.Module, *, plain: bool = False) -> None:
        self.model = model
        base = transformer(model)
        self._short = None
        if not plain and is_llama(base):
            self._short = LlamaStep(base, fixed=self.records)
        self.weights = (
            SamplingWeights(linear_layers(model), plain=plain, fixed=self.records)
            if self._short is None
            else self._short.weights
        )
        self._config = base.config.get_text_config()
        weight = base.get_input_embeddings().weight
        self.device, self.dtype, self.vocabulary = weight.device, weight.dtype, int(weight.shape[0])
        self.layers = int(self._config.num_hidden_layers)
        self._cache = cache_name(base)
        self.most = prefill_tokens(self._config, weight.dtype.itemsize)
        """Prompt tokens of all sequences in one forward, padding included."""
        self._layout: Layout | None = None
        self._tables: Tables | None = None
        """The block tables of the step before, here and on the device."""
        self.prefilled = 0
        """Prompt tokens computed so far."""
        check_structure(model)
        self.verify()
        self.prefilled = 0

    @property
    def records(self) -> bool:
        """True if decode steps are captured (cuda_graphs.py); the block pool then keeps its addresses."""
        return False

    def verify(self) -> None:
        """Raise NotServed if the numbers differ from the model's."""
        with eval_mode(self.model), short_windows(self.model):
            try:
                verify(self)
            except NotServed:
                if self._short is None:
                    raise
                self._take_forward()
                verify(self)

    def refresh(self) -> None:
        """Before a step: take over new weights, and the model's own forward if that was changed."""
        if self._short and self.weights.stale and not is_llama(transformer(self.model)):
            self._take_forward()
        self.weights.refresh()

    def _take_forward(self) -> None:
        """Run the model's own forward from here on."""
        self._short, self.weights = (
            None,
            SamplingWeights(linear_layers(self.model), fixed=self.records),
        )

    def decode(
        self,
        pool: BlockPool,
        sequences: Sequence[TokenSequence],
        drafts: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """Logits [rows, vocabulary] after each sequence's newest token, and after each token of its draft."""
        batch = decode_batch(sequences, self._layout, drafts)
        step = torch.from_numpy(batch.step).to(self.device)
        places = None if batch.places is None else torch.from_numpy(batch.places).to(self.device)
        view = DecodeView(pool, step, self._tables_of(batch.layout), places, batch.width)
        return self.run(step[0][:, None], view)

    @property
    def drafts(self) -> bool:
        """Whether drafts may be fed: on a CPU, where that was measured, by a forward that takes each row by itself."""
        return self._short is not None and self.device.type == "cpu" and not self.records

    def _tables_of(self, layout: Layout) -> Tables:
        """Return a layout on the device; shared blocks that were read are kept while they are the same."""
        old, before = self._tables, self._layout
        if old is not None and before is layout:
            return old
        same = before is not None and np.array_equal(layout.shared, before.shared)
        arrays = [torch.from_numpy(array).to(self.device) for array in layout.arrays]
        self._layout = layout
        self._tables = Tables(
            arrays, layout.shape, layout.in_place, old.read if old is not None and same else None
        )
        return self._tables

    def forget_tables(self) -> None:
        """Drop the tables kept from one decode step to the next."""
        self._layout = self._tables = None

    def prefill(
        self,
        pool: BlockPool,
        tokens: Sequence[Int32],
        starts: Sequence[int],
        tables: Sequence[list[int]],
    ) -> None:
        """Compute keys and values of new tokens of some sequences, in pieces.

        Short ones are padded on the right. Not for sequences without new tokens.
        """
        self.forget_tables()  # blocks may have become others'
        self.prefilled += sum(map(len, tokens))
        left = [*zip(tokens, starts, tables, strict=True)]
        while left:
            size = min(PIECE, self.most)
            pieces = [given[:size] for given, _, _ in left]
            counts = [len(piece) for piece in pieces]
            padded = np.zeros((len(pieces), max(counts)), np.int64)
            for row, piece in zip(padded, pieces, strict=True):
                row[: len(piece)] = piece
            view = PrefillView(
                pool, [at for _, at, _ in left], counts, [table for *_, table in left], self.device
            )
            ids = torch.from_numpy(padded).to(self.device)
            if self._short is None:
                self.run(ids, view)
            else:
                self._short.run(ids, view, logits=False)
            left = [
                (given[size:], at + size, table) for given, at, table in left if len(given) > size
            ]

    def run(self, ids: Tensor, view: View) -> Tensor:
        """Feed ids [B, T]; logits of the last position [B, vocabulary]."""
        if self._short is not None:
            found = self._short.run(ids, view, logits=True)
            assert found is not None
            return found
        with attention_in(self._config, NAME, paged_attention), self.weights.apply():
            out = self.model(
                input_ids=ids,
                position_ids=view.positions,
                # four dimensions: taken as a finished mask and handed on, so that none is built
                attention_mask=ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
                **{self._cache: view},
                use_cache=True,
                logits_to_keep=1,
                view=view,
            )
        if view.calls != self.layers:
            raise NotServed(
                f"it asked {view.calls} times for the attention of {self.layers} layers"
            )
        logits: Tensor = out.logits[:, -1]
        return logits


def check_structure(model: nn.Module) -> None:
    """Raise NotServed if a model has other state than keys and values."""
    config = transformer(model).config.get_text_config()
    if reader_of(model) is not None:
        raise NotServed("it reads images")
    why = find_obstacle(config.to_dict())
    if why:
        raise NotServed(why)


@torch.inference_mode()
def verify(runner: ModelRunner) -> None:
    """Compare prompts and steps after them with one forward of the model. Raises NotServed if they differ.

    Two sequences share two full blocks and diverge within the next one; every window is crossed.
    """
    generator = torch.Generator().manual_seed(0)
    most = getattr(
        transformer(runner.model).config.get_text_config(), "max_position_embeddings", None
    )
    full = 2 * BLOCK if not isinstance(most, int) or most >= 2 * BLOCK + 6 else max(0, most - 6)
    ids = torch.randint(0, runner.vocabulary, (2, full + 6), generator=generator)
    ids[1, : full + 2] = ids[0, : full + 2]
    lengths = (full + 4, full + 3)
    try:
        wanted = (
            runner.model(input_ids=ids.to(runner.device), use_cache=False)
            .logits.float()
            .log_softmax(-1)
            .cpu()
        )
        runner.refresh()
        found = list(_steps(runner, ids.numpy().astype(np.int32), lengths))
    except CAUGHT as error:
        raise NotServed(
            f"its forward is of another kind ({type(error).__name__}: {short(error)})"
        ) from error
    for step, logps in enumerate(found):
        own = torch.stack([wanted[n, length - 1 + step] for n, length in enumerate(lengths)])
        off = logp_difference(logps, own, runner.dtype)
        if off > TOLERANCE.get(runner.dtype, 1e-3):
            raise NotServed(
                f"the paged engine differs by {off:.2g} nats from the model's own forward"
            )


def _steps(runner: ModelRunner, ids: Int32, lengths: Sequence[int]) -> Iterator[Tensor]:
    """Log-probabilities of three decode steps after prompts of these lengths, of which two share a block."""
    cache = KVCache(BlockPool(runner.layers, 8, scratch=runner.records))
    shared = ids[0, : lengths[0] - 3]
    prefix = cache.add_prefix(shared)
    assert prefix is not None
    runner.prefill(cache.pool, [shared], [0], [prefix[0].blocks])
    requests = [TokenSequence(key=f"{n}", ids=ids[n, :length]) for n, length in enumerate(lengths)]
    for request in requests:
        start = cache.begin(request)
        assert start is not None
        runner.prefill(cache.pool, [request.ids[start:-1]], [start], [request.block_table])
    for step in range(3):
        for n, request in enumerate(requests):
            if step:
                request.out.append(int(ids[n, lengths[n] - 1 + step]))
            cache.reserve(request)
        yield runner.decode(cache.pool, requests).float().log_softmax(-1).cpu()
