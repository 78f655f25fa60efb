"""The actions of a person in a chat, who may also act as the model or as a tool, and the tasks that it offers.

The requests are in child.py, the screen in tui/.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_cli.chat_session.conversation import (
    Conversation,
    Emit,
    MakeEnv,
    Options,
    tool_messages,
)
from agentrl_cli.chat_session.rerun import BY_PERSON, open_world, results_of, step_of
from agentrl_cli.envs.tool_env import AssistantTurn, Env, as_env_error
from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.job import Job
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack
from agentrl_cli.types import (
    Message,
    Outcome,
    RewardPart,
    Task,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
    group_pairs,
)
from agentrl_cli.types.content import content_text, with_text

LONGEST_NOTE = 500
"""Maximum characters of a call by hand, with its result, in the saved episode's note."""
BY_HAND = "by hand before turn "
SETTINGS = ("max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p")
"""Sampling settings that a chat can change."""


class Session:
    """A chat: one conversation, and a person's actions in it."""

    def __init__(
        self,
        context: RolloutContext,
        pack: Pack,
        job: Job,
        env: Env,
        emit: Emit,
        make_env: MakeEnv | None = None,
    ) -> None:
        """`make_env` makes the environment of another task, or a new one if this one cannot roll back."""
        self.emit, self.make_env, self.options = emit, make_env, Options()
        self.talk = Conversation(context, pack, job, env, emit, self.options, make_env)
        self._reset()

    def _reset(self) -> None:
        self.reward_parts: tuple[RewardPart, ...] = ()
        self.by_hand: list[tuple[int, str]] = []
        """(turns before it, text) of the user's own calls; the model sees none of them."""
        self._marks: list[int] = []
        self._opening: list[Message] = []

    @property
    def turns(self) -> list[Turn]:
        return self.talk.turns

    async def begin(self) -> None:
        """Prepare the environment. If the task's prompt ends with a user message, the model answers."""
        task = self.talk.job.task
        self._opening = await open_world(self.talk.env, task)
        if task.prompt and task.prompt[-1].get("role") == "user":
            messages, self._opening = self._opening, []
            self.talk.open(messages)
            await self.talk.reply()

    async def start(self, task: Task) -> None:
        """Leave the conversation and begin that of another task, as an episode of its own.

        Raises as `make_env` does, with the old conversation in place.
        """
        assert self.make_env is not None
        env, old = await self.make_env(task), self.talk
        await old.close()
        job = replace(old.job, task=task)
        self.talk = Conversation(
            old.context, old.pack, job, env, self.emit, self.options, self.make_env
        )
        self._reset()
        self.emit({"ev": "cut", "turns": 0})
        await self.begin()

    async def user(self, text: str) -> None:
        """Append a user message, then the model answers and calls tools."""
        if self.turns and not self.talk.answered_last:
            raise UsageError(
                "It is the model's turn.",
                hint="/retry lets it answer, /as-model answers in its place.",
            )
        self._mark()
        message: Message = {"role": "user", "content": text}
        if self.turns:
            self.talk.answer([message])
        else:
            opening = list(self._opening)
            if opening and opening[-1].get("role") == "user":  # a tool's opening text: one message
                message["content"] = with_text(opening.pop()["content"], text)
            self.talk.open([*opening, message])
        await self.talk.reply()

    async def ask_user(self) -> None:
        """Let the environment answer the model's last turn once, if it can; then the model continues."""
        if not self.talk.env.talks:
            raise UsageError(
                "This chat has no simulated user.", hint="Use a pack with one, and --task ID."
            )
        if not self.talk.answered_last or self.turns[-1].calls:
            raise UsageError("It is not the user's turn.")
        self._mark()
        if await self.talk.ask_world(self.talk.last_answer):
            await self.talk.reply()

    async def as_model(self, text: str) -> None:
        """Append the user's text as the assistant's turn; its calls are run, then the model continues."""
        if self.talk.answered_last:
            await self._drop_after("user")  # replaces an answer that the model has already given
        if not self.turns:
            raise UsageError("It is the user's turn.", hint="Say something first.")
        self._mark()
        self.talk.write(text)
        if self.talk.parsed.calls and await self.talk.run_tools():
            await self.talk.reply()

    async def as_tool(self, text: str) -> None:
        """Answer the calls of the last assistant turn with the user's text; then the model continues."""
        await self._drop_after("assistant", calls=True)
        if not self.talk.answered_last or not self.turns[-1].calls:
            raise UsageError(
                "No tool call is waiting for an answer.",
                hint="/undo returns to one; or use --approve.",
            )
        self._mark()
        calls = self.turns[-1].calls
        results = tuple(ToolResult(text, metrics={BY_PERSON: 1.0}) for _ in calls)
        self.talk.answer(tool_messages(calls, results), results)
        await self.talk.reply()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool by hand in the conversation's current state; the model does not see it, `save` stores it."""
        known = [str(schema["function"]["name"]) for schema in self.talk.env.schemas]
        if name not in known:
            raise NotFound.of("tool", name, known)
        calls = (ToolCall("by_hand", name, arguments, ""),)
        step = await step_of(self.talk.env, AssistantTurn("", calls, self.talk.transcript.answers))
        result = next(iter(results_of(step)), ToolResult(""))
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        said = " ".join((result.error or "", *result.text.split())).strip()
        text = f"{name}({given}) → {said}"[:LONGEST_NOTE].replace("\n", " ")
        self.by_hand.append((len(self.turns), text))
        return result

    async def retry(self) -> None:
        """Remove the model's last answer and sample it again, with another seed.

        If it is already the model's turn, for instance after `resume`, nothing is removed.
        """
        if self.turns and not self.talk.answered_last:
            self._mark()
        elif any(turn.role == "user" for turn in self.turns):
            await self._drop_after("user")
        else:
            raise UsageError("There is nothing to answer yet.")
        self.talk.tries += 1
        await self.talk.reply()

    async def undo(self) -> int:
        """Undo everything since the user's last action. Returns the number of turns left.

        The environment rolls back, too; a tool's effects outside the sandbox remain, and a note reports that.
        """
        if not self._marks:
            raise UsageError("There is nothing to undo.")
        await self._drop(self._marks.pop())
        return len(self.turns)

    async def score(self) -> tuple[RewardPart, ...]:
        """Return the reward parts of pack and environment for the conversation so far.

        Raises UsageError without a task.
        """
        task, pack = self.talk.job.task, self.talk.pack
        if pack.agent is not None and not pack.rewards:
            raise UsageError(
                f"The reward of {task.pack} is given by its agent {pack.agent.text}, which a chat does not run.",
                hint="`agentrl rollout` does; /reward X gives one of your own.",
            )
        if not task.data or not pack.rewards:
            raise UsageError(
                "This chat has no task to score by.", hint="Open one with `agentrl chat --task ID`."
            )
        try:
            self.reward_parts = await self.talk.grade()
        except Exception as error:
            raise as_env_error(error) from error
        return self.reward_parts

    def give(self, value: float) -> tuple[RewardPart, ...]:
        """Set the user's own score as the primary part."""
        self.reward_parts = (
            RewardPart("person", value, 1.0, primary=True, detail="given in chat"),
        )
        return self.reward_parts

    def _mark(self) -> None:
        """Remember where /undo rolls back to."""
        self._marks.append(len(self.turns))
        self.reward_parts, self.talk.cut = (), None

    async def _drop_after(self, role: str, *, calls: bool = False) -> None:
        """Drop all turns after the last one of a role (with calls); without such a turn, drop nothing."""
        fits = [
            n
            for n, turn in enumerate(self.turns)
            if turn.role == role and (turn.calls or not calls)
        ]
        if fits and fits[-1] + 1 < len(self.turns):
            await self._drop(fits[-1] + 1)

    async def _drop(self, keep: int) -> None:
        """Drop all turns from `keep` on, and the actions in them."""
        self.reward_parts = ()
        self._marks = [mark for mark in self._marks if mark < keep]
        self.by_hand = [(turns, said) for turns, said in self.by_hand if turns <= keep]
        await self.talk.drop(keep)


def save(session: Session, store: Store) -> str:
    """Store a conversation as an episode of kind `chat`; saving again replaces it. Returns its id."""
    tokenizer = session.talk.context.chat.tokenizer
    store.tokenizers.add(
        tokenizer.hash, tokenizer.json, tokenizer.chat_template or "", dict(tokenizer.specials)
    )
    episode = session.talk.episode().with_(reward_parts=session.reward_parts)
    primary = episode.primary
    outcome = Outcome.SOLVED if primary is not None and primary >= 1 else Outcome.FAILED
    error = ""
    if primary is None:
        outcome, error = Outcome.CANCELLED, "an unscored chat"
    ended = episode.with_(outcome=outcome, error=error, ended=time.time())
    # First without its turns: of those that were saved before, `finish` keeps each that is as long now.
    both = ended.with_(turns=(), tokens=Tokens.empty()), ended
    store.episodes.add(both, split="chat", tokenizer=tokenizer.hash)
    kept = store.episodes.row(episode.id).note
    lines = [line for line in kept.splitlines() if not line.startswith(BY_HAND)]
    lines += [f"{BY_HAND}{turns}: {text}" for turns, text in session.by_hand]
    if (note := "\n".join(lines)) != kept:
        store.marks.note(episode.id, note)
    return episode.id


OFFERED = 3
WIDTH = 200
"""Characters of a task's question that are sent."""


@dataclass
class Choices:
    """The tasks of a pack, and those offered last."""

    tasks: Sequence[Task]
    offered: list[Task] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def offer(self) -> list[dict[str, Any]]:
        """Return three tasks, of different families if there are some, as number, id and question."""
        pool = self._random.sample(list(self.tasks), len(self.tasks))
        families = group_pairs((task.family, task) for task in pool)
        turns = [
            group[place]
            for place in range(OFFERED)
            for group in families.values()
            if place < len(group)
        ]
        self.offered = turns[:OFFERED]
        return [
            {
                "number": number,
                "id": short(task),
                "text": " ".join(content_text(task.prompt[-1]["content"]).split())[:WIDTH],
            }
            for number, task in enumerate(self.offered, 1)
        ]

    def find(self, wanted: str) -> Task:
        """Return a task by its number among those offered last, or its id. Raises NotFound."""
        if wanted.isdecimal() and 1 <= int(wanted) <= len(self.offered):
            return self.offered[int(wanted) - 1]
        for task in self.tasks:
            if wanted in (task.id, short(task)):
                return task
        raise NotFound.of("task", wanted, [short(task) for task in self.tasks])


def short(task: Task) -> str:
    """Return a task's id without its pack."""
    return task.id.partition("/")[2] or task.id
