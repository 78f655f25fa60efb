"""The evidence of a diagnosis: steps, evaluations and some episodes of a training. Pure: read_evidence.py reads.

A training that falls far below its own best breaks everything else as well: calls, lengths, groups. So the rules about
the set-up see what was before the fall (`Evidence.before`), and those about the optimizer see it all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean, variance
from typing import Any

from agentrl_cli.types import Episode, Task, ToolCall, ToolResult
from agentrl_cli.types.content import content_text

Metrics = Mapping[str, Any]

MOST = 10
"""Steps at each end that are compared, at most; a quarter of short runs."""
FEWEST = 8
"""Steps below which nothing is concluded from both ends."""
LEAST = 0.02
"""Change below which a number has not moved, however steady it is."""
SHARE, DROP, SIGMAS = 0.5, 0.2, 2.5
"""A fall: solved at most this share of its best, at least so much below it, and so many standard errors."""
ANSWERS = ("answer", "expected", "target", "solution", "label", "gold")
"""Fields of a row that hold the right answer."""


@dataclass(frozen=True, slots=True)
class Change:
    """The mean of a metric at both ends of a run."""

    before: float
    after: float
    margin: float
    """Two standard errors of the difference, at least LEAST."""

    @property
    def word(self) -> str:
        if abs(self.after - self.before) < self.margin:
            return "stayed"
        return "rose" if self.after > self.before else "fell"

    @property
    def text(self) -> str:
        if self.word == "stayed":
            return f"stayed at {self.after:.2f}"
        return f"{self.word} from {self.before:.2f} to {self.after:.2f}"


@dataclass(frozen=True, slots=True)
class Fall:
    """A training far below its own best: the place of the best steps, and the share solved then and now."""

    start: int
    end: int
    """The best are steps[start:end]."""
    width: int
    """The newest steps that are compared."""
    best: float
    now: float


@dataclass(frozen=True, slots=True)
class Rate:
    """An evaluation during the training."""

    step: int
    solved: float
    tasks: int = 0

    @property
    def error(self) -> float:
        """Its standard error, by tasks."""
        return math.sqrt(self.solved * (1 - self.solved) / self.tasks) if self.tasks else 0.0


@dataclass(frozen=True)
class Evidence:
    """What is known of a training, the newest step last."""

    steps: Sequence[Metrics] = ()
    episodes: Sequence[Episode] = ()
    """Attempts at training tasks: of the newest step, or of the first and last ones of a stored run."""
    evals: Sequence[Rate] = ()
    tasks: Mapping[str, Task] = field(default_factory=dict)
    """Tasks of the training and of its evaluations, by id."""
    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = "last"
    width: int = 1
    """The newest steps over which a number is a mean."""
    trained: float | None = None
    """Episodes that the newest step was trained on; None: as its metrics have it."""
    compares: bool = True
    """Whether the estimator learns from spread within groups alone."""
    foreign: str = ""
    """The finding about calls that only another parser reads."""
    controls: Mapping[int, str] = field(default_factory=dict)
    """The control tokens of the tokenizer, by id."""
    same: tuple[int, int] = (0, 0)
    """Attempts of the newest evaluation that are token by token those of the first one, of so many compared."""
    state: tuple[str, str] = ("", "")
    """State and error of the run."""
    free: int | None = None
    """Bytes left on the disk of the store."""

    @property
    def now(self) -> Metrics:
        return self.steps[-1] if self.steps else {}

    @property
    def rows(self) -> list[Task]:
        """The tasks that are trained on."""
        split = self.get("task", "split_train", "train")
        return [task for task in self.tasks.values() if task.split == split]

    def get(self, section: str, key: str, default: Any = None) -> Any:
        """Return a setting of the run, `default` if it is not known."""
        found = self.config.get(section)
        value = found.get(key) if isinstance(found, Mapping) else None
        return default if value is None else value

    def series(self, key: str) -> list[float]:
        """Return the finite values of a metric."""
        found = (row.get(key) for row in self.steps)
        return [float(x) for x in found if isinstance(x, (int, float)) and math.isfinite(x)]

    def mean(self, key: str) -> float | None:
        """Return the mean of a metric over the newest steps, None if they lack it."""
        newest = replace(self, steps=self.steps[-self.width :]).series(key)
        return mean(newest) if newest else None

    def count(self, *keys: str) -> float:
        """Return the sum of some counts in the newest steps."""
        return sum(float(row.get(key) or 0) for row in self.steps[-self.width :] for key in keys)

    def change(self, key: str) -> Change | None:
        """Compare the first and the last steps in a metric; None if there are too few."""
        values = self.series(key)
        if len(values) < FEWEST:
            return None
        width = min(MOST, max(1, len(values) // 4))
        first, last = values[:width], values[-width:]
        error = math.sqrt(
            sum(variance(part) / len(part) for part in (first, last) if len(part) > 1)
        )
        return Change(mean(first), mean(last), max(LEAST, 2 * error))

    @cached_property
    def improved(self) -> bool:
        """Whether more is solved at the end than at the start."""
        found = self.change("solved")
        return found is not None and found.word == "rose"

    @cached_property
    def fall(self) -> Fall | None:
        """The fall, if the newest steps lie in one. Groups count as the units, since attempts at a task are alike."""
        solved, groups = self.series("solved"), int(self.get("rollout", "prompts_per_step", 8))
        for width in (1, 2, 3):
            spans = [(max(0, end - 3), end) for end in range(1, len(solved) - width + 1)]
            if not spans:
                return None
            best, start, end = max((mean(solved[a:b]), a, b) for a, b in spans)
            now, span = mean(solved[-width:]), end - start
            both = (best * span + now * width) / (span + width)
            error = math.sqrt(both * (1 - both) / groups * (1 / span + 1 / width))
            if now <= SHARE * best and best - now >= max(DROP, SIGMAS * error):
                return Fall(start, end, width, best, now)
        return None

    @cached_property
    def before(self) -> Evidence:
        """The evidence until the best steps, if the training fell since; else all of it."""
        if self.fall is None:
            return self
        steps = self.steps[: self.fall.end]
        last = max((int(row.get("step", 0)) for row in steps), default=0)
        kept = [one for one in self.episodes if (one.step or 0) <= last]
        return replace(self, steps=steps, episodes=kept, trained=None)

    @cached_property
    def graded(self) -> list[Episode]:
        """The graded episodes; if the training improved, those of its last steps: it has left the first behind."""
        found = [one for one in self.episodes if one.graded]
        if self.improved and found:
            last = max(one.step or 0 for one in found)
            found = [one for one in found if (one.step or 0) > last - 2]
        return found

    @cached_property
    def results(self) -> list[tuple[Episode, ToolCall, ToolResult]]:
        """Every call of the graded episodes with its answer."""
        return [
            (one, call, result)
            for one in self.graded
            for turn, after in zip(one.turns, one.turns[1:], strict=False)
            for call, result in zip(turn.calls, after.results, strict=False)
        ]

    def question(self, episode: Episode) -> str:
        """Return everything that an episode's model was given to read."""
        given = (m for turn in episode.turns if turn.role != "assistant" for m in turn.messages)
        return " ".join(content_text(message.get("content")) for message in given)

    def expected(self, episode: Episode) -> str:
        """Return the row's right answer as text, "" if no field holds one."""
        task = self.tasks.get(episode.task_id)
        found = (task.data.get(name) for name in ANSWERS) if task is not None else ()
        return next((plain(str(x)) for x in found if isinstance(x, (str, int, float))), "")


def final_text(episode: Episode) -> str:
    """Return the text of the model's last turn."""
    last = next((turn for turn in reversed(episode.turns) if turn.role == "assistant"), None)
    return " ".join(content_text(m.get("content")) for m in last.messages) if last else ""


def answer_of(episode: Episode) -> str:
    """Return the last line of the last turn, after its last colon."""
    lines = [line for line in final_text(episode).splitlines() if line.strip()]
    return plain(lines[-1].rpartition(":")[2]) if lines else ""


def plain(text: str) -> str:
    """Return an answer without what graders overlook: case, commas between digits, a full stop."""
    return text.strip().replace(",", "").rstrip(".").lower()


def most(texts: Sequence[str]) -> tuple[str, int]:
    """Return the most frequent text and its count."""
    return Counter(texts).most_common(1)[0] if texts else ("", 0)


def short(text: str, length: int = 80) -> str:
    """Return a text in one line, cut to a length."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"
