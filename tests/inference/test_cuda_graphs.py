"""Captured decode steps, by a stand-in for CUDA graphs that replays tensor operations: the model's own numbers."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.inference.cuda_graphs import CudaCapture, GraphRunner
from agentrl_cli.inference.engine import PagedEngine
from agentrl_cli.inference.kv_cache import BLOCK
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.policies.load import runner_for
from agentrl_cli.types import Sampling
from tests.helpers.graph_tape import record
from tests.helpers.local import check_against_generate, check_turn, policy_of, prompts, tiny

Step = Callable[[], None]
taped = partial(GraphRunner, make=lambda: record)


def graphs(policy: LocalPolicy) -> GraphRunner:
    assert isinstance(policy._engine, PagedEngine) and isinstance(
        policy._engine.runner, GraphRunner
    )
    return policy._engine.runner


# --- the stand-in itself ---------------------------------------------------------------------------------------------


def test_the_tape_plays_operations_not_python() -> None:
    given, out, called = torch.tensor([3.0, 4.0]), torch.zeros(2), [0]

    def step() -> None:
        called[0] += 1
        out.copy_((given * called[0]).view(1, 2)[0].add_(1))

    play = record(step)
    given.copy_(torch.tensor([5.0, 6.0]))
    play()
    # read again from where it lay; the factor is the first one's
    assert called == [1] and out.tolist() == [6.0, 7.0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda given: given * float(given.sum()),
        lambda given: given.nonzero(),
        lambda given: given[given > 3],
        lambda given: given + torch.tensor([1.0, 2.0]),
    ],
)
def test_the_tape_refuses_what_a_graph_cannot_hold(
    wrong: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    given = torch.tensor([3.0, 4.0])
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        record(lambda: wrong(given).sum())  # type: ignore[arg-type]


# --- the model's own numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt-oss"])
async def test_captured_steps_of_sixteen_ragged_episodes(kind: str) -> None:
    policy = await check_against_generate(tiny(kind), runner=taped)
    runner = graphs(policy)
    assert policy.describe() == "paged with CUDA graphs" and not runner.why
    assert runner.captures >= 3 and runner.replays > 0


async def test_new_weights_keep_graphs_and_a_pool_elsewhere_drops_them() -> None:
    model, ids = tiny(), prompts()[0]
    policy = policy_of(model, runner=taped, rows=2)
    await check_turn(policy, model, ids, 20)
    await policy.rest()
    first = list(graphs(policy).graphs.values())
    with torch.no_grad():  # as an optimizer's step does: in their place
        model.model.layers[0].mlp.up_proj.weight.mul_(1.3)
    policy.set_version("1")
    await check_turn(policy, model, ids, 20)
    assert first and list(graphs(policy).graphs.values())[: len(first)] == first
    await check_turn(policy, model, range(6, 46), 40, "b")
    sampling = Sampling(temperature=0, max_new_tokens=4)
    many = (policy.generate(f"c{n}", [7 + n] * 200, sampling) for n in range(8))
    await asyncio.gather(*many)
    left = graphs(policy).graphs.values()
    assert not set(map(id, first)) & set(map(id, left)), "the pool has grown"


async def test_what_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    works = [True]

    def capture(step: Step) -> Step:
        if not works[0]:
            raise RuntimeError("no more")
        return record(step)

    model = tiny()
    policy = policy_of(
        model,
        runner=partial(GraphRunner, make=lambda: capture),
        memory=64 * BLOCK * 2 * 2 * 2 * 8 * 4,
    )
    works[0] = False
    with caplog.at_level(logging.WARNING):
        await check_turn(policy, model, [7] * 40, 6)
    assert (
        "capturing a step failed (RuntimeError: no more)" in policy.describe()
        and "slower" in caplog.text
    )


async def test_a_graph_that_holds_a_number_is_found_out() -> None:
    """Its second use, with other numbers, differs from the step."""

    def stale(step: Step) -> Step:
        replays = iter([record(step)])

        def once() -> None:
            for replay in replays:
                replay()

        return once

    model = tiny()
    policy = policy_of(model, runner=partial(GraphRunner, make=lambda: stale))
    await check_turn(policy, model, [7] * 40, 6)
    assert "differs by" in policy.engine_why


AUTO = {"cuda_graphs": "auto"}


@pytest.mark.parametrize(
    ("device", "sections", "captures"),
    [
        ("cuda", {}, False),
        ("cuda", {"rollout": AUTO}, True),
        ("cpu", {"rollout": AUTO}, False),
        ("cuda", {"rollout": AUTO, "deterministic": True}, False),
        (
            "cuda",
            {
                "rollout": {**AUTO, "async_staleness": 1},
                "adapter": {"enabled": True, "dropout": 0.1},
            },
            False,
        ),
    ],
)
def test_nothing_is_captured_by_default(
    device: str, sections: dict[str, Any], captures: bool
) -> None:
    settings = PolicySettings.of(Config.model_validate(sections))
    assert (runner_for(settings, torch.device(device)) is not None) is captures


# --- capturing on a GPU ----------------------------------------------------------------------------------------------


class StandIn:
    """What CudaCapture uses of torch.cuda, written down in the order of its use."""

    def __init__(self, breaks: bool = False) -> None:
        self.log: list[str] = []
        self.breaks = breaks
        self.current = "main"
        state = SimpleNamespace(
            clone_state=lambda: "copy",
            graphsafe_set_state=lambda other: self.log.append(f"generator is a {other}"),
        )
        self.default_generators = (None, state)

    def current_device(self) -> int:
        return 1

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name="side", wait_stream=lambda other: self.log.append(f"side waits for {other.name}")
        )

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name=self.current,
            wait_stream=lambda other: self.log.append(f"main waits for {other.name}"),
        )

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        inspect.signature(torch.cuda.graph.__init__).bind(self, *args, **kwargs)
        assert kwargs["pool"] == "pool" and kwargs["stream"].name == self.current == "side"
        self.log.append("begin")
        yield
        if self.breaks:
            self.current = "lost"  # torch leaves its stream set where the end of a capture raises
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.log.append("end")


def test_a_cuda_graph_is_warmed_up_and_recorded_beside() -> None:
    cuda = StandIn()
    play = CudaCapture(torch.device("cuda"), cuda)(
        lambda: cuda.log.append(f"step on {cuda.current}")
    )
    assert cuda.log == [
        "side waits for main",
        "step on side",
        "begin",
        "step on side",
        "end",
        "main waits for side",
    ]
    play()
    assert cuda.log[-1] == "replay" and cuda.current == "main"
    cuda = StandIn(breaks=True)
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaCapture(torch.device("cuda"), cuda)(lambda: None)
    assert cuda.current == "main"
    # torch may leave the generator taken, and dropout would fail in the next update.
    assert cuda.log[-2:] == ["generator is a copy", "main waits for side"]
    assert all(hasattr(torch.Generator, name) for name in ("clone_state", "graphsafe_set_state"))
