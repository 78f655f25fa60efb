"""A process that measures one side of a comparison, with its own model: the sides take turns, line by line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Numbers = dict[str, Any]


class Worker:
    """A command that answers each line of its input with a line of JSON, and the input's end with a last one."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **(env or {}),
        }
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, cwd=cwd, **pipes)

    def measure(self) -> Numbers:
        """One more measurement."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> Numbers:
        """End the process. Returns its last line."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        found = self._read()
        self.process.wait()
        return found

    def _read(self) -> Numbers:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # libraries print, too, as `{'train_loss': 0.0}`
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
        raise SystemExit(f"a measuring process ended with status {self.process.wait()}")


def serve(measure: Callable[[], Numbers], last: Callable[[], Numbers] = dict) -> None:
    """Be such a command: measure once for each line of the input."""
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)
    print(json.dumps(last()), flush=True)
