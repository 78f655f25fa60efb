"""One decode step of the paged engine on a GPU: eager, and as a CUDA graph; the share of the GPU's bandwidth.

    python benchmarks/rollout_steps.py [--device cuda] [--model 0.5B] [--rows 64 256] [--positions 192] [--out FILE]

Every sequence has its own `positions` positions. Times are wall, the median of the last steps, synchronized.
On a CPU there are no graphs; this only checks the script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an installation

from agentrl_cli.inference.cuda_graphs import CudaCapture, GraphRunner
from agentrl_cli.inference.kv_cache import BlockPool, KVCache, blocks
from agentrl_cli.inference.model_runner import ModelRunner
from agentrl_cli.inference.request import TokenSequence
from benchmarks.rollout import SHAPES, bandwidth, make_model, position_bytes


def milliseconds(runner: ModelRunner, rows: int, positions: int, steps: int) -> float:
    """Median wall time of a decode step of this many sequences."""
    cache = KVCache(BlockPool(runner.layers, rows * blocks(positions + 1), scratch=runner.records))
    sequences = [
        TokenSequence(key=str(n), ids=np.full(positions + 1, 7, np.int32)) for n in range(rows)
    ]
    times = []
    with torch.inference_mode():
        for sequence in sequences:
            cache.begin(sequence)
        runner.prefill(cache.pool, [sequences[0].ids[:1]], [0], [sequences[0].block_table])
        for _ in range(steps):
            began = time.perf_counter()
            runner.decode(cache.pool, sequences)
            if runner.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - began))
    return float(np.median(times[steps // 2 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--positions", type=int, default=192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    model = make_model(arguments.model, arguments.device)
    runners: dict[str, Callable[[Any], ModelRunner]] = {"eager": ModelRunner}
    if arguments.device != "cpu":
        runners["CUDA graph"] = partial(GraphRunner, make=partial(CudaCapture, model.device))
    moved = bandwidth(arguments.device)
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    result: dict[str, Any] = {
        "model": arguments.model,
        "gigabytes_per_second": moved / 1e9,
        "rows": {},
    }
    for rows in arguments.rows:
        least = 1000 * (weights + rows * arguments.positions * position_bytes(model)) / moved
        found = {
            name: milliseconds(make(model), rows, arguments.positions, arguments.steps)
            for name, make in runners.items()
        }
        result["rows"][rows] = {"milliseconds": found} | {
            "share_of_bandwidth_limit": {name: least / one for name, one in found.items()}
        }
    text = json.dumps(result | {"torch": torch.__version__, "device": arguments.device}, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
