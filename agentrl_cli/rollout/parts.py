"""What episodes need besides a policy, opened and closed together: packs, hooks and the sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl_cli.config import Config
from agentrl_cli.hooks import HookList, load_hooks
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers
from agentrl_cli.rollout.recorder import make_observers
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks import Pack, check_weights, load_packs
from agentrl_cli.tasks.texts import apply_texts


@dataclass
class Parts:
    """The packs by name, the hooks of the configuration, and the sandbox if a pack needs one."""

    packs: dict[str, Pack]
    hooks: HookList
    sandbox: Sandbox | None


def name_agents(packs: Mapping[str, Pack]) -> set[str]:
    """Return the names of the packs that agents play, to whom `rollout.response_tokens` does not apply."""
    return {name for name, pack in packs.items() if pack.agent is not None}


def limits_of(config: Config, packs: Mapping[str, Pack]) -> Config:
    """Return the settings by which memory is planned: without `rollout.response_tokens` if there are agents."""
    return config.replace(rollout={"response_tokens": None}) if name_agents(packs) else config


@contextlib.asynccontextmanager
async def open_parts(
    config: Config,
    base: Path,
    *,
    packs: Sequence[Pack] | None = None,
    hooks: Sequence[object] = (),
    loggers: Sequence[str] = (),
) -> AsyncIterator[Parts]:
    """Open them; `packs` and `hooks` are objects of a script.

    The sandbox is opened first and checked: a run that needs one fails at once if none is strong enough, and packs
    with `sandbox: false` need none.
    """
    if packs is None:
        packs = list(load_packs(config.task.packs, base=base, agent=config.task.agent).values())
    found = apply_texts(packs, config.task.prompts, base)
    check_weights(found, config.rewards)
    named = load_hooks(config.hooks, base, loggers, config.logger_seconds).hooks
    hook_list = HookList([*named, *make_observers(config, "watchers"), *hooks])
    async with contextlib.AsyncExitStack() as stack:
        sandbox = None
        if any(pack.sandbox for pack in found.values()):
            sandbox = await stack.enter_async_context(await Sandbox.open(config.sandbox))
            for imports in {pack.imports for pack in found.values() if pack.imports}:
                await sandbox.check(
                    imports
                )  # a missing package is reported now, not by every episode
        for name in offers("packs"):
            found = await stack.enter_async_context(resolve("packs", {}, name)(found, config))
        yield Parts(found, hook_list, sandbox)
