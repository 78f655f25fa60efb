"""Checks of this machine (Python, packages, torch, memory, disk, sandbox, model, store) and of chat templates.

Torch is checked in a child process: doctor never imports it, so a broken installation cannot crash doctor.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.errors import AgentRLError, ModelError
from agentrl_cli.paths import bundled_model, is_bundled, pack_names
from agentrl_cli.registry.threads import cores

if TYPE_CHECKING:
    from agentrl_cli.chat.audit import AuditReport
    from agentrl_cli.config.models import ModelConfig, SandboxConfig
    from agentrl_cli.config.remote import RemoteConfig

TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
                  "gpus": [{"name": g.name, "memory": g.total_memory} for g in gpus]}))
"""

GIB = 1024**3
PARTS = {
    "device": ("plain forward", ""),
    "generate": ("generate", "It is only for comparison: the engines below do the work."),
    "paged": ("paged engine", "The fallback engine samples on this device."),
    "fallback": (
        "fallback engine",
        "Models that the paged engine does not serve cannot be sampled on this device.",
    ),
    "packed": ("packed update", "Episodes are padded in training on this device."),
    "padded": (
        "padded update",
        "Models whose episodes cannot be packed cannot be trained on this device.",
    ),
    "graphs": ("CUDA graphs", "`rollout.cuda_graphs: auto` is ignored on this device."),
}
"""Parts of a device's trial, and what follows if one fails."""


@dataclass(frozen=True, slots=True)
class Check:
    """One entry of doctor's report."""

    name: str
    status: str
    """ok | warn (works with limits) | fail (something will not work)"""
    detail: str
    fix: str = ""
    """What to do about it."""


def check_machine(
    db: Path,
    sandbox: SandboxConfig | None = None,
    model: ModelConfig | None = None,
    base: Path | None = None,
    remote: RemoteConfig | None = None,
) -> Iterator[Check]:
    """Yields the checks of the machine as they finish; the slow ones (torch, engine: seconds) come last.

    `db` is the path of the store, which need not exist; `sandbox` and `model` are the project's settings, `base` its
    folder; `remote` its inference server, which is contacted if configured.
    """
    yield _python()
    yield _packages()
    yield _memory()
    yield _disk(db)
    yield _sandbox(sandbox)
    yield _packs()
    yield _model()
    yield _store(db)
    if (
        remote is not None
        and remote.backend
        and (remote.url or remote.urls or ":" not in remote.backend)
    ):
        yield check_server(remote)
    yield _torch()
    yield _engine(model, base or Path.cwd())


def sandbox_level() -> tuple[str | None, str, str]:
    """Return the strongest isolation that starts here (a key of sandbox.STRENGTH), why no stronger one does, and a fix.

    None if not even `bare` starts. Levels weaker than `ns` are only tried here, never chosen for a run.
    """
    from agentrl_cli.config import SandboxConfig

    reason = fix = ""
    for settings in (
        SandboxConfig(workers=1),
        SandboxConfig(workers=1, backend="landlock", min_level="landlock"),
        SandboxConfig(workers=1, backend="bare", min_level="bare"),
    ):
        try:
            return asyncio.run(_started(settings)), reason, fix
        except AgentRLError as error:
            if not reason:  # the reason why the strongest failed is what a user can fix
                reason, fix = error.message, error.hint
    return None, reason, fix


async def _started(settings: SandboxConfig) -> str:
    """Return the level that starts with these settings. Raises AgentRLError if none does."""
    from agentrl_cli.sandbox import Sandbox

    async with await Sandbox.open(settings) as sandbox:
        return sandbox.level


def check_sandbox(level: str | None = None) -> tuple[str, list[Check]]:
    """Attacks the strongest sandbox that starts here, or `level`, for about ten seconds.

    Returns the level and a check for each guarantee, with a fix if it does not hold. Raises SandboxUnavailable.
    """
    from agentrl_cli.config import SandboxConfig
    from agentrl_cli.sandbox import Sandbox, cgroup
    from agentrl_cli.sandbox.attack_suite import probe

    strongest, _, fix = (level, "", "") if level else sandbox_level()
    found = strongest or "ns"
    if found == "bare":
        fix = (
            fix
            or "`agentrl doctor` names the strongest level that starts here; remove --level bare."
        )
        return found, [
            Check("everything", "fail", "bare isolates nothing, so it is not attacked", fix)
        ]

    async def attacked() -> list[Check]:
        settings = SandboxConfig.model_validate(
            {"workers": 1, "backend": found, "min_level": found}
        )
        async with await Sandbox.open(settings) as sandbox:
            rows = await probe(sandbox)
        return [Check(row.name, "ok" if row.held else "fail", row.detail, row.fix) for row in rows]

    checks = asyncio.run(attacked())
    hard = found == "docker" or cgroup.place() is not None
    fix = (
        ""
        if hard
        else "start as root, or: systemd-run --user --scope -p Delegate=yes agentrl train"
    )
    how = (
        "a container's limit, and each session watched" if found == "docker" else cgroup.describe()
    )
    return found, [*checks, Check("hard limit", "ok" if hard else "warn", f"memory is {how}", fix)]


def check_device(device: str | None = None, seconds: float | None = None) -> Iterator[Check]:
    """Samples and updates a small model on a GPU, or on another device of torch, beside transformers; keeps the result.

    Raises EnvironmentProblem without such a device.
    """
    from agentrl_cli.policies.device_check import SECONDS, keep, try_device

    verdict = keep(try_device(device or "cuda", SECONDS if seconds is None else seconds))
    yield Check(
        "device",
        "ok",
        ", ".join(f"{key} {value}" for key, value in verdict.identity.items() if value),
    )
    for name, part in verdict.parts.items():
        label, instead = PARTS[name]
        speed = f"; {part.tokens_per_second:,.0f} tokens a second" if part.tokens_per_second else ""
        detail = (
            part.problem
            or (f"differs by at most {part.worst:.1g}" if name != "generate" else "works") + speed
        )
        status = "ok" if not part.problem else "warn" if instead else "fail"
        yield Check(
            label, status, detail, instead or "Use another driver or torch." if part.problem else ""
        )
    if verdict.starved:
        fix = "Close what else uses the GPU, and run this again."
        yield Check("memory", "warn", "the GPU's memory was full: nothing is kept", fix)
    both = (("paged", "fallback"), ("packed", "padded"))
    if any(verdict.problem(one) and verdict.problem(other) for one, other in both):
        yield Check(
            "verdict",
            "fail",
            "this device cannot be used",
            "--set model.device=cpu, or another driver.",
        )


def audit_template(folder: Path) -> AuditReport:
    """Audit a model folder's chat template: can turns be appended, is the stop token trained, what is skipped?

    Raises ModelError, TemplateError if the folder, tokenizer or template is missing.
    """
    from agentrl_cli.chat.audit import append_only_without, audit
    from agentrl_cli.chat.render import Chat
    from agentrl_cli.chat.tokenizer import Tokenizer
    from agentrl_cli.rollout.rehearse import rehearse

    if not folder.is_dir():
        raise ModelError(
            f"No model folder {folder}.", hint="Name a local folder with a tokenizer.json."
        )
    chat = Chat(Tokenizer.load(folder), "auto")
    found = tuple(map(str, asyncio.run(rehearse(chat))))
    return replace(audit(chat), append_only_without=append_only_without(chat), would_skip=found)


def _python() -> Check:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Check("python", "warn", detail, "Tested on Linux; elsewhere use the Docker sandbox.")
    return Check("python", "ok", detail)


def _packages() -> Check:
    """Whether every dependency of the distribution is installed."""
    try:
        requires = distribution("agentrl-cli").requires or []
    except PackageNotFoundError:
        return Check(
            "packages",
            "warn",
            "agentrl-cli is not installed: this is a checkout",
            "pip install -e .",
        )
    missing: list[str] = []
    for line in requires:
        if "extra ==" in line:
            continue
        name = (
            line.split(";")[0]
            .split("[")[0]
            .strip()
            .split(">")[0]
            .split("=")[0]
            .split("<")[0]
            .strip()
        )
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check(
            "packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    return Check("packages", "ok", f"agentrl-cli {version('agentrl-cli')} and all its dependencies")


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    count = cores()
    detail = f"{count} core{'s' if count > 1 else ''}, {total:.0f} GiB of memory"
    if total < 3:
        return Check(
            "machine",
            "warn",
            detail,
            "The tiny model trains in about 2 GiB; bigger ones will not fit.",
        )
    return _load(detail, os.getloadavg()[0], count)


def _load(detail: str, load: float, count: int) -> Check:
    """Return the check of the machine, with its load if other programs want more cores than there are."""
    if load <= count:
        return Check("machine", "ok", detail)
    threads = max(1, count - round(load))
    return Check(
        "machine",
        "warn",
        f"{detail}; load {load:.1f} on {count} core{'s' if count > 1 else ''}",
        f"Other programs use the cores. OMP_NUM_THREADS={threads} avoids most of the slowdown.",
    )


def _disk(db: Path) -> Check:
    folder = next(path for path in (db.parent, *db.parent.parents) if path.exists())
    free = shutil.disk_usage(folder).free / GIB
    detail = f"{free:.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        return Check(
            "disk", "fail", f"{folder} cannot be written", "Name a store elsewhere with --db."
        )
    if free < 2:
        return Check(
            "disk", "warn", detail, "A run of the tiny model takes a few hundred MiB, others more."
        )
    return Check("disk", "ok", detail)


def _sandbox(settings: SandboxConfig | None) -> Check:
    """Return the isolation under the project's settings; if none starts, the reason, and what would start here."""
    from agentrl_cli.config import SandboxConfig
    from agentrl_cli.sandbox import STRENGTH

    settings = settings or SandboxConfig()
    try:
        level = asyncio.run(_started(settings.model_copy(update={"workers": 1})))
    except AgentRLError as problem:
        strongest, minimum = sandbox_level()[0], settings.min_level
        if strongest is None:
            return Check("sandbox", "fail", f"none starts: {problem.message}", problem.hint)
        if STRENGTH[strongest] >= STRENGTH[minimum]:  # the settings are the cause, not the machine
            return Check("sandbox", "fail", problem.message, problem.hint)
        accept = f"or accept it: sandbox.min_level: {strongest}" + " and sandbox.backend: bare" * (
            strongest == "bare"
        )
        detail = f"only {strongest}, sandbox.min_level is {minimum}: {problem.message}"
        return Check("sandbox", "fail", detail, f"{problem.hint} {accept}")
    if STRENGTH[level] >= STRENGTH["ns"]:
        return Check(
            "sandbox",
            "ok",
            f"{level}; `agentrl doctor --sandbox` attacks it and shows what it guarantees",
        )
    what = "bare, which isolates NOTHING" if level == "bare" else f"{level}, weaker than namespaces"
    strongest, why, fix = sandbox_level()
    if strongest is not None and STRENGTH[strongest] > STRENGTH[level]:
        why = f"sandbox.backend is {settings.backend}; {strongest} would start here"
    return Check("sandbox", "warn", f"{what}: {why}", fix)


def _packs() -> Check:
    names = pack_names()
    return Check(
        "packs",
        "ok" if names else "fail",
        ", ".join(names) or "none",
        "" if names else "Install again.",
    )


def _model() -> Check:
    folder = bundled_model()
    weights = list(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not weights:
        return Check(
            "model",
            "fail",
            f"missing in {folder}",
            "Reinstall, or `agentrl sft DIR --recipe tiny-agent`.",
        )
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e6
    cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Check("model", "ok", f"tiny ({size:.1f} MB); Hugging Face cache in {cache}")


def _store(db: Path) -> Check:
    from agentrl_cli.store import Store

    if not db.exists():
        return Check("store", "ok", f"none yet; it will be {db}")
    try:
        with Store.open(db, readonly=True) as store:
            runs = len(store.runs.all())
    except AgentRLError as error:
        return Check("store", "fail", error.message, error.hint)
    return Check(
        "store",
        "ok",
        f"{db}: {runs} run{'' if runs == 1 else 's'}, {db.stat().st_size / 1e6:.1f} MB",
    )


def check_server(remote: RemoteConfig) -> Check:
    """Whether the inference server answers, and whether this environment's vLLM is the tested release."""
    from agentrl_cli.policies.remote.http import Endpoint
    from agentrl_cli.policies.remote.policy import VLLM, VLLMPolicy

    addresses = remote.urls or [remote.url]

    async def asked() -> None:
        for url in addresses:
            endpoint = Endpoint(url, start=VLLMPolicy.start if remote.backend == "vllm" else "")
            try:
                await endpoint.reach()
            finally:
                await endpoint.close()

    try:
        asyncio.run(asked())
    except AgentRLError as error:
        return Check("server", "fail", error.message, error.hint)
    detail = f"{remote.backend} answers at {', '.join(addresses)}"
    try:
        found = version("vllm") if remote.backend == "vllm" else ""
    except PackageNotFoundError:  # vLLM runs in another environment, or on another machine
        found = ""
    if found and not found.startswith(f"{VLLM}."):
        fix = "pip install 'agentrl-cli[vllm]'"
        return Check(
            "server", "warn", f"{detail}; vLLM {found} is installed here, tested is {VLLM}", fix
        )
    return Check("server", "ok", detail)


def _engine(model: ModelConfig | None, base: Path) -> Check:
    """Return the engine for the project's model, by its configuration."""
    from agentrl_cli.config.models import ModelConfig as Default
    from agentrl_cli.inference.served import unserved

    settings = model or Default()
    folder = (
        bundled_model(settings.name)
        if is_bundled(settings.name)
        else base / Path(settings.name).expanduser()
    )
    if not (folder / "config.json").is_file():
        return Check(
            "engine", "ok", f"known when {settings.name} is loaded: it is not a local folder"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        return Check(
            "engine",
            "fail",
            f"{settings.name}: {error}",
            "Correct model.name, or copy its folder again.",
        )
    why = (
        "it reads images"
        if config.get("vision_config")
        else unserved(config.get("text_config") or config)
    )
    return Check(
        "engine",
        "ok",
        f"fallback for {settings.name}: {why}" if why else f"paged for {settings.name}",
    )


def _torch() -> Check:
    try:
        child = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(
            "torch",
            "fail",
            "importing it took more than two minutes",
            "Is the machine or the disk busy?",
        )
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("torch", "fail", last, "pip install torch")
    facts = json.loads(child.stdout.strip().splitlines()[-1])
    gpus = [f"{gpu['name']} {gpu['memory'] / GIB:.0f} GiB" for gpu in facts["gpus"]]
    where = (
        ", ".join(gpus)
        if gpus
        else f"CPU, {facts['threads']} thread{'s' if facts['threads'] > 1 else ''}"
    )
    detail = f"{facts['version']} on {where}"
    if not gpus and shutil.which("nvidia-smi"):
        fix = "This torch is a CPU build, or the driver is too old: pip install torch for your CUDA version."
        return Check(
            "torch", "warn", f"{detail}; a GPU driver is installed but torch sees no GPU", fix
        )
    return Check("torch", "ok", detail)
