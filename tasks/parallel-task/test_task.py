"""Run with `pytest`: the pack is whole, and its rewards say what they should. Extend it as you edit the pack."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from agentrl_cli import Config, load_pack
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job, Rollout

PACK = load_pack(Path(__file__).parent)


def test_rows_solutions_and_empty_answers() -> None:
    assert asyncio.run(check_pack(PACK, None)) == []


def test_one_turn_earns_more_than_two() -> None:
    task = PACK.tasks("train")[0]
    rewards = []
    for rate in (1.0, 0.0):
        chat = Chat(ByteTokenizer())
        config = Config()
        config.rollout.max_tokens = 20_000
        messages = PACK.module.demonstrate(task.data, random.Random(0), rate)
        said = [chat.assistant_text(m, PACK.schemas) for m in messages if m["role"] == "assistant"]
        rollout = Rollout(ScriptedPolicy(said, chat.tokenizer), chat, {PACK.name: PACK}, config)
        rewards.append(asyncio.run(rollout.episode(Job(task, 0))).reward)
    assert rewards == [1.5, 1.0]
