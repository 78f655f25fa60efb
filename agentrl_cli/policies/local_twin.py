"""A model that samples while another is trained: the same frozen weights, trained ones of its own.

With an adapter this is a second adapter on the same base; with full weights a second copy of them, which the memory
plan counts. The twin has modules of its own, so that a forward in one thread and a backward in another share nothing
that either of them writes.
"""

from __future__ import annotations

import copy

import torch
from torch import nn


def twin(model: nn.Module) -> nn.Module:
    """A model in eval mode that shares the frozen parameters of `model` and has copies of the trained ones.

    Raises nothing of its own; the copies require no gradient.
    """
    shared = {id(weights): weights for weights in model.parameters() if not weights.requires_grad}
    other = copy.deepcopy(model, shared)
    for weights in other.parameters():
        if id(weights) not in shared:
            weights.requires_grad_(False)
    return other.eval()


@torch.no_grad()
def copy_trained(source: nn.Module, target: nn.Module) -> None:
    """Give a twin the weights that its model has now. Nothing may compute with either meanwhile."""
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        if ours is not theirs:
            theirs.copy_(ours)
    for old, new in zip(target.buffers(), source.buffers(), strict=True):
        old.copy_(new)
