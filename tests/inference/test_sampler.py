"""Drawing, by hand-computed distributions: penalties, forbidden and forced tokens, min-p, both log-probabilities."""

import asyncio
import re
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
from agentrl_cli.inference.engine import PagedEngine
from agentrl_cli.inference.memory import parse_memory
from agentrl_cli.inference.products import WAYS, fastest_way
from agentrl_cli.inference.sampler import _invert, draw, steer, uniforms
from agentrl_cli.inference.sampling_weights import SamplingWeights, find_parts, linear_layers
from agentrl_cli.models.adapter import use_adapter
from agentrl_cli.types import Generation, Origin, Sampling, StopReason, Tokens
from tests.helpers.local import greedy, policy_of, prompts, tiny

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))


def sampled(
    sampling: Sampling, context: list[int], out: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of every token as sampled (NaN where never drawn) and as the policy has them."""
    own = torch.full((4,), torch.nan)
    policy = torch.full((4,), torch.nan)
    for number in np.linspace(0, 1, 400, endpoint=False):
        allowed = [None if sampling.allow is None else sampling.allow(tuple(out))]
        steered, _ = steer(LOGITS, [sampling], [np.array(context, np.int32)], allowed)
        drawn = draw(LOGITS, [sampling], torch.tensor([number], dtype=torch.float64), steered)
        own[drawn.ids[0]], policy[drawn.ids[0]] = (
            drawn.logp_sampled[0].exp(),
            drawn.logp_policy[0].exp(),
        )
    return own.numpy(), policy.numpy()


def test_min_p_keeps_what_is_likely_beside_the_best() -> None:
    # 0.4 of the best, 0.5, is 0.2: two tokens stay, with 2/3 and 1/3.
    own, policy = sampled(Sampling(min_p=0.4), [], [])
    assert own[:2] == pytest.approx([2 / 3, 1 / 3], abs=1e-6) and np.isnan(own[2:]).all()
    assert policy[:2] == pytest.approx([0.5, 0.25], abs=1e-6)
    # At temperature 1/2 the best has 0.25 of 0.345: 0.0625, 0.0225 and 0.01 are below 0.4 of it.
    own, policy = sampled(Sampling(min_p=0.4, temperature=0.5), [], [])
    assert own[0] == pytest.approx(1.0) and policy[0] == pytest.approx(0.25 / 0.345, abs=1e-6)


def test_a_penalty_falls_on_the_tokens_of_the_context() -> None:
    # Negative logits are multiplied: tokens 0 and 3 get 0.25 and 0.01 before renormalising over 0.66.
    own, policy = sampled(Sampling(repetition_penalty=2.0), [0, 3, 0], [])
    assert own == pytest.approx(np.array([0.25, 0.25, 0.15, 0.01]) / 0.66, abs=1e-6)
    assert policy == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=1e-6)
    # Positive ones are divided.
    steered, _ = steer(
        torch.tensor([[2.0, -1.0]]),
        [Sampling(repetition_penalty=4.0)],
        [np.array([0, 1], np.int32)],
        [None],
    )
    assert steered is not None and steered.tolist() == [[0.5, -4.0]]


def test_forbidden_allowed_and_forced_tokens() -> None:
    own, _ = sampled(Sampling(bad_ids=(0,)), [], [])
    assert own[1:] == pytest.approx([0.5, 0.3, 0.2], abs=1e-6) and np.isnan(own[0])
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


def test_rows_do_not_meet() -> None:
    logits = LOGITS.repeat(3, 1)
    samplings = [
        Sampling(),
        Sampling(min_p=0.9, bad_ids=(1,)),
        Sampling(temperature=0, repetition_penalty=9.0),
    ]
    steered, _ = steer(logits, samplings, [np.array([0], np.int32)] * 3, [None] * 3)
    drawn = draw(logits, samplings, torch.full((3,), 0.6, dtype=torch.float64), steered)
    assert drawn.ids.tolist() == [1, 0, 1]  # the penalised best loses greedily: 0.5 ** 9 < 0.25
    assert drawn.logp_sampled.tolist() == pytest.approx([np.log(0.25), 0.0, 0.0], abs=1e-6)


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
    ]
    samplings.append(Sampling(top_k=1, keep_support=True))
    found = draw(
        LOGITS.repeat(4, 1), samplings, torch.full((4,), 0.1, dtype=torch.float64), None
    ).support
    best = LOGITS[0].argsort(descending=True).tolist()
    kept = [None if ids is None else sorted(ids.tolist()) for ids in found]
    assert kept == [sorted(best[:2]), None, None, best[:1]]


async def test_a_policy_samples_as_configured() -> None:
    model, ids = tiny(), prompts()[0]
    policy = policy_of(model)

    def begin(out: tuple[int, ...]) -> list[int] | None:
        return [[9], [4]][len(out)] if len(out) < 2 else None

    said = await policy.generate("a", ids, Sampling(temperature=0, max_new_tokens=6, allow=begin))
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


async def test_log_probabilities_of_what_was_sampled_with_everything_on() -> None:
    model, ids = tiny(), prompts()[3]
    policy = policy_of(model)
    sampling = Sampling(
        temperature=0.7,
        top_k=9,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        bad_ids=(3, 8),
        seed=5,
        max_new_tokens=6,
    )
    said, _ = (
        await policy.generate("a", ids, sampling),
        await policy.generate("b", prompts()[5], Sampling(max_new_tokens=3)),
    )
    assert isinstance(said, Generation) and said.stop_reason is StopReason.LENGTH
    for n, token in enumerate(said.ids.tolist()):
        context = [*ids, *said.ids[:n].tolist()]
        logits = model(torch.tensor([context])).logits[0, -1].detach().numpy().astype(np.float64)
        plain = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
        assert said.logp_policy[n] == pytest.approx(np.log(plain[token]), abs=1e-4)
        seen = np.unique(context)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
        logits[[3, 8]] = -np.inf
        probs = np.exp(logits / 0.7)
        order = np.argsort(-probs)[:9]
        kept = probs[order] / probs[order].sum()
        kept = np.where(np.cumsum(kept) - kept < 0.9, kept, 0)
        kept = np.where(kept >= 0.05 * kept[0], kept, 0)
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


pytestmark = pytest.mark.filterwarnings(
    "ignore:.lora_bias=True"
)  # the layers of tiny models have no bias
IDS = torch.arange(7)[None]


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = get_peft_model(
        tiny("qwen3").to(dtype),
        LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **options),
    )
    return model.eval()


def layers(model: Any) -> list[Any]:
    found = [(layer, find_parts(layer)) for (layer,) in linear_layers(model)]
    return [layer for layer, part in found if part is not None and part[1]]


def merged_logits(model: Any, merged: SamplingWeights) -> torch.Tensor:
    with torch.inference_mode():
        merged.refresh()
    with torch.inference_mode(), merged.apply():
        assert all("forward" in vars(layer) for layer in layers(model))
        found: torch.Tensor = model(IDS).logits
        return found


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
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
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.add_(0.5)
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


@pytest.mark.parametrize(
    "odd", [{"dtype": torch.bfloat16}, {"use_dora": True}, {"lora_bias": True}]
)
def test_what_is_more_than_two_float32_matrices_is_not_merged(odd: dict[str, Any]) -> None:
    assert layers(adapted(**odd)) == []


def test_a_large_model_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_weights, "copied", lambda weights: False)
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


async def test_a_policy_samples_with_new_weights_and_frees_the_sums() -> None:
    model = adapted()
    policy = policy_of(model)
    assert isinstance(policy._engine, PagedEngine)
    merged = policy._engine.runner.weights
    for version in ("one", "two"):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.mul_(-1.5)
        await policy.publish(version)
        said = await policy.generate(
            version, [1, 2, 3, 4], Sampling(temperature=0, max_new_tokens=6)
        )
        whole = torch.tensor([[1, 2, 3, 4, *said.ids.tolist()]])
        with torch.inference_mode():
            wanted = model(whole).logits[0, 3:-1].log_softmax(-1)
        assert torch.allclose(
            wanted.gather(1, whole[0, 4:, None])[:, 0], torch.tensor(said.logp_policy), atol=1e-4
        )
        await policy.release(version)
    assert merged._products
    await policy.rest()
    assert not merged._products
