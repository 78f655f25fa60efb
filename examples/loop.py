"""A whole training in one file: groups of attempts with tools, advantages, one update, the new weights, an evaluation.

    python examples/loop.py            # the bundled model learns to use a calculator, on a CPU, in minutes
    python examples/loop.py out        # and its weights are written to the folder `out`

This is GRPO as `agentrl train` does it with `deterministic: true`: from the same settings both end with the same
weights, byte for byte, and a test holds that. What `agentrl train` adds is around the algorithm: a store with every
token, resume, alerts, evaluations that choose a checkpoint, workers, many algorithms. To try an idea, change a
function below; to keep it, make it an estimator or a loss (docs/algorithms.md).

Notation: a *group* is several attempts (*episodes*) at one task. An episode is a list of token ids that is only ever
appended to; the tokens that the model sampled are trained, those of the prompt and of tool results are not.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl_cli import Config, Episode, Task, load_pack
from agentrl_cli.evaluate import evaluate_policy
from agentrl_cli.learning.dispositions import decide
from agentrl_cli.learning.forward import logprobs
from agentrl_cli.learning.packing import Segment, micro_batches, pack, select_segments
from agentrl_cli.models.save import save_model
from agentrl_cli.policies.load import Loaded, load_policy
from agentrl_cli.rollout import Job, Rollout, seed_of
from agentrl_cli.types import Fact

SETTINGS: dict[str, Any] = {
    "deterministic": True,  # each place of a step has its own seeds, and sums are added in one order
    "seed": 3,
    "model": {"name": "tiny", "device": "cpu", "dtype": "float32"},
    "task": {"packs": ["calc-task"]},
    "rollout": {
        "prompts_per_step": 8,  # groups
        "group_size": 8,  # episodes of a group
        "temperature": 1.0,
        "max_turns": 4,
        "max_new_tokens": 48,
        "max_tokens": 384,
    },
    "algo": {"advantage": "grpo", "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2}},
    "train": {
        "steps": 20,
        "lr": 5e-4,
        "schedule": {"warmup_steps": 1},
        "eval": {"every": 10, "samples": 1},
    },
}
"""As in an agentrl.yaml; everything else has its default."""

Group = list[Episode]


# --- 1. sample -------------------------------------------------------------------------------------------------------


def tasks_of_step(tasks: Sequence[Task], config: Config, step: int) -> Iterator[Task]:
    """Yield the tasks of a step: each once in an epoch, in a new order every epoch."""
    wanted = config.rollout.prompts_per_step
    for position in range(step * wanted, (step + 1) * wanted):
        order = list(range(len(tasks)))
        random.Random(seed_of(config.seed, "order", position // len(tasks))).shuffle(order)
        yield tasks[order[position % len(tasks)]]


async def sample(rollout: Rollout, tasks: Sequence[Task], config: Config, step: int) -> list[Group]:
    """Return a group of episodes for each task of a step.

    All run at once: the model's turns are batched, a turn that calls a tool waits for its result, and the result is
    appended in the model's own chat template. An episode ends when the model answers without a call, or at a limit;
    then the pack's rewards grade it.
    """
    jobs = []
    for place, task in enumerate(tasks_of_step(tasks, config, step)):
        for number in range(config.rollout.group_size):
            seed = seed_of(config.seed, "train", step, place, number)
            jobs.append(Job(task, seed, number, f"{step}-{place}", slot=len(jobs)))
    episodes = await rollout.run(jobs)
    size = config.rollout.group_size
    return [episodes[start : start + size] for start in range(0, len(episodes), size)]


def select_trained(groups: Sequence[Group], rollout: Rollout) -> list[Group]:
    """Return what can be learned from.

    Left out are episodes that a fault of the machine ended (they say nothing of the model), those that no one could
    grade, those whose tokens the chat template would not reproduce, and groups whose rewards are all equal: with
    nothing to compare, every advantage in them is zero.
    """
    facts = decide(groups, drift=rollout.drift)
    kept = [[one for one in group if facts[one.id] is Fact.TRAINED] for group in groups]
    return [group for group in kept if group]


# --- 2. advantages ---------------------------------------------------------------------------------------------------


def advantages(group: Group, eps: float = 1e-4) -> list[float]:
    """Return (reward − mean of the group) / (standard deviation + eps) for each episode of a group.

    The group is the baseline: an attempt is good if it is better than the others at the same task, so no value network
    is needed. https://arxiv.org/abs/2402.03300
    """
    rewards = [episode.graded_reward for episode in group]
    mean = sum(rewards) / len(rewards)
    above = [reward - mean for reward in rewards]
    variance = sum(one * one for one in above) / max(len(above) - 1, 1)
    return [one / (math.sqrt(variance) + eps) for one in above]


# --- 3. one update ---------------------------------------------------------------------------------------------------


def clipped_loss(
    logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Return PPO's loss of each token: −min(ratio·A, clip(ratio)·A). https://arxiv.org/abs/1707.06347

    The ratio is that of the token's probability now and before the update. A token that has moved out of the bounds in
    the direction that its advantage wants gets no more gradient.
    """
    ratio = torch.exp(logp - old)
    bounded = ratio.clamp(1 - low, 1 + high)
    return torch.maximum(-ratio * advantage, -bounded * advantage)


def update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    config: Config,
    step: int,
) -> float:
    """Take one optimizer step over all groups; return the mean loss of a token."""
    train, options = config.train, config.algo.loss
    torch.manual_seed(
        seed_of(config.seed, "update", step) % 2**32
    )  # of dropout, where there is any
    for settings in optimizer.param_groups:
        settings["lr"] = train.lr * min(1.0, (step + 1) / max(train.schedule.warmup_steps, 1))
    tokens = sum(episode.trained_tokens for group in groups for episode in group)
    scores = [advantages(group) for group in groups]
    segments = [[Segment.of(episode) for episode in group] for group in groups]
    model.train()
    total = 0.0
    # As many episodes as the budget holds are laid end to end in one row, without padding, and the prompt that a group
    # shares is computed once. The gradients of the rows add up to that of the whole step, because each token's loss is
    # divided by the tokens of all rows.
    for row in micro_batches(segments, train.token_budget):
        packed = pack(select_segments(segments, row))
        logp = logprobs(model, packed, temperature=config.rollout.temperature).logp
        advantage = torch.cat(
            [torch.full((groups[g][m].trained_tokens,), scores[g][m]) for g, m in row]
        )
        # One pass over fresh samples: the old log-probabilities are the present ones, and every ratio is 1. Its
        # gradient is not 0: it is that of log p, which makes this A·∇log p.
        old = logp.detach()
        loss = clipped_loss(logp, old, advantage, options.clip_low, options.clip_high)
        mean = (1 / tokens * loss).sum()
        mean.backward()
        total += float(mean.detach())
    torch.nn.utils.clip_grad_norm_(
        [weight for weight in model.parameters() if weight.requires_grad], train.max_grad_norm
    )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    return total


# --- 4. the loop -----------------------------------------------------------------------------------------------------


async def train(config: Config) -> Loaded:
    """Train and return the model with its policy."""
    train = config.train
    task_pack = load_pack(config.task.packs[0])
    loaded = load_policy(None, config, base=Path.cwd(), trainable=True)
    model, policy = loaded.model, loaded.policy
    rollout = Rollout(policy, loaded.chat, {task_pack.name: task_pack}, config)
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad],
        lr=train.lr,
        betas=train.optimizer.betas,
        weight_decay=train.optimizer.weight_decay,
    )
    tasks, unseen = task_pack.tasks("train"), task_pack.tasks("validation")
    for step in range(train.steps):
        groups = await sample(rollout, tasks, config, step)
        rewards = [one.graded_reward for group in groups for one in group if one.graded]
        text = f"step {step + 1:3}: reward {sum(rewards) / max(len(rewards), 1):.3f}"
        if trained := select_trained(groups, rollout):
            await policy.rest()  # no turn is sampled while the weights change
            text += f", loss {update(model, optimizer, trained, config, step):+.4f}"
            text += f", {len(trained)} of {len(groups)} groups trained"
        await policy.publish(f"step {step + 1}")  # the next turn is sampled with the new weights
        print(text, flush=True)
        if train.eval.every and (step + 1) % train.eval.every == 0:
            probe = rollout.with_(temperature=config.eval.temperature)
            numbers = (train.eval.samples, config.seed)
            result = await evaluate_policy(probe, unseen, *numbers, run_id=None, step=step + 1)
            print(f"step {step + 1:3}: {result.pass_rate:.3f} of {len(unseen)} unseen tasks solved")
    return loaded


async def main(out: Path | None = None, config: Config | None = None) -> None:
    """Train, and write the weights."""
    loaded = await train(config or Config.model_validate(SETTINGS))
    if out is not None and loaded.folder is not None:
        save_model(loaded.model, loaded.folder, out)
        print(f"Next: agentrl chat --model {out}")
    await loaded.policy.close()


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:2])))
