"""`APO(client)`: the search of `agentrl optimize --method apo` over a script's queue, agent and OpenAI client."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from agentrl_cli.agents.gateway.messages import arguments_of
from agentrl_cli.plugins.lightning.adapter import TraceToMessages
from agentrl_cli.plugins.lightning.algorithm.base import Algorithm, rows
from agentrl_cli.plugins.lightning.algorithm.training import plain
from agentrl_cli.plugins.lightning.emitter import find_final_reward
from agentrl_cli.plugins.lightning.types import NamedResources, PromptTemplate, Rollout, RolloutMode
from agentrl_cli.registry import resolve
from agentrl_cli.types import Episode, Outcome, RewardPart, ToolCall, Turn

T = TypeVar("T")
Parts = dict[str, str]
_LOG = logging.getLogger(__name__)


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

    def add(self, parts: Parts, parent: Parts | None) -> str:
        return _id_of(parts)

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
        parts = () if reward is None else (RewardPart("final reward", reward, primary=True),)
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
