"""GEPA through its own package: reflective evolution of prompts on a Pareto front. https://arxiv.org/abs/2507.19457

The package is synchronous, so it runs in a thread; evaluations and reflections run in the caller's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

from agentrl_cli.plugins.prompts.search import BudgetSpent, Parts, Search, feedback, propose, scores
from agentrl_cli.types import Episode, Task

T = TypeVar("T")


async def search(
    given: Search, first: Parts, train: Sequence[Task], validation: Sequence[Task], minibatch: int
) -> Parts:
    """Return the best candidate, when every validation task is solved or the budget is at its end."""
    given.add(first, None)
    adapter = Adapter(given, asyncio.get_running_loop(), validation)
    running = asyncio.ensure_future(
        asyncio.to_thread(_optimize, adapter, first, train, validation, minibatch)
    )
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        adapter.stopped = True
        raise
    return given.best()


def _optimize(adapter: Adapter, first: Parts, train: Any, validation: Any, minibatch: int) -> None:
    from gepa.api import optimize
    from gepa.utils.stop_condition import ScoreThresholdStopper

    given, bridge = adapter.given, cast(Any, adapter)
    try:
        optimize(
            seed_candidate=first,
            trainset=list(train),
            valset=list(validation),
            adapter=bridge,
            reflection_minibatch_size=minibatch,
            skip_perfect_score=True,
            max_metric_calls=given.budget
            * 10,  # a candidate's second visit to a task is free here, and not there
            stop_callbacks=[ScoreThresholdStopper(1.0), lambda state: adapter.over],
            logger=_Silent(),
            seed=given.seed,
            raise_on_exception=True,
        )
    except BudgetSpent:
        return
    if adapter.failed is not None:
        raise adapter.failed


class _Silent:
    def log(self, message: str) -> None:
        """Nothing: what matters is narrated, and stdout is data."""


class Adapter:
    """Between the package and a search: GEPAAdapter by its methods."""

    def __init__(
        self, given: Search, loop: asyncio.AbstractEventLoop, validation: Sequence[Task]
    ) -> None:
        self.given = given
        self.loop = loop
        self.validation = [task.id for task in validation]
        self.stopped = False
        self.idle = 0
        """Evaluations in a row that cost nothing: the search has nothing new to try."""
        self.failed: Exception | None = None
        """Why it ended early. The package swallows what is raised while it asks for a text."""

    @property
    def over(self) -> bool:
        """Whether the package is to stop."""
        return self.stopped or self.failed is not None or self.idle > self.given.budget

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self.stopped:
            work.close()
            raise BudgetSpent("stopped")
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result()
        except BudgetSpent:
            raise
        except Exception as error:
            self.failed = error
            raise

    def evaluate(
        self, batch: Sequence[Task], candidate: Parts, capture_traces: bool = False
    ) -> Any:
        """One episode for each task."""
        from gepa.core.adapter import EvaluationBatch

        before = self.given.spent
        episodes = self._call(self.given.evaluate(candidate, batch))
        self.idle = 0 if self.given.spent > before else self.idle + 1
        if [task.id for task in batch] == self.validation:
            self.given.keep_score(candidate, "validation", episodes)
        traces = episodes if capture_traces else None
        return EvaluationBatch(outputs=episodes, scores=scores(episodes), trajectories=traces)

    def make_reflective_dataset(
        self, candidate: Parts, eval_batch: Any, components_to_update: Sequence[str]
    ) -> Mapping[str, Sequence[Mapping[str, str]]]:
        """Return the attempts as the reflection model reads them."""
        episodes: Sequence[Episode] = eval_batch.trajectories
        return {name: [feedback(each) for each in episodes] for name in components_to_update}

    def propose_new_texts(
        self,
        candidate: Parts,
        reflective_dataset: Mapping[str, Any],
        components_to_update: Sequence[str],
    ) -> Parts:
        """GEPA's own request, with the checks of a search. A refused proposal leaves the parent's text."""
        from gepa.strategies.instruction_proposal import InstructionProposalSignature as Proposal

        texts: Parts = {}
        for name in components_to_update:
            fields = {
                "current_instruction_doc": candidate[name],
                "dataset_with_feedback": reflective_dataset[name],
                "prompt_template": None,
            }
            prompt = str(Proposal.prompt_renderer(fields))

            def read(answer: str) -> str:
                return str(Proposal.output_extractor(answer)["new_instruction"])

            child = self._call(propose(self.given, candidate, name, prompt, read))
            texts[name] = candidate[name] if child is None else child[name]
        return texts
