"""`trainer.kind: trl`: what TRL cannot follow is refused; TRL computes the gradient of our trainer, and resumes."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli import Config, Hook
from agentrl_cli.errors import ConfigError, MissingDependency, TrainingStopped
from agentrl_cli.models.adapter import ADAPTER_FILE
from agentrl_cli.models.checkpoint import load_state
from agentrl_cli.plugins.trl import grpo_config, learner
from agentrl_cli.plugins.trl.settings import TrainerConfig
from agentrl_cli.registry import require_package
from agentrl_cli.types import Fact, Sampling
from tests.helpers.train import after_training, episodes_of, settings, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
INSTALLED = importlib.util.find_spec("trl") is not None
needs_trl = pytest.mark.skipif(not INSTALLED, reason="pip install 'agentrl-cli[trl]'")
TRL = {"kind": "trl"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algo": {"advantage": "gae"}}, "algo.advantage: gae; with TRL it is grpo or dr_grpo"),
        ({"algo": {"advantage": {"name": "grpo", "eps": 0.0}}}, "algo.advantage.eps: 0.0"),
        ({"algo": {"loss": "gspo", "aggregation": "token_mean"}}, "algo.loss: gspo"),
        ({"algo": {"minibatches": 2}}, "algo.minibatches: 2; with TRL it is 1"),
        ({"rollout": {"async_staleness": 1}}, "rollout.async_staleness: 1"),
        ({"rollout": {"top_p": 0.9}}, "truncated sampling"),
        ({"train": {"optimizer": "muon"}}, "train.optimizer: muon"),
        (
            {"algo": {"entropy_coef": 0.1, "aggregation": "seq_mean"}},
            "algo.entropy.coef: seq_mean; with TRL",
        ),
        (
            {
                "algo": {"entropy_coef": 0.1},
                "trainer": {**TRL, "options": {"per_device_train_batch_size": 4}},
            },
            "a mean over each of the 2 micro-batches of 4 episodes",
        ),
        ({"trainer": {"kind": "trl", "options": {"max_steps": 3}}}, "trainer.options: max_steps"),
        (
            {"trainer": {"kind": "trl", "options": {"per_device_train_batch_size": 3}}},
            "does not divide the 8 episodes",
        ),
    ],
)
def test_what_trl_cannot_follow_is_refused_in_a_sentence(
    sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        grpo_config.arguments(
            Config.model_validate(settings(Path("m"), **{"trainer": TRL, **sections}))
        )


def test_settings_become_fields_of_trl() -> None:
    algo = {"advantage": "dr_grpo", "loss": {"name": "ppo_clip", "clip_high": 0.3}, "kl_coef": 0.04}
    config = Config.model_validate(
        settings(Path("m"), algo=algo, trainer={**TRL, "options": {"loss_type": "cispo"}})
    )
    given = grpo_config.arguments(config)
    assert (given["scale_rewards"], given["epsilon_high"], given["beta"], given["loss_type"]) == (
        *("none", 0.3, 0.04),
        "cispo",
    )
    assert (given["per_device_train_batch_size"], given["gradient_accumulation_steps"]) == (8, 1)


def test_an_absent_package_and_another_version_are_named_with_the_line_that_installs() -> None:
    with pytest.raises(MissingDependency, match="not installed") as absent:
        require_package("no-such-package", "1.0", "trl")
    assert "pip install 'agentrl-cli[trl]'" in (absent.value.hint or "")
    with pytest.raises(MissingDependency, match=r"numpy .* is another version than 0.1"):
        require_package("numpy", "0.1", "trl")
    if not INSTALLED:
        with pytest.raises(MissingDependency, match="The package trl is not installed"):
            grpo_config.check(Config.model_validate(settings(Path("m"), trainer=TRL)))


@needs_trl
async def test_trl_computes_the_gradient_of_our_trainer(tmp_path: Path, model: Path) -> None:
    found = {}
    for kind in ("agentrl", "trl"):
        (tmp_path / kind).mkdir()
        more: dict[str, Any] = {"algo": {"kl_coef": 0.1}, "train": {"steps": 2}}
        more["trainer"] = {"kind": kind}
        async with after_training(tmp_path / kind, model, **more) as (trainer, run):
            store, journal = trainer.store, trainer.store.journal
            episodes = episodes_of(store, run, 1)
            trained = [e for e in episodes if e.fact == Fact.TRAINED]
            signals = [e.id for e in episodes if store.signals.get(e.id) is not None]
            assert signals == ([] if kind == "trl" else [e.id for e in trained])
            found[kind] = store.runs.steps(run.id)[0], [(e.reward, e.advantage) for e in trained]
            logs = " ".join(row["text"] for row in journal.logs(run.id))
            assert (learner.LOST in logs) == (kind == "trl")
            assert "no_signal" not in [alert["name"] for alert in journal.folded_alerts(run.id)]
    (ours, mine), (theirs, other) = found["agentrl"], found["trl"]
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
    assert theirs["entropy"] == pytest.approx(ours["entropy"], rel=1e-3)
    assert np.array(other) == pytest.approx(np.array(mine), rel=1e-2)


@needs_trl
async def test_a_hook_that_changes_sampling_is_refused(tmp_path: Path, model: Path) -> None:
    class Hot(Hook):
        def on_sample(self, sampling: Sampling, task: Any, turn: int) -> Sampling:
            return sampling

    with pytest.raises(ConfigError, match="on_sample changes how tokens are drawn"):
        async with trainer_of(tmp_path, model, [Hot()], trainer=TRL):
            pass


@needs_trl
async def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path, model: Path) -> None:
    async with trainer_of(tmp_path, model, trainer=TRL, algo={"entropy_coef": 1e39}) as trainer:
        before = {
            name: weight.clone() for name, weight in trainer.loaded.model.state_dict().items()
        }
        with pytest.raises(TrainingStopped, match="not finite; the weights were left"):
            await trainer.train()
        after = trainer.loaded.model.state_dict()
        assert all(torch.equal(weight, after[name]) for name, weight in before.items())
        options = {**TRL, "options": {"loss_typ": "grpo"}}
        with pytest.raises(ConfigError, match="loss_typ is not a field") as caught:
            grpo_config.check(
                trainer.rollout.context.config.model_copy(
                    update={"trainer": TrainerConfig.model_validate(options)}
                )
            )
        assert "loss_type" in (caught.value.hint or "")


async def test_a_run_that_heals_goes_on_after_such_a_gradient(tmp_path: Path, model: Path) -> None:
    async with trainer_of(tmp_path, model, train={"heal": True}) as trainer:
        made = learner.TRLLearner(trainer.loaded, trainer.rollout.context.config, tmp_path)
        weight = trainer.loaded.model.get_output_embeddings().weight
        weight.grad = torch.full_like(weight, torch.nan)
        made.require_finite()
        assert weight.grad is None, "the step changes nothing, and its numbers lead back"


def test_a_model_that_is_an_adapter_is_no_reference_of_trl(tmp_path: Path) -> None:
    (tmp_path / ADAPTER_FILE).touch()
    algo = {"kl_coef": 0.1}
    config = Config.model_validate(settings(tmp_path, algo=algo, trainer=TRL))
    grpo_config.require_reference(config, tmp_path / "base")
    with pytest.raises(ConfigError, match="TRL's reference is the base without it"):
        grpo_config.require_reference(config, tmp_path)


@needs_trl
async def test_an_interrupted_run_ends_with_the_weights_of_a_whole_one(
    tmp_path: Path, model: Path
) -> None:
    sections: dict[str, Any] = {"deterministic": True, "trainer": TRL}
    ends = []
    for name, stops in (("whole", (3,)), ("broken", (2, 3))):
        (tmp_path / name).mkdir()
        run = None
        for steps in stops:
            sections["train"] = {"steps": steps}
            async with after_training(tmp_path / name, model, run=run, **sections) as (_, run):
                pass
        assert run is not None
        last = Path(run.dir) / "checkpoints" / "last"
        ends.append((load_state(last)["step"], (last / "model.safetensors").read_bytes()))
    assert ends[0] == ends[1]


@needs_trl
async def test_what_a_control_sets_counts_from_the_next_step(tmp_path: Path, model: Path) -> None:
    kept: list[torch.Tensor] = []

    class Asking:
        def on_update(self, run: Any) -> None:
            kept.append(trainer.loaded.model.state_dict()["lm_head.weight"].clone())
            if len(kept) == 1:
                for key, value in (("train.max_grad_norm", 1e-30), ("train.steps", 3)):
                    trainer.store.controls.add(trainer.run.id, "set", {"key": key, "value": value})

    train = {"steps": 2, "lr": 1e-2, "optimizer": {"betas": [0.0, 0.95]}}  # without momentum
    async with trainer_of(tmp_path, model, [Asking()], train=train, trainer=TRL) as trainer:
        before = trainer.loaded.model.state_dict()["lm_head.weight"].clone()
        run = await trainer.train()
        assert run.step == 3 and not torch.equal(before, kept[0])
        assert torch.equal(kept[0], kept[1]) and torch.equal(kept[1], kept[2])
