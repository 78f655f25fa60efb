"""The example with the openai client, and the one of the docs; the other tests play the same loop with httpx2."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job
from agentrl_cli.tasks import Pack, load_pack
from agentrl_cli.types import Episode, Outcome
from tests.helpers.gateway import call

ROOT = Path(__file__).resolve().parent.parent.parent
CHAT = Chat(ByteTokenizer())

pytest.importorskip("openai", reason="the openai client is not installed")


async def first(pack: Pack, replies: list[str]) -> Episode:
    """An episode of a pack's first task, by a scripted model."""
    config = Config.model_validate({"rollout": {"max_tokens": 8000, "max_new_tokens": 200}})
    rollout = AgentRollout(ScriptedPolicy(replies, CHAT.tokenizer), CHAT, {pack.name: pack}, config)
    return await rollout.episode(Job(pack.tasks("train")[0], 0))


async def test_the_openai_client_makes_one_branch_and_is_graded() -> None:
    pack = load_pack(ROOT / "examples" / "math_agent")
    task = pack.tasks("train")[0]
    expression = re.sub(r"[^0-9+\-*/ ()]", "", str(task.prompt[-1]["content"])).strip()
    right = f"Answer: {task.data['answer']}"
    episode = await first(pack, [call("calculator", expression=expression), right])
    assert (episode.outcome, episode.reward, episode.linear) == (Outcome.SOLVED, 1.0, True), episode.error
    assert [turn.role for turn in episode.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert episode.turns[3].messages[0]["content"] == task.data["answer"]
    malformed = await first(pack, ["<tool_call>\n{not json\n</tool_call>", "I give up."])
    assert malformed.outcome is Outcome.FAILED and "Error" in str(malformed.turns[3].messages), malformed.error


async def test_the_page_about_agents_shows_one_that_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    code, pack = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "yaml"))
    assert code is not None and pack is not None
    (tmp_path / "data").mkdir()
    (tmp_path / "agent.py").write_text(code[1])
    (tmp_path / "task.yaml").write_text(pack[1])
    row: dict[str, Any] = {"id": "a", "prompt": "What is 2 + 2?", "answer": "4"}
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps(row))
    assert (await first(load_pack(tmp_path), ["It is 4."])).outcome is Outcome.SOLVED
