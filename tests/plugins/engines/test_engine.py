"""A vLLM server that a run starts: its command, its end, its failures; and its sleep during updates."""

import contextlib
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, EnvironmentProblem, PolicyError
from agentrl_cli.plugins.engines.policy import HttpPolicy
from agentrl_cli.plugins.engines.server import KEY, install, run_server
from agentrl_cli.plugins.engines.wires import VLLM
from tests.helpers.remote import StandIn, server
from tests.helpers.train import trainer_of

PROGRAM = f"""#!/usr/bin/env -S "{sys.executable}"
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--fail" in sys.argv:
    sys.exit("no such device")

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.endswith("/die"):
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(7)
        self.send_response(200)
        self.end_headers()
        found = {{"pid": os.getpid(), "argv": sys.argv[1:], "key": os.environ["VLLM_API_KEY"]}}
        modes = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
        self.wfile.write(json.dumps({{**found, "modes": [name for name in modes if name in os.environ]}}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""


def ask(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def settings_of(folder: Path, **sections: Any) -> Config:
    (folder / "bin").mkdir()
    program = folder / "bin" / "vllm"
    program.write_text(PROGRAM)
    program.chmod(0o700)
    base = {
        "remote": {"backend": "vllm"},
        "engine": {"start": True, "env": str(folder)},
        "adapter": {"enabled": True},
    }
    return Config.model_validate({**base, **sections})


async def test_a_server_is_started_for_a_block_and_ends_with_it(tmp_path: Path) -> None:
    config = settings_of(tmp_path, adapter={"enabled": True, "r": 12}, rollout={"max_tokens": 300})
    async with run_server(config, tmp_path / "model", tmp_path / "logs" / "log") as found:
        remote = found.config.remote
        assert (
            remote.api_key_env == KEY
            and remote.backend.processed_logprobs
            and not config.remote.url
        )
        given = ask(remote.address)
        key = os.environ[KEY]
    argv = given["argv"]
    assert (
        argv[:2] == ["serve", str(tmp_path / "model")] and key == given["key"] and key not in argv
    )
    options = dict(zip(argv[2::2], argv[3::2], strict=False))
    assert (options["--host"], options["--max-model-len"]) == ("127.0.0.1", "300")
    assert "--enable-lora" in argv and argv[argv.index("--max-lora-rank") + 1] == "16"
    assert given["modes"] == ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], (
        "the development mode is for whole weights"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(given["pid"], 0)


async def test_a_server_that_dies_is_named_and_started_again_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(settings_of(tmp_path), tmp_path / "model", tmp_path / "log") as found:
        url = found.config.remote.address
        policy = HttpPolicy(VLLM, url, "base", retries=0)
        first = ask(url)["pid"]
        with contextlib.suppress(ConnectionError):
            ask(f"{url}/die")
        assert (await policy.endpoint.post("/models", {}))["pid"] != first, (
            "a request waits for the new process"
        )
        assert (
            "ended with exit status 7:" in caplog.text
            and "out of memory\nIt is started again." in caplog.text
        )
        with contextlib.suppress(ConnectionError):
            ask(f"{url}/die")
        with pytest.raises(
            PolicyError,
            match=r"(?s)exit status 7:.*out of memory\nIt had been started again before",
        ):
            await policy.endpoint.post("/models", {})
        await policy.close()
    assert KEY not in os.environ


def test_an_environment_is_tried_before_it_is_used(tmp_path: Path) -> None:
    config, python = settings_of(tmp_path), tmp_path / "bin" / "python"
    for said, match in (
        (None, "python could not be started: No such file"),
        (
            "RuntimeError: operator torchvision::nms does not exist",
            "cannot be imported: RuntimeError: operator",
        ),
    ):
        if said is not None:
            python.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
            python.chmod(0o700)
        with pytest.raises(EnvironmentProblem, match=match):
            install(config, print)


async def test_what_fails_is_one_sentence(tmp_path: Path) -> None:
    exposed = Config.model_validate(
        {
            "engine": {"env": str(tmp_path), "options": ["--host=0.0.0.0"]},
            "remote": {"backend": "vllm"},
        }
    )
    for config, match in (
        (Config.model_validate({"engine": {"env": str(tmp_path / "none")}}), "There is no vLLM in"),
        (
            settings_of(tmp_path, engine={"env": str(tmp_path), "options": ["--fail"]}),
            "status 1:\nno such device",
        ),
        (exposed, "engine.options has --host=0.0.0.0: the server listens on 127.0.0.1"),
    ):
        with pytest.raises((ConfigError, EnvironmentProblem), match=match):
            async with run_server(config, tmp_path, tmp_path / "log"):
                pass
    assert KEY not in os.environ


async def test_the_server_sleeps_while_the_run_trains(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")

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
    async with server(stand.handle) as url:
        remote = {
            "backend": "vllm",
            "url": url,
            "model": "base",
            "api_key_env": "SERVER_KEY",
            "sleep": True,
        }
        async with trainer_of(tmp_path / "p", model, remote=remote) as trainer:
            assert (await trainer.train()).status == "finished"
        with pytest.raises(ConfigError, match="exclude each other"):
            async with trainer_of(
                tmp_path / "a", model, remote=remote, rollout={"async_staleness": 1}
            ):
                pass
        await stand.close()
    order = [
        path for path in stand.paths if path in ("/sleep?level=1", "/wake_up", "/collective_rpc")
    ]
    assert order == [
        "/wake_up",
        "/collective_rpc",
        *["/sleep?level=1", "/wake_up", "/collective_rpc"] * 2,
    ]
