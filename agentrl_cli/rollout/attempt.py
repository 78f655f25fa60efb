"""The life of an episode: how it begins, its score and its end. What makes its turns is a subclass's business.

An infrastructure error (sandbox, grader, hook) ends the episode as an error that is never scored.
"""

from __future__ import annotations

import asyncio
import time

from agentrl_cli.envs.tool_env import Env, fault_of
from agentrl_cli.errors import BadAnswer, EnvError, PolicyError, StoreError
from agentrl_cli.hooks.threads import OwnTime, contain
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.rewards import RewardContext, score
from agentrl_cli.rollout.context import Attempted, RolloutContext
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.transcript import Transcript
from agentrl_cli.rollout.world import reward_context, weigh, world_parts
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode, Outcome, RewardPart, new_id

CLOSING = 30.0
"""Seconds that freeing an episode's tools and session may take."""
UNGRADABLE = (Outcome.TOO_LONG, *(outcome for outcome in Outcome if outcome.is_error))
"""Outcomes that explain by themselves why nothing was graded."""


class Attempt:
    """One episode being made; a subclass's `play` makes its turns."""

    def __init__(self, context: RolloutContext, pack: Pack, job: Job) -> None:
        self.context = context
        self.pack = pack
        self.job = job
        self.limits = context.config.rollout
        self.most = min(self.limits.max_tokens, context.policy.context_length)
        """Tokens that the episode may have."""
        self.max_turns = self.limits.max_turns
        self.clock = OwnTime(self.limits.timeout.episode)
        """What it takes, grading included, and the model's turns not: those have limits of their own."""
        self.env = Env()
        self.cut: Outcome | None = None
        """The limit that ended the episode, if one did."""
        self.reason = ""
        """Human-readable reason for `cut`."""
        self.ungraded = ""
        """Why no reward applies, as a reward function said."""
        self.foreign = ""
        """Name of a parser whose calls a turn holds and the chat's own parser does not read."""
        episode = new_episode(job, context.policy.weights_version)
        self.transcript = Transcript(episode, context.chat, context.recorder)

    def limit_source(self) -> str:
        """Return what limits the tokens of the episode: the model, or a setting."""
        longer = self.limits.max_tokens >= self.context.policy.context_length
        return "the model's own limit" if longer else "rollout.max_tokens"

    # --- the life of an episode --------------------------------------------------------------------------------------

    async def run(self) -> Attempted:
        """Make the episode and store it.

        Raises PolicyError if the model fails and CancelledError if the run is stopped; the episode is stored as
        `cancelled` first.
        """
        self.transcript.start(self.job.task.split)
        failed: PolicyError | None = None
        try:
            outcome, error, rewards = await self._outcome()
        except PolicyError as problem:
            failed, outcome, error, rewards = problem, Outcome.CANCELLED, problem.message, ()
        ended = self.transcript.finish(outcome, error, rewards)
        if failed is not None or outcome is Outcome.CANCELLED:
            raise failed or asyncio.CancelledError
        return Attempted(ended, self.transcript.drift, self.transcript.guard_seconds, self.foreign)

    async def _outcome(self) -> tuple[Outcome, str, tuple[RewardPart, ...]]:
        """Loop, score, close. Returns (outcome, error, reward parts)."""
        problem: Exception | None = None
        try:
            try:
                with waiting("an episode", self.transcript.episode.id):
                    async with self.clock:
                        event = {"task": self.job.task, "run": self.context.run}
                        hooks = self.context.hooks
                        await hooks.call("on_rollout_start", **event)
                        await hooks.call("on_trace_start", **event)
                        await self.play()
                        await hooks.call("on_trace_end", rollout=self.transcript.so_far(), **event)
                        rewards = await self.grade()
            finally:
                with waiting("the closing", self.transcript.episode.id):
                    problem = await self._close()
        except asyncio.CancelledError:
            return Outcome.CANCELLED, "the run was stopped", ()
        except BadAnswer as error:  # of a server: it fails this episode, not the run
            return Outcome.ENV_ERROR, error.message, ()
        except (PolicyError, StoreError):
            raise
        except Exception as error:  # noqa: BLE001 - a failed episode is a row; a task's code may raise anything
            if isinstance(error, TimeoutError) and self.clock.expired():
                return (
                    Outcome.TIMEOUT,
                    f"the episode took longer than {self.clock.seconds:g} s of its own",
                    (),
                )
            return (*fault_of(error), ())
        if problem is not None:
            return (*fault_of(problem), ())
        return self._judgement(rewards)

    def _judgement(
        self, rewards: tuple[RewardPart, ...]
    ) -> tuple[Outcome, str, tuple[RewardPart, ...]]:
        """Return the outcome by the primary part, unless a limit ended the episode before anything could be graded."""
        if self.cut in UNGRADABLE:
            return self.cut, self.reason, rewards
        primary = next((part.value for part in rewards if part.primary), None)
        if primary is None:
            none = f"The primary reward {self.pack.primary!r} is None: it does not apply to this episode."
            return Outcome.UNGRADED, self.ungraded or none, rewards
        if primary >= 1.0:
            return Outcome.SOLVED, "", rewards
        return self.cut or Outcome.FAILED, self.reason, rewards

    async def play(self) -> None:
        """Make the turns. Leaves the episode in `transcript`, and in `cut` and `reason` what ended it early."""
        raise NotImplementedError

    async def grade(self) -> tuple[RewardPart, ...]:
        """Reward parts of the pack, the environment and the hooks, in this order."""
        if self.cut in UNGRADABLE:
            return ()
        episode = self.transcript.so_far()
        ctx = reward_context(
            episode,
            self.job.task,
            self.env,
            sandboxed=self.context.sandbox is not None,
            decode=self.context.chat.tokenizer.plain,
        )
        parts = list(await self.parts(episode, ctx))
        self.ungraded = ctx.reason
        parts += await world_parts(self.env, self.transcript.earned)
        episode = episode.with_(reward_parts=tuple(parts))
        parts += await self.context.hooks.rollout_end(
            episode, self.job.task, run=self.context.run, context=ctx
        )
        return weigh(parts, self.context.config.rewards)

    async def parts(self, episode: Episode, ctx: RewardContext) -> tuple[RewardPart, ...]:
        """Return the reward parts of the pack."""
        return await score(episode, self.pack.reweight(self.context.config.rewards), ctx)

    async def _close(self) -> Exception | None:
        """Free everything. Returns what went wrong with that: it must not hide what ended the episode."""
        try:
            await self.context.policy.release(self.transcript.episode.id)
            async with OwnTime(CLOSING):
                with contain("Closing the episode"):
                    await asyncio.shield(self.env.close())
        except TimeoutError:
            return EnvError(f"Closing the episode took longer than {CLOSING:g} s.")
        except Exception as error:  # noqa: BLE001 - returned: the caller decides whether a worse error hides it
            return error
        return None


def new_episode(job: Job, weights_version: str) -> Episode:
    """Return an episode without turns, which starts now."""
    task = job.task
    return Episode(
        id=new_id(),
        task_id=task.id,
        pack=task.pack,
        family=task.family,
        run_id=job.run_id,
        step=job.step,
        group_id=job.group_id,
        sample=job.sample,
        seed=job.seed,
        kind=job.kind,
        weights_version=weights_version,
        started=time.time(),
    )
