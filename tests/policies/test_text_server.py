"""A server that answers text alone, and an episode that a version stored that believed every server."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.commands import main
from agentrl_cli.errors import BadAnswer
from agentrl_cli.policies.remote.text import OpenAIPolicy
from agentrl_cli.store import Store
from agentrl_cli.types import Sampling
from tests.helpers.remote import server
from tests.helpers.train import episodes_of, trainer_of, write_project


def test_eval_with_a_text_only_server(tmp_path: Path, model: Path) -> None:
    """`agentrl eval` against an OpenAI-compatible endpoint, messages and all."""
    bodies: list[dict[str, Any]] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append({"path": path, **body})
        return 200, {
            "choices": [
                {"message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
            ]
        }

    async def run() -> int:
        async with server(handler) as url:
            remote = {"backend": "openai", "url": url, "model": "gpt", "mode": "chat"}
            write_project(tmp_path, model, remote=remote, eval={"k": 1, "limit": 2})
            return await asyncio.to_thread(main, ["eval", "--project", str(tmp_path)])

    assert asyncio.run(run()) == 0
    assert bodies.pop(0)["path"] == "/v1/models", "it is asked before anything runs"
    assert len(bodies) == 2 and all(body["path"] == "/v1/chat/completions" for body in bodies)
    assert bodies[0]["messages"][-1]["content"].startswith("Go ") and bodies[0]["model"] == "gpt"


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"message": "hello"},
        {"message": {"content": 5}},
        {"message": {"tool_calls": [{"function": {"name": 3}}]}},
        {"message": {"content": "hello"}},
        {"message": {"content": "hello " * 500}, "finish_reason": "stop"},
        {"message": {"content": "a\ud800"}, "finish_reason": "stop"},
        {"message": {"content": [5]}, "finish_reason": "stop"},
        {"message": {"content": [{"type": "text"}]}, "finish_reason": "stop"},
        {
            "message": {"tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]},
            "finish_reason": "stop",
        },
        *(
            {"text": text, "finish_reason": "stop"}
            for text in ("a\ud800", {"role": "assistant"}, None)
        ),
    ],
)
async def test_a_text_only_server_is_checked(bad: dict[str, Any]) -> None:
    """Messages, and the texts of completions."""

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"choices": [bad]}

    async with server(handler) as url:
        mode = "completions" if "text" in bad else "chat"
        policy = OpenAIPolicy(url, "gpt", Chat(ByteTokenizer()), mode=mode, retries=0)
        policy.observe("a", [{"role": "user", "content": "Hello?"}])
        with pytest.raises(BadAnswer, match="sent"):
            await policy.generate("a", [1], Sampling(max_new_tokens=12))
        await policy.close()


async def test_a_stored_bad_episode_is_skipped_and_never_blocks_a_resume(
    tmp_path: Path, model: Path
) -> None:
    """As a version stored it that believed every server: the update died of it, at every resume again."""
    more: dict[str, Any] = {"train": {"steps": 1}, "algo": {"drop_zero_variance": False}}
    async with trainer_of(tmp_path, model, **more) as trainer:
        run = trainer.run
        for episode in await trainer.rollout.run(trainer.collector.jobs(0)):
            if episode.sample < 2:
                spoil(trainer.store, episode, ("ids", "logp_policy")[episode.sample])
        db = Path(trainer.store.path)
    with Store.open(db) as store:
        row = store.runs.get(run.id)
    async with trainer_of(tmp_path, model, run=row, **more) as trainer:
        done = await trainer.train()
        found = episodes_of(trainer.store, row)
        step = trainer.store.runs.steps(row.id)[0]
        alerts = {alert["name"] for alert in trainer.store.journal.alerts(row.id)}
    assert done.status == "finished" and len(found) == 8 and "bad_tokens" in alerts
    assert {e.fact for e in found if e.sample < 2} == {"skipped:bad_tokens"}
    assert {e.fact for e in found if e.sample > 1} == {"trained"} and np.isfinite(step["loss"])


def spoil(store: Any, episode: Any, field: str) -> None:
    """Put a value that no model can have sampled into the last turn of a stored episode."""
    turn = episode.turns[-1]
    tokens = episode.tokens.slice(turn.start, turn.end)
    values = getattr(tokens, field).copy()
    values[0] = 5_000_000 if field == "ids" else 3.0
    store.episodes.add_turn(episode.id, turn, replace(tokens, **{field: values}))
    store.flush()
