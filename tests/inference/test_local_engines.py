"""Every architecture, by every engine: the tokens and log-probabilities of the model's own `generate`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.errors import ModelError, PolicyError
from agentrl_cli.policies import local_engine, local_sharing
from agentrl_cli.policies.local_attention import NotServed, Rows, explicit_attention, one_part, rows_attention
from agentrl_cli.policies.local_batch import DecodeBatch
from agentrl_cli.policies.local_cache import BLOCK, Incoming, Shelf
from agentrl_cli.policies.local_engine import Shared, choose_engine, sampling_mode, verify
from agentrl_cli.policies.local_make import make_policy
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.types import Sampling
from tests.helpers.local import VOCAB, check_against_generate, forced, greedy, policy_of, prompts, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's, on transformers 5

FUSED = ["qwen3", "qwen2", "llama", "minimind", "mistral", "qwen2-sliding"]


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()


@pytest.mark.parametrize("kind", [*FUSED, "gemma2", "gpt-oss"])
async def test_sixteen_ragged_episodes_of_three_turns(kind: str) -> None:
    policy = await check_against_generate(tiny(kind))
    assert policy.engine == ("fused" if kind in FUSED else "shared")
    assert isinstance(policy, Policy)
    # Prompts of a group are computed once, and later turns only by what is new: less than the first turns alone.
    assert policy.prefill_tokens < sum(len(ids) for ids in prompts(count=16))


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "minimind", "mistral", "gemma2"])
async def test_an_adapter_and_a_preemption(kind: str) -> None:
    """Memory for five blocks of the twelve or more that four rows come to: some must give way, and say the same."""
    model = with_lora(tiny(kind))
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    policy = policy_of(model, memory=5 * BLOCK * 2 * 2 * 2 * dim * 4)
    sampling = Sampling(temperature=0, max_new_tokens=80)
    everyone = prompts()[:4]
    several = await asyncio.gather(*(policy.generate(f"e{n}", ids, sampling) for n, ids in enumerate(everyone)))
    await policy.close()
    for number, (ids, said) in enumerate(zip(everyone, several, strict=True)):
        wanted, logps = greedy(model, ids, 80, None) if number == 3 else forced(model, ids, 80, said=said.ids.tolist())
        assert said.ids.tolist() == wanted[:80] and abs(said.logp_policy - logps).max() < 1e-4
    assert policy.metrics["rollout/preemptions"] >= 1
    assert policy.metrics["rollout/kv_blocks_peak"] <= 5
    await check_against_generate(model, count=6, memory=7 * BLOCK * 2 * 2 * 2 * dim * 4)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2"])
async def test_the_models_own_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine `shared`, also where `fused` would be taken if there were memory for a copy."""
    monkeypatch.setattr(local_engine, "FAIR_SHARE", 0.0)
    policy = await check_against_generate(tiny(kind))
    assert policy.engine == "shared" and not policy.copies_weights


async def test_eager_attention_and_lanes() -> None:
    await check_against_generate(tiny(attn_implementation="eager"))
    await check_against_generate(tiny(), lanes=True, lane_length=160)


# --- the engine plain ------------------------------------------------------------------------------------------------


def linear_attention() -> Any:
    """A hybrid of linear and full attention, whose state is no keys and values."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config: Any = Qwen3NextConfig
    model: Any = Qwen3NextForCausalLM
    return model(
        config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=0,
            initializer_range=0.15,
            eos_token_id=None,
        )
    ).eval()


async def test_layers_with_a_state_take_the_plain_engine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        policy = await check_against_generate(linear_attention(), count=4)
    assert policy.engine == "plain"
    assert "linear_attention" in caplog.text and "one by one" in caplog.text


async def test_plain_caches_within_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    policy = await check_against_generate(linear_attention(), count=3, more=8, memory=12_000)
    assert policy.metrics["rollout/preemptions"] >= 1
    small = policy_of(linear_attention(), memory=1000)
    with pytest.raises(PolicyError, match="more than the 1000 bytes"):
        await small.generate("a", [1, 2, 3], Sampling(max_new_tokens=3))
    await small.close()


# --- what is refused -------------------------------------------------------------------------------------------------


def test_an_engine_that_differs_from_the_model_is_not_used() -> None:
    model = tiny()
    engine = choose_engine(model)
    assert engine.name == "fused"
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(NotServed, match="differs by"), sampling_mode(model):
        verify(engine, model)
    engine.refresh()  # the copy of the weights is taken anew
    verify(engine, model)


def test_what_the_attention_does_not_know_is_refused() -> None:
    model = tiny()
    layer = model.model.layers[0].self_attn
    shelf = Shelf(64, 2)
    shelf.resize(1)
    rows = Rows(one_part(shelf, 0, 1, 3), [0], 3, torch.device("cpu"))
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(NotServed, match="position_bias"):
        rows_attention(layer, q, q, q, None, rows=rows, position_bias=q)
    with pytest.raises(NotServed, match="does not hand keyword"):
        rows_attention(layer, q, q, q, None)
    with pytest.raises(NotServed, match="drops"):
        rows_attention(layer, q, q, q, None, rows=rows, dropout=0.1)
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(NotServed, match="chunked_attention"):
        Shared(model)


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_padding_behind_a_window_stays_a_number(kind: str) -> None:
    """A row that ends near the end of its shelf, fed beside one with many new tokens."""
    engine, device = Shared(tiny(kind)), torch.device("cpu")
    shelf = Shelf(64, 2)
    shelf.resize(2)
    ids = torch.randint(0, VOCAB, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        engine(ids[:1], Rows(one_part(shelf, 0, 1, 60), [0], 60, device), head=False)
        engine(ids[:, :40], Rows(one_part(shelf, 0, 2, 100), [60, 0], 40, device), head=False)  # of 40 three count
        logits = engine(ids[:, :1], Rows(one_part(shelf, 0, 2, 64), [62, 40], 1, device), head=True)
    assert logits is not None and bool(logits.isfinite().all())
    assert all(bool(store.isfinite().all()) for store in (*shelf.keys, *shelf.values) if store is not None)


def test_soft_cap_and_sink_by_hand() -> None:
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [2.0]]]])
    v, mask = torch.tensor([[[[1.0], [3.0]]]]), torch.zeros(1, 1, 1, 2)
    # Scores 0 and tanh(2) = 0.9640; a sink of 0.5 takes its share and gives nothing.
    cap = torch.tensor([0.0, torch.tanh(torch.tensor(2.0))])
    weights = torch.softmax(torch.cat([cap, torch.tensor([0.5])]), 0)
    got = explicit_attention(q, k, v, mask, 1.0, 1.0, torch.tensor([0.5]).view(1, 1, 1, 1))
    assert got.item() == pytest.approx(float(weights[0] + 3 * weights[1]), abs=1e-6)


# --- memory ----------------------------------------------------------------------------------------------------------


async def test_an_episode_that_cannot_fit_is_told_so() -> None:
    position = 2 * 2 * 2 * 8 * 4
    policy = policy_of(tiny(), memory=3 * BLOCK * position)
    with pytest.raises(PolicyError, match="holds 96") as caught:
        await policy.generate("a", [7] * 96, Sampling(max_new_tokens=3))
    assert "rollout.memory" in caught.value.hint
    # One that fits to the last position is stopped there.
    said = await policy.generate("b", [7] * 90, Sampling(temperature=0, max_new_tokens=40))
    assert len(said.ids) == 6 and said.ids.tolist() == greedy(tiny(), [7] * 90, 6, None)[0]
    await policy.close()
    with pytest.raises(ModelError, match=r"at least .* MiB"):
        policy_of(tiny(), memory=1000)
    with pytest.raises(ModelError, match=r"rollout.memory"):
        policy_of(tiny(), memory=3 * BLOCK * position, lanes=True, lane_length=64)


async def test_memory_follows_the_tokens_not_the_longest_row() -> None:
    policy = policy_of(tiny(), rows=8, context_length=512)
    lengths = [400, *[10] * 7]
    await asyncio.gather(
        *(policy.generate(f"e{n}", [7 + n] * size, Sampling(max_new_tokens=8)) for n, size in enumerate(lengths))
    )
    # 400 tokens on a shelf of 576, seven rows of 64; eight rows of 576 would be 144 blocks.
    assert policy.metrics["rollout/kv_blocks_peak"] <= 576 // 32 + 7 * 2 + 13 + 7
    await policy.close()


@pytest.mark.parametrize(("kind", "most"), [("qwen3", 7 + 8 * 2 + 8), ("mistral", 7 + 8 * 9 + 8 * 7)])
async def test_a_common_prompt_is_kept_once(kind: str, most: int) -> None:
    """200 tokens for eight rows: rows hold what comes after them alone, where no layer's window is shorter."""
    policy = policy_of(tiny(kind), rows=8)
    ids = np.random.default_rng(1).integers(0, VOCAB, 200).tolist()
    sampling = Sampling(temperature=0, max_new_tokens=8)
    every = await asyncio.gather(*(policy.generate(f"e{n}", ids, sampling) for n in range(8)))
    assert policy.metrics["rollout/kv_blocks_peak"] <= most
    assert policy.prefill_tokens == 199
    wanted = greedy(policy._batch.model, ids, 8, None)
    for said in every:
        assert said.ids.tolist() == wanted[0] and abs(said.logp_policy - wanted[1]).max() < 1e-4
    await policy.close()


@pytest.mark.parametrize(("shared", "most"), [(True, 9 * 256), (False, 9 * 256), (None, 64 + 9 * 224)])
async def test_what_is_kept_stays_within_what_the_plan_counts(shared: bool | None, most: int) -> None:
    """Eight episodes of two turns to their last position: the bytes that are there, seen after every token.

    Nothing is computed twice for that, and nobody gives way. None: told how much of an episode its prompt is.
    """
    told = {"response_tokens": 192} if shared is None else {}
    sizes = {"group_size": 8, "prompts_per_step": 1, "max_tokens": 256, "max_new_tokens": 100, **told}
    policy, _ = make_policy(tiny(), Config.model_validate({"rollout": sizes}), "base", None, True)
    position, seen = 2 * 2 * 2 * 8 * 4, [0]  # keys and values, layers, heads, dim, float32
    rng = np.random.default_rng(4)
    begins = [rng.integers(0, VOCAB, 64).tolist() for _ in range(8)]

    async def episode(n: int) -> None:
        def look(_: int) -> None:
            batch = policy._batch
            assert isinstance(batch, DecodeBatch)
            seen.append(batch.bytes)

        ids = begins[0 if shared in (True, None) else n]
        first = await policy.generate(str(n), ids, Sampling(seed=n, max_new_tokens=100), on_token=look)
        context = [*ids, *first.ids.tolist(), *ids[:20]]
        rest = Sampling(seed=n, max_new_tokens=256 - len(context))
        assert len((await policy.generate(str(n), context, rest, on_token=look)).ids) == 72

    await asyncio.gather(*map(episode, range(8)))
    assert max(seen) <= most * position
    assert policy.metrics["rollout/preemptions"] == 0
    first = 63 if shared in (True, None) else 8 * 63
    assert policy.prefill_tokens == first + 8 * 20, "the first prompts, and what came between the turns"
    await policy.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", [2**22, 40])
def test_written_attention_is_the_kernels(dtype: torch.dtype, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs where rows share a beginning: the flash kernel's attention and log-sums, also in small parts."""
    monkeypatch.setattr(local_sharing, "SCORES", scores)
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 8).to(dtype) for n in (5, 20, 20))
    mask = torch.zeros(3, 1, 5, 20).masked_fill_(torch.rand(3, 1, 5, 20) < 0.3, -torch.inf).to(dtype)
    for given in (None, mask, mask[:, :, :1]):
        out, total = local_sharing.written_attention(q, k, v, given, 0.3)
        wanted, sums = local_sharing.attention_and_sum(q, k, v, given, 0.3)
        close = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(out, wanted, atol=close, rtol=close)
        torch.testing.assert_close(total, sums, atol=close, rtol=close)
    out, total = local_sharing.written_attention(q, k, v, torch.full((3, 1, 5, 20), -torch.inf, dtype=dtype), 0.3)
    assert not out.any() and total.eq(-torch.inf).all(), "who sees nothing takes no part"


def test_a_row_moves_onto_a_shelf_layer_by_layer() -> None:
    layers = [(torch.full((2, 5, 4), n + 1.0), torch.full((2, 5, 4), -n - 1.0)) for n in range(3)]
    shelf = Shelf(64, 3)
    shelf.resize(2, [Incoming(1, 5, layers)])
    for n in range(3):
        (keys, values), (old, _) = shelf.view(1)[n], layers[n]
        assert keys[:, :5].eq(n + 1).all() and values[:, :5].eq(-n - 1).all() and not keys[:, 5:].any()
        assert old.numel() == 0, "it is given up where it was"
    shelf.lengthen(96)
    assert [k.shape for k, _ in shelf.view(1)] == [(2, 96, 4)] * 3 and shelf.view(1)[2][0][:, :5].eq(3).all()


async def test_rows_with_and_without_a_common_beginning() -> None:
    """Prompts of two lengths on one shelf of beginnings, rows that share none, members that leave before others."""
    model = tiny()
    policy = policy_of(model, rows=16)
    rng = np.random.default_rng(2)
    groups = [rng.integers(0, VOCAB, n).tolist() for n in (60, 41, 150)]
    everyone = [*(ids for ids in groups for _ in range(3)), rng.integers(0, VOCAB, 30).tolist()]
    counts = [3, 9, 20, 12, 1, 7, 5, 16, 2, 11]
    every = await asyncio.gather(
        *(
            policy.generate(f"e{n}", ids, Sampling(temperature=0, max_new_tokens=counts[n]))
            for n, ids in enumerate(everyone)
        )
    )
    for ids, count, said in zip(everyone, counts, every, strict=True):
        tokens, logps = greedy(model, ids, count, None)
        assert said.ids.tolist() == tokens and abs(said.logp_policy - logps).max() < 1e-4
    await policy.close()
