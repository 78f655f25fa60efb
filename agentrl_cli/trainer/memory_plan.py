"""Predicted memory of a run, from shapes, before anything is loaded, and a rough duration.

The model is built on the meta device from its configuration, so nothing is allocated. Two phases are planned,
which overlap only with `rollout.async_staleness`: the rollout (weights, keys and values of every live episode) and the
update (weights, gradients, optimizer, activations of one micro-batch, one chunk of logits). A run that cannot fit is
refused, with what to change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config
from agentrl_cli.config.records import MemorySettings, Settings
from agentrl_cli.learning.advantages import needs
from agentrl_cli.trainer.model_shape import model_shape, resolve_adapter

GiB = 1024**3
STATE = {"adamw": (8, 8), "adamw8bit": (2, 2), "adamw_offload": (12, 0), "muon": (8, 8)}
"""Bytes of optimizer state per trained weight: (on CPU, on GPU). Muon's hidden matrices have 4."""
MOVES = frozenset({"adamw", "muon"})
"""Optimizers whose state can be moved to the CPU's memory."""
BYTES = {"4bit": 0.516, "8bit": 1.01}
"""Bytes per quantised weight: nf4 with a byte per 64 and a float per 256 of those, int8 with a float per row."""
OVERHEAD = {"cpu": 0.45, "cuda": 0.5}
"""GiB: the interpreter with torch, or the CUDA context."""
SMALL = 50_000_000
"""Parameters below which activations are kept without a memory plan."""
EFFICIENCY = 0.6
"""Share of a matrix product's rate that a step reaches, by the runs of benchmarks/learning.py; a rough figure."""
SPARE = 0.5
"""Share of free memory that a row of a group with a long prompt may take beyond the token budget."""
TYPICAL = 0.25
"""Share of `max_tokens` that an average episode computes at most; for the time estimate only."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by name for each phase, and the available memory."""

    rollout: Mapping[str, float]
    update: Mapping[str, float]
    available: float
    device: str
    parameters: int
    trainable: int
    seconds_per_step: float
    checkpointing: bool = False
    """Whether activations are recomputed in the backward pass (`train.checkpointing`)."""
    kept_tokens: int = 0
    """Tokens of a group that fit into one row of the update: `train.token_budget`, and more if memory is free."""
    row_tokens: int = 0
    """The same if activations of a row longer than `kept_tokens` are recomputed."""
    aside: bool = False
    """Whether the optimizer's state is in the CPU's memory while a GPU samples episodes."""

    @property
    def allocated(self) -> dict[str, float]:
        """Bytes of each phase in torch's allocator (torch.cuda.max_memory_allocated).

        A GPU also holds the driver's context and libraries: it needs `peak`.
        """
        return {
            name: sum(p.values()) - p["runtime"]
            for name, p in (("rollout", self.rollout), ("update", self.update))
        }

    @property
    def peak(self) -> float:
        """Bytes of the larger phase."""
        return max(sum(self.rollout.values()), sum(self.update.values()))

    @property
    def fits(self) -> bool:
        return self.peak <= self.available

    def advice(self) -> list[str]:
        """What to change so that the run fits, for the largest part first."""
        if self.fits:
            return []
        tips = {
            "keys and values": "lower rollout.concurrency or rollout.max_tokens, or set rollout.memory (what does not"
            " fit then waits, or is computed again)",
            "value head": "lower train.token_budget",
            "activations": "lower train.token_budget",
            "optimizer": "train an adapter: --lora, or train.optimizer=adamw_offload",
            "gradients": "train an adapter: --lora",
            "weights": "use a smaller model, or model.dtype=bfloat16",
            "captured steps": "rollout.cuda_graphs=off",
            "sampler": "rollout.async_staleness=0, or train an adapter: --lora",
            "reference": "train an adapter (--lora), whose base is the reference, or set algo.kl.coef=0",
        }
        phase = (
            self.rollout if sum(self.rollout.values()) > sum(self.update.values()) else self.update
        )
        ranked = sorted(phase, key=lambda name: -phase[name])
        return list(dict.fromkeys(tips[name] for name in ranked if name in tips))


def update_memory(config: MemorySettings, folder: Path, model: Any) -> dict[str, Any]:
    """Return how an update of this loaded model uses memory, as arguments of `Compute`.

    `checkpoint`: activations are recomputed, as configured or if they would not fit; `aside`: the optimizer's state
    leaves the GPU while episodes are sampled; `row_tokens`: see packing.Rows.
    """
    from agentrl_cli.learning.forward import way_of
    from agentrl_cli.models.adapter import transformer

    def row_tokens() -> tuple[int, int]:
        found = plan(config, folder, held)
        # Recomputing a padded model's row would compute its prompt for each episode.
        packs = way_of(transformer(model)) == "packed"
        return found.kept_tokens, found.row_tokens if packs else found.kept_tokens

    sizes = [(p.numel(), p.element_size()) for p in model.parameters()]
    held, choice = float(sum(n * each for n, each in sizes)), config.train.checkpointing
    planned = choice == "auto" and sum(n for n, _ in sizes) >= SMALL
    on_gpu = next(iter(model.parameters())).device.type == "cuda"
    return {
        "checkpoint": plan(config, folder, held).checkpointing if planned else choice == "on",
        "aside": on_gpu and plan(config, folder).aside,
        "row_tokens": row_tokens,
    }


def plan(
    settings: Settings | Config, folder: Path, held: float = 0.0, *, gpu_bytes: float | None = None
) -> Plan:
    """Plan a run of the model in `folder`; `held`: bytes of it that are loaded.

    `gpu_bytes`: bytes of an absent GPU to plan for, without the duration of a step. Raises ModelError if the model's
    configuration cannot be read.
    """
    import torch

    from agentrl_cli.models.device import free_memory, pick_device, pick_dtype

    config = MemorySettings.of(settings)
    device = pick_device(config.model.device) if gpu_bytes is None else torch.device("cuda")
    # Full weights are trained in float32; an absent GPU is taken to have bfloat16.
    full = config.model.dtype == "auto" and not config.adapter.enabled
    given, (folder, config) = folder, resolve_adapter(folder, config)
    absent = gpu_bytes is not None and config.model.dtype == "auto"
    size = 4 if full else 2 if absent else pick_dtype(config.model.dtype, device).itemsize
    count = (shape := model_shape(folder, config.model))["parameters"]
    trained = config.adapter.r * shape["linear_in_out"] if config.adapter.enabled else count
    on_gpu = device.type != "cpu"
    both = {
        "weights": _weights(config, shape, size) + 4.0 * trained * config.adapter.enabled,
        "optimizer": _state(config, shape, trained, on_gpu),
        "runtime": OVERHEAD[device.type if device.type in OVERHEAD else "cuda"] * GiB,
    }
    available = (free_memory(device) if gpu_bytes is None else gpu_bytes) + held
    fresh = config.adapter.enabled and config.adapter.path is None and folder == given
    # A fresh adapter is switched off for the reference. One that moves is the trained weights again, in float32.
    if config.algo.kl.ref_ema or (config.algo.kl.coef and not fresh):
        both["reference"] = trained * 4.0 if config.algo.kl.ref_ema else float(count * size)
    rollout, both_ways = _phases(config, shape, size, trained, both, available, on_gpu)
    choice = config.train.checkpointing
    again = choice == "on" or (choice == "auto" and sum(both_ways[0].values()) > available)
    update = both_ways[again]
    rollout = update if config.rollout.async_staleness else rollout
    aside = on_gpu and config.train.optimizer.name in MOVES and not config.rollout.async_staleness
    # Where the update is the peak, moving the state would not lower it.
    aside = aside and sum(rollout.values()) > sum(update.values())
    if aside:
        del rollout["optimizer"]
    kept, longest = (
        _row_tokens(config, shape, size, available - sum(both_ways[way].values()), again=way)
        for way in (again, again or choice == "auto")
    )
    seconds = 0.0 if gpu_bytes is not None else _step_seconds(config, count, device)
    seconds *= 4 / 3 if again else 1
    sizes = (rollout, update, available, str(device), count, trained)
    return Plan(*sizes, seconds, again, kept, max(kept, longest), aside)


def _row_tokens(
    config: MemorySettings, shape: Mapping[str, int], size: int, free: float, *, again: bool
) -> int:
    """Return how many tokens a row of a group may have."""
    each = _token_bytes(config, shape, size, again=again)
    return config.train.token_budget + int(max(0.0, SPARE * free) / each)


def _phases(
    config: MemorySettings,
    shape: Mapping[str, int],
    size: int,
    trained: int,
    both: Mapping[str, float],
    available: float,
    on_gpu: bool,
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the rollout's memory, and the update's without and with recomputed activations."""
    from agentrl_cli.inference.memory import cuda_graphs_enabled, graph_bytes

    copies = _copies(config, shape, size, available - sum(both.values()), on_gpu=on_gpu)
    rollout = {**both} | _sampling(config, shape, size, copies)
    stays: dict[str, float] = {}
    if on_gpu and cuda_graphs_enabled(config):  # captured steps are held in both phases
        rows = min(config.rollout.concurrency, 256)
        steps = float(graph_bytes(rows, shape["vocabulary"], size))
        stays = {"keys and values": rollout["keys and values"], "captured steps": steps}
    rollout |= stays
    updates = [
        {**stays, **both} | _updating(config, shape, size, trained, again=again, on_gpu=on_gpu)
        for again in (False, True)
    ]
    if config.rollout.async_staleness:  # both phases at once; the sampler has weights of its own
        more = {"sampler": float(trained * (4 if config.adapter.enabled else size))}
        updates = [rollout | more | update for update in updates]
    return rollout, updates


def _state(config: MemorySettings, shape: Mapping[str, int], trained: int, on_gpu: bool) -> float:
    """Bytes of the optimizer's state."""
    muon = config.train.optimizer.name == "muon"
    matrices = 0 if not muon else trained if config.adapter.enabled else shape["linear_weights"]
    return float(trained * STATE[config.train.optimizer.name][on_gpu] - 4 * matrices)


def _copies(
    config: MemorySettings, shape: Mapping[str, int], size: int, free: float, *, on_gpu: bool
) -> float:
    """Return the bytes of the linear layers' copies that sampling multiplies with (inference/sampling_weights.py)."""
    from agentrl_cli.inference.memory import copies_fit

    merges = size == 4 and not config.adapter.use_dora and config.model.quantization == "none"
    if (config.adapter.enabled and not merges) or (
        config.deterministic and not config.adapter.enabled
    ):
        return 0.0
    head = 0 if config.deterministic else shape["vocabulary"] * shape["hidden"]
    found = float(size * (shape["linear_weights"] + head))
    return found if copies_fit(found, "cuda" if on_gpu else "cpu", free) else 0.0


def _sampling(
    config: MemorySettings, shape: Mapping[str, int], size: int, copies: float
) -> dict[str, float]:
    """Return the rollout's memory besides weights and optimizer state.

    Prefill and sampling do not overlap, so the larger of the two counts. An adapter that is not merged adds its own
    result and the sum to each linear layer, in float32 as its weights are (0.5B's shape in 16 bits: 158.9 MB by this,
    159.5 measured).
    """
    from agentrl_cli.inference.memory import kv_positions, live_rows, parse_memory
    from agentrl_cli.inference.sampler import draw_rows

    rows = live_rows(config)
    cache = kv_positions(config) * shape["layers"] * 2 * shape["kv_width"] * size
    drawn = (
        20 * min(rows, draw_rows(shape["vocabulary"])) + size * rows
    )  # five float32 of a part, and the step's own
    wide = 2 * size + 2 * 4 if config.adapter.enabled and not copies else 3 * size
    groups = shape["q_width"] // shape["kv_width"]
    masked = (
        (groups + 2) * config.rollout.max_tokens * size
    )  # mask of a later turn's tokens, per query head
    passing = {
        "logits": float(drawn * shape["vocabulary"]),
        "prefill": float(
            shape[f"prefill{size}"] * (wide * shape["inner"] + 6 * shape["hidden"] * size + masked)
        ),
    }
    larger = max(passing, key=lambda name: passing[name])
    kept = min(cache, parse_memory(config.rollout.memory) or cache)
    # The KV cache grows layer by layer, keys after values: that much exists twice meanwhile.
    found = {"keys and values": kept * (1 + 1 / (2 * shape["layers"]))}
    found[larger] = passing[larger]
    if copies:
        found["copied weights"] = copies
    return found | ({"value head": _head(shape) * 12.0} if needs(config.algo) == "values" else {})


def _updating(
    config: MemorySettings,
    shape: Mapping[str, int],
    size: int,
    trained: int,
    *,
    again: bool,
    on_gpu: bool,
) -> dict[str, float]:
    """Return the update's memory besides weights and optimizer.

    `again`: each layer's input is kept, and one layer at a time recomputed.
    """
    hidden = shape["hidden"]
    tokens = config.train.token_budget
    embedding = shape["vocabulary"] * hidden * 4.0
    backward = {
        "activations": float(tokens * _token_bytes(config, shape, size, again=again)),
        "logits": min(256, max(16, 2**24 // shape["vocabulary"]))
        * shape["vocabulary"]
        * 12.0,  # forward_head's chunk
    }
    if (
        not config.adapter.enabled
    ):  # the head's gradient waits for the embedding's, beside those that add up
        backward["head's gradient"] = embedding
    # AdamW takes the root of the second moments and divides it: weight by weight on a CPU, of all at once on a GPU
    largest = 4.0 * trained if on_gpu else 2 * (0 if config.adapter.enabled else embedding)
    stepping = {"optimizer's step": largest}
    found = {"gradients": trained * 4.0} | max(
        backward, stepping, key=lambda parts: sum(parts.values())
    )
    if needs(config.algo) == "values":
        found["value head"] = _head(shape) * 16.0 + tokens * hidden * 12.0
    return found


def _token_bytes(
    config: MemorySettings, shape: Mapping[str, int], size: int, *, again: bool
) -> int:
    """Bytes of activations of a token in the update."""
    hidden, query, pairs, lora = (
        shape["hidden"],
        shape["q_width"],
        shape["kv_width"],
        config.adapter,
    )
    plain = lora.enabled and not lora.dropout and not lora.use_dora
    if plain and config.model.quantization == "none" and shape["fused"]:
        # The fused forward's two functions and attention save these.
        heads = 5 * query + shape["head_norms"] * (query + pairs)
        kept = (2 * hidden + heads + 2 * shape["inner"]) * size
    else:
        # Counted by operation and checked by measurement: about 9 numbers a hidden unit (norms, residuals), 7 a unit of
        # the query heads (queries, their norm and rotation, attention's result), 2 of the key-value heads', 4 of the
        # feed-forward part's; norms and rotations in float32.
        kept = (9 * hidden + 4 * query) * 4 + (3 * query + 2 * pairs + 4 * shape["inner"]) * size
    layers = shape["layers"] * hidden * size + kept if again else shape["layers"] * kept
    passing = 4 * (shape["inner"] + hidden) * size  # of a token, in one layer's backward pass
    ends = 4 * hidden * size  # the embedding, the last states, their gradient and the head's
    return int(layers + passing + ends)


def _head(shape: Mapping[str, int]) -> int:
    """Weights of PPO's value head (learning/value.py); float32, with its own AdamW."""
    return shape["hidden"] ** 2 + 2 * shape["hidden"] + 1


def _weights(config: MemorySettings, shape: Mapping[str, int], size: int) -> float:
    """Bytes of the base model; quantised, its linear layers without the head in 4 or 8 bits with their constants."""
    bits = config.model.quantization
    if bits == "none":
        return float(shape["parameters"] * size)
    rest = (shape["parameters"] - shape["linear_weights"]) * size
    return float(rest + shape["linear_weights"] * BYTES[bits])


def typical_tokens(config: MemorySettings) -> float:
    """Return the tokens that an average episode computes: as many from tools and prompt as its turns may sample."""
    limits = config.rollout
    return min(limits.max_tokens * TYPICAL, 2.0 * limits.max_turns * limits.max_new_tokens)


def _step_seconds(config: MemorySettings, parameters: int, device: Any) -> float:
    """Return a step's seconds: its arithmetic over a rate measured now, at the efficiency seen in practice."""
    import torch

    side = 4096 if device.type == "cuda" else 512
    a = torch.randn(side, side, device=device)
    best = float("inf")
    for _ in range(8):  # the first ones start threads and find kernels
        started = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - started)
    rate = 2 * side**3 / max(best, 1e-6)
    episodes = config.rollout.group_size * config.rollout.prompts_per_step
    # a forward to sample, three forwards' worth to train
    work = episodes * typical_tokens(config) * parameters * (2 + 6)
    return work / (rate * EFFICIENCY)
