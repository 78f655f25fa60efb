"""Settings with which a run fits into memory (`agentrl train --fit`), by the memory plan alone: nothing is loaded.

What changes the result of a training least is tried first: activations recomputed, fewer episodes at once and smaller
micro-batches; then an adapter in place of all weights; then a base in 8 and 4 bits under it. Group size, tasks in a
step and lengths stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config, Section
from agentrl_cli.config.records import MemorySettings, Settings
from agentrl_cli.inference.memory import live_rows
from agentrl_cli.trainer.memory_plan import Plan, plan

LEAST_ROWS = 4
"""Fewer episodes at once are not tried."""
BITS = ("8bit", "4bit")


def fit(
    settings: Settings | Config,
    folder: Path,
    *,
    gpu_bytes: float | None = None,
    quantised: bool = False,
) -> tuple[MemorySettings, Plan]:
    """Return the first settings that fit, and their plan; if none do, the smallest, whose plan does not fit.

    `gpu_bytes`: as in `plan`. `quantised`: whether this machine can load a base in 8 or 4 bits.
    """
    for start in _variants(MemorySettings.of(settings), quantised=quantised):
        found = _shrunk(start, folder, gpu_bytes)
        if found[1].fits:
            break
    return found


def changes(before: Settings | Config, after: MemorySettings) -> list[str]:
    """`section.key: old → new` of every setting that differs."""
    found = []
    for name, section in vars(after).items():
        if isinstance(section, Section):
            first = getattr(before, name).model_dump(mode="json")
            found += [
                f"{name}.{key}: {_text(first[key])} → {_text(value)}"
                for key, value in section.model_dump(mode="json").items()
                if first[key] != value
            ]
    return found


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _variants(config: MemorySettings, *, quantised: bool) -> Iterator[MemorySettings]:
    """As configured, then with an adapter, then on a base of fewer bits."""
    yield config
    adapted = config.replace(adapter={"enabled": True})
    if not config.adapter.enabled:
        yield adapted
    if quantised and config.model.quantization == "none":
        yield from (adapted.replace(model={"quantization": bits}) for bits in BITS)


def _shrunk(
    config: MemorySettings, folder: Path, gpu_bytes: float | None
) -> tuple[MemorySettings, Plan]:
    """Halve the part of the larger phase that can be halved until the run fits."""
    if config.train.checkpointing == "off":
        found = plan(config, folder, gpu_bytes=gpu_bytes)
        if found.fits:
            return config, found
        config = config.replace(train={"checkpointing": "auto"})
    while True:
        found = plan(config, folder, gpu_bytes=gpu_bytes)
        rows, tokens, longest = (
            live_rows(config),
            config.train.token_budget,
            config.rollout.max_tokens,
        )
        sampling = sum(found.rollout.values()) > found.available
        updating = sum(found.update.values()) > found.available
        fewer_rows = sampling and rows > LEAST_ROWS and not config.deterministic
        # An episode is one row, so a smaller budget than the longest would save nothing.
        fewer_tokens = updating and tokens > longest
        if not (fewer_rows or fewer_tokens):
            return config, found
        if fewer_rows:
            config = config.replace(rollout={"concurrency": max(LEAST_ROWS, rows // 2)})
        if fewer_tokens:
            config = config.replace(train={"token_budget": max(longest, tokens // 2)})
