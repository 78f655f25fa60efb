"""Attention to what rows begin with in common, in one product for all of them: the keys and values are read once.

The result is joined to the attention over a row's own positions by the log-sum-exp of both (local_attention.py), as in
https://arxiv.org/abs/2402.05099.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl_cli.policies.local_bases import Base
from agentrl_cli.policies.local_cache import Shelf


@dataclass(frozen=True, slots=True)
class Common:
    """Rows [first, first + count) of a shelf of beginnings, and who attends to them."""

    shelf: Shelf
    first: int
    count: int
    length: int
    """Positions that are attended to."""
    most: int
    """Most rows of the batch that share one of them."""
    users: Tensor
    """[count · most] rows of the batch; where fewer share a beginning, row 0 stands in."""
    mask: Tensor | None
    """[count, 1, 1, length] to be added to the scores; None where all are of this length."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who of a batch of B rows shares which beginning."""

    commons: list[Common]
    lengths: list[int]
    """[B] positions of each row's beginning, 0 where it has none."""
    held: Tensor
    """[B, 1] the same."""
    slot: Tensor
    """[B] where a row's result stands among those of all commons."""
    lone: Tensor | None
    """[B, 1, 1] True where a row shares nothing; None: all do."""

    def attend(self, query: Tensor, layer: int, scale: float) -> tuple[Tensor, Tensor]:
        """Queries [B, H, T, d] of every position -> attention over the beginnings and the log-sum of the scores.

        The log-sum [B, H, T] is -inf where a row shares nothing.
        """
        found = [_attend(common, query, layer, scale) for common in self.commons]
        out, total = found[0] if len(found) == 1 else (torch.cat(both) for both in zip(*found, strict=True))
        out, total = out[self.slot], total[self.slot]
        return out, total if self.lone is None else total.masked_fill_(self.lone, -torch.inf)


def share(bases: Sequence[Base | None], device: torch.device) -> Sharing | None:
    """Sort the rows of a batch by the beginnings that they share; None where no row has one."""
    used = {id(base): base for base in bases if base is not None}
    if not used:
        return None
    rows: dict[int, list[int]] = {}
    for row, one in enumerate(bases):
        if one is not None:
            rows.setdefault(id(one), []).append(row)
    shelves: dict[int, list[Base]] = {}
    for base in used.values():
        shelves.setdefault(id(base.shelf), []).append(base)
    commons: list[Common] = []
    slot, done = [0] * len(bases), 0
    for held in shelves.values():
        first = min(base.row for base in held)
        count = max(base.row for base in held) + 1 - first
        most = max(len(rows[id(base)]) for base in held)
        users = [0] * (count * most)
        for base in held:
            at = (base.row - first) * most
            for n, row in enumerate(rows[id(base)], at):
                users[n], slot[row] = row, done + n
        done += len(users)
        longest = max(base.length for base in held)
        mask = _mask(held, first, count, longest, device)
        shelf = held[0].shelf
        commons.append(Common(shelf, first, count, longest, most, torch.tensor(users, device=device), mask))
    lengths = [0 if base is None else base.length for base in bases]
    lone = None if all(lengths) else torch.tensor([not n for n in lengths], device=device)[:, None, None]
    own = torch.tensor(lengths, device=device)[:, None]
    return Sharing(commons, lengths, own, torch.tensor(slot, device=device), lone)


def _mask(bases: list[Base], first: int, count: int, longest: int, device: torch.device) -> Tensor | None:
    """Hides what lies behind the end of the shorter ones."""
    if all(base.length == longest for base in bases):
        return None
    mask = torch.zeros(count, 1, 1, longest, device=device)
    for base in bases:
        mask[base.row - first, :, :, base.length :] = -torch.inf
    return mask


def _attend(common: Common, query: Tensor, layer: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the users: [count · most, H, T, d] and the log-sum of the scores."""
    keys, values = common.shelf.keys[layer], common.shelf.values[layer]
    assert keys is not None and values is not None
    rows = slice(common.first, common.first + common.count)
    keys, values = keys[rows, :, : common.length], values[rows, :, : common.length]
    _, heads, width, dim = query.shape
    kv_heads = keys.shape[1]
    each = heads // kv_heads * width
    # The queries of all rows that share keys count as more positions of one row.
    shape = (common.count, common.most, kv_heads, each, dim)
    q = query[common.users].reshape(shape).transpose(1, 2).reshape(common.count, kv_heads, -1, dim)
    mask = None if common.mask is None else common.mask.to(q.dtype)
    out, total = attention_and_sum(q, keys, values, mask, scale)
    split = (common.count, kv_heads, common.most, each)
    out = out.reshape(*split, dim).transpose(1, 2).reshape(-1, heads, width, dim)
    return out, total.reshape(split).transpose(1, 2).reshape(-1, heads, width)


SCORES = 2**22
"""Scores of written-out attention that there are at a time: 16 MiB in float32."""


def attention_and_sum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores: q [n, H, Q, d], k and v [n, H, L, d], mask to [n, H, Q, L].

    By the flash kernel on a CPU, which tells the log-sum; elsewhere written out.
    """
    if q.device.type != "cpu":
        return written_attention(q, k, v, mask, scale)
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, total = kernel(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out, total


def written_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The same by matrix products, with scores in float32 and so many queries at a time as SCORES allows.

    A query that sees nothing has a log-sum of -inf, and zeros.
    """
    out, total = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    step = max(1, SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        part = slice(start, start + step)
        scores = torch.matmul(q[:, :, part], k.transpose(2, 3)).float().mul_(scale)
        if mask is not None:
            scores += mask if mask.shape[2] == 1 else mask[:, :, part]
        total[:, :, part] = scores.logsumexp(-1)
        weights = scores.sub_(total[:, :, part, None]).exp_().nan_to_num_(0.0)
        out[:, :, part] = torch.matmul(weights.to(v.dtype), v)
    return out, total
