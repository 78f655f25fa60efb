"""Checks of this machine: Python, packages, torch, memory, disk, sandbox, model, store, inference server.

Torch is checked in a child process: doctor never imports it, so a broken installation cannot crash doctor.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from agentrl_cli.config import Config
from agentrl_cli.config.remote import RemoteConfig
from agentrl_cli.doctor import Check
from agentrl_cli.doctor.sandbox import check_isolation
from agentrl_cli.errors import AgentRLError
from agentrl_cli.models.openmp import cores
from agentrl_cli.models.unusable import find_obstacle
from agentrl_cli.paths import bundled_model, is_bundled, pack_names
from agentrl_cli.policies.remote.http import Endpoint
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers
from agentrl_cli.store import Store

TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
names = [f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus]
print(json.dumps([torch.__version__, names, torch.get_num_threads()]))
"""
GIB = 1024**3


def check_machine(
    db: Path, config: Config | None = None, base: Path | None = None
) -> Iterator[Check]:
    """Yield the checks of the machine as they finish; the slow ones (torch, engine: seconds) come last.

    `db` is the path of the store, which need not exist; `config` are the project's settings, `base` its folder. Its
    inference server is contacted if one is configured.
    """
    config = config or Config()
    yield _check_python()
    yield _check_packages()
    yield _check_memory()
    yield _check_disk(db)
    yield check_isolation(config.sandbox)
    packs = ", ".join(pack_names())
    yield Check("packs", "ok", packs) if packs else Check("packs", "fail", "none", "Install again.")
    yield _check_bundled_model()
    yield _check_store(db)
    remote = config.remote
    if (backend := remote.backend.name) and (remote.url or ":" not in backend):
        own = backend in offers("probes")
        yield (resolve("probes", {}, backend) if own else check_server)(remote)
    yield _check_torch()
    yield _check_engine(config.model.name, base or Path.cwd())


def _check_python() -> Check:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Check("python", "warn", detail, "Tested on Linux; elsewhere use the Docker sandbox.")
    return Check("python", "ok", detail)


def _check_packages() -> Check:
    try:
        requires = distribution("agentrl-cli").requires or []
    except PackageNotFoundError:
        detail = "agentrl-cli is not installed: this is a checkout"
        return Check("packages", "warn", detail, "pip install -e .")
    names = [re.split(r"[^\w.-]", line)[0] for line in requires if "extra ==" not in line]
    missing = " ".join(name for name in names if not find_version(name))
    if missing:
        return Check("packages", "fail", f"missing: {missing}", f"pip install {missing}")
    return Check("packages", "ok", f"agentrl-cli {version('agentrl-cli')} and all its dependencies")


def find_version(name: str) -> str:
    """Return the version of a package; empty if it is not installed here."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _check_memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    count, load = cores(), os.getloadavg()[0]
    plural = "s" if count > 1 else ""
    detail = f"{count} core{plural}, {total:.0f} GiB of memory"
    if total < 3:
        fix = "The tiny model trains in about 2 GiB; bigger ones will not fit."
        return Check("machine", "warn", detail, fix)
    if load > count:
        fix = "Other programs use the cores: everything takes longer, and learns the same."
        return Check("machine", "warn", f"{detail}; load {load:.1f} on {count} core{plural}", fix)
    return Check("machine", "ok", detail)


def _check_disk(db: Path) -> Check:
    folder = next(path for path in (db.parent, *db.parent.parents) if path.exists())
    free = shutil.disk_usage(folder).free / GIB
    if not os.access(folder, os.W_OK):
        fix = "Name a store elsewhere with --db."
        return Check("disk", "fail", f"{folder} cannot be written", fix)
    few = "A run of the tiny model takes a few hundred MiB, others more." if free < 2 else ""
    return Check("disk", "warn" if few else "ok", f"{free:.1f} GiB free at {folder}", few)


def _check_bundled_model() -> Check:
    folder = bundled_model()
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        fix = "Reinstall, or `agentrl sft DIR --recipe tiny-agent`."
        return Check("model", "fail", f"missing in {folder}", fix)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e6
    cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Check("model", "ok", f"tiny ({size:.1f} MB); Hugging Face cache in {cache}")


def _check_store(db: Path) -> Check:
    if not db.exists():
        return Check("store", "ok", f"none yet; it will be {db}")
    try:
        with Store.open(db, readonly=True) as store:
            runs = len(store.runs.all())
    except AgentRLError as error:
        return Check("store", "fail", error.message, error.hint)
    size = f"{db.stat().st_size / 1e6:.1f} MB"
    return Check("store", "ok", f"{db}: {runs} run{'' if runs == 1 else 's'}, {size}")


def check_server(remote: RemoteConfig, start: str = "") -> Check:
    """Return whether the inference server answers; `start`: how to start one, for the hint if it does not."""
    addresses = remote.urls or [remote.address]

    async def reach_all() -> None:
        for url in addresses:
            endpoint = Endpoint(url, start=start)
            try:
                await endpoint.reach()
            finally:
                await endpoint.close()

    try:
        asyncio.run(reach_all())
    except AgentRLError as error:
        return Check("server", "fail", error.message, error.hint)
    return Check("server", "ok", f"{remote.backend.name} answers at {', '.join(addresses)}")


def _check_engine(name: str, base: Path) -> Check:
    folder = bundled_model(name) if is_bundled(name) else base / Path(name).expanduser()
    if not (folder / "config.json").is_file():
        return Check("engine", "ok", f"known when {name} is loaded: it is not a local folder")
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        fix = "Correct model.name, or copy its folder again."
        return Check("engine", "fail", f"{name}: {error}", fix)
    images = "it reads images" if config.get("vision_config") else ""
    why = images or find_obstacle(config.get("text_config") or config)
    return Check("engine", "ok", f"fallback for {name}: {why}" if why else f"paged for {name}")


def _check_torch() -> Check:
    command = [sys.executable, "-c", TORCH_PROBE]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        fix = "Is the machine or the disk busy?"
        return Check("torch", "fail", "importing it took more than two minutes", fix)
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("torch", "fail", last, "pip install torch")
    found, gpus, threads = json.loads(child.stdout.strip().splitlines()[-1])
    where = ", ".join(gpus) or f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    if not gpus and shutil.which("nvidia-smi"):
        where += "; a GPU driver is installed but torch sees no GPU"
        fix = "This torch is a CPU build, or the driver is too old: pip install torch for your CUDA version."
        return Check("torch", "warn", f"{found} on {where}", fix)
    return Check("torch", "ok", f"{found} on {where}")
