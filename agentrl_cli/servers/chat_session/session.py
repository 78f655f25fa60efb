"""A conversation with a policy and its tools, in which the user may also act as the model or a tool.

The conversation's state is in conversation.py, the requests in child.py, the screen in tui/.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.analysis.whatif import (
    ReplayResult,
    chain_to,
    marked,
    opened,
    rescore,
    results_of,
    step_of,
    turns_before,
    was_cut,
)
from agentrl_cli.chat.images import pictured
from agentrl_cli.envs.tool_env import AssistantTurn, Env, ToolEnv
from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.servers.chat_session.conversation import (
    Answer,
    Approve,
    Conversation,
    Emit,
    failed_run,
)
from agentrl_cli.store import Store
from agentrl_cli.types import (
    Episode,
    Message,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Task,
    Tokens,
    ToolCall,
    ToolResult,
    new_id,
)
from agentrl_cli.types.content import with_text

__all__ = ["SETTINGS", "Answer", "Approve", "Emit", "Session"]

FAILED_RUN = 3
"""Turns in a row without a call that can be run, after which the model is stopped."""
LONGEST_NOTE = 500
"""Maximum characters of a call by hand, with its result, in the saved episode's note."""
SETTINGS = ("max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p")
"""Sampling settings that a chat can change."""


@dataclass
class Session(Conversation):
    """The actions of a user, or of a what-if, in a conversation."""

    @property
    def _awaits_environment(self) -> bool:
        """True if the last turn is the assistant's, so that the user or a tool comes next."""
        return bool(self.turns) and self.turns[-1].role == "assistant"

    async def begin(self, prompt: Sequence[Message]) -> None:
        """Prepares the environment. `prompt` opens the conversation; if it ends with a user message, the model answers.

        A task's prompt comes from its environment, with the tools' opening texts.
        """
        said = await opened(self.env, self.task)
        self._opening = said if list(prompt) == list(self.task.prompt) else list(prompt)
        if prompt and prompt[-1].get("role") == "user":
            messages, self._opening = self._opening, []
            self._open(messages)
            await self.reply()

    async def start(self, task: Task, make: Callable[[], Env]) -> None:
        """Leaves the conversation and begins that of another task, as an episode of its own.

        Raises as `make` does, with the old conversation in place.
        """
        env = make()
        await self.policy.release(self.id)
        await self.env.close()
        self.env, self.remake, self.task = env, None if isinstance(env, ToolEnv) else make, task
        self.turns, self.parts, self.messages, self._opening = [], [], [], []
        self.by_hand, self._earned, self._marks = [], [], []
        self.reward_parts, self.over, self._tries = (), False, 0
        self.parent, self.places, self.id, self.started = None, (), new_id(), time.time()
        self.emit({"ev": "cut", "turns": 0})
        await self.begin(task.prompt)

    async def resume(
        self, episode: Episode, turn: int, *, there: ReplayResult | None = None
    ) -> ReplayResult:
        """Starts from the turns of a stored episode before turn `turn`; its tool calls run again for their effects.

        Token ids are the stored ones; results whose calls answer otherwise now are marked. `there`: the world is
        in that state already, and nothing is run. Raises UsageError if it is not the model's turn there.
        Of an episode that branches, the turns before it are those on its path.
        """
        episode, turn, self.places = chain_to(episode, turn)
        if there is None:
            await opened(self.env, self.task)
        else:
            self._adopt(there)
        self.turns, self.parts = turns_before(episode, turn)
        self.messages = [message for item in self.turns for message in item.messages]
        world = there or await self._rerun(episode, turn)
        self.turns = marked(self.turns, world.reruns)
        self.parent = episode.with_(
            turns=(*self.turns, *episode.turns[len(self.turns) :])
        )  # see `branch`
        for item, part in zip(self.turns, self.parts, strict=True):
            self.emit({"ev": "turn", "turn": item, "tokens": part})
        return world

    async def user(self, text: str) -> None:
        """Appends a user message, then the model answers and calls tools."""
        if self.turns and not self._awaits_environment:
            raise UsageError(
                "It is the model's turn.",
                hint="/retry lets it answer, /as-model answers in its place.",
            )
        self._marks.append(len(self.turns))
        message: Message = {"role": "user", "content": text}
        if not self.turns:
            opening = list(self._opening)
            if (
                opening and opening[-1].get("role") == "user"
            ):  # a tool's opening text: one message with it
                message["content"] = with_text(opening.pop()["content"], text)
            self._open([*opening, message])
        else:
            self.env.heard(self._last_answer, [message])
            self._extend([message])
        self.over = False
        await self.reply()

    async def ask_user(self) -> None:
        """Lets the environment answer the model's last turn once, if it can; then the model continues."""
        if not self.env.talks:
            raise UsageError(
                "This chat has no simulated user.", hint="Use a pack with one, and --task ID."
            )
        if not self._awaits_environment or self.turns[-1].calls:
            raise UsageError("It is not the user's turn.")
        self._marks.append(len(self.turns))
        if await self._environment_answers(self._last_answer):
            await self.reply()

    async def reply(self) -> None:
        """Samples turns until the environment has no answer, or `max_turns` is reached."""
        for _ in range(self.max_turns):
            generation, forced = await self._sample()
            parsed = self._append_answer(generation, forced)
            if not parsed.calls and not (self.simulate and self.env.talks):
                return
            if was_cut(generation.stop_reason):
                if parsed.calls:
                    self.emit(
                        {
                            "ev": "note",
                            "text": "the turn was cut off, so its calls are not run: /retry, /set",
                        }
                    )
                return
            if not await (
                self._run_tools(parsed) if parsed.calls else self._environment_answers(parsed)
            ):
                return
            if failed_run(self.turns) >= FAILED_RUN:
                why = f"stopped: {FAILED_RUN} turns in a row without a call that can be run"
                self.emit(
                    {
                        "ev": "note",
                        "text": f"{why}. /as-model shows it how, /call runs a tool by hand, /undo",
                    }
                )
                return
        self.emit(
            {
                "ev": "note",
                "text": f"stopped after {self.max_turns} turns; say something to continue",
            }
        )

    async def as_model(self, text: str) -> None:
        """The user writes the assistant turn; its calls are run, then the model continues."""
        if self._awaits_environment:
            await self._drop_after("user")  # replaces an answer that the model has already given
        if not self.turns:
            raise UsageError("It is the user's turn.", hint="Say something first.")
        self._marks.append(len(self.turns))
        ids = self.chat.assistant_ids(text, self.env.schemas)
        tokens = Tokens.given(ids, [Origin.FORCED] * len(ids))
        parsed = self.chat.parse(ids, self.env.schemas, turn=self._answers)
        self._turn(
            "assistant", (parsed.message,), tokens, calls=parsed.calls, stop_reason=StopReason.STOP
        )
        self.messages.append(parsed.message)
        if parsed.calls and await self._run_tools(
            AssistantTurn(parsed.content, parsed.calls, self._answers)
        ):
            await self.reply()

    async def as_tool(self, text: str) -> None:
        """The user answers the calls of the last assistant turn, then the model continues."""
        await self._drop_after("assistant", calls=True)
        last = self.turns[-1] if self.turns else None
        if last is None or last.role != "assistant" or not last.calls:
            raise UsageError(
                "No tool call is waiting for an answer.",
                hint="/undo returns to one; or use --approve.",
            )
        self._marks.append(len(self.turns))
        self._answer(last.calls, tuple(ToolResult(text) for _ in last.calls))
        await self.reply()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Calls a tool by hand in the conversation's current state; the model does not see it, `save` stores it."""
        known = [str(schema["function"]["name"]) for schema in self.env.schemas]
        if name not in known:
            raise NotFound.of("tool", name, known)
        calls = (ToolCall("by_hand", name, arguments, ""),)
        results = results_of(await step_of(self.env, AssistantTurn("", calls, self._answers)))
        result = results[0] if results else ToolResult("")
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        said = " ".join((result.error or "", *result.text.split())).strip()
        self.by_hand.append(
            (len(self.turns), f"{name}({given}) → {said}"[:LONGEST_NOTE].replace("\n", " "))
        )
        return result

    async def retry(self) -> None:
        """Removes the model's last answer and samples it again, with another seed.

        If it is already the model's turn, for instance after `resume`, nothing is removed.
        """
        if self.turns and not self._awaits_environment:
            self._tries += 1
            self._marks.append(len(self.turns))
            await self.reply()
            return
        keep = len(self.turns)
        while keep and self.turns[keep - 1].role != "user":
            keep -= 1
        if not keep:
            raise UsageError("There is nothing to answer yet.")
        await self._cut(keep)
        self._tries += 1
        await self.reply()

    async def undo(self) -> int:
        """Undoes everything since the user's last action; returns the number of turns left.

        The environment rolls back, too; a tool's effects outside the sandbox remain, and a note reports that.
        """
        if not self._marks:
            raise UsageError("There is nothing to undo.")
        await self._cut(self._marks.pop())
        return len(self.turns)

    async def score(self) -> tuple[RewardPart, ...]:
        """Return the reward parts of pack and environment for the conversation so far. Raises UsageError without a
        task.
        """
        if self.agent and not self.rewards:
            raise UsageError(
                f"The reward of {self.task.pack} is given by its agent {self.agent}, which a chat does not run.",
                hint="`agentrl rollout` does; /reward X gives one of your own.",
            )
        if not self.task.data or not self.rewards:
            raise UsageError(
                "This chat has no task to score by.", hint="Open one with `agentrl chat --task ID`."
            )
        self.reward_parts = await rescore(
            self.episode(), self.rewards, self.env, self.task, sandboxed=self.sandboxed, weights=self.weights,
            earned=self.earned, decode=self.chat.tokenizer.plain,
        )  # fmt: skip
        return self.reward_parts

    def give(self, value: float) -> tuple[RewardPart, ...]:
        """Sets the user's own score as the primary part."""
        self.reward_parts = (
            RewardPart("person", value, 1.0, primary=True, detail="given in chat"),
        )
        return self.reward_parts

    def save(self, store: Store) -> str:
        """Stores the conversation as an episode of kind `chat`; saving again replaces it. Returns its id."""
        tokenizer = self.chat.tokenizer
        store.tokenizers.add(
            tokenizer.hash, tokenizer.json, tokenizer.chat_template or "", dict(tokenizer.specials)
        )
        episode = self.episode()
        primary = episode.primary
        outcome = (
            Outcome.CANCELLED
            if primary is None
            else Outcome.SOLVED
            if primary >= 1
            else Outcome.FAILED
        )
        error = "an unscored chat" if primary is None else ""
        store.episodes.finish(
            episode.with_(outcome=outcome, error=error, ended=time.time()),
            split="chat",
            tokenizer=tokenizer.hash,
        )
        self._keep_by_hand(store)
        return self.id

    def _keep_by_hand(self, store: Store) -> None:
        """Write the calls by hand into the episode's note, beside the user's own note."""
        text = "\n".join(f"by hand before turn {turns}: {text}" for turns, text in self.by_hand)
        kept = store.episodes.row(self.id).note
        rest = "\n".join(
            line for line in kept.splitlines() if not line.startswith("by hand before turn ")
        )
        note = "\n".join(filter(None, (rest, text)))
        if note != kept:
            store.marks.note(self.id, note)

    async def _drop_after(self, role: str, *, calls: bool = False) -> None:
        """Drops all turns after the last one of a role (with calls); without such a turn, drops nothing."""
        fits = [
            n
            for n, turn in enumerate(self.turns)
            if turn.role == role and (turn.calls or not calls)
        ]
        if fits and fits[-1] + 1 < len(self.turns):
            await self._cut(fits[-1] + 1)

    def _open(self, messages: list[Message]) -> None:
        self.messages, images = pictured(messages, (), self.chat.images, self.folder)
        self._append(
            self.chat.prompt(self.messages, self.env.schemas), self.messages, images=images
        )
