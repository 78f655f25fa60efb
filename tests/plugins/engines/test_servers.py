"""Several servers behind one policy."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import PolicyError
from agentrl_cli.plugins.engines.policy import HttpPolicy
from agentrl_cli.plugins.engines.servers import Servers
from agentrl_cli.plugins.engines.wires import VLLM
from agentrl_cli.policies.remote.http import Unreachable
from agentrl_cli.types import Generation, Sampling
from tests.helpers.processes import soon
from tests.helpers.remote import StandIn, server
from tests.helpers.train import trainer_of, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class Slow(HttpPolicy):
    """Loses its connection once, after a turn that took longer than the patience for a lost server."""

    lost = False

    async def generate(self, *args: Any, **given: Any) -> Generation:
        if not self.lost:
            self.lost = True
            await asyncio.sleep(0.4)
            raise Unreachable("broke off")
        return await super().generate(*args, **given)


async def turn(policy: Servers, key: str) -> list[int]:
    said = await policy.generate(key, [9, 10, 11], Sampling(max_new_tokens=3, seed=5))
    return [int(id_) for id_ in said.ids]


async def test_episodes_stay_move_and_come_back(model: Path) -> None:
    async with AsyncExitStack() as stack:
        stands = [StandIn("vllm", model) for _ in range(2)]
        urls = [await stack.enter_async_context(server(one.handle)) for one in stands]
        policies = [
            HttpPolicy(VLLM, url, "base", api_key="k", retries=0, context_length=256)
            for url in urls
        ]
        policy = Servers(policies, patience=5.0, pause=0.05)
        said = [await turn(policy, key) for key in ("a", "b", "a", "b", "a")]
        stands.sort(key=lambda one: -one.generated)
        assert [one.generated for one in stands] == [3, 2], "an episode stays on its server"
        stands[0].down = True
        said += await asyncio.gather(turn(policy, "a"), turn(policy, "c"))
        assert (
            stands[1].generated == 4
            and policy.describe() == "vllm on 2 servers, 1 of them unreachable"
        )
        moved = policy.take_metrics()  # c may begin on either server
        assert moved["remote/servers"] == 1.0 and moved["remote/moved_turns"] in (1.0, 2.0)
        policy._folder, policy.weights_version = (
            model,
            "run@1",
        )  # published while the first was lost
        stands[0].down = False
        await soon(lambda: len(policy.servers()) == 2)
        assert "/collective_rpc" in stands[0].paths, (
            "it has the present weights before it gets a turn"
        )
        said += [await turn(policy, key) for key in ("a", "d")]
        assert [one.generated for one in stands] == [4, 5], (
            "a stays where it moved to; a new episode evens out"
        )
        slow = Servers(
            [Slow(VLLM, urls[0], "base", api_key="k", retries=0, context_length=256)],
            patience=0.3,
            pause=0.05,
        )
        said.append(await turn(slow, "a"))
        await slow.close()
        assert all(one == said[0] for one in said), "the seed decides, not the server"
        for one in stands:
            one.down = True
        policy.patience = 0.3
        with pytest.raises(PolicyError, match="None of 2 servers can be reached"):
            await turn(policy, "e")
        await policy.close()
        for one in stands:
            await one.close()


async def test_training_on_two_servers_with_one_that_keeps_old_weights(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe after an update is quiet about a server with the new weights, and an alert names one without."""
    monkeypatch.setenv("SERVER_KEY", "k")

    class Keeps(StandIn):
        """Reports success and keeps its weights, from the second load on."""

        async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            if path == "/collective_rpc" and self.paths.count(path) == 1:
                return 200, {"results": [None]}
            return await super().handle(path, body)

    async with AsyncExitStack() as stack:
        stands = [StandIn("vllm", model), Keeps("vllm", model)]
        urls = [await stack.enter_async_context(server(one.handle)) for one in stands]
        found = []
        for name, used in (("good", [urls[0]]), ("bad", urls)):
            remote = {"backend": "vllm", "urls": used, "model": "base", "api_key_env": "SERVER_KEY"}
            async with trainer_of(
                tmp_path / name, model, remote=remote, train={"steps": 2, "lr": 0.3}
            ) as trainer:
                run = await trainer.train()
                gaps = [row["probe/logp_difference"] for row in trainer.store.runs.steps(run.id)]
                alerts = [
                    alert
                    for alert in trainer.store.journal.alerts(run.id)
                    if alert["name"] == "mismatch"
                ]
                found.append((gaps, alerts))
                assert run.status == "finished" and "STABLE" in {
                    p.name for p in tmp_path.glob(f"{name}/**/STABLE")
                }
        for one in stands:
            await one.close()
    (good, quiet), (bad, named) = found
    assert max(good) < 1e-4 and not quiet
    assert max(bad) > 0.02 and named, bad
