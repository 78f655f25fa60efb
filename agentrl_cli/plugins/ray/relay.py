"""The two ends of an episode's way: a worker's recorder, which sends, and its receiver, which records and assembles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl_cli.chat.drift import Drift
from agentrl_cli.plugins.ray.wire import pack_head, pack_turn, unpack_head, unpack_turn
from agentrl_cli.rollout.recorder import Recorder
from agentrl_cli.store.codec import dumps, loads
from agentrl_cli.types import AgentState, Episode, Tokens, Turn

Message = tuple[int, str, Any]
"""From a worker: the number of a call, `done`, `failed`, `beat` or a method of Recorder, its value or arguments."""


class Relay:
    """The recorder of one call in a worker: each turn is sent once, when it is finished."""

    def __init__(self, number: int, emit: Callable[[Message], None]) -> None:
        self.number = number
        self.emit = emit
        self.sent: dict[int, Turn] = {}

    def start(self, episode: Episode, split: str, tokenizer: str) -> None:
        self._send("start", pack_head(episode), split, tokenizer)

    def turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        self.sent[turn.index] = turn
        self._send("turn", episode_id, pack_turn(turn, tokens))

    def live(self, episode_id: str, state: AgentState, turn: int, text: str) -> None:
        self._send("live", episode_id, state, turn, text)

    def drift(self, episode_id: str, drift: Drift) -> None:
        self._send("drift", episode_id, drift)

    def event(self, run_id: str | None, kind: str, data: Mapping[str, Any]) -> None:
        self._send("event", run_id, kind, loads(dumps(data)))

    def finish(self, episode: Episode) -> None:
        for turn in episode.turns:
            if self.sent.get(turn.index) is not turn:
                self.turn(episode.id, turn, episode.tokens.slice(turn.start, turn.end))
        self._send("finish", pack_head(episode), [turn.index for turn in episode.turns])

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
            episode = unpack_head(values[0])
            self.episode_id, values = episode.id, (episode, *values[1:])
        elif name == "turn":
            turn, tokens = unpack_turn(values[1])
            self.turns[turn.index] = turn, tokens
            values = (values[0], turn, tokens)
        elif name == "finish":
            head, indices = values
            self.ended = unpack_head(head, [self.turns[index] for index in indices])
            self.episode_id, values = "", (self.ended,)
        if self.recorder is not None:
            getattr(self.recorder, name)(*values)
