"""The local policy: the numbers of the model's own `generate`, whatever else is in the batch.

Drawing, by hand-computed distributions: penalties, forbidden and forced tokens, min-p, both log-probabilities.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from agentrl_cli import ByteTokenizer, Config
from agentrl_cli.errors import ConfigError, EnvError, PolicyError
from agentrl_cli.hooks import Hook, HookList
from agentrl_cli.inference import sampling_weights
from agentrl_cli.inference.memory import parse_memory, prefill_tokens
from agentrl_cli.inference.model_runner import PIECE, ModelRunner
from agentrl_cli.inference.products import TICK, WAYS, fastest_way, least
from agentrl_cli.inference.sampler import _invert, draw, steer, uniforms
from agentrl_cli.inference.sampling_weights import SamplingWeights, find_parts, linear_layers
from agentrl_cli.models.adapter import use_adapter
from agentrl_cli.types import TOP_K, Generation, Origin, Sampling, StopReason, Tokens
from tests.helpers.local import STOP, VOCAB, check_turn, forced, greedy, policy_of, prompts, tiny


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


LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))


def test_forbidden_allowed_and_forced_tokens() -> None:
    # Of 1 and 3 the second is forbidden: 1 is forced and certain.
    sampling = Sampling(allow=lambda out: [1, 3], bad_ids=(3,))
    steered, single = steer(LOGITS, [sampling], [np.zeros(0, np.int32)], [[1, 3]])
    drawn = draw(LOGITS, [sampling], torch.tensor([0.99], dtype=torch.float64), steered, single)
    assert (drawn.ids.tolist(), drawn.logp_sampled.tolist(), single) == ([1], [0.0], {0: 1})
    assert drawn.logp_policy[0].exp().item() == pytest.approx(0.25)
    # One token alone is said, whatever would have been drawn; the row beside it is drawn as ever.
    samplings = [Sampling(allow=lambda out: [3]), Sampling()]
    both = LOGITS.repeat(2, 1)
    steered, single = steer(both, samplings, [np.zeros(0, np.int32)] * 2, [[3], None])
    numbers = torch.tensor([0.1, 0.1], dtype=torch.float64)
    drawn = draw(both, samplings, numbers, steered, single)
    assert (single, drawn.ids.tolist()) == ({0: 3}, [3, 0])
    assert drawn.logp_sampled.exp().tolist() == pytest.approx([1.0, 0.5])
    assert drawn.logp_policy.exp().tolist() == pytest.approx([0.1, 0.5])
    cold = draw(both, [Sampling(temperature=t) for t in (0.0, 1e-39)], numbers)
    assert (cold.ids.tolist(), cold.logp_sampled.tolist()) == ([0, 0], [0.0, 0.0])
    assert cold.logp_policy.exp().tolist() == pytest.approx([0.5, 0.5]), "not NaN"


def test_a_large_vocabulary_is_searched_in_two_steps() -> None:
    probs = torch.from_numpy(np.random.default_rng(0).random((50, 8192)) ** 8).float()
    probs[:, 100:900] = 0
    probs[:, -70:] = 0
    numbers = torch.from_numpy(uniforms(3, 50))
    numbers[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5], dtype=torch.float64)
    long = probs.cumsum(-1, dtype=torch.float64)
    wanted = torch.searchsorted(long, numbers[:, None] * long[:, -1:], right=True)[:, 0]
    got = _invert(probs, numbers)
    assert (got - wanted).abs().max() <= 1 and (got == wanted).float().mean() > 0.95
    assert (probs[torch.arange(50), got] > 0).all()


def test_what_could_be_drawn_is_kept_for_the_rows_that_ask() -> None:
    samplings = [
        Sampling(top_k=2, keep_support=True),
        Sampling(top_k=1),
        Sampling(keep_support=True),
        Sampling(top_k=1, keep_support=True),
        Sampling(top_k=10**300, keep_support=True),
    ]
    numbers = torch.full((5,), 0.1, dtype=torch.float64)
    found = draw(LOGITS.repeat(5, 1), samplings, numbers, None).support
    kept = [None if ids is None else sorted(ids.tolist()) for ids in found]
    assert kept == [[0, 1], None, None, [0], None]


async def test_a_policy_samples_as_configured() -> None:
    model, ids = tiny(), prompts()[0]
    policy = policy_of(model)

    begun = Sampling(
        temperature=0,
        max_new_tokens=6,
        allow=lambda out: [[9], [4]][len(out)] if len(out) < 2 else None,
    )
    said = await policy.generate("a", ids, begun)
    assert said.ids.tolist() == [9, 4, *greedy(model, [*ids, 9, 4], 4, None)[0]]
    assert said.forced is not None and said.forced.tolist() == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert Tokens.from_generation(said).origin.tolist() == [Origin.FORCED] * 2 + [Origin.MODEL] * 4
    given = torch.tensor([ids])
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=8,
        do_sample=False,
        repetition_penalty=1.5,
    )
    said = await policy.generate(
        "b", ids, Sampling(temperature=0, max_new_tokens=8, repetition_penalty=1.5)
    )
    assert said.ids.tolist() == out[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"temperature": -1.0}, "temperature -1 is not 0 or above"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0 is not above 0"),
        ({"top_k": -3}, "top_k -3"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0 is not above 0"),
        ({"stop_strings": ("x", "")}, "stop_strings has an empty text"),
        ({"bad_ids": (5, -1)}, "bad_ids has -1, which is not a token"),
        ({"bad_ids": (5, 96)}, "bad_ids has 96, and the model knows tokens 0 to 95"),
        ({"bad_ids": tuple(range(96))}, "bad_ids forbids every token"),
    ],
)
async def test_a_sampling_that_means_nothing_is_named(values: dict[str, Any], why: str) -> None:
    policy = policy_of(tiny())
    with pytest.raises(PolicyError, match=re.escape(f"Sampling.{why}")):
        await policy.generate("a", [1, 2, 3], Sampling(**values))
    if "96" not in why and "every" not in why:

        class Odd(Hook):
            def on_sample(self, sampling: Sampling, task: Any, turn: int) -> Sampling:
                return replace(sampling, **values)

        with pytest.raises(
            EnvError, match=rf"Odd.on_sample raised ValueError: Sampling.{re.escape(why)}"
        ):
            await HookList([Odd()]).sampling(Sampling(), task=None, turn=0)


@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
async def test_what_one_turn_may_not_say_is_its_own_fault(kind: str) -> None:
    model, every = tiny(kind), prompts()[:4]

    def raises(out: tuple[int, ...]) -> list[int] | None:
        if len(out) == 3:
            raise KeyError("mine")
        return None

    odd = {
        1: (raises, "raised KeyError: 'mine'"),
        2: (lambda out: [], r"gave \[\]; the model knows"),
        3: (lambda out: [96], "96"),
    }
    policy = policy_of(model)
    asked = [
        Sampling(max_new_tokens=8, seed=n, allow=odd[n][0] if n in odd else None) for n in range(4)
    ]
    said = await asyncio.gather(
        *(policy.generate(str(n), ids, asked[n]) for n, ids in enumerate(every)),
        return_exceptions=True,
    )
    alone = await policy.generate("alone", every[0], asked[0])
    assert isinstance(said[0], Generation) and said[0].ids.tolist() == alone.ids.tolist()
    for n, (_, why) in odd.items():
        problem = said[n]
        assert isinstance(problem, EnvError) and re.match(
            f"Sampling.allow .*{why}", problem.message
        )
    with pytest.raises(EnvError, match="all of which bad_ids forbids"):
        await policy.generate("b", every[0], Sampling(allow=lambda out: [3], bad_ids=(3,)))
    assert (
        await policy.generate("1", every[1], Sampling(max_new_tokens=2, temperature=0))
    ).ids.size == 2


EVERYTHING = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "bad_ids": (3, 8)}
HOW: list[dict[str, Any]] = [
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.4, "temperature": 0.5},
    {"repetition_penalty": 2.0},
    {"bad_ids": tuple(range(90))},
    {**EVERYTHING, "repetition_penalty": 1.3},
    {"temperature": 0, "repetition_penalty": 9.0},
]


async def test_tokens_and_their_log_probabilities_are_those_of_the_definitions() -> None:
    """Of rows that are sampled together, each in its own way."""
    model, asked = tiny(), [Sampling(**how, seed=5, max_new_tokens=12) for how in HOW]
    policy = policy_of(model, rows=len(HOW))
    turns = (policy.generate(str(n), prompts()[n], one) for n, one in enumerate(asked))
    for sampling, ids, said in zip(asked, prompts(), await asyncio.gather(*turns), strict=False):
        with torch.no_grad():
            every = model(torch.tensor([[*ids, *said.ids.tolist()]])).logits[0].double().numpy()
        for n, token in enumerate(said.ids.tolist()):
            logits, heat = every[len(ids) - 1 + n], sampling.temperature or 1.0
            plain = np.exp(logits / heat) / np.exp(logits / heat).sum()
            assert said.logp_policy[n] == pytest.approx(np.log(plain[token]), abs=1e-4)
            seen, penalty = np.unique([*ids, *said.ids[:n]]), sampling.repetition_penalty
            logits[seen] = np.where(
                logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty
            )
            logits[list(sampling.bad_ids)] = -np.inf
            probs = np.exp(logits / heat)
            order = np.argsort(-probs)[: 1 if sampling.temperature == 0 else sampling.top_k or None]
            kept = probs[order] / probs[order].sum()
            kept = np.where(np.cumsum(kept) - kept < sampling.top_p, kept, 0)
            kept = np.where(kept >= sampling.min_p * kept[0], kept, 0)
            at = order.tolist().index(token)
            assert said.logp_sampled[n] == pytest.approx(np.log(kept[at] / kept.sum()), abs=1e-4)


def test_the_configuration_says_how_to_sample() -> None:
    config = Config.model_validate(
        {"rollout": {"min_p": 0.1, "repetition_penalty": 1.2, "memory": "512 MiB"}}
    )
    assert config.rollout.truncates and not Config().rollout.truncates
    sampling = config.rollout.sampling(max_new_tokens=3)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.max_new_tokens) == (0.1, 1.2, 3)
    assert parse_memory(config.rollout.memory) == 2**29 and parse_memory("auto") is None
    assert parse_memory("1.5g") == 3 * 2**29 and parse_memory("1000000") == 10**6
    with pytest.raises(ConfigError, match="not an amount of memory"):
        parse_memory("much")


@pytest.mark.parametrize(
    ("said", "stops", "ends"),
    [
        ("a é→b", ("é→",), "a é→"),  # in the middle of two characters of several bytes each
        ("ab</answer>c", ("</answer>", "zz"), "ab</answer>"),
        ("xxab", ("ab", "xab"), "xxab"),
        ("\n\n\nQ: x", ("\n\nQ:",), "\n\n\nQ:"),
    ],
)
async def test_a_stop_string_across_the_borders_of_tokens(
    said: str, stops: tuple[str, ...], ends: str
) -> None:
    tokenizer = ByteTokenizer()
    wanted = tokenizer.encode(said)
    policy = policy_of(tiny(vocab_size=512), decode=tokenizer.decode)
    spoken = Sampling(max_new_tokens=40, stop_strings=stops, allow=lambda out: [wanted[len(out)]])
    turn = await policy.generate("a", tokenizer.encode("hello"), spoken)
    assert (tokenizer.decode(turn.ids), turn.stop_reason) == (ends, StopReason.STOP_STRING)


# --- what sampling multiplies with ---


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(tiny("qwen3").to(dtype), config).eval()


def change_adapter(model: Any, change: Callable[[torch.Tensor], Any]) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                change(weight)


def layers(model: Any) -> list[Any]:
    found = [(layer, find_parts(layer)) for (layer,) in linear_layers(model)]
    return [layer for layer, part in found if part is not None and part[1]]


def merged_logits(model: Any, merged: SamplingWeights) -> torch.Tensor:
    with torch.inference_mode():
        merged.refresh()
        with merged.apply():
            assert all("forward" in vars(layer) for layer in layers(model))
            return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(7)[None]).logits
        return found


def test_the_numbers_are_those_of_the_adapted_model_and_its_layers_stay_as_they_are() -> None:
    model = adapted()
    count = len(layers(model))
    assert count == 2 * 7
    torch.testing.assert_close(
        merged_logits(model, SamplingWeights(linear_layers(model))),
        logits(model),
        atol=1e-5,
        rtol=1e-5,
    )
    assert len(layers(model)) == count and not any(
        "forward" in vars(layer) for layer in model.modules()
    )


def test_new_weights_and_another_adapter_are_seen_after_renew() -> None:
    model = adapted()
    merged, before = SamplingWeights(linear_layers(model)), logits(model)
    merged_logits(model, merged)
    change_adapter(model, lambda weight: weight.add_(0.5))
    torch.testing.assert_close(merged_logits(model, merged), before, atol=1e-5, rtol=1e-5)
    merged.renew()
    torch.testing.assert_close(merged_logits(model, merged), logits(model), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(model), before, atol=1e-2)
    use_adapter(model, None)
    merged.renew()
    assert layers(model) == []
    plain = tiny("qwen3").eval()  # multiplied in the same ways, which this machine's speed decides
    wanted = merged_logits(plain, SamplingWeights(linear_layers(plain)))
    torch.testing.assert_close(merged_logits(model, merged), wanted, atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:.lora_bias=True")  # the layers of tiny models have no bias
@pytest.mark.parametrize(
    "odd", [{"dtype": torch.bfloat16}, {"use_dora": True}, {"lora_bias": True}]
)
def test_what_is_more_than_two_float32_matrices_is_not_merged(odd: dict[str, Any]) -> None:
    assert layers(adapted(**odd)) == []


def test_a_large_model_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_weights, "copies_weights", lambda weights: False)
    model = adapted()
    weights = SamplingWeights(linear_layers(model))
    with torch.inference_mode():
        weights.refresh()
        with weights.apply():
            assert not any("forward" in vars(layer) for layer in model.modules())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("biased", [False, True])
def test_every_way_is_the_same_product(way: str, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(n, 48, generator=generator) for n in (80, 5))
    bias = torch.randn(80, generator=generator) if biased else None
    with torch.inference_mode():
        found = WAYS[way](weight, bias)(rows)
    torch.testing.assert_close(found, torch.nn.functional.linear(rows, weight, bias))


def test_a_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = fastest_way(torch.empty(0), 80, 48)
    file = tmp_path / "agentrl" / "products.json"
    assert found in WAYS and f'"{found}"' in file.read_text()
    other = next(way for way in WAYS if way != found)
    file.write_text(file.read_text().replace(f'"{found}"', f'"{other}"'))
    assert fastest_way(torch.empty(0), 80, 48) == other  # read, not tried
    file.write_text("damaged")
    assert fastest_way(torch.empty(0), 80, 48) in WAYS
    assert (least([3e-6, 0.0, 2e-6]), least([0.0])) == (2e-6, TICK), "a clock that did not move"


async def test_a_policy_samples_with_new_weights_and_frees_the_sums() -> None:
    model = adapted()
    policy = policy_of(model)
    engine: Any = policy._engine
    merged = engine.runner.weights
    for version in ("one", "two"):
        change_adapter(model, lambda weight: weight.mul_(-1.5))
        await policy.publish(version)
        said = await policy.generate(version, [1, 2], Sampling(temperature=0, max_new_tokens=6))
        _, wanted = forced(model, [1, 2], 6, said=said.ids.tolist())
        assert said.logp_policy.tolist() == pytest.approx(wanted, abs=1e-4)
        await policy.release(version)
    assert merged._products
    await policy.rest()
    assert not merged._products
