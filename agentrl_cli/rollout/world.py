"""An episode's environment as its attempt uses it: made, asked (in a thread unless it is asynchronous), graded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from agentrl_cli.config import RolloutConfig
from agentrl_cli.envs.tool_env import AssistantTurn, Env, Step, tool_env
from agentrl_cli.hooks.threads import call, contain
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.rewards import RewardContext, finite
from agentrl_cli.rewards.context import answer_turns
from agentrl_cli.rollout.job import Job
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks import Pack
from agentrl_cli.tools import ToolContext
from agentrl_cli.types import Episode, Message, RewardPart, Task


async def make_env(
    rollout: RolloutConfig,
    pack: Pack,
    job: Job,
    sandbox: Sandbox | None,
    *,
    keep: int = 0,
    with_tools: bool = True,
) -> Env:
    """Return the environment of an episode: the pack's own `make_env(task)` if it has one, else its tools.

    `keep`: number of the sandbox session's checkpoints to keep, so that it can go back.
    """
    own = getattr(pack.module, "make_env", None)
    if own is not None:
        with contain("make_env"):
            env: Env = await call(own, job.task)
            return env
    return tool_env(
        rollout,
        pack.tools_of(job.task) if with_tools else (),
        job.task,
        open_session=pack.open_session(sandbox, job.seed, keep=keep),
        interaction=pack.interaction_of(job.task),
        seed=job.seed,
    )


async def run_reset(env: Env, task: Task) -> list[Message]:
    """Return the first messages of an episode. Raises EnvError if the environment's code would end the process."""
    with contain("The environment"), waiting("the environment's reset"):
        messages: list[Message] = await call(env.reset, task)
        return messages


async def run_step(env: Env, turn: AssistantTurn) -> Step:
    """Return the environment's answer to a turn. Raises EnvError if its code would end the process."""
    with contain("The environment"), waiting("the environment's step"):
        step: Step = await call(env.step, turn)
        return step


def reward_context(
    episode: Episode,
    task: Task,
    env: Env,
    *,
    sandboxed: bool,
    decode: Callable[[Sequence[int]], str] | None,
) -> RewardContext:
    """Return what reward functions see besides the episode; the final text is that of its main branch."""
    turns = episode.turns if episode.linear else episode.chain(episode.main).turns
    said = answer_turns(turns)
    final = (said[-1].messages[0].get("content") or "") if said and said[-1].messages else ""
    world = getattr(env, "context", None)
    world = world if isinstance(world, ToolContext) else None  # a user's Env may have any attribute
    session = world.session if world is not None and sandboxed else None
    state = world.state if world is not None else {}
    return RewardContext(task, final, session, state, decode=decode)


async def world_parts(env: Env, earned: float | None) -> list[RewardPart]:
    """Return the environment's own parts, and the sum of its step rewards as `env`."""
    with contain("The environment"):
        parts = list(await env.rewards())
    return parts if earned is None else [*parts, RewardPart("env", earned, 0.0)]


def weigh(parts: Iterable[RewardPart], weights: Mapping[str, float]) -> tuple[RewardPart, ...]:
    """Return the parts with configured weights in place of the pack's. Raises EnvError if one is not finite."""
    return tuple(finite(replace(p, weight=weights.get(p.name, p.weight))) for p in parts)
