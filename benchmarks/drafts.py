"""Drafts looked up in earlier text, on and off: CPU seconds of the sampling thread over real episodes of a pack.

    agentrl init code-task /tmp/code && python benchmarks/drafts.py /tmp/code [--rounds 6]
    python benchmarks/drafts.py random [--rounds 6]                  (a random model: nothing repeats)

One policy; each round makes the same 64 episodes (8 tasks, groups of 8, other tasks in each round) with drafts and
without, in turns. The tokens must be the same. Drafts know the rounds before, as in a training; its first round, in
which they know nothing, is printed and not counted. One thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an installation

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.config import load_config
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.rollout import Job
from agentrl_cli.runtime import open_runtime
from agentrl_cli.types import Sampling
from benchmarks.machine import machine_and_load
from benchmarks.rollout import make_model, work

Ids = list[list[int]]


class Timed:
    """The CPU seconds of a policy's sampling thread."""

    def __init__(self, policy: Any) -> None:
        self.seconds, self._steps = 0.0, policy._loop._steps
        policy._loop._steps = self

    def __call__(self, fresh: list[Any]) -> list[Any]:
        began = time.thread_time()
        rows: list[Any] = self._steps(fresh)
        self.seconds += time.thread_time() - began
        return rows


async def compare(policy: Any, rounds: int, episodes: Any) -> dict[str, Any]:
    """Rounds of `episodes`, which returns the tokens of those of a round."""
    timed, known = Timed(policy), policy._engine.drafts
    found: list[float] = []
    for number in range(rounds + 1):
        seconds, said = {}, {}
        for on in (True, False) if number % 2 else (False, True):
            policy._engine.drafts = known if on else None
            policy.set_version(f"{number} {on}")
            timed.seconds = 0.0
            said[on] = await episodes(number)
            seconds[on] = timed.seconds
        assert said[True] == said[False], "drafts changed a token"
        found.append(seconds[False] / seconds[True])
        print(f"round {number}: {found[-1]:.3f}, {seconds[True]:.2f} s", file=sys.stderr)
    spread = {"median": median(found[1:]), "least": min(found[1:]), "most": max(found[1:])}
    return {"accepted": known.accepted, "fed": known.fed, "off / on": spread, "rounds": found}


async def of_pack(project: Path, rounds: int) -> dict[str, Any]:
    """Episodes of a project with its own model."""
    config, _ = load_config([project / "agentrl.yaml"])
    with tempfile.TemporaryDirectory() as folder:
        opened = open_runtime(config, base=project, db=Path(folder, "agentrl.db"), spec=None)
        async with opened as runtime:
            pack = next(iter(runtime.packs.values()))
            tasks = pack.tasks(config.task.split_train)
            rollout = AgentRollout(
                runtime.loaded.policy, runtime.loaded.chat, runtime.packs, config,
                sandbox=runtime.sandbox,
            )  # fmt: skip

            async def episodes(number: int) -> Ids:
                some = [tasks[(8 * number + n) % len(tasks)] for n in range(8)]
                jobs = [
                    Job(task, 1000 * number + 8 * n + m, m)
                    for n, task in enumerate(some)
                    for m in range(8)
                ]
                every = await rollout.run(jobs, lambda episode: None)
                return [episode.tokens.ids.tolist() for episode in every]

            return await compare(runtime.loaded.policy, rounds, episodes)


async def of_random(rounds: int) -> dict[str, Any]:
    """Turns of a model whose text never repeats."""
    model = make_model("3M")
    policy = LocalPolicy(model, context_length=4096, rows=64)

    async def episodes(number: int) -> Ids:
        prompts, _ = work(model.config.vocab_size, 64, number)
        turns = [
            policy.generate(f"e{n}", ids, Sampling(max_new_tokens=32, seed=64 * number + n))
            for n, ids in enumerate(prompts)
        ]
        said = [each.ids.tolist() for each in await asyncio.gather(*turns)]
        for n in range(64):
            await policy.release(f"e{n}")
        return said

    return await compare(policy, rounds, episodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("project", help="a project folder, or `random`")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(30)
    made = (
        of_random(given.rounds)
        if given.project == "random"
        else of_pack(Path(given.project).resolve(), given.rounds)
    )
    print(
        json.dumps({"project": given.project, **asyncio.run(made), **machine_and_load()}, indent=1)
    )


if __name__ == "__main__":
    main()
