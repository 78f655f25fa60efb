"""The two ends of an episode's way: a worker's recorder, which sends, and what the receiver writes and assembles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_cli.chat.drift import Drift
from agentrl_cli.cluster.protocol import Emit, Message
from agentrl_cli.rollout.context import Attempted
from agentrl_cli.rollout.recorder import Recorder
from agentrl_cli.store.wire import pack_head, pack_turn, unpack_head, unpack_turn
from agentrl_cli.types import AgentState, Episode, Tokens, Turn


class Relay:
    """The recorder of one order in a worker: each turn is sent once, when it is finished."""

    def __init__(self, number: int, emit: Emit) -> None:
        self.number = number
        self.emit = emit
        self.sent: dict[int, Turn] = {}

    def start(self, episode: Episode, split: str, tokenizer: str) -> None:
        self.emit(("start", self.number, pack_head(episode), split, tokenizer))

    def turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        self.sent[turn.index] = turn
        self.emit(("turn", self.number, pack_turn(turn, tokens)))

    def live(self, episode_id: str, state: AgentState, turn: int, text: str) -> None:
        self.emit(("live", self.number, str(state), turn, text))

    def drift(self, episode_id: str, drift: Drift) -> None:
        self.emit(("drift", self.number, drift))

    def event(self, run_id: str | None, kind: str, data: Mapping[str, Any]) -> None:
        self.emit(("event", self.number, run_id, kind, dict(data)))

    def finish(self, episode: Episode) -> None:
        for turn in episode.turns:
            if self.sent.get(turn.index) is not turn:
                self.turn(episode.id, turn, episode.tokens.slice(turn.start, turn.end))
        self.emit(
            ("finish", self.number, pack_head(episode), [turn.index for turn in episode.turns])
        )


class Delivery:
    """An order's episode as it arrives: recorded at once, and assembled."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.episode_id = ""
        """Empty before it has begun, and once it has ended."""
        self.turns: dict[int, tuple[Turn, Tokens]] = {}
        self.ended: Episode | None = None

    def take(self, message: Message) -> None:
        """One message of the order's Relay."""
        name, _, *values = message
        getattr(self, f"_{name}")(*values)

    def attempted(self, drift: str, guard_seconds: float, foreign: str) -> Attempted:
        """Return the whole attempt, once its end has arrived."""
        assert self.ended is not None
        return Attempted(self.ended, drift, guard_seconds, foreign)

    def _start(self, head: Message, split: str, tokenizer: str) -> None:
        episode = unpack_head(head)
        self.episode_id = episode.id
        if self.recorder is not None:
            self.recorder.start(episode, split, tokenizer)

    def _turn(self, packed: Message) -> None:
        turn, tokens = unpack_turn(packed)
        self.turns[turn.index] = turn, tokens
        if self.recorder is not None:
            self.recorder.turn(self.episode_id, turn, tokens)

    def _live(self, state: str, turn: int, text: str) -> None:
        if self.recorder is not None:
            self.recorder.live(self.episode_id, AgentState(state), turn, text)

    def _drift(self, drift: Drift) -> None:
        if self.recorder is not None:
            self.recorder.drift(self.episode_id, drift)

    def _event(self, run_id: str | None, kind: str, data: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.event(run_id, kind, data)

    def _finish(self, head: Message, indices: list[int]) -> None:
        self.ended = unpack_head(head, [self.turns[index] for index in indices])
        self.episode_id = ""
        if self.recorder is not None:
            self.recorder.finish(self.ended)
