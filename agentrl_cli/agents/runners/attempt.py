"""One episode that an agent of others makes: its model calls are recorded, scored and stored as those of our own loop.

The agent's reward, if it gave one, is the only part; else the pack's own parts are computed over the episode. The
model's own mistakes are scored, by these parts or as 0: a limit that it reached, and an exception that it caused. Any
other failure of the agent leaves the episode masked, and so does one of the infrastructure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_cli.agents.emit import MODEL, AgentCall
from agentrl_cli.agents.gateway.request import TOO_LONG
from agentrl_cli.agents.gateway.sampling import Limits
from agentrl_cli.agents.gateway.session import OnTurn, Session, Trace
from agentrl_cli.agents.gateway.sessions import new_key
from agentrl_cli.agents.runners.base import AgentLost, Ended, FunctionRunner, Runner
from agentrl_cli.agents.runners.command import CommandRunner
from agentrl_cli.agents.runners.jail import JailedRunner
from agentrl_cli.agents.runners.policy import EpisodePolicy, RecordedPolicy
from agentrl_cli.agents.runners.remote import RemoteRunner
from agentrl_cli.agents.runners.server import Door, EpisodeServer
from agentrl_cli.envs.tool_env import tool_env
from agentrl_cli.errors import ConfigError, EnvError
from agentrl_cli.hooks.threads import OwnTime
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.policies.protocols import MessagePolicy, Policy
from agentrl_cli.rewards import RewardContext
from agentrl_cli.rollout.attempt import Attempt
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.run import Rollout
from agentrl_cli.rollout.world import run_reset
from agentrl_cli.store.journal import AGENT_STDERR
from agentrl_cli.tasks import AGENT_PART, AgentSpec, Pack
from agentrl_cli.types import (
    OF_PLAYER,
    AgentState,
    Episode,
    Outcome,
    RewardPart,
    StopReason,
    Tokens,
    Turn,
)
from agentrl_cli.types.branches import path_to

RUNNERS: Mapping[str, Callable[[AgentSpec], Runner]] = {
    "function": FunctionRunner,
    "command": CommandRunner,
    "remote": RemoteRunner,
}
"""Kind of agent (`AgentSpec.kind`) to what runs it."""

REFUSED = {TOO_LONG: Outcome.TRUNCATED_TOKENS, "max_turns": Outcome.TRUNCATED_TURNS}
"""Codes of refused calls that are limits of the episode: its end is the model's doing, and scored."""
MACHINE = frozenset({"OSError", "ImportError", "MemoryError", "AgentRLError"})
"""Exceptions that the model does not cause, whatever it wrote before."""
BASE = "base"
"""Name of the run's own model before its training, among the frozen ones."""
LIMITED = 0.0
"""Reward of an episode that a limit ended, if neither the agent nor the pack has another."""
EDITED = "whatif"
"""Kind of episodes in which a person may have written a turn: nothing is trained on them."""
GIVEN = 3
"""Agents elsewhere that get a task one after the other, as each dies."""
STOPPING = 5.0
"""Seconds that an agent which is stopped may take to clean up."""
TAIL = 2000
"""Characters of stderr in an episode's error."""


class AgentRollout(Rollout):
    """A rollout of packs with and without an agent."""

    _function: FunctionRunner | None = None

    def attempt(self, pack: Pack, job: Job) -> Attempt:
        """Return the pack's agent, or the built-in loop if it has none. Raises ConfigError, NotFound."""
        if pack.agent is None:
            return super().attempt(pack, job)
        runner = self._runner(pack.agent)
        for name in runner.models if isinstance(runner, FunctionRunner) else ():
            if name not in self.context.frozen:
                self.context.frozen[name] = self._load(name, pack.agent.folder)
        return AgentAttempt(self.context, pack, job, pack.agent, runner)

    def _load(self, name: str, base: Path) -> Policy:
        """Return a frozen model: `base` is the run's own as it was before training. Raises as `load_policy` does."""
        from agentrl_cli.policies.load import load_policy  # imports torch

        config, store = self.context.config, self.context.store
        spec = config.model.name if name == BASE else name
        if getattr(self.context.policy, "separate_weights", False) and not config.adapter.enabled:
            # The server has the trained weights by now, under the model's own name.
            config = config.replace(remote={"backend": {"name": ""}})
        loaded = load_policy(spec, config, base=base, store=store)
        if loaded.hash != self.context.chat.tokenizer.hash:
            raise ConfigError(
                f"The model {name} has another tokenizer than the one that it plays with.",
                hint="Name a checkpoint of the same model: RUN@best, a folder, or base.",
            )
        return loaded.policy

    def _runner(self, spec: AgentSpec) -> Runner:
        """Return a runner for the agent. A function's is reused: it has no state, and loading its file takes time."""
        if spec.sandbox:
            return JailedRunner(spec, self.context.config.sandbox)
        if spec.kind != "function":
            return RUNNERS[spec.kind](spec)
        if self._function is None or self._function.spec is not spec:
            self._function = FunctionRunner(spec)
        return self._function


async def require_agents(packs: Iterable[Pack]) -> None:
    """Raise NotFound, EnvError, ConfigError for an agent that cannot begin any episode of its pack."""
    for agent in (pack.agent for pack in packs):
        if agent is not None and agent.kind == "function" and not agent.sandbox:
            await FunctionRunner(agent).require()


class AgentAttempt(Attempt):
    """An episode whose turns are the model calls of an agent."""

    def __init__(
        self, context: RolloutContext, pack: Pack, job: Job, spec: AgentSpec, runner: Runner
    ) -> None:
        super().__init__(context, pack, job)
        if isinstance(context.policy, MessagePolicy):
            raise ConfigError(
                f"The policy {context.policy.name} renders messages itself, so what an agent's model saw is not known.",
                hint="Agents need a policy that continues token ids.",
            )
        if not context.with_tools:
            raise ConfigError(
                f"The agent {spec.text} brings its own tools: they cannot be taken away.",
                hint="Leave out --no-tools.",
            )
        self.runner, self.spec = runner, spec
        self.agent_timeout = spec.timeout or self.limits.timeout.episode
        self.given: float | None = None
        """The reward that the agent gave, or that the episode has without one."""
        self.players: Mapping[str, float] = {}
        """The reward of each player, where it gave several."""

    async def play(self) -> None:
        """Run the agent against its own address of the model, and take over the record."""
        task, context = self.job.task, self.context
        session = self.pack.open_session(context.sandbox, self.job.seed)
        self.env = tool_env(
            context.config.rollout, (), task, open_session=session, seed=self.job.seed
        )
        await run_reset(self.env, task)
        self.transcript.live(AgentState.PENDING, "")
        end, trace, door = await self._run_agents(EpisodeServer.here(context.chat))
        self.transcript.drifts, self.foreign = list(trace.drift), trace.foreign
        self.transcript.guard.tools = trace.tools
        own = None if end is None or (end.alone and self.pack.rewards) else end.reward
        self.given = door.reward if own is None else own
        self.players = {} if end is None else end.players
        self._judge(end, trace, door)

    async def _run_agents(self, server: EpisodeServer) -> tuple[Ended | None, Trace, Door]:
        """Run the agent; one that dies elsewhere is followed by another, with a session of its own.

        Raises EnvError after the last of them, or if no agent asked for the task.
        """
        remote = isinstance(self.runner, RemoteRunner)
        for left in reversed(range(GIVEN if remote else 1)):
            clock = OwnTime(self.agent_timeout)
            policy = EpisodePolicy(self.context, self.job, self.transcript, clock)
            unix = await server.socket() if isinstance(self.runner, JailedRunner) else ""
            # The turns of an agent that may die are taken over when it has not.
            door = await server.open(self._session(policy, None if remote else self._record))
            try:
                with self.clock.pause(), waiting(f"the agent {self.spec.text}"):
                    end = await self._run(door, policy, clock, unix)
            except AgentLost as lost:
                if not left:
                    raise EnvError(
                        f"{GIVEN} agents had the task, and each died: {lost.message}."
                    ) from lost
                continue
            finally:
                trace = await server.close(door)
            if policy.failed.done():
                raise policy.failed.result()
            for turn in trace.turns if remote else ():
                self._record(turn, trace.tokens.slice(turn.start, turn.end))
            return end, trace, door
        raise AssertionError("unreachable")

    async def parts(self, episode: Episode, ctx: RewardContext) -> tuple[RewardPart, ...]:
        """Return the agent's own reward, else the parts of the pack."""
        if self.given is None:
            return await super().parts(episode, ctx)
        players = (
            RewardPart(name, value, weight=0.0, detail=OF_PLAYER)
            for name, value in self.players.items()
        )
        return (RewardPart(AGENT_PART, self.given, primary=True), *players)

    def _session(self, policy: EpisodePolicy, record: OnTurn | None) -> Session:
        limits = Limits(
            max_tokens=self.most,
            max_new_tokens=self.limits.max_new_tokens,
            max_turns=self.limits.max_turns,
            client_sampling=False,
        )
        sampling = self.limits.sampling(
            temperature=self.context.temperature,
            seed=self.job.seed,
            slot=self.job.slot,
            bad_ids=self.context.bad_ids,
        )
        frozen = {name: policy.frozen(other) for name, other in self.context.frozen.items()}
        players = {MODEL: policy, **frozen}
        return Session(new_key(), self.context.chat, policy, sampling, limits, record, players)

    def _record(self, turn: Turn, tokens: Tokens) -> None:
        self.transcript.record(turn, tokens)
        if turn.role == "assistant":
            self.transcript.live(
                AgentState.PROCESSING_TOOLS, str(turn.messages[-1].get("content") or "")
            )

    async def _run(
        self, door: Door, policy: EpisodePolicy, clock: OwnTime, unix: str
    ) -> Ended | None:
        """Return how the agent ended; None if it was stopped, by its deadline or as the model failed."""
        key = door.session.key
        task = self.job.task
        own = replace(
            task, prompt=deepcopy(list(task.prompt))
        )  # an agent's clients take lists alone, and it may edit
        asked = self.context.policy
        call = AgentCall(
            own,
            door.root,
            key,
            door.emit_reward,
            attempt=asked.attempt if isinstance(asked, RecordedPolicy) else self.job.sample,
            recorded=door.snapshot,
            socket=unix,
        )
        agent = asyncio.ensure_future(self.runner.run(call))
        start, begun = OwnTime(max(self.runner.start_seconds, self.agent_timeout)), policy.called
        if isinstance(self.runner, RemoteRunner):  # which limits the wait itself
            start, begun, self.runner.patience = OwnTime(None), self.runner.claimed, clock.seconds
        called = asyncio.ensure_future(begun.wait())
        either: set[asyncio.Future[Any]] = {agent, policy.failed}
        try:
            if start.seconds is None or self.runner.start_seconds:
                async with start:
                    await asyncio.wait({*either, called}, return_when=asyncio.FIRST_COMPLETED)
            async with clock:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return agent.result() if agent.done() else None
        except TimeoutError:
            if not (clock.expired() or start.expired()):
                raise
            return None
        finally:
            called.cancel()
            agent.cancel()
            await asyncio.wait({agent}, timeout=STOPPING)

    # --- how it ended ------------------------------------------------------------------------------------------------

    def _judge(self, end: Ended | None, trace: Trace, door: Door) -> None:
        """Set `cut` and `reason`, and keep the agent's stderr."""
        stderr = end.stderr if end is not None else self.runner.stderr
        if stderr.strip():
            data = {"episode": self.transcript.episode.id, "text": stderr[-TAIL:]}
            self.context.recorder.event(self.job.run_id, AGENT_STDERR, data)
        error = (
            end.error
            if end is not None
            else f"The agent took longer than {self.agent_timeout:g} s of its own."
        )
        refused, limit = door.session.refused, None
        if refused is not None and refused.calls >= trace.calls:  # it was the agent's last call
            limit = REFUSED.get(refused.code)
        own = [
            turn for turn in trace.turns if trace.tokens.trained_mask[turn.start : turn.end].any()
        ]
        cut = bool(own) and own[-1].stop_reason is StopReason.LENGTH
        if not trace.calls and limit is Outcome.TRUNCATED_TOKENS:
            self.cut, self.reason = Outcome.TOO_LONG, self._too_long(door.session)
        elif (
            self.job.kind != EDITED
            and (foreign := foreign_turn(trace.turns, trace.tokens)) is not None
        ):
            self.cut = Outcome.FOREIGN_TEXT
            self.reason = f"turn {foreign} is an assistant's text that the model did not sample"
        elif limit is not None:
            self.cut, self.reason = limit, error
            self._score_without(LIMITED)
        elif error and self.given is None and self._is_models(end, trace, door.session):
            self.cut, self.reason = (
                Outcome.TRUNCATED_TOKENS if cut else None,
                _with_tail(error, stderr),
            )
            self._score_without(self.spec.on_error)
        elif error and self.given is None:
            self.cut = Outcome.AGENT_TIMEOUT if end is None else Outcome.AGENT_ERROR
            self.reason = _with_tail(error, stderr)
        elif not trace.calls:
            self.cut = Outcome.NO_CALLS
            self.reason = _with_tail(error or "The agent made no call of the model.", stderr)
        elif self.given is None and self.pack.rewards == ():
            self.cut = Outcome.UNGRADED
            self.reason = "The agent gave no reward, and the pack has none of its own."
        elif cut:
            self.cut = Outcome.TRUNCATED_TOKENS

    def _score_without(self, reward: float | None) -> None:
        """Give the episode a reward if neither its agent nor its pack has one."""
        if self.given is None and not self.pack.rewards:
            self.given = reward

    def _is_models(self, end: Ended | None, trace: Trace, session: Session) -> bool:
        """Whether the exception that ended the agent was caused by the model, and is to be scored.

        That is so if the last thing that the agent got was an answer with a call that cannot be carried out: not
        readable, of a tool that the request did not offer, or with arguments that its schema forbids; or if the
        exception is one by which the agent's framework rejects answers (`agent.rejects`).
        """
        if end is None or not end.raised or not trace.calls or self.spec.on_error is None:
            return False
        if any(name in self.spec.rejects for name in end.raised):
            return True
        answered = session.refused is None or session.refused.calls < trace.calls
        return answered and bool(session.mistake) and MACHINE.isdisjoint(end.raised)

    def _too_long(self, session: Session) -> str:
        """Say that the first request does not fit, with its tokens, the limit and the setting."""
        assert session.refused is not None
        why = session.refused.message or f"The context has {self.most} tokens."
        return f"the agent's first request does not fit: {why} The limit is {self.limit_source()}."


def _with_tail(text: str, stderr: str) -> str:
    tail = stderr.strip()[-TAIL:]
    return f"{text}\n{tail}" if tail else text


def foreign_turn(turns: tuple[Turn, ...], tokens: Tokens) -> int | None:
    """Return the first turn that an agent put into the model's mouth after the model had spoken; None if there is none.

    Assistant messages before the first answer are examples of the prompt. One in the place of an answer is a rewritten
    history, which forks the episode and is context there.
    """
    parents = Episode("", "", turns=turns).parents
    sampled = [bool(tokens.trained_mask[turn.start : turn.end].any()) for turn in turns]
    for index, turn in enumerate(turns):
        if turn.role != "assistant" or sampled[index]:
            continue
        rewritten = any(
            sampled[other] and parents[other] == parents[index] for other in range(len(turns))
        )
        if not rewritten and any(sampled[before] for before in path_to(parents, index)):
            return index
    return None
