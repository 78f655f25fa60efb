"""What comes from others: packs are code, and stored text must not steer a terminal."""

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.paths import packs_dir
from agentrl_cli.tui.common.plain_text import harmless
from tests.helpers.cli import Cli

SAID = "runs the code of"


def test_a_project_that_was_never_met_is_said_to_be_code_once(tmp_path: Path, cli: Cli) -> None:
    cli("tools", "list", "--pack", "calc-task")
    assert SAID not in cli.err, "packs that ship are not foreign"
    cli.folder = project = tmp_path / "foreign"
    shutil.copytree(packs_dir() / "calc-task", project)
    (project / "agentrl.yaml").write_text("task: {packs: [.]}\n")
    out = cli("tools", "list", said=str(project / "task.py"))
    assert cli.err.count(SAID) == 1 and SAID not in out
    cli("tools", "list")
    assert SAID not in cli.err
    # A mark that came with a folder does not count.
    cli.folder = project.rename(tmp_path / "moved")
    cli("tools", "list")
    assert SAID not in cli.err
    shutil.copytree(cli.folder, project)
    cli.folder = project
    cli("tools", "list")
    assert cli.err.count(SAID) == 1


NASTY = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202eright\u202c \u2066x\u2069 \x9b2J\rtail"


def test_nothing_of_a_text_steers_a_terminal() -> None:
    left = harmless(NASTY)
    assert not any(
        ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u202e\u202c\u2066\u2069" for c in left
    )
    assert "red" in left and "right" in left and "[31m" not in left


def on_terminal(*command: str, cwd: Path) -> bytes:
    main, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, cwd=cwd, env=environment
    ) as process:
        os.close(end)
        out = b""
        while select.select([main], [], [], 60)[0]:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            out += piece
        os.close(main)
        assert process.wait() == 0
    return out


def test_live_output_is_harmless_on_a_terminal_and_raw_in_a_pipe(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "nasty.py"
    program.write_text(f"print({NASTY!r})")
    words = ["sandbox", "run", str(program), "--level", "landlock"]
    if main(words) == 3:
        return  # no sandbox here
    piped = capfd.readouterr().out
    assert "\x1b[31mred" in piped and "\u202e" in piped
    shown = on_terminal(sys.executable, "-m", "agentrl_cli", *words, cwd=tmp_path).decode()
    assert "red" in shown and "\x1b" not in shown and "\u202e" not in shown and "\x07" not in shown
