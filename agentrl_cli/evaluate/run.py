"""Running an evaluation: every attempt once, infrastructure errors once more, stored attempts reused.

An evaluation is a run of kind `eval`. Its attempts have keys (run, step, task, sample), so an interrupted one is
continued: the next with the same weights, tasks and settings finds it by their fingerprint. Attempts with the same task
and number have the same seed for every policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli._version import __version__
from agentrl_cli.config import Config
from agentrl_cli.errors import DataError, NotFound, RunFailed
from agentrl_cli.evaluate.result import Attempt, EvalResult
from agentrl_cli.rollout import Job, Rollout, seed_of
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.holder import Holder
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode, Task

if TYPE_CHECKING:
    from agentrl_cli.policies.load import Loaded

HELDOUT = "heldout"
"""The split of families that are not in training."""

Made = dict[tuple[str, int], Attempt]
"""Attempts by task and number."""

OnDone = Callable[[Attempt], None]
"""Called with each attempt: first the stored ones, then others as they finish."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that two evaluations must share to be compared."""

    k: int = 4
    temperature: float = 1.0
    seed: int = 0
    with_tools: bool = True

    @classmethod
    def of(cls, config: Config, *, with_tools: bool = True) -> Settings:
        """Return the settings of a configuration."""
        return cls(config.eval.k, config.eval.temperature, config.seed, with_tools)


def pick_tasks(
    packs: Mapping[str, Pack],
    splits: Sequence[str],
    *,
    families: Sequence[str] | None = None,
    limit: int | None = None,
) -> list[Task]:
    """Return the tasks of the splits, at most `limit` of each, spread evenly over its file, the same every time.

    A pack may lack a split, and a split may lack a family; a row of two splits is returned once. Raises NotFound for
    a family that no split has, DataError for two rows with one id.
    """
    by_split = {}
    for split in splits:
        having = [pack for pack in packs.values() if has_split(pack, split)]
        by_split[split] = [t for pack in having or packs.values() for t in pack.tasks(split)]
    if families is not None:
        known = sorted({task.family for tasks in by_split.values() for task in tasks})
        for family in families:
            if family not in known:
                raise NotFound.of(f"family in {', '.join(splits)}", family, known)
        by_split = {
            s: [task for task in tasks if task.family in families] for s, tasks in by_split.items()
        }
    chosen = [task for tasks in by_split.values() for task in spread(tasks, limit)]
    named: dict[str, Task] = {}
    for task in chosen:
        first = named.setdefault(task.id, task)
        if replace(task, split=first.split) != first:
            raise DataError(
                f"{task.id} is a row of {first.split} and of {task.split}: attempts at it would be mixed up.",
                hint="Give each row of a pack an id of its own; `agentrl check` lists those with another's.",
            )
    return [*named.values()]


def has_split(pack: Pack, split: str) -> bool:
    """Whether a pack has rows for a split, or a variant of this name; an environment's rows are of no family."""
    return split in (*pack.splits(), *pack.variants) and (split != HELDOUT or pack.rows is None)


def spread(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """At most `limit` tasks, evenly spaced, so that every family keeps its share."""
    if limit is None or limit >= len(tasks):
        return list(tasks)
    return [tasks[n * len(tasks) // limit] for n in range(limit)]


async def evaluate_policy(
    rollout: Rollout,
    tasks: Sequence[Task],
    k: int,
    seed: int,
    *,
    run_id: str | None,
    step: int | None,
    kind: str = "eval",
    name: str = "",
    on_done: OnDone | None = None,
) -> EvalResult:
    """Evaluate a live policy: k attempts at each task, infrastructure errors tried once more, then counted separately.

    With a store, a run and a step, stored attempts with the same seed are reused, and the result is stored in `evals`.
    Raises PolicyError if the model fails.
    """
    started = time.monotonic()
    jobs = [
        Job(
            task, seed_of(seed, "eval", task.id, n), n, f"eval-{step}/{task.id}", step, run_id, kind
        )
        for task in tasks
        for n in range(k)
    ]
    made = _load_stored(rollout.context.store, jobs, run_id, step, kind)
    reused = len(made)
    retried = await _attempt(rollout, jobs, made, on_done or (lambda attempt: None))
    result = EvalResult(
        name=name or (rollout.context.policy.name if step is None else f"step-{step}"),
        k=k,
        seed=seed,
        temperature=rollout.context.temperature,
        with_tools=rollout.context.with_tools,
        attempts=tuple(made[job.task.id, job.sample] for job in jobs),
        run_id=run_id,
        step=step,
        seconds=time.monotonic() - started,
        reused=reused,
        retried=retried,
    )
    _keep(rollout.context.store, result)
    return result


async def _attempt(rollout: Rollout, jobs: Sequence[Job], made: Made, on_done: OnDone) -> int:
    """Add missing attempts to `made`, errors a second time. Returns the number of second attempts."""
    for attempt in made.values():
        on_done(attempt)
    left = [job for job in jobs if (job.task.id, job.sample) not in made]
    tasks = {job.task.id: job.task for job in left}
    for last in (False, True):

        def done(episode: Episode, last: bool = last) -> None:
            attempt = Attempt.of(episode, tasks[episode.task_id])
            if attempt.graded or last:
                on_done(attempt)

        for job, episode in zip(left, await rollout.run(left, done), strict=True):
            made[job.task.id, job.sample] = Attempt.of(episode, job.task)
        if not last:
            left = [job for job in left if not made[job.task.id, job.sample].graded]
    return len(left)


async def evaluate(
    loaded: Loaded,
    rollout: Rollout,
    *,
    tasks: Sequence[Task] | None = None,
    settings: Settings | None = None,
    parent: tuple[str, int] | None = None,
    resume: bool = False,
    on_done: OnDone | None = None,
) -> EvalResult:
    """Evaluate a loaded policy, which `rollout` samples from, as its own run, and store it.

    Continues the newest interrupted evaluation of the same weights, tasks and settings; with `resume` also a finished
    one. `parent` is (run id, step) of the training that made the weights. Raises RunFailed if no attempt could be
    graded, UsageError if another process is making the same evaluation.
    """
    store, packs, hooks = rollout.context.store, rollout.context.packs, rollout.context.hooks
    # Supports are for training alone, and servers do not report them.
    config = rollout.context.config.replace(rollout={"truncation": {"replay": False}})
    settings = settings or Settings.of(config)
    if tasks is None:
        tasks = pick_tasks(packs, [config.eval.split], limit=config.eval.limit)
    step = parent[1] if parent else 0
    assert store is not None, "an evaluation is a run of a store"
    with store.transaction():  # one of two that start at once sees the other
        run = _open_run(store, loaded, packs, config, tasks, settings, parent, resume)
    rollout = rollout.with_(
        config=config, run=run, with_tools=settings.with_tools, temperature=settings.temperature
    )
    facts: dict[str, Any] = {"run_id": run.id, "name": loaded.name, "step": step}
    with store.claims.hold(run.id, "eval"), _note_end(store, run):
        result = await evaluate_policy(
            rollout, tasks, settings.k, settings.seed, **facts, on_done=on_done
        )
        if result.attempts and not any(attempt.graded for attempt in result.attempts):
            first = result.attempts[0]
            raise RunFailed(
                f"No attempt could be graded (of {len(result.attempts)}); the first: {first.outcome}:"
                f" {first.error}",
                hint=f"agentrl replay {first.episode_id}",
            )
    await hooks.call("on_eval", result=result, step=step, run=run)
    return result


def fingerprint(
    loaded: Loaded,
    packs: Mapping[str, Pack],
    config: Config,
    tasks: Iterable[Task],
    settings: Settings,
) -> str:
    """Return a hash of what decides the result: weights, tasks, the packs' code and tools, limits, settings."""
    limits = config.rollout.model_dump(
        exclude={"group_size", "prompts_per_step", "concurrency", "temperature"}
    )
    plain = getattr(loaded.model, "get_base_model", None)  # of a model with an adapter
    folders = [loaded.folder, Path(plain().name_or_path) if plain else None]
    facts = [
        loaded.name,
        config.remote.url,
        config.remote.backend,
        config.model.model_dump(include={"dtype", "quantization", "chat"}),
        config.sandbox.limits,
        loaded.policy.weights_version,
        loaded.chat.tokenizer.hash,
        [one for folder in folders for one in _files(folder)],
        [[task.id, task.prompt, dict(task.data), task.tools] for task in tasks],
        {name: [pack.code, pack.schemas] for name, pack in packs.items()},
        *(pack.agent.code for pack in packs.values() if pack.agent is not None),
        limits,
        config.rewards,
        config.hooks,
        [settings.k, settings.temperature, settings.seed, settings.with_tools],
    ]
    return hashlib.blake2b(
        json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()


def _load_stored(
    store: Store | None, jobs: Sequence[Job], run_id: str | None, step: int | None, kind: str
) -> Made:
    """Graded attempts of the same run, step and seed, by (task, sample)."""
    if store is None or run_id is None or step is None:
        return {}
    wanted = {(job.group_id, job.sample): job for job in jobs}
    found = {}
    ids = store.episodes.ids(f"step:{step} kind:{kind}", "time", run=run_id)
    for row in store.episodes.rows(ids):
        job = wanted.get((row.group_id, row.sample))
        if (
            job is not None
            and row.seed == job.seed
            and row.outcome is not None
            and not row.outcome.is_error
        ):
            found[job.task.id, job.sample] = Attempt.of_row(row)
    return found


def _keep(store: Store | None, result: EvalResult) -> None:
    """Store the result, unless it is stored completely."""
    if store is None or result.run_id is None or not result.attempts:
        return
    known = [(row.step, row.name) for row in store.runs.evals(result.run_id)]
    if result.reused < len(result.attempts) or (result.step, result.name) not in known:
        store.runs.add_eval(result.row())


def _open_run(
    store: Store,
    loaded: Loaded,
    packs: Mapping[str, Pack],
    config: Config,
    tasks: Sequence[Task],
    settings: Settings,
    parent: tuple[str, int] | None,
    resume: bool,
) -> RunRow:
    """Return the run to continue, or a new one, held by this process. Stores its tasks and tokenizer."""
    store.tasks.add(tasks)
    tokenizer = loaded.chat.tokenizer
    store.tokenizers.add(
        tokenizer.hash, tokenizer.json, tokenizer.chat_template or "", dict(tokenizer.specials)
    )
    print_ = fingerprint(loaded, packs, config, tasks, settings)
    for old in store.runs.all():
        same = old.kind == "eval" and old.config.get("fingerprint") == print_
        here = (
            old.alive and old.holder == Holder.of()
        )  # another evaluation in this process gets its own run
        if same and not here and (resume or old.status != "finished"):
            store.claims.take(old.id, "eval")
            store.episodes.cancel(old.id)
            store.runs.update(old.id, status="running", error="", ended=0.0)
            return old
    facts = {
        "k": settings.k,
        "temperature": settings.temperature,
        "tools": settings.with_tools,
        "splits": sorted({task.split for task in tasks}),
        "tasks": len(tasks),
    }
    return store.runs.add(
        RunRow(
            id="",
            name="eval-"
            + "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(loaded.name).name),
            kind="eval",
            model=loaded.name,
            pack=",".join(packs),
            seed=settings.seed,
            tokenizer=tokenizer.hash,
            parent_id=parent[0] if parent else None,
            parent_step=parent[1] if parent else None,
            version=__version__,
            config={"fingerprint": print_, "evaluation": facts},
        )
    )


@contextlib.contextmanager
def _note_end(store: Store, run: RunRow) -> Iterator[None]:
    """Let the row of a run say how it ended."""
    status, error = "finished", ""
    try:
        yield
    except BaseException as problem:
        stopped = isinstance(problem, (asyncio.CancelledError, KeyboardInterrupt))
        status, error = "stopped" if stopped else "failed", str(problem)
        raise
    finally:
        store.runs.update(run.id, status=status, ended=time.time(), error=error)


def _files(folder: Path | None) -> list[tuple[str, int, int]]:
    """Return (name, size, modification time) of weights: hashing gigabytes of them would take too long."""
    patterns = ("*.safetensors", "*.bin", "*config.json")
    found = sorted(path for pattern in patterns for path in folder.glob(pattern)) if folder else []
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found]
