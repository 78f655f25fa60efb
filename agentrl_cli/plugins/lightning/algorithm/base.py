"""The algorithms that use the queue: `Algorithm`, `@algo`, `Baseline`, which only runs the tasks and logs their spans,
and `APO`, the search of `agentrl optimize --method apo` over a script's queue, agent and OpenAI client.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from pydantic_core import to_jsonable_python

from agentrl_cli.agents.gateway.messages import arguments_of
from agentrl_cli.plugins.lightning.adapter import TraceToMessages
from agentrl_cli.plugins.lightning.emitter import find_final_reward
from agentrl_cli.plugins.lightning.types import NamedResources, PromptTemplate, Rollout, RolloutMode
from agentrl_cli.registry import resolve
from agentrl_cli.types import Episode, Outcome, RewardPart, ToolCall, Turn

_LOG = logging.getLogger(__name__)
BATCH = 10
"""Tasks of `Trainer.dev` at most."""


class Algorithm:
    """Override `run`, sync or async."""

    _trainer: Any = None
    _llm_proxy: Any = None
    _store: Any = None
    _adapter: Any = None
    _initial_resources: NamedResources | None = None

    def is_async(self) -> bool:
        """Whether `run` is a coroutine function."""
        return inspect.iscoroutinefunction(self.run)

    def set_trainer(self, trainer: Any) -> None:
        self._trainer = trainer

    def set_llm_proxy(self, llm_proxy: Any) -> None:
        self._llm_proxy = llm_proxy

    def set_adapter(self, adapter: Any) -> None:
        self._adapter = adapter

    def set_store(self, store: Any) -> None:
        self._store = store

    def set_initial_resources(self, resources: NamedResources) -> None:
        self._initial_resources = resources

    def get_trainer(self) -> Any:
        return self._require("trainer")

    def get_adapter(self) -> Any:
        return self._require("adapter")

    def get_store(self) -> Any:
        return self._require("store")

    def get_llm_proxy(self) -> Any:
        return self._llm_proxy

    def get_initial_resources(self) -> NamedResources | None:
        return self._initial_resources

    def _require(self, name: str) -> Any:
        found = getattr(self, f"_{name}")
        if found is None:
            raise ValueError(f"{name.capitalize()} has not been set for this algorithm.")
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        """Put rollouts into the store, and learn from their spans."""
        raise NotImplementedError("Subclasses must implement run().")


class FunctionalAlgorithm(Algorithm):
    """A function, sync or async, as an algorithm; it gets the arguments that its parameters name."""

    def __init__(self, algorithm_func: Callable[..., Any]) -> None:
        self._function = algorithm_func
        self._names = set(inspect.signature(algorithm_func).parameters)
        functools.update_wrapper(self, algorithm_func)

    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        """Call the function. Raises TypeError for a dataset that it does not take."""
        given = {"train_dataset": train_dataset, "val_dataset": val_dataset}
        for name, value in given.items():
            if value is not None and name not in self._names:
                raise TypeError(
                    f"{name} is provided but not supported by the algorithm function: {self._function}"
                )
        for name in self._names & {"store", "adapter", "llm_proxy", "initial_resources"}:
            given[name] = getattr(self, f"get_{name}")()
        return self._function(
            **{name: value for name, value in given.items() if name in self._names}
        )


algo = FunctionalAlgorithm


class FastAlgorithm(Algorithm):
    """One that is quick enough for `Trainer.dev`."""


class Baseline(FastAlgorithm):
    """Runs every task and logs its status, spans and adapted data. Nothing is learnt."""

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float = 5.0,
        max_queue_length: int = 4,
        span_verbosity: Literal["keys", "key_values", "none"] = "keys",
    ) -> None:
        """`train_split`: share of the tasks to train on without a `val_dataset`. Raises ValueError."""
        if not 0.0 < train_split < 1.0:
            raise ValueError("train_split must be between 0 and 1.")
        self.n_epochs, self.train_split = n_epochs, train_split
        self.max_queue_length, self.span_verbosity = max_queue_length, span_verbosity

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Queue the tasks, at most `max_queue_length` at a time, and wait for each."""
        store, proxy = self.get_store(), self.get_llm_proxy()
        resources = dict(self.get_initial_resources() or {})
        if proxy is not None and not resources:
            resources["main_llm"] = proxy.as_resource()
        if resources or await store.get_latest_resources() is None:
            await store.add_resources(resources)
        train, held = rows(train_dataset), rows(val_dataset)
        if val_dataset is None:
            cut = max(1, int(len(train) * self.train_split))
            train, held = train[:cut], train[cut:]
        room = asyncio.Semaphore(self.max_queue_length)

        async def attempt(mode: RolloutMode, task: Any) -> None:
            async with room:
                queued = await store.enqueue_rollout(task, mode)
                [ended] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id])
                await self._log(ended)

        for _ in range(self.n_epochs):
            waiting = [attempt("train", task) for task in train]
            await asyncio.gather(*waiting, *(attempt("val", task) for task in held))

    async def _log(self, rollout: Any) -> None:
        name, attempts = rollout.rollout_id, rollout.attempt.sequence_id
        spans = await self.get_store().query_spans(name, "latest")
        _LOG.info("[Rollout %s] %s after %d attempts", name, rollout.status, attempts)
        for span in spans if self.span_verbosity != "none" else ():
            whole = self.span_verbosity == "key_values"
            shown = span.attributes if whole else list(span.attributes)
            _LOG.info("[Rollout %s] #%d %s: %s", name, span.sequence_id, span.name, shown)
        if self._adapter is not None and spans:
            _LOG.info("[Rollout %s] Adapted data: %s", name, self._adapter.adapt(spans))


def rows(dataset: Any, most: int | None = None) -> list[Any]:
    """Return the items of a dataset, the first `most` of them; none of None."""
    return [] if dataset is None else [dataset[index] for index in range(len(dataset))[:most]]


def plain(item: Any) -> Any:
    """Return an item as JSON can hold it, for the store; other values become text."""
    return to_jsonable_python(item, fallback=str, bytes_mode="base64")


T = TypeVar("T")
Parts = dict[str, str]


class APO(Algorithm, Generic[T]):
    """Textual gradients and beam search over the first prompt template of the trainer's `initial_resources`.

    Each candidate is a version of the resources, each trial a rollout of the queue. A proposal that loses a placeholder
    is refused before any rollout.
    """

    def __init__(
        self,
        async_openai_client: Any,
        *,
        gradient_model: str = "gpt-5-mini",
        apply_edit_model: str = "gpt-4.1-mini",
        diversity_temperature: float = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        rollout_batch_timeout: float = 3600.0,
        run_initial_validation: bool = True,
        seed: int = 0,
        _poml_trace: bool = False,
    ) -> None:
        """`async_openai_client`: its `chat.completions.create` is awaited. `_poml_trace` has no effect."""
        self.async_openai_client = async_openai_client
        self.gradient_model, self.apply_edit_model = gradient_model, apply_edit_model
        self.diversity_temperature = diversity_temperature
        self.rollout_batch_timeout, self.seed = rollout_batch_timeout, seed
        self.size = {
            "beam_width": beam_width,
            "branch_factor": branch_factor,
            "beam_rounds": beam_rounds,
            "gradient_batch_size": gradient_batch_size,
            "val_batch_size": val_batch_size,
            "run_initial_validation": run_initial_validation,
        }
        self._best: tuple[float, PromptTemplate] | None = None
        self._versions: dict[str, str] = {}

    def get_seed_prompt_template(self) -> tuple[str, PromptTemplate]:
        """Return the first template of the initial resources, and its name. Raises ValueError if there is none."""
        for name, resource in (self.get_initial_resources() or {}).items():
            if isinstance(resource, PromptTemplate):
                return name, resource
        raise ValueError(
            "APO needs a prompt in initial_resources: Trainer(initial_resources={name: PromptTemplate})."
        )

    def get_adapter(self) -> TraceToMessages:
        """Return the trainer's, if it is one of messages; else a new one."""
        return self._adapter if isinstance(self._adapter, TraceToMessages) else TraceToMessages()

    def get_best_prompt(self) -> PromptTemplate:
        """Return the template with the best mean on the whole validation data so far. Raises ValueError before the
        first.
        """
        if self._best is None:
            raise ValueError("No best prompt found")
        return self._best[1]

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Search. Raises ValueError without data or template, RunFailed if the client's model writes no usable text."""
        self._name, self._template = self.get_seed_prompt_template()
        train = [("train", value) for value in rows(train_dataset)]
        held = [("val", value) for value in rows(val_dataset)]
        if not train or not held:
            raise ValueError("APO needs a train_dataset and a val_dataset with items.")
        first = {self._name: self._template.template}
        await resolve("searches", {}, "apo")(self, first, train, held, **self.size)

    # --- trials of the search: rollouts of the store, which the trainer's runners take -------------------------------

    stronger = "Pass APO a stronger apply_edit_model."
    useless = 0

    def narrate(self, text: str) -> None:
        _LOG.info("[APO] %s", text)

    def add(self, parts: Parts, parent: Parts | None) -> None:
        """Do nothing: a candidate is a version of the resources from its first trial on."""

    def _template_of(self, parts: Parts) -> PromptTemplate:
        return self._template.model_copy(update={"template": parts[self._name]})

    async def ask(self, prompt: str) -> str:
        return await self._answer(self.gradient_model, prompt)

    async def edit(self, prompt: str) -> str:
        return await self._answer(self.apply_edit_model, prompt)

    async def _answer(self, model: str, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        answer = await self.async_openai_client.chat.completions.create(
            model=model, messages=messages, temperature=self.diversity_temperature
        )
        return str(answer.choices[0].message.content or "")

    async def evaluate(
        self, parts: Parts, tasks: Sequence[tuple[RolloutMode, Any]]
    ) -> list[Episode]:
        """Return a rollout for each; one that fails, gives no reward or takes too long counts 0."""
        store = self.get_store()
        if (candidate := _id_of(parts)) not in self._versions:
            held: NamedResources = {
                **(self.get_initial_resources() or {}),
                self._name: self._template_of(parts),
            }
            self._versions[candidate] = (await store.add_resources(held)).resources_id
        queued = [
            await store.enqueue_rollout(value, mode, self._versions[candidate])
            for mode, value in tasks
        ]
        ids = [rollout.rollout_id for rollout in queued]
        ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=self.rollout_batch_timeout)
        known = {rollout.rollout_id: rollout for rollout in ended}
        return [await self._episode(known.get(rollout.rollout_id, rollout)) for rollout in queued]

    async def _episode(self, rollout: Rollout) -> Episode:
        """Return a rollout as the search reads it: messages, final reward and how it ended."""
        spans = await self.get_store().query_spans(rollout.rollout_id, "latest")
        reward = find_final_reward(spans)
        failed = Outcome.AGENT_ERROR if rollout.status == "failed" else Outcome.TIMEOUT
        solved = Outcome.SOLVED if (reward or 0.0) >= 1.0 else Outcome.FAILED
        calls = self.get_adapter().adapt(spans)
        asked = {"role": "user", "content": json.dumps(plain(rollout.input), ensure_ascii=False)}
        messages = [asked, *(message for call in calls[-1:] for message in call["messages"])]
        turns = [
            Turn(
                number,
                message["role"],
                (message,),
                0,
                0,
                calls=tuple(map(_call, message.get("tool_calls", ()))),
            )
            for number, message in enumerate(messages)
        ]
        # Without a reward it counts as 0, as in Agent-Lightning's APO (`evaluate_prompt_on_batch`).
        parts = (RewardPart("final reward", reward or 0.0, primary=True),)
        outcome = solved if rollout.status == "succeeded" else failed
        return Episode(
            rollout.rollout_id, "", turns=tuple(turns), reward_parts=parts, outcome=outcome
        )

    def keep_score(self, parts: Parts, name: str, episodes: Sequence[Episode]) -> float:
        mean = sum(episode.primary or 0.0 for episode in episodes) / len(episodes)
        self.narrate(f"prompt {_id_of(parts)}: {name} {mean:.3f}")
        if self._best is None or mean > self._best[0]:  # the first of equals stays
            self._best = mean, self._template_of(parts)
        return mean


def _id_of(parts: Parts) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=4).hexdigest()


def _call(call: Mapping[str, Any]) -> ToolCall:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return ToolCall(str(call.get("id", "")), name, arguments_of(arguments), str(arguments))
