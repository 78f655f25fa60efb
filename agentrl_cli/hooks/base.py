"""A hook's methods are called at the events of a run, in this order. Each does nothing until overridden.

    on_run_start      (run)                a run begins; `run` is its row in the store (RunRow): `run.dir` is its folder
    on_step_start     (run, step)          a training step begins; steps are counted from 1, in every event
    on_rollout_start  (task, run)          a rollout, which is one episode, begins
    on_trace_start    (task, run)          its agent loop begins (tools and sandbox are ready)
    on_sample         (sampling, task, turn, run)  before each assistant turn, counted from 0; may return another
                                           Sampling: forbidden and forced tokens, stop strings (local policies)
    on_trace_end      (rollout, task, run) the loop ended; `rollout` is the Episode, not yet graded
    on_rollout_end    (rollout, task, context, run)  graded; may return reward parts; `context` is the RewardContext,
                                           whose sandbox session is still open
    on_batch          (batch, step, run)   the tensors of a step, before the first optimizer step
    on_update         (metrics, step, run) after the last optimizer step
    on_eval           (result, step, run)  an evaluation is done
    on_checkpoint     (path, step, run)    a checkpoint is written
    on_run_end        (run, error)         the run ended; `error` is None or what stopped it

A method may be sync or async and may name just the arguments it needs, in any order: arguments are given by name.
`episode` is another name for `rollout`. A method that names others gets the arguments above by position. `run` is None
in rollouts that belong to no run. An exception in on_sample or on_rollout_end is an EnvError (the episode becomes an
`env_error`, never a zero); elsewhere it is logged with its traceback and the run continues.

The events of an episode (on_rollout_start to on_rollout_end) come from many episodes. A sync method of these runs in a
thread, under the deadline of its episode, and a hook gets one such call at a time, so it can count without a lock;
a method that waits should be async. All others run in the main thread, between steps, where they can use signals or
a window. KeyboardInterrupt and CancelledError stop the run.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agentrl_cli.errors import AgentRLError, ConfigError, EnvError, describe_error
from agentrl_cli.hooks.threads import Quit, call, is_async
from agentrl_cli.hooks.waits import waiting
from agentrl_cli.registry import resolve
from agentrl_cli.types import Episode, RewardPart, Sampling, Task

Fields = Mapping[str, Any]
"""The arguments of one call, by name."""

EVENTS: dict[str, tuple[str, ...]] = {
    "on_run_start": ("run",),
    "on_step_start": ("run", "step"),
    "on_rollout_start": ("task", "run"),
    "on_trace_start": ("task", "run"),
    "on_sample": ("sampling", "task", "turn", "run"),
    "on_trace_end": ("rollout", "task", "run"),
    "on_rollout_end": ("rollout", "task", "context", "run"),
    "on_batch": ("batch", "step", "run"),
    "on_update": ("metrics", "step", "run"),
    "on_eval": ("result", "step", "run"),
    "on_checkpoint": ("path", "step", "run"),
    "on_run_end": ("run", "error"),
}
PER_EPISODE = {"on_rollout_start", "on_trace_start", "on_sample", "on_trace_end", "on_rollout_end"}
ALIASES = {"episode": "rollout", "trainer": "run", "ctx": "context"}
Queue = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]
"""Lets one call of a hook run at a time; a lock belongs to a loop."""

HOOKS: dict[str, str | object] = {"jsonl": "agentrl_cli.hooks.loggers:JsonlLogger"}
LOGGERS = {**HOOKS}

log = logging.getLogger("agentrl.hooks")


class Hook:
    """Base of hooks: override what you need. The arguments are those of the table above."""

    def on_run_start(self, run: Any) -> Any: ...

    def on_step_start(self, run: Any, step: int) -> Any: ...

    def on_rollout_start(self, task: Task, run: Any) -> Any: ...

    def on_trace_start(self, task: Task, run: Any) -> Any: ...

    def on_sample(self, sampling: Sampling, task: Task, turn: int) -> Any:
        """May return another Sampling, `dataclasses.replace(sampling, allow=…)` for instance."""

    def on_trace_end(self, rollout: Episode, task: Task, run: Any) -> Any: ...

    def on_rollout_end(self, rollout: Episode, task: Task) -> Any:
        """May return reward parts: a number, {name: number}, a RewardPart, or several."""

    def on_batch(self, batch: Any, step: int) -> Any: ...

    def on_update(self, metrics: Mapping[str, float], step: int) -> Any: ...

    def on_eval(self, result: Any, step: int) -> Any: ...

    def on_checkpoint(self, path: Path, step: int) -> Any: ...

    def on_run_end(self, run: Any, error: BaseException | None) -> Any: ...


class HookList:
    """The hooks of a run, called in order. An event that no hook overrides costs nothing."""

    def __init__(self, hooks: Sequence[object] = ()) -> None:
        """Raises ConfigError if a method asks for arguments that its event does not have."""
        self.hooks = tuple(hooks)
        self._calls: dict[str, list[_Method]] = {event: [] for event in EVENTS}
        for hook in self.hooks:
            queue: Queue = WeakKeyDictionary()
            for event in EVENTS:
                function = getattr(hook, event, None)
                if function is not None and getattr(function, "__func__", None) is not getattr(
                    Hook, event
                ):
                    self._calls[event].append(_Method(hook, event, function, queue))

    def __bool__(self) -> bool:
        return bool(self.hooks)

    async def call(self, event: str, **fields: Any) -> None:
        """Call `event` on every hook and wait. An exception is logged with its traceback, and the next one is called.

        `fields` are the event's arguments by name; more are allowed, missing ones are None.
        """
        for method in self._calls[event]:
            try:
                await method.run(fields)
            except Exception:
                log.exception("the hook %s.%s failed; the run continues", method.owner, event)

    def has(self, event: str) -> bool:
        """True if a hook overrides this event."""
        return bool(self._calls[event])

    async def sampling(self, sampling: Sampling, **fields: Any) -> Sampling:
        """Return the Sampling of a turn after every on_sample.

        Raises EnvError if one raises or returns anything else.
        """
        for method in self._calls["on_sample"]:
            try:
                answer = await method.run({**fields, "sampling": sampling})
                if not isinstance(answer, Sampling | None):
                    raise TypeError(
                        f"it returned {type(answer).__name__}; a Sampling or None is expected"
                    )
                if answer is not None and answer.problem:
                    raise ValueError(answer.problem)
            except EnvError:
                raise
            except Exception as error:
                raise EnvError(
                    f"The hook {method.owner}.on_sample raised {describe_error(error)}"
                ) from error
            sampling = answer or sampling
        return sampling

    async def rollout_end(self, rollout: Episode, task: Task, **fields: Any) -> list[RewardPart]:
        """Call on_rollout_end and gather the reward parts that hooks return, in order.

        Raises EnvError if a hook raises or returns anything but rewards.
        """
        parts: list[RewardPart] = []
        for method in self._calls["on_rollout_end"]:
            try:
                answer = await method.run({**fields, "rollout": rollout, "task": task})
                parts += reward_parts(method.owner, answer)
            except EnvError:
                raise
            except Exception as error:
                raise EnvError(
                    f"The hook {method.owner}.on_rollout_end raised {describe_error(error)}",
                    hint="A failing hook masks its episodes: they are neither scored nor trained.",
                ) from error
        return parts


def reward_parts(name: str, answer: object) -> list[RewardPart]:
    """Return a hook's return value as reward parts: None, a number (named after the hook), a mapping, a part or
    several.

    Raises TypeError for anything else.
    """
    if answer is None:
        return []
    if isinstance(answer, RewardPart):
        return [answer]
    if isinstance(answer, (int, float)):
        return [RewardPart(f"hook:{name}", float(answer))]
    if isinstance(answer, Mapping):
        return [RewardPart(str(key), float(value)) for key, value in answer.items()]
    if isinstance(answer, Iterable) and not isinstance(answer, (str, bytes)):
        return [part for item in answer for part in reward_parts(name, item)]
    raise TypeError(
        f"it returned {type(answer).__name__}; a number, a mapping or RewardParts are expected"
    )


def load_hooks(
    names: Sequence[str],
    base: Path | None = None,
    loggers: Sequence[str] = (),
    patience: float | None = None,
) -> HookList:
    """Return the hooks of a configuration: names of HOOKS, "module:object" or "file.py:object"; a class is
    instantiated.

    `loggers`: names of LOGGERS, or paths likewise; they come last. One that cannot be made is logged and left out.
    `patience`: seconds without progress that the end of a run allows each of them.
    Raises NotFound for an unknown name, EnvironmentProblem for a logger whose library is not installed.
    """
    found = [resolve("hooks", HOOKS, name, base=base) for name in names]
    made = [hook() if isinstance(hook, type) else hook for hook in found]
    for name in loggers:
        one: Any = resolve("loggers", LOGGERS, name, base=base)
        try:
            one = one() if isinstance(one, type) else one
        except AgentRLError:  # a missing library: raised before anything starts
            raise
        except Exception as error:  # noqa: BLE001 - a logger's error never ends the run
            log.warning(
                "the logger %s cannot be created (%s: %s) and is left out; the run continues, and the store has"
                " everything",
                name, type(error).__name__, error,
            )  # fmt: skip
            continue
        if patience is not None and hasattr(one, "patience"):
            one.patience = patience
        made.append(one)
    return HookList(made)


class _Method:
    """One overridden method of one hook, with its argument names."""

    __slots__ = ("event", "function", "names", "owner", "positional", "queue")

    def __init__(
        self, hook: object, event: str, function: Callable[..., Any], queue: Queue
    ) -> None:
        self.queue = queue
        self.owner = type(hook).__name__
        self.event = event
        self.function = function
        canonical = EVENTS[event]
        parameters = inspect.signature(function).parameters.values()
        takes = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        needed = [p for p in takes if p.default is p.empty]
        known = {*canonical, *ALIASES, "run", "step", "task", "context"}
        self.positional = any(p.name not in known or p.kind is p.POSITIONAL_ONLY for p in needed)
        if self.positional and (
            len(needed) > len(canonical) or any(p.kind is p.KEYWORD_ONLY for p in needed)
        ):
            raise ConfigError(
                f"The hook {self.owner}.{event} wants ({', '.join(p.name for p in needed)}).",
                hint=f"This event has: {', '.join(canonical)}.",
            )
        if self.positional:
            self.names = canonical[: len(needed)]
        else:
            named = [p.name for p in takes if p.name in known]
            self.names = tuple(dict.fromkeys([*named, *(canonical if everything else ())]))

    async def run(self, fields: Fields) -> Any:
        with waiting(f"the hook {self.owner}.{self.event}"):
            return await self._run(fields)

    async def _run(self, fields: Fields) -> Any:
        values = [fields.get(ALIASES.get(name, name)) for name in self.names]
        args, named = (
            (values, {}) if self.positional else ([], dict(zip(self.names, values, strict=True)))
        )
        if self.event not in PER_EPISODE:
            answer = self.function(*args, **named)
            return await answer if inspect.isawaitable(answer) else answer
        try:
            if is_async(self.function):
                return await self.function(*args, **named)
            async with self.queue.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                return await call(self.function, *args, **named)
        except SystemExit as error:
            raise EnvError(
                f"The hook {self.owner}.{self.event} raised SystemExit: {error}"
            ) from error
        except Quit as error:
            if error.__cause__ is None or isinstance(error.__cause__, SystemExit):
                raise EnvError(
                    f"The hook {self.owner}.{self.event} raised {error.message}"
                ) from error
            raise error.__cause__ from None  # a hook may stop the run as a Ctrl-C does
