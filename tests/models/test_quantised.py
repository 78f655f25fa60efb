"""QLoRA on a CPU: a base in 4 or 8 bits, sampled, trained under an adapter, saved and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.train import trainer_of, write_model

pytest.importorskip(
    "bitsandbytes", minversion="0.46", reason="QLoRA needs bitsandbytes 0.46 (the extra quant)"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, on this torch


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
async def test_a_base_in_few_bits_is_trained_under_an_adapter(tmp_path: Path, bits: str) -> None:
    folder = write_model(
        tmp_path / "model", hidden=64, head_dim=32
    )  # what the kernels for CPUs take
    sections: dict[str, Any] = {
        "model": {"quantization": bits},
        "adapter": {"enabled": True, "r": 2},
    }
    async with trainer_of(tmp_path / "project", folder, **sections) as trainer:
        model = trainer.loaded.model
        kinds = {type(p).__name__ for p in model.parameters()}
        assert {"4bit": "Params4bit", "8bit": "Int8Params"}[bits] in kinds
        trained = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }
        frozen = {
            name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
        }
        assert trained and all("lora" in name for name in trained)
        run = await trainer.train()
        assert (run.status, run.step) == ("finished", 2)
        now = dict(model.named_parameters())
        assert any(not torch.equal(now[name], was) for name, was in trained.items())
        if bits == "8bit":  # 4 bits are laid out for the processor when they are first used
            assert all(torch.equal(now[name], was) for name, was in frozen.items())
    async with trainer_of(
        tmp_path / "project", folder, run=run, train={"steps": 3}, **sections
    ) as trainer:
        assert (await trainer.train()).step == 3
