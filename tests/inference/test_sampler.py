"""Drawing, by hand-computed distributions: penalties, forbidden and forced tokens, min-p, both log-probabilities."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from agentrl_cli import ByteTokenizer, Config
from agentrl_cli.errors import ConfigError, EnvError, PolicyError
from agentrl_cli.hooks import Hook, HookList
from agentrl_cli.inference import sampling_weights
from agentrl_cli.inference.memory import parse_memory
from agentrl_cli.inference.products import TICK, WAYS, fastest_way, least
from agentrl_cli.inference.sampler import _invert, draw, steer, uniforms
from agentrl_cli.inference.sampling_weights import SamplingWeights, find_parts, linear_layers
from agentrl_cli.models.adapter import use_adapter
from agentrl_cli.types import Generation, Origin, Sampling, StopReason, Tokens
from tests.helpers.local import forced, greedy, policy_of, prompts, tiny
from tests.inference.test_policy import logits

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
