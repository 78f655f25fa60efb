"""APO: textual gradients and beam search over prompts, by the steps of Agent-Lightning v0.x.

Each round, every parent of the beam is tried on a few training tasks, criticised, and edited; beam and children are
scored on one batch of validation tasks, the best stay, and the first of them is scored on all. The texts of the two
requests are this project's own. https://arxiv.org/abs/2305.03495
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress

from agentrl_cli.plugins.prompts.search import (
    BudgetSpent,
    Parts,
    Search,
    feedback,
    id_of,
    propose,
    scores,
)
from agentrl_cli.types import Task

CRITIQUE = """\
A language model follows these instructions:
```
{text}
```
Attempts that it made with them, and how each went:

{attempts}

Write a bullet list of concrete, testable changes to the instructions that would have made the attempts go better.
"""
EDIT = """\
These are the instructions of a language model:
```
{text}
```
A reviewer of its work suggests:

{critique}

Write the improved instructions between two lines of ```. Keep every placeholder such as {{name}} as it is.
"""


async def search(
    given: Search,
    first: Parts,
    train: Sequence[Task],
    validation: Sequence[Task],
    *,
    beam_width: int = 4,
    branch_factor: int = 4,
    beam_rounds: int = 3,
    gradient_batch_size: int = 4,
    val_batch_size: int = 16,
    run_initial_validation: bool = True,
) -> Parts:
    """Return the best candidate, when the rounds or the budget are at their end. Sizes have Agent-Lightning's names.

    `run_initial_validation`: the first candidate is scored before the search, so that only a better one replaces it.
    """
    rng = random.Random(given.seed)
    given.add(first, None)
    history = float("-inf")
    if run_initial_validation:
        history = given.keep_score(first, "validation", await given.evaluate(first, validation))
    best, beam = first, [first]
    batches = _batches(train, gradient_batch_size, rng)
    with suppress(BudgetSpent):
        for _ in range(beam_rounds):
            parents = rng.sample(beam, min(beam_width, len(beam)))
            parents = [parents[n % len(parents)] for n in range(beam_width)]
            children = []
            for parent in parents:
                for _ in range(branch_factor):
                    children.append(await _child(given, parent, next(batches), rng))
            known = {id_of(each): each for each in [*beam, *filter(None, children)]}
            batch = rng.sample(list(validation), min(val_batch_size, len(validation)))
            scored = []
            for each in known.values():
                episodes = await given.evaluate(each, batch)
                scored.append((sum(scores(episodes)) / len(episodes), each))
            beam = [each for _, each in sorted(scored, key=lambda pair: -pair[0])[:beam_width]]
            mean = given.keep_score(
                beam[0], "validation", await given.evaluate(beam[0], validation)
            )
            if mean > history:
                history, best = mean, beam[0]
    return best


async def _child(
    given: Search, parent: Parts, tasks: Sequence[Task], rng: random.Random
) -> Parts | None:
    """Return a critique of the parent's attempts, and the edit that follows it."""
    name = rng.choice(sorted(parent))
    episodes = await given.evaluate(parent, tasks)
    attempts = (
        "\n".join(f"{part}: {text}" for part, text in feedback(episode).items())
        for episode in episodes
    )
    critique = await given.ask(CRITIQUE.format(text=parent[name], attempts="\n\n".join(attempts)))
    edit = EDIT.format(text=parent[name], critique=critique if critique.strip() else "(nothing)")
    return await propose(given, parent, name, edit, block)


def block(answer: str) -> str:
    """Return the text between the first and the last ``` of an answer; without them all of it."""
    _, fence, rest = answer.partition("```")
    inner, closing, _ = rest.rpartition("```")
    if not fence:
        return answer.strip()
    text = inner if closing else rest
    head, newline, body = text.partition("\n")
    return (body if newline and " " not in head.strip() else text).strip()


def _batches(tasks: Sequence[Task], count: int, rng: random.Random) -> Iterator[list[Task]]:
    """Batches of the tasks in a new order each time round, for ever."""
    while True:
        order = list(tasks)
        rng.shuffle(order)
        for start in range(0, len(order), count):
            yield order[start : start + count]
