"""The training forward of models that cannot be packed: episodes side by side, padded on the right.

Nothing in a causal decoder looks ahead, so padding on the right changes no number and needs no mask. A group's prefix
is computed once if the model's cache carries gradients: its keys, values and states are handed to every continuation.
Whether they do is tried once per model, with gradients, against the plain forward.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from agentrl_cli.inference.batched_cache import select
from agentrl_cli.inference.cached_forward import CAUGHT, cache_name, short_windows
from agentrl_cli.inference.tolerance import RELATIVE, relative_difference
from agentrl_cli.learning.attention import Block
from agentrl_cli.learning.packing import Packed
from agentrl_cli.models.adapter import eval_mode, switch_length
from agentrl_cli.models.vision import reader_of

_LOG = logging.getLogger(__name__)
_CARRIES: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Models that were tried: whether their cache carries gradients."""
ALIKE = 0.7
"""A sequence shorter than this share of the longest is not padded to it."""


def padded_states(base: Any, packed: Packed, *, share: bool = True) -> Tensor:
    """[T, D] hidden states of a packed row. `share`: compute a prefix once where the model allows it."""
    decoder = decoder_of(base)
    device = base.get_input_embeddings().weight.device
    ids = torch.from_numpy(packed.input_ids).to(device)
    share = share and any(
        block.own > block.start and len(block.segments) > 1 for block in packed.blocks
    )
    if share and carries(base):
        return torch.cat([continue_block(decoder, ids, block) for block in packed.blocks])
    return _spread(ids, packed, lambda rows, length, _: _states(decoder, rows, length))


def pictured_states(base: Any, packed: Packed, *, apart: bool = False) -> Tensor:
    """[T, D] hidden states of a packed row whose episodes have images, several at a time unless `apart`."""
    decoder, reader = decoder_of(base), reader_of(base)
    assert reader is not None
    given = iter(packed.images)
    images = [
        next(given, ()) if end > begin else ()
        for block in packed.blocks
        for begin, end in _members(block)
    ]
    device = base.get_input_embeddings().weight.device

    def states(rows: list[Tensor], length: int, numbers: list[int]) -> Tensor:
        seen = reader.gather(base, rows, [images[n] for n in numbers], [0] * len(rows))
        return _states(decoder, rows, length, **reader.arguments(seen, [0] * len(rows), length))

    return _spread(torch.from_numpy(packed.input_ids).to(device), packed, states, apart=apart)


def whole_logits(base: Any, packed: Packed) -> tuple[Tensor, Tensor]:
    """Logits [M, V] of the model's own head at the positions that predict trained tokens, and their states [M, D]."""
    device = base.get_input_embeddings().weight.device
    wanted = torch.from_numpy(packed.rows).to(device)

    def both(rows: list[Tensor], length: int, _: list[int]) -> Tensor:
        out = base(input_ids=_stack(rows, length), use_cache=False, output_hidden_states=True)
        return torch.cat([out.logits, out.hidden_states[-1]], -1)

    found = _spread(torch.from_numpy(packed.input_ids).to(device), packed, both).index_select(
        0, wanted
    )
    size = int(found.shape[-1]) - int(base.config.get_text_config().hidden_size)
    return found[:, :size], found[:, size:]


def _spread(
    ids: Tensor,
    packed: Packed,
    compute: Callable[[list[Tensor], int, list[int]], Tensor],
    *,
    apart: bool = False,
) -> Tensor:
    """[T, …] what whole episodes give, in the order of a packed row; a shared prefix is read off the last of them."""
    places = [
        np.r_[block.start : block.own, begin:end]
        for block in packed.blocks
        for begin, end in _members(block)
    ]
    parts: list[Tensor] = []
    source = np.zeros(packed.tokens, np.int64)
    at = 0
    lengths = [len(place) for place in places]
    for number, length in (
        [([n], length) for n, length in enumerate(lengths)] if apart else _alike(lengths)
    ):
        parts.append(
            compute(
                [ids[torch.from_numpy(places[n]).to(ids.device)] for n in number], length, number
            )
        )
        for line, n in enumerate(number):
            source[places[n]] = at + line * length + np.arange(len(places[n]))
        at += len(number) * length
    return torch.cat([part.flatten(0, 1) for part in parts]).index_select(
        0, torch.from_numpy(source).to(ids.device)
    )


def _members(block: Block) -> tuple[tuple[int, int], ...]:
    return block.segments or ((block.own, block.own),)


def _alike(lengths: list[int]) -> list[tuple[list[int], int]]:
    """Numbers of sequences that are padded to one length, and that length."""
    out: list[tuple[list[int], int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if out and lengths[n] >= ALIKE * out[-1][1]:
            out[-1][0].append(n)
        else:
            out.append(([n], lengths[n]))
    return out


def _states(decoder: Any, rows: list[Tensor], length: int, **given: Any) -> Tensor:
    """[B, length, D] states of sequences padded on the right."""
    out = decoder(input_ids=_stack(rows, length), **{"use_cache": False, **given})
    return cast(
        Tensor, out[0] if isinstance(out, tuple) else out.last_hidden_state
    )  # a model's own code may return a tuple


def _stack(rows: list[Tensor], length: int) -> Tensor:
    return torch.stack([nn.functional.pad(row, (0, length - len(row))) for row in rows])


def continue_block(decoder: Any, ids: Tensor, block: Block) -> Tensor:
    """States of a block in its order: the prefix once, then the continuations from its cache."""
    prefix = block.own - block.start
    rows = [ids[begin:end] for begin, end in block.segments]
    shared = bool(prefix and rows)
    parts: dict[int, Tensor] = {}
    if shared:
        name, names = cache_name(decoder), inspect.signature(decoder.forward).parameters
        out = decoder(input_ids=ids[block.start : block.own][None], use_cache=True)
        parts[-1] = out.last_hidden_state[0]
    rows = rows or [ids[block.start : block.own]]
    for numbers, length in _alike([len(row) for row in rows]):
        given: dict[str, Any] = {}
        if shared:
            length = max(2, length)  # a single token would be a decode step: it writes its state
            given = {"use_cache": True, name: _read_only(select(out[name], [0] * len(numbers)))}
            if "position_ids" in names:
                places = torch.arange(prefix, prefix + length, device=ids.device)[None]
                given["position_ids"] = places.expand(len(numbers), -1)
        states = _states(decoder, [rows[n] for n in numbers], length, **given)
        parts |= {n: states[line, : len(rows[n])] for line, n in enumerate(numbers)}
    return torch.cat([parts[n] for n in sorted(parts)])


def _read_only(cache: Any) -> Any:
    """Return a cache whose states are read and not written, as a backward pass needs them."""

    def conv(layer: Any, new: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        return torch.cat([layer.conv_states[state_idx], new], -1)

    for layer in getattr(cache, "layers", ()):
        if hasattr(layer, "update_recurrent_state"):
            layer.update_recurrent_state = lambda states, *_, **__: states
            layer.update_conv_state = conv.__get__(layer)
    return cache


def decoder_of(base: Any) -> nn.Module:
    """Return the transformer without its head."""
    named = getattr(base, base.base_model_prefix, None)
    return cast(
        nn.Module, base.model if named is None else named
    )  # Llama 4's prefix names no attribute


def carries(base: Any) -> bool:
    """Whether states and gradients of continuations of a shared prefix are those of whole episodes."""
    if base not in _CARRIES:
        try:
            with eval_mode(base), short_windows(base):
                _CARRIES[base] = _carries(base)
        except CAUGHT as error:
            _LOG.debug(
                "%s computes a group's prompt for each episode: %s", type(base).__name__, error
            )
            _CARRIES[base] = False
    return _CARRIES[base]


@torch.enable_grad()
def _carries(base: Any) -> bool:
    decoder, weight = decoder_of(base), base.get_input_embeddings().weight
    if not cache_name(decoder) or switch_length(base):  # a prefix alone may have other positions
        return False
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, weight.shape[0], (40 + 27 + 30,), generator=generator).to(weight.device)
    block = Block(0, 40, (67, 97))
    trained = [p for p in decoder.parameters() if p.requires_grad][:1]
    whole = [
        _states(decoder, [torch.cat([ids[:40], ids[begin:end]])], end - begin + 40)[0]
        for begin, end in block.segments
    ]
    wanted = torch.cat([whole[0][:40], *(states[40:] for states in whole)])
    found = continue_block(decoder, ids, block)
    scale = torch.randn(wanted.shape, generator=generator).to(wanted)
    pairs = [(found, wanted)]
    if trained:
        grads = [
            torch.autograd.grad((states * scale).sum(), trained, allow_unused=True)[0]
            for states in (found, wanted)
        ]
        pairs += [(grads[0], grads[1])] if grads[0] is not None else []
    most = RELATIVE.get(weight.dtype, 1e-3)
    return all(relative_difference(got.detach(), own.detach()) <= most for got, own in pairs)
