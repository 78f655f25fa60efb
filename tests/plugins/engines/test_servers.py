"""Requests to vLLM and their answers, its release and doctor's check of it; several servers behind one policy."""

import asyncio
import json
import os
import re
import shutil
import tomllib
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli import Policy
from agentrl_cli.config.remote import RemoteConfig
from agentrl_cli.doctor import Check
from agentrl_cli.errors import (
    ConfigError,
    EnvironmentProblem,
    PolicyError,
)
from agentrl_cli.plugins.engines.doctor import check_vllm
from agentrl_cli.plugins.engines.policy import HttpPolicy
from agentrl_cli.plugins.engines.server import KEY, install, run_server, start_for_run
from agentrl_cli.plugins.engines.servers import Servers
from agentrl_cli.plugins.engines.wires import TESTED_VLLM, VLLM, sampling_fields
from agentrl_cli.policies.protocols import require_trainable
from agentrl_cli.policies.remote.http import Unreachable
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Generation, Sampling, StopReason
from tests.helpers.chat import BYTES
from tests.helpers.core import ROOT
from tests.helpers.processes import soon
from tests.helpers.remote import StandIn, serve_all, vllm_answer
from tests.helpers.train import (
    after_training,
    trainer_of,
)
from tests.helpers.web import served
from tests.plugins.engines.test_remote import policy_at, running, settings_of


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")


REMOTE = {"backend": "vllm", "model": "base", "api_key_env": "SERVER_KEY"}


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
    stands = [StandIn("vllm", model) for _ in range(2)]
    async with serve_all(*stands) as urls:
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
        assert stands[1].generated == 4
        assert policy.describe() == "vllm on 2 servers, 1 of them unreachable"
        moved = policy.take_metrics()  # c may begin on either server
        assert moved["remote/servers"] == 1.0 and moved["remote/moved_turns"] in (1.0, 2.0)
        # Published while the first was lost: it has these weights before it gets a turn.
        policy._folder, policy.weights_version = model, "run@1"
        stands[0].down = False
        await soon(lambda: len(policy.servers()) == 2)
        assert "/collective_rpc" in stands[0].paths
        said += [await turn(policy, key) for key in ("a", "d")]
        # a stays where it moved to; a new episode evens out
        assert [one.generated for one in stands] == [4, 5]
        late = Slow(VLLM, urls[0], "base", api_key="k", retries=0, context_length=256)
        slow = Servers([late], patience=0.3, pause=0.05)
        said.append(await turn(slow, "a"))
        await slow.close()
        assert all(one == said[0] for one in said), "the seed decides, not the server"
        for stand, asleep in zip(stands, policies, strict=True):
            stand.down = asleep.sleeps = True
        await policy.sleep()
        assert policy.servers() == [], "a server that is lost as it is to sleep ends no training"
        policy.patience = 0.3
        with pytest.raises(PolicyError, match="None of 2 servers can be reached"):
            await turn(policy, "e")
        await policy.close()


async def test_training_on_two_servers_with_one_that_keeps_old_weights(
    tmp_path: Path, model: Path
) -> None:
    class Keeps(StandIn):
        """Reports success and keeps its weights, from the second load on."""

        async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            if path == "/collective_rpc" and self.paths.count(path) == 1:
                return 200, {"results": [None]}
            return await super().handle(path, body)

    async with serve_all(StandIn("vllm", model), Keeps("vllm", model)) as urls:
        remote, train = {**REMOTE, "urls": urls}, {"steps": 2, "lr": 0.3}
        async with after_training(tmp_path, model, remote=remote, train=train) as (trainer, run):
            gaps = [row["probe/logp_difference"] for row in trainer.store.runs.steps(run.id)]
            alerts = [alert["name"] for alert in trainer.store.journal.folded_alerts(run.id)]
    assert run.status == "finished" and [*tmp_path.glob("**/STABLE")]
    assert max(gaps) > 0.02 and "mismatch" in alerts, gaps


async def test_weights_that_a_server_refuses_are_not_the_present_ones(
    tmp_path: Path, model: Path
) -> None:
    refused: list[str] = []

    class Refuses(StandIn):
        async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return (400, {"error": "no"}) if path in refused else await super().handle(path, body)

    async with serve_all(StandIn("vllm", model), Refuses("vllm", model)) as urls:
        given: dict[str, Any] = {"api_key": "k", "retries": 0, "context_length": 256}
        given["save"] = lambda folder: shutil.copytree(model, folder, dirs_exist_ok=True)
        given["sync_dir"] = tmp_path / "weights"
        policy = Servers([HttpPolicy(VLLM, url, "base", **given) for url in urls], 5.0)
        await policy.publish("run@1")
        refused.append("/collective_rpc")
        with pytest.raises(PolicyError, match="no"):
            await policy.publish("run@2")
        published = policy.last_published()
        assert (policy.weights_version, published.folder.name) == ("run@1", "run-1")
        assert published.folder.is_dir(), "a server that comes back is given these"
        await policy.close()


END = BYTES.eos_ids[0]


PROMPT = BYTES.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_vllm_token_ids_in_and_out() -> None:
    requests: list[dict[str, Any]] = []
    out, logps = [*BYTES.encode("ok"), END], [-0.1, -0.2, -0.3]
    # With token_ids, and with token_id: texts only.
    answers = [vllm_answer(out, logps, new=new) for new in (True, False)]
    sampling = Sampling(stop_ids=(END,), max_new_tokens=9)
    async with policy_at(answers, seen=requests, api_key="k") as policy:
        assert isinstance(policy, Policy)
        require_trainable(policy)
        for _ in range(2):
            said = await policy.generate("a", np.asarray(PROMPT, np.int32), sampling)
            assert said.ids.tolist() == out
            np.testing.assert_allclose(said.logp_policy, logps, rtol=1e-6)
            np.testing.assert_allclose(said.logp_sampled, said.logp_policy)
            assert said.top_ids[0].tolist() == [out[0], 7, -1, -1, -1]
            assert said.stop_reason is StopReason.STOP and said.weights_version == "m"
    wanted = {
        "path": "/v1/completions",
        "prompt": PROMPT,
        "stop_token_ids": [END],
        "return_tokens_as_token_ids": True,
    }
    assert wanted.items() <= requests[0].items()
    assert "Authorization: Bearer k" in requests[0]["_headers"]


async def test_busy_servers_are_tried_again_and_a_refusal_is_not() -> None:
    busy = [(429, {"error": "busy"}), (503, b"down")]
    answers = [*busy, vllm_answer([END], [0.0]), (404, {"error": "no model m"})]
    async with policy_at(answers, retries=2) as policy:
        assert (await policy.generate("a", PROMPT, Sampling())).ids.tolist() == [END]
        with pytest.raises(PolicyError, match=f"{policy.endpoint.url}.* answered 404.*no model m"):
            await policy.generate("a", PROMPT, Sampling())
    with pytest.raises(PolicyError, match="not an HTTP address"):
        HttpPolicy(VLLM, "localhost:8000", "m")
    with pytest.raises(PolicyError, match="does not report the tokens"):
        sampling_fields(Sampling(keep_support=True))


def test_doctor_asks_the_server_and_compares_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed vLLM is a folder of metadata on the path, which is all that is read of one."""

    def asked(url: str) -> Check:
        return check_vllm(RemoteConfig.model_validate({"backend": "vllm", "url": url}))

    silent = asked("http://127.0.0.1:9/v1")
    assert silent.status == "fail" and "cannot be reached" in silent.detail
    assert "agentrl-cli[vllm]" in silent.fix
    with served(lambda path, asked: {}) as address:
        for installed, status in (("", "ok"), (f"{TESTED_VLLM}.3", "ok"), ("0.14.0", "warn")):
            if installed:
                info = tmp_path / installed / f"vllm-{installed}.dist-info"
                info.mkdir(parents=True)
                about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed}\n"
                (info / "METADATA").write_text(about)
                monkeypatch.syspath_prepend(info.parent)
            check = asked(f"{address}/v1")
            assert (check.status, bool(check.fix)) == (status, status == "warn"), installed
            assert check.detail.startswith(f"vllm answers at {address}/v1")


def test_the_vllm_of_the_extra_is_the_one_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["vllm"]
    major, minor = map(int, TESTED_VLLM.split("."))
    assert wanted == f"vllm>={TESTED_VLLM},<{major}.{minor + 1}; sys_platform == 'linux'"
    assert f"\nvllm=={TESTED_VLLM}." in (ROOT / "constraints.txt").read_text()
    page = (ROOT / "docs" / "rollout.md").read_text()
    reported = re.findall(r"(?:vLLM|itself\s\()\s*(\d+\.\d+)", page)
    assert len(reported) >= 2 and {*reported} == {TESTED_VLLM}
    assert TESTED_VLLM in VLLM.start and "agentrl-cli[vllm]" in VLLM.start


def ask(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


async def test_a_server_is_started_for_a_block_and_ends_with_it(tmp_path: Path) -> None:
    config = settings_of(tmp_path, adapter={"enabled": True, "r": 12}, rollout={"max_tokens": 300})
    async with run_server(config, tmp_path / "model", tmp_path / "logs" / "log") as found:
        remote = found.config.remote
        assert remote.api_key_env == KEY and remote.backend.processed_logprobs
        given, key = ask(remote.address), os.environ[KEY]
    assert not config.remote.url
    argv = given["argv"]
    assert argv[:2] == ["serve", str(tmp_path / "model")]
    assert key == given["key"] and key not in argv
    options = {"--host": "127.0.0.1", "--max-model-len": "300", "--max-lora-rank": "16"}
    assert {name: argv[argv.index(name) + 1] for name in options} == options
    assert "--enable-lora" in argv
    # The development mode is for whole weights.
    assert given["modes"] == ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
    with pytest.raises(ProcessLookupError):
        os.kill(given["pid"], 0)
    # A run's own server, of a checkpoint in the store that the run has.
    (last := tmp_path / "last").mkdir()
    with Store.open(db := tmp_path / "elsewhere" / "other.db") as store:
        fox = store.runs.add(RunRow(id="", name="fox", kind="train"))
        store.runs.add_checkpoint(fox.id, 3, last, {}, kind="last")
    config = config.replace(model={"name": "fox@last"})
    async with start_for_run(config, tmp_path, db, None) as meant:
        assert meant is not None and ask(meant.remote.address)["argv"][1] == str(last)


def kill(url: str) -> None:
    with suppress(ConnectionError):
        ask(f"{url}/die")


async def test_a_server_that_dies_is_named_and_started_again_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, tmp_path / "log") as (url, policy):
        first = ask(url)["pid"]
        kill(url)
        # A request waits for the new process.
        assert (await policy.endpoint.post("/models", {}))["pid"] != first
        assert "ended with exit status 7:" in caplog.text
        assert "out of memory\nIt is started again." in caplog.text
        kill(url)
        said = r"(?s)exit status 7:.*out of memory\nIt had been started again before"
        with pytest.raises(PolicyError, match=said):
            await policy.endpoint.post("/models", {})
    assert KEY not in os.environ


async def test_a_server_that_cannot_be_started_again_keeps_no_turn_waiting(tmp_path: Path) -> None:
    async with running(tmp_path, tmp_path / "logs" / "log", retries=10) as (url, policy):
        shutil.rmtree(tmp_path / "logs")
        kill(url)
        with pytest.raises(PolicyError, match="No such file"):
            await policy.endpoint.post("/models", {})


def test_an_environment_is_tried_before_it_is_used(tmp_path: Path) -> None:
    config, python = settings_of(tmp_path), tmp_path / "bin" / "python"
    with pytest.raises(EnvironmentProblem, match="python could not be started: No such file"):
        install(config, print)
    python.write_text("#!/bin/sh\necho 'RuntimeError: no operator torchvision::nms' >&2\nexit 1\n")
    python.chmod(0o700)
    with pytest.raises(EnvironmentProblem, match="cannot be imported: RuntimeError: no operator"):
        install(config, print)


@pytest.mark.parametrize(
    ("env", "options", "said"),
    [
        ("none", [], "There is no vLLM in"),
        ("", ["--fail"], "status 1:\nno such device"),
        ("", ["--host=0.0.0.0"], "has --host=0.0.0.0: the server listens on 127.0.0.1"),
    ],
)
async def test_what_fails_is_one_sentence(
    tmp_path: Path, env: str, options: list[str], said: str
) -> None:
    config = settings_of(tmp_path, engine={"env": str(tmp_path / env), "options": options})
    with pytest.raises((ConfigError, EnvironmentProblem), match=said):
        async with run_server(config, tmp_path, tmp_path / "log"):
            pass
    assert KEY not in os.environ


async def test_the_server_sleeps_while_the_run_trains(tmp_path: Path, model: Path) -> None:
    class Sleeper(StandIn):
        asleep = False

        async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            if path in ("/sleep?level=1", "/wake_up"):
                self.paths.append(path)
                self.asleep = path != "/wake_up"
                return 200, b""
            assert not self.asleep, path
            return await super().handle(path, body)

    stand = Sleeper("vllm", model)
    async with serve_all(stand) as (url,):
        remote = {**REMOTE, "url": url, "sleep": True}
        async with after_training(tmp_path / "p", model, remote=remote) as (_, run):
            assert run.status == "finished"
        stale = {"async_staleness": 1}
        with pytest.raises(ConfigError, match="exclude each other"):
            async with trainer_of(tmp_path / "a", model, remote=remote, rollout=stale):
                pass
    update, sleep = ["/wake_up", "/collective_rpc"], ["/sleep?level=1"]
    order = [path for path in stand.paths if path in (*update, *sleep)]
    assert order == [*update, *sleep, *update, *sleep, *update]
