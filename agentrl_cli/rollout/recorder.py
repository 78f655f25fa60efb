"""Where an attempt writes its turns, one by one: a store, or a connection to the process that has the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers
from agentrl_cli.rollout.job import Job
from agentrl_cli.types import AgentState, Drift, Episode, Outcome, Tokens, Turn

if TYPE_CHECKING:
    from agentrl_cli.store import Store


log = logging.getLogger("agentrl.rollout")

Observer = Callable[[Episode], None]
"""Gets each episode that has ended."""


class Recorder:
    """Takes an episode as it is made, and stores nothing."""

    def start(self, episode: Episode, split: str, tokenizer: str) -> None:
        """An episode without turns begins; `tokenizer` is its hash."""

    def turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        """A finished turn, or a newer version of it."""

    def live(self, episode_id: str, state: AgentState, turn: int, text: str) -> None:
        """Write the state of a running episode, for the screens."""

    def drift(self, episode_id: str, drift: Drift) -> None:
        """A difference that the drift guard found."""

    def event(self, run_id: str | None, kind: str, data: Mapping[str, Any]) -> None:
        """Something of the run that is not part of an episode."""

    def finish(self, episode: Episode) -> None:
        """The whole episode, with its outcome."""


class StoreRecorder(Recorder):
    """Writes to a store; turns and ends are committed together with those of other episodes."""

    def __init__(self, store: Store, observers: Sequence[Observer] = ()) -> None:
        self.store, self._observers = store, observers

    def start(self, episode: Episode, split: str, tokenizer: str) -> None:
        self.store.episodes.start(episode, split=split, tokenizer=tokenizer)

    def turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        self.store.episodes.add_turn(episode_id, turn, tokens, later=True)

    def live(self, episode_id: str, state: AgentState, turn: int, text: str) -> None:
        self.store.live.set(episode_id, state, turn, text)

    def drift(self, episode_id: str, drift: Drift) -> None:
        self.store.marks.add_drift(episode_id, drift)

    def event(self, run_id: str | None, kind: str, data: Mapping[str, Any]) -> None:
        self.store.journal.add_event(run_id, kind, data)

    def finish(self, episode: Episode) -> None:
        self.store.episodes.finish(episode, later=True)
        self.observe(episode)

    def observe(self, episode: Episode) -> None:
        """Give an episode that has ended to the observers; an error of one is logged, and the run continues."""
        for observer in self._observers:
            try:
                observer(episode)
            except Exception:
                log.exception("the episode %s could not be observed", episode.id)


def make_observers(config: Any, kind: str = "observers") -> list[Any]:
    """Return the observers that plugins make of a configuration, of episodes or of another kind. Raises UsageError."""
    made = (resolve(kind, {}, name)(config) for name in offers(kind))
    return [one for one in made if one is not None]


def load_finished(
    store: Store, jobs: Sequence[Job]
) -> tuple[dict[tuple[str | None, int], Episode], dict[str, list[str]]]:
    """Return the stored attempts of jobs of one run, step and kind, by (group, sample), without cancelled ones.

    And, by group, the ids of attempts that are in a job's place with another task or seed.
    """
    wanted = {(job.group_id, job.sample): job for job in jobs}
    found: dict[tuple[str | None, int], Episode] = {}
    others: dict[str, list[str]] = {}
    for run_id, step, kind in {(str(job.run_id), job.step or 0, job.kind) for job in jobs}:
        for key, episode_id in store.episodes.find_finished(run_id, step, kind).items():
            group, _, sample = key.removeprefix(f"{run_id}/{step}/").rpartition("/")
            job = wanted.get((group, int(sample)))
            if job is None:  # of an earlier round: it is not read again
                continue
            episode = store.episodes.get(episode_id)
            if (job.task.id, job.seed) != (episode.task_id, episode.seed):
                others.setdefault(str(job.group_id), []).append(episode_id)
            elif episode.outcome is not Outcome.CANCELLED:
                found[job.group_id, job.sample] = episode
    return found, others
