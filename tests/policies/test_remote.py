"""Training with a server that samples: it gets every new version, is restarted, lies, or gives text only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import ConfigError, ModelError, PolicyError
from agentrl_cli.policies.remote.policy import HttpPolicy
from agentrl_cli.policies.remote.wires import SGLANG
from agentrl_cli.trainer.probe import CONTEXTS
from agentrl_cli.types import Sampling, StopReason
from tests.helpers.remote import StandIn, server
from tests.helpers.train import STOP, episodes_of, trainer_of, write_project

GAP = "sampling/sampling_logp_difference/max"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")


@asynccontextmanager
async def serving(kind: str, model: Path) -> AsyncIterator[tuple[StandIn, dict[str, Any]]]:
    """A stand-in, and the section `remote` that means it."""
    stand_in = StandIn(kind, model)
    async with server(stand_in.handle) as url:
        address = url if kind == "vllm" else url.removesuffix("/v1")
        yield (
            stand_in,
            {
                "backend": kind,
                "url": address,
                "model": "base",
                "api_key_env": "SERVER_KEY",
                "patience": 5,
            },
        )
    await stand_in.close()


@pytest.mark.parametrize(("kind", "adapter"), [("vllm", False), ("sglang", True)])
async def test_training_with_a_server(
    tmp_path: Path, model: Path, kind: str, adapter: bool
) -> None:
    """After every update the server samples with the new weights; a restart in the middle of a step is repaired."""
    async with serving(kind, model) as (stand_in, remote):
        stand_in.dies_at = {13}
        more: dict[str, Any] = {
            "adapter": {"enabled": adapter, "r": 2},
            "train": {"steps": 3, "lr": 1e-2},
        }
        async with trainer_of(tmp_path, model, remote=remote, **more) as trainer:
            run = await trainer.train()
            metrics = {row["step"]: row for row in trainer.store.runs.steps(run.id)}
            episodes = episodes_of(trainer.store, run)
        left = sorted(path.name for path in (tmp_path / "runs" / "remote").iterdir())
    assert run.status == "finished" and len(episodes) == 24 and all(e.fact for e in episodes)
    assert all(metrics[step][GAP] < 1e-4 for step in (1, 2, 3)), (
        "the server's weights are the trainer's"
    )
    versions = [e.turns[-1].weights_version for e in sorted(episodes, key=lambda e: e.step or 0)]
    assert versions == [f"{run.name}@{n}" for n in range(3) for _ in range(8)]
    assert left == [f"{run.name}-3"], "old weights are not kept"
    taken = [
        path for path in stand_in.paths if "load_lora" in path or "rpc" in path or "update" in path
    ]
    assert len([p for p in taken if "unload" not in p]) == 5, (
        "the start, three updates, and the restart"
    )


@pytest.mark.parametrize(("kind", "adapter"), [("vllm", True), ("sglang", False)])
async def test_a_restart_between_two_requests_is_noticed(
    tmp_path: Path, model: Path, kind: str, adapter: bool
) -> None:
    """vLLM does not know the adapter any more; SGLang says which weights it sampled with."""
    async with serving(kind, model) as (stand_in, remote):
        stand_in.forgets_at = {
            11
        }  # in the second step: 8 turns and at most 2 of the probe came before
        more: dict[str, Any] = {
            "adapter": {"enabled": adapter, "r": 2},
            "train": {"steps": 2, "lr": 1e-2},
        }
        async with trainer_of(
            tmp_path, model, remote=remote, rollout={"concurrency": 1}, **more
        ) as trainer:
            run = await trainer.train()
            metrics = {row["step"]: row for row in trainer.store.runs.steps(run.id)}
            steps = [episodes_of(trainer.store, run, step) for step in (1, 2)]
    assert all(metrics[step][GAP] < 1e-4 for step in (1, 2))
    trained = [{one.group_id for one in episodes if one.fact == "trained"} for episodes in steps]
    probes = sum(min(CONTEXTS, len(groups)) for groups in trained)
    assert probes and stand_in.generated == 16 + probes + 1


async def test_a_server_with_other_weights_is_named_and_refused(model: Path) -> None:
    async with serving("sglang", model) as (stand_in, remote):
        policy = HttpPolicy(SGLANG, remote["url"], "base", api_key="k")
        await policy.load_weights(model, "run@1")
        assert (
            await policy.generate("a", [9, 10], Sampling(max_new_tokens=2))
        ).weights_version == "run@1"

        async def lies(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            status, answer = await stand_in.handle(path, body)
            if path == "/generate":
                answer["meta_info"]["weight_version"] = "other@7"
            return status, answer

        async with server(lies) as url:
            policy.endpoint.url = url.removesuffix("/v1")
            with pytest.raises(PolicyError, match=r"weights 'other@7' and was given 'run@1'"):
                await policy.generate("a", [9, 10], Sampling(max_new_tokens=2))
        await policy.close()


async def test_a_server_that_refuses_weights_keeps_its_version(model: Path) -> None:
    async def refuses(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"success": False, "message": "shape mismatch"}

    async with server(refuses) as url:
        policy = HttpPolicy(SGLANG, url.removesuffix("/v1"), "base")
        with pytest.raises(PolicyError, match=r"did not take the weights.*shape mismatch"):
            await policy.load_weights(model, "run@1")
        assert policy.weights_version == "base"
        await policy.close()


async def test_sglang_wire_format() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        seen.append({"path": path, **body})
        meta: dict[str, Any] = {
            "output_token_logprobs": [[-0.5, 65, None], [-0.25, STOP, None]],
            "weight_version": "x",
        }
        meta["output_top_logprobs"] = [[[-0.5, 65, None], [-1.0, 66, None]], None]
        meta["finish_reason"] = {"type": "stop", "matched": STOP}
        if len(seen) > 3:
            meta = {"finish_reason": {"type": "length", "length": 2}}
        return 200, {"text": "A", "output_ids": [65, STOP], "meta_info": meta}

    async with server(handler) as url:
        policy = HttpPolicy(SGLANG, url.removesuffix("/v1"), "base")
        said = await policy.generate(
            "a", [1, 2], Sampling(temperature=0.7, stop_ids=(STOP,), seed=2**40 + 3)
        )
        assert said.ids.tolist() == [
            65,
            STOP,
        ] and said.logp_policy.tolist() == said.logp_sampled.tolist() == [
            -0.5,
            -0.25,
        ]
        assert said.top_ids[0].tolist()[:2] == [65, 66] and said.stop_reason is StopReason.STOP
        cut = await policy.generate("a", [1, 2], Sampling(top_p=0.5))
        assert (
            cut.logp_policy.tolist() == [-0.5, -0.25]
            and (cut.logp_sampled != cut.logp_sampled).all()
        )
        steered = await policy.generate("a", [1, 2], Sampling(repetition_penalty=1.5, bad_ids=(7,)))
        assert (
            steered.logp_sampled.tolist() == [-0.5, -0.25]
            and (steered.logp_policy != steered.logp_policy).all()
        )
        assert seen[-1]["sampling_params"]["logit_bias"] == {"7": -100.0}
        with pytest.raises(PolicyError, match="no token ids"):
            await policy.generate("a", [1, 2], Sampling())
        await policy.close()
    assert (
        seen[0]["path"] == "/generate"
        and seen[0]["input_ids"] == [1, 2]
        and seen[0]["return_logprob"] is True
    )
    assert (
        seen[0]["sampling_params"]["stop_token_ids"] == [STOP]
        and seen[0]["sampling_params"]["sampling_seed"] == 3
    )


async def test_what_cannot_be(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("vllm", model) as (stand_in, remote):
        with pytest.raises(
            ModelError, match="cannot be trained: an OpenAI-compatible endpoint returns text"
        ):
            async with trainer_of(tmp_path, model, remote={**remote, "backend": "openai"}):
                pass
        monkeypatch.setenv("SERVER_KEY", "wrong")
        async with trainer_of(tmp_path, model, remote=remote) as trainer:
            with pytest.raises(PolicyError, match="401") as refused:
                await trainer.train()
            assert "remote.api_key_env" in refused.value.hint
            assert trainer.store.runs.get(trainer.run.id).status == "failed"
        monkeypatch.delenv("SERVER_KEY")
        with pytest.raises(ConfigError, match="SERVER_KEY"):
            async with trainer_of(tmp_path, model, remote=remote):
                pass
        assert not stand_in.generated


async def test_a_lost_server_is_waited_for_with_patience(model: Path) -> None:
    async with server(StandIn("sglang", model).handle) as url:
        pass
    policy = HttpPolicy(SGLANG, url, "base", retries=0, patience=0.5)
    started = asyncio.get_running_loop().time()
    with pytest.raises(PolicyError, match="cannot be reached"):
        await policy.generate("a", [1], Sampling())
    assert asyncio.get_running_loop().time() - started >= 0.5
    await policy.close()


def test_eval_with_a_text_only_server(tmp_path: Path, model: Path) -> None:
    """`agentrl eval` against an OpenAI-compatible endpoint, messages and all."""
    from agentrl_cli.commands import main

    bodies: list[dict[str, Any]] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append({"path": path, **body})
        return 200, {
            "choices": [
                {"message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
            ]
        }

    async def run() -> int:
        async with server(handler) as url:
            remote = {"backend": "openai", "url": url, "model": "gpt", "mode": "chat"}
            write_project(tmp_path, model, remote=remote, eval={"k": 1, "limit": 2})
            return await asyncio.to_thread(main, ["eval", "--project", str(tmp_path)])

    assert asyncio.run(run()) == 0
    assert bodies.pop(0)["path"] == "/v1/models", "it is asked before anything runs"
    assert len(bodies) == 2 and all(body["path"] == "/v1/chat/completions" for body in bodies)
    assert bodies[0]["messages"][-1]["content"].startswith("Go ") and bodies[0]["model"] == "gpt"
