"""Served sessions as episodes in the store: turns as they are made, the end with its reward and drift."""

from __future__ import annotations

import time
from dataclasses import replace

from agentrl_cli.agents.gateway.session import OnTurn, Session, Trace
from agentrl_cli.rollout.flags import flag_names
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Outcome, RewardPart, Tokens, Turn, new_id

KIND = "serve"
"""Kind of the run and its episodes."""


class Recorder:
    """Writes the sessions of a server into its run. A session without an answer leaves no episode."""

    def __init__(self, store: Store, run: RunRow, tokenizer: str) -> None:
        """Write into a run; `tokenizer` is the hash of the one that ids are decoded with."""
        self._store, self._run, self._tokenizer = store, run, tokenizer
        self._episodes: dict[str, Episode] = {}

    def writer(self, key: str, seed: int) -> OnTurn:
        """Return the callback of a session for its turns."""

        def write(turn: Turn, tokens: Tokens) -> None:
            episode = self._episodes.get(key)
            if episode is None:
                episode = Episode(
                    new_id(), key, run_id=self._run.id, seed=seed, kind=KIND, started=time.time()
                )
                self._episodes[key] = episode
                self._store.episodes.start(episode, tokenizer=self._tokenizer)
            if turn.weights_version and not episode.weights_version:
                self._episodes[key] = replace(episode, weights_version=turn.weights_version)
            # An answer is stored before its client has it; the messages before it are stored with it.
            self._store.episodes.add_turn(episode.id, turn, tokens, later=turn.role != "assistant")

        return write

    def end(self, session: Session, trace: Trace, reward: float | None) -> None:
        """Store the end of a session's episode."""
        episode = self._episodes.pop(session.key, None)
        if episode is None:
            return
        parts = () if reward is None else (RewardPart("reward", reward, primary=True),)
        outcome = (
            Outcome.UNGRADED
            if reward is None
            else Outcome.SOLVED
            if reward >= 1.0
            else Outcome.FAILED
        )
        ended = episode.with_(
            turns=trace.turns,
            tokens=trace.tokens,
            reward_parts=parts,
            outcome=outcome,
            ended=time.time(),
        )
        ended = ended.with_(flags=flag_names(ended, [drift.kind for drift in trace.drift]))
        for drift in trace.drift:
            self._store.marks.add_drift(episode.id, **drift.row)
        self._store.episodes.finish(ended, tokenizer=self._tokenizer)
