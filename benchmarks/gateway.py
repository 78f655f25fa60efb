"""The gateway under load. What it costs beside the built-in loop is measured by agents.py.

    python benchmarks/gateway.py soak [--requests 10000] [--sessions 200] [--killed 0.05]

Conversations of ten calls over real HTTP with a scripted model. A share of the requests loses its client in the middle;
the client sends it again as SDKs do. Every episode must end with ten answers in one branch, and the server's memory
must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2

from agentrl_cli.agents.gateway.app import Gateway, OneModel
from agentrl_cli.agents.gateway.http import listening
from agentrl_cli.agents.gateway.sampling import Limits
from agentrl_cli.agents.gateway.session import Session, Trace
from agentrl_cli.agents.gateway.sessions import Sessions
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.types import Sampling

HERE = Path(__file__).parent
CALLS = 10
"""Of each conversation."""


def _rss() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def soak(requests: int, sessions: int, killed: float) -> dict[str, Any]:
    """Serve while a process of clients is at work, and count what was recorded."""
    chat = Chat(ByteTokenizer())
    policy = ScriptedPolicy(lambda key, ids: f"Answer to {len(ids)}.", chat.tokenizer, delay=0.02)
    traces: list[tuple[str, int, int, int, int]] = []
    memory: list[float] = []

    def make(key: str) -> Session:
        return Session(key, chat, policy, Sampling(), Limits(16000, 100))

    def ended(session: Session, trace: Trace, reward: float | None) -> None:
        traces.append((session.key, trace.calls, trace.forks, session.replayed, len(trace.turns)))
        if len(traces) % 50 == 0:
            memory.append(_rss())

    gateway = Gateway(Sessions(make, ended), OneModel(policy, "model"), chat)
    started, cpu = time.perf_counter(), time.process_time()
    async with listening(gateway.app, "127.0.0.1", 0) as address:
        given = [
            sys.executable,
            __file__,
            "clients",
            "--address",
            address,
            "--requests",
            str(requests),
        ]
        given += ["--sessions", str(sessions), "--killed", str(killed)]
        clients = await asyncio.create_subprocess_exec(*given, stdout=subprocess.PIPE)
        out, _ = await clients.communicate()
    said = json.loads(out)
    wrong = [trace for trace in traces if trace[1] != CALLS or trace[2] or trace[4] != 2 * CALLS]
    return {
        **said,
        "episodes": len(traces),
        "recorded": sum(trace[1] for trace in traces),
        "episodes with lost, doubled or forked turns": len(wrong),
        "replayed": sum(trace[3] for trace in traces),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "rss_mib_first_half": round(max(memory[: len(memory) // 2]), 1),
        "rss_mib_second_half": round(max(memory[len(memory) // 2 :]), 1),
        "wrong": wrong[:5],
    }


async def clients(address: str, requests: int, sessions: int, killed: float) -> dict[str, Any]:
    """So many conversations at a time; answers, and requests whose client left."""
    left = iter(range(requests // CALLS))
    counts = {"answers": 0, "killed": 0}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=sessions)

    async def one(client: httpx2.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Begin {number}."}]
        for turn in range(CALLS):
            body = {"model": "model", "messages": messages}
            url, tries = f"{address}/e/k{number}/v1/chat/completions", 0
            while True:
                kill = tries == 0 and chance.random() < killed
                headers = {"x-stainless-retry-count": str(tries)}
                try:
                    async with asyncio.timeout(chance.random() * 0.06 if kill else 60):
                        answer = await client.post(url, json=body, headers=headers)
                except TimeoutError:
                    counts["killed"] += 1
                    tries += 1
                    continue
                break
            assert answer.status_code == 200, answer.text
            counts["answers"] += 1
            messages += [
                answer.json()["choices"][0]["message"],
                {"role": "user", "content": f"And {turn}?"},
            ]
        ended = await client.post(f"{address}/e/k{number}/end", json={"reward": 1.0})
        assert ended.status_code == 200, ended.text

    async def worker(client: httpx2.AsyncClient) -> None:
        for number in left:
            await one(client, number)

    async with httpx2.AsyncClient(timeout=60, limits=limits) as client:
        await asyncio.gather(*(worker(client) for _ in range(sessions)))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["soak", "clients"])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--killed", type=float, default=0.05)
    parser.add_argument("--address", default="")
    given = parser.parse_args()
    match given.what:
        case "clients":
            print(
                json.dumps(
                    asyncio.run(
                        clients(given.address, given.requests, given.sessions, given.killed)
                    )
                )
            )
        case _:
            _keep("soak", asyncio.run(soak(given.requests, given.sessions, given.killed)))


def _keep(name: str, found: dict[str, Any]) -> None:
    """Print a result and write it beside the other one."""
    path = HERE / "results" / "gateway.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**kept, name: found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
