"""A search for better texts of a pack, from its tasks and the reflection model to the texts that are written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import (
    AgentRLError,
    ConfigError,
    NotFound,
    PolicyError,
    RunFailed,
    UsageError,
)
from agentrl_cli.evaluate import Settings, fingerprint, pick_tasks, spread
from agentrl_cli.evaluate.stats import difference, estimate, mcnemar
from agentrl_cli.hooks.threads import call
from agentrl_cli.paths import PROJECT_FILE
from agentrl_cli.plugins.prompts import apo, with_gepa
from agentrl_cli.plugins.prompts.plan import Plan
from agentrl_cli.plugins.prompts.search import Parts, Reflect, Search, id_of, is_graded
from agentrl_cli.plugins.prompts.store import Prompts
from agentrl_cli.policies.load import Loaded
from agentrl_cli.registry import require_package, resolve
from agentrl_cli.rewards.llm_client import Asked, ask
from agentrl_cli.rollout import seed_of
from agentrl_cli.runtime import Runtime
from agentrl_cli.store import RunRow
from agentrl_cli.store.new_run import new_run
from agentrl_cli.tasks import Pack
from agentrl_cli.tasks.texts import parts_of, read_parts, write_parts
from agentrl_cli.types import Sampling, Task

MOST = 1024
"""Tokens of an answer."""


def reflection(named: str, model: str, loaded: Loaded, seed: int, base: Path) -> Reflect:
    """Open the model of `--reflect-with`: `served`, an address (with the model's name there), or file.py:function.

    Raises ConfigError or NotFound.
    """
    if named == "served":
        return _ask_served(loaded, seed)
    if named.startswith(("http://", "https://")):
        if not model:
            raise ConfigError(
                "--reflect-with names an endpoint without a model.",
                hint="Add --reflect-model NAME.",
            )
        asked = Asked.of(
            {"url": named, "model": model, "max_tokens": MOST, "temperature": 1.0, "cache": None},
            named,
            base,
        )

        async def endpoint(prompt: str) -> str:
            return await ask(asked, [{"role": "user", "content": prompt}])

        return endpoint
    return _function(resolve("reflection models", {}, named, base=base), named)


def _function(found: Callable[[str], Any], named: str) -> Reflect:
    async def answer(prompt: str) -> str:
        try:
            return str(await call(found, prompt) or "")
        except AgentRLError:
            raise
        except Exception as error:
            raise PolicyError(
                f"The reflection model {named} failed: {type(error).__name__}: {error}"
            ) from error

    return answer


def _ask_served(loaded: Loaded, seed: int) -> Reflect:
    """Return the policy itself, without tools."""
    numbers = count()
    chat: Chat = loaded.chat

    async def sample(prompt: str) -> str:
        number = next(numbers)
        ids = chat.prompt([{"role": "user", "content": prompt}]).ids
        limit = getattr(loaded.policy, "context_length", 4096)
        if len(ids) + 16 > limit:
            raise PolicyError(
                f"The reflection prompt has {len(ids)} tokens, and the served model reads {limit}.",
                hint="Name a reflection model: --reflect-with http://…, or lower --minibatch.",
            )
        sampling = Sampling(
            max_new_tokens=min(MOST, limit - len(ids)), temperature=1.0, stop_ids=chat.stop_ids,
            seed=seed_of(seed, "reflection", number),
        )  # fmt: skip
        made = await loaded.policy.generate(f"reflection-{number}", ids, sampling)
        await loaded.policy.release(f"reflection-{number}")
        return chat.tokenizer.plain(made.ids)

    return sample


WRITTEN = Path("prompts") / "best.yaml"
"""Where --write puts the texts, in the project."""
SETTINGS = "optimize"
"""Kind of the event with the settings of a search: the same ones continue it."""
Narrate = Callable[[str], None]


async def optimize(
    runtime: Runtime, plan: Plan, *, write: bool, gated: bool, narrate: Narrate
) -> dict[str, Any]:
    """Search, compare base and best on the test tasks, and return the report. Raises AgentRLErrors.

    `gated`: `--fail-under` is given, which needs test tasks.
    """
    if len(runtime.packs) != 1:
        raise ConfigError(
            "The texts of one pack are optimised at a time.", hint="Name one with --pack."
        )
    (pack,) = runtime.packs.values()
    first = _first(pack, plan)
    tasks = _tasks(runtime, pack, plan, gated)
    if plan.budget < len(tasks["validation"]):
        raise UsageError(
            f"A budget of {plan.budget} episodes is below one evaluation ({len(tasks['validation'])} tasks).",
            hint="Raise --budget, or lower --validation-tasks.",
        )
    if plan.method == "gepa":
        require_package("gepa", "0.1", "prompts", otherwise="use --method apo")
    seed = runtime.config.seed
    reflect = reflection(plan.reflect_with, plan.reflect_model, runtime.loaded, seed, runtime.base)
    run = _find_run(runtime, plan, [*chain(*tasks.values())], narrate)
    # Workers load packs from their files: the texts that are tried exist in this process alone.
    rollout = runtime.rollout().with_(workers=None, temperature=plan.temperature, run=run)
    narrate(
        f"{run.name}: {plan.method}, at most {plan.budget} episodes and {2 * len(tasks['test'])} for the test;"
        f" {plan.reflect_with} writes the prompts"
    )
    given = Search(
        runtime.store, run, pack, rollout, reflect, seed, plan.budget, plan.method, narrate
    )
    status, error = "stopped", "interrupted"
    with runtime.store.claims.hold(run.id, "optimize"):
        try:
            best = await _search(given, first, tasks["train"], tasks["validation"], plan)
            result = await _report(given, first, best, tasks["test"])
            result["written"] = _write(runtime, best, narrate) if write else None
            status, error = "finished", ""
        except Exception as problem:
            status, error = "failed", str(problem)
            raise
        finally:
            runtime.store.runs.update(run.id, status=status, error=error, ended=time.time())
    return result


async def _search(
    given: Search, first: Parts, train: list[Task], validation: list[Task], plan: Plan
) -> Parts:
    if plan.method == "gepa":
        return await with_gepa.search(given, first, train, validation, plan.minibatch)
    return await apo.search(
        given,
        first,
        train,
        validation,
        beam_width=plan.beam,
        branch_factor=plan.branch,
        beam_rounds=plan.rounds,
        gradient_batch_size=plan.minibatch,
        val_batch_size=plan.validation,
    )


def _first(pack: Pack, plan: Plan) -> Parts:
    """Return the pack's own texts. Raises NotFound for an unknown part, ConfigError for an empty one."""
    known = parts_of(pack)
    for name in plan.parts or ():
        if name not in known:
            raise NotFound.of(f"text of the pack {pack.name}", name, list(known))
        if not known[name].strip():
            raise ConfigError(
                f"The pack {pack.name} has no text {name} to start from.",
                hint="Write one in task.yaml.",
            )
    return {name: known[name] for name in plan.parts or ()}


def _tasks(runtime: Runtime, pack: Pack, plan: Plan, gated: bool) -> dict[str, list[Task]]:
    """Return train, validation and test tasks; without a validation split, the last training tasks are it.

    Raises UsageError if there are no test tasks and the search is `gated`.
    """
    settings = runtime.config
    chosen = partial(pick_tasks, {pack.name: pack}, families=settings.task.families)
    train = chosen([settings.task.split_train])
    splits = pack.splits()
    name = settings.train.eval.split
    if name in splits and name != settings.task.split_train:
        validation = chosen([name], limit=plan.validation)
    else:
        validation = train[-min(plan.validation, max(len(train) // 2, 1)) :]
        train = train[: len(train) - len(validation)] or train
    test = (
        chosen([settings.eval.split], limit=plan.test)
        if plan.test and settings.eval.split in splits
        else []
    )
    if gated and not test:
        raise UsageError(
            f"--fail-under needs test tasks: --test-tasks {plan.test} of the split"
            f" {settings.eval.split!r} of the pack {pack.name} gives none.",
            hint="Name a split of the pack with --set eval.split=…, or leave out --test-tasks 0.",
        )
    found = {"train": spread(train, plan.train), "validation": validation, "test": test}
    for some in found.values():
        runtime.store.tasks.add(some)
    return found


def _find_run(runtime: Runtime, plan: Plan, tasks: list[Task], narrate: Narrate) -> RunRow:
    """Return the newest search with these settings, model, tasks and code that did not finish, or a new one."""
    store, config = runtime.store, runtime.config
    made_by = fingerprint(runtime.loaded, runtime.packs, config, tasks, Settings.of(config))
    wanted = {**asdict(plan), "made_by": made_by}
    for old in store.runs.all():
        ended = old.kind == "optimize" and old.status != "finished" and not old.alive
        if ended and store.journal.newest_event(old.id, SETTINGS) == wanted:
            store.episodes.cancel(old.id)
            store.runs.update(old.id, status="running", error="", ended=0.0)
            narrate(f"{old.name} is continued: what it has is not made again")
            return old
    run = new_run(
        config,
        store,
        kind="optimize",
        packs=list(runtime.packs),
        tokenizer=runtime.loaded.hash,
        model=runtime.loaded.name,
    )
    store.journal.add_event(run.id, SETTINGS, wanted)
    return run


async def _report(given: Search, first: Parts, best: Parts, test: list[Task]) -> dict[str, Any]:
    """Return the report: base against best on the test tasks."""
    rows = {row.id: row for row in Prompts(given.store).all(given.run.id)}
    result: dict[str, Any] = {
        "run": given.run.name,
        "base": id_of(first),
        "best": id_of(best),
        "candidates": len(rows),
        "validation": {
            name: rows[id_of(p)].scores.get("validation")
            for name, p in (("base", first), ("best", best))
        },
        "test": None,
        "base_parts": first,
        "parts": best,
        "episodes": given.spent,
        "reflections": given.asked,
    }
    if test:
        found = []
        for parts in (first, best):
            found.append(await given.evaluate(parts, test, free=True))
            given.keep_score(parts, "test", found[-1])
        pairs = [
            (float(one.solved), float(other.solved))
            for one, other in zip(*found, strict=True)
            if is_graded(one) and is_graded(other)
        ]
        if not pairs:
            raise RunFailed(
                "No test task could be graded with both texts.", hint="agentrl replay last"
            )
        base, solved = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        result["test"] = {
            "tasks": len(pairs),
            "ungraded": len(test) - len(pairs),
            "base": asdict(estimate(base)),
            "best": asdict(estimate(solved)),
            "difference": asdict(difference(base, solved)),
            "p_value": mcnemar(sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)),
        }
    return result


def _write(runtime: Runtime, best: Parts, narrate: Narrate) -> str:
    """Put the texts into the project's folder and name them in agentrl.yaml."""
    named = runtime.config.task.prompts
    path = runtime.base / (named or WRITTEN)
    write_parts(path, {**(read_parts(path) if named else {}), **best})
    settings = runtime.base / PROJECT_FILE
    if named is None and settings.is_file():
        lines = settings.read_text(encoding="utf-8").splitlines(keepends=True)
        at = next((n for n, line in enumerate(lines) if line.rstrip() == "task:"), None)
        if at is None:
            narrate(f"Add to {settings}:  task: {{prompts: {WRITTEN}}}")
        else:
            indent = next(
                (
                    line[: len(line) - len(line.lstrip())]
                    for line in lines[at + 1 :]
                    if line.strip()
                ),
                "  ",
            )
            lines.insert(at + 1, f"{indent or '  '}prompts: {WRITTEN}\n")
            settings.write_text("".join(lines), encoding="utf-8")
    return str(path)
