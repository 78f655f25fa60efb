"""Every architecture, by every engine: the tokens and log-probabilities of the model's own `generate`.

Those of every kind of cache are sampled and trained with the numbers of their plain forward, or refused.
"""

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl_cli import Config
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.errors import ModelError, PolicyError
from agentrl_cli.inference import drafts
from agentrl_cli.inference.attention import PrefillView, View, explicit_attention, paged_attention
from agentrl_cli.inference.decode_batch import MEMBERS
from agentrl_cli.inference.drafts import Drafts
from agentrl_cli.inference.engine import PagedEngine, Scheduler
from agentrl_cli.inference.kv_cache import BLOCK, BlockPool, KVCache, NotServed
from agentrl_cli.inference.model_runner import ModelRunner, check_structure
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.inference.request import Request, TokenSequence
from agentrl_cli.inference.tolerance import logp_difference
from agentrl_cli.policies.load import make_policy
from agentrl_cli.types import Generation, Int32, Sampling
from tests.helpers.local import (
    KINDS,
    VOCAB,
    check_against_generate,
    check_turn,
    greedy,
    policy_of,
    prompts,
    tiny,
)


def test_in_sixteen_bits_a_difference_is_that_of_tokens_that_would_be_drawn() -> None:
    """A real vocabulary has fifty thousand tokens that are never drawn, some of them half a nat off by rounding."""
    logits = torch.zeros(3, 50_000)
    logits[:, 7] = 20.0
    wanted = logits.log_softmax(-1)
    rounded, wrong = wanted.clone(), wanted.roll(1, -1)
    rounded[:, 1000:] += 0.5
    assert logp_difference(rounded, wanted, torch.bfloat16) < 0.01
    assert logp_difference(rounded, wanted, torch.float32) > 0.4
    assert logp_difference(wrong, wanted, torch.bfloat16) > 5
    assert logp_difference(wanted * torch.nan, wanted, torch.bfloat16) == torch.inf


@pytest.mark.parametrize("kind", KINDS)
async def test_sixteen_ragged_episodes_of_three_turns(kind: str) -> None:
    policy = await check_against_generate(tiny(kind), runner=ModelRunner)
    assert policy.engine == "paged" and not policy.engine_why
    assert (runner_of(policy)._short is None) == (kind in ("gemma2", "gpt-oss"))
    # Prompts of a group are computed once, and later turns only by what is new: less than the first turns alone.
    assert policy.metrics["rollout/prefill_tokens"] < sum(len(ids) for ids in prompts(count=16))


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
async def test_an_adapter_and_a_preemption(kind: str) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model: Any = get_peft_model(tiny(kind), lora).eval()
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = BLOCK * 2 * 2 * 2 * dim * 4
    policy = policy_of(model, memory=5 * block)
    turns = (check_turn(policy, model, ids, 48, f"e{n}") for n, ids in enumerate(prompts()[:4]))
    *_, last = await asyncio.gather(*turns)
    wanted, logps = greedy(model, prompts()[3], 48, None)
    assert last.ids.tolist() == wanted and abs(last.logp_policy - logps).max() < 1e-4
    assert policy.metrics["rollout/preemptions"] >= 1
    assert policy.metrics["rollout/kv_blocks_peak"] <= 5
    await check_against_generate(model, count=6, memory=7 * block)


async def test_a_changed_layer_is_computed_as_it_is() -> None:
    model = tiny("qwen3")
    policy = policy_of(model)
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out * 0.5)
    policy.set_version("changed")
    await check_turn(policy, model, [1, 2, 3], 6)
    assert runner_of(policy)._short is runner_of(policy_of(model))._short is None


async def test_eager_attention_and_fixed_slots() -> None:
    await check_against_generate(tiny(attn_implementation="eager"), count=8)
    await check_against_generate(tiny(), deterministic=True, slot_length=160, count=8)
    await check_against_generate(tiny("gemma2"), deterministic=True, slot_length=160, count=8)


# --- the fallback ------------------------------------------------------------------------------------------------


def linear_attention() -> Any:
    """A hybrid of linear and full attention, whose state is not keys and values."""
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


async def test_layers_with_a_state_take_the_fallback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        policy = await check_against_generate(linear_attention(), count=4)
    assert policy.engine == "fallback"
    assert "linear_attention" in caplog.text and "fallback" in caplog.text


async def test_caches_of_the_fallback_stay_within_their_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = await check_against_generate(linear_attention(), count=3, more=60, memory=30_000)
    assert policy.metrics["rollout/preemptions"] >= 1
    assert policy.metrics["rollout/kv_bytes_peak"] < 36_000
    small = policy_of(linear_attention(), memory=1000)
    with pytest.raises(PolicyError, match="more than the 1000 bytes"):
        await small.generate("a", [1, 2, 3], Sampling(max_new_tokens=3))


# --- what is refused -------------------------------------------------------------------------------------------------


class Wrong(ModelRunner):
    def run(self, ids: Tensor, view: View) -> Tensor:
        view.positions = view.positions + 1 * (view.positions > BLOCK)
        return super().run(ids, view)


async def test_an_engine_that_differs_from_the_model_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        policy = await check_against_generate(tiny(), count=2, runner=Wrong)
    assert policy.engine == "fallback" and "nats from the model's own forward" in policy.engine_why
    assert (
        policy.describe() == f"fallback ({policy.engine_why})" and policy.engine_why in caplog.text
    )


def test_what_the_attention_does_not_know_is_refused() -> None:
    model, q = tiny(), torch.zeros(1, 4, 3, 8)
    view = PrefillView(BlockPool(2, 2), [0], [3], [[0]], torch.device("cpu"))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"view": view, "position_bias": q}, "position_bias"),
        ({}, "does not hand keyword"),
        ({"view": view, "dropout": 0.1}, "drops"),
    ]
    for given, said in cases:
        with pytest.raises(NotServed, match=said):
            paged_attention(model.model.layers[0].self_attn, q, q, q, None, **given)
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(NotServed, match="chunked_attention"):
        check_structure(model)


# --- memory ----------------------------------------------------------------------------------------------------------


async def test_an_episode_that_cannot_fit_is_refused() -> None:
    position = 2 * 2 * 2 * 8 * 4
    policy = policy_of(tiny(), memory=3 * BLOCK * position)
    with pytest.raises(PolicyError, match="holds 96") as caught:
        await policy.generate("a", [7] * 96, Sampling(max_new_tokens=3))
    assert "rollout.memory" in caught.value.hint
    # One that fits to the last position is stopped there.
    said = await policy.generate("b", [7] * 90, Sampling(temperature=0, max_new_tokens=40))
    assert len(said.ids) == 6 and said.ids.tolist() == greedy(tiny(), [7] * 90, 6, None)[0]
    with pytest.raises(ModelError, match=r"at least .* MiB"):
        policy_of(tiny(), memory=1000)
    with pytest.raises(ModelError, match=r"rollout.memory"):
        policy_of(tiny(), memory=3 * BLOCK * position, deterministic=True, slot_length=64)


async def test_memory_follows_the_tokens_not_the_longest_row() -> None:
    policy = policy_of(tiny(), rows=8, context_length=512)
    lengths = [400, *[10] * 7]
    await asyncio.gather(
        *(
            policy.generate(f"e{n}", [7 + n] * size, Sampling(max_new_tokens=8))
            for n, size in enumerate(lengths)
        )
    )
    # 408 tokens are 13 blocks, seven times 18 one each; eight rows of 408 would be 104.
    assert policy.metrics["rollout/kv_blocks_peak"] <= 13 + 7


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2"])
async def test_a_common_prompt_is_kept_once(kind: str) -> None:
    """By more rows than meet a shared block at once, each of which writes into a copy of its last block."""
    rows = MEMBERS + 2
    model, policy = tiny(kind), policy_of(tiny(kind), rows=rows)
    ids = np.random.default_rng(1).integers(0, VOCAB, 200).tolist()
    how = [Sampling(max_new_tokens=8, seed=n, temperature=n) for n in range(rows)]
    every = await asyncio.gather(*(policy.generate(str(n), ids, how[n]) for n in range(rows)))
    assert policy.metrics["rollout/kv_blocks_peak"] <= 7 + rows
    assert policy.metrics["rollout/prefill_tokens"] == 199
    assert every[0].ids.tolist() == greedy(model, ids, 8, None)[0]
    for n, said in enumerate(every):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *said.ids.tolist()]])).logits[0, 199:-1]
        logp = (
            (logits / (n or 1)).log_softmax(-1).gather(-1, torch.tensor(said.ids[:, None]).long())
        )
        assert np.abs(said.logp_policy - logp[:, 0].numpy()).max() < 1e-4


@pytest.mark.parametrize(
    ("shared", "known", "most"),
    [
        (True, {}, 9 * 256),
        (False, {}, 9 * 256),
        (True, {"response_tokens": 192}, 64 + 9 * 224),
    ],
)
async def test_what_is_kept_stays_within_what_the_plan_counts(
    shared: bool, known: dict[str, int], most: int
) -> None:
    """Eight episodes of two turns to their last position: the bytes that are there, seen after every token.

    Nothing is computed twice for that, and none is preempted.
    """
    sizes = {"group_size": 8, "prompts_per_step": 1, "max_tokens": 256, "max_new_tokens": 100}
    settings = PolicySettings.of(Config.model_validate({"rollout": sizes | known}))
    policy = make_policy(tiny(), settings, "base", None, True)
    position, seen = 2 * 2 * 2 * 8 * 4, [0]  # keys and values, layers, heads, dim, float32
    rng = np.random.default_rng(4)
    begins = [rng.integers(0, VOCAB, 64).tolist() for _ in range(8)]

    async def episode(n: int) -> None:
        def look(_: int) -> None:
            seen.append(engine_of(policy).pool.bytes)

        ids, first = begins[0 if shared else n], Sampling(seed=n, max_new_tokens=100)
        said = await policy.generate(str(n), ids, first, on_token=look)
        context = [*ids, *said.ids.tolist(), *ids[:20]]
        rest = Sampling(seed=n, max_new_tokens=256 - len(context))
        assert len((await policy.generate(str(n), context, rest, on_token=look)).ids) == 72

    await asyncio.gather(*map(episode, range(8)))
    assert max(seen) <= most * position
    assert policy.metrics["rollout/preemptions"] == 0
    # the first prompts, and what came between the turns
    assert policy.metrics["rollout/prefill_tokens"] == (63 if shared else 8 * 63) + 8 * 20


def engine_of(policy: Any) -> PagedEngine:
    engine: PagedEngine = policy._engine
    return engine


def runner_of(policy: Any) -> ModelRunner:
    return engine_of(policy).runner


def known(policy: LocalPolicy) -> Any:
    return engine_of(policy).drafts


def test_a_pool_counts_users_and_grows_layer_by_layer() -> None:
    pool = BlockPool(2, 64)
    first = pool.allocate(3)
    keys, _ = pool.store(0, torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    keys[first] = 1
    pool.share(first[:1])
    pool.release(first)
    assert pool.used == 1 and pool.allocate(1) == [1], "the lowest free block"
    assert pool.allocate(60) and pool.used == 62 and pool.size >= 62
    grown = pool.keys[0]
    assert grown is not None and grown[0].eq(1).all() and not grown[32:].any()


# --- drafts change no token ---


async def rounds(policy: LocalPolicy, seed: int, **how: Any) -> list[Generation]:
    """Two steps of eight episodes of two turns each, the last of which go on alone; groups of four."""
    found = []
    for step in range(2):
        rng = np.random.default_rng(seed)
        given = [rng.integers(6, VOCAB, 30).tolist() for _ in range(2)]

        async def episode(number: int, step: int = step, given: Any = given) -> list[Generation]:
            ids, said = list(given[number // 4]), []
            for turn in range(2):
                sampling = Sampling(
                    max_new_tokens=6 + 4 * number, seed=seed + number + 100 * turn, **how
                )
                said.append(await policy.generate(f"{step} {number}", ids, sampling))
                ids += [*said[-1].ids.tolist(), 7, 8, 9]
            await policy.release(f"{step} {number}")
            return said

        for said in await asyncio.gather(*map(episode, range(8))):
            found += said
    return found


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("qwen3", {"temperature": 0.5, "stop_ids": (5,)}),
        ("qwen2-sliding", {"temperature": 0.7, "top_p": 0.9}),
        ("mistral", {"temperature": 0.4, "bad_ids": (11, 12)}),
        ("granite", {"temperature": 0}),
    ],
)
async def test_every_token_is_the_one_that_plain_sampling_gives(
    kind: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "ROWS", 1000.0)  # wrong ones are fed, too
    plain, policy = policy_of(tiny(kind)), policy_of(tiny(kind))
    engine_of(plain).drafts = None
    wanted, found = await rounds(plain, 0, **how), await rounds(policy, 0, **how)
    for one, other in zip(wanted, found, strict=True):
        assert (one.ids.tolist(), one.stop_reason) == (other.ids.tolist(), other.stop_reason)
        assert np.abs(one.logp_policy - other.logp_policy).max(initial=0) < 1e-4
    assert 0 < known(policy).accepted < known(policy).fed


async def test_tokens_are_passed_on_one_by_one_and_turns_end_where_they_should() -> None:
    policy, heard = policy_of(tiny("qwen3")), list[int]()
    for _ in range(3):
        heard.clear()
        sampling = Sampling(temperature=0, max_new_tokens=60)
        said = await policy.generate("e", [3, 1, 4], sampling, on_token=heard.append)
        assert heard == said.ids.tolist() and len(heard) == 60
        await policy.release("e")
    assert known(policy).accepted


def test_useless_and_dear_drafts_are_not_fed() -> None:
    found = Drafts()
    assert found.worth(8)
    found.rest(drafts.PATIENCE)
    assert not found.worth(8), "given up for a while"
    found.learn(list(range(50)) * 2, 0)
    assert not found._new
    found.rest(drafts.PATIENCE)
    assert found.worth(8)
    found.learn(list(range(10)) * 20, 0)
    assert found.worth(64)
    found._right = [0.1] * len(found._right)
    assert not found.worth(64) and found.worth(1)


# --- blocks that several sequences share ---


SHARED = 2 * BLOCK + 10


def sequence(key: str, *, seed: int, length: int = 3 * BLOCK) -> TokenSequence:
    """Return a sequence that begins as all others do for SHARED positions."""
    common = np.arange(SHARED, dtype=np.int32)
    own = np.random.default_rng(seed).integers(1000, 2000, length - SHARED, dtype=np.int32)
    return TokenSequence(key=key, ids=np.concatenate([common, own]))


def write(pool: BlockPool, table: list[int], ids: Int32, start: int) -> None:
    one = torch.ones(1, 1, 1, 1)
    for layer in range(pool.layers):
        keys, values = pool.store(layer, one, one)
        for position in range(start, len(ids)):
            block, offset = table[position // BLOCK], position % BLOCK
            keys[block, :, :, offset] = float(ids[position])
            values[block, :, offset] = float(ids[position])


def read(pool: BlockPool, table: list[int], count: int) -> list[int]:
    stores = [t for t in (*pool.keys, *pool.values) if t is not None]
    rows = [torch.cat([store[block].reshape(-1) for block in table])[:count] for store in stores]
    assert len(rows) == 2 * pool.layers and all(row.equal(rows[0]) for row in rows)
    return [int(value) for value in rows[0]]


def test_a_shared_block_that_is_written_is_copied_first() -> None:
    pool = BlockPool(2, 64)
    cache = KVCache(pool)
    first, second = sequence("a", seed=1), sequence("b", seed=2)
    assert cache.begin(first) == 0
    write(pool, first.block_table, first.ids, 0)
    prefix: Any = cache.add_prefix(first.ids[:SHARED])
    table = prefix[0].blocks
    write(pool, table, first.ids[:SHARED], prefix[1])
    # The second may use all that it shares, and must not write into the block where it parts.
    assert cache.begin(second) == SHARED
    assert second.block_table[:2] == table[:2] and second.block_table[2] not in table
    assert [pool.users[block] for block in table] == [2, 2, 1]
    write(pool, second.block_table, second.ids, SHARED)
    assert read(pool, second.block_table, len(second.ids)) == second.ids.tolist()
    assert read(pool, first.block_table, len(first.ids)) == first.ids.tolist()
    assert read(pool, table, SHARED) == first.ids[:SHARED].tolist()
    for each in (first, second):
        cache.free(each)
    cache.clear()
    assert pool.used == 0


def test_soft_cap_and_sink_by_hand() -> None:
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [2.0]]]])
    v, mask = torch.tensor([[[[1.0], [3.0]]]]), torch.zeros(1, 1, 1, 2)
    # Scores 0 and tanh(2) = 0.9640; a sink of 0.5 takes its share and gives nothing.
    cap = torch.tensor([0.0, torch.tanh(torch.tensor(2.0))])
    weights = torch.softmax(torch.cat([cap, torch.tensor([0.5])]), 0)
    got = explicit_attention(q, k, v, mask, 1.0, 1.0, torch.tensor([0.5]).view(1, 1, 1, 1))
    assert got.item() == pytest.approx(float(weights[0] + 3 * weights[1]), abs=1e-6)


def test_a_block_with_one_user_is_written_where_it_is() -> None:
    pool = BlockPool(1, 64)
    cache = KVCache(pool)
    ids = np.arange(2 * BLOCK + 15, dtype=np.int32)
    turn = TokenSequence(key="a", ids=ids)
    cache.begin(turn)
    before = list(turn.block_table)
    cache.keep(turn)
    after = TokenSequence(key="a", ids=np.append(ids, ids[:3]))
    assert cache.begin(after) == len(ids) - 1
    assert after.block_table == before and [pool.users[block] for block in before] == [1, 1, 1]


async def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    scheduler = Scheduler(KVCache(BlockPool(1, 3)), 3, 3)
    future = asyncio.get_running_loop().create_future()
    more: dict[str, Any] = {
        "sampling": Sampling(),
        "future": future,
        "uniforms": [],
        "started": 0.0,
    }
    requests = [
        Request(key=str(n), ids=np.arange(BLOCK, dtype=np.int32) + 1000 * n, order=n, **more)
        for n in (1, 0, 2)
    ]
    for request in requests:
        assert scheduler.begin(request) == 0
        request.out.append(7)
    scheduler.reserve()
    assert [request.key for request in scheduler.running] == ["0"]
    assert [request.key for request in scheduler.preempted] == ["2", "1"]
    assert scheduler.preemptions == 2 and len(requests[1].block_table) == 2


# --- every kind of cache ---
