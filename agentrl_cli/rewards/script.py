"""Reward by a test script: `tests/test.sh` of a task runs in the episode's folder and writes the reward.

A row has `tests` (path to text, under `tests/`), perhaps `root`, the folder that its scripts call by an absolute path,
and `timeout` in seconds. The scripts come into the sandbox after the episode has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentrl_cli.errors import EnvError, SandboxFault, UsageError
from agentrl_cli.sandbox import Status

HIDDEN = ".verifier"
"""Folder with the scripts' /tests and /logs."""


async def passes(episode: Any, ctx: Any) -> Any:
    """Return the number that the script writes to /logs/verifier/reward.txt, or the first of reward.json.

    0 if a limit ended it. Raises EnvError if it ended by itself without a number: nothing was graded.
    """
    session, row = await ctx.session(), ctx.task.data
    made = await session.bash(f"rm -rf {HIDDEN}; mkdir -p {HIDDEN}/logs/verifier; pwd")
    root = made.stdout.strip()
    for path, text in row["tests"].items():
        await session.write(
            f"{HIDDEN}/tests/{path}", place_folders(text, root, row.get("root", ""))
        )
    ctx.fakeable = True  # the tests run beside what the model wrote
    result = await session.bash(f"bash {HIDDEN}/tests/test.sh", wall=row.get("timeout"))
    if result.infrastructure:
        raise SandboxFault(f"The sandbox failed: {result.status}.")
    last = (result.text().strip().splitlines() or [""])[-1][:200]
    written = await _read_reward(session)
    if written is None and result.status in (Status.OK, Status.EXIT):
        raise EnvError(
            f"tests/test.sh wrote no number to /logs/verifier/reward.txt or reward.json. Its last line: {last}",
            hint="Let it write 0 for what is not solved: without a number an episode is masked.",
        )
    return ctx.part(written or 0.0, last)


def place_folders(text: str, root: str, old: str = "") -> str:
    """Return a script with the folders /tests and /logs, and `old`, in the folder `root`."""
    text = re.sub(r"(?<![\w./])/(logs|tests)\b", rf"{root}/{HIDDEN}/\1", text)
    return re.sub(rf"(?<![\w./]){re.escape(old)}\b", root, text) if old.strip("/") else text


async def _read_reward(session: Any) -> float | None:
    for name in ("reward.txt", "reward.json"):
        try:
            text = (await session.read(f"{HIDDEN}/logs/verifier/{name}")).decode()
            return float(
                text if name.endswith("txt") else next(iter(dict(json.loads(text)).values()))
            )
        except (UsageError, ValueError, TypeError, StopIteration):  # not there, or not a number
            continue
    return None


def solve(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row's own solution: its script, as one command of the tool `bash`. Empty without one."""
    if "solution" not in row:
        return []
    command = place_folders(row["solution"], ".", row.get("root", ""))
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "Done."},
    ]
