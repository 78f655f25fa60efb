"""The reward parts of an episode: the pack's, the environment's, and the weights that count them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from agentrl_cli.envs.tool_env import Env
from agentrl_cli.hooks.threads import contain
from agentrl_cli.rewards import RewardContext, finite
from agentrl_cli.types import Episode, RewardPart, Task


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
    said = [turn for turn in turns if turn.role == "assistant"]
    final = (said[-1].messages[0].get("content") or "") if said and said[-1].messages else ""
    world = getattr(env, "context", None)
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
