"""A GPU, or another device of torch, beside transformers."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl_cli.doctor import Check
from agentrl_cli.policies.device_check import SECONDS, keep, try_device

PARTS = {
    "device": ("plain forward", ""),
    "generate": ("generate", "It is only for comparison: the engines below do the work."),
    "paged": ("paged engine", "The fallback engine samples on this device."),
    "fallback": (
        "fallback engine",
        "Models that the paged engine does not serve cannot be sampled on this device.",
    ),
    "packed": ("packed update", "Episodes are padded in training on this device."),
    "padded": (
        "padded update",
        "Models whose episodes cannot be packed cannot be trained on this device.",
    ),
    "graphs": ("CUDA graphs", "`rollout.cuda_graphs: auto` is ignored on this device."),
}
"""Parts of a device's trial, and what follows if one fails."""


def check_device(device: str | None = None, seconds: float | None = None) -> Iterator[Check]:
    """Sample and update a small model on a GPU, or another device of torch, beside transformers; keep the result.

    Raises EnvironmentProblem without such a device.
    """
    verdict = keep(try_device(device or "cuda", SECONDS if seconds is None else seconds))
    identity = ", ".join(f"{key} {value}" for key, value in verdict.identity.items() if value)
    yield Check("device", "ok", identity)
    for name, part in verdict.parts.items():
        label, instead = PARTS[name]
        if part.problem:
            status, fix = ("warn", instead) if instead else ("fail", "Use another driver or torch.")
            yield Check(label, status, part.problem, fix)
            continue
        speed = f"; {part.tokens_per_second:,.0f} tokens a second" if part.tokens_per_second else ""
        text = "works" if name == "generate" else f"differs by at most {part.worst:.1g}"
        yield Check(label, "ok", text + speed)
    if verdict.starved:
        fix = "Close what else uses the GPU, and run this again."
        yield Check("memory", "warn", "the GPU's memory was full: nothing is kept", fix)
    both = (("paged", "fallback"), ("packed", "padded"))
    if any(verdict.problem(one) and verdict.problem(other) for one, other in both):
        fix = "--set model.device=cpu, or another driver."
        yield Check("verdict", "fail", "this device cannot be used", fix)
