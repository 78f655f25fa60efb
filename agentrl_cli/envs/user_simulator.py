"""Simulated users: by rule, by script, by a model.

An interaction is asked when an assistant turn calls no tool. It serves one episode: `Maker` makes a new one for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from agentrl_cli.errors import EnvError
from agentrl_cli.hooks.threads import call
from agentrl_cli.rewards.llm_client import Asked, ask
from agentrl_cli.types import Message, Task


class Reply(NamedTuple):
    """A simulated user's answer."""

    text: str | None
    """None: no answer, and the episode ends."""
    reward: float | None = None
    """Reward of the assistant's turn."""
    done: bool = False
    """True if the episode ends after `text`, which is still shown."""


class Interaction(Protocol):
    """A simulated user. `reply` may also return (text, reward).

    With the class attribute `restarts = True`, `stop` and `start` reset it fully and it has no outside effects, so a
    chat can undo its answers; with `stateless = True`, earlier questions need not be repeated either.
    """

    async def start(self, task: Task) -> None:
        """Begin an episode."""
        return

    async def reply(self, messages: Sequence[Message]) -> Reply | tuple[str | None, float | None]:
        """Answer the conversation, whose last message is the assistant's."""

    async def stop(self) -> None:
        """Free everything; by default nothing."""
        return


Maker = Callable[[], Interaction]


def kwargs_of(task: Task, name: str = "interaction_kwargs") -> Mapping[str, Any]:
    """Return a mapping of a row by its name, at its top or in `extra_info`; an empty one without it."""
    extra = task.data.get("extra_info")
    inner = extra.get(name) if isinstance(extra, Mapping) else None
    found = task.data.get(name) or inner
    return found if isinstance(found, Mapping) else {}


class Scripted(Interaction):
    """Replies with the given texts in order, then ends. `reward`: for each turn."""

    restarts = True

    def __init__(self, script: Sequence[str], reward: float | None = None) -> None:
        self.script = list(script)
        self.reward = reward
        self._said = 0

    async def start(self, task: Task) -> None:
        self._said = 0

    async def reply(self, messages: Sequence[Message]) -> Reply:
        self._said += 1
        text = self.script[self._said - 1] if self._said <= len(self.script) else None
        return Reply(text, self.reward)


class Ruled(Interaction):
    """Calls a function of (messages, task) that returns a Reply, a text, (text, reward) or None; sync in a thread."""

    restarts = stateless = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._task: Task | None = None

    async def start(self, task: Task) -> None:
        self._task = task

    async def reply(self, messages: Sequence[Message]) -> Reply:
        answer = await call(self.function, messages, self._task)
        if answer is None or isinstance(answer, str):
            return Reply(answer)
        return answer if isinstance(answer, Reply) else Reply(*answer)


class Simulated(Interaction):
    """A user played by a model behind an OpenAI-compatible endpoint.

    The roles are swapped: the agent's messages are the model's user messages. An answer with `stop_word` ends the
    conversation. `interaction_kwargs.goal` of the row is added to the persona. An unreachable model is an EnvError:
    the episode is masked, not scored.
    """

    restarts = stateless = True

    def __init__(self, asked: Asked, persona: str, *, stop_word: str = "[DONE]") -> None:
        self.asked = asked
        self.persona = persona
        self.stop_word = stop_word
        self._system = ""

    async def start(self, task: Task) -> None:
        goal = kwargs_of(task).get("goal")
        end = f"When you have what you want, answer {self.stop_word}."
        self._system = "\n".join(
            filter(None, [self.persona, f"Your goal: {goal}" if goal else "", end])
        )

    async def reply(self, messages: Sequence[Message]) -> Reply:
        swapped = {"assistant": "user", "user": "assistant"}
        said: list[Message] = [
            {"role": swapped[message["role"]], "content": message["content"]}
            for message in messages
            if message["role"] in swapped and message.get("content")
        ]
        text = (await ask(self.asked, [{"role": "system", "content": self._system}, *said])).strip()
        if self.stop_word in text:
            return Reply(text.replace(self.stop_word, "").strip() or None, done=True)
        return Reply(text)


class GuessNumber(Interaction):
    """Guess-the-number: answers `higher` or `lower`; the number is worth 1.

    The row has `secret`, `low` and `high`. A turn is worth 0.1 if the guess lies inside the remaining interval, else
    −0.1, as for a text without a number.
    """

    restarts = True

    def __init__(self) -> None:
        self.low = self.high = self.secret = 0

    async def start(self, task: Task) -> None:
        data = {**task.data, **kwargs_of(task)}
        try:
            self.low, self.high, self.secret = (
                int(data[name]) for name in ("low", "high", "secret")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EnvError(
                f"The row {task.id} lacks low, high or secret as numbers: {error}"
            ) from error

    async def reply(self, messages: Sequence[Message]) -> Reply:
        numbers = re.findall(r"-?\d+", str(messages[-1].get("content") or ""))
        if not numbers or len(numbers[-1]) > 99:  # int() refuses thousands of digits
            return Reply("Guess a number.", -0.1)
        guess = int(numbers[-1])
        if guess == self.secret:
            return Reply(None, 1.0, True)
        inside = self.low <= guess <= self.high
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return Reply("higher" if guess < self.secret else "lower", 0.1 if inside else -0.1)


class Gsm8k(Interaction):
    """Replies that an answer is wrong and lets the model retry, `tries` times; 1 for a right turn, else 0.

    The right answer is `interaction_kwargs.ground_truth`, or the row's `ground_truth` or `answer`. A turn's answer is
    the number after `####`, else its last number.
    """

    restarts = True
    WRONG = (
        "Your answer is not right. Check your steps, then answer again, with the number after ####."
    )

    def __init__(self, tries: int = 3) -> None:
        self.tries = tries
        self._left, self._truth = tries, ""

    async def start(self, task: Task) -> None:
        self._left = self.tries
        truth = kwargs_of(task).get(
            "ground_truth", task.data.get("ground_truth", task.data.get("answer"))
        )
        if truth is None:
            raise EnvError(f"The row {task.id} has no ground_truth.")
        self._truth = str(truth)

    async def reply(self, messages: Sequence[Message]) -> Reply:
        from agentrl_cli.rewards.rules import final_number, same_number

        self._left -= 1
        if same_number(final_number(str(messages[-1].get("content") or "")), self._truth):
            return Reply(None, 1.0, True)
        return Reply(self.WRONG if self._left > 0 else None, 0.0, self._left <= 0)


INTERACTIONS: dict[str, str] = {
    "guess_number": "agentrl_cli.envs.user_simulator:GuessNumber",
    "gsm8k": "agentrl_cli.envs.user_simulator:Gsm8k",
}
"""Name to the class of an interaction that ships."""
