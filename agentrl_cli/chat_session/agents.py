"""What-ifs of episodes that an agent made: the agent runs again, and its model repeats the recorded answers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.agents.runners.policy import RecordedPolicy
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat_session.open import Past
from agentrl_cli.chat_session.rerun import Rerun
from agentrl_cli.errors import UsageError
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.rollout import Job
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.types import Episode, RewardPart, ToolCall, ToolResult

MISSING = ToolResult("(the agent did not answer this call)", "missing")


async def rerun_agent(
    past: Past, policy: Policy, chat: Chat, sandbox: Sandbox | None
) -> tuple[list[Rerun], tuple[RewardPart, ...]]:
    """Return each recorded call with the agent's answer now, and the rewards now. Raises PolicyError if it calls too
    often.
    """
    episode = past.episode
    recorded = RecordedPolicy(policy, episode, len(episode.turns), sample=False)
    now = await _episode(past, recorded, chat, sandbox, Job(past.task, episode.seed), None)
    later = list(_pair_calls(now))
    found = []
    for number, (turn, call, before) in enumerate(_pair_calls(episode)):
        after = later[number][2] if number < len(later) else None
        found.append(Rerun(number + 1, turn, call.name, call.arguments, before, after or MISSING))
    return found, now.reward_parts


async def sample_agent(
    past: Past, given: argparse.Namespace, context: RolloutContext, job: Job
) -> Episode:
    """Return an episode of the agent whose model answers as recorded up to a turn, and freely, or with a text, from
    there.

    Raises UsageError if the agent does not come to that turn again.
    """
    edit = None if given.edit is None else context.chat.assistant_ids(given.edit)
    recorded = RecordedPolicy(context.policy, past.episode, given.turn, edit=edit)
    chat, sandbox = context.chat, context.sandbox
    episode = await _episode(past, recorded, chat, sandbox, job, given.temperature)
    if not recorded.reached:
        raise UsageError(
            f"The agent did not come to turn {given.turn} again: its requests before it differ from the recorded ones.",
            hint=episode.error or "Its tools, or it, may depend on chance or on the time.",
        )
    return episode.with_(parent_id=past.episode.id, parent_turn=given.turn)


async def _episode(
    past: Past,
    policy: Policy,
    chat: Chat,
    sandbox: Sandbox | None,
    job: Job,
    temperature: float | None,
) -> Episode:
    packs = {past.pack.name: past.pack}
    rollout = AgentRollout(
        policy, chat, packs, past.config, sandbox=sandbox, temperature=temperature
    )
    return await rollout.episode(job)


def _pair_calls(episode: Episode) -> Iterator[tuple[int, ToolCall, ToolResult | None]]:
    """Yield each call of an episode with its turn, and its result if the agent sent one as a tool's."""
    for turn in episode.turns:
        if turn.role != "assistant" or not turn.calls:
            continue
        after = (other for other in episode.turns if episode.parents[other.index] == turn.index)
        results: Sequence[ToolResult] = next(
            (other.results for other in after if other.role == "tool"), ()
        )
        for number, call in enumerate(turn.calls):
            yield turn.index, call, results[number] if number < len(results) else None
