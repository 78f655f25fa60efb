"""Scanners: a user's function, or a question to a judge, over every episode; and how people agree with it.

    def gave_up(episode):                 # scanners.py; sync or async
        return "I don't know" in episode.turns[-1].messages[-1]["content"]

A judge is a YAML file: `question`, `url`, `model` and the judge's other keys (docs/tasks.md). Flagged episodes get the
tag `scan:NAME`. People label with tags in the screens: a tag NAME for yes, `not:NAME` for no.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import ConfigError, EnvError, describe_error
from agentrl_cli.evaluate.stats import Z
from agentrl_cli.hooks.threads import contain
from agentrl_cli.registry import resolve
from agentrl_cli.rewards.llm_client import Asked, ask
from agentrl_cli.store import EpisodeRow, Store
from agentrl_cli.store.queries import message_lines
from agentrl_cli.types import Episode

Scanner = Callable[[Episode], Any]
JUDGE = "Answer with the one word yes or no. {question}\n\nThe episode:\n{text}"
VERDICT = re.compile(r"\W*(yes(?!\w| *(?:/|and|or))|no(?! *[\w/]))", re.IGNORECASE)
"""One of the words at the start, and no before a mark alone: "Yes/no", "Not sure" and "No idea" decide nothing."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Cohen's kappa of a scanner with people's labels, with its 95 % interval."""

    kappa: float
    low: float
    high: float
    labelled: int


def load_scanner(target: str, base: Path) -> tuple[str, Scanner]:
    """Return the name and the function of `FILE.py:FUNCTION`, of a judge's YAML file or of an entry point.

    Raises NotFound, ConfigError, EnvError.
    """
    if not target.endswith((".yaml", ".yml")):
        return target.rpartition(":")[2], resolve("scanners", {}, target, base=base)
    given = load_yaml(base / target)
    if not isinstance(given, Mapping) or not given.get("question"):
        raise ConfigError(f"{target}: a judge needs `question`, `url` and `model`.")
    rest = dict(given)
    question = str(rest.pop("question"))
    name = str(rest.pop("name", Path(target).stem))
    asked = Asked.of(rest, target, (base / target).parent)

    async def judge(episode: Episode) -> bool:
        lines = (line for turn in episode.turns for line in message_lines(list(turn.messages)))
        prompt = JUDGE.format(question=question, text="\n".join(lines))
        answer = await ask(asked, [{"role": "user", "content": prompt}])
        word = VERDICT.match(answer)
        if word is None:
            raise EnvError(f"The judge answered neither yes nor no: {answer[:80]!r}")
        return word[1].lower() == "yes"

    return name, judge


async def scan(
    store: Store, rows: Sequence[EpisodeRow], name: str, scanner: Scanner
) -> tuple[list[str], list[tuple[str, str]]]:
    """Tag the episodes that the scanner flags; return the ids of these and (id, error) of those that it failed on."""
    flagged, failed = [], []
    for row in rows:
        try:
            with contain(name):
                found = scanner(store.episodes.get(row.id))
                found = await found if isinstance(found, Awaitable) else found
        except Exception as error:  # noqa: BLE001 - a user's code; counted and shown, the rest is scanned
            failed.append((row.id, describe_error(error)))
            continue
        (store.marks.tag if found else store.marks.untag)(row.id, f"scan:{name}")
        if found:
            flagged.append(row.id)
    return flagged, failed


def agree(rows: Sequence[EpisodeRow], flagged: Sequence[str], label: str) -> Agreement | None:
    """Compare with the tags `label` and `not:label`; None if fewer than two episodes have one.

    The interval is the large-sample one (Fleiss, Cohen and Everitt 1969, simplified for two classes).
    """
    marked = set(flagged)
    pairs = [
        (label in row.tags, row.id in marked)
        for row in rows
        if label in row.tags or f"not:{label}" in row.tags
    ]
    n = len(pairs)
    if n < 2:
        return None
    people, scanner = (sum(pair[side] for pair in pairs) / n for side in (0, 1))
    same = sum(mine == theirs for mine, theirs in pairs) / n
    chance = people * scanner + (1 - people) * (1 - scanner)
    if chance == 1:
        return Agreement(math.nan, math.nan, math.nan, n)
    kappa = (same - chance) / (1 - chance)
    half = Z * math.sqrt(same * (1 - same) / n) / (1 - chance)
    return Agreement(kappa, max(-1.0, kappa - half), min(1.0, kappa + half), n)
