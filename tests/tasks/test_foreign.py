"""What comes from others: packs are code, and stored text must not steer a terminal."""

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

from agentrl_cli.paths import packs_dir
from agentrl_cli.tui.common.plain_text import harmless

SAID = "runs the code of"


def cli(folder: Path, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "agentrl_cli", *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_project_that_was_never_met_is_said_to_be_code_once(tmp_path: Path) -> None:
    project = tmp_path / "foreign"
    shutil.copytree(packs_dir() / "calc-task", project)
    (project / "agentrl.yaml").write_text("task: {packs: [.]}\n")
    code, out, err = cli(project, "tools", "list")
    assert (
        code == 0 and err.count(SAID) == 1 and str(project / "task.py") in err and SAID not in out
    )
    assert all(SAID not in cli(project, "tools", "list")[2] for _ in range(2))
    # A mark that came with a folder does not count.
    project.rename(tmp_path / "moved")
    assert SAID not in cli(tmp_path / "moved", "tools", "list")[2]
    subprocess.run(["cp", "-r", str(tmp_path / "moved"), str(project)], check=True)
    assert cli(project, "tools", "list")[2].count(SAID) == 1


def test_packs_that_ship_are_not_foreign(tmp_path: Path) -> None:
    assert SAID not in cli(tmp_path, "tools", "list", "--pack", "calc-task")[2]


NASTY = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202eright\u202c \u2066x\u2069 \x9b2J\rtail"


def test_nothing_of_a_text_steers_a_terminal() -> None:
    left = harmless(NASTY)
    assert not any(
        ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u202e\u202c\u2066\u2069" for c in left
    )
    assert "red" in left and "right" in left and "[31m" not in left


def on_terminal(*command: str, cwd: Path) -> bytes:
    """What a command writes to a terminal."""
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


def test_live_output_is_harmless_on_a_terminal_and_raw_in_a_pipe(tmp_path: Path) -> None:
    program = tmp_path / "nasty.py"
    program.write_text(f"print({NASTY!r})")
    command = [
        sys.executable,
        "-m",
        "agentrl_cli",
        "sandbox",
        "run",
        str(program),
        "--level",
        "landlock",
    ]
    piped = subprocess.run(command, capture_output=True, cwd=tmp_path, check=False)
    if piped.returncode == 3:
        return  # no sandbox here
    assert "\x1b[31mred" in piped.stdout.decode() and "\u202e" in piped.stdout.decode()
    shown = on_terminal(*command, cwd=tmp_path).decode()
    assert "red" in shown and "\x1b" not in shown and "\u202e" not in shown and "\x07" not in shown
