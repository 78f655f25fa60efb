"""Adapters and optimizers: rsLoRA and DoRA train, resume, merge; offloaded state gives AdamW numbers; QLoRA refuses."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.config import Config
from agentrl_cli.config.train import TrainConfig
from agentrl_cli.errors import ConfigError, EnvironmentProblem
from agentrl_cli.learning.optimizers import OffloadedAdamW, Several, make_optimizer
from agentrl_cli.models import device as quantise
from agentrl_cli.models.load import load_model
from agentrl_cli.models.merge import merge
from agentrl_cli.policies.load import load_policy
from tests.helpers.train import trainer_of


async def test_an_adapter_trains_resumes_and_merges(tmp_path: Path, model: Path) -> None:
    kinds = {"use_rslora": True, "use_dora": True}
    sections: dict[str, Any] = {
        "adapter": {"enabled": True, "r": 4, "alpha": 8, **kinds},
        "train": {"steps": 3, "lr": 1e-2, "save_every": 2},
        "algo": {"drop_zero_variance": False},
        "deterministic": True,
    }
    ends = []
    for stop in (0, 2):
        folder, run = tmp_path / f"run{stop}", None
        if stop:
            short = {**sections, "train": {**sections["train"], "steps": stop}}
            async with trainer_of(folder, model, **short) as trainer:
                run = await trainer.train()
        async with trainer_of(folder, model, run=run, **sections) as trainer:
            done = await trainer.train()
            gaps = [
                row["sampling/sampling_logp_difference/max"]
                for row in trainer.store.runs.steps(done.id)
            ]
            assert max(gaps) < 1e-4, "sampler and trainer are the same model"
            last = next(
                Path(c.path) for c in trainer.store.runs.checkpoints(done.id) if c.kind == "last"
            )
            ends.append((last / "adapter_model.safetensors").read_bytes())
            trained = {
                n: p.detach() for n, p in trainer.loaded.model.named_parameters() if p.requires_grad
            }
            assert any("magnitude" in name for name in trained)
            ids = torch.arange(5, 25)[None]
            with torch.no_grad():
                wanted = trainer.loaded.model(ids).logits
    assert ends[0] == ends[1], "a resumed run ends where a whole one does"
    assert kinds.items() <= json.loads((last / "adapter_config.json").read_text()).items()
    config = Config.model_validate(
        {"model": {"name": str(last), "device": "cpu", "dtype": "float32"}}
    )
    merge(str(last), tmp_path / "merged", config.model, base=tmp_path, dtype="float32")
    merged = load_model(tmp_path / "merged", config.model, base=tmp_path)
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, wanted, atol=1e-5)


def test_rslora_scales_by_the_root(model: Path) -> None:
    scales = []
    for rslora in (False, True):
        adapter = {"enabled": True, "r": 16, "alpha": 8, "use_rslora": rslora}
        config = Config.model_validate(
            {"model": {"name": str(model), "device": "cpu"}, "adapter": adapter}
        )
        loaded = load_policy(None, config, base=model, trainable=True)
        scales += [
            m.scaling["default"] for n, m in loaded.model.named_modules() if n.endswith("q_proj")
        ][:1]
    assert scales == [8 / 16, 8 / 4]


def steps(model: torch.nn.Module, settings: TrainConfig, count: int = 5) -> Any:
    """Train a little network; returns its optimizer."""
    optimizer = make_optimizer(model, settings)
    for n in range(count):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr / (n + 1)
        loss = (model(torch.full((3, 4), 0.5 + n)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def settings(**given: Any) -> TrainConfig:
    return TrainConfig.model_validate(given)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_offloaded_state_gives_the_same_numbers() -> None:
    plain, offloaded = small(), small()
    steps(plain, settings(lr=0.1, optimizer={"weight_decay": 0.1}))
    optimizer = steps(
        offloaded, settings(lr=0.1, optimizer={"name": "adamw_offload", "weight_decay": 0.1})
    )
    assert torch.equal(flat(plain), flat(offloaded))
    assert isinstance(optimizer, OffloadedAdamW) and all(
        p.grad is None for p in offloaded.parameters()
    )
    assert all(s["exp_avg"].device.type == "cpu" for s in optimizer.inner.state.values())
    later = copy.deepcopy(offloaded)
    again = make_optimizer(
        later, settings(lr=0.1, optimizer={"name": "adamw_offload", "weight_decay": 0.1})
    )
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, opt in ((offloaded, optimizer), (later, again)):
        one(torch.ones(1, 4)).sum().backward()
        opt.step()
    assert torch.equal(flat(offloaded), flat(later)), "a checkpoint goes on exactly"


def test_offloaded_copies_keep_what_bfloat16_would_lose() -> None:
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = make_optimizer(model, settings(lr=1e-4, optimizer="adamw_offload"))
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert float(optimizer.copies[0].detach()) == pytest.approx(0.99, abs=1e-4)
    assert float(model.weight.detach()) == pytest.approx(0.99, abs=4e-3), "steps of 1e-4 add up"


def test_muon_takes_hidden_matrices_only() -> None:
    model = small()
    before = flat(model)
    optimizer = steps(model, settings(lr=0.05, optimizer="muon"))
    assert isinstance(optimizer, Several)
    kinds = {
        type(one).__name__: sum(len(g["params"]) for g in one.param_groups)
        for one in optimizer.optimizers
    }
    assert kinds == {"Muon": 2, "AdamW": 2} and not torch.equal(before, flat(model))
    again = make_optimizer(model, settings(lr=0.05, optimizer="muon"))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_what_needs_a_gpu_or_a_package_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvironmentProblem, match="adamw8bit needs a GPU"):
        make_optimizer(small(), settings(optimizer="adamw8bit"))
    base: dict[str, Any] = {"model": {"name": str(model), "device": "cpu", "quantization": "4bit"}}
    with pytest.raises(ConfigError, match="cannot be trained themselves"):
        load_policy(None, Config.model_validate(base), base=model, trainable=True)
    monkeypatch.setattr(
        quantise, "find_spec", lambda name: None
    )  # bitsandbytes may be installed here
    with pytest.raises(EnvironmentProblem, match="quantization=8bit needs bitsandbytes") as caught:
        quantise.quantization("8bit", torch.device("cuda"), torch.bfloat16)
    assert "agentrl-cli[quant]" in (caught.value.hint or "")


def test_what_transformers_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        quantise, "find_spec", lambda name: object()
    )  # bitsandbytes is not needed for the settings
    four = quantise.settings("4bit", torch.bfloat16)
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == (
        True,
        "nf4",
        True,
    )
    assert four.bnb_4bit_compute_dtype is torch.bfloat16
    given = quantise.quantization("8bit", torch.device("cuda", 1), torch.bfloat16)
    assert given["quantization_config"].load_in_8bit and given["device_map"] == {
        "": torch.device("cuda", 1)
    }
