"""A day of rollouts by simulation: 100,000 episodes with a scripted policy. Memory, descriptors and store stay flat."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rewards import Reward
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tasks import Pack
from benchmarks.fault_trials.fuzz import add

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
STEP = 64
MOST_THREADS = STEP + 8
"""One thread for each episode at once, which the pool keeps, and those of the interpreter and the store. When the pool
reaches that size is chance, so the first tenth does not measure it."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=int, default=100_000)


def trial(args: argparse.Namespace, work: Path) -> tuple[dict[str, Any], bool]:
    """Memory (MiB), descriptors, threads and bytes of store an episode, at the first and the last tenth."""
    marks = asyncio.run(_run(args.episodes, work / "soak.db"))
    tenth = max(1, len(marks) // 10)
    first, last = marks[tenth : 2 * tenth], marks[-tenth:]
    table: dict[str, Any] = {"episodes": marks[-1]["episodes"]}
    for name in ("rss_mib", "descriptors", "threads", "store_bytes_per_episode", "ms_per_episode"):
        table[name] = [
            round(float(np.median([mark[name] for mark in part])), 2) for part in (first, last)
        ]
    grown = table["rss_mib"][1] - table["rss_mib"][0]
    table["wrong"] = [
        *(["memory grows"] if grown > 32 else []),
        *(["descriptors leak"] if table["descriptors"][1] > table["descriptors"][0] else []),
        *(["threads leak"] if table["threads"][1] > MOST_THREADS else []),
        *(
            ["the store grows faster"]
            if np.divide(*table["store_bytes_per_episode"][::-1]) > 1.1
            else []
        ),
    ]
    return table, not table["wrong"]


async def _run(episodes: int, db: Path) -> list[dict[str, float]]:
    tokenizer, marks = ByteTokenizer(), []
    pack = Pack.of(
        "soak", [{"prompt": f"1 + {n}?"} for n in range(64)], [Reward("even", _even)], tools=[add]
    )
    tasks = pack.tasks("train")
    with Store.open(db) as store:
        run = store.runs.add(RunRow(id="", name="soak"))
        store.tasks.add(tasks)
        policy = ScriptedPolicy([CALL, "3"], tokenizer)
        config = Config.model_validate({"rollout": {"max_tokens": 4000, "max_new_tokens": 400}})
        rollout = Rollout(policy, Chat(tokenizer), {pack.name: pack}, config, store=store)
        done, size = 0, 0.0
        for step in range(1, episodes // STEP + 1):
            began = time.process_time()
            place: dict[str, Any] = {"run_id": run.id, "step": step, "kind": "train"}
            jobs = [
                Job(
                    tasks[(step + n // 8) % 64],
                    seed=n,
                    sample=n % 8,
                    group_id=f"{step}-{n // 8}",
                    **place,
                )
                for n in range(STEP)
            ]
            ended = await rollout.run(jobs)
            assert all(episode.outcome is not None for episode in ended)
            done += len(ended)
            if step % 16 == 0:
                now = sum(path.stat().st_size for path in db.parent.glob("soak.db"))
                marks.append(
                    _mark(done, (now - size) / (16 * STEP), (time.process_time() - began) / STEP)
                )
                size = now
    return marks


def _even(episode: Any, ctx: Any) -> float:
    return float(len(episode.tokens) % 2 == 0)


def _mark(done: int, stored: float, seconds: float) -> dict[str, float]:
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "episodes": done,
        "rss_mib": int(fields["VmRSS"].split()[0]) / 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(fields["Threads"]),
        "store_bytes_per_episode": stored,
        "ms_per_episode": 1000 * seconds,
    }
