"""docs/architecture.md is made from the code, and its walks are those of a real run."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx2
import pytest
import torch
import yaml

import agentrl_cli.policies.load  # noqa: F401 - before calls are recorded, which makes it dear
from agentrl_cli.agents.gateway.http import _READER
from agentrl_cli.commands import main
from docs.make_architecture import PACKAGE, PAGE, WALKS, page
from tests.helpers.gateway import MODEL, world_of

SETTINGS = {
    **{"seed": 3, "deterministic": True, "task": {"packs": ["calc-task"]}},
    "model": {"name": "tiny", "device": "cpu", "dtype": "float32"},
    "rollout": {
        **{"group_size": 4, "prompts_per_step": 2, "concurrency": 8},
        **{"max_turns": 3, "max_new_tokens": 64},
    },
    "algo": {"skip": {"zero_variance": False}},
    "train": {"steps": 1, "lr": 1e-3, "eval": {"every": 0}},
}
STEPS = {
    (str(PACKAGE / file), name): f"{file}:{name}"
    for walk in WALKS
    for file, name in (step.split(":") for step in walk.steps)
}


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "PYTHONPATH=. python docs/make_architecture.py"
    )


@contextmanager
def record_calls() -> Iterator[list[str]]:
    """Yield the steps of walks that are called while the block runs, in order, of all threads."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            if step := STEPS.get((code.co_filename, code.co_qualname)):
                calls.append(step)

    threading.setprofile(note)
    sys.setprofile(note)
    _READER.submit(sys.setprofile, note).result()  # an earlier test may have started this thread
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        _READER.submit(sys.setprofile, None).result()


def next_missing(walk: tuple[str, ...], calls: list[str]) -> str:
    """Return the first step of a walk that is not called after those before it; empty if all are."""
    rest = iter(calls)
    return next((step for step in walk if step not in rest), "")


def test_the_walks_are_those_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agentrl.yaml").write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    with record_calls() as trained:
        assert main(["train"]) == 0
    with record_calls() as asked:
        asyncio.run(ask())
    for walk in WALKS:
        calls = asked if walk.title == "A foreign request" else trained
        assert next_missing(walk.steps, calls) == "", walk.title


async def ask() -> None:
    world = world_of(["Hello."])
    transport = httpx2.ASGITransport(app=world.gateway.app)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://test", timeout=None
    ) as client:
        assert (await client.post("/e/a/v1/chat/completions", json=body)).status_code == 200
