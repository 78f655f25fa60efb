"""One decode step, by the number of rows: as the engine runs it, in fixed shapes, and recorded as a CUDA graph.

    python benchmarks/rollout_steps.py [--device cuda] [--model 0.5B] [--rows 64 256] [--positions 192] [--out FILE]

All rows live, each with so many positions of its own. A step reads the weights once and every row's keys and values
once at least: those bytes, by the time it takes, are the share of the memory's bandwidth that it reaches. The bandwidth
is the card's own figure, where the card is known, and that of a copy in the same process. Pages are gathered before
attention reads them, which moves keys and values three times: `gathered` counts them so. On a CPU nothing can be
recorded, and the two ways that are left show that the benchmark runs.
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

import torch

from agentrl_cli.policies.local_attention import Rows, one_part
from agentrl_cli.policies.local_cache import Shelf, blocks, rounded, shelf_length
from agentrl_cli.policies.local_engine import Shared
from agentrl_cli.policies.local_graphs import CudaCapture, Seat, Steps
from agentrl_cli.policies.local_pages import PagedShelf, Pool

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.rollout import SHAPES, bandwidth, make_model, position_bytes

CARDS = {
    "H200": 4800, "H100 80GB HBM3": 3350, "H100 NVL": 3900, "H100 PCIe": 2000, "GH200": 4000, "B200": 8000,
    "A100-SXM4-80GB": 2039, "A100 80GB PCIe": 1935, "A100-SXM4-40GB": 1555, "A100-PCIE-40GB": 1555,
    "L40S": 864, "L40": 864, "L4": 300, "A10G": 600, "A10": 600, "T4": 320, "V100-SXM2": 900,
    "RTX 5090": 1792, "RTX 4090": 1008, "RTX 4080": 717, "RTX 3090": 936, "RTX 3080": 760, "RTX 3060": 360,
}  # fmt: skip
"""Gigabytes a second, by the makers' data sheets; the longest name that is part of the card's."""


def card_bandwidth(name: str) -> float | None:
    """Bytes a second of a card by its name; None where it is not known."""
    known = [card for card in CARDS if f" {card} " in f" {name.replace('GeForce ', '')} " or f" {card}-" in f" {name}-"]
    return 1e9 * CARDS[max(known, key=len)] if known else None


def fixed(model: Any, rows: int, positions: int, record: bool) -> tuple[Callable[[], Any], Steps]:
    """A step over pages, and what runs it."""
    device, layers = model.device, model.config.num_hidden_layers
    length = rounded(positions + 1)
    pool = Pool(layers, rows * blocks(length))
    shelves = [PagedShelf(pool, length, layers) for _ in range(rows)]
    for shelf in shelves:
        shelf.resize(1)
    make = partial(CudaCapture, device) if record else None
    most = blocks(shelf_length(length))
    steps = Steps(Shared(model), model, pool, rows=rows, pages=most, gathered=rows * most, device=device, make=make)
    seats = [Seat(7 + n, positions, shelf, None) for n, shelf in enumerate(shelves)]
    return lambda: steps(seats), steps


def ordinary(model: Any, rows: int, positions: int) -> Callable[[], Any]:
    """The step of the engine `shared` without fixed shapes."""
    engine, shelf = Shared(model), Shelf(rounded(positions + 1), model.config.num_hidden_layers)
    shelf.resize(rows)
    ids = torch.arange(7, 7 + rows, device=model.device)[:, None]

    def step() -> Any:
        view = Rows(one_part(shelf, 0, rows, positions + 1), [positions] * rows, 1, model.device)
        return engine(ids, view, head=True)

    return step


@torch.inference_mode()
def seconds(step: Callable[[], Any], device: str, repeat: int) -> float:
    """Of one step, by the best of five runs of many, after those that warm up, record and compare."""

    def run() -> float:
        began = time.perf_counter()
        for _ in range(repeat):
            step()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeat

    for _ in range(5):
        step()
    return min(run() for _ in range(5))


def measure(model: Any, rows: int, positions: int, device: str, repeat: int) -> dict[str, Any]:
    """Milliseconds and share of the bandwidth of each way, for one number of rows."""
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    kept = rows * (positions + 1) * position_bytes(model)
    width = blocks(shelf_length(rounded(positions + 1))) * 32
    gathered = 3 * rows * width * position_bytes(model)
    card = card_bandwidth(torch.cuda.get_device_name()) if device != "cpu" else None
    copy = bandwidth(device, 2**30 if device != "cpu" else 2**26)
    played, recorded = fixed(model, rows, positions, record=device != "cpu")
    ways = {"shared": ordinary(model, rows, positions), "fixed shapes": fixed(model, rows, positions, record=False)[0]}
    if device != "cpu":
        ways["recorded"] = played
    found: dict[str, Any] = {}
    for name, step in ways.items():
        took = seconds(step, device, repeat)
        moved = weights + (kept if name == "shared" else gathered)
        found[name] = {
            "ms": 1000 * took,
            "tokens_per_second": rows / took,
            "share_of_copy": (weights + kept) / took / copy,
            "share_of_copy_gathered": moved / took / copy,
            "share_of_card": None if card is None else (weights + kept) / took / card,
        }
    if device != "cpu":
        found["recorded"]["plays"], found["recorded"]["why_not"] = recorded.plays, recorded.why
    return {"rows": rows, "weights": weights, "keys_and_values": kept, "copy": copy, "card": card, "ways": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--positions", type=int, default=192)
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(arguments.model, arguments.device)
    every = [measure(model, n, arguments.positions, arguments.device, arguments.repeat) for n in arguments.rows]
    name = torch.cuda.get_device_name() if arguments.device != "cpu" else "cpu"
    result = {"model": arguments.model, "positions": arguments.positions, "device": name, "torch": torch.__version__}
    text = json.dumps(result | {"steps": every}, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
