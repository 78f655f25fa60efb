"""A vLLM server of this machine, in an environment of its own: vLLM pins another transformers than a trainer.

`agentrl engine install` makes the environment. A server is started by `agentrl engine start`, or by a run with
`engine.start`, on the loopback with a key of its own, and ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any

import httpx2

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, EnvironmentProblem

KEY = "AGENTRL_ENGINE_KEY"
"""Environment variable with the server's key, which worker processes inherit."""
STARTING = 900.0
"""Seconds that a server may take to load its model."""
STOPPING = 20.0
"""Seconds that it may take to end."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank."""
TAIL = 12
"""Lines of the log that a failed start repeats."""


def environment(config: Config) -> Path:
    """The folder of the engine's environment."""
    engine = config.engine
    if engine.env:
        return Path(engine.env).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "agentrl" / engine.package.replace("==", "-").replace("/", "-")


def install(config: Config, narrate: Callable[[str], None]) -> Path:
    """Make the environment, with uv if there is one. Returns its folder. Raises EnvironmentProblem if that fails."""
    env, package = environment(config), config.engine.package
    if _vllm(env).is_file():
        return env
    python, uv = str(env / "bin" / "python"), shutil.which("uv")
    make = [uv, "venv", "--python", sys.executable, str(env)] if uv else [sys.executable, "-m", "venv", str(env)]
    pip = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    narrate(f"Installing {package} into {env}: several GB.")
    for command in (make, [*pip, package]):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if done.returncode:
            raise EnvironmentProblem(
                f"`{' '.join(command)}` ended with exit status {done.returncode}.",
                hint="Its output is above. engine.package names another release or a CPU build.",
            )
    if not _vllm(env).is_file():
        raise EnvironmentProblem(f"{package} brings no command vllm.", hint="Set engine.package.")
    return env


@contextlib.asynccontextmanager
async def started(config: Config, folder: Path, log: Path, port: int = 0) -> AsyncIterator[Config]:
    """A server of the model in `folder` until the block ends; yields the configuration that means it.

    Raises EnvironmentProblem without an environment, or if the server does not start.
    """
    env = environment(config)
    if not _vllm(env).is_file():
        hint = "Make it: agentrl engine install. engine.env names another one."
        raise EnvironmentProblem(f"There is no vLLM in {env}.", hint=hint)
    if config.remote.backend != "vllm":
        raise ConfigError("engine.start starts a vLLM server.", hint="Set remote.backend: vllm.")
    if port and _in_use(port):
        raise EnvironmentProblem(f"Port {port} is in use on this machine.", hint="--port chooses another one.")
    port = port or _free_port()
    os.environ[KEY] = key = os.environ.get(KEY) or secrets.token_urlsafe(24)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = _start(command_of(config, env, folder, port), _variables(config, key), file)
    try:
        url = f"http://127.0.0.1:{port}"
        await _healthy(process, url, log, key)
        given = {"url": f"{url}/v1", "urls": [], "model": _name(config), "api_key_env": KEY, "processed_logprobs": True}
        yield config.model_copy(update={"remote": config.remote.model_copy(update=given)})
    finally:
        await asyncio.to_thread(_end, process)


def command_of(config: Config, env: Path, folder: Path, port: int) -> list[str]:
    """The command line of the server."""
    engine, adapter, dtype = config.engine, config.adapter, config.model.dtype
    options = ["--served-model-name", _name(config), "--host", "127.0.0.1", "--port", str(port)]
    options += ["--max-model-len", str(config.rollout.max_tokens), "--logprobs-mode", "processed_logprobs"]
    options += ["--gpu-memory-utilization", str(engine.memory), "--seed", str(config.seed)]
    if dtype != "auto":
        options += ["--dtype", dtype]
    if adapter.enabled:  # two: the new one is loaded before the old one goes
        rank = next((one for one in RANKS if one >= adapter.r), None)
        if rank is None:
            raise ConfigError(f"adapter.r is {adapter.r}; vLLM takes at most {RANKS[-1]}.", hint="Lower adapter.r.")
        options += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]
    if config.remote.sleep:
        options.append("--enable-sleep-mode")
    return [str(_vllm(env)), "serve", str(folder), *options, *engine.options]


def _variables(config: Config, key: str) -> dict[str, str]:
    """The environment of the server. The development mode is for whole weights and for sleep."""
    found = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", KEY)}
    found |= {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}
    found.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if config.adapter.enabled:
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if config.remote.sleep or not config.adapter.enabled:
        found["VLLM_SERVER_DEV_MODE"] = "1"
    return found


def _start(command: list[str], variables: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    setpriv = shutil.which("setpriv")  # util-linux: the server ends if the process that started it is killed
    return subprocess.Popen(
        [setpriv, "--pdeathsig", "TERM", *command] if setpriv else command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=variables,
        start_new_session=True,  # a Ctrl-C in the terminal is for the run, which ends its server
    )


async def _healthy(process: subprocess.Popen[bytes], url: str, log: Path, key: str) -> None:
    """Wait until the server answers to its key. Raises EnvironmentProblem with its last words if it does not."""
    ends = time.monotonic() + STARTING
    bearer = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(timeout=5.0, trust_env=False) as client:
        while True:
            status, answered = process.poll(), False
            if status is None:
                with contextlib.suppress(httpx2.HTTPError):
                    answered = (await client.get(f"{url}/v1/models", headers=bearer)).is_success
                status = process.poll()  # another server may have answered at the port that ours did not get
            if answered and status is None:
                return
            if status is not None or time.monotonic() > ends:
                how = f"ended with exit status {status}" if status is not None else f"needs more than {STARTING:g} s"
                last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-TAIL:])
                raise EnvironmentProblem(f"The vLLM server {how}:\n{last}", hint=f"Its log: {log}")
            await asyncio.sleep(0.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that it started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOPPING)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _vllm(env: Path) -> Path:
    return env / "bin" / "vllm"


def _name(config: Config) -> str:
    return config.remote.model or config.model.name


def _in_use(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: Any = free.getsockname()[1]
        return int(port)
