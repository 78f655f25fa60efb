"""Serves packs as an OpenEnv environment: its server, routes and sessions are the package's own.

A session plays one episode after the other. `reset` takes the task at `seed` (or at `index`) of `split`; a step is a
call of a tool, and the tool `answer` a turn without one. Limits, grading and the end are those of a rollout.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from agentrl_cli.chat.parse import Parsed, call_id
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.errors import UsageError
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.loop import LoopAttempt
from agentrl_cli.rollout.parts import Parts
from agentrl_cli.tasks import Pack
from agentrl_cli.types import (
    AgentState,
    Episode,
    Message,
    Origin,
    StopReason,
    Task,
    Tokens,
    ToolCall,
    ToolSchema,
)
from agentrl_cli.types.content import content_text

UNLIMITED = 1 << 40
"""Tokens of an episode: the client's model has limits of its own."""
SAY = "answer"
ANSWER: ToolSchema = {
    "type": "function",
    "function": {
        "name": SAY,
        "description": "Say a text. It ends the episode and is graded, unless a user answers it.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "What you say."}},
            "required": ["text"],
        },
    },
}
"""The tool that is a turn without a call."""


class Played(LoopAttempt):
    """An episode whose turns come from a client."""

    def __init__(self, context: RolloutContext, pack: Pack, job: Job) -> None:
        super().__init__(context, pack, job)
        self.most = UNLIMITED
        self._turn: asyncio.Future[Parsed] | None = None
        self._asked = asyncio.Event()
        self._heard = 0
        self.running = asyncio.create_task(self.run())

    async def generate(self) -> AgentState:
        """Wait for the client's turn and append it."""
        self._turn = asyncio.get_running_loop().create_future()
        self._asked.set()
        with self.clock.pause(), waiting("the client's turn"):
            parsed = await self._turn
        ids = self.context.chat.assistant_ids(parsed.message, self.env.schemas)
        tokens = Tokens.from_ids(ids, [Origin.FORCED] * len(ids))
        return self._say(parsed, tokens, StopReason.STOP)

    def _check(self, new: Sequence[Message], delta_ids: Sequence[int]) -> None:
        """Skip the drift guard: these tokens are only a record."""

    def take(self, name: str, arguments: dict[str, Any]) -> None:
        """Take a turn. Raises ValueError once the episode is over."""
        if self._turn is None or self._turn.done() or self.running.done():
            raise ValueError("The episode is over, or has not begun: reset.")
        done = self.transcript.answers
        if name == SAY:
            text = str(arguments.get("text", ""))
            parsed = Parsed(text, (), {"role": "assistant", "content": text})
        else:
            call = ToolCall(call_id(done, 0), name, arguments, json.dumps(arguments))
            function = {"name": name, "arguments": arguments}
            asked = {"id": call.id, "type": "function", "function": function}
            message: Message = {"role": "assistant", "content": "", "tool_calls": [asked]}
            parsed = Parsed("", (call,), message)
        self._asked.clear()
        self._turn.set_result(parsed)

    async def hear(self) -> tuple[list[Message], Episode | None]:
        """Return what was said to the client since its turn, and the episode if that ended it."""
        asked = asyncio.ensure_future(self._asked.wait())
        await asyncio.wait({asked, self.running}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        new = self.transcript.messages[self._heard :]
        self._heard += len(new)
        ended = self.running.result().episode if self.running.done() else None
        return [one for one in new if one["role"] != "assistant"], ended


TAKEN = {"reset", "step", "state", "close", SAY}
"""Names that no tool of a pack can have here: those of the protocol, and the one that answers."""


def _types() -> Any:
    """Return the package's module of actions and observations, which only a server needs."""
    return importlib.import_module("openenv.core.env_server.mcp_types")


class PackEnvironment:
    """A session of the server; `make_app` makes it an `Environment` of the package."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, context: RolloutContext, tasks: dict[str, list[Task]]) -> None:
        super().__init__()
        self._context, self._tasks = context, tasks
        self._played: Played | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "train",
        index: int | None = None,
        **_: Any,
    ) -> Any:
        """Begin the episode of a task. Raises ValueError."""
        self.close()
        if not (rows := self._tasks.get(split)):
            raise ValueError(f"There are no tasks in {split!r}; splits: {', '.join(self._tasks)}.")
        place = seed or 0 if index is None else index
        if not isinstance(place, int):
            raise ValueError(f"`seed` and `index` are whole numbers, not {place!r:.40}.")
        task = rows[place % len(rows)]
        self._loop = asyncio.get_running_loop()
        self._played = Played(self._context, self._context.packs[task.pack], Job(task, seed or 0))
        messages, ended = await self._played.hear()
        if ended is not None:
            raise ValueError(f"The episode did not begin: {ended.error}")
        return _types().CallToolObservation(
            tool_name="reset", result=_text(messages), metadata={"messages": messages}
        )

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        """Take a turn. An episode that could not be graded is done without a reward. Raises ValueError."""
        types = _types()
        if isinstance(action, types.ListToolsAction):
            packs = self._context.packs.values()
            every = [schema for pack in packs for schema in pack.schemas]
            own = every if self._played is None else self._played.env.schemas
            return types.ListToolsObservation(tools=[*map(_tool, [*own, ANSWER])])
        if self._played is None:
            raise ValueError("Reset first.")
        self._played.take(action.tool_name, action.arguments)
        messages, ended = await self._played.hear()
        found = types.CallToolObservation(tool_name=action.tool_name, result=_text(messages))
        return found if ended is None else found.model_copy(update=_end(ended))

    def reset(self, **_: Any) -> Any:
        """Refuse: only `reset_async` is called."""
        raise NotImplementedError

    step = reset

    @property
    def state(self) -> Any:
        """Return the episode, its task and the number of turns."""
        from openenv.core.env_server import State

        if self._played is None:
            return State()
        episode, count = self._played.transcript.episode, self._played.transcript.answers
        return State(episode_id=episode.id, step_count=count, task=episode.task_id)

    def close(self) -> None:
        """End the episode. Another thread may call it."""
        if self._played is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._played.running.cancel)


def _text(messages: list[Message]) -> str:
    return "\n\n".join(filter(None, (content_text(one.get("content")) for one in messages)))


def _tool(schema: Any) -> Any:
    function = schema["function"]
    given = function.get("parameters") or {"type": "object", "properties": {}}
    return _types().Tool(
        name=function["name"], description=function["description"], input_schema=given
    )


def _end(episode: Episode) -> dict[str, Any]:
    """Return what the last observation says of an episode."""
    parts = {part.name: part.value for part in episode.reward_parts}
    about = {"outcome": str(episode.outcome), "rewards": parts, "error": episode.error}
    reward = episode.reward if episode.graded else None
    return {"done": True, "reward": reward, "metadata": about}


def make_app(parts: Parts, config: Config, most: int) -> Any:
    """Return the server of packs, which takes so many sessions at once. Raises UsageError, DataError."""
    from openenv.core.env_server import Environment, create_app

    types = _types()
    packs = parts.packs.values()
    for pack in packs:
        if pack.agent is not None:
            raise UsageError(f"The pack {pack.name} has an agent, which brings its own loop.")
        if taken := TAKEN & {tool.name for tool in pack.tools}:
            raise UsageError(f"The tool {taken.pop()} of {pack.name} has a name of the protocol.")
    splits = dict.fromkeys(split for pack in packs for split in pack.splits())
    tasks = {
        split: [task for pack in packs if split in pack.splits() for task in pack.tasks(split)]
        for split in splits
    }
    chat = Chat(ByteTokenizer())
    policy = ScriptedPolicy((), chat.tokenizer, context_length=UNLIMITED)
    rollout = Rollout(policy, chat, parts.packs, config, sandbox=parts.sandbox, hooks=parts.hooks)
    session: Any = type("PackSession", (PackEnvironment, Environment), {})
    return create_app(
        partial(session, rollout.context, tasks),
        types.CallToolAction,
        types.CallToolObservation,
        env_name="agentrl",
        max_concurrent_envs=most,
        mode="simulation",
    )
