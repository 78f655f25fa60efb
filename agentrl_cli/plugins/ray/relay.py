"""The two ends of an episode's way: a worker's recorder, which sends, and its receiver, which records and assembles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agentrl_cli.chat.drift import Drift
from agentrl_cli.rollout.recorder import Recorder
from agentrl_cli.store.codec import dumps, loads
from agentrl_cli.types import AgentState, Episode, Tokens, ToolResult, Turn

Message = tuple[int, str, Any]
"""From a worker: the number of a call, `done`, `failed`, `beat` or a method of Recorder, its value or arguments."""


def head_of(episode: Episode) -> Episode:
    """Return an episode without its turns and tokens, which were sent before."""
    return episode.with_(turns=(), tokens=Tokens.concat([]))


def as_stored(turn: Turn) -> Turn:
    """Return a turn as the store would return it: values of tools and arguments that cannot be pickled stay here."""

    def plain(result: ToolResult) -> ToolResult:
        return replace(result, value=None, metrics=dict(result.metrics))

    calls = (replace(call, arguments=loads(dumps(call.arguments))) for call in turn.calls)
    messages, results = loads(dumps(turn.messages)), map(plain, turn.results)
    return replace(turn, messages=tuple(messages), calls=tuple(calls), results=tuple(results))


class Relay(Recorder):
    """The recorder of one call in a worker: each turn is sent once, when it is finished."""

    def __init__(self, number: int, emit: Callable[[Message], None]) -> None:
        self.number = number
        self.emit = emit
        self.sent: dict[int, Turn] = {}

    def start(self, episode: Episode, split: str, tokenizer: str) -> None:
        self._send("start", head_of(episode), split, tokenizer)

    def turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        self.sent[turn.index] = turn
        self._send("turn", episode_id, as_stored(turn), tokens)

    def live(self, episode_id: str, state: AgentState, turn: int, text: str) -> None:
        self._send("live", episode_id, state, turn, text)

    def drift(self, episode_id: str, drift: Drift) -> None:
        self._send("drift", episode_id, drift)

    def event(self, run_id: str | None, kind: str, data: Mapping[str, Any]) -> None:
        self._send("event", run_id, kind, loads(dumps(data)))

    def finish(self, episode: Episode) -> None:
        # A turn that was changed after it was sent (by a reward or a masked call) is another object: sent again.
        for turn in episode.turns:
            if self.sent.get(turn.index) is not turn:
                self.turn(episode.id, turn, episode.tokens.slice(turn.start, turn.end))
        self._send("finish", head_of(episode), [turn.index for turn in episode.turns])

    def _send(self, name: str, *values: Any) -> None:
        self.emit((self.number, name, values))


class Delivery:
    """A call's episode as it arrives: recorded at once, and assembled."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.episode_id = ""
        """Empty before it has begun, and once it has ended."""
        self.turns: dict[int, tuple[Turn, Tokens]] = {}
        self.ended: Episode | None = None

    def take(self, name: str, *values: Any) -> None:
        """Record one message of the call's Relay."""
        if name == "start":
            self.episode_id = values[0].id
        elif name == "turn":
            self.turns[values[1].index] = values[1:]
        elif name == "finish":
            head, indices = values
            sent = [
                self.turns[index] for index in indices
            ]  # none, of one that failed before its prompt
            tokens = Tokens.concat([tokens for _, tokens in sent])
            self.ended = head.with_(turns=tuple(turn for turn, _ in sent), tokens=tokens)
            self.episode_id, values = "", (self.ended,)
        if self.recorder is not None:
            getattr(self.recorder, name)(*values)
