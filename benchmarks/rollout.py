"""The rollout engine against transformers' `generate` and TRL's generation phase; cost per turn; memory.

    python benchmarks/rollout.py generate|turns|memory [--model 3M|60M] [--rounds N] [--device cpu|cuda] [--out FILE]
    python benchmarks/rollout.py turns --plot FILE.svg                               (rollout_plot.py)
    python benchmarks/rollout.py tools --trl /path/of/a/venv/with/trl/bin/python     (rollout_tools.py)

`generate`: 64 episodes in groups of 8, prompts of 128 tokens, each stopped after its own number of tokens (uniform in
16..128), sampled at temperature 1 with log-probabilities. Each side has a process and a model of its own (the engine
lays a model's linear layers out for itself), one thread; rounds interleaved. transformers keeps each step's logits
(`output_logits`) and computes log-probabilities from them, as its `generate` does. Only tokens up to an episode's stop
count. `--alone`: every episode has a prompt of its own. `--top-p P`: both sides draw so. The peer's linear layers run
through torch's default and, as a second peer, oneDNN.
`turns`: the cost of a turn after 0 to 15 earlier turns, with attention separately. `memory`: peak bytes of keys and
values against live tokens.
On a GPU (`--device cuda`) models are bf16, the engine is measured with and without CUDA graphs, transformers'
continuous batching as well (on a CPU with `--batching`), and a Qwen2-0.5B-shaped model (`--model 0.5B`) at 64 and 256
episodes is the case of interest; rollout_steps.py measures single steps. On a CPU `--fixed` adds the engine with steps
of fixed shapes, not captured, as a GPU would capture them.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
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
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.models.device import free_memory
from agentrl_cli.types import Sampling
from benchmarks.machine import machine_and_load
from benchmarks.rollout_plot import split_costs, svg
from benchmarks.worker import Worker, serve

GROUP = 8
PROMPT = 128
NEW = 128
SHAPES: dict[str, dict[str, int]] = {
    "3M": {
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
    }
    | {"num_key_value_heads": 2, "vocab_size": 2048},
    "60M": {
        "hidden_size": 640,
        "intermediate_size": 2304,
        "num_hidden_layers": 10,
        "num_attention_heads": 10,
    }
    | {"num_key_value_heads": 2, "vocab_size": 8192},
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    | {"num_key_value_heads": 2, "vocab_size": 151936},
}


def make_model(name: str, device: str = "cpu", **changes: Any) -> Any:
    """A Qwen2-shaped model with random weights, in eval mode; bf16 on a GPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    given: dict[str, Any] = {
        **SHAPES[name],
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        **changes,
    }
    make: Any = Qwen2ForCausalLM
    model: Any = make(Qwen2Config(**given)).eval()
    return model.to(device, torch.bfloat16 if device != "cpu" else torch.float32)


def work(
    vocabulary: int, episodes: int, seed: int = 0, group: int = GROUP
) -> tuple[list[list[int]], list[int]]:
    """Prompts, the same within a group, and the number of tokens of each episode."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(10, vocabulary, PROMPT).tolist() for _ in range(episodes // group)]
    return [prompts[n // group] for n in range(episodes)], rng.integers(
        16, NEW + 1, episodes
    ).tolist()


def measured(action: Callable[[], int], device: str) -> dict[str, float]:
    """CPU and wall seconds of an action, and the number of tokens that it returns."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = action()
    if device != "cpu":
        torch.cuda.synchronize()
    return {"tokens": tokens, "cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


# --- generate --------------------------------------------------------------------------------------------------------


def ours(model: Any, prompts: list[list[int]], wanted: list[int], top_p: float = 1.0) -> int:
    """One rollout by a new local policy, as at the start of a training step."""

    async def go() -> int:
        policy = LocalPolicy(model, context_length=4096, rows=len(prompts))
        every = await asyncio.gather(
            *(
                policy.generate(
                    f"e{n}", ids, Sampling(max_new_tokens=wanted[n], seed=n, top_p=top_p)
                )
                for n, ids in enumerate(prompts)
            )
        )
        await policy.close()
        return sum(len(said.ids) for said in every)

    return asyncio.run(go())


class Captured:
    """Rollouts by one policy whose steps are captured; it and its graphs stay, as in a training."""

    def __init__(self, model: Any, device: str, episodes: int) -> None:
        capture = partial(CudaCapture, model.device) if device != "cpu" else as_they_are
        runner = partial(GraphRunner, make=capture)
        memory = int(0.25 * free_memory(model.device))
        self.policy = LocalPolicy(
            model, context_length=4096, rows=episodes, runner=runner, memory=memory
        )
        self.rounds = 0

    def __call__(self, model: Any, prompts: list[list[int]], wanted: list[int]) -> int:
        async def go() -> int:
            self.rounds += 1
            self.policy.set_version(str(self.rounds))  # prompts are computed again
            every = await asyncio.gather(
                *(
                    self.policy.generate(f"e{n}", ids, Sampling(max_new_tokens=wanted[n], seed=n))
                    for n, ids in enumerate(prompts)
                )
            )
            await self.policy.rest()
            return sum(len(said.ids) for said in every)

        return asyncio.run(go())

    def close(self) -> str:
        """The engine, and why it captures no graphs, if it does not."""
        asyncio.run(self.policy.close())
        return self.policy.describe()


def as_they_are() -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Steps of fixed shapes, not captured."""
    return lambda step: step


def theirs(model: Any, prompts: list[list[int]], wanted: list[int], top_p: float = 1.0) -> int:
    """One `generate`, stopped by a criterion with each sequence's length, with log-probabilities of sampled tokens."""
    from transformers import StoppingCriteriaList

    ends = torch.tensor(wanted, device=model.device) + PROMPT

    def done(ids: torch.Tensor, _scores: Any, **_rest: Any) -> torch.Tensor:
        return ids.shape[1] >= ends

    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=top_p,
            max_new_tokens=NEW,
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([done]),
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = out.sequences[:, PROMPT:]
        torch.stack(
            [
                z.float().log_softmax(-1).gather(1, new[:, t : t + 1])
                for t, z in enumerate(out.logits)
            ]
        )
    return sum(wanted)


class WithOneDnn:
    """The peer with every linear layer as oneDNN's, its weights packed once."""

    def __init__(self, model: Any) -> None:
        from torch.utils.mkldnn import MkldnnLinear

        self.model = copy.deepcopy(model)
        inner = [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear)
        ]
        for name in inner:
            parent, _, last = name.rpartition(".")
            packed = MkldnnLinear(self.model.get_submodule(name), torch.float)
            setattr(self.model.get_submodule(parent), last, packed)

    def __call__(
        self, model: Any, prompts: list[list[int]], wanted: list[int], top_p: float = 1.0
    ) -> int:
        return theirs(self.model, prompts, wanted, top_p)


def their_batching(model: Any, prompts: list[list[int]], wanted: list[int]) -> int:
    """transformers' continuous batching with log-probabilities, each request stopped after its own number of tokens.

    Its manager stays for the next round, with its graphs and memory estimates, like AgentRL's policy.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    make: Any = GenerationConfig
    batching: Any = ContinuousBatchingConfig
    config = make(
        max_new_tokens=NEW, do_sample=True, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    opened = model.continuous_batching_context_manager(
        generation_config=config,
        continuous_batching_config=batching(return_logprobs=True, max_memory_percent=0.25),
        persistent_manager=True,
    )
    tokens = 0
    with opened as manager:
        for ids, count in zip(prompts, wanted, strict=True):
            manager.add_request(ids, max_new_tokens=count)
        left = len(prompts)
        while left:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(
                    "transformers' continuous batching ended before its requests did"
                )
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers' continuous batching: {result.error}")
                tokens, left = tokens + len(result.generated_tokens), left - 1
    return tokens


def bandwidth(device: str, size: int = 2**28) -> float:
    """Bytes per second of a copy of a large tensor, reads and writes together; the best of five."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):  # the first touches the pages
        began = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * size / min(times[1:])


def bandwidth_limit(model: Any, episodes: int, moved: float) -> float:
    """Tokens per second if decoding only read the weights and every sequence's keys and values once per step.

    For `generate`'s work: all sequences live, contexts of mean length. Stops and prompts make the true limit lower.
    """
    weights = sum(w.numel() * w.element_size() for w in model.parameters())  # tied ones once
    step = weights + episodes * (PROMPT + NEW / 2) * position_bytes(model)
    return float(episodes * moved / step)


def position_bytes(model: Any) -> int:
    """Bytes of the keys and values of one position in all layers."""
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    return int(
        2 * config.num_hidden_layers * config.num_key_value_heads * dim * model.dtype.itemsize
    )


def sides(arguments: argparse.Namespace) -> list[str]:
    """The names of what is compared; `agentrl` first."""
    cpu = arguments.device == "cpu"
    names = [
        "agentrl",
        "transformers generate",
        *(["transformers generate, oneDNN"] if cpu else []),
    ]
    names += (
        ["agentrl, CUDA graphs"]
        if not cpu
        else ["agentrl, fixed shapes"]
        if arguments.fixed
        else []
    )
    return names + (["transformers continuous batching"] if not cpu or arguments.batching else [])


def serve_side(arguments: argparse.Namespace) -> None:
    """Measure one side in this process, once for each line that is read; no other side shares its model."""
    model = make_model(arguments.model, arguments.device)
    prompts, wanted = work(
        model.config.vocab_size, arguments.episodes, group=1 if arguments.alone else GROUP
    )
    name, recorded, run = arguments.side, None, their_batching
    if name == "agentrl":
        run = partial(ours, top_p=arguments.top_p)
    elif name.startswith("agentrl, "):
        run = recorded = Captured(model, arguments.device, len(prompts))
    elif name.startswith("transformers generate"):
        run = partial(WithOneDnn(model) if "oneDNN" in name else theirs, top_p=arguments.top_p)
    run(model, prompts[:GROUP], wanted[:GROUP])
    serve(
        lambda: measured(partial(run, model, prompts, wanted), arguments.device),
        lambda: {} if recorded is None else {"engine": recorded.close()},
    )


def bench_generate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Interleaved rounds, the best of each by CPU seconds (wall on a GPU), and the ratio."""
    model = make_model(arguments.model, arguments.device)
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--side"]
    workers = {name: Worker([*command, name]) for name in sides(arguments)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for _ in range(arguments.rounds):
        for name, worker in workers.items():
            rounds[name].append(worker.measure())
    line = {key: value for worker in workers.values() for key, value in worker.close().items()}
    clock = "cpu" if arguments.device == "cpu" else "wall"
    rate = {
        name: max(one["tokens"] / one[clock] for one in every) for name, every in rounds.items()
    }
    peer = max(
        (name for name in rate if name.startswith("transformers generate")),
        key=lambda name: rate[name],
    )
    ratios = [
        (mine["tokens"] / mine[clock]) / (other["tokens"] / other[clock])
        for mine, other in zip(rounds["agentrl"], rounds[peer], strict=True)
    ]
    wall = {
        name: max(one["tokens"] / one["wall"] for one in every) for name, every in rounds.items()
    }
    moved = bandwidth(arguments.device)
    limit = bandwidth_limit(model, arguments.episodes, moved)
    case = {
        "model": arguments.model,
        "episodes": arguments.episodes,
        "group": 1 if arguments.alone else GROUP,
    }
    return {**case, **line, "top_p": arguments.top_p, "clock": clock, "tokens_per_second": rate} | {
        "gigabytes_per_second": moved / 1e9,
        "share_of_bandwidth_limit": {name: found / limit for name, found in wall.items()},
        "fastest": max(rate, key=lambda name: rate[name]),
        "peer": peer,
        "ratio_of_best": rate["agentrl"] / rate[peer],
        "ratio_by_round": ratios,
        "rounds": rounds,
    }


# --- turns and memory -----------------------------------------------------------------------------------------------


def bench_turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """16 episodes of 16 turns, 32 tokens sampled and 32 read in each: CPU milliseconds of each turn, all episodes."""
    model = make_model(arguments.model, arguments.device)
    rng = np.random.default_rng(0)

    async def go() -> list[float]:
        policy = LocalPolicy(model, context_length=4096, rows=16)
        episodes = [rng.integers(10, model.config.vocab_size, PROMPT).tolist() for _ in range(16)]
        times = []
        for turn in range(16):
            began = time.process_time()
            sampling = [Sampling(max_new_tokens=32, seed=100 * turn + n) for n in range(16)]
            every = await asyncio.gather(
                *(policy.generate(f"e{n}", ids, sampling[n]) for n, ids in enumerate(episodes))
            )
            times.append(1000 * (time.process_time() - began))
            for ids, said in zip(episodes, every, strict=True):
                ids += said.ids.tolist() + rng.integers(10, model.config.vocab_size, 32).tolist()
        await policy.close()
        return times

    every = [asyncio.run(go()) for _ in range(arguments.rounds)]
    times = np.min(every, axis=0).round(1).tolist()
    fit = split_costs(
        times, [PROMPT + 64 * turn + 16 for turn in range(16)]
    )  # in the middle of a turn
    if arguments.plot is not None:
        title = f"CPU milliseconds of turn 1 to 16: {arguments.model}, 16 episodes at once"
        arguments.plot.write_text(svg(times, fit, title), encoding="utf-8")
    return {"model": arguments.model, "cpu_ms_by_turn": times, **fit}


def bench_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak positions with memory, against live tokens and against sequences times the longest."""
    model = make_model(arguments.model, arguments.device)
    rng = np.random.default_rng(0)
    cases = {
        "32 of 100 tokens": [100] * 32,
        "31 of 100 tokens, one of 1,500": [100] * 31 + [1500],
        "32 of 50 to 800 tokens": rng.integers(50, 800, 32).tolist(),
    }

    async def go(lengths: list[int]) -> float:
        policy = LocalPolicy(model, context_length=4096, rows=32)
        prompts = [rng.integers(10, model.config.vocab_size, n).tolist() for n in lengths]
        every = (
            policy.generate(f"e{n}", ids, Sampling(max_new_tokens=4, seed=n))
            for n, ids in enumerate(prompts)
        )
        await asyncio.gather(*every)
        await policy.close()
        return 32 * policy.metrics["rollout/kv_blocks_peak"]

    found = {
        name: {"alive": sum(n + 4 for n in lengths), "peak": asyncio.run(go(lengths))}
        | {"rows_times_longest": len(lengths) * (max(lengths) + 4)}
        for name, lengths in cases.items()
    }
    return {"model": arguments.model, "positions": found}


BENCHES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "generate": bench_generate,
    "turns": bench_turns,
}
BENCHES["memory"] = bench_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--model", choices=SHAPES, default="3M")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--alone", action="store_true", help="generate: every episode has a prompt of its own"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="generate: of both sides")
    parser.add_argument(
        "--fixed", action="store_true", help="measure steps of fixed shapes on a CPU, too"
    )
    parser.add_argument(
        "--batching", action="store_true", help="measure their continuous batching on a CPU, too"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--plot", type=Path, help="turns: an SVG file of each turn's cost")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.side:
        serve_side(arguments)
        return
    result = BENCHES[arguments.what](arguments)
    text = json.dumps(
        result | {"torch": torch.__version__, "device": arguments.device, **machine_and_load()},
        indent=1,
    )
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
