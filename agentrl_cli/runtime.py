"""A run's packs, policy, sandbox, store and hooks, opened and closed together; a training from a script."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.agents.runners import AgentRollout, require_agents
from agentrl_cli.config import Config, inside
from agentrl_cli.errors import AgentRLError
from agentrl_cli.hooks.waits import Watchman, interruptible
from agentrl_cli.paths import default_db
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers
from agentrl_cli.rollout.parts import Parts, limits_of, open_parts
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.new_run import new_run
from agentrl_cli.tasks import Pack

if TYPE_CHECKING:
    from agentrl_cli.chat.audit import Conversations
    from agentrl_cli.policies.load import Loaded
    from agentrl_cli.policies.protocols import Policy
    from agentrl_cli.rollout import Rollout
    from agentrl_cli.rollout.context import Workers
    from agentrl_cli.trainer.compute import Team

SMALL = 64 * 2**20
"""Most bytes of a store that is checked for damage before anything is written to it."""
M_ARENA_MAX = -8
"""glibc's malloc.h"""


@dataclass
class Runtime(Parts):
    """The open parts of a run: those of its episodes, the policy and the store."""

    config: Config
    base: Path
    """The project folder, to which relative paths refer."""
    loaded: Loaded
    store: Store
    workers: Workers | None = None
    """What makes the episodes; None: this process."""
    frozen: dict[str, Policy] = field(default_factory=dict)
    """Other models that agents called."""

    def rollout(self) -> Rollout:
        """Return a rollout of the packs: by their agents, or by the built-in loop for a pack without one."""
        rollout = AgentRollout(
            self.loaded.policy,
            self.loaded.chat,
            self.packs,
            self.config,
            sandbox=self.sandbox,
            store=self.store,
            hooks=self.hooks,
        )
        return rollout.with_(workers=self.workers, frozen=self.frozen)

    async def close(self) -> None:
        """Free the models that agents called besides the run's own."""
        for policy in self.frozen.values():
            await policy.close()


@contextlib.asynccontextmanager
async def open_runtime(
    config: Config,
    *,
    base: Path,
    db: Path,
    spec: str | None = None,
    trainable: bool = False,
    packs: Sequence[Pack] | None = None,
    hooks: Sequence[object] = (),
    loading: Config | None = None,
) -> AsyncIterator[Runtime]:
    """Open the parts that a configuration names; `packs` and `hooks` are objects of a script.

    `loading`: the settings by which the model is loaded; None: `config`. Raises AgentRLErrors for a user's mistakes.
    """
    one_heap()
    with interruptible():
        from agentrl_cli.chat.audit import require_calls_read
        from agentrl_cli.policies.load import load_policy
    async with contextlib.AsyncExitStack() as stack:
        if not trainable:  # a training has its own, which stores what it says
            stack.enter_context(Watchman(_print_waits))
        opened = open_parts(config, base, packs=packs, hooks=hooks, loggers=config.loggers)
        parts = await stack.enter_async_context(opened)
        store = stack.enter_context(Store.open(db))
        store.require_sound(at_most=SMALL)
        served = await _start_servers(stack, loading or config, base, db, spec)
        limited = limits_of(served, parts.packs)
        held = partial(conversations, parts.packs.values(), config.task.split_train)
        loaded = interruptible()(load_policy)(
            spec, limited, base=base, store=store, trainable=trainable, conversations=held
        )
        stack.push_async_callback(loaded.policy.close)
        await _require_servers(loaded.policy)
        if trainable and any(pack.tools for pack in parts.packs.values()):
            require_calls_read(loaded.chat)
        used = loaded.chat.tokenizer
        store.tokenizers.add(used.hash, used.json, used.chat_template, used.specials)
        workers: Workers | None = None
        kinds = {"spec": spec, "trainable": trainable, "objects": packs is not None or bool(hooks)}
        for name in offers("pools"):
            pool = resolve("pools", {}, name)(served, base, loaded, parts.packs, store, **kinds)
            workers = await stack.enter_async_context(pool) or workers
        await require_agents(() if workers else parts.packs.values())
        if workers is not None:
            loaded.policy = workers.policy(loaded)
        run = Runtime(**vars(parts), config=config, base=base, loaded=loaded, store=store)
        run.workers = workers
        stack.push_async_callback(run.close)
        yield run


async def _start_servers(
    stack: contextlib.AsyncExitStack, config: Config, base: Path, db: Path, spec: str | None
) -> Config:
    """Start the servers that plugins offer for a run; return the settings that mean them."""
    for name in offers("servers"):
        starting = resolve("servers", {}, name)(config, base, db, spec)
        config = await stack.enter_async_context(starting) or config
    return config


async def _require_servers(policy: Policy) -> None:
    """Raise PolicyError unless the servers of a policy that has any answer."""
    from agentrl_cli.policies.protocols import Reachable

    if isinstance(policy, Reachable):
        await policy.reach()


def one_heap() -> None:
    """Let all threads of this process share glibc's main heap; no effect on other systems. Call before torch loads.

    Otherwise the sampling thread has its own heaps, which decode buffers between small long-lived objects fragment:
    490 MB more for 64 sequences of 512 tokens of a 3M model. https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def conversations(packs: Iterable[Pack], split: str) -> Conversations:
    """Return the kinds of messages that these packs' conversations can contain, for the audit of a chat template.

    An environment of a pack's own may write anything, and so may an agent. The rows of `split` may bring system texts
    of their own.
    """
    from agentrl_cli.chat.audit import EVERY, Conversations
    from agentrl_cli.evaluate.run import has_split

    found = list(packs)
    if any(
        pack.agent is not None or getattr(pack.module, "make_env", None) is not None
        for pack in found
    ):
        return EVERY
    having = [pack for pack in found if has_split(pack, split)] or found
    prompts = (task.prompt for pack in having for task in pack.tasks(split))
    return Conversations(
        users=any(pack.interactions for pack in found),
        system=any(pack.system for pack in found)
        or any(m["role"] == "system" for p in prompts for m in p),
        tools=any(pack.tools for pack in found),
    )


def _print_waits(lines: Sequence[str]) -> None:
    for text in lines:
        to_stderr(f"waiting for {text}")


def to_stderr(text: str) -> None:
    """Print one line for people to stderr."""
    print(text, file=sys.stderr, flush=True)


def train(
    config: Config | None = None,
    *,
    packs: Sequence[Pack] | None = None,
    hooks: Sequence[object] = (),
    project: str | Path = ".",
    db: str | Path | None = None,
    narrate: Callable[[str], None] = to_stderr,
) -> RunRow:
    """Train from a script, with packs and hooks as objects; returns the run's row.

    `narrate` gets one line per step, by default on stderr: stdout belongs to the script.
    Everything goes into `runs/` of `project`, as with `agentrl train`: `agentrl replay` and `watch` work there.
    Must not be called inside a running event loop (use `open_runtime` and `Trainer` there).
    Raises AgentRLErrors for every mistake of a user.
    """
    base = Path(project).absolute()
    settings = inside(config or Config(), base)

    def begin(runtime: Runtime) -> RunRow:
        if runtime.sandbox is not None and runtime.sandbox.warning:
            narrate(f"WARNING: {runtime.sandbox.warning}")
        return new_training(runtime)

    where = Path(db) if db else default_db(base)
    return asyncio.run(
        run_training(
            settings, begin, base=base, db=where, packs=packs, hooks=hooks, narrate=narrate
        )
    )


async def run_training(
    config: Config,
    begin: Callable[[Runtime], RunRow],
    *,
    base: Path,
    db: Path,
    packs: Sequence[Pack] | None = None,
    hooks: Sequence[object] = (),
    narrate: Callable[[str], None] = to_stderr,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    accept_changes: bool = False,
) -> RunRow:
    """Open the parts of a training and train. Returns the run's row as it ended.

    `begin` makes or finds the row when all is open; `on_step` gets a step's metrics; `accept_changes`: see Trainer.
    """
    with interruptible():
        from agentrl_cli.learning.objective import check
        from agentrl_cli.trainer import build_trainer
        from agentrl_cli.trainer.compute import find_learner
    check(config.algo)
    maker = find_learner(config)
    with open_team(config, base, db.parent / "logs") as team:
        async with open_runtime(
            config,
            base=base,
            db=db,
            trainable=True,
            packs=packs,
            hooks=hooks,
            loading=None if team is None else team.config,
        ) as runtime:
            run = begin(runtime)
            try:
                trainer = build_trainer(
                    config,
                    run,
                    runtime.loaded,
                    runtime.rollout(),
                    team=team,
                    maker=maker,
                    narrate=narrate,
                    on_step=on_step,
                    base=base,
                    accept_changes=accept_changes,
                )
            except AgentRLError as error:  # the run's row says why it made no step
                runtime.store.runs.update(run.id, status="failed", error=str(error))
                raise
            return await trainer.train()


@contextlib.contextmanager
def open_team(config: Config, base: Path, logs: Path) -> Iterator[Team | None]:
    """Yield the first team of processes that a plugin opens for these settings; None: this process trains alone."""
    with contextlib.ExitStack() as stack:
        team: Team | None = None
        for name in offers("teams"):
            opened = stack.enter_context(resolve("teams", {}, name)(config, base, logs))
            team = team or opened
        yield team


def new_training(runtime: Runtime, id: str = "") -> RunRow:
    """Return the row of a new training."""
    packs = list(runtime.packs)
    return new_run(
        runtime.config,
        runtime.store,
        kind="train",
        packs=packs,
        tokenizer=runtime.loaded.hash,
        id=id,
    )
