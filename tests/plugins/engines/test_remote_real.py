"""Training with a real vLLM server, where there is one to start.

    AGENTRL_VLLM=/path/of/a/venv/bin/vllm python -m pytest tests/plugins/engines/test_remote_real.py

Whole weights and adapters, a temperature with processed log-probabilities, a model that the server does not know. The
stand-ins of test_remote.py speak the same formats and run everywhere; this shows that they do.
"""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import PolicyError
from agentrl_cli.plugins.engines.policy import HttpPolicy
from agentrl_cli.plugins.engines.wires import VLLM as WIRE
from agentrl_cli.types import Sampling
from tests.helpers.processes import free_port
from tests.helpers.remote import SILENT
from tests.helpers.train import STOP, after_training, write_model

VLLM = os.environ.get("AGENTRL_VLLM", "")
pytestmark = pytest.mark.skipif(not VLLM, reason="AGENTRL_VLLM names no vllm to start")


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[dict[str, Any]]:
    port = free_port()
    words = f"""--served-model-name base --dtype float32 --enforce-eager --max-model-len 256
                --host 127.0.0.1 --port {port} --api-key k"""
    command = [VLLM, "serve", str(model), *words.split(), *options]
    extra = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=inherited | extra) as process,
    ):
        try:
            while not _healthy(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.5)
            yield {
                "backend": "vllm",
                "url": f"http://127.0.0.1:{port}/v1",
                "model": "base",
                "api_key_env": "SERVER_KEY",
                "retries": 0,
            }
        finally:
            process.terminate()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.parametrize("adapter", [False, True])
async def test_training_with_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: bool
) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")
    # The least head_dim that vLLM's attention on a CPU knows.
    model = write_model(tmp_path / "model", head_dim=32)
    (model / "generation_config.json").write_text(json.dumps({**SILENT, "eos_token_id": STOP}))
    words = "--enable-lora --max-lora-rank 8 --logprobs-mode processed_logprobs" if adapter else ""
    more: dict[str, Any] = {
        "adapter": {"enabled": adapter, "r": 2},
        "train": {"steps": 3, "lr": 1e-2},
        "rollout": {"temperature": 0.7} if adapter else {},
    }
    with serving(model, tmp_path / "log", *words.split()) as remote:
        remote["processed_logprobs"] = adapter
        async with after_training(tmp_path, model, remote=remote, **more) as (trainer, run):
            rows = trainer.store.runs.steps(run.id)
        assert run.status == "finished"
        assert [row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows] == [True] * 3
        # What it says of another model or key: the stand-ins of test_remote.py say the same.
        policy = HttpPolicy(WIRE, remote["url"], "absent", api_key="k")
        with pytest.raises(PolicyError, match="404: The model `absent` does not exist"):
            await policy.generate("a", [1], Sampling())
        await policy.close()
