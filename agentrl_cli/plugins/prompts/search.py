"""The base of both searches: candidates as rows, evaluations as episodes, a budget, a reflection model.

APO takes anything that has `Search`'s `seed`, `stronger`, `useless`, `narrate`, `add`, `ask`, `edit`, `evaluate` and
`keep_score`, whatever its tasks are: another plugin searches with it over trials of its own.

A search is a function of its seed and of what evaluations and reflections answer, and both are in the store. So one
that was killed is run again from its start, and its earlier results come from rows, at no cost.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl_cli.errors import RunFailed
from agentrl_cli.plugins.prompts.store import PromptRow, Prompts
from agentrl_cli.rollout import Job, Rollout, seed_of
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tasks import Pack
from agentrl_cli.tasks.pack import apply_template
from agentrl_cli.tasks.texts import explain_loss, with_parts
from agentrl_cli.types import Episode, Task
from agentrl_cli.types.content import content_text

Parts = dict[str, str]
Reflect = Callable[[str], Awaitable[str]]
"""A prompt to the reflection model's answer."""

REFLECTION = "reflection"
"""Kind of the events that hold the reflection model's answers."""
USELESS = 8
"""Answers in a row without a usable text after which a search ends."""
SHOWN = 1200
"""Characters of a transcript that the reflection model sees, head and tail."""


class BudgetSpent(Exception):
    """The next evaluation would exceed the budget."""


def id_of(parts: Mapping[str, str]) -> str:
    """Return the id of some texts."""
    return hashlib.blake2b(
        json.dumps(dict(parts), sort_keys=True).encode(), digest_size=4
    ).hexdigest()


async def propose(
    given: Search, parent: Parts, name: str, prompt: str, read: Callable[[str], str]
) -> Parts | None:
    """Return a child of a candidate with another text of one part, by the reflection model.

    None, with a line about it, if the answer has no usable text. Raises RunFailed after several of these.
    """
    text = read(await given.edit(prompt))
    reason = explain_loss(parent[name], text)
    if not reason:
        given.useless = 0
        child = {**parent, name: text}
        given.add(child, parent)
        return child
    given.useless += 1
    given.narrate(f"a proposal for {name} was refused: {reason}")
    if given.useless >= USELESS:
        raise RunFailed(
            f"The reflection model gave no usable text {USELESS} times in a row; the last: {reason}.",
            hint=given.stronger,
        )
    return None


@dataclass
class Search:
    """One optimisation of a pack's texts.

    Args of note: `rollout` samples with the pack as it is; `budget` counts episodes, each candidate's at a task once;
    `reflect` asks the reflection model.
    """

    store: Store
    run: RunRow
    pack: Pack
    rollout: Rollout
    reflect: Reflect
    seed: int
    budget: int
    origin: str
    narrate: Callable[[str], None] = lambda text: None
    stronger: str = "Name a stronger one with --reflect-with. What was found so far is kept."
    """Advice to the user about a reflection model that gives no usable text."""
    useless: int = 0
    """Answers in a row that had no usable text."""
    spent: int = 0
    asked: int = 0
    """Requests to the reflection model, those of an earlier process included."""
    _known: dict[tuple[str, str], Episode] = field(default_factory=dict)
    _stored: dict[tuple[str, str], str] = field(default_factory=dict)
    _answers: dict[str, str] = field(default_factory=dict)
    _times: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for row in self.store.episodes.rows(
            self.store.episodes.ids("kind:eval", "time", run=self.run.id)
        ):
            if row.outcome is not None and not row.outcome.is_error and row.group_id:
                candidate, _, _ = row.group_id.partition("/")
                self._stored[candidate, row.task_id] = row.id
        for event in self.store.journal.events(self.run.id, limit=1_000_000):
            if event["kind"] == REFLECTION:
                self._answers[event["data"]["key"]] = event["data"]["answer"]

    # --- candidates --------------------------------------------------------------------------------------------------

    def add(self, parts: Parts, parent: Parts | None) -> None:
        """Store a candidate."""
        above = None if parent is None else id_of(parent)
        origin = self.origin if parent else "seed"
        Prompts(self.store).add(PromptRow(self.run.id, id_of(parts), above, origin, parts))

    async def ask(self, prompt: str) -> str:
        """Return the reflection model's answer. The n-th time that a prompt is asked, its n-th answer is stored."""
        digest = hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()
        key = f"{digest}:{self._times[digest]}"
        self._times[digest] += 1
        self.asked += 1
        if key not in self._answers:
            answer = self._answers[key] = await self.reflect(prompt)
            self.store.journal.add_event(
                self.run.id, REFLECTION, {"key": key, "prompt": prompt, "answer": answer}
            )
            self.store.flush()
        return self._answers[key]

    edit = ask
    """Asks the model that writes texts: the same one."""

    # --- evaluations -------------------------------------------------------------------------------------------------

    async def evaluate(
        self, parts: Parts, tasks: Sequence[Task], free: bool = False
    ) -> list[Episode]:
        """One episode of a candidate at each task; those that exist are not made again. `free`: not of the budget.

        Raises BudgetSpent before any episode is made if the budget does not suffice, RunFailed if none can be graded.
        """
        candidate = id_of(parts)
        missing = [task for task in tasks if (candidate, task.id) not in self._known]
        if not free:
            if self.spent + len(missing) > self.budget:
                raise BudgetSpent(f"{self.spent} of {self.budget} episodes are spent.")
            self.spent += len(missing)
        pack = with_parts(self.pack, parts)
        jobs: list[Job] = []
        for task in missing:
            if (stored := self._stored.get((candidate, task.id))) is not None:
                self._known[candidate, task.id] = self.store.episodes.get(stored)
                continue
            seed = seed_of(self.seed, "optimize", task.id)
            group = f"{candidate}/{task.id}"
            jobs.append(
                Job(
                    with_prompt(task, self.pack, pack),
                    seed,
                    0,
                    group,
                    0,
                    self.run.id,
                    "eval",
                    len(jobs),
                )
            )
        made = await self.rollout.with_(packs={pack.name: pack}).run(jobs)
        for job, episode in zip(jobs, made, strict=True):
            self._known[candidate, job.task.id] = episode
            self.store.marks.tag(episode.id, f"prompt:{candidate}")
        found = [self._known[candidate, task.id] for task in tasks]
        if not any(map(is_graded, found)):
            raise RunFailed(
                f"None of {len(found)} episodes could be graded; the first: {found[0].outcome}: {found[0].error}",
                hint=f"agentrl replay {found[0].id}",
            )
        return found

    def keep_score(self, parts: Parts, name: str, episodes: Sequence[Episode]) -> float:
        """Store and return a candidate's mean on a set of tasks, over what could be graded."""
        mean = sum(scores(episodes)) / len(episodes)
        Prompts(self.store).score(self.run.id, id_of(parts), name, mean, self.spent)
        lost = len(episodes) - sum(map(is_graded, episodes))
        self.narrate(
            f"candidate {id_of(parts)}: {name} {mean:.3f}{f' without {lost} ungraded' if lost else ''}"
            f"  ({self.spent}/{self.budget} episodes, {self.asked} reflections)"
        )
        return mean

    def best(self) -> Parts:
        """Return the candidate with the best score on the validation tasks; the first of equals."""
        rows = [row for row in Prompts(self.store).all(self.run.id) if "validation" in row.scores]
        return dict(max(rows, key=lambda row: row.scores["validation"]).parts)


def is_graded(episode: Episode) -> bool:
    """Whether an episode says something about its texts."""
    return episode.primary is not None or not (episode.outcome and episode.outcome.is_error)


def scores(episodes: Sequence[Episode]) -> list[float]:
    """Return the primary reward part of each of several attempts, of which one at least is graded.

    One that could not be graded has the mean of the others, so that it speaks for no text and against none.
    """
    graded = [float(each.primary or 0.0) for each in episodes if is_graded(each)]
    mean = sum(graded) / len(graded)
    return [float(each.primary or 0.0) if is_graded(each) else mean for each in episodes]


def with_prompt(task: Task, old: Pack, new: Pack) -> Task:
    """Return a task with the new pack's system message where it has the old one's, and its template."""
    messages = apply_template(list(task.prompt), new.template, old.template)
    first = messages[0]
    if first["role"] == "system" and first.get("content") == old.system:
        messages[:1] = [{**first, "content": new.system}] if new.system else []
    elif new.system and first["role"] != "system":
        messages.insert(0, {"role": "system", "content": new.system})
    return replace(task, prompt=tuple(messages))


def feedback(episode: Episode) -> dict[str, str]:
    """Return an attempt as the reflection model reads it: the task, the actions, and how it went."""
    said: list[str] = []
    asked = ""
    for turn in episode.turns:
        for message in turn.messages:
            text = content_text(message.get("content"))
            if message["role"] == "system":
                continue
            if not asked and message["role"] == "user":
                asked = text
            else:
                said.append(f"{message['role']}: {text}")
        said += [
            f"call {call.name}: {call.raw if call.error else call.arguments}" for call in turn.calls
        ]
    parts = [
        f"{part.name} {part.value:g}" for part in episode.reward_parts if part.value is not None
    ]
    errors = [call.error for turn in episode.turns for call in turn.calls if call.error]
    errors += [result.error for turn in episode.turns for result in turn.results if result.error]
    how = [f"outcome: {episode.outcome}", f"reward parts: {', '.join(parts) or 'none'}"]
    how += [f"error: {_cut(error)}" for error in errors[:3]]
    return {
        "Inputs": _cut(asked),
        "Generated Outputs": _cut("\n".join(said)),
        "Feedback": "; ".join(how),
    }


def _cut(text: str) -> str:
    """Return the head and the tail of a long text."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}\n[…]\n{text[-SHOWN // 2 :]}"
