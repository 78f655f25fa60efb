"""The settings of a recipe, and its demonstrations: fresh rows of packs with their solutions, and drills."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict

from agentrl_cli.chat.images import place_images
from agentrl_cli.chat.render import Chat
from agentrl_cli.config.yamlfile import read_as
from agentrl_cli.errors import ConfigError
from agentrl_cli.learning.packing import Segment
from agentrl_cli.tasks import Pack, question
from agentrl_cli.tasks.media import with_media
from agentrl_cli.types import Origin, Task

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
KNOWN = 1000
"""Generated rows in a row that stand in a pack's files, after which its generator is taken to have no others."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The settings of every recipe: how long, how fast, how large."""

    steps: int = 200
    rows: int = 16
    """Conversations in a step."""
    lr: float = 3e-4
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.0
    """Peak learning rate of Muon for the matrices of the hidden layers; 0: AdamW for all."""
    warmup: int = 20
    decay: float = 0.4
    """The last share of the steps, over which the rates fall linearly."""
    drills: int = 0
    """First steps in which the model copies random tokens."""
    vocabulary: int = 768
    texts: int = 4000
    """Conversations that the tokenizer is trained on."""
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def rate(self, step: int, total: int, least: float) -> float:
        """Factor on the learning rates: a linear warm-up, level, a linear fall to `least`.

        The warm-up takes at most a quarter of the steps: a short training would never reach its rate.
        """
        warmup = min(self.warmup, max(1, total // 4))
        falling = (total - step) / max(1.0, self.decay * total)
        return min(1.0, (step + 1) / max(1, warmup), max(least, falling))


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Steps on a part of a recipe's families, before the rest of it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    steps: int
    families: Sequence[str] = ()
    """Of the packs' rows; empty: all that are trained on."""
    tool_rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe(Schedule):
    """Everything that decides the weights. The drills come first, then the lessons, then `steps` demonstrations."""

    packs: Mapping[str, float]
    """Pack → how often it is drawn, relative to the others."""
    tool_rate: float = 1.0
    """Share of demonstrations that use the tool where one is needed."""
    lessons: Sequence[Lesson] = ()
    architecture: Mapping[str, Any] | None = None
    """Arguments of Qwen3Config, or `text`, `vision` and `pixels` (from_nothing.py); None: fine-tune a given model."""
    adapter: Mapping[str, Any] | None = None
    """Keys of the section `adapter` of the configuration: train a LoRA adapter of the bundled model."""

    @property
    def total(self) -> int:
        """All steps: drills, lessons and the rest."""
        return self.drills + sum(lesson.steps for lesson in self.lessons) + self.steps


def parse_recipe(settings: Mapping[str, Any], path: Path) -> Recipe:
    """Return the recipe of a file's settings; null is the default.

    Raises ConfigError for an unknown or missing key, or a bad value.
    """
    if "packs" not in settings:
        raise ConfigError(
            f"{path} is not a recipe of packs: it has no `packs`.",
            hint="A recipe without `packs` has a recipe.py beside it.",
        )
    given = {key: value for key, value in settings.items() if value is not None}
    return read_as(Recipe, given, str(path), [one.name for one in fields(Recipe)])


def demonstrations(
    recipe: Recipe, packs: Mapping[str, Pack], seed: int, families: Sequence[str] = ()
) -> Iterator[tuple[Pack, dict[str, Any], list[Any]]]:
    """Yield (pack, row, messages) without end: fresh rows, never one whose question stands in `data/`.

    `families` are those of a lesson; by default all that are trained on. Raises ConfigError for an unknown one, and
    for a pack that generates no row of them or solves none.
    """
    for pack in packs.values():
        if unknown := set(families) - {task.family for task in pack.tasks("train")}:
            raise ConfigError(
                f"A lesson names families that {pack.name} does not train on:"
                f" {', '.join(sorted(unknown))}."
            )
    rng = random.Random(f"demonstrations {seed}")
    rows = {name: _fresh(pack, 1000 + seed) for name, pack in packs.items()}
    unsolved = 0
    while True:
        name = rng.choices(list(recipe.packs), list(recipe.packs.values()))[0]
        pack = packs[name]
        row = next(
            (
                row
                for row in itertools.islice(rows[name], 10 * KNOWN)
                if not families or row.get("family", "") in families
            ),
            None,
        )
        if row is None:
            raise ConfigError(f"{pack.name} generates no rows of {', '.join(families)}.")
        messages = (
            pack.module.demonstrate(row, rng, recipe.tool_rate)
            if hasattr(pack.module, "demonstrate")
            else pack.module.solve(row)
        )
        unsolved = 0 if messages else unsolved + 1
        if unsolved == KNOWN:
            raise ConfigError(f"{pack.name} has no solution of {unsolved} rows, one after another.")
        if messages:
            yield pack, row, [*_task(pack, row).prompt, *messages]


def _fresh(pack: Pack, seed: int) -> Iterator[dict[str, Any]]:
    """Endless rows for demonstrations: the pack's generated ones that are not in its files.

    Without a generator, or once it gives nothing new, the rows of the training split in turn. Raises ConfigError if
    that is empty.
    """
    if hasattr(pack.module, "generate"):
        splits = [split for split in pack.splits() if split not in pack.sources]
        taken = {_question(pack, task) for split in splits for task in pack.read(split)[0]}
        known = 0
        for row in pack.module.generate(seed):
            new = _question(pack, _task(pack, row)) not in taken
            known = 0 if new else known + 1
            if new:
                yield row
            elif known >= KNOWN:
                break
    plain = replace(pack, template="{prompt}")  # `_task` writes the prompt into the template
    rows = [{"prompt": list(task.prompt), **task.data} for task in plain.tasks("train")]
    if not rows:
        raise ConfigError(f"{pack.name} has no rows to train on: its split 'train' is empty.")
    while True:
        yield from random.Random(seed).sample(rows, len(rows))
        seed += 1


def _task(pack: Pack, row: Mapping[str, Any]) -> Task:
    return pack.task(with_media({"id": "demo", **row}), "demo")


def _question(pack: Pack, task: Task) -> str:
    return question(task.prompt, task.data, getattr(pack.module, "WORLD", ()))


def encode(chat: Chat, pack: Pack, messages: Sequence[Any]) -> Segment:
    """Return a demonstration as the forward sees it: ids, and which of them the model would have sampled."""
    shown, images = place_images(messages, (), chat.images, pack.dir)
    rendered = chat.conversation(shown, pack.schemas)
    trained = np.asarray(rendered.origin) == Origin.MODEL
    return Segment(np.asarray(rendered.ids, np.int32), trained, images)


def drill(
    rng: random.Random, digits: Sequence[int], vocabulary: int, rows: int
) -> list[list[Segment]]:
    """Rows of random tokens that stand there twice; the second time is trained.

    Some are drawn from all tokens, some from a few, some mostly from the digits, so that a copy has to look at what
    came before and not at single tokens.
    """
    first, start, end = len(SPECIALS), 1, 2
    out = []
    for _ in range(rows):
        kind, count = rng.random(), rng.randint(8, 48)
        few = [rng.randrange(first, vocabulary) for _ in range(rng.randint(6, 20))]
        if kind < 0.4:
            text = [rng.randrange(first, vocabulary) for _ in range(count)]
        elif kind < 0.7:
            text = [rng.choice(few) for _ in range(count)]
        else:
            text = [
                rng.choice(digits) if rng.random() < 0.75 else rng.choice(few) for _ in range(count)
            ]
        before, between = (
            [rng.randrange(first, vocabulary) for _ in range(rng.randint(0, 20))] for _ in range(2)
        )
        given = [start, *before, start, *text, end, *between, start]
        ids = np.asarray([*given, *text, end], np.int32)
        out.append([Segment(ids, np.arange(len(ids)) >= len(given))])
    return out
