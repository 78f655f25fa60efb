"""One episode being recorded from the model calls of an agent.

Requests may come at any time and several at once. A request whose clients have all left stops sampling and leaves no
trace. A retry (the same body, sent again by an SDK) gets the stored answer; an equal body in
flight is answered with it. After `seal` every call is refused, and the turns and tokens are final.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentrl_cli.agents.gateway.http import aside
from agentrl_cli.agents.gateway.messages import assistant_message, canonical, merge_messages
from agentrl_cli.agents.gateway.request import ModelRequest, Reply, RequestError, bad
from agentrl_cli.agents.gateway.sampling import (
    Answer,
    Limits,
    Plan,
    episode_ended,
    plan,
    read_answer,
)
from agentrl_cli.agents.gateway.tree import Context, MessageTree
from agentrl_cli.chat.drift_guard import DriftGuard
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.template_syntax import Tools
from agentrl_cli.policies.protocols import MessagePolicy, Policy
from agentrl_cli.rollout.job import seed_of
from agentrl_cli.types import Drift, Episode, Message, Sampling, Tokens, Turn, new_id

STORED = 64
"""Answers of a session that are kept for retries, and conversations for `previous_response_id`."""

OnTurn = Callable[[Turn, Tokens], None]


@dataclass(frozen=True, slots=True)
class Trace:
    """The record of a session."""

    turns: tuple[Turn, ...]
    tokens: Tokens
    """The spans of the turns, in turn order."""
    drift: tuple[Drift, ...]
    forks: int
    """Branches beyond the first."""
    calls: int
    """Answers that were sampled."""
    tools: Tools
    """The tools that were offered: those of the first context that has any."""
    foreign: str
    """The parser that reads calls which the chat's own does not; empty if there were none."""


@dataclass(eq=False, slots=True)
class _Pending:
    """A request in flight, how many answers it will have, and how many clients wait for it."""

    task: asyncio.Task[Reply]
    answers: int
    waiters: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was refused."""

    calls: int
    """Answers before it: recorded, or on their way."""
    code: str
    """The error's."""
    message: str


@dataclass(eq=False)
class Session:
    """An episode's model calls. `sampling` is the base of every answer; its seed is the episode's."""

    key: str
    chat: Chat
    policy: Policy
    sampling: Sampling
    limits: Limits
    on_turn: OnTurn | None = None
    """Called with each turn as it is recorded."""
    models: Mapping[str, Policy] = field(default_factory=dict)
    """Policies by the NAME of a request for the model NAME/PLAYER: a player is a conversation of its own."""
    sealed: bool = field(default=False, init=False)
    calls: int = field(default=0, init=False)
    """Answers recorded so far."""
    replayed: int = field(default=0, init=False)
    """Retries that were answered from what is stored."""
    foreign: str = field(default="", init=False)
    refused: Refused | None = field(default=None, init=False)
    """The last request that was refused."""
    mistake: str = field(default="", init=False)
    """The error of the first call that its client cannot carry out, in the last answer or one that was asked for
    beside it; empty if there is none."""

    def __post_init__(self) -> None:
        self.tree = MessageTree(self.chat)
        self.used = time.monotonic()
        """When the last call began or ended."""
        self._reading = asyncio.Lock()
        self._numbers = itertools.count()
        self._running: dict[str, _Pending] = {}
        self._answers: OrderedDict[str, Reply] = OrderedDict()
        self._said: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._slots: dict[str, bool] = {}
        """Names under which the policy keeps a KV cache for this episode; True: in use."""
        self._sources: dict[int, Policy] = {}
        """Policies that were asked, by their `id`."""

    @property
    def busy(self) -> bool:
        """Whether a call is being answered."""
        return bool(self._running)

    @property
    def _due(self) -> int:
        """Answers that are on their way."""
        return sum(one.answers for one in self._running.values() if not one.task.done())

    def room(self, policy: Policy | None = None) -> int:
        """Return the most positions of a context with its answer."""
        return min(self.limits.max_tokens, (policy or self.policy).context_length)

    def refuse(self, code: str, message: str = "") -> None:
        """Remember that a request was refused after the answers so far."""
        self.refused = Refused(self.calls + self._due, code, message)

    # --- calls -------------------------------------------------------------------------------------------------------

    async def complete(
        self, request: ModelRequest, *, retry: bool = False, policy: Policy | None = None
    ) -> Reply:
        """Answer a request, by `policy` if not by the session's own, and record it.

        `retry`: the client marked the request as sent again. Cancelled, it stops sampling unless another client
        waits for the same answer. Raises RequestError, TemplateError, PolicyError.
        """
        if self.sealed:
            raise episode_ended(self.key)
        body = canonical(request.raw).encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(body).hexdigest()
        if retry and digest in self._answers:
            self.replayed += 1
            return self._answers[digest]
        joins = retry or self.limits.retries
        pending = self._running.get(digest) if joins else None
        if pending is None:
            name = digest if joins else f"{digest}-{next(self._numbers)}"
            named = self.models.get(request.model.rpartition("/")[0])
            pending = self._start(request, digest, name, policy or named or self.policy)
        pending.waiters += 1
        try:
            return await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            if pending.task.cancelled():  # by `seal`
                raise episode_ended(self.key) from None
            raise
        finally:
            pending.waiters -= 1
            if not pending.waiters and not pending.task.done():
                self._forget(pending)  # a retry must not join what is being cancelled
                pending.task.cancel()

    def _start(self, request: ModelRequest, digest: str, name: str, policy: Policy) -> _Pending:
        if not self._due:
            self.mistake = ""
        fits = self.calls + self._due + request.n <= self.limits.max_turns
        answer = self._answer(request, digest, policy, fits)
        task = asyncio.get_running_loop().create_task(answer)
        pending = self._running[name] = _Pending(task, request.n * fits)

        def over(task: asyncio.Task[Reply]) -> None:
            self._forget(pending)
            # A failure whose clients have all left is asked for here, or asyncio reports it.
            if not task.cancelled() and isinstance(error := task.exception(), RequestError):
                self.refuse(error.code, error.message)

        task.add_done_callback(over)
        return pending

    def _forget(self, pending: _Pending) -> None:
        self._running = {name: one for name, one in self._running.items() if one is not pending}

    async def _answer(
        self, request: ModelRequest, digest: str, policy: Policy, fits: bool
    ) -> Reply:
        self.used = time.monotonic()
        if not fits:
            raise RequestError(
                f"An episode has at most {self.limits.max_turns} answers.", code="max_turns"
            )
        async with self._reading:  # answers are numbered in the order in which they were asked for
            messages, context = await aside(self._read, request, self.room(policy))
            used, length = len(context.ids), policy.context_length
            how = plan(request, used, self.chat, self.sampling, self.limits, length)
            numbers = [next(self._numbers) for _ in range(request.n)]
        sample = partial(self._sample, request, messages, context, how, policy)
        if request.n == 1:  # without a task of its own
            made = [await sample(numbers[0], 0)]
        else:
            made = await asyncio.gather(*map(sample, numbers, range(request.n)))
        # From here to the end nothing waits: a client that is still there gets what is recorded.
        for node in self.tree.add(context, [answer.piece for answer in made]):
            if self.on_turn is not None and node.turn is not None:
                self.on_turn(node.turn, node.tokens)
        self.calls += len(made)
        self.mistake = self.mistake or made[-1].mistake
        self.foreign = next((answer.foreign for answer in made if answer.foreign), self.foreign)
        choices = tuple(answer.choice for answer in made)
        reply = Reply(
            new_id(),
            int(time.time()),
            request.model or policy.name,
            choices[0].generation.weights_version,
            context.ids,
            choices,
            cached=context.known,
        )
        if self.limits.retries:
            keep(self._answers, digest, reply, STORED)
        if request.remember:
            first = choices[0]
            calls = [(call.id, call.name, call.arguments) for call in first.calls]
            said = assistant_message(first.text, calls, first.reasoning or None)
            own = bool(request.raw.get("instructions"))  # of this request alone, as at OpenAI
            keep(self._said, reply.id, (*messages[own:], said), STORED)
        self.used = time.monotonic()
        return reply

    def _read(self, request: ModelRequest, most: int) -> tuple[tuple[Message, ...], Context]:
        """Return a request's messages, and where they lead in the tree, which this does not change."""
        if request.prompt is not None:
            return (), self.tree.find_prompt(request.prompt, most)
        given = list(request.messages)
        if request.previous:
            if request.previous not in self._said:
                raise RequestError(
                    f"Unknown previous_response_id {request.raw.get('previous_response_id', request.previous)!r}.",
                    status=404,
                    param="previous_response_id",
                )
            own = bool(request.raw.get("instructions"))
            given[own:own] = self._said[request.previous]
        messages = tuple(merge_messages(given))
        if not messages:
            raise bad("`messages` is empty.", "messages")
        name, _, player = request.model.rpartition("/")
        player = player if name in self.models else ""
        return messages, self.tree.find(messages, request.tools, most, player)

    async def _sample(
        self,
        request: ModelRequest,
        messages: tuple[Message, ...],
        context: Context,
        how: Plan,
        policy: Policy,
        number: int,
        place: int,
    ) -> Answer:
        """Sample one answer of a request; `number` is its own in the episode, `place` in the request."""
        slot = next((name for name, used in self._slots.items() if not used), None)
        if slot is None:
            slot = f"{self.key}#{len(self._slots)}" if self._slots else self.key
        self._slots[slot] = True
        self._sources[id(policy)] = policy
        seed, given = seed_of(self.sampling.seed, "turn", number), request.sampling.get("seed")
        if given is not None and self.limits.client_sampling:
            several = request.n > 1
            seed = seed_of(int(given), "choice", place) if several else abs(int(given))
        started = time.time()
        try:
            sampling = how.sampling_for(self.chat, seed)
            choice = () if how.choice == "auto" else (how.choice,)
            if isinstance(policy, MessagePolicy) and policy.observe(
                slot, messages, context.at.tools, *choice
            ):
                how = replace(how, forced=())
            generation = await policy.generate(slot, [*context.ids, *how.forced], sampling)
        finally:
            self._slots[slot] = False
        return read_answer(
            self.chat, request, how, generation, number, started, not policy.untrainable
        )

    # --- its end -----------------------------------------------------------------------------------------------------

    async def seal(self) -> Trace:
        """End the episode: stop what runs, free the policy's caches, check for drift. Idempotent."""
        self.sealed = True
        running = [pending.task for pending in self._running.values()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for policy in self._sources.values():
            for slot in self._slots:
                await policy.release(slot)
        self._sources.clear()
        whole = Episode("", "", turns=self.tree.turns, tokens=self.tree.tokens)
        contexts = self.tree.contexts
        drift = await aside(DriftGuard(self.chat).end, whole, contexts)
        return Trace(
            whole.turns,
            whole.tokens,
            tuple(drift),
            self.tree.forks,
            self.calls,
            next(filter(None, contexts.values()), None),
            self.foreign,
        )


def keep(store: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    """Put an entry into a store that drops its oldest one beyond `most`."""
    store[key] = value
    while len(store) > most:
        store.popitem(last=False)
