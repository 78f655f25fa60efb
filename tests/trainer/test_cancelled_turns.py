"""An update beside a cancelled turn, whose step goes on in the sampler's thread, on the model that is trained."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.errors import ModelError, PolicyError
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.learning.forward import logprobs
from agentrl_cli.learning.packing import Segment, pack
from agentrl_cli.trainer import Trainer
from agentrl_cli.types import Episode, Sampling
from tests.helpers.local import policy_of, prompts, tiny
from tests.helpers.train import as_bytes, trainer_of

UPDATES, TURNS = 5, 24


class SlowStep:
    """A hook of a module that keeps the sampler's thread inside its forward for a moment."""

    def __init__(self) -> None:
        self.inside = threading.Event()

    def __call__(self, module: torch.nn.Module, given: Any) -> None:
        if threading.current_thread().name.startswith("policy"):
            self.inside.set()
            time.sleep(0.002)


async def cancelled_in_a_step(
    policy: LocalPolicy, step: SlowStep, number: int
) -> list[asyncio.Task[Any]]:
    """Turns that were cancelled while the sampler's thread computes one of their tokens; they are not awaited."""
    sampling = Sampling(max_new_tokens=60)
    turns = [
        asyncio.create_task(policy.generate(f"{number}-{n}", [5, 6, 7 + n], sampling))
        for n in range(TURNS)
    ]
    step.inside.clear()
    while not step.inside.is_set():
        await asyncio.sleep(0)
    for turn in turns:
        turn.cancel()
    return turns


async def trained(
    trainer: Trainer, groups: Sequence[Sequence[Episode]], disturbed: bool
) -> dict[str, torch.Tensor]:
    policy, step, turns = trainer.policy, SlowStep(), []
    assert isinstance(policy, LocalPolicy)
    if disturbed:
        policy.model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(step)
        policy.set_version(policy.weights_version)  # with new weights it looks for hooks
    before = trainer.loaded.model.config._attn_implementation
    for number in range(UPDATES):
        if disturbed:
            turns += await cancelled_in_a_step(policy, step, number)
        facts, _ = await trainer.learn(groups, number)
        assert "trained" in facts.values()
        for model in (trainer.loaded.model, policy.model):
            assert model.config._attn_implementation == before and not model.training
    ended = await asyncio.gather(*turns, return_exceptions=True)
    assert {type(error) for error in ended} <= {asyncio.CancelledError}
    return {name: weight.clone() for name, weight in trainer.loaded.model.state_dict().items()}


@pytest.mark.parametrize("staleness", [0, 1])
async def test_turns_cancelled_before_every_update_change_nothing(
    tmp_path: Path, model: Path, staleness: int
) -> None:
    weights, groups = [], None
    given: dict[str, Any] = {
        "rollout": {"async_staleness": staleness},
        "train": {"steps": UPDATES},
    }
    for disturbed in (False, True):
        async with trainer_of(tmp_path / str(disturbed), model, **given) as trainer:
            groups = groups or await trainer.collector.sample(0)
            weights.append(await trained(trainer, groups, disturbed))
    assert as_bytes(weights[0]) == as_bytes(weights[1])


@pytest.mark.parametrize("waits", ["rest", "turn"])
async def test_who_cancels_a_turn_can_wait_until_its_step_is_over(waits: str) -> None:
    policy, step, done = policy_of(tiny()), SlowStep(), []
    policy.model.get_submodule("model.layers.0").register_forward_pre_hook(step)
    policy.model.get_submodule("model.layers.1").register_forward_hook(lambda *_: done.append(1))
    policy.set_version("hooked")
    turn, *_ = await cancelled_in_a_step(policy, step, 0)
    begun = len(done)
    await (policy.rest() if waits == "rest" else asyncio.wait([turn]))
    after = len(done)
    await asyncio.sleep(0.01)
    assert after == len(done) > begun
    assert waits == "turn" or policy.metrics["rollout/kv_blocks"] == 0
    said = await policy.generate("b", prompts()[1], Sampling(max_new_tokens=3, stop_ids=()))
    assert len(said.ids) == 3
    await policy.close()


async def test_a_model_that_was_changed_is_named_without_internals() -> None:
    def without(module: Any, args: Any, given: Any) -> Any:
        """Take from a layer what tells it how to attend."""
        return args, {name: one for name, one in given.items() if name not in ("view", "packing")}

    policy = policy_of(tiny())
    packed = pack([[Segment(np.arange(6, 12, dtype=np.int32), np.arange(6) > 2)]])
    logprobs(policy.model, packed)
    for layer in policy.model.model.layers:
        layer.self_attn.register_forward_pre_hook(without, with_kwargs=True)
    policy.set_version("changed")
    with pytest.raises(PolicyError, match="was changed while it was in use") as sampling:
        await policy.generate("a", prompts()[0], Sampling(max_new_tokens=3))
    with pytest.raises(ModelError, match="was changed while it was in use") as learning:
        logprobs(policy.model.train(), packed)
    for error in (sampling.value, learning.value):
        assert "agentrl train --resume last" in error.hint and "asked" not in error.message
    await policy.close()
