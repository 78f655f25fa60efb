"""`agentrl doctor --cluster`: the workers of a project's configuration, started as a run starts them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from agentrl_cli.config import Config
from agentrl_cli.errors import AgentRLError
from agentrl_cli.plugins.ray.open import differences, network_disk, open_pool
from agentrl_cli.plugins.ray.remote import RemoteWorker
from agentrl_cli.plugins.ray.settings import ClusterConfig
from agentrl_cli.policies.load import load_policy
from agentrl_cli.rollout import Rollout
from agentrl_cli.rollout.context import RolloutContext
from agentrl_cli.rollout.job import Job, seed_of
from agentrl_cli.rollout.parts import open_parts

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
            loaded = load_policy(None, config, base=base)
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
