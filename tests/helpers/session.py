"""A chat's session over an environment, what-ifs, and a scripted model or any other policy for them."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_cli import ByteTokenizer, Chat, Config, Env, Policy, Reward, ScriptedPolicy
from agentrl_cli.chat_session.conversation import Approve
from agentrl_cli.chat_session.open import NO_PACK
from agentrl_cli.chat_session.session import Session
from agentrl_cli.chat_session.whatif import run
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.types import Message, Task


def open_chat(
    model: Sequence[str] | Policy,
    env: Env,
    *,
    chat: Chat | None = None,
    task: Task | None = None,
    prompt: Sequence[Message] = (),
    rewards: Sequence[Reward] = (),
    approve: Approve | None = None,
    sandbox: Sandbox | None = None,
) -> tuple[Session, list[dict[str, Any]]]:
    """Return a session and the list that its events go to; `model` is a policy, or its replies."""
    chat = chat or Chat(ByteTokenizer())
    policy: Any = model if hasattr(model, "generate") else ScriptedPolicy(model, chat.tokenizer)
    config, events = Config(), list[dict[str, Any]]()
    config.rollout.max_new_tokens = 500
    pack = replace(NO_PACK, rewards=tuple(rewards))
    rollout = Rollout(policy, chat, {pack.name: pack}, config, sandbox=sandbox)
    job = Job(task or Task("t/1", "t", "", "chat", tuple(prompt)), 0, kind="chat")
    made = Session(rollout.context, pack, job, env, events.append)
    made.options.approve = approve
    return made, events


def scripted(folder: Path, *replies: str) -> list[str]:
    """Options for a model that says this."""
    path = folder / "script.json"
    path.write_text(json.dumps(replies))
    return ["--model", "scripted", "--script", str(path)]


async def what_if(db: Path, episode: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and events of a what-if."""
    out = io.StringIO()
    status = await run(["--db", str(db), "--episode", episode, *arguments], out)
    return status, [json.loads(line) for line in out.getvalue().splitlines()]
