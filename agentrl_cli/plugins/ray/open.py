"""Opens the workers of a run, and checks their nodes before they make episodes; `agentrl doctor --cluster`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config
from agentrl_cli.errors import AgentRLError, ConfigError, EnvironmentProblem, StoreError
from agentrl_cli.plugins.ray.pool import WorkerPool
from agentrl_cli.plugins.ray.remote import RemoteWorker
from agentrl_cli.plugins.ray.service import Following, Hello, Setup, describe_node
from agentrl_cli.plugins.ray.settings import LINKS, ClusterConfig
from agentrl_cli.policies.load import Loaded, load_policy
from agentrl_cli.policies.protocols import TrainablePolicy
from agentrl_cli.registry import resolve
from agentrl_cli.rollout import Rollout
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.job import Job, seed_of
from agentrl_cli.rollout.parts import open_parts
from agentrl_cli.rollout.recorder import StoreRecorder, make_observers
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack
from agentrl_cli.types.old_names import adopt_override

NETWORK = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p lustre ceph glusterfs afs beegfs gpfs fuse.sshfs".split()
)
"""File systems on which SQLite's locks and its shared memory do not work."""

_LOG = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_pool(
    config: Config,
    base: Path,
    loaded: Loaded,
    packs: Mapping[str, Pack],
    store: Store | None = None,
    *,
    spec: str | None = None,
    trainable: bool = False,
    objects: bool = False,
    same: bool = True,
) -> AsyncIterator[WorkerPool | None]:
    """Yield the workers of a run by its configuration, started; None for `cluster.kind: here`.

    `objects`: the packs or hooks are objects of a script. `same=False`: nodes may have other versions or other code
    than this process. Raises an AgentRLError if they cannot be started.
    """
    cluster = config.section(ClusterConfig)
    if cluster.kind == "here":
        if cluster.workers > 1:
            text = "cluster.workers is %d, and cluster.kind: here has no workers."
            _LOG.warning(text, cluster.workers)
        yield None
        return
    if objects:
        raise ConfigError(
            f"cluster.kind is {cluster.kind}, and packs or hooks are objects of this process.",
            hint="Name them in task.packs and hooks, so that workers can load them.",
        )
    setup = make_setup(config, base, loaded, spec, trainable)
    given: tuple[Any, ...] = (setup,)
    if store is not None:
        require_local(Path(store.path))
        given = (setup, StoreRecorder(store, make_observers(config)), store.episodes.discard)
    with resolve("workers", LINKS, cluster.kind, base=base)(config, base) as (links, save):
        workers = [RemoteWorker(number, link, *given) for number, link in enumerate(links)]
        pool = WorkerPool(workers, config, store, save)
        try:
            await pool.open(loaded.policy.weights_version)
            if same:
                require_same(packs, [worker.hello for worker in workers if worker.hello])
            yield pool
        finally:
            await pool.close()


def make_setup(
    config: Config, base: Path, loaded: Loaded, spec: str | None, trainable: bool
) -> Setup:
    """Return the setup of the workers. Raises ConfigError for weights that they cannot be given."""
    import torch

    cluster, policy = config.section(ClusterConfig), loaded.policy
    adopt_override(type(policy), "published", "last_published")
    served = isinstance(policy, Following)
    if trainable and not served and isinstance(policy, TrainablePolicy) and policy.separate_weights:
        raise ConfigError(
            f"cluster.kind is {cluster.kind}, and {policy.name} samples with weights that workers cannot be given.",
            hint="Train with cluster.kind: here, or give it the vllm backend's `hold`, `adopt` and `last_published`.",
        )
    name = spec or config.model.name
    where = str(loaded.folder) if "@" in name and loaded.folder is not None else name
    # A worker's model is not trained: it keeps no copy to sample from.
    threads = torch.get_num_threads()
    if not config.deterministic:  # deterministic: the same arithmetic as here
        threads = max(1, threads // cluster.workers)
    own = config.replace(rollout={"async_staleness": 0})
    # Servers have the weights: a worker loads none.
    return Setup(own, base, where, trainable and not served, threads)


def differences(packs: Mapping[str, Pack], other: Hello) -> list[str]:
    """Return how a node differs from this process so that an episode could change."""
    here, there = describe_node(packs).facts, other.facts
    names = [*here, *(name for name in there if name not in here)]
    return [
        f"{name} {there.get(name, 'none')}, and {here.get(name, 'none')} here"
        for name in names
        if here.get(name) != there.get(name)
    ]


def require_same(packs: Mapping[str, Pack], hellos: Sequence[Hello]) -> None:
    """Raise EnvironmentProblem if a node has other versions or other code than this process."""
    wrong = {f"{one.node} has {text}": None for one in hellos for text in differences(packs, one)}
    if wrong:
        raise EnvironmentProblem(
            f"Workers differ from this process: {'; '.join(wrong)}.",
            hint="Install the same versions on every node.",
        )


def network_disk(path: Path, mounts: str | None = None) -> str:
    """Return the kind of network file system that holds a path; empty for a local one or if it is not known."""
    if mounts is None:
        mounts = ""
        with contextlib.suppress(OSError):
            mounts = Path("/proc/mounts").read_text(encoding="utf-8")
    where, best, kind = Path(os.path.realpath(path)), "", ""
    for _, at, found, *_ in map(str.split, mounts.splitlines()):
        folder = at.replace("\\040", " ")
        if where.is_relative_to(folder) and len(folder) >= len(best):
            best, kind = folder, found
    return kind if kind in NETWORK else ""


def require_local(path: Path, mounts: str | None = None) -> None:
    """Raise StoreError for a store on a network disk."""
    kind = network_disk(path, mounts)
    if kind:
        raise StoreError(
            f"The store {path} lies on a network disk ({kind}), where SQLite cannot lock it.",
            hint="Put it on a local disk: --db or store.path. Workers need no access to it.",
        )


SKEW = 1.0
"""Seconds by which clocks may differ: the times of turns and the order of episodes come from them."""
Found = tuple[str, str, str, str]
"""name, ok | warn | fail, detail, what to do"""


async def check_workers(
    config: Config, base: Path, db: Path, narrate: Callable[[str], None]
) -> list[Found]:
    """Start the workers, compare each with this process, and let each make one episode, which is not stored."""
    cluster = config.section(ClusterConfig)
    if cluster.kind == "here":
        text = "cluster.kind is here: the process of a run makes the episodes itself"
        return [("cluster", "ok", text, "--set cluster.kind=processes or ray asks for workers")]
    narrate(f"starting {cluster.workers} workers ({cluster.kind})")
    disk = network_disk(db.parent)
    fix = "put it on a local disk: --db or store.path" if disk else ""
    found = [("store", "fail" if disk else "ok", f"{db} on {disk or 'a local disk'}", fix)]
    try:
        async with contextlib.AsyncExitStack() as stack:
            parts = await stack.enter_async_context(open_parts(config, base))
            store = stack.enter_context(Store.open(db, readonly=True)) if db.is_file() else None
            loaded = load_policy(None, config, base=base, store=store)
            stack.push_async_callback(loaded.policy.close)
            opening = open_pool(config, base, loaded, parts.packs, same=False)
            pool = await stack.enter_async_context(opening)
            context = Rollout(loaded.policy, loaded.chat, parts.packs, config).context
            for worker in pool.workers if pool is not None else ():
                found += await compare(worker, context)
                found.append(await try_job(worker, context))
    except AgentRLError as error:
        found.append(("workers", "fail", error.message, error.hint))
    return found


async def compare(worker: RemoteWorker, context: RolloutContext) -> list[Found]:
    """Return the checks of a worker's versions, code and clock."""
    hello, name = await worker.call("hello"), f"worker {worker.number}"
    sent = time.time()
    there = await worker.call("echo")
    delay, ahead = time.time() - sent, there - (sent + time.time()) / 2
    text = f"{hello.node}, pid {hello.pid}; a message there and back {delay * 1000:.1f} ms"
    wrong, far = differences(context.packs, hello), abs(ahead) > max(SKEW, delay)
    same = "install the same versions on every node" if wrong else ""
    off, clock = f"{ahead:+.3f} s from this one", "synchronise it (NTP)" if far else ""
    return [
        (name, "ok", text, ""),
        (f"{name} versions", "fail" if wrong else "ok", "; ".join(wrong) or "as here", same),
        (f"{name} clock", "warn" if far else "ok", off, clock),
    ]


async def try_job(worker: RemoteWorker, context: RolloutContext) -> Found:
    """Return the check of one episode of the first task."""
    name, split = f"worker {worker.number} job", context.config.task.split_train
    tasks = [task for pack in context.packs.values() for task in pack.tasks(split, limit=1)]
    if not tasks:
        return name, "fail", f"no tasks in split {split}", "agentrl check"
    job = Job(tasks[0], seed_of(context.config.seed, "doctor", worker.number), worker.number)
    try:
        ended = (await worker.attempt(job, context)).episode
    except AgentRLError as error:
        return name, "fail", error.message, error.hint
    bad = ended.outcome is not None and ended.outcome.is_error
    text = f"an episode in {ended.ended - ended.started:.1f} s, {ended.outcome}"
    return name, "fail" if bad else "ok", f"{text}: {ended.error}" if ended.error else text, ""
