"""The tool server under load, by wrk (a Debian package): calls per second, latency, nothing lost or run twice.

    python benchmarks/tool_server.py [--seconds 10] [--connections 32] [--rounds 3]

Every request has its own key. Afterwards the journal must contain each call exactly once with its result, and at
most `connections` more than wrk counted (those in flight when it stopped).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentrl_cli.plugins.verl_tool.client import connect

HERE = Path(__file__).parent


def one(seconds: int, connections: int, port: int) -> dict[str, Any]:
    """A separate server, under load for this many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.db"
        os.environ["AGENTRL_TOKEN"] = "load"
        command = [sys.executable, "-m", "agentrl_cli", "tools", "serve"]
        command += ["--port", str(port), "--journal", str(journal)]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().decode().strip()
            asyncio.run(_open(address))
            before = _cpu(server.pid)
            wrk = [
                "wrk",
                "-t1",
                f"-c{connections}",
                f"-d{seconds}s",
                "-s",
                str(HERE / "tool_server.lua"),
                address,
            ]
            said = subprocess.run(wrk, capture_output=True, text=True, check=True).stdout
            cpu = _cpu(server.pid) - before
            time.sleep(0.5)
            with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as book:
                rows, keys, answered = book.execute(
                    "SELECT count(*), count(DISTINCT key), count(result) FROM calls"
                ).fetchone()
        finally:
            server.terminate()
            server.wait(30)
            assert server.stdout is not None
            server.stdout.close()
    lines = dict(
        line.split(" ", 1) for line in said.splitlines() if line.startswith(("RESULT ", "WRONG "))
    )
    requests, micros, errors, p50, p99, most = map(float, lines["RESULT"].split())
    if errors:
        raise SystemExit(
            f"{errors:.0f} of {requests:.0f} requests failed: {lines.get('WRONG', 'no connection')}"
        )
    if not (rows == keys == answered and requests <= rows <= requests + connections):
        counts = f"{rows} rows, {keys} keys and {answered} results for {requests:.0f} answers"
        raise SystemExit(f"The journal does not contain each call once: {counts}.")
    return {
        "calls_per_second": round(requests / micros * 1e6, 1),
        "p50_ms": p50,
        "p99_ms": p99,
        "max_ms": most,
        "calls": int(requests),
        "journalled_once": True,
        "cpu_ms_per_call": round(cpu / requests * 1000, 3),
    }


async def _open(address: str) -> None:
    async with connect(address) as remote:
        for number in range(64):
            await remote.post("/v1/open", {"trajectory": f"load-{number}"})


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=7690)
    given = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing: apt-get install wrk")
    rounds = [one(given.seconds, given.connections, given.port + n) for n in range(given.rounds)]
    for row in rounds:
        print(json.dumps(row))
    result = {"connections": given.connections, "seconds": given.seconds, "rounds": rounds}
    (HERE / "results" / "tool_server.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
