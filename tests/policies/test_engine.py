"""A vLLM server that a run starts: its command, its end, its failures; and its sleep during updates."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, EnvironmentProblem
from agentrl_cli.policies.remote.engine import KEY, started
from tests.helpers.remote import StandIn, server
from tests.helpers.train import trainer_of, write_model

PROGRAM = f"""#!{sys.executable}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--fail" in sys.argv:
    sys.exit("no such device")

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        found = {{"pid": os.getpid(), "argv": sys.argv[1:], "key": os.environ["VLLM_API_KEY"]}}
        modes = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
        self.wfile.write(json.dumps({{**found, "modes": [name for name in modes if name in os.environ]}}).encode())

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""


def settings_of(folder: Path, **sections: Any) -> Config:
    (folder / "bin").mkdir()
    program = folder / "bin" / "vllm"
    program.write_text(PROGRAM)
    program.chmod(0o700)
    base = {"remote": {"backend": "vllm"}, "engine": {"start": True, "env": str(folder)}, "adapter": {"enabled": True}}
    return Config.model_validate({**base, **sections})


async def test_a_server_is_started_for_a_block_and_ends_with_it(tmp_path: Path) -> None:
    config = settings_of(tmp_path, adapter={"enabled": True, "r": 12}, rollout={"max_tokens": 300})
    async with started(config, tmp_path / "model", tmp_path / "logs" / "log") as found:
        assert found.remote.api_key_env == KEY and found.remote.processed_logprobs and not config.remote.url
        with urllib.request.urlopen(found.remote.url.removesuffix("/v1"), timeout=5) as answer:
            given = json.load(answer)
    argv, key = given["argv"], os.environ.pop(KEY)
    assert argv[:2] == ["serve", str(tmp_path / "model")] and key == given["key"] and key not in argv
    options = dict(zip(argv[2::2], argv[3::2], strict=False))
    assert (options["--host"], options["--max-model-len"]) == ("127.0.0.1", "300")
    assert "--enable-lora" in argv and argv[argv.index("--max-lora-rank") + 1] == "16"
    assert given["modes"] == ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], "the development mode is for whole weights"
    with pytest.raises(ProcessLookupError):
        os.kill(given["pid"], 0)


async def test_what_fails_is_one_sentence(tmp_path: Path) -> None:
    for config, match in (
        (Config.model_validate({"engine": {"env": str(tmp_path / "none")}}), "There is no vLLM in"),
        (settings_of(tmp_path, engine={"env": str(tmp_path), "options": ["--fail"]}), "status 1:\nno such device"),
    ):
        with pytest.raises(EnvironmentProblem, match=match):
            async with started(config, tmp_path, tmp_path / "log"):
                pass
    os.environ.pop(KEY, None)


async def test_the_server_sleeps_while_the_run_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It frees its memory before each update, and is awake before it loads weights or samples."""
    monkeypatch.setenv("SERVER_KEY", "k")
    model = write_model(tmp_path / "model")

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
        remote = {"backend": "vllm", "url": url, "model": "base", "api_key_env": "SERVER_KEY", "sleep": True}
        async with trainer_of(tmp_path / "p", model, remote=remote) as trainer:
            assert (await trainer.train()).status == "finished"
        with pytest.raises(ConfigError, match="exclude each other"):
            async with trainer_of(tmp_path / "a", model, remote=remote, rollout={"async_staleness": 1}):
                pass
        await stand.close()
    order = [path for path in stand.paths if path in ("/sleep?level=1", "/wake_up", "/collective_rpc")]
    assert order == ["/wake_up", "/collective_rpc", *["/sleep?level=1", "/wake_up", "/collective_rpc"] * 2]
