"""Decode steps of fixed shapes, as they are and played from a recording: the numbers of the model's own `generate`."""

from __future__ import annotations

import asyncio
import copy
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

from agentrl_cli.config import Config
from agentrl_cli.policies import local_graphs, local_memory, local_pages
from agentrl_cli.policies.local import LocalPolicy
from agentrl_cli.policies.local_batch import DecodeBatch
from agentrl_cli.policies.local_cache import BLOCK
from agentrl_cli.policies.local_engine import Shared
from agentrl_cli.policies.local_graphs import CudaCapture, addresses
from agentrl_cli.policies.local_make import recorder
from agentrl_cli.policies.local_paged import PagedBatch
from agentrl_cli.policies.local_pages import Paged
from agentrl_cli.policies.local_probe import probe_engine
from agentrl_cli.policies.local_request import Request
from agentrl_cli.types import Sampling
from tests.helpers.graph_tape import record, tapes
from tests.helpers.local import check_against_generate, forced, greedy, policy_of, prompts, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's, on transformers 5

KINDS = ["qwen3", "qwen2", "llama", "minimind", "mistral", "qwen2-sliding", "gemma2", "gpt-oss"]
Step = Callable[[], None]


def plainly() -> Callable[[Step], Step]:
    """Records nothing: steps have fixed shapes, and run as they are."""
    return lambda step: step


def paged(policy: LocalPolicy) -> PagedBatch:
    assert isinstance(policy._batch, PagedBatch)
    return policy._batch


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()


# --- the stand-in itself ---------------------------------------------------------------------------------------------


def test_the_tape_plays_operations_not_python() -> None:
    given, out = torch.tensor([3.0, 4.0]), torch.zeros(2)
    called = [0]

    def step() -> None:
        called[0] += 1
        out.copy_((given * called[0]).view(1, 2)[0].add_(1))

    play = record(step)
    given.copy_(torch.tensor([5.0, 6.0]))
    play()
    assert called == [1] and out.tolist() == [6.0, 7.0]  # read anew from where it lay; the factor is the first one's


@pytest.mark.parametrize(
    "wrong",
    [
        lambda given: given * float(given.sum()),
        lambda given: given.nonzero(),
        lambda given: given[given > 3],
        lambda given: given + torch.tensor([1.0, 2.0]),
    ],
)
def test_the_tape_refuses_what_a_graph_cannot_hold(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    given = torch.tensor([3.0, 4.0])
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        record(lambda: wrong(given).sum())  # type: ignore[arg-type]


# --- the model's own numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_recorded_steps_of_sixteen_ragged_episodes(kind: str) -> None:
    """Rows join and leave between steps; turns come back to their pages; windows are shorter than conversations."""
    policy = await check_against_generate(tiny(kind), record=tapes)
    steps = paged(policy).steps
    assert policy.engine == "shared" and "CUDA graphs" in policy.engine_line and not steps.why
    assert steps.captures >= 3 and steps.plays > steps.captures
    # What is shared is computed once, under every kind of attention.
    assert policy.prefill_tokens < sum(len(ids) for ids in prompts(count=16))


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gpt-oss"])
async def test_steps_of_fixed_shapes_as_they_are(kind: str) -> None:
    policy = await check_against_generate(tiny(kind), record=plainly)
    assert isinstance(policy._batch, PagedBatch)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
async def test_an_adapter_and_a_preemption(kind: str) -> None:
    """Memory for five blocks of the twelve or more that four rows come to, and rows that grow past widths of a step."""
    model = with_lora(tiny(kind))
    each = 2 * 2 * 2 * 8 * 4 * BLOCK
    policy = policy_of(model, memory=5 * each, record=tapes)
    sampling = Sampling(temperature=0, max_new_tokens=80)
    everyone = prompts()[:4]
    several = await asyncio.gather(*(policy.generate(f"e{n}", ids, sampling) for n, ids in enumerate(everyone)))
    for number, (ids, said) in enumerate(zip(everyone, several, strict=True)):
        wanted, logps = greedy(model, ids, 80, None) if number == 3 else forced(model, ids, 80, said=said.ids.tolist())
        assert said.ids.tolist() == wanted[:80] and abs(said.logp_policy - logps).max() < 1e-4
    assert policy.metrics["rollout/preemptions"] >= 1
    assert policy.metrics["rollout/kv_blocks_peak"] <= 5 and paged(policy).pool.pages == 6
    assert len({pages for _, pages in paged(policy).steps.graphs}) > 1
    await policy.close()
    await check_against_generate(model, count=4, memory=7 * each, record=tapes)


async def test_beginnings_of_every_length_and_rows_without_one() -> None:
    model = tiny("mistral")
    policy = policy_of(model, rows=16, record=tapes)
    rng = np.random.default_rng(2)
    groups = [rng.integers(0, 96, n).tolist() for n in (64, 41, 150, 33)]
    everyone = [*(ids for ids in groups for _ in range(3)), rng.integers(0, 96, 30).tolist(), [7]]
    counts = [3, 9, 20, 12, 1, 7, 5, 16, 2, 11, 30, 4, 6, 40]
    every = await asyncio.gather(
        *(
            policy.generate(f"e{n}", ids, Sampling(temperature=0, max_new_tokens=counts[n]))
            for n, ids in enumerate(everyone)
        )
    )
    for ids, count, said in zip(everyone, counts, every, strict=True):
        tokens, logps = greedy(model, ids, count, None)
        assert said.ids.tolist() == tokens and abs(said.logp_policy - logps).max() < 1e-4
    assert policy.prefill_tokens < sum(map(len, groups)) + 40
    # A context that takes back what was said: what still agrees is used, a beginning in part.
    for again in ([*everyone[6][:140], 3, 4], [*everyone[0], 1, 2, 3], everyone[9][:20]):
        said = await policy.generate("e6", again, Sampling(temperature=0, max_new_tokens=4))
        assert said.ids.tolist() == greedy(model, again, 4, None)[0]
    await policy.close()


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_what_fills_up_behind_a_window_stays_a_number(kind: str) -> None:
    """A row of few new tokens beside one of many: page 0 has what fills it up, and every step reads that page."""
    engine, device, pool = Shared(tiny(kind)), torch.device("cpu"), local_pages.Pool(2, 8)
    places = []
    for _ in range(2):
        shelf = local_pages.PagedShelf(pool, 2 * BLOCK, 2)
        shelf.resize(1)
        places.append((shelf, 0))
    ids = torch.randint(0, 96, (2, 60), generator=torch.Generator().manual_seed(1))
    for starts, counts in (([0, 0], [60, 1]), ([60, 0], [3, 60]), ([63, 60], [0, 2])):
        view = local_pages.paged(pool, places, starts, counts, [], device)
        with torch.inference_mode():
            engine(ids[:, : max(counts)], view, head=False)
        assert all(bool(store.isfinite().all()) for store in (*pool.keys, *pool.values) if store is not None)


async def test_sixteen_bits() -> None:
    model = tiny().to(torch.bfloat16)
    policy = policy_of(model, record=tapes)
    said = await policy.generate("a", prompts()[0], Sampling(temperature=0, max_new_tokens=12))
    assert len(said.ids) == 12 and paged(policy).steps.plays and not policy.engine_why.count("CUDA")
    assert paged(policy).pool.keys[0].dtype == torch.bfloat16  # type: ignore[union-attr]
    await policy.close()


# --- what stays valid, and what does not -----------------------------------------------------------------------------


async def test_new_weights_in_their_place_keep_recordings_and_elsewhere_drop_them() -> None:
    model = with_lora(tiny())
    policy = policy_of(model, record=tapes)
    ids, sampling = prompts()[0], Sampling(temperature=0, max_new_tokens=20)

    async def check() -> int:
        said = await policy.generate("a", ids, sampling)
        assert said.ids.tolist() == greedy(model, ids, 20, None)[0]
        return paged(policy).steps.captures

    def weights() -> list[Any]:
        return [p for name, p in model.named_parameters() if "lora_B" in name]

    first = await check()
    with torch.no_grad():
        for weight in weights():
            weight.mul_(-2.0)  # as an optimizer, or local_twin.copy_trained, leaves them
    policy.set_version("in place")
    assert await check() == first
    weights()[0].data = weights()[0].data * 2
    policy.set_version("elsewhere")
    second = await check()
    assert second > first
    with model.disable_adapter():
        assert addresses(model) != paged(policy).steps._fixed[1:]
        policy.set_version("without")
        assert await check() > second
    await policy.close()


async def test_a_pool_that_grows_drops_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would write where the pages were."""
    monkeypatch.setattr(local_pages, "FIRST", 2)
    model = tiny()
    policy = policy_of(model, record=tapes)
    for n, size in enumerate((20, 60, 90, 140)):
        ids = [7 + n] * size
        said = await policy.generate(f"e{n}", ids, Sampling(temperature=0, max_new_tokens=12))
        assert said.ids.tolist() == greedy(model, ids, 12, None)[0]
    await policy.generate("e0", [7] * 20, Sampling(temperature=0, max_new_tokens=12))
    assert paged(policy).pool.moves > 4 and paged(policy).steps.captures > len(paged(policy).steps.graphs)
    await policy.close()


def test_pages_of_a_pool_that_was_cleared_do_not_come_back() -> None:
    pool = local_pages.Pool(1, 8)
    old = local_pages.PagedShelf(pool, 2 * BLOCK, 1)
    old.resize(1)
    assert old.pages == [[1, 2]] and pool.bytes == 0
    pool.clear()
    new = local_pages.PagedShelf(pool, 2 * BLOCK, 1)
    new.resize(2)
    new.lengthen(3 * BLOCK)
    assert sorted(new.pages[0] + new.pages[1]) == [1, 2, 3, 4, 5, 6] and new.blocks == 6
    free = list(pool.free)
    del old
    assert list(pool.free) == free
    new.resize(1)
    del new
    assert sorted(pool.free) == list(range(1, pool.pages))


async def test_pages_come_back_and_stay_or_go_while_nobody_samples() -> None:
    policy = policy_of(tiny(), record=tapes)
    batch = paged(policy)
    for rounds in range(2):
        said = [policy.generate(f"e{n}", ids, Sampling(max_new_tokens=9)) for n, ids in enumerate(prompts())]
        await asyncio.gather(*said)
        assert batch.pool.pages > 1 and batch.used > 0
        assert len(batch.pool.free) == batch.pool.pages - 1 - batch.used, "every page is free or counted"
        if not rounds:
            captures = batch.steps.captures
        policy.rest()
        assert batch.used == 0 and len(batch.pool.free) == batch.pool.pages - 1
    assert batch.steps.captures == captures and batch.bytes
    batch.model.train()
    await policy.generate("t", prompts()[0], Sampling(max_new_tokens=2))
    assert not batch.model.training, "until nobody samples"
    policy.rest()
    assert batch.model.training
    batch.clear()
    assert batch.bytes == 0 and not batch.steps.graphs and batch.steps._logits is None
    ids = prompts()[1]
    again = await policy.generate("x", ids, Sampling(temperature=0, max_new_tokens=9))
    assert again.ids.tolist() == greedy(tiny(), ids, 9, None)[0]
    await policy.close()


async def test_an_episode_that_gave_way_to_a_row_of_its_own_batch_is_computed_again() -> None:
    """Its pages were given to the other one: to take them back as well would be more memory than there is."""
    model, loop, budget = tiny("qwen3"), asyncio.get_running_loop(), 7
    limits = {"rows": 4, "lanes": False, "lane_length": 96, "limit": 96, "budget": budget}
    batch = PagedBatch(model, Shared(model), make=tapes, version="v", **limits)

    def asked(key: str, ids: list[int]) -> Request:
        sampling = Sampling(temperature=0, max_new_tokens=2)
        return Request(key, np.array(ids, np.int32), sampling, loop.create_future(), None, [0.5] * 2, 0.0)

    contexts: dict[str, list[int]] = {}
    for number, (key, length) in enumerate({"oldest": 66, "grows": 28, "idle": 28}.items()):
        one = asked(key, [(number + 7 * n) % 90 for n in range(length)])
        while one.stop is None:
            batch.step([one] if not one.out else [])
        contexts[key] = one.context.tolist()
    assert list(batch.parked) == ["oldest", "grows", "idle"] and batch.used == budget
    again = [asked("grows", [*contexts["grows"], *range(30)]), asked("oldest", [*contexts["oldest"], 1])]
    while any(one.stop is None for one in again):
        batch.step([one for one in again if not one.out])
        assert batch.used <= budget and batch.pool.pages <= budget + 1
    for one in again:
        assert one.out == forced(model, one.ids.tolist(), 2, said=one.out)[0]
    batch.clear()


def test_what_would_stay_beside_a_training_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(policy_of(tiny(), record=tapes, trains=True)._batch, PagedBatch)
    monkeypatch.setattr(local_memory, "free_memory", lambda device: 8 * 2**28)  # keys and values take an eighth
    policy = policy_of(tiny(), record=tapes, trains=True)
    assert type(policy._batch) is DecodeBatch and "beside a training" in policy.engine_line
    assert isinstance(policy_of(tiny(), record=tapes)._batch, PagedBatch)
    monkeypatch.setattr(local_memory, "free_memory", lambda device: 8 * 2**25)
    assert "recorded steps take is more" in policy_of(tiny(), record=tapes).engine_line
    # 6 rows of 256 positions: logits of 96 words; keys, values and mask (2 · 16 + 1 a position), 3 · 64, 6 · 32 numbers
    wanted = 6 * 96 * 4 + 6 * (256 * 33 + 3 * 64 + 6 * 32) * 4 + 32 * 2**21
    sizes = {"vocabulary": 96, "inner": 64, "hidden": 32, "kv_width": 16, "itemsize": 4}
    assert local_memory.graph_bytes(6, 256, **sizes) == wanted
    # 256 rows of 8,192 and 151,936 words: gathered in parts; logits in 16 bits, five float32 of 110 of them for a draw
    sizes = {"vocabulary": 151936, "inner": 4864, "hidden": 896, "kv_width": 128, "itemsize": 2}
    drawn, layer = 110 * 151936 * 20, 2**28 + 256 * (8192 + 3 * 4864 + 6 * 896) * 2
    assert local_memory.graph_bytes(256, 8192, **sizes) == 256 * 151936 * 2 + max(drawn, layer) + 32 * 2**21


async def test_rows_of_very_different_lengths_go_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a long row does not make the others gather as much."""
    model = tiny()
    page = 2 * 2 * 8 * 4 * BLOCK  # keys and values of a layer: two heads of 8
    monkeypatch.setattr(local_memory, "GATHERED", 12 * page)
    policy = policy_of(model, record=tapes)
    everyone = [[7 + n] * size for n, size in enumerate((200, 10, 20, 30, 60, 5))]
    sampling = Sampling(temperature=0, max_new_tokens=20)
    several = await asyncio.gather(*(policy.generate(f"e{n}", ids, sampling) for n, ids in enumerate(everyone)))
    for ids, said in zip(everyone, several, strict=True):
        wanted, logps = forced(model, ids, 20, said=said.ids.tolist())
        assert said.ids.tolist() == wanted and abs(said.logp_policy - logps).max() < 1e-4
    shapes = set(paged(policy).steps.graphs)
    assert {rows for rows, pages in shapes if pages > 5} == {1} and max(rows * pages for rows, pages in shapes) <= 12
    await policy.close()


async def test_a_bound_on_recordings_and_widths_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_graphs, "MOST_GRAPHS", 2)
    policy = await check_against_generate(tiny(), record=tapes)
    steps = paged(policy).steps
    assert steps.captures > 2 >= len(steps.graphs)
    assert [steps.shape(n, 1)[0] for n in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]  # six rows at most
    assert [steps.shape(1, n)[1] for n in (1, 2, 3, 4, 5, 6, 9)] == [2, 2, 3, 5, 5, 8, 9]  # 256 positions, a page more


# --- where recording fails -------------------------------------------------------------------------------------------


async def test_a_model_that_cannot_be_recorded_is_named_when_it_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """Experts one after the other: the host asks which are wanted."""
    with caplog.at_level(logging.WARNING):
        model = tiny("gpt-oss", experts_implementation="eager")
        policy = await check_against_generate(model, count=4, record=tapes)
    assert type(policy._batch) is DecodeBatch and "CUDA graphs" not in policy.engine_line.split("(")[0]
    assert "no CUDA graphs: recording a step failed" in policy.engine_why and "nonzero" in policy.engine_why
    assert caplog.text.count("no CUDA graphs") == 1


def failing(after: int) -> Callable[[], Callable[[Step], Step]]:
    left = [after]

    def capture(step: Step) -> Step:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return record(step)

    return lambda: capture


async def test_a_recording_that_fails_later_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        policy = await check_against_generate(tiny(), count=8, record=failing(3))
    assert paged(policy).steps.captures == 2 and not paged(policy).steps.graphs
    assert policy.engine_why.endswith("recording a step failed (RuntimeError: CUDA error: out of memory)")
    assert caplog.text.count("no CUDA graphs") == 1 and "with CUDA graphs" not in policy.engine_line


def baked() -> Callable[[Step], Step]:
    """A recording that always gives what the step gave when it was recorded."""

    def capture(step: Step) -> Step:
        cell = inspect.getclosurevars(step).nonlocals
        step()
        logits = cell["self"]._logits
        first = logits.clone()
        return lambda: logits.copy_(first)

    return capture


async def test_a_recording_that_holds_a_number_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """Its first use looks right: the second, with other numbers, tells."""
    with caplog.at_level(logging.WARNING):
        policy = policy_of(tiny(), record=baked)
    assert type(policy._batch) is DecodeBatch
    assert "a recorded step differs by" in policy.engine_why and "a recorded step differs by" in caplog.text
    said = await policy.generate("a", prompts()[0], Sampling(temperature=0, max_new_tokens=5))
    assert said.ids.tolist() == greedy(tiny(), prompts()[0], 5, None)[0]
    await policy.close()


# --- CUDA ------------------------------------------------------------------------------------------------------------


class StandIn:
    """What CudaCapture uses of torch.cuda, written down in the order of its use."""

    def __init__(self, breaks: bool = False) -> None:
        self.log: list[str] = []
        self.breaks = breaks
        self.current = "main"
        state = SimpleNamespace(
            clone_state=lambda: "copy", graphsafe_set_state=lambda other: self.log.append(f"generator is a {other}")
        )
        self.default_generators = (None, state)

    def current_device(self) -> int:
        return 1

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(name="side", wait_stream=lambda other: self.log.append(f"side waits for {other.name}"))

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name=self.current, wait_stream=lambda other: self.log.append(f"main waits for {other.name}")
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
    play = CudaCapture(torch.device("cuda"), cuda)(lambda: cuda.log.append(f"step on {cuda.current}"))
    assert cuda.log == ["side waits for main", "step on side", "begin", "step on side", "end", "main waits for side"]
    play()
    assert cuda.log[-1] == "replay" and cuda.current == "main"
    cuda = StandIn(breaks=True)
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaCapture(torch.device("cuda"), cuda)(lambda: None)
    assert cuda.current == "main"
    # torch may leave the generator taken, and dropout would fail in the next update.
    assert cuda.log[-2:] == ["generator is a copy", "main waits for side"]
    assert all(hasattr(torch.Generator, name) for name in ("clone_state", "graphsafe_set_state"))


async def test_an_engine_that_fails_over_pages_goes_on_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nand more")

    monkeypatch.setattr(Paged, "attend", refuse)
    policy = policy_of(tiny("qwen3"), record=tapes)
    assert "steps of fixed shapes fail (RuntimeError: CUDA error: no kernel image is available)" in policy.engine_why
    said = await policy.generate("e", [1, 2, 3], Sampling(temperature=0, max_new_tokens=4))
    assert len(said.ids) == 4 and not isinstance(policy._batch, PagedBatch)
    await policy.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", KINDS)
async def test_on_a_gpu(kind: str) -> None:
    """The same conversations by real graphs; the CPU says what is right."""
    model = tiny(kind)
    there = copy.deepcopy(model).cuda()
    policy = policy_of(there, record=partial(CudaCapture, torch.device("cuda")))
    sampling = Sampling(temperature=0, max_new_tokens=40)
    for _ in range(2):
        several = await asyncio.gather(*(policy.generate(f"e{n}", ids, sampling) for n, ids in enumerate(prompts())))
        for ids, said in zip(prompts(), several, strict=True):
            tokens, logps = forced(model, ids, 40, said=said.ids.tolist())
            assert said.ids.tolist() == tokens and abs(said.logp_policy - logps).max() < 1e-3
    assert not policy.engine_why.count("no CUDA graphs") and paged(policy).steps.plays > 20
    await policy.close()


@pytest.mark.parametrize("works", [True, False])
def test_doctor_tries_recorded_steps_with_a_small_model(tmp_path: Path, works: bool) -> None:
    tiny("gpt-oss").config.save_pretrained(tmp_path)
    name, why = probe_engine(tmp_path, "cpu", "float32", record=tapes if works else failing(0))
    assert name == ("shared with CUDA graphs" if works else "shared") and ("no CUDA graphs" in why) != works
    assert probe_engine(tmp_path, "cpu", "float32", "off", record=tapes)[0] == "shared"  # as the project says


def test_the_setting() -> None:
    def made(device: str, **changes: Any) -> bool:
        return recorder(Config.model_validate(changes), torch.device(device)) is not None

    assert made("cuda") and not made("cpu")
    assert not made("cuda", rollout={"cuda_graphs": "off"}) and not made("cuda", deterministic=True)
    # An update in another thread draws its dropout while steps are recorded, and the generator is one for both.
    dropout = {"enabled": True, "dropout": 0.1}
    assert not made("cuda", adapter=dropout, rollout={"async_staleness": 1}) and made("cuda", adapter=dropout)
