"""A pack of a few files, played by a scripted model."""

import json
from pathlib import Path
from typing import Any

from agentrl_cli import Config, Episode, Pack, ScriptedPolicy, Store, load_pack
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import Sandbox
from tests.helpers.chat import CHAT

TASK = '''
def right(episode, ctx):
    return float(ctx.final_text.endswith("5"))

REWARDS = {"right": right}

def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: One.
        b: Other.
    """
    return a + b
'''


def pack(folder: Path, spec: dict[str, Any], rows: list[dict[str, Any]], **files: str) -> Pack:
    (folder / "data").mkdir()
    (folder / "task.py").write_text(TASK + files.pop("task", ""))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    whole = {"name": "p", "sandbox": False, "rewards": {"right": {"primary": True}}, **spec}
    (folder / "task.yaml").write_text(json.dumps(whole))
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_pack(folder)


async def play(
    made: Pack,
    said: list[str],
    *,
    store: Store | None = None,
    sandbox: Sandbox | None = None,
    **settings: Any,
) -> Episode:
    config = Config()
    config.rollout.max_tokens = 20_000
    for key, value in settings.items():
        setattr(config.rollout, key, value)
    policy, packs = ScriptedPolicy(said, CHAT.tokenizer), {made.name: made}
    rollout = Rollout(policy, CHAT, packs, config, store=store, sandbox=sandbox)
    return await rollout.episode(Job(made.tasks("train")[0], 1))


def answers(episode: Episode) -> list[str]:
    return [
        str(turn.messages[0]["content"]) for turn in episode.turns if turn.role in ("tool", "user")
    ][1:]


def row(**more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "2 + 3?"}], **more}
