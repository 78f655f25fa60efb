"""Attention of decode steps over the paged KV cache: one new token of each sequence, and drafts behind it.

Queries meet keys, and weights meet values, block by block where the blocks lie; between the two, the scores of a
sequence's blocks are brought side by side for one softmax. Scores are small beside keys and values: few of those are
copied, and a block that several sequences share is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from agentrl_cli.inference.attention import View
from agentrl_cli.inference.decode_batch import Shape
from agentrl_cli.inference.kv_cache import BLOCK, BlockPool

MASKED = -1e30
"""Added to the scores of what is not attended to. Finite: times False it is 0."""


class Tables:
    """The block tables of decode steps on a device, and what follows from them alone.

    Args:
        tensors: Those of a Layout, in order.
        in_place: See Layout.
        read: By layer, keys and values of just these shared blocks as an earlier step read them.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        shape: Shape,
        in_place: bool,
        read: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.blocks, self.shared, self._spots, self._parts = tensors
        self.shape, self.in_place = shape, in_place
        self.read = {} if read is None else read
        # By the number of queries, which differs between steps with drafts and without.
        self._indices: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def indices(self, kv_heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return where things lie, heads included: a part's queries; a head's scores, by places; a part's weights.

        Queries, scores and results of parts are in the order in which `_pairs` multiplies them:
        [blocks, kv_heads, groups], then [shared, kv_heads, members, groups].
        """
        if groups not in self._indices:
            shape, device = self.shape, self._parts.device
            kv = torch.arange(kv_heads, device=device)[:, None]
            group = torch.arange(groups, device=device)[:, None]
            spots = self._spots
            own, several = (
                spots[: shape.blocks, None, None],
                spots[shape.blocks :].view(shape.shared, 1, shape.members),
            )
            row = torch.cat(
                [(spot // shape.parts * kv_heads + kv).view(-1) for spot in (own, several)]
            )
            place = torch.cat(
                [
                    (spot % shape.parts).expand(-1, kv_heads, -1).reshape(-1)
                    for spot in (own, several)
                ]
            )
            weight_of = (row[:, None] * groups + group.view(1, -1)) * shape.parts + place[:, None]
            part = self._parts[:, None, None]
            kv, entry = kv[:, :, None], part - shape.blocks
            unit = torch.where(
                part < shape.blocks,
                part * kv_heads + kv,
                shape.blocks * kv_heads
                + (entry // shape.members * kv_heads + kv) * shape.members
                + entry % shape.members,
            )
            score_of = (unit * groups + group).masked_fill_(
                part < 0, shape.parts_in_all * kv_heads * groups
            )
            self._indices[groups] = row, score_of.view(-1), weight_of.view(-1)
        return self._indices[groups]

    def results(self, heads: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """For all parts: scores [parts · heads + 1, BLOCK] and Σ p·v [parts · heads + 1, dim]; the last ones are 0."""
        if heads not in self._buffers:
            exact = torch.promote_types(values.dtype, torch.float32)
            sizes = [
                (self.shape.parts_in_all * heads + 1, width) for width in (BLOCK, values.shape[-1])
            ]
            scores, out = (values.new_empty(size, dtype=exact) for size in sizes)
            scores[-1] = out[-1] = 0
            self._buffers[heads] = scores, out
        return self._buffers[heads]


class DecodeView(View):
    """One new token of each sequence, and the draft behind it.

    Args:
        step: That of a DecodeBatch: [3, rows].
        places: Those of the batch where there are drafts, with its width.
    """

    def __init__(
        self,
        pool: BlockPool,
        step: Tensor,
        tables: Tables,
        places: Tensor | None = None,
        width: int = 1,
    ) -> None:
        super().__init__(pool)
        _, positions, write = step
        self.positions = positions[:, None]
        self._tables, self._places, self._width = tables, places, width
        self._seen = positions
        if places is not None:  # what fills up a sequence's rows sees something, and is not read
            self._seen = positions.new_zeros(tables.shape.rows * width).index_copy_(
                0, places, positions
            )
        self._block, self._place = write // BLOCK, write % BLOCK
        self._masks: dict[int | None, Tensor] = {}

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        keys[self._block, :, :, self._place] = key[:, :, 0]
        values[self._block, :, self._place] = value[:, :, 0]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.calls += 1
        dim, width, rows = query.shape[-1], self._width, self._tables.shape.rows
        keys, values = self._layer_cache()
        kv_heads, groups = keys.shape[1], width * (query.shape[1] // keys.shape[1])
        heads = kv_heads * groups
        queries, score_of, weight_of = self._tables.indices(kv_heads, groups)
        scores, out = self._tables.results(heads, values)
        given = self._by_sequence(query * scale, kv_heads).view(rows * kv_heads, groups * dim)
        found = given.index_select(0, queries)
        pairs = self._pairs(found.view(-1, dim), keys, values, heads)
        for some, (each, held, _) in pairs:
            _product(each, held, scores[some])
        weights = self._softmax(
            scores.index_select(0, score_of).view(rows, heads, -1), window, softcap, sinks
        )
        weights = weights.reshape(-1, BLOCK).index_select(0, weight_of)
        for some, (each, _, held) in pairs:
            _product(weights[some].view(*each.shape[:2], BLOCK), held, out[some])
        total = embedding_bag(score_of.view(rows * heads, -1), out, mode="sum")
        return self._by_row(total, kv_heads, query.shape[1]).to(query.dtype)

    def _by_sequence(self, query: Tensor, kv_heads: int) -> Tensor:
        """Return queries [rows, heads, 1, d] as [sequences, kv_heads, width, groups, d]."""
        if self._places is None:
            return query
        _, heads, _, dim = query.shape
        padded = query.new_zeros(len(self._seen), heads, dim)
        padded.index_copy_(0, self._places, query[:, :, 0])
        each = padded.view(-1, self._width, kv_heads, heads // kv_heads, dim)
        return each.transpose(1, 2).contiguous()

    def _by_row(self, total: Tensor, kv_heads: int, heads: int) -> Tensor:
        """Return results in the order of `_by_sequence` as [rows, heads, 1, d]."""
        if self._places is not None:
            each = total.view(-1, kv_heads, self._width, heads // kv_heads, total.shape[-1])
            total = each.transpose(1, 2).reshape(len(self._seen), -1).index_select(0, self._places)
        return total.view(
            -1, heads, 1, total.shape[-1] if self._places is None else total.shape[-1] // heads
        )

    def _pairs(
        self, found: Tensor, keys: Tensor, values: Tensor, heads: int
    ) -> list[tuple[slice, tuple[Tensor, ...]]]:
        """Own blocks, then shared ones: which results are theirs; queries [N, Q, d], keys and values of N blocks."""
        tables, shape, kv_heads = self._tables, self._tables.shape, keys.shape[1]
        count, end = shape.blocks * heads, shape.parts_in_all * heads
        pairs: list[tuple[slice, tuple[Tensor, ...]]] = []
        if shape.blocks:
            n = shape.blocks * kv_heads
            own = (keys, values) if tables.in_place else _read(tables.blocks, keys, values)
            own = own[0].flatten(0, 1)[:n], own[1].flatten(0, 1)[:n]
            pairs.append((slice(0, count), (found[:count].view(n, -1, found.shape[-1]), *own)))
        if shape.shared:
            several = found[count:].view(shape.shared * kv_heads, -1, found.shape[-1])
            pairs.append((slice(count, end), (several, *self._shared_read(keys, values))))
        return pairs

    def _shared_read(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [entries · heads, dim, BLOCK] and values [entries · heads, BLOCK, dim] of shared blocks.

        A full block does not change: the copy that the step before read is used again if it was of the same blocks.
        """
        found = self._tables.read.get(self._layer)
        if found is None:
            keys, values = _read(self._tables.shared, keys, values)
            found = self._tables.read[self._layer] = keys.flatten(0, 1), values.flatten(0, 1)
        return found

    def _softmax(
        self, scores: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Probabilities [rows, heads, places] of scores by the places of each sequence."""
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if self._places is None:
            scores += self._mask(window, scores.shape[-1])
        else:
            rows, places = self._tables.shape.rows, scores.shape[-1]
            kv_heads = self._layer_cache()[0].shape[1]
            each = scores.view(rows, kv_heads, self._width, -1, places)
            each += self._mask(window, places).view(rows, 1, self._width, 1, places)
        if sinks is None:
            return torch.softmax(scores, -1)
        column = sinks.to(scores.dtype).view(1, -1, 1).expand(len(scores), -1, -1)
        return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]

    def _mask(self, window: int | None, places: int) -> Tensor:
        """[sequences · width, 1, places] to be added to the scores."""
        mask = self._masks.get(window)
        if mask is None:
            place = torch.arange(places, device=self._seen.device)[None]
            seen = self._seen[:, None]
            hidden = place > seen
            if window is not None:
                hidden |= place <= seen - window
            mask = self._masks[window] = (hidden * MASKED)[:, None]
        return mask


def _read(blocks: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of some blocks."""
    return keys.index_select(0, blocks), values.index_select(0, blocks)


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Products of matrices a [N, Q, k] and b [N, k, m] into out [N · Q, m]. Raises ValueError for another m."""
    into = out.view(*a.shape[:2], -1)
    if into.shape[-1] != b.shape[-1]:  # torch would resize `out` with a warning alone
        raise ValueError(f"layers with heads of {b.shape[-1]} and {into.shape[-1]} numbers")
    if b.dtype == out.dtype:
        torch.bmm(a, b, out=into)
    else:
        into.copy_(torch.bmm(a.to(b.dtype), b))
