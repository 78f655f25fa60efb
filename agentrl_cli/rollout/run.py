"""Many episodes at once: jobs in, stored episodes out, in the order of the jobs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, NotFound, StoreError
from agentrl_cli.hooks import HookList
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.rollout.attempt import Attempt
from agentrl_cli.rollout.context import Attempted, RolloutContext
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.loop import LoopAttempt
from agentrl_cli.rollout.recorder import Recorder, StoreRecorder, make_observers
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode

if TYPE_CHECKING:
    from agentrl_cli.sandbox import Sandbox
    from agentrl_cli.store import RunRow, Store

TOGETHER = 0.2
"""Seconds in which episodes that end are committed together."""


def bad_ids(chat: Chat, texts: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of `rollout.truncation.bad_tokens`. Raises ConfigError for a text of several tokens."""
    found = []
    for text in texts:
        ids = chat.tokenizer.encode(text)
        if len(ids) != 1:
            raise ConfigError(
                f"rollout.truncation.bad_tokens: {text!r} is {len(ids)} tokens, not one.",
                hint="A single token can be forbidden; `rollout.stop` ends a turn at any text.",
            )
        found.append(int(ids[0]))
    return tuple(found)


class Rollout:
    """Runs jobs with one policy, one chat template, the packs' tools and rewards.

    `with_tools=False` removes the tools (the ablation of `eval --no-tools`).
    """

    def __init__(
        self,
        policy: Policy,
        chat: Chat,
        packs: Mapping[str, Pack],
        config: Config,
        *,
        sandbox: Sandbox | None = None,
        store: Store | None = None,
        hooks: HookList | None = None,
        with_tools: bool = True,
        temperature: float | None = None,
        run: RunRow | None = None,
    ) -> None:
        self.context = RolloutContext(
            policy,
            chat,
            packs,
            config,
            temperature=config.rollout.temperature if temperature is None else temperature,
            bad_ids=bad_ids(chat, config.rollout.truncation.bad_tokens),
            sandbox=sandbox,
            store=store,
            hooks=hooks or HookList(),
            with_tools=with_tools,
            run=run,
            recorder=Recorder() if store is None else StoreRecorder(store, make_observers(config)),
        )
        self._labelled: set[str | None] = set()
        """Runs whose missing isolation is reported; copies of this rollout share it."""
        self._committing: asyncio.TimerHandle | None = None
        self.slots: asyncio.Semaphore | None = None
        """Slots that several `run`s share, first come first served; None: `rollout.concurrency` for each."""
        self.foreign = ""
        """What to set, once a turn held calls in a syntax that the parser does not read."""
        self.guard_seconds = 0.0
        """Time that the drift guard took so far."""
        self.drift: dict[str, str] = {}
        """Worst kind of drift by episode id, of the episodes that have any."""

    def with_(self, **changes: Any) -> Rollout:
        """Return a rollout with other fields of its RolloutContext; counts, slots and drift are its own."""
        other = copy.copy(self)
        other.context = replace(self.context, **changes)
        other._committing, other.slots, other.guard_seconds, other.drift = None, None, 0.0, {}
        return other

    async def run(
        self, jobs: Sequence[Job], on_done: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """Run all jobs, at most `rollout.concurrency` of each worker at once; episodes in the order of the jobs.

        Raises PolicyError if the model itself fails; then, and when cancelled, every running episode is stored as
        `cancelled` first.
        """
        self._label()
        slots = self.slots or asyncio.Semaphore(self.context.concurrency)

        async def one(job: Job) -> Episode:
            async with slots:
                episode = await self.episode(job)
            if on_done is not None:
                on_done(episode)
            return episode

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(job)) for job in jobs]
        except BaseExceptionGroup as errors:
            # The first error is the cause; the others are the cancellations that followed from it.
            raise errors.exceptions[0] from errors
        finally:
            if self.context.store is not None:
                self.context.store.flush()
        return [task.result() for task in tasks]

    async def episode(self, job: Job) -> Episode:
        """One attempt, from its prompt to its stored end. Raises NotFound for a task of an unknown pack."""
        packs = self.context.packs
        pack = packs.get(job.task.pack)
        if pack is None:
            raise NotFound.of("pack", job.task.pack, packs)
        try:
            workers = self.context.workers
            found = await (
                self.attempt(pack, job).run()
                if workers is None
                else workers.attempt(job, self.context)
            )
        finally:
            # It is committed within `TOGETHER` seconds, with those that end meanwhile.
            if self.context.store is not None and self._committing is None:
                loop = asyncio.get_running_loop()
                self._committing = loop.call_later(TOGETHER, self._commit)
        self._count(found)
        return found.episode

    def attempt(self, pack: Pack, job: Job) -> Attempt:
        """What makes an episode: the built-in loop. `agents.runners.AgentRollout` runs the agents of packs, too."""
        return LoopAttempt(self.context, pack, job)

    def take_guard_seconds(self) -> float:
        """`guard_seconds`, counted from zero again."""
        found, self.guard_seconds = self.guard_seconds, 0.0
        return found

    def _count(self, found: Attempted) -> None:
        self.guard_seconds += found.guard_seconds
        if found.drift:
            self.drift[found.episode.id] = found.drift
        if found.foreign and not self.foreign:
            self.foreign = (
                f"A turn holds a tool call in the syntax of {found.foreign}, which the parser"
                f" {self.context.chat.parser.name} does not read: it was not executed."
                f" If the model writes such calls: --set model.chat.parser={found.foreign}."
            )
            self._alert("parser", self.foreign)

    def _commit(self) -> None:
        self._committing = None
        assert self.context.store is not None
        try:
            self.context.store.flush_ended()
        except StoreError as error:  # the event loop calls this: an episode's next write raises it
            self.context.store.postpone(error)

    def _label(self) -> None:
        """Report once, among a run's events and alerts, that its code is not isolated."""
        sandbox, store, run = self.context.sandbox, self.context.store, self.context.run
        name = run.id if run else None
        if name in self._labelled or sandbox is None or not sandbox.warning or store is None:
            return
        self._labelled.add(name)
        report = {"level": sandbox.level, "text": sandbox.warning}
        store.journal.add_event(name, "no_isolation", report)
        self._alert("no_isolation", sandbox.warning)

    def _alert(self, name: str, text: str) -> None:
        store, run = self.context.store, self.context.run
        if store is not None:
            store.journal.add_alert(run.id if run else None, "bad", name, text=text, step=0)
