"""Episodes that wait for a tool: 64 of a scripted policy with a 0.5 s tool, one turn, store writes included.

    python benchmarks/tools.py [--episodes 64] [--seconds 0.5] [--repeat 3] [--out results.json]

A turn ends when the tool's answer is in the store; the episode then ends with a short text and its grade. Asynchronous
and synchronous (threaded) tools are both measured. `cpu_s` is the CPU time of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rewards import Reward
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Outcome


def tools(seconds: float) -> dict[str, Any]:
    """Both kinds of the tool."""

    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"

    def block() -> str:
        """Wait in a thread."""
        time.sleep(seconds)
        return "waited"

    return {"async": wait, "thread": block}


async def measure(kind: str, seconds: float, episodes: int, folder: Path) -> dict[str, float]:
    """Seconds from the first job to the last answer in the store, to the last finished episode, and of CPU."""
    function = tools(seconds)[kind]
    chat = Chat(ByteTokenizer())
    pack = Pack.of(
        "p", [{"prompt": "Wait."}], [Reward("r", lambda episode, ctx: 1.0)], tools=[function]
    )
    said = [chat.parser.example(function.__name__, {}), "done"]
    config = Config()
    config.rollout.concurrency = episodes
    with Store.open(folder / f"{kind}-{time.monotonic_ns()}.db") as store:
        rollout = Rollout(
            ScriptedPolicy(said, chat.tokenizer), chat, {"p": pack}, config, store=store
        )
        task = pack.tasks("train")[0]
        started, cpu = time.time(), time.process_time()
        done = await rollout.run([Job(task, n, sample=n) for n in range(episodes)])
        spent = time.time() - started
        assert all(episode.outcome is Outcome.SOLVED for episode in done)
        assert len(store.episodes.ids()) == episodes
        # A turn starts when the one before it is committed: the final one right after the tool's answer.
        answered = max(turn.started for e in done for turn in e.turns[-1:]) - started
    return {"turn_s": answered, "episode_s": spent, "cpu_s": time.process_time() - cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    facts: dict[str, Any] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "episodes": given.episodes,
    }
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("async", "thread"):
            times = [
                asyncio.run(measure(kind, given.seconds, given.episodes, Path(folder)))
                for _ in range(given.repeat)
            ]
            facts[kind] = {name: [round(time[name], 3) for time in times] for name in times[0]}
            shown = ", ".join(
                f"{name} {statistics.median(values):.3f}" for name, values in facts[kind].items()
            )
            print(f"{kind}, medians of {given.repeat}: {shown}")
    if given.out:
        given.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
