"""A test script decides: `tests/test.sh` of a task runs in the episode's folder and writes the reward, as Harbor's do.

A row has `tests` (path to text, under `tests/`), perhaps `root`, the folder that its scripts call by an absolute path,
and `timeout` in seconds. The scripts come into the sandbox after the episode has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentrl_cli.errors import SandboxFault, UsageError

HIDDEN = ".harbor"
"""Folder for what Harbor mounts at /tests and /logs."""


async def passes(episode: Any, ctx: Any) -> Any:
    """Return the number that the script writes to /logs/verifier/reward.txt, or the first of reward.json; else 0."""
    session, row = await ctx.session(), ctx.task.data
    made = await session.bash(f"rm -rf {HIDDEN}; mkdir -p {HIDDEN}/logs/verifier; pwd")
    root = made.stdout.strip()
    for path, text in row["tests"].items():
        await session.write(f"{HIDDEN}/tests/{path}", placed(text, root, row.get("root", "")))
    ctx.fakeable = True  # the tests run beside what the model wrote
    result = await session.bash(f"bash {HIDDEN}/tests/test.sh", wall=row.get("timeout"))
    if result.infrastructure:
        raise SandboxFault(f"The sandbox failed: {result.status}.")
    last = (result.text().strip().splitlines() or [""])[-1][:200]
    return ctx.part(await _written(session), last)


def placed(text: str, root: str, old: str = "") -> str:
    """Return a script with Harbor's absolute folders, and `old`, in the folder `root`."""
    text = re.sub(r"(?<![\w./])/(logs|tests)\b", rf"{root}/{HIDDEN}/\1", text)
    return re.sub(rf"(?<![\w./]){re.escape(old)}\b", root, text) if old.strip("/") else text


async def _written(session: Any) -> float:
    for name, read in (("reward.txt", float), ("reward.json", _first)):
        try:
            return float(read((await session.read(f"{HIDDEN}/logs/verifier/{name}")).decode()))
        except (UsageError, ValueError):  # not there, or not a number
            continue
    return 0.0


def _first(text: str) -> float:
    return float(next(iter(json.loads(text).values()), 0.0))


def solve(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row's own solution: its script, as one command of the tool `bash`."""
    command = placed(row["solution"], ".", row.get("root", ""))
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "Done."},
    ]
