"""Workers that sample from vLLM servers: each has the new adapter before a turn begins, and none is cut off."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config import Config
from agentrl_cli.runtime import new_training, open_runtime
from agentrl_cli.trainer import build_trainer
from agentrl_cli.types import Outcome
from tests.helpers.remote import StandIn, server
from tests.helpers.train import episodes_of, settings, write_model, write_pack
from tests.plugins.ray.links import SERVICES

STEPS = 3
WEIGHTS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc")


class Strict(StandIn):
    """Refuses to change its weights while turns run: a real server would sample them with both."""

    def __init__(self, folder: Path) -> None:
        super().__init__("vllm", folder)
        self.running = 0

    async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert path not in WEIGHTS or not self.running, path
        self.running += path == "/v1/completions"
        try:
            return await super().handle(path, body)
        finally:
            self.running -= path == "/v1/completions"


async def trained(
    folder: Path, model: Path, remote: dict[str, Any], workers: int, **sections: Any
) -> dict[str, Any]:
    """A training on servers: what it learned, from which weights, its steps."""
    train = {"steps": STEPS, "lr": 1e-2}
    cluster = {"kind": SERVICES, "workers": workers} if workers else {}
    sections |= {"remote": remote, "train": train, "cluster": cluster}
    config = Config.model_validate(settings(model, **sections))
    write_pack(folder)
    async with open_runtime(config, base=folder, db=folder / "s.db", trainable=True) as opened:
        loaded, store, run = opened.loaded, opened.store, new_training(opened)
        ended = await build_trainer(config, run, loaded, opened.rollout()).train()
        assert ended.status == "finished"
        found = episodes_of(store, run)
        assert not any(e.outcome in (Outcome.ENV_ERROR, Outcome.CANCELLED) for e in found), [
            e.error for e in found
        ]
        ages = [
            e.step - 1 - int(t.weights_version.rpartition("@")[2])
            for e in found
            for t in e.turns
            if t.role == "assistant" and e.step is not None
        ]
        weights = {
            name: one.detach().clone()
            for name, one in loaded.model.named_parameters()
            if one.requires_grad
        }
        return {
            "weights": weights,
            "ages": ages,
            "steps": store.runs.steps(run.id),
            "count": len(found),
        }


@pytest.mark.parametrize("adapter", [True, False])
async def test_workers_sample_from_servers_with_each_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: bool
) -> None:
    """The same weights as one process, on time and asynchronously; a server that was away comes back with the new."""
    monkeypatch.setenv("SERVER_KEY", "k")
    model = write_model(tmp_path / "model")
    kept = {"adapter": {"enabled": adapter, "r": 2}, "algo": {"drop_zero_variance": False}}
    async with AsyncExitStack() as stack:
        stands = [Strict(model) for _ in range(2)]
        urls = [await stack.enter_async_context(server(one.handle)) for one in stands]
        remote = {
            "backend": "vllm",
            "urls": urls,
            "model": "base",
            "api_key_env": "SERVER_KEY",
            "retries": 0,
        }
        here = await trained(tmp_path / "here", model, remote, 0, **kept)
        before = [one.generated for one in stands]
        there = await trained(tmp_path / "workers", model, remote, 2, **kept)
        assert all(one.generated > had for one, had in zip(stands, before, strict=True)), (
            "both servers have turns"
        )
        stands[0].dies_at = {stands[0].generated + 6}
        late = await trained(
            tmp_path / "late", model, remote, 2, **kept, rollout={"async_staleness": 1}
        )
        for one in stands:
            await one.close()
    gap = max(
        float((here["weights"][name] - there["weights"][name]).abs().max())
        for name in here["weights"]
    )
    assert gap <= 1e-5
    assert set(there["ages"]) == {0} and set(late["ages"]) == {0, 1}
    for found in (here, there, late):
        assert found["count"] == STEPS * 8
        assert all(
            row["sampling/sampling_logp_difference/max"] < 1e-4 for row in found["steps"][:1]
        )
        assert all(row["probe/logp_difference"] < 1e-4 for row in found["steps"]), (
            "each server has the new weights"
        )
