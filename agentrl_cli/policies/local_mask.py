"""What the rows of a decode batch may attend to, in the form that a model's layers want.

A finished four-dimensional mask is handed to transformers as it is, so a sliding window must be in it already.
"""

from __future__ import annotations

from typing import Any

import torch

from agentrl_cli.errors import ModelError

KINDS = {"full_attention", "sliding_attention"}


class Masks:
    """Masks for one model.

    Raises ModelError where it has layers whose state is no plain keys and values (recurrent, chunked).
    """

    def __init__(self, config: Any, dtype: torch.dtype, context_length: int) -> None:
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ())
        if kinds - KINDS:
            raise ModelError(
                f"The model has layers of the kind {sorted(kinds - KINDS)[0]}, which the local policy cannot run.",
                hint="Serve it with vLLM or SGLang (policy vllm), or take a model with attention layers only.",
            )
        window = getattr(text, "sliding_window", None)
        self._window = window if window is not None and window < context_length else None
        self._by_kind = bool(kinds) and "sliding_attention" in kinds
        self._all_slide = not kinds
        # Eager attention adds its mask to the scores; the others take True for "may attend".
        self._additive = getattr(config, "_attn_implementation", "sdpa") == "eager"
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Masks [rows, 1, T, length] for queries at `positions` [rows, T]: each sees itself and what is before it."""
        keys = torch.arange(length, device=positions.device)[None, None]
        full = keys <= positions[:, :, None]
        if self._window is None or not (self._by_kind or self._all_slide):
            one = self._form(full)
            return {"full_attention": one, "sliding_attention": one} if self._by_kind else one
        near = full & (keys > positions[:, :, None] - self._window)
        if self._all_slide:
            return self._form(near)
        return {"full_attention": self._form(full), "sliding_attention": self._form(near)}

    def _form(self, mask: torch.Tensor) -> torch.Tensor:
        mask = mask[:, None]
        if not self._additive:
            return mask
        return torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(self._dtype).min
        )
