"""The path that a GPU takes, without one: tensors on the device `meta` have shapes and dtypes, and no numbers.

An operation on tensors of two devices, or of shapes or dtypes that do not fit, fails here as it would there. What a
kernel computes, and how fast, is not shown by this. Captured decode steps are those of a stand-in for CUDA graphs that
replays tensor operations: the model's own numbers.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from agentrl_cli.config import Config
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.inference.batched_cache import Kept
from agentrl_cli.inference.batched_forward import BatchedForward
from agentrl_cli.inference.cuda_graphs import CudaCapture, GraphRunner
from agentrl_cli.inference.engine import PagedEngine
from agentrl_cli.inference.kv_cache import BLOCK, BlockPool, KVCache
from agentrl_cli.inference.model_runner import ModelRunner
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.inference.request import Request, TokenSequence
from agentrl_cli.inference.sampler import draw, steer
from agentrl_cli.learning.forward import compute
from agentrl_cli.learning.packing import Segment, pack
from agentrl_cli.learning.padded_forward import continue_block, decoder_of
from agentrl_cli.policies.device_check import try_device
from agentrl_cli.policies.load import runner_for
from agentrl_cli.store import Store
from agentrl_cli.types import Sampling
from benchmarks.architectures import build
from tests.helpers.graph_tape import Mode, record
from tests.helpers.local import VOCAB, check_against_generate, check_turn, policy_of, prompts, tiny
from tests.helpers.second_device import NAME, install
from tests.helpers.train import spawn, write_model, write_project


class OneDevice(Mode):  # type: ignore[misc]  # a class of torch
    """Raises where an operation mixes devices, or a product mixes dtypes: `meta` alone lets some of it pass."""

    FREE = ("copy_", "_to_copy", "index.Tensor", "index_put", "set_", "detach")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [
            t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor) and t.dim()
        ]
        if not any(name in str(func) for name in self.FREE):
            assert len({t.device for t in tensors}) <= 1, f"{func} on {[t.device for t in tensors]}"
        if "mm" in str(func) or "scaled_dot" in str(func):
            assert len({t.dtype for t in tensors if t.is_floating_point()}) <= 1, (
                f"{func} of two dtypes"
            )
        return func(*args, **(kwargs or {}))


def test_the_check_itself() -> None:
    there = torch.empty(2, 4, device="meta")
    for wrong in (torch.zeros(4, 2), torch.empty(4, 2, device="meta", dtype=torch.bfloat16)):
        with pytest.raises(AssertionError, match="mm"), OneDevice():
            there @ wrong


class Unverified(ModelRunner):
    """Comparing needs numbers, which fake tensors lack."""

    def verify(self) -> None:
        """Nothing is compared."""


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [("qwen3", True), *((kind, False) for kind in ("gemma2", "gpt-oss"))],
)
def test_prompts_and_steps_stay_on_the_gpu(kind: str, adapter: bool) -> None:
    model = tiny(kind)
    if adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    runner = Unverified(model.to("meta", torch.bfloat16).eval())
    cache = KVCache(BlockPool(runner.layers, 400))
    common = np.arange(40, dtype=np.int32)
    contexts = [*(np.append(common, np.arange(n, dtype=np.int32)) for n in (22, 9)), common[:5]]
    with torch.inference_mode(), OneDevice():
        prefix: Any = cache.add_prefix(common)
        runner.prefill(cache.pool, [common], [0], [prefix[0].blocks])
        sequences = [TokenSequence(key=str(n), ids=ids) for n, ids in enumerate(contexts)]
        starts = [cache.begin(sequence) for sequence in sequences]
        assert starts == [40, 40, 4]
        new = [(s, start) for s, start in zip(sequences, starts, strict=True) if start is not None]
        some = [(s, start) for s, start in new if s.length - 1 > start]
        tables = [s.block_table for s, _ in some]
        runner.prefill(cache.pool, [s.ids[at:-1] for s, at in some], [at for _, at in some], tables)
        for _ in range(4):  # into another block
            for sequence in sequences:
                assert cache.reserve(sequence)
            logits = runner.decode(cache.pool, sequences)
            for sequence in sequences:
                sequence.out.append(7)
    assert (
        logits.device.type == "meta"
        and logits.shape == (3, VOCAB)
        and logits.dtype == torch.bfloat16
    )
    for store in (*cache.pool.keys, *cache.pool.values):
        assert store is not None and store.device.type == "meta" and store.dtype == torch.bfloat16


FALLBACK = ("Qwen3_5", "Lfm2", "Mamba2", "DeepseekV3")  # Qwen4-Exp's indexer counts what it selects


@pytest.mark.parametrize("name", FALLBACK)
async def test_the_fallback_engine_stays_on_the_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of two lengths, two of them equal, steps, one that leaves, and a later turn of it.

    Transformers asks whether a mask is full, as in its own `generate`; that is answered. Any other number fails.
    """
    model = build(f"{name}ForCausalLM")
    abilities = BatchedForward(model).abilities
    forward = BatchedForward(model.to("meta", torch.bfloat16), abilities)
    monkeypatch.setattr(
        torch.Tensor, "__bool__", lambda self: False
    )  # a meta tensor has no values to ask
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def request(n: int, length: int) -> Request:
        ids = np.arange(length, dtype=np.int32)
        sampling = Sampling(max_new_tokens=8)
        return Request(
            key=str(n),
            ids=ids,
            sampling=sampling,
            future=future,
            uniforms=[0.5] * 8,
            started=0.0,
            order=n,
        )

    requests = [request(n, length) for n, length in enumerate((20, 20, 33))]
    with torch.inference_mode(), OneDevice():
        batches = forward.join_batches(forward.begin(requests, lambda request: None))
        for _ in range(3):
            for one in requests:
                one.out.append(7)
            for batch in batches:
                forward.decode(batch)
        (batch,) = batches
        alone, rest = batch.part([0]), batch.part([1, 2])
        kept = Kept(batch.requests[0].context[: alone.lengths[0]], alone.cache)
        later = forward.begin([request(3, len(kept.ids) + 6)], lambda request: kept)
        whole = forward.join_batches([rest, *later])
    assert sum(len(batch.requests) for batch in whole) == 3
    for batch in whole:
        assert (
            batch.logits is not None
            and batch.logits.device.type == "meta"
            and batch.logits.shape[1] == VOCAB
        )


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("Qwen3", "packed"),
        ("Gemma3", "packed"),
        ("Qwen3_5", "padded"),
        ("Lfm2", "padded"),
        ("Bert", "whole"),
    ],
)
def test_an_update_stays_on_the_gpu(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build({"Bert": "BertLMHeadModel"}.get(name, f"{name}ForCausalLM")).to(
        "meta", torch.bfloat16
    )
    prompt, lengths = np.arange(30, dtype=np.int32), (7, 12)
    ids = [np.concatenate([prompt, np.arange(n, 2 * n, dtype=np.int32)]) for n in lengths]
    groups = [
        [Segment(each, np.arange(len(each)) >= 30) for each in ids],
        [Segment(prompt, prompt >= 1)],
    ]
    packed = pack(groups)
    monkeypatch.setattr(
        torch.Tensor, "__bool__", lambda self: False
    )  # transformers asks for packed positions
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    with OneDevice():
        out = compute(way, model, packed, 0.7)
        states = out.logp.sum() + out.entropy.sum()
        if way == "padded":
            block = next(block for block in packed.blocks if len(block.segments) == 2)
            given = torch.from_numpy(packed.input_ids).to("meta")
            states = states + continue_block(decoder_of(model), given, block).sum()
        torch.autograd.backward(states)
        optimizer.step()
    assert out.logp.shape == (19 + 29,) and out.logp.device.type == "meta"
    assert all(p.grad is None or p.grad.device.type == "meta" for p in model.parameters())


def test_drawing_stays_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one question of the drawing asks for no number; that one is answered for it."""
    monkeypatch.setattr(
        torch.Tensor, "__bool__", lambda self: False
    )  # a meta tensor has no values to ask
    samplings = [
        Sampling(temperature=0.7, top_p=0.9, top_k=3),
        Sampling(temperature=0.0, bad_ids=(1, 2)),
        Sampling(min_p=0.1, repetition_penalty=1.3, allow=lambda out: [3, 4]),
    ]
    for vocabulary in (96, 151936):
        with OneDevice():
            logits = torch.empty(3, vocabulary, device="meta", dtype=torch.bfloat16)
            context = [np.array([5, 6], np.int32)] * 3
            steered, single = steer(logits, samplings, context, [None, None, [3, 4]])
            assert steered is not None and steered.device.type == "meta" and not single
            found = draw(logits, samplings, torch.empty(3, dtype=torch.float64), steered)
        for tensor in (
            found.ids,
            found.logp_sampled,
            found.logp_policy,
            found.entropy,
            found.top_ids,
        ):
            assert tensor.device.type == "meta" and tensor.shape[0] == 3


@pytest.mark.parametrize("lora", [False, True])
def test_commands_stay_on_their_device(tmp_path: Path, model: Path, lora: bool) -> None:
    adapter = {"enabled": lora, "r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    project = write_project(
        tmp_path, model, adapter=adapter, train={"steps": 1 + lora, "save_every": 1}
    )
    there = ["--set", f"model.device={NAME}"]
    commands = [
        ["train"],
        ["train", "--resume", "last", "--steps", "3"],
        ["eval", "--samples", "1"],
    ]
    for words in commands if lora else [*commands[:1], ["rollout", "-n", "2"]]:
        code, text = spawn(project, *words, *([] if "--resume" in words else there), before=install)
        assert code == 0, text
    with Store.open(project / "runs/agentrl.db", readonly=True) as store:
        run = next(run for run in store.runs.all() if run.kind == "train")
        assert run.status == "finished" and run.step == (3 if lora else 1)


# --- on a real GPU: `pytest -m gpu`, or `python benchmarks/gpu.py`, which also measures ---

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@pytest.mark.gpu
@on_a_gpu
def test_every_engine_and_way_has_the_numbers_of_transformers() -> None:
    verdict = try_device("cuda", 4.0)
    assert not [part for part in verdict.parts.values() if part.problem]


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"checkpointing": "on"}},
        {"adapter": {"enabled": True, "r": 2}, "rollout": {"cuda_graphs": "auto"}},
        {"adapter": {"enabled": True, "r": 2}, "model": {"quantization": "4bit"}},
    ],
    ids=["full", "lora-graphs", "qlora"],
)
def test_a_run_is_trained_resumed_and_evaluated(
    tmp_path: Path, sections: dict[str, dict[str, object]]
) -> None:
    if "model" in sections:
        pytest.importorskip("bitsandbytes")
    folder = write_model(tmp_path / "model", hidden=64, head_dim=32)
    sections = {**sections, "train": {**sections.get("train", {}), "steps": 2, "save_every": 1}}
    quantised = sections.pop("model", {}).get("quantization", "none")
    project = write_project(tmp_path / "project", folder, **sections)
    there = [
        "--set",
        "model.device=cuda",
        "--set",
        "model.dtype=auto",
        "--set",
        f"model.quantization={quantised}",
    ]
    for words in (
        ["train", *there],
        ["train", "--resume", "last", "--steps", "3"],
        ["eval", "--samples", "1", *there],
    ):
        code, text = spawn(project, *words)
        assert code == 0, text
    with Store.open(project / "runs/agentrl.db", readonly=True) as store:
        assert [run.step for run in store.runs.all() if run.kind == "train"] == [3]


# --- captured decode steps ---


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
async def test_captured_steps_of_ragged_episodes(kind: str) -> None:
    policy = await check_against_generate(tiny(kind), count=8, runner=taped)
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
