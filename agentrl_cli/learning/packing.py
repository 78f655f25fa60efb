"""The training forward: log-probabilities of trained tokens, without padding and with a group's prefix computed once.

`pack` lays groups of episodes into one row: what a group's episodes have in common from their first token on (their
prompt, and beyond it as far as they agree) is there once. `logprobs` runs any transformers causal LM over the row,
with attention restricted per episode (forward_attention.py), and the head only at positions that predict a trained
token, in chunks (forward_head.py). The numbers and gradients are those of one episode at a time.

Not here: sampling (local.py) and losses (learning/losses.py). Trap that this avoids: transformers' own packing by
position_ids leaks attention across episodes unless use_cache is False.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from agentrl_cli.errors import ModelError
from agentrl_cli.learning.attention import Block, NotPackable, Packing, packed_attention
from agentrl_cli.learning.fused_forward import fused_states
from agentrl_cli.learning.logprobs import head_logprobs
from agentrl_cli.models.adapter import transformer
from agentrl_cli.models.vision import positions, reader_of
from agentrl_cli.types import Episode, Float32, Int32

Bool = NDArray[np.bool_]
Ints = NDArray[np.int64]

_LOG = logging.getLogger(__name__)
_ONE_BY_ONE: WeakSet[Any] = WeakSet()
"""Models that turned out not to be packable."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One episode as the forward sees it."""

    ids: Int32
    """[n] token ids."""
    trained: Bool
    """[n] True where the token's log-probability is wanted; the first token has none and must be False."""
    images: tuple[bytes, ...] = ()
    """The images that the ids have tokens for, in order."""

    @classmethod
    def of(cls, episode: Episode) -> Segment:
        return cls(episode.tokens.ids, episode.tokens.trained_mask, episode.images)


@dataclass(frozen=True, slots=True)
class Packed:
    """Groups of episodes in one row of T tokens, M of whose successors are trained."""

    input_ids: Ints
    """[T]"""
    position_ids: Ints
    """[T] position within the token's episode."""
    blocks: tuple[Block, ...]
    rows: Ints
    """[M] the row whose hidden state predicts the trained token."""
    targets: Ints
    """[M] id of the trained token."""
    episode: Ints
    """[M] which episode it belongs to, counted over the groups in the order given; ascending."""
    position: Ints
    """[M] its position in that episode."""
    lengths: Ints
    """[N] tokens of each episode, whether trained or not."""
    images: tuple[tuple[bytes, ...], ...] = ()
    """Of each continuation in the blocks, those that are not empty; () where there are none at all."""

    @property
    def tokens(self) -> int:
        """T: what the forward costs."""
        return len(self.input_ids)

    def split(self, flat: NDArray[Any]) -> list[NDArray[Any]]:
        """[M] -> N arrays with each episode's trained tokens."""
        if not len(self.lengths):
            return []
        return np.split(flat, np.searchsorted(self.episode, np.arange(1, len(self.lengths))))

    def scatter(self, flat: NDArray[Any], fill: float = np.nan) -> list[Float32]:
        """[M] -> N float32 arrays over all tokens of each episode, `fill` where a token was not trained."""
        out = [np.full(int(n), fill, np.float32) for n in self.lengths]
        for array, values, where in zip(out, self.split(flat), self.split(self.position), strict=True):
            array[where] = values
        return out

    def gather(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """N arrays over each episode's trained tokens -> [M]; the inverse of `split`."""
        flat = np.concatenate(list(arrays)) if len(arrays) else np.zeros(0, np.float32)
        if len(flat) != len(self.rows):
            raise ValueError(f"{len(flat)} values for {len(self.rows)} trained tokens")
        return flat


@dataclass(frozen=True, slots=True)
class Logprobs:
    """[M] float32 each, aligned with `Packed.rows`, differentiable."""

    logp: Tensor
    entropy: Tensor
    states: Tensor
    """[M, D] the hidden states that they were read off, in the model's dtype (what a value head reads)."""


def common_prefix(arrays: Sequence[Int32]) -> int:
    """How many leading ids all arrays share."""
    if not arrays:
        return 0
    n = min(len(a) for a in arrays)
    stack = np.stack([np.asarray(a[:n]) for a in arrays])
    same = (stack == stack[0]).all(0)
    return n if same.all() else int(same.argmin())


def pack(groups: Sequence[Sequence[Segment]], *, share: bool = True) -> Packed:
    """One row from groups of episodes. `share=False` computes every prefix anew (for comparison).

    Tokens behind the last trained one of an episode, and that one itself, predict nothing: they are left out.
    """
    row = _Row()
    for group in groups:
        members = [[segment] for segment in group] if not share else [list(group)]
        for segments in members:
            row.add(segments)
    return row.packed()


class _Row:
    """A row being filled."""

    def __init__(self) -> None:
        self.ids: list[NDArray[Any]] = []
        self.positions: list[Ints] = []
        self.blocks: list[Block] = []
        self.facts: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        self.lengths: list[int] = []
        self.images: list[tuple[bytes, ...]] = []
        self.size = 0

    def _put(self, ids: NDArray[Any], first: int) -> None:
        self.ids.append(ids)
        self.positions.append(np.arange(first, first + len(ids), dtype=np.int64))
        self.size += len(ids)

    def add(self, segments: Sequence[Segment]) -> None:
        """A block: the common prefix of what is needed of the episodes, then each one's rest."""
        for segment in segments:
            if len(segment.trained) != len(segment.ids):
                raise ValueError("ids and trained differ in length")
            if len(segment.trained) and segment.trained[0]:
                raise ValueError("the first token of an episode has no log-probability: nothing precedes it")
        wanted = [np.flatnonzero(s.trained) for s in segments]
        needed = [_needed(s) for s in segments]
        alive = [ids for ids in needed if len(ids)]
        shared = _shared(segments, alive)
        start = self.size
        if shared:
            self._put(alive[0][:shared], 0)
        own = self.size
        ends: list[int] = []
        for segment, where, ids in zip(segments, wanted, needed, strict=True):
            before = where - 1
            self.facts.append(
                (np.where(before < shared, start + before, self.size + before - shared), segment.ids[where], where)
            )
            self.lengths.append(len(segment.ids))
            if len(ids):
                self._put(ids[shared:], shared)
                if len(ids) > shared:
                    self.images.append(segment.images)
                ends.append(self.size)
        if self.size > start:
            self.blocks.append(Block(start, own, tuple(ends)))

    def packed(self) -> Packed:
        def join(parts: list[NDArray[Any]]) -> Ints:
            return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

        return Packed(
            join(self.ids),
            join(self.positions),
            tuple(self.blocks),
            join([rows for rows, _, _ in self.facts]),
            join([targets for _, targets, _ in self.facts]),
            join([np.full(len(rows), i) for i, (rows, _, _) in enumerate(self.facts)]),
            join([where for _, _, where in self.facts]),
            np.array(self.lengths, np.int64),
            tuple(self.images) if any(self.images) else (),
        )


def logprobs(
    model: nn.Module,
    packed: Packed,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    checkpoint: bool = False,
) -> Logprobs:
    """Log-probability and entropy of every trained token under the model at this temperature, untruncated.

    `model` is a transformers causal LM or a peft model around one. `checkpoint` recomputes each layer's activations in
    the backward pass: a third slower, a fraction of the memory.
    """
    base = transformer(model)
    head = base.get_output_embeddings()
    rows = None if packed.images or base in _ONE_BY_ONE else fused_states(base, packed, checkpoint=checkpoint)
    if rows is None:
        hidden = hidden_states(model, packed, checkpoint=checkpoint)
        rows = hidden.index_select(0, torch.from_numpy(packed.rows).to(hidden.device))
    targets = torch.from_numpy(packed.targets).to(rows.device)
    scale, softcap = _logit_rules(base.config)
    logp, entropy = head_logprobs(head, rows, targets, temperature=temperature / scale, softcap=softcap, chunk=chunk)
    return Logprobs(logp, entropy, rows)


def hidden_states(model: nn.Module, packed: Packed, *, checkpoint: bool = False) -> Tensor:
    """[T, D] last hidden states of a packed row (also what a value head reads).

    An architecture that cannot be packed (recurrent layers, attention of its own) runs one episode at a time, with the
    same result; the log says so once.
    """
    base = transformer(model)
    weight = base.get_input_embeddings().weight
    if not packed.tokens:
        return cast(Tensor, weight.new_zeros((0, width(model))))
    if packed.images and reader_of(base) is None:
        raise ModelError("These episodes have images, and this model reads text alone.")
    if base not in _ONE_BY_ONE:
        try:
            with _checkpointing(base, checkpoint, partial(packed_attention, base.config)):
                return _packed_states(base, packed, weight.device)
        except NotPackable as why:
            _ONE_BY_ONE.add(base)
            _LOG.warning("%s: training runs one episode at a time", why.message)
    with _checkpointing(base, checkpoint, nullcontext):
        return _states_one_by_one(base, packed, weight.device)


def _packed_states(base: Any, packed: Packed, device: torch.device) -> Tensor:
    """The whole row at once. Raises NotPackable where a layer did not use the packed attention."""
    kinds = set(getattr(base.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise NotPackable(f"{type(base).__name__} has layers of the kind {sorted(kinds)[0]}")
    if reader_of(base) is not None:
        raise NotPackable(f"{type(base).__name__} reads images")
    ids = torch.from_numpy(packed.input_ids)[None].to(device)
    packing = Packing(packed.blocks)
    with packed_attention(base.config):
        out = _decoder(base)(
            input_ids=ids,
            position_ids=torch.from_numpy(packed.position_ids)[None].to(device),
            # four dimensions: taken as a finished mask and handed on, so that none is built
            attention_mask=ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
            use_cache=False,
            packing=packing,
        )
    if packing.calls != base.config.num_hidden_layers:
        raise NotPackable(
            f"{type(base).__name__} asked {packing.calls} times for {base.config.num_hidden_layers} layers"
        )
    return cast(Tensor, out.last_hidden_state[0])


def _states_one_by_one(base: Any, packed: Packed, device: torch.device) -> Tensor:
    """The same rows from one forward per episode; a shared prefix is read off the first."""
    ids, reader = torch.from_numpy(packed.input_ids).to(device), reader_of(base)
    parts: list[Tensor] = []
    images = iter(packed.images)
    for block in packed.blocks:
        prefix = block.own - block.start
        for number, (begin, end) in enumerate(block.segments or ((block.own, block.own),)):
            episode = torch.cat([ids[block.start : block.own], ids[begin:end]])
            seen: dict[str, Any] = {}
            if reader is not None:
                seen = reader.inputs(episode, next(images, ()) if end > begin else ())
                where = positions(base, episode, seen, reader.token)
                seen |= {} if where is None else {"position_ids": where}
            state = _decoder(base)(input_ids=episode[None], use_cache=False, **seen).last_hidden_state[0]
            parts.append(state[prefix if number else 0 :])
    return torch.cat(parts)


def trained_logprobs(
    model: nn.Module,
    groups: Sequence[Sequence[Segment]],
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    checkpoint: bool = False,
) -> tuple[Packed, Logprobs]:
    """`pack` and `logprobs` in one."""
    packed = pack(groups)
    return packed, logprobs(model, packed, temperature=temperature, chunk=chunk, checkpoint=checkpoint)


def micro_batches(groups: Sequence[Sequence[Segment]], budget: int) -> list[list[tuple[int, int]]]:
    """Split groups into rows of at most `budget` packed tokens: lists of (group, member), each member once, in order.

    A group larger than the budget is split (its prefix is then computed once per row); an episode larger than the
    budget is a row of its own. `chosen` makes a row's groups.
    """
    out: list[list[tuple[int, int]]] = []
    used = 0
    for g, group in enumerate(groups):
        needed = [_needed(segment) for segment in group]
        alive = [ids for ids in needed if len(ids)]
        shared = _shared(group, alive)
        costs = [max(len(ids) - shared, 0) for ids in needed]
        if not out or used + shared + sum(costs) > budget:
            out.append([])
            used = 0
        used += shared
        for m, cost in enumerate(costs):
            if out[-1] and used + cost > budget:
                out.append([])
                used = shared
            out[-1].append((g, m))
            used += cost
    return [row for row in out if row]


def chosen(groups: Sequence[Sequence[Segment]], row: Sequence[tuple[int, int]]) -> list[list[Segment]]:
    """The groups of one of `micro_batches`' rows."""
    members: dict[int, list[Segment]] = {}
    for g, m in row:
        members.setdefault(g, []).append(groups[g][m])
    return list(members.values())


def _shared(segments: Sequence[Segment], alive: Sequence[Int32]) -> int:
    """Leading tokens that are computed once for all. Of episodes with images none: their tokens may hide others."""
    return common_prefix(alive) if len(alive) > 1 and not any(segment.images for segment in segments) else 0


def _needed(segment: Segment) -> Int32:
    """The tokens up to the one that predicts the last trained token."""
    where = np.flatnonzero(segment.trained)
    return segment.ids[: where[-1]] if len(where) else segment.ids[:0]


def width(model: nn.Module) -> int:
    """D: numbers in a hidden state."""
    return int(transformer(model).config.get_text_config().hidden_size)


def _decoder(base: Any) -> nn.Module:
    """The transformer without its head."""
    return cast(nn.Module, getattr(base, base.base_model_prefix))


def _logit_rules(config: Any) -> tuple[float, float | None]:
    """(factor on the logits, soft cap): what some families do between head and softmax."""
    factor = float(getattr(config, "logit_scale", None) or 1.0)
    factor /= float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return factor, None if cap is None else float(cap)


@contextmanager
def _checkpointing(base: Any, on: bool, attention: Callable[[], Any]) -> Iterator[None]:
    """Activation checkpointing per layer; the recomputation runs with the forward's `attention` too."""
    if not on or not torch.is_grad_enabled():
        yield
        return
    layers = [m for m in base.modules() if hasattr(m, "_can_checkpoint_with_cache")]  # transformers' layer class
    if not layers:
        raise ModelError(f"{type(base).__name__} has no layers that can be checkpointed.")
    before = [layer.training for layer in layers]
    recompute = partial(
        torch_checkpoint,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), attention()),
    )
    for layer in layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func, layer.training = True, recompute, True
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = False, training
