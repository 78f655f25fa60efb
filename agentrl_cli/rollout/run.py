"""Many episodes at once: jobs in, stored episodes out, in the order of the jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl_cli.chat.parse import Parsed, foreign_parser
from agentrl_cli.chat.render import Chat
from agentrl_cli.config import Config
from agentrl_cli.envs.tool_env import Env, tool_env
from agentrl_cli.errors import ConfigError, NotFound, StoreError
from agentrl_cli.hooks import HookList
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.rollout.attempt import Attempt
from agentrl_cli.rollout.job import Job
from agentrl_cli.tasks import Pack
from agentrl_cli.threads import call, contained
from agentrl_cli.types import Episode, ToolSchema

if TYPE_CHECKING:
    from agentrl_cli.sandbox import Sandbox
    from agentrl_cli.store import Store

TOGETHER = 0.2
"""Seconds in which episodes that end are committed together."""


def bad_ids(chat: Chat, texts: Sequence[str]) -> tuple[int, ...]:
    """The ids of `rollout.bad_tokens`. Raises ConfigError for a text that is no single token."""
    found = []
    for text in texts:
        ids = chat.tokenizer.encode(text)
        if len(ids) != 1:
            raise ConfigError(
                f"rollout.bad_tokens: {text!r} is {len(ids)} tokens, not one.",
                hint="A single token can be forbidden; `rollout.stop` ends a turn at any text.",
            )
        found.append(int(ids[0]))
    return tuple(found)


class Rollout:
    """Runs jobs with one policy, one chat template, the packs' tools and rewards.

    `with_tools=False` takes the tools away (the ablation of `eval --no-tools`).
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
        run: Any = None,
    ) -> None:
        self.policy = policy
        self.chat = chat
        self.packs = packs
        self.config = config
        self.sandbox = sandbox
        self.store = store
        self.hooks = hooks or HookList()
        self.with_tools = with_tools
        self.temperature = config.rollout.temperature if temperature is None else temperature
        self.run_row = run
        self._labelled = False
        self.foreign = ""
        """What to set, once a turn held calls in a syntax that the parser does not read."""
        self._committing: asyncio.TimerHandle | None = None
        self.bad_ids = bad_ids(chat, config.rollout.bad_tokens)
        self.places: asyncio.Semaphore | None = None
        """Places that several `run`s share, first come first served; None: `rollout.concurrency` for each."""
        self.guard_seconds = 0.0
        """Time that the drift guard took so far."""
        self.vocabulary: int | None = None
        """Ids that the model which is trained knows; None: nothing is trained."""
        self.drift: dict[str, str] = {}  # worst kind of drift by episode id, of those that have any

    async def run(self, jobs: Sequence[Job], on_done: Callable[[Episode], None] | None = None) -> list[Episode]:
        """Run all jobs, at most `rollout.concurrency` at once; episodes in the order of the jobs.

        Raises PolicyError where the model itself fails; then, and when cancelled, every running episode is stored as
        `cancelled` first.
        """
        self._label()
        places = self.places or asyncio.Semaphore(self.config.rollout.concurrency)

        async def one(job: Job) -> Episode:
            async with places:
                episode = await self.episode(job)
            if on_done is not None:
                on_done(episode)
            return episode

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(job)) for job in jobs]
        except BaseExceptionGroup as errors:
            # The first real error says what happened; the others are the cancellations that followed from it.
            raise errors.exceptions[0] from errors
        finally:
            if self.store is not None:
                self.store.flush()
        return [task.result() for task in tasks]

    def note_foreign(self, ids: Sequence[int], parsed: Parsed, tools: Sequence[ToolSchema]) -> None:
        """Look for calls that the parser does not read in an assistant turn; the first of a run raises an alert."""
        if self.foreign or not tools or any(call.arguments is not None for call in parsed.calls):
            return
        own = self.chat.parser
        name = foreign_parser(self.chat.decode(ids), parsed, own, tools)
        if not name:
            return
        self.foreign = (
            f"A turn holds a tool call in the syntax of {name}, which the parser {own.name} does not read: it was not"
            f" executed. If the model writes such calls: --set model.parser={name}."
        )
        if self.store is not None:
            run_id = None if self.run_row is None else self.run_row.id
            self.store.journal.add_alert(run_id, "bad", "parser", text=self.foreign, step=0)

    def commit_soon(self) -> None:
        """An episode has ended: it is committed within `TOGETHER` seconds, with those that end meanwhile."""
        if self._committing is None:
            self._committing = asyncio.get_running_loop().call_later(TOGETHER, self._commit)

    def _commit(self) -> None:
        self._committing = None
        if self.store is not None:
            try:
                self.store.flush_ended()
            except StoreError as error:  # the event loop calls this: an episode's next write raises it
                self.store.postpone(error)

    def _label(self) -> None:
        """A run whose code is not isolated says so among its events and alerts, once."""
        if self._labelled or self.sandbox is None or not self.sandbox.warning or self.store is None:
            return
        self._labelled = True
        run_id = None if self.run_row is None else self.run_row.id
        self.store.journal.add_event(
            run_id, "no_isolation", {"level": self.sandbox.level, "text": self.sandbox.warning}
        )
        self.store.journal.add_alert(run_id, "bad", "no_isolation", text=self.sandbox.warning, step=0)

    async def episode(self, job: Job) -> Episode:
        """One attempt, from its prompt to its stored end."""
        pack = self.packs.get(job.task.pack)
        if pack is None:
            raise NotFound.of("pack", job.task.pack, self.packs)
        return await Attempt(self, pack, job).run()

    async def make_env(self, pack: Pack, job: Job) -> Env:
        """The environment of an episode: the pack's own `make_env(task)` where it has one, else its tools."""
        own = getattr(pack.module, "make_env", None)
        if own is not None:
            with contained("make_env"):
                env: Env = await call(own, job.task)
                return env
        tools = pack.tools_of(job.task) if self.with_tools else ()
        session = pack.open_session(self.sandbox, job.seed)
        user = pack.interaction_of(job.task)
        return tool_env(self.config.rollout, tools, job.task, open_session=session, interaction=user, seed=job.seed)
