"""After an update: whether every server samples with the trainer's new weights.

A server that kept old weights, or an adapter in a wrong slot, samples without an error. So each of them continues a few
contexts of the step, and its log-probabilities are compared with the trainer's own of the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.protocols import Served, TrainablePolicy
from agentrl_cli.types import Episode, group_pairs

if TYPE_CHECKING:
    from agentrl_cli.config.records import TrainerSettings
    from agentrl_cli.learning.protocols import ModelCompute

CONTEXTS = 2
TOKENS = 8


async def probe(
    policy: TrainablePolicy,
    compute: ModelCompute,
    groups: Sequence[Sequence[Episode]],
    config: TrainerSettings,
) -> dict[str, float]:
    """`probe/logp_difference`: the largest mean difference of a server in nats. {} for a policy in this process.

    A server that fails here is left to the next turn, and one whose report is of another distribution is not compared.
    """
    servers = policy.servers() if isinstance(policy, Served) else ()
    episodes = [episode for group in groups[:CONTEXTS] for episode in group[:1]]
    limit = config.rollout.max_tokens - TOKENS
    prompts = [e.tokens.ids[: int(np.flatnonzero(e.tokens.trained_mask)[0])] for e in episodes]
    prompts = [ids for ids in prompts if len(ids) <= limit and not any(e.images for e in episodes)]
    if not servers or not prompts:
        return {}
    from agentrl_cli.learning.compute import MicroBatch  # needed only by a run with servers
    from agentrl_cli.learning.packing import Segment

    sampling = config.rollout.sampling(
        max_new_tokens=TOKENS, seed=config.seed, top_p=1.0, top_k=0, min_p=0.0
    )
    asked = [(server, ids) for server in servers for ids in prompts]
    calls = [server.generate(f"probe-{n}", ids, sampling) for n, (server, ids) in enumerate(asked)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    batches, theirs, of = [], [], []
    for (server, ids), answer in zip(asked, answers, strict=True):
        if isinstance(answer, PolicyError):
            continue
        if isinstance(answer, BaseException):
            raise answer
        if np.isfinite(answer.logp_policy).all():
            both = np.concatenate([ids, answer.ids]).astype(np.int32)
            batches.append(MicroBatch([[Segment(both, np.arange(len(both)) >= len(ids))]]))
            theirs.append(answer.logp_policy)
            of.append(server)
    if not batches:
        return {}
    gaps = group_pairs(
        (id(server), np.abs(scores.logp - logps))
        for server, logps, scores in zip(of, theirs, compute.forward(batches), strict=True)
    )
    return {
        "probe/logp_difference": max(float(np.concatenate(one).mean()) for one in gaps.values())
    }
