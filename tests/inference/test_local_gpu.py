"""The path that a GPU takes, without one: tensors on the device `meta` have shapes and dtypes, and no numbers.

An operation on tensors of two devices, or of shapes or dtypes that do not fit, fails here as it would there. What a
kernel computes, and how fast, is not shown by this.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl_cli.policies import local_batch, local_paged
from agentrl_cli.policies.local_batch import DecodeBatch
from agentrl_cli.policies.local_engine import Shared, verify
from agentrl_cli.policies.local_paged import PagedBatch, check_pages
from agentrl_cli.policies.local_request import Request
from agentrl_cli.policies.local_sampling import draw, steer
from agentrl_cli.types import Sampling
from tests.helpers.graph_tape import tapes
from tests.helpers.local import VOCAB, prompts, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's, on transformers 5


Mode: Any = TorchDispatchMode  # torch does not say its types
FunctionMode: Any = TorchFunctionMode


class OneDevice(Mode):  # type: ignore[misc]  # a class of torch
    """Raises where an operation mixes devices, or a product mixes dtypes: `meta` alone lets some of it pass."""

    FREE = ("copy_", "_to_copy", "index.Tensor", "index_put", "set_", "detach")
    """These may: they are how data moves, and indices may be anywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor) and t.dim()]
        if not any(name in str(func) for name in self.FREE):
            assert len({t.device for t in tensors}) <= 1, f"{func} on {[t.device for t in tensors]}"
        if "mm" in str(func) or "scaled_dot" in str(func):
            assert len({t.dtype for t in tensors if t.is_floating_point()}) <= 1, f"{func} of two dtypes"
        return func(*args, **(kwargs or {}))


def test_the_check_itself() -> None:
    there = torch.empty(2, 4, device="meta")
    for wrong in (torch.zeros(4, 2), torch.empty(4, 2, device="meta", dtype=torch.bfloat16)):
        with pytest.raises(AssertionError, match="mm"), OneDevice():
            there @ wrong


def request(loop: asyncio.AbstractEventLoop, number: int, ids: list[int]) -> Request:
    future: asyncio.Future[Any] = loop.create_future()
    sampling = Sampling(max_new_tokens=40, seed=number)
    return Request(f"e{number}", np.array(ids, np.int32), sampling, future, None, [0.5] * 40, 0.0, order=number)


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [("qwen3", True), *((kind, False) for kind in ("qwen3", "qwen2", "llama", "mistral", "gemma2", "gpt-oss"))],
)
async def test_prompts_and_steps_stay_on_the_gpu(kind: str, adapter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def say(logits: torch.Tensor, requests: list[Request], limit: int, notes: Any) -> None:
        seen.append(logits)
        for number, one in enumerate(requests):  # numbers are what fake tensors lack: any token will do
            one.out.append(7)
            one.stop = None if len(one.out) < 20 + number else one.stop

    monkeypatch.setattr(local_batch, "draw_tokens", say)
    model = tiny(kind)
    if adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    model = model.to("meta", torch.bfloat16).eval()
    limits = {"rows": 8, "lanes": False, "lane_length": 256, "limit": 256, "budget": 400}
    engine = Shared(model)
    engine.shares = 256 if kind in ("qwen3", "qwen2", "llama") else 0  # as `verify` finds, which needs numbers
    batch = DecodeBatch(model, engine, version="v", **limits)
    loop = asyncio.get_running_loop()
    ragged = prompts(count=6)
    with OneDevice():
        rows = batch.step([request(loop, n, ids) for n, ids in enumerate(ragged[:4])])
        for _ in range(24):  # past the windows, and past the end of a shelf
            rows = batch.step([])
        rows = batch.step([request(loop, 4 + n, ids) for n, ids in enumerate(ragged[4:])])
        batch.set_aside(rows[0])
        again = request(loop, 0, [*rows[0].context.tolist(), 1, 2, 3])
        rows = batch.step([again])
        batch.renew("w")
        batch.step([])
    assert len(rows) == 6 and batch.device.type == "meta" and batch.sharing == bool(engine.shares)
    assert all(logits.device.type == "meta" and logits.shape[1] == VOCAB for logits in seen)
    assert {logits.dtype for logits in seen} == {torch.bfloat16}
    for shelf in batch.shelves:
        assert all(k is not None and k.device.type == "meta" and k.dtype == torch.bfloat16 for k in shelf.keys)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gpt-oss"])
async def test_steps_over_pages_stay_on_the_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded as a CUDA graph, and the prompts before it: only tables of numbers come from the host."""
    seen: list[torch.Tensor] = []

    def say(logits: torch.Tensor, requests: list[Request], limit: int, notes: Any, most: int | None = None) -> None:
        seen.append(logits)
        for one in requests:
            one.out.append(7)

    monkeypatch.setattr(local_paged, "draw_tokens", say)
    model = tiny(kind).to("meta", torch.bfloat16).eval()
    limits = {"rows": 8, "lanes": False, "lane_length": 256, "limit": 256, "budget": 400}
    batch = PagedBatch(model, Shared(model), make=None, version="v", **limits)
    loop = asyncio.get_running_loop()
    ragged = prompts(count=6)
    with OneDevice():
        rows = batch.step([request(loop, n, ids) for n, ids in enumerate(ragged[:4])])
        for _ in range(40):  # past the windows, and past the end of a page
            rows = batch.step([])
        rows = batch.step([request(loop, 4 + n, ids) for n, ids in enumerate(ragged[4:])])
        context = rows[0].context.tolist()
        batch.set_aside(rows[0])
        rows = batch.step([request(loop, 0, [*context, 1, 2, 3])])
        batch.renew("w")
        batch.step([])
    assert len(rows) == 6 and all(logits.device.type == "meta" for logits in seen)
    assert {logits.dtype for logits in seen} == {torch.bfloat16}
    assert all(k is not None and k.device.type == "meta" and k.dtype == torch.bfloat16 for k in batch.pool.keys)


class Elsewhere(FunctionMode):  # type: ignore[misc]  # a class of torch
    """Raises where NumPy reads a tensor that was not fetched: on a GPU it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.here: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            place = args[0].untyped_storage().data_ptr()
            if all(place != one.untyped_storage().data_ptr() for one in self.here):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu:
            out = out.clone()
        if func in (torch.Tensor.cpu, torch.from_numpy) or "pin_memory" in (kwargs or {}):
            self.here.append(out)
        return out


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gpt-oss"])
def test_comparing_with_the_model_fetches_what_numpy_reads(kind: str) -> None:
    """With numbers, on a CPU: what is done once, when the policy is made."""
    model = tiny(kind)
    with Elsewhere():
        with pytest.raises(TypeError, match="device type"):
            torch.ones(1).numpy()
        engine = Shared(model)
        with torch.inference_mode():
            reach = verify(engine, model)
        check_pages(engine, model, tapes)
    assert bool(reach) == (kind in ("qwen3", "mistral"))  # soft caps and sinks share no beginnings


def test_drawing_stays_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one question of the drawing asks for no number; that one is answered for it."""
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: False)
    samplings = [
        Sampling(temperature=0.7, top_p=0.9, top_k=3),
        Sampling(temperature=0.0, bad_ids=(1, 2)),
        Sampling(min_p=0.1, repetition_penalty=1.3, allow=lambda out: [3, 4]),
    ]
    for vocabulary in (96, 151936):
        with OneDevice():
            logits = torch.empty(3, vocabulary, device="meta", dtype=torch.bfloat16)
            context = [np.array([5, 6], np.int32)] * 3
            steered, forced = steer(logits, samplings, context, [None, None, [3, 4]])
            assert steered is not None and steered.device.type == "meta" and forced == [False] * 3
            found = draw(logits, samplings, torch.empty(3, dtype=torch.float64), steered)
        for tensor in (found.ids, found.logp_sampled, found.logp_policy, found.entropy, found.top_ids):
            assert tensor.device.type == "meta" and tensor.shape[0] == 3
