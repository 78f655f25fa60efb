"""The decoder layer that Llama, Mistral, Qwen2 and Qwen3 share, under a LoRA adapter, with its gradient written down.

Two autograd functions, before and after attention. They keep a third of what autograd would (normalised inputs,
queries, keys, values, the gate and what it gates; the rest is made again), pass over memory less often, and multiply
with the adapter merged where the weights are float32 or float64: base weights have no gradient, the adapter's comes
from two thin products. In 16 bits a merged weight would lose small adapters, so there the two products stay apart.

Notation: T tokens, D the model's width; a projection is [out, in], its adapter A [r, in] and B [out, r], weighed s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


@dataclass(frozen=True, slots=True)
class Projection:
    """A frozen linear layer; `scale` weighs its adapter, which comes as two tensors, or two None."""

    weight: Tensor
    bias: Tensor | None
    scale: float


@dataclass(frozen=True, slots=True)
class Heads:
    """What turns projections into queries, keys and values."""

    count: int
    kv: int
    dim: int
    eps: float
    q_norm: Tensor | None
    k_norm: Tensor | None


Pair = tuple[Tensor | None, Tensor | None]
"""A and B of an adapter."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], with no gradient.

    In float32 on a CPU by the faster of MKL and oneDNN.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu" and prefers_onednn():
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return linear(x, weight, bias)


class _Products:
    """Projections of one input [T, in], which is normalised where a norm's weight is given."""

    def __init__(
        self, given: Sequence[Projection], adapters: Sequence[Pair], norm: Tensor | None = None
    ) -> None:
        self.given = given
        self.norm = norm
        self.merged = given[0].weight.dtype in (torch.float32, torch.float64)
        self.weights = [p.weight for p in given]
        dtype = given[0].weight.dtype
        self.adapters = [
            (None, None) if a is None or b is None else (a.to(dtype), b.to(dtype))
            for a, b in adapters
        ]
        if self.merged:
            for n, (a, b) in enumerate(self.adapters):
                if a is not None and b is not None:
                    self.weights[n] = torch.addmm(self.weights[n], b, a, alpha=given[n].scale)
                if norm is not None:
                    self.weights[n] = self.weights[n] * norm

    def _input(self, x: Tensor) -> Tensor:
        return x if self.norm is None or self.merged else x * self.norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> list[Tensor]:
        """[T, in] -> one [T, out] each; the residual is added to a single one."""
        x = self._input(x)
        outs = []
        for p, weight, (a, b) in zip(self.given, self.weights, self.adapters, strict=True):
            out = product(x, weight, p.bias)
            if residual is not None:
                out.add_(residual)
            if not self.merged and a is not None and b is not None:
                out.addmm_(x @ a.T, b.T, alpha=p.scale)
            outs.append(out)
        return outs

    def backward(
        self, x: Tensor, grads: Sequence[Tensor], wants_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """(gradient of the input [T, in], those of A and B of each adapter)."""
        x = self._input(x)
        d_x: Tensor | None = None
        for grad, weight in zip(grads, self.weights, strict=True):
            if wants_input:
                part = product(grad, weight.T)
                d_x = part if d_x is None else d_x.add_(part)
        found = [
            (n, a, b) for n, (a, b) in enumerate(self.adapters) if a is not None and b is not None
        ]
        out: list[Tensor] = []
        if found:
            inside = self.norm if self.merged else None  # the norm that the input does not have yet
            every = torch.cat([a for _, a, _ in found])
            every = every if inside is None else every * inside
            down = product(x, every)  # [T, all r]
            ups = [product(grads[n], b.T).mul_(self.given[n].scale) for n, _, b in found]
            up = torch.cat(ups, 1)
            if not self.merged and d_x is not None:
                d_x.addmm_(up, every)
            d_a = up.T @ x
            d_a = d_a if inside is None else d_a * inside
            ranks = [len(a) for _, a, _ in found]
            for (n, _, _), part, own in zip(
                found, torch.split(d_a, ranks), torch.split(down, ranks, 1), strict=True
            ):
                d_b = (own.T @ grads[n]).mul_(self.given[n].scale)
                out += [part, d_b.T.contiguous()]
        if d_x is not None and self.norm is not None and not self.merged:
            d_x.mul_(self.norm)
        return d_x, out


def _normal(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / its root mean square over the last dimension, the factor); the factor at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    factor = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * factor).to(x.dtype), factor


def _normal_backward(grad: Tensor, normal: Tensor, factor: Tensor) -> Tensor:
    """Gradient of `_normal`'s input."""
    mean = torch.linalg.vecdot(grad, normal)[..., None].to(factor.dtype).div_(normal.shape[-1])
    return torch.addcmul(grad.to(factor.dtype), normal, mean, value=-1).mul_(factor).to(grad.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """[T, H, d] turned: x·cos + [−x₂, x₁]·sin, the halves of the last dimension being x₁ and x₂.

    `back`: the gradient of x, from that of the result.
    """
    half = x.shape[-1] // 2
    sin = -sin.roll(half, -1) if back else sin
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def _weigh(cos: Tensor, sin: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
    """cos and sin that also multiply with a norm's weight."""
    if norm is None:
        return cos, sin
    return cos * norm, sin * norm.roll(norm.shape[-1] // 2)


class Before(torch.autograd.Function):
    """Norm, projections, norms per head and rotation: x [T, D] -> q [T, H, d], k and v [T, H_kv, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: Heads,
        given: Any,
        *adapters: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`cos`, `sin` [T, 1, d]; `given` three Projections, `adapters` A and B of each."""
        normal, factor = _normal(x, heads.eps)
        products = _Products(given, _pairs(adapters), norm)
        q, k, v = (out.view(len(x), -1, heads.dim) for out in products.forward(normal))
        kept: list[Tensor] = []
        turned = []
        for raw, weight in ((q, heads.q_norm), (k, heads.k_norm)):
            if weight is not None:
                raw, by = _normal(raw, heads.eps)
                kept += [raw, by]
            turned.append(_turn(raw, *_weigh(cos, sin, weight)))
        ctx.heads, ctx.given, ctx.norm, ctx.rotation = heads, given, norm, (cos, sin)
        ctx.save_for_backward(normal, factor, *kept, *adapters)
        ctx.kept = len(kept)
        return turned[0], turned[1], v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        heads: Heads = ctx.heads
        normal, factor, *rest = ctx.saved_tensors
        kept, adapters = rest[: ctx.kept], rest[ctx.kept :]
        cos, sin = ctx.rotation
        flat = []
        for number, weight in enumerate((heads.q_norm, heads.k_norm)):
            grad = _turn(grads[number], *_weigh(cos, sin, weight), back=True)
            if weight is not None:
                grad = _normal_backward(grad, kept[2 * number], kept[2 * number + 1])
            flat.append(grad.flatten(1))
        products = _Products(ctx.given, _pairs(adapters), ctx.norm)
        d_normal, found = products.backward(
            normal, [*flat, grads[2].flatten(1)], ctx.needs_input_grad[0]
        )
        d_x = None if d_normal is None else _normal_backward(d_normal, normal, factor)
        return d_x, None, None, None, None, None, *_spread(adapters, found)


class After(torch.autograd.Function):
    """Output projection, residual, norm and the gated feed-forward part: x [T, D], attended [T, H·d] -> [T, D]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, norm: Tensor, eps: float, given: Any, *adapters: Any
    ) -> Tensor:
        """`given`: the projections o, gate, up, down; `adapters` A and B of each."""
        pairs = _pairs(adapters)
        (middle,) = _Products(given[:1], pairs[:1]).forward(attended, x)
        normal, factor = _normal(middle, eps)
        gate, up = _Products(given[1:3], pairs[1:3], norm).forward(normal)
        (out,) = _Products(given[3:], pairs[3:]).forward(silu(gate).mul_(up), middle)
        ctx.given, ctx.norm = given, norm
        ctx.save_for_backward(attended, normal, factor, gate, up, *adapters)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        attended, normal, factor, gate, up, *adapters = ctx.saved_tensors
        pairs = _pairs(adapters)
        active = silu(gate)
        d_inner, down = _Products(ctx.given[3:], pairs[3:]).backward(active * up, [grad], True)
        assert d_inner is not None
        d_up = active.mul_(d_inner)
        d_gate = torch.ops.aten.silu_backward(d_inner.mul_(up), gate)
        d_normal, both = _Products(ctx.given[1:3], pairs[1:3], ctx.norm).backward(
            normal, [d_gate, d_up], True
        )
        assert d_normal is not None
        d_middle = _normal_backward(d_normal, normal, factor).add_(grad)
        wants = bool(ctx.needs_input_grad[1])
        d_attended, out = _Products(ctx.given[:1], pairs[:1]).backward(attended, [d_middle], wants)
        return d_middle, d_attended, None, None, None, *_spread(adapters, [*out, *both, *down])


def _pairs(adapters: Sequence[Any]) -> list[Pair]:
    return list(zip(adapters[::2], adapters[1::2], strict=True))


def _spread(adapters: Sequence[Any], found: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients in the order of `adapters`, in their dtype; None for a missing adapter."""
    rest = iter(found)
    return [None if one is None else next(rest).to(one.dtype) for one in adapters]


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies faster than MKL, which runs at half its speed on processors that are not Intel's."""
    mkldnn: Any = torch.backends.mkldnn
    known = bool(mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    info = Path("/proc/cpuinfo")
    intel = (
        info.is_file()
        and "GenuineIntel" in info.read_text(encoding="utf-8", errors="replace")[:400]
    )
    return known and not intel
