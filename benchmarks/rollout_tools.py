"""Three-turn tool episodes, 64 at once in groups of 8: AgentRL's rollout against TRL's generation phase.

    python benchmarks/rollout_tools.py --trl /venv/with/trl/bin/python [--model 3M|60M] [--rounds N] [--out FILE]

Models have random weights, so their replies are scripted on both sides, token by token: two turns of text with a call
of `add`, one that answers. On both sides one logit per sequence is raised in place, and the token is sampled from the
softmax like any other. The forwards, the cache, sampling, tools, templates and parsing are real. AgentRL does the work
of a training step: it publishes the weights to the engine, then runs `Rollout` with log-probabilities, drift check and
every write to the store. TRL runs `GRPOTrainer._generate` in its own environment (rollout_trl.py). One thread each,
alternating rounds; one-time work of a training (trainer, policy, store) is not counted on either side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import Tokenizer
from agentrl_cli.config import Config
from agentrl_cli.inference.engine import PagedEngine
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.paths import bundled_model
from agentrl_cli.rewards import Reward
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Generation, Sampling
from benchmarks.machine import machine_and_load
from benchmarks.rollout import GROUP, SHAPES, make_model

SYSTEM = "You are a helpful agent. Use the tools that you are given to work out what is asked, one step at a time."
WORDS = (
    "one two three four add the sum of value then call tool number list text answer is and".split()
)
CALL = '\n<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
MOST = 700
LIKELY = 50.0
"""The logit of scripted tokens, on both sides: certain to 1e-18. A far larger one would make `exp` handle underflows,
as for no real model."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def script(tokenizer: Tokenizer, episodes: int, seed: int = 0) -> list[list[list[int]]]:
    """Token ids of three turns of every episode: 8 to 40 words, a call in the first two, the stop token."""
    rng = np.random.default_rng(seed)

    def turn(number: int) -> list[int]:
        text = " ".join(rng.choice(WORDS, rng.integers(8, 40)))
        call = CALL % tuple(rng.integers(10, 99, 2)) if number < 2 else ""
        return [*tokenizer.encode(text + call), tokenizer.eos_ids[0]]

    return [[turn(number) for number in range(3)] for _ in range(episodes)]


class Scripted(LocalPolicy):
    """The local policy with a script: only raises the logit of the scripted token far above the others.

    Everything after the forward (softmax, sampling, log-probabilities, entropy, alternatives, stops) is the sampler's.
    `slot` names the episode.
    """

    def __init__(self, model: Any, turns: list[list[list[int]]], **options: Any) -> None:
        super().__init__(model, **options)
        self.turns = turns
        self.said: dict[str, int] = {}
        """Number of turns of each episode so far."""
        assert isinstance(self._engine, PagedEngine)
        runner = self._engine.runner
        decode = runner.decode
        self._engine.drafts = None  # a script would be drafted as no real text is
        runner.decode = lambda pool, sequences, drafts=(): self.scripted(decode(pool, sequences))  # type: ignore[method-assign]

    async def generate(self, key: str, ids: Any, sampling: Sampling, **options: Any) -> Generation:
        self.said[key] = self.said.get(key, 0) + 1
        return await super().generate(key, ids, sampling, **options)

    def scripted(self, logits: torch.Tensor) -> torch.Tensor:
        """Changes the logits [sequences, vocabulary] in place."""
        rows = self._engine.running
        words = [[self.turns[r.sampling.slot][self.said[r.key] - 1][len(r.out)]] for r in rows]
        return logits.scatter_(1, torch.tensor(words), LIKELY)


def ours(
    model: Any, chat: Chat, prompts: Sequence[str], turns: list[list[list[int]]]
) -> dict[str, float]:
    """Runs one rollout of all episodes into a new store."""
    rows = [{"prompt": text, "answer": "5"} for text in prompts[::GROUP]]
    pack = Pack.of(
        "sums", rows, [Reward("exact", lambda episode, ctx: 0.0)], tools=[add], system=SYSTEM
    )
    tasks = pack.tasks("train")
    limits = {
        "max_tokens": MOST,
        "max_new_tokens": 400,
        "max_turns": 3,
        "concurrency": len(prompts),
    }
    config = Config.model_validate({"rollout": limits | {"timeout": 600}})

    async def go(folder: str) -> dict[str, float]:
        policy = Scripted(model, turns, context_length=4096, rows=len(prompts))
        with Store.open(Path(folder) / "bench.db") as store:
            run = store.runs.add(
                RunRow(id="", name="bench", model="random", pack="sums", total_steps=1)
            )
            rollout = Rollout(policy, chat, {"sums": pack}, config, store=store)
            jobs = [
                Job(
                    tasks[n // GROUP],
                    seed=n,
                    sample=n % GROUP,
                    group_id=f"g{n // GROUP}",
                    run_id=run.id,
                    slot=n,
                )
                for n in range(len(prompts))
            ]
            cpu, wall = time.process_time(), time.perf_counter()
            policy.set_version("1")
            episodes = await rollout.run(jobs)
            store.flush()
            seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
            await policy.close()
        said = [sum(turn.role == "assistant" for turn in one.turns) for one in episodes]
        assert set(said) == {3}, (set(said), episodes[0].error)
        assert [
            one.tokens.ids[turn.start : turn.end].tolist()
            for one in episodes
            for turn in one.turns[2::2]
        ] == [words for episode in turns for words in episode]
        return seconds

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(go(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--trl",
        help="python of an environment with trl==1.16.*; without it only AgentRL is measured",
    )
    parser.add_argument("--model", choices=SHAPES, default="3M")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = bundled_model()
    tokenizer = Tokenizer.load(folder)
    turns = script(tokenizer, arguments.episodes)
    prompts = [
        f"Task {n // GROUP}: add {n // GROUP + 11} and 7, then add 5."
        for n in range(arguments.episodes)
    ]
    model = make_model(arguments.model, eos_token_id=tokenizer.eos_ids[0])
    chat = Chat(tokenizer)
    ours(model, chat, prompts[:GROUP], turns[:GROUP])  # imports and first calls
    result: dict[str, Any] = {
        "model": arguments.model,
        "episodes": arguments.episodes,
        "agentrl": [],
        "trl": [],
    }
    for _ in range(arguments.rounds):
        result["agentrl"].append(ours(model, chat, prompts, turns))
        if arguments.trl:
            result["trl"] += theirs(arguments.trl, arguments.model, str(folder), prompts, turns)
    result["said_tokens"] = sum(len(turn) for episode in turns for turn in episode)
    if result["trl"]:
        best = {name: min(one["cpu"] for one in result[name]) for name in ("agentrl", "trl")}
        result["ratio_of_best_cpu"] = best["trl"] / best["agentrl"]
        pairs = zip(result["agentrl"], result["trl"], strict=True)
        result["ratio_by_round"] = [other["cpu"] / mine["cpu"] for mine, other in pairs]
    text = json.dumps(result | machine_and_load(), indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def theirs(
    python: str, model: str, tokenizer: str, prompts: Sequence[str], turns: list[list[list[int]]]
) -> list[dict[str, float]]:
    """TRL's generation phase over the same script, in a process with its own environment."""
    work: dict[str, Any] = {
        "model": SHAPES[model] | {"tie_word_embeddings": True},
        "tokenizer": tokenizer,
        "prompts": list(prompts),
    }
    work |= {"turns": turns, "system": SYSTEM, "most": MOST, "rounds": 1, "likely": LIKELY}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.json"
        path.write_text(json.dumps(work), encoding="utf-8")
        peer = Path(__file__).with_name("rollout_trl.py")
        done = subprocess.run(
            [python, str(peer), str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
