"""An episode's turns and tokens while it is being made: appended in memory, stored, checked for drift."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl_cli.chat.drift import worst
from agentrl_cli.chat.drift_guard import DriftGuard
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.spans import Rendered
from agentrl_cli.envs.tool_env import fault_of
from agentrl_cli.rollout.flags import flag_names
from agentrl_cli.rollout.recorder import Recorder
from agentrl_cli.types import (
    AgentState,
    Drift,
    Episode,
    Message,
    Outcome,
    RewardPart,
    Tokens,
    ToolResult,
    Turn,
)


class Transcript:
    """The context that the model sees, token by token, with the messages and turns it came from."""

    def __init__(self, episode: Episode, chat: Chat, recorder: Recorder) -> None:
        self.episode = episode
        self.chat = chat
        self.recorder = recorder
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.parts: list[Tokens] = []
        """Tokens of each turn."""
        self.ids: list[int] = []
        self.images: list[bytes] = []
        """Images in the context, in order."""
        self.guard = DriftGuard(chat)
        self.guard_seconds = 0.0
        self.drifts: list[Drift] | None = None
        """What a recorder of its own found in the whole conversation; None: the guard looks when it ends."""

    @property
    def answers(self) -> int:
        """Turns that the model, or a person in its place, has made: not those of the prompt's history."""
        return sum(turn.stop_reason is not None for turn in self.turns)

    @property
    def earned(self) -> float | None:
        """Sum of the environment's step rewards; None if it gave none."""
        given = [turn.reward for turn in self.turns if turn.reward is not None]
        return sum(given) if given else None

    @property
    def drift(self) -> str:
        """The worst kind of drift found; empty if there is none."""
        return worst(self._drifts) if self._drifts else ""

    @property
    def _drifts(self) -> list[Drift]:
        return [*self.guard.found, *(self.drifts or ())]

    def so_far(self) -> Episode:
        """Return the episode up to here."""
        return self.episode.with_(turns=tuple(self.turns), tokens=Tokens.concat(self.parts))

    def turn(self, role: str, messages: tuple[Message, ...], tokens: Tokens, **fields: Any) -> None:
        """Append a turn; `fields` are those of Turn."""
        start = len(self.ids)
        self.record(
            Turn(
                len(self.turns),
                role,
                messages,
                start,
                start + len(tokens),
                **{"started": time.time(), **fields},
            ),
            tokens,
        )

    def record(self, turn: Turn, tokens: Tokens) -> None:
        """Append a turn as it is: its number, span and parent are given."""
        self.turns.append(turn)
        self.parts.append(tokens)
        self.ids += tokens.ids.tolist()
        self.recorder.turn(self.episode.id, turn, tokens)

    def restore(self, turns: Sequence[Turn], parts: Sequence[Tokens]) -> None:
        """Continue from exactly these turns and their tokens: a stored episode's, or fewer of its own."""
        self.turns, self.parts = list(turns), list(parts)
        self.messages = [message for turn in turns for message in turn.messages]
        so_far = self.so_far()
        self.ids, self.images = so_far.tokens.ids.tolist(), list(so_far.images)

    def extend(
        self,
        rendered: Rendered,
        messages: Sequence[Message],
        results: tuple[ToolResult, ...] = (),
        reward: float | None = None,
        images: tuple[bytes, ...] = (),
    ) -> None:
        """Append rendered messages, a turn for each run of messages of one role; `reward` comes with the last.

        `images` are those of the messages in order.
        """
        self.images += images
        left = len(messages)
        for role, own, tokens, pixels in rendered.by_role(messages, images):
            left -= len(own)
            fields: dict[str, Any] = {"results": results} if role == "tool" else {"images": pixels}
            self.turn(role, own, tokens, **fields, reward=None if left else reward)

    def reward_last(self, reward: float | None) -> None:
        """Give the last turn a reward that came without a message."""
        if reward is not None and self.turns:
            self.turns[-1] = replace(self.turns[-1], reward=reward)
            self.recorder.turn(self.episode.id, self.turns[-1], self.parts[-1])

    def check(self, new: Sequence[Message], delta_ids: Sequence[int]) -> Drift | None:
        """Return the drift guard at a turn boundary; findings are stored at once. Returns a structural one, if any."""
        turn = self.turns[-1]
        started = time.perf_counter()
        found = self.guard.turn(
            self.ids[turn.start :], delta_ids, [turn.messages[0], *new], turn.index, turn.start
        )
        self.guard_seconds += time.perf_counter() - started
        self._store_drift(found)
        return next((drift for drift in found if drift.kind == "structural"), None)

    def live(self, state: AgentState, text: str) -> None:
        """Let the screens see what the episode is doing."""
        self.recorder.live(self.episode.id, state, self.answers, text)

    def start(self, split: str) -> None:
        self.recorder.start(self.episode, split, self.chat.tokenizer.hash)

    def finish(self, outcome: Outcome, error: str, rewards: tuple[RewardPart, ...]) -> Episode:
        """Return the ended episode, stored. The whole conversation is compared with the template's rendering once."""
        ended, late = self.so_far().with_(ended=time.time()), self.drifts
        started = time.perf_counter()
        if late is None and not outcome.is_error:
            try:
                late = self.guard.end(ended)
            except Exception as problem:  # noqa: BLE001 - the episode is lost to it, not the run
                (outcome, error), rewards = fault_of(problem), ()
        self.guard_seconds += time.perf_counter() - started
        ended = ended.with_(outcome=outcome, error=error, reward_parts=rewards)
        kinds = [drift.kind for drift in self._drifts]
        ended = ended.with_(flags=flag_names(ended, kinds, bool(self.guard.tools)))
        # Before its end: whatever kills this process, an episode that has ended is whole.
        self._store_drift(late or ())
        self.recorder.finish(ended)
        return ended

    def _store_drift(self, found: Sequence[Drift]) -> None:
        for drift in found:
            self.recorder.drift(self.episode.id, drift)
