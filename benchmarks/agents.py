"""What the gateway costs: the same episodes of calc-task by the built-in loop and by agents over HTTP.

    python benchmarks/agents.py [--episodes 64] [--rounds 5]

The bundled model at temperature 1 with the same seeds, on the CPU; tokens per episode are counted to show that the work
is the same. Both ways are whole rollouts: store, drift guard, rewards. The agents and their HTTP client are one other
process, whose CPU seconds stand apart: `cpu` is that of the rollout, where the gateway is, and `loop` what its event
loop has of it; the model's thread has nearly all of the rest. Rounds alternate, and which way begins does, too; the
table has the median and the range, and the median and quartiles of the rounds' ratios. Writes
benchmarks/results/agents.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.agents.runners import AgentRollout  # noqa: E402  # works without an installation
from agentrl_cli.config import Config  # noqa: E402
from agentrl_cli.rollout import Job, seed_of  # noqa: E402
from agentrl_cli.runtime import open_runtime  # noqa: E402
from agentrl_cli.tasks.agent import read_agent  # noqa: E402

LIMITS = {"max_turns": 4, "max_new_tokens": 64, "max_tokens": 384, "concurrency": 64}
GROUP = 8
"""Attempts at each task, as in a training step."""

AGENT = """\
import asyncio, json, os, sys

PROCESS = None
ENDED = {}


async def agent(task, base_url, api_key):
    global PROCESS
    if PROCESS is None:
        PROCESS = asyncio.ensure_future(start())
    process = await asyncio.shield(PROCESS)
    ended = ENDED[api_key] = asyncio.get_running_loop().create_future()
    work = {"base_url": base_url, "key": api_key, "messages": list(task.prompt)}
    process.stdin.write(json.dumps(work).encode() + b"\\n")
    await ended


async def start():
    command = [sys.executable, os.environ["BENCHMARK"], "--agents"]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, **pipes)

    async def read():
        async for line in process.stdout:
            ENDED.pop(line.decode().strip()).set_result(None)

    process.reading = asyncio.ensure_future(read())
    return process
"""


async def agents() -> None:
    """The agents' process: a line of stdin is an episode, a line of stdout its end."""
    import httpx2

    from agentrl_cli.tasks import load_pack
    from agentrl_cli.tools.calculator import calculator

    tools = load_pack("calc-task").schemas
    client = httpx2.AsyncClient(
        trust_env=False, timeout=600, limits=httpx2.Limits(max_keepalive_connections=64)
    )

    async def play(work: dict[str, Any]) -> None:
        messages = work["messages"]
        for _ in range(4):
            body = {"messages": messages, "tools": tools}
            answer = await client.post(f"{work['base_url']}/chat/completions", json=body)
            if answer.status_code != 200:
                break
            said = answer.json()["choices"][0]["message"]
            messages.append(said)
            if not said.get("tool_calls"):
                break
            for call in said["tool_calls"]:
                try:
                    text = calculator(**json.loads(call["function"]["arguments"])).text
                except (TypeError, ValueError) as error:
                    text = f"Error: {error}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        print(work["key"], flush=True)

    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with asyncio.TaskGroup() as group:
        while line := await reader.readline():
            group.create_task(play(json.loads(line)))


async def measure(episodes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """CPU and wall seconds of each way in each round."""
    (folder / "agent.py").write_text(AGENT)
    config = Config.model_validate(
        {"rollout": LIMITS, "task": {"packs": ["calc-task"]}, "model": {"device": "cpu"}}
    )
    found: dict[str, list[dict[str, float]]] = {"built-in": [], "agent": []}
    os.environ["BENCHMARK"] = str(Path(__file__).resolve())
    async with open_runtime(config, base=ROOT, db=folder / "store.db") as runtime:
        pack = runtime.packs["calc-task"]
        agent = read_agent("agent.py:agent", folder, "agent")
        tasks = pack.tasks("train")[: episodes // GROUP]
        jobs = [
            Job(task, seed_of(0, task.id, sample), sample, group_id=task.id)
            for task in tasks
            for sample in range(GROUP)
        ]
        for number in range(-1, rounds):  # the first warms everything up
            for name, rows in sorted(found.items(), reverse=bool(number % 2)):
                packs = {pack.name: replace(pack, agent=agent if name == "agent" else None)}
                loaded = runtime.loaded
                rollout = AgentRollout(
                    loaded.policy, loaded.chat, packs, config, store=runtime.store
                )
                cpu, loop, wall = time.process_time(), time.thread_time(), time.perf_counter()
                made = await rollout.run(jobs)
                row = {"cpu": time.process_time() - cpu, "loop": time.thread_time() - loop}
                row["wall"] = time.perf_counter() - wall
                row["sampled"] = sum(episode.trained_tokens for episode in made)
                row["turns"] = sum(
                    turn.role == "assistant" for episode in made for turn in episode.turns
                )
                row["solved"] = sum(episode.solved for episode in made)
                if number >= 0:
                    rows.append(row)
    return {"rows": found}


def table(result: dict[str, Any]) -> str:
    """A Markdown table of medians and ranges."""
    lines = ["| | CPU s | of the event loop | wall s | sampled tokens | turns | solved |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, rows in result["rows"].items():
        cells = [_spread([row[key] for row in rows]) for key in ("cpu", "loop", "wall")]
        cells += [
            f"{statistics.median(row[key] for row in rows):.0f}"
            for key in ("sampled", "turns", "solved")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    both = zip(result["rows"]["agent"], result["rows"]["built-in"], strict=True)
    ratios = [agent["cpu"] / own["cpu"] - 1 for agent, own in both]
    low, middle, high = statistics.quantiles(ratios, n=4)
    lines += [
        "",
        f"agent over built-in: median {middle:+.1%} CPU of {len(ratios)} rounds, quartiles {low:+.1%}, {high:+.1%}",
    ]
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agents:
        asyncio.run(agents())
        return
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(given.episodes, given.rounds, Path(folder)))
    result |= {"episodes": given.episodes, "machine": platform.processor() or platform.machine()}
    (ROOT / "benchmarks" / "results" / "agents.json").write_text(
        json.dumps(result, indent=1) + "\n"
    )
    print(table(result))


if __name__ == "__main__":
    main()
