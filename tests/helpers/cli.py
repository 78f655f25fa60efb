"""The command line in this process: a call checks the exit status and the messages, and returns the data."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import main


class Cli:
    """`cli("ls", "-f", "x", code=2, said="Did you mean")` runs a command in `folder` and returns its stdout.

    Nothing is ever a traceback, and an error always says what happened. `always` are the last words of every command.
    """

    def __init__(self, capture: pytest.CaptureFixture[str], folder: Path, *always: str) -> None:
        self.capture, self.folder, self.always = capture, folder, always
        self.err = ""

    def __call__(self, *args: str, code: int = 0, said: str | tuple[str, ...] = ()) -> str:
        with contextlib.chdir(self.folder):
            self.capture.readouterr()
            found = main([*args, *self.always])
            out, self.err = self.capture.readouterr()
        assert "Traceback (most" not in self.err + out and "Something went wrong" not in self.err, (
            self.err
        )
        assert found == code, (args, found, self.err)
        assert code not in (2, 3) or self.err.rpartition("Error: ")[2].strip(), "what happened"
        for text in (said,) if isinstance(said, str) else said:
            assert text in self.err, (args, self.err)
        return out

    def json(self, *args: str, code: int = 0, said: str | tuple[str, ...] = ()) -> Any:
        return json.loads(self(*args, "--json", code=code, said=said))
