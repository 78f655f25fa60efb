"""How far log-probabilities may be from the model's own in a trial, and how that is measured."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Most that a log-probability may differ from the model's own in a trial."""
RELATIVE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Most that states and gradients may differ from the plain forward's, relative to the largest."""


def difference(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of two tensors; infinite where one has a number and the other has none."""
    if got.shape != wanted.shape or not torch.equal(got.isnan(), wanted.isnan()):
        return torch.inf
    off = torch.where(got == wanted, 0.0, got - wanted)  # infinities of masked logits
    return float(off.abs().nan_to_num(0.0).max())


def logp_difference(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of two tensors [..., V] of log-probabilities, computed in `dtype`.

    In 16 bits the largest is over places, and of each the mean over tokens as `wanted` draws them: among fifty thousand
    tokens some that are never drawn differ by half a nat from rounding alone.
    """
    if dtype.itemsize > 2 or got.shape != wanted.shape:
        return difference(got, wanted)
    if not torch.equal(got.isnan(), wanted.isnan()):
        return torch.inf
    off = torch.where(got == wanted, 0.0, got - wanted).abs().nan_to_num(0.0)
    return float((off * wanted.exp().nan_to_num(0.0)).sum(-1).max())


def relative_difference(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of two tensors over the largest number of the second."""
    exact = wanted.float()
    return float((got.float() - exact).abs().max() / exact.abs().max().clamp(min=1e-6))
