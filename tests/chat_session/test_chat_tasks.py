"""Chat offers the pack's tasks and opens them; a model that loops over calls that cannot be run is stopped."""

import json
from pathlib import Path

import pytest

from agentrl_cli.commands import main

BAD = '<tool_call>\n{"name": "calculatr", "arguments": {"expression": "1"}}\n</tool_call>'


def chat(place: Path, capfd: pytest.CaptureFixture[str], replies: list[str], *say: str) -> str:
    (place / "replies.json").write_text(json.dumps(replies))
    arguments = [
        "chat",
        "--model",
        "scripted",
        "--script",
        str(place / "replies.json"),
        "--pack",
        "calc-task",
        "--plain",
    ]
    main(
        [
            *arguments,
            "--db",
            str(place / "agentrl.db"),
            *(part for text in say for part in ("--say", text)),
        ]
    )
    return capfd.readouterr().out


def test_tasks_are_offered_and_opened(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = chat(
        tmp_path,
        capfd,
        ["Answer: 1"] * 3,
        "/task 1",
        "/save",
        "/task heldout-0001",
        "/task nothing",
    )
    offered = [line for line in out.splitlines() if line.startswith(("  1  ", "  2  ", "  3  "))]
    assert len(offered) == 3 and "/task 1 opens the first" in out
    question = offered[0].split("  ")[-1]
    assert out.count(question) == 2 and "saved: agentrl replay" in out
    assert "--- back to 0 turns ---" in out and "No task named 'nothing'" in out


def test_a_loop_of_calls_that_cannot_be_run_is_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = chat(tmp_path, capfd, [BAD] * 9, "What is 1 + 1?")
    assert out.count("no call that can be run: ") == 2 and out.count("MALFORMED") <= 1
    assert (
        "stopped: 3 turns in a row without a call that can be run" in out
        and out.count("ERROR") == 1
    )
