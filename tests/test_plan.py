"""The memory plan: numbers from shapes, and a refusal that says what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.paths import bundled_model
from agentrl_cli.plan import Plan, checkpoints, plan


def test_the_parts_of_the_bundled_model_by_hand() -> None:
    found = plan(Config(), bundled_model())
    # 768 × 160 embeddings (tied) + 6 layers of 4 × 160² attention, 3 × 160 × 432 MLP, norms; 64 rows × 1,024 positions.
    layer = 4 * 160 * 160 + 3 * 160 * 432 + 2 * 160 + 2 * 32
    assert found.parameters == 768 * 160 + 6 * layer + 160
    assert found.rollout["weights"] == found.parameters * 4
    assert found.rollout["keys and values"] == 64 * 1024 * 6 * 2 * 160 * 4
    assert found.update["optimizer"] == found.trainable * 8
    assert found.fits and not found.advice()


def test_an_adapter_shrinks_what_is_trained() -> None:
    config = Config.model_validate({"adapter": {"enabled": True, "r": 4}})
    found = plan(config, bundled_model())
    assert found.trainable == 4 * 6 * (4 * 320 + 3 * 592) < found.parameters


def test_what_does_not_fit_is_refused_with_the_largest_part_first() -> None:
    found = replace(
        plan(Config.model_validate({"rollout": {"concurrency": 64, "max_tokens": 1024}}), bundled_model()),
        available=1.0,
    )
    assert not found.fits
    assert "rollout.concurrency" in found.advice()[0] or "token_budget" in found.advice()[0]


@pytest.mark.parametrize(("coefficient", "there"), [(0.0, False), (0.1, True)])
def test_a_reference_is_counted_where_there_is_one(coefficient: float, there: bool) -> None:
    found = plan(Config.model_validate({"algo": {"kl_coef": coefficient}}), bundled_model())
    assert ("reference" in found.update) is there


def test_activations_are_recomputed_as_it_is_set_and_where_they_do_not_fit() -> None:
    def of(choice: str, budget: int = 4096, held: float = 0.0) -> Plan:
        return plan(Config.model_validate({"train": {"checkpointing": choice, "token_budget": budget}}), folder, held)

    folder, huge = bundled_model(), 10**9
    kept, again = of("off"), of("on")
    each = (9 * 160 + 4 * 160) * 4 + (3 * 160 + 2 * 160 + 4 * 432) * 4
    assert kept.update["activations"] == 4096 * 6 * each
    assert again.update["activations"] == 4096 * (6 * 160 * 4 + each)
    assert again.checkpointing and not kept.checkpointing and not of("auto").checkpointing
    assert of("auto", huge).checkpointing and not of("off", huge).checkpointing
    assert not of("auto", huge, held=1e18).checkpointing, "what is loaded already counts as room"


def test_a_small_model_is_not_planned_for_before_training() -> None:
    layer = torch.nn.Linear(4, 4)
    settings = {name: Config.model_validate({"train": {"checkpointing": name}}) for name in ("auto", "on", "off")}
    found = {name: checkpoints(config, bundled_model(), layer) for name, config in settings.items()}
    assert found == {"auto": False, "on": True, "off": False}


def test_optimizer_state_by_name() -> None:
    def state(name: str) -> float:
        found = plan(Config.model_validate({"train": {"optimizer": name}}), bundled_model())
        return found.update["optimizer"] / found.trainable

    assert [state(name) for name in ("adamw", "adamw8bit", "adamw_offload")] == [8, 2, 12]
