"""The attention function that transformers calls in place of its own, for a forward over the paged KV cache.

It honours causality, sliding windows, soft caps and sinks, and raises NotServed on anything else, so that no model is
run wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from agentrl_cli.errors import ModelError
from agentrl_cli.inference.attention import View
from agentrl_cli.inference.kv_cache import NotServed

NAME = "agentrl_paged"
"""Under this name the function stands in transformers' AttentionInterface."""
_INERT = {
    "cache_position", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
    "logits_to_keep", "is_causal", "position_embeddings", "num_items_in_batch", "output_router_logits",
    "num_logits_to_keep", "labels", "inputs_embeds", "attn_implementation",
}  # fmt: skip
"""What models hand to their attention functions that does not change the attention of a causal row."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    view: View | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention function that transformers calls: q [B, H, T, d], k and v [B, H_kv, T,
    d] -> [B, T, H, d_v].
    """
    name = type(module).__name__
    if view is None:
        raise NotServed(f"{name} does not hand keyword arguments to its attention")
    odd = sorted(key for key, given in kwargs.items() if given is not None and key not in _INERT)
    if odd:
        raise NotServed(f"{name} uses {odd[0]} in its attention")
    if dropout:
        raise NotServed(f"{name} drops attention weights while sampling")
    if getattr(module, "is_causal", True) is False:
        raise NotServed(f"{name} is not causal")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if (
        sliding_window is None
        and kinds
        and kinds[getattr(module, "layer_idx", 0)] == "sliding_attention"
    ):
        raise NotServed(f"{name} slides, and does not tell its attention how far")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = view.attend(
        query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return out.transpose(1, 2).contiguous(), None


def make_change_error(model: nn.Module) -> ModelError:
    """Return the error of a model whose layers do not compute as they did when it was tried."""
    return ModelError(
        f"{type(model).__name__} was changed while it was in use: its layers do not compute as they did at first.",
        hint="Code of the task or a hook may have done that. Run the command again; to resume a training:"
        " agentrl train --resume last",
    )


@contextmanager
def attention_in(config: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Run the model of this transformers config with another attention, and put back what was set before.

    For a caller that has the model to itself: an update begins only when the policy's `rest` has returned, and one that
    samples meanwhile does so with a twin of the model, which has a config of its own.
    """
    from transformers import AttentionInterface  # costs seconds; only who runs a model pays

    AttentionInterface.register(name, function)
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
