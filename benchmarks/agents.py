"""What the gateway costs: the same episodes of calc-task by the built-in loop and by agents over HTTP.

    python benchmarks/agents.py [--episodes 64] [--rounds 5]

The bundled model at temperature 1 with the same seeds, on the CPU; tokens per episode are counted to show that the work
is the same. CPU seconds are those of the whole process, in which the agents and their HTTP client run, too. What is not
the gateway's is measured apart: `client` is the same client with as many calls, as many at once, of an empty server
(Starlette and uvicorn) in the same process. Rounds alternate; the table has the median and the range. Writes
benchmarks/results/agents.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

import httpx2  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import JSONResponse, Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

from agentrl_cli.agents.gateway.listen import listening  # noqa: E402
from agentrl_cli.agents.runners import AgentRollout  # noqa: E402  # works without an installation
from agentrl_cli.config import Config  # noqa: E402
from agentrl_cli.rollout import Job, seed_of  # noqa: E402
from agentrl_cli.runtime import open_runtime  # noqa: E402
from agentrl_cli.tasks.agent import read_agent  # noqa: E402

LIMITS = {"max_turns": 4, "max_new_tokens": 64, "max_tokens": 384, "concurrency": 64}
GROUP = 8
"""Attempts at each task, as in a training step."""

AGENT = """\
import json
import httpx2
from agentrl_cli.tools.calculator import calculator
from agentrl_cli.tasks import load_pack

TOOLS = load_pack("calc-task").schemas
CLIENT = httpx2.AsyncClient(trust_env=False, timeout=600, limits=httpx2.Limits(max_keepalive_connections=64))


async def agent(task, base_url, api_key):
    messages = list(task.prompt)
    for _ in range(4):
        body = {"messages": messages, "tools": TOOLS}
        answer = await CLIENT.post(f"{base_url}/chat/completions", json=body)
        if answer.status_code != 200:
            return
        said = answer.json()["choices"][0]["message"]
        messages.append(said)
        if not said.get("tool_calls"):
            return
        for call in said["tool_calls"]:
            try:
                text = calculator(**json.loads(call["function"]["arguments"])).text
            except (TypeError, ValueError) as error:
                text = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
"""


async def measure(episodes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """CPU and wall seconds of each way in each round."""
    (folder / "agent.py").write_text(AGENT)
    config = Config.model_validate({"rollout": LIMITS, "task": {"packs": ["calc-task"]}, "model": {"device": "cpu"}})
    found: dict[str, list[dict[str, float]]] = {"built-in": [], "agent": []}
    client = []
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
            for name, rows in found.items():
                packs = {pack.name: replace(pack, agent=agent if name == "agent" else None)}
                loaded = runtime.loaded
                rollout = AgentRollout(loaded.policy, loaded.chat, packs, config, store=runtime.store)
                cpu, wall = time.process_time(), time.perf_counter()
                made = await rollout.run(jobs)
                row = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
                row["sampled"] = sum(episode.trained_tokens for episode in made)
                row["turns"] = sum(turn.role == "assistant" for episode in made for turn in episode.turns)
                row["solved"] = sum(episode.solved for episode in made)
                if number >= 0:
                    rows.append(row)
            if number >= 0:
                client.append(await client_cost(pack.schemas, int(found["agent"][0]["turns"]) - len(jobs), len(jobs)))
    return {"rows": found, "client": client}


async def client_cost(tools: list[dict[str, Any]], second: int, together: int) -> float:
    """CPU seconds of the agents' client with an empty server: `together` calls at once, `second` of them twice."""
    message = {"role": "assistant", "content": "x" * 50}
    body = {"messages": [{"role": "user", "content": "x" * 200}], "tools": tools}

    async def answer(request: Request) -> Response:
        await request.body()
        return JSONResponse({"choices": [{"message": message}]})

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    limits = httpx2.Limits(max_keepalive_connections=64)
    client = httpx2.AsyncClient(trust_env=False, timeout=600, limits=limits)
    async with listening(app, "127.0.0.1", 0) as url, client:

        async def ask(times: int) -> None:
            for _ in range(times):
                (await client.post(f"{url}/v1/chat/completions", json=body)).json()

        started = time.process_time()
        await asyncio.gather(*(ask(1 + (number < second)) for number in range(together)))
        return time.process_time() - started


def table(result: dict[str, Any]) -> str:
    """A Markdown table of medians and ranges."""
    lines = ["| | CPU s | wall s | sampled tokens | turns | solved |", "| --- | --- | --- | --- | --- | --- |"]
    for name, rows in result["rows"].items():
        cells = [_spread([row[key] for row in rows]) for key in ("cpu", "wall")]
        cells += [f"{statistics.median(row[key] for row in rows):.0f}" for key in ("sampled", "turns", "solved")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    own, agent = (statistics.median(row["cpu"] for row in rows) for rows in result["rows"].values())
    client = statistics.median(result["client"])
    lines += [
        f"| client and an empty server | {_spread(result['client'])} | | | | |",
        "",
        f"agent over built-in: {agent / own - 1:+.1%} CPU; without client and HTTP {(agent - client) / own - 1:+.1%}",
    ]
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(given.episodes, given.rounds, Path(folder)))
    result |= {"episodes": given.episodes, "machine": platform.processor() or platform.machine()}
    (ROOT / "benchmarks" / "results" / "agents.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
