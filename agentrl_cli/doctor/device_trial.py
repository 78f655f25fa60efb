"""A device is tried: a small model is sampled and updated in every way, beside transformers' own forwards.

`python -m agentrl_cli.doctor.device_trial DEVICE SECONDS PART …` prints the device's identity, then a line of JSON
for each part as it ends. policies/device_check.py starts it: a fault of a GPU may end the process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.config import Config
from agentrl_cli.errors import AgentRLError
from agentrl_cli.inference.cached_forward import CAUGHT
from agentrl_cli.inference.cuda_graphs import CudaCapture, GraphRunner
from agentrl_cli.inference.kv_cache import NotServed
from agentrl_cli.inference.model_runner import PIECE, ModelRunner
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.inference.tolerance import RELATIVE, TOLERANCE
from agentrl_cli.learning.forward import compute
from agentrl_cli.learning.optimizers import make_optimizer
from agentrl_cli.learning.packing import Segment, pack
from agentrl_cli.models.device import identity, pick_device, pick_dtype
from agentrl_cli.types import Generation, Sampling

VOCABULARY, NEW = 2048, 32
PROMPTS = (41, 150, 290)
"""Tokens of the prompts of a round; each is sampled four times."""
LONG = PIECE + 60
"""Tokens of a prompt that is computed in pieces, once."""
TOP = 2
"""Turns of an episode."""

Asked = tuple[list[int], Generation]
"""A context and the tokens sampled after it."""


def small_model(device: torch.device, dtype: torch.dtype) -> Any:
    """Return a million random parameters, with heads as in today's models, and windows in half of the layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make: Any = Qwen3ForCausalLM
    config: Any = Qwen3Config
    torch.manual_seed(0)
    shape = config(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=2,
        initializer_range=0.1,
        eos_token_id=None,
        pad_token_id=None,
    )
    return make(shape).eval().to(device, dtype)


def try_part(part: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """Try one part. Returns `problem` (empty if none), the worst difference, and tokens a second if it samples."""
    kinds = dict.fromkeys((torch.float32, pick_dtype("auto", device)))
    found: dict[str, Any] = {"part": part, "problem": ""}
    for dtype in kinds:
        try:
            found |= _RUN[part](small_model(device, dtype), seconds / len(kinds))
        except (AgentRLError, *CAUGHT) as error:
            lines = str(error).strip().splitlines() or [""]
            found["problem"] = f"{type(error).__name__}: {lines[0][:200]}"
        if found["problem"]:
            found["problem"] += f" ({str(dtype).removeprefix('torch.')})"
            break
    return found


def _judge(worst: float, tolerance: float, what: str, **more: float) -> dict[str, Any]:
    problem = "" if worst <= tolerance else f"{what} by {worst:.2g}, more than {tolerance:g}"
    return {"problem": problem, "worst": worst, **more}


# --- sampling --------------------------------------------------------------------------------------------------------


def _device(model: Any, seconds: float) -> dict[str, Any]:
    """Return the plain forward on the device beside the CPU's, in float32."""
    if model.dtype != torch.float32:
        return {}
    ids = torch.arange(300)[None] % VOCABULARY
    with torch.inference_mode():
        found = model(input_ids=ids.to(model.device), use_cache=False).logits.cpu()
        wanted = model.to("cpu")(input_ids=ids, use_cache=False).logits
    worst = float((found.log_softmax(-1) - wanted.log_softmax(-1)).abs().max())
    return _judge(worst, TOLERANCE[torch.float32], "log-probabilities differ from the CPU's")


def _generate(model: Any, seconds: float) -> dict[str, Any]:
    """Measure tokens a second of transformers' `generate`, for comparison."""
    prompts = [ids for ids in _prompts() if len(ids) < LONG]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )

    def once(_: int) -> int:
        model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=True, top_k=0, pad_token_id=0
        )
        return len(prompts) * NEW

    return {"tokens_per_second": _rate(once, seconds, model.device)}


def _sample(
    runner: Callable[[Any], ModelRunner], engine: str, model: Any, seconds: float
) -> dict[str, Any]:
    """Measure tokens a second of an engine; compare its first log-probabilities with the plain forward's."""
    policy = LocalPolicy(model, context_length=4096, rows=16, runner=runner)
    if policy.engine != engine:
        return {"problem": policy.engine_why}
    asked: list[Asked] = []

    def once(number: int) -> int:
        policy.set_version(str(number))
        found = event_loop.run(_episodes(policy, number))
        asked[:] = asked or found  # those of the first round are compared
        return sum(len(said.ids) for _, said in found)

    with asyncio.Runner() as event_loop:
        rate = _rate(once, seconds, model.device)
        event_loop.run(policy.close())
    if policy.engine_why.startswith("no CUDA graphs"):
        return {"problem": policy.engine_why}
    worst = max(_difference(model, context, said) for context, said in asked)
    tolerance = TOLERANCE.get(model.dtype, 1e-3)
    return _judge(
        worst, tolerance, "log-probabilities differ from transformers'", tokens_per_second=rate
    )


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, n).tolist() for n in PROMPTS]
    return [*(ids for ids in prompts for _ in range(4)), rng.integers(0, VOCABULARY, LONG).tolist()]


async def _episodes(policy: LocalPolicy, number: int) -> list[Asked]:
    """Sample two turns of each prompt at once; half of them with top-p. Only the first round has the long prompt."""

    async def episode(n: int, ids: list[int]) -> list[Asked]:
        key, found = f"{number}-{n}", []
        for turn in range(TOP):
            most = NEW - 2 * (n % 5)
            how = Sampling(seed=100 * number + n, max_new_tokens=most, top_p=0.9 if n % 2 else 1.0)
            said = await policy.generate(key, ids, how)
            found.append((ids, said))
            ids = [*ids, *said.ids.tolist(), *range(turn, turn + 9)]
        await policy.release(key)
        return found

    prompts = _prompts() if number == 0 else _prompts()[:-1]
    every = await asyncio.gather(*(episode(n, ids) for n, ids in enumerate(prompts)))
    return [asked for episode_ in every for asked in episode_]


@torch.inference_mode()
def _difference(model: Any, context: Sequence[int], said: Generation) -> float:
    ids = torch.tensor([[*context, *said.ids.tolist()]], device=model.device)
    logp = (
        model(input_ids=ids, use_cache=False)
        .logits[0, len(context) - 1 : -1]
        .float()
        .log_softmax(-1)
    )
    wanted = logp.gather(1, ids[0, len(context) :, None])[:, 0].cpu().numpy()
    return float(np.abs(wanted - said.logp_policy).max())


def _rate(once: Callable[[int], int], seconds: float, device: torch.device) -> float:
    """Measure tokens a second, after a round that is not counted."""
    once(0)
    started, tokens, number = time.perf_counter(), 0, 0
    while not tokens or time.perf_counter() - started < seconds:
        number += 1
        tokens += once(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return tokens / (time.perf_counter() - started)


def _refuse_runner(model: Any) -> ModelRunner:
    raise NotServed("it is tried")


# --- an update -------------------------------------------------------------------------------------------------------


def _update(way: str, model: Any, seconds: float) -> dict[str, Any]:
    """Take an optimizer step on packed or padded episodes; compare their gradients with plain forwards'."""
    groups = _groups()
    packed = pack(groups)
    weights = torch.randn(len(packed.targets), generator=torch.Generator().manual_seed(0))
    wanted = _gradients(model, _plain(model, groups), weights)
    largest = max(float(grad.abs().max()) for grad in wanted)
    worst = 0.0
    for checkpoint in (False, True):
        logp = compute(way, model.train(), packed, checkpoint=checkpoint).logp
        found = _gradients(model, logp, weights)
        worst = max(
            worst,
            *(float((a - b).abs().max()) / largest for a, b in zip(found, wanted, strict=True)),
        )
    before = model.get_input_embeddings().weight.detach().clone()
    make_optimizer(model, Config().train).step()
    after = model.get_input_embeddings().weight
    if not bool(after.isfinite().all()) or torch.equal(before, after):
        return {"problem": "the optimizer's step left the weights as they were, or not finite"}
    tolerance = RELATIVE.get(model.dtype, 1e-3)
    return _judge(worst, tolerance, "relative to the largest, gradients differ from transformers'")


def _groups() -> list[list[Segment]]:
    """Return two groups of answers to shared prompts that cross every window."""
    rng, groups = np.random.default_rng(1), []
    for prompt in (120, 90):
        first = rng.integers(0, VOCABULARY, prompt)
        every = [
            np.concatenate([first, rng.integers(0, VOCABULARY, n)]).astype(np.int32)
            for n in (33, 70, 8)
        ]
        groups.append([Segment(ids, np.arange(len(ids)) >= prompt) for ids in every])
    return groups


def _plain(model: Any, groups: Sequence[Sequence[Segment]]) -> Tensor:
    """Return the [M] log-probabilities of trained tokens by a plain forward for each episode."""
    parts = []
    for segment in (segment for group in groups for segment in group):
        ids = torch.from_numpy(segment.ids.astype(np.int64)).to(model.device)
        logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        parts.append(
            logp.gather(1, ids[1:, None])[:, 0][
                torch.from_numpy(segment.trained[1:]).to(ids.device)
            ]
        )
    return torch.cat(parts)


def _gradients(model: Any, logp: Tensor, weights: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward((logp * weights.to(logp.device)).mean())
    return [p.grad.float().clone() for p in model.parameters()]


_RUN: dict[str, Callable[[Any, float], dict[str, Any]]] = {
    "device": _device,
    "generate": _generate,
    "paged": partial(_sample, ModelRunner, "paged"),
    "fallback": partial(_sample, _refuse_runner, "fallback"),
    "packed": partial(_update, "packed"),
    "padded": partial(_update, "padded"),
    "graphs": partial(
        _sample, lambda model: GraphRunner(model, partial(CudaCapture, model.device)), "paged"
    ),
}


def main(arguments: Sequence[str]) -> None:
    """Try parts of a device: DEVICE SECONDS PART …, the seconds of all sampling together."""
    logging.disable(logging.WARNING)  # the fallback is tried on purpose
    try:
        device = pick_device(arguments[0])
    except AgentRLError as error:
        sys.exit(error.message)
    print(json.dumps(identity(device)), flush=True)
    for part in arguments[2:]:
        print(json.dumps(try_part(part, device, float(arguments[1]) / 4)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
