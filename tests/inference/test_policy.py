"""The local policy: the numbers of the model's own `generate`, whatever else is in the batch.

Drawing, by hand-computed distributions: penalties, forbidden and forced tokens, min-p, both log-probabilities.
"""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.errors import PolicyError
from agentrl_cli.inference.memory import prefill_tokens
from agentrl_cli.inference.model_runner import PIECE, ModelRunner
from agentrl_cli.inference.sampler import draw, uniforms
from agentrl_cli.policies.load import make_policy
from agentrl_cli.types import TOP_K, Generation, Sampling, StopReason
from tests.helpers.local import (
    LONGROPE,
    MADE,
    STOP,
    SWITCH,
    VOCAB,
    check_turn,
    greedy,
    policy_of,
    prompts,
    tiny,
)


async def test_long_prompts_go_in_pieces() -> None:
    model = tiny()
    long = np.random.default_rng(3).integers(0, VOCAB, PIECE + 100).tolist()
    await check_turn(policy_of(model, context_length=4096, rows=2), model, long, 3)


class SmallParts(ModelRunner):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.most = 16


async def test_small_parts_of_prompts_and_draws_change_nothing() -> None:
    found = []
    for runner in (ModelRunner, SmallParts):
        policy = policy_of(tiny(), rows=8, runner=runner)
        sampling = [Sampling(max_new_tokens=6, seed=n) for n in range(8)]
        many = (
            policy.generate(f"e{n}", ids, one)
            for n, (ids, one) in enumerate(zip(prompts(), sampling, strict=False))
        )
        found.append([said.ids.tolist() for said in await asyncio.gather(*many)])
    assert found[0] == found[1] and any(len(ids) > 1 for ids in found[0])
    assert prefill_tokens(tiny().config, 4) == 8192
    wide = SimpleNamespace(intermediate_size=4864, hidden_size=896)
    assert (prefill_tokens(wide, 2), prefill_tokens(wide, 4)) == (
        2**24 // (6 * 4864),
        2**26 // (12 * 4864),
    )
    by_layer = SimpleNamespace(intermediate_size=[64, 4864], hidden_size=896)
    assert prefill_tokens(by_layer, 4) == prefill_tokens(wide, 4), "the widest layer counts"


async def test_a_history_that_was_rewritten() -> None:
    model = tiny()
    policy = policy_of(model)
    first = prompts()[1]
    other = [*first[:-4], 11, 12, 13]
    for ids in (first, other, other[:20]):
        await check_turn(policy, model, ids, 4)


# --- sampling --------------------------------------------------------------------------------------------------------


async def test_every_token_is_drawn_with_a_number_of_its_own() -> None:
    """All tokens are equally likely here: one number for all of a turn would draw the same token each time."""
    model = tiny()
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    policy = policy_of(model)
    said = await policy.generate(
        "a", prompts()[0], Sampling(max_new_tokens=24, stop_ids=(), seed=1)
    )
    assert len(set(said.ids.tolist())) > 12


async def test_a_seed_gives_the_same_tokens_in_another_batch() -> None:
    model = tiny()
    everyone = prompts()
    alone, together = policy_of(model, rows=1), policy_of(model, rows=12)
    settings = [Sampling(max_new_tokens=12, stop_ids=(STOP,), seed=n) for n in range(12)]
    first = await asyncio.gather(
        *(together.generate(f"e{n}", everyone[n], settings[n]) for n in range(12))
    )
    for number in (0, 4, 11):
        again = await alone.generate("x", everyone[number], settings[number])
        assert again.ids.tolist() == first[number].ids.tolist()
        assert np.abs(again.logp_policy - first[number].logp_policy).max() < 1e-4
    # Members of a group share the prompt and differ in their seeds.
    assert first[0].ids.tolist() != first[1].ids.tolist()


async def test_fixed_slots_give_the_same_bits_whatever_runs_beside() -> None:
    model = tiny()
    everyone = prompts()
    sampling = Sampling(max_new_tokens=12, seed=4, slot=4)
    one, other = (policy_of(model, deterministic=True, slot_length=128) for _ in range(2))
    alone = await one.generate("e4", everyone[4], sampling)
    settings = [Sampling(max_new_tokens=12, seed=n, slot=n) for n in range(12)]

    async def attempt(n: int) -> Generation:
        said = await other.generate(f"e{n}", everyone[n], settings[n])
        await other.release(f"e{n}")
        return said

    many = await asyncio.gather(*(attempt(n) for n in range(12)))
    assert many[4].ids.tolist() == alone.ids.tolist()
    assert many[4].logp_policy.tobytes() == alone.logp_policy.tobytes()


def test_log_probabilities_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]]))
    numbers = torch.tensor([0.6, 0.35], dtype=torch.float64)
    drawn = draw(logits, [Sampling(), Sampling(temperature=0.5)], numbers)
    # Row 0: 0.6 falls into (0.5, 0.75]. Row 1: squares 0.01 0.04 0.09 0.16 of 0.3; 0.35 of it falls into the third.
    assert drawn.ids.tolist() == [1, 2]
    assert drawn.logp_policy.tolist() == pytest.approx([np.log(0.25), np.log(0.3)], abs=1e-6)
    assert drawn.logp_sampled.tolist() == drawn.logp_policy.tolist()
    assert drawn.entropy[0].item() == pytest.approx(1.75 * np.log(2), abs=1e-6)
    assert drawn.top_ids[0, :2].tolist() == [0, 1] and drawn.top_logps.shape == (2, 4)


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    logits = torch.log(torch.tensor(probabilities, dtype=torch.float32)).repeat(20000, 1)
    drawn = draw(logits, [Sampling()] * 20000, torch.from_numpy(uniforms(7, 20000)))
    shares = np.bincount(drawn.ids.numpy(), minlength=4) / 20000
    assert np.abs(shares - probabilities).max() < 0.012  # 3.5 standard errors


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]])
    for number in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53):
        drawn = draw(logits, [Sampling()], torch.tensor([number], dtype=torch.float64))
        assert drawn.ids.item() in (0, 2)
        assert drawn.entropy.item() == pytest.approx(np.log(2))


def test_uniforms_depend_on_the_seed_alone() -> None:
    assert uniforms(3, 5).tolist() == uniforms(3, 9)[:5].tolist()
    assert uniforms(3, 5).tolist() != uniforms(4, 5).tolist()
    assert uniforms(2**63 - 1, 2).shape == (2,)


# --- how a turn ends -------------------------------------------------------------------------------------------------


async def test_stop_ids_strings_and_limits() -> None:
    model, ids = tiny(), prompts()[9] + list(range(10, 30))

    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(64 + id_) for id_ in ids)

    policy = policy_of(model, context_length=40, decode=decode)
    free, _ = greedy(model, ids, 8)
    for how, ends in (
        ({"stop_ids": (free[2],)}, StopReason.STOP),
        ({"stop_strings": (decode(free[1:3]),)}, StopReason.STOP_STRING),
    ):
        sampling = Sampling(temperature=0, max_new_tokens=8, **how)
        said = await policy.generate("a", ids, sampling)
        assert (said.ids.tolist(), said.stop_reason) == (free[:3], ends)
    said = await policy.generate("c", ids, Sampling(temperature=0, max_new_tokens=100))
    assert len(ids) + len(said.ids) == 40 and said.stop_reason is StopReason.LENGTH
    nothing = await policy.generate("d", ids, Sampling(max_new_tokens=0))
    assert len(nothing.ids) == 0 and nothing.top_ids.shape == (0, TOP_K)
    for wrong, said_of_it in (
        ([1] * 40, "leaves no room in 40"),
        ([], "empty"),
        ([1, VOCAB], f"token {VOCAB}, and the model knows {VOCAB}"),
    ):
        with pytest.raises(PolicyError, match=said_of_it):
            await policy.generate("e", wrong, Sampling())


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
async def test_an_error_reaches_every_waiting_episode_and_the_next_ones_work(
    deterministic: bool,
) -> None:
    model, calls = tiny(), []

    def count(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 11:
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    model.register_forward_pre_hook(count)
    policy = policy_of(model, rows=3, deterministic=deterministic, slot_length=96)
    sampling = Sampling(max_new_tokens=20)
    answers = await asyncio.gather(
        *(policy.generate(f"e{n}", prompts()[n], sampling) for n in range(8)),
        return_exceptions=True,
    )
    assert all(isinstance(answer, PolicyError) for answer in answers)
    first = answers[0]
    assert (
        isinstance(first, PolicyError)
        and "out of memory" in first.message
        and "concurrency" in first.hint
    )
    assert len((await policy.generate("x", [1, 2, 3], sampling)).ids) == 20


async def test_an_error_after_the_last_token_reaches_its_turn() -> None:
    """The turn has left the batch by then, so that nothing else ends it."""

    def refuse(token: int) -> None:
        raise RuntimeError("the listener has closed")

    policy = policy_of(tiny(), rows=3)
    sampling = Sampling(max_new_tokens=1)
    with pytest.raises(PolicyError, match="the listener has closed"):
        await policy.generate("a", [1, 2], sampling, on_token=refuse)
    assert len((await policy.generate("b", [1, 2], sampling)).ids) == 1


async def test_weights_that_are_no_numbers() -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    policy = policy_of(model)
    with pytest.raises(PolicyError, match="not numbers"):
        await policy.generate("a", [1, 2], Sampling())


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_cancelled_episode_frees_its_row(deterministic: bool) -> None:
    model, sizes = tiny(), {"context_length": 512, "slot_length": 512}
    policy = policy_of(model, rows=2, deterministic=deterministic, **sizes)
    endless = Sampling(temperature=0, max_new_tokens=400)
    first, second = (
        asyncio.create_task(policy.generate(f"e{n}", prompts()[n * 3], endless)) for n in range(2)
    )
    # another model: this one runs in the thread
    waiting = asyncio.create_task(check_turn(policy, tiny(), prompts()[9], 4, "w"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await policy.release("e0")
    await waiting
    assert not second.done()  # it went on all the time
    assert (await second).ids.tolist()[:50] == greedy(model, prompts()[3], 50, None)[0]


async def test_closing_ends_what_runs() -> None:
    policy = policy_of(tiny(), context_length=512)
    task = asyncio.create_task(policy.generate("a", [1, 2], Sampling(max_new_tokens=500)))
    await asyncio.sleep(0.05)
    await policy.close()
    assert task.cancelled() or isinstance(
        (await asyncio.gather(task, return_exceptions=True))[0], BaseException
    )


def test_one_policy_in_two_event_loops() -> None:
    model = tiny()
    policy = policy_of(model, rows=1, context_length=512)

    async def interrupted() -> None:
        running = policy.generate("a", [1, 2], Sampling(max_new_tokens=500))
        asyncio.get_running_loop().create_task(running)
        await asyncio.sleep(0.05)

    asyncio.run(interrupted())
    asyncio.run(check_turn(policy, model, prompts()[1], 4, "b"))
    asyncio.run(policy.close())


async def test_memory_is_given_back_between_sampling_and_training() -> None:
    policy = policy_of(tiny())
    await policy.generate("a", prompts()[0], Sampling(max_new_tokens=3))
    assert policy.metrics["rollout/kv_blocks"] > 0
    await policy.rest()
    engine: Any = policy._engine
    assert policy.metrics["rollout/kv_blocks"] == engine.pool.bytes == 0


# --- drawing ---


# --- what sampling multiplies with ---


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(7)[None]).logits
        return found


async def test_positions_that_depend_on_the_length_are_those_of_an_episode_alone() -> None:
    """Of a batch with a context beyond it, and of one that grows beyond it, in a turn or between two."""
    model, rng = tiny("Phi3", **LONGROPE), np.random.default_rng(0)
    policy = policy_of(model, context_length=400)
    assert policy.engine == "fallback" and f"rollout.max_tokens={SWITCH}" in policy.engine_why
    contexts = [rng.integers(6, VOCAB, n).tolist() for n in (200, 60, 60, 100, SWITCH - 6, SWITCH)]

    async def check(key: int, more: int) -> None:
        ids = contexts[key] = contexts[key] + rng.integers(6, VOCAB, more).tolist()
        said = await policy.generate(str(key), ids, Sampling(seed=key, max_new_tokens=14))
        for place, token in enumerate(said.ids.tolist()):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            wanted = float(logits.float().log_softmax(-1)[token])
            assert said.logp_policy[place] == pytest.approx(wanted, abs=1e-4), (key, place)
            ids.append(token)

    for more in (0, 20):
        await asyncio.gather(*(check(key, more) for key in range(len(contexts))))
    for trained, most, context in ((False, 64, SWITCH), (True, 64, 64), (False, 400, 400)):
        config = Config().replace(rollout={"max_tokens": most, "max_new_tokens": 16})
        made = make_policy(model, PolicySettings.of(config), "base", None, trained)
        MADE.add(made)
        assert made.context_length == context
        assert made.engine == (
            "paged" if context <= SWITCH else "fallback"
        )  # no context changes them
