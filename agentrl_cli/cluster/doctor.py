"""What `agentrl doctor --cluster` checks: the workers of a project's configuration, started as a run starts them."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.cluster.checks import differences, network_disk
from agentrl_cli.cluster.pool import WorkerPool, open_pool
from agentrl_cli.config import Config
from agentrl_cli.errors import AgentRLError
from agentrl_cli.policies.load import load_policy
from agentrl_cli.rollout import Rollout
from agentrl_cli.rollout.job import Job, seed_of
from agentrl_cli.rollout.parts import Parts, open_parts

SKEW = 1.0
"""Seconds by which clocks may differ: the times of turns and the order of episodes come from them."""
Found = tuple[str, str, str, str]
"""name, ok | warn | fail, detail, what to do"""


async def check_workers(config: Config, base: Path, db: Path) -> list[Found]:
    """Start the workers, compare each with this process, and let each make one episode, which is not stored."""
    kind = network_disk(db.parent)
    fix = "put it on a local disk: --db or store.path" if kind else ""
    found: list[Found] = [
        ("store", "fail" if kind else "ok", f"{db} on {kind or 'a local disk'}", fix)
    ]
    try:
        async with open_parts(config, base) as parts:
            loaded = load_policy(None, config, base=base)
            try:
                async with open_pool(config, base, loaded, parts.packs, same=False) as pool:
                    found += await _compare(pool, parts)
                    rollout = AgentRollout(loaded.policy, loaded.chat, parts.packs, config).with_(
                        workers=pool
                    )
                    found += await _attempts(pool, rollout, config)
            finally:
                await loaded.policy.close()
    except AgentRLError as error:
        found.append(("workers", "fail", error.message, error.hint))
    return found


async def _compare(pool: WorkerPool, parts: Parts) -> list[Found]:
    """Versions, code and clock of each worker."""
    found: list[Found] = []
    for worker in pool.workers:
        assert worker.hello is not None
        delay, ahead = await worker.echo()
        name = f"worker {worker.number}"
        text = f"{worker.hello.node}, pid {worker.hello.pid}, Python {worker.hello.python}"
        found.append((name, "ok", f"{text}; a message there and back {delay * 1000:.1f} ms", ""))
        wrong = [what for _, what in differences(parts.packs, [worker.hello])]
        fix = "install the same versions on every node" if wrong else ""
        found.append(
            (f"{name} versions", "fail" if wrong else "ok", "; ".join(wrong) or "as here", fix)
        )
        far = abs(ahead) > max(SKEW, delay)
        text, fix = f"{ahead:+.3f} s from this one", "synchronise it (NTP)" if far else ""
        found.append((f"{name} clock", "warn" if far else "ok", text, fix))
    return found


async def _attempts(pool: WorkerPool, rollout: Rollout, config: Config) -> list[Found]:
    """One episode of the first task by each worker."""
    packs = rollout.context.packs.values()
    tasks = [task for pack in packs for task in pack.tasks(config.task.split_train, limit=1)]
    if not tasks:
        return [("job", "fail", f"no tasks in split {config.task.split_train}", "agentrl check")]
    jobs = [Job(tasks[0], seed_of(config.seed, "doctor", n), n) for n in range(pool.count)]
    found: list[Found] = []
    for worker, job in zip(pool.workers, jobs, strict=True):
        try:
            ended = (await pool.attempt_by(worker, job, rollout.context)).episode
        except AgentRLError as error:
            found.append((f"worker {worker.number} job", "fail", error.message, error.hint))
            continue
        bad = ended.outcome is not None and ended.outcome.is_error
        text = f"an episode in {ended.ended - ended.started:.1f} s, {ended.outcome}"
        text += f": {ended.error}" if ended.error else ""
        found.append((f"worker {worker.number} job", "fail" if bad else "ok", text, ""))
    return found
