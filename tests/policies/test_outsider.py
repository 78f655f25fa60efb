"""A policy of another project: named by its file, it is trained with like the ones that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from agentrl_cli.agents.serve.server import open_server
from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, ModelError, NotFound
from agentrl_cli.paths import bundled_model
from agentrl_cli.policies.load import load_policy
from agentrl_cli.types import Episode
from tests.helpers.train import episodes_of, trainer_of

OUTSIDER = """
import time

import numpy as np
import torch

from agentrl_cli.policies import generation
from agentrl_cli.types import StopReason


class Simple:
    name = "simple"
    untrainable = ""
    separate_weights = False

    def __init__(self, source):
        self.model = source.model()
        self.context_length = source.context_length
        self.weights_version = source.name
        self.sampled = 0

    async def generate(self, key, ids, sampling, *, group="", on_token=None, images=()):
        started, context = time.perf_counter(), list(ids)
        draw = torch.Generator().manual_seed(sampling.seed % 2**63)
        out, logps, reason = [], [], StopReason.LENGTH
        while len(out) < sampling.max_new_tokens:
            with torch.no_grad():
                logits = self.model(torch.tensor([context + out])).logits[0, -1].float()
            known = torch.log_softmax(logits / sampling.temperature, -1)
            id_ = int(torch.multinomial(known.exp(), 1, generator=draw))
            out.append(id_)
            logps.append(float(known[id_]))
            if on_token is not None:
                on_token(id_)
            if id_ in sampling.stop_ids:
                reason = StopReason.STOP
                break
        self.sampled += len(out)
        seconds = time.perf_counter() - started
        return generation(out, reason, weights_version=self.weights_version, logps=logps, seconds=seconds)

    async def release(self, key):
        pass

    async def close(self):
        pass

    async def rest(self):
        pass

    async def publish(self, version):
        self.weights_version = version

    def take_metrics(self):
        found, self.sampled = {"simple/tokens": float(self.sampled)}, 0
        return found

    def describe(self):
        return "one token at a time"


def unfinished(source):
    policy = Simple(source)
    policy.untrainable = "it has not been tried"
    return policy
"""


class Even:
    """Adds the share of even ids to the reward: what the bundled model draws here is all right, or all wrong."""

    def on_rollout_end(self, rollout: Episode) -> dict[str, float]:
        ids = rollout.tokens.ids[rollout.tokens.trained_mask]
        return {"even": float((ids % 2 == 0).mean())}


async def test_an_outsiders_policy_trains_echo_task(tmp_path: Path) -> None:
    model = bundled_model()
    (tmp_path / "simple.py").write_text(OUTSIDER)
    sections: dict[str, Any] = {
        "remote": {"backend": "simple.py:Simple"},
        "task": {"packs": ["echo-task"]},
    }
    sections |= {
        "rollout": {"max_tokens": 400, "max_new_tokens": 12, "max_turns": 2, "temperature": 3.0}
    }
    async with trainer_of(
        tmp_path, model, [Even()], adapter={"enabled": False}, **sections
    ) as trainer:
        before = {
            name: weights.clone() for name, weights in trainer.loaded.model.state_dict().items()
        }
        run = await trainer.train()
        metrics = {row["step"]: row for row in trainer.store.runs.steps(run.id)}
        episodes = episodes_of(trainer.store, run)
        lines = [row["text"] for row in trainer.store.journal.logs(run.id)]
        after = trainer.loaded.model.state_dict()
    assert (run.status, run.step) == ("finished", 2) and "engine one token at a time" in lines
    assert any(not torch.equal(before[name], after[name]) for name in before)
    sampled = {step: sum(e.trained_tokens for e in episodes if e.step == step) for step in (1, 2)}
    assert {step: row["simple/tokens"] for step, row in metrics.items()} == sampled
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in metrics.values()), (
        "the trained weights"
    )
    versions = {
        (e.step, turn.weights_version)
        for e in episodes
        for turn in e.turns
        if turn.role == "assistant"
    }
    assert versions == {(1, str(model)), (2, f"{run.name}@1")}


async def test_an_outsiders_policy_is_served(tmp_path: Path, model: Path) -> None:
    (tmp_path / "simple.py").write_text(OUTSIDER)
    given = {"model": {"name": str(model)}, "remote": {"backend": "simple.py:Simple"}}
    async with open_server(
        Config.model_validate(given), base=tmp_path, db=tmp_path / "a.db"
    ) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "seed": 1}
        transport = httpx2.ASGITransport(app=server.app({"test"}))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://test", timeout=None
        ) as client:
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3, (
                answer.text
            )
            (tmp_path / "one").mkdir()
            refused = await client.post("/v1/models", json={"id": "one", "adapter": "one"})
            assert refused.status_code == 400 and "takes no adapters" in refused.text


def test_backends_are_looked_up_by_name(tmp_path: Path, model: Path) -> None:
    (tmp_path / "simple.py").write_text(OUTSIDER)

    def load(backend: str, trainable: bool = True) -> str:
        settings = {"model": {"name": str(model)}, "remote": {"backend": backend}}
        return load_policy(
            None, Config.model_validate(settings), base=tmp_path, trainable=trainable
        ).policy.name

    assert (
        load("simple.py:Simple") == "simple"
        and load("simple.py:unfinished", trainable=False) == "simple"
    )
    with pytest.raises(ModelError, match="Policy simple cannot be trained: it has not been tried"):
        load("simple.py:unfinished")
    with pytest.raises(NotFound, match="vlm") as unknown:
        load("vlm")
    assert "agentrl.policies" in unknown.value.hint
    with pytest.raises(ConfigError, match=r"remote\.backend needs remote\.url"):
        load("vllm")
