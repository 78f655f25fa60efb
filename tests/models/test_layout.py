"""Weights that lie otherwise in memory are the same weights: for forwards, gradients, files and shards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from agentrl_cli.models.layout import lay_by_input, lay_by_output
from tests.helpers.local import tiny


def linear_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.weight for name, one in model.named_modules() if isinstance(one, nn.Linear)}


def test_values_gradients_and_files_stay(tmp_path: Path) -> None:
    plain, model = tiny("qwen3"), tiny("qwen3")
    parameters = dict(model.named_parameters())
    lay_by_input(model)
    assert (
        dict(model.named_parameters()) == parameters
    )  # the same objects: an optimizer keeps its own
    lying = linear_weights(model)
    head = model.get_output_embeddings().weight
    assert head.is_contiguous() and all(
        w.T.is_contiguous() for w in lying.values() if w is not head
    )
    ids = torch.arange(24).view(2, 12)
    for one in (plain, model):
        one(ids, labels=ids).loss.backward()
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(parameters[name], weight, atol=0, rtol=0)
        torch.testing.assert_close(parameters[name].grad, weight.grad, atol=1e-6, rtol=1e-5)
    model.save_pretrained(tmp_path)
    loader: Any = AutoModelForCausalLM
    for name, weight in loader.from_pretrained(tmp_path).named_parameters():
        assert torch.equal(weight, parameters[name])


def test_a_copy_lies_the_same_and_shards_get_contiguous_weights() -> None:
    model = tiny("qwen3")
    lay_by_input(model)
    twin = copy.deepcopy(model)
    assert [w.stride() for w in twin.parameters()] == [w.stride() for w in model.parameters()]
    lay_by_output(twin)
    assert all(weight.is_contiguous() for weight in twin.parameters())


def test_sixteen_bits_and_other_layers_stay_as_they_are() -> None:
    half = tiny("qwen3").to(torch.bfloat16)
    lay_by_input(half)
    assert all(weight.is_contiguous() for weight in half.parameters())
    conv = nn.Sequential(nn.Conv1d(4, 4, 2), nn.Embedding(5, 4))
    lay_by_input(conv)
    assert all(weight.is_contiguous() for weight in conv.parameters())
