"""Drafts change no token: turns with them are turns without them, and where nothing repeats none are fed."""

import asyncio
from typing import Any

import numpy as np
import pytest

from agentrl_cli.inference import drafts
from agentrl_cli.inference.drafts import Drafts
from agentrl_cli.inference.engine import PagedEngine
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.types import Generation, Sampling
from tests.helpers.local import VOCAB, policy_of, tiny


def known(policy: LocalPolicy) -> Drafts:
    assert isinstance(policy._engine, PagedEngine)
    assert policy._engine.drafts is not None
    return policy._engine.drafts


async def rounds(policy: LocalPolicy, seed: int, **how: Any) -> list[Generation]:
    """Two steps of twelve episodes of two turns each, the last of which go on alone; groups of four."""
    found = []
    for step in range(2):
        rng = np.random.default_rng(seed)
        given = [rng.integers(6, VOCAB, 30).tolist() for _ in range(3)]

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

        for said in await asyncio.gather(*map(episode, range(12))):
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
    assert isinstance(plain._engine, PagedEngine)
    plain._engine.drafts = None
    wanted, found = await rounds(plain, 0, **how), await rounds(policy, 0, **how)
    for one, other in zip(wanted, found, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.stop_reason == other.stop_reason
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


def test_useless_drafts_are_given_up_for_a_while() -> None:
    found = Drafts()
    assert found.worth(8)
    found.rest(drafts.PATIENCE)
    assert not found.worth(8)
    found.learn(list(range(50)) * 2, 0)
    assert not found._new
    found.rest(drafts.PATIENCE)
    assert found.worth(8)


def test_what_is_dear_is_not_fed() -> None:
    found = Drafts()
    found.learn(list(range(10)) * 20, 0)
    assert found.worth(64)
    found._right = [0.1] * len(found._right)
    assert not found.worth(64) and found.worth(1)
