"""Draws the rows of a pack's splits: no question is in two of them, or in a model's demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from agentrl_cli.errors import DataError

Row = dict[str, Any]

PLACEHOLDER = "TODO:"
"""How the prompt of a row begins that is still to be written; `agentrl check` reports it."""

MOST_REPEATED = 100_000
"""Rows in a row that repeat earlier questions before drawing gives up."""

WORLD = ("setup", "sample")
"""Fields besides the prompt that identify a question in every pack, `sample` being a world's seed or its place among
another project's tasks; a pack adds its own as `WORLD` in its task.py."""


def question(prompt: Any, data: Mapping[str, Any], world: Sequence[str] = ()) -> str:
    """Return the key of a row's question: the prompt and the fields that it refers to."""
    return repr((prompt, [data.get(name) or None for name in (*WORLD, *world)]))


def draw_splits(
    sizes: Mapping[str, int],
    rows_of: Callable[[str, int], Iterator[Row]],
    *,
    world: Sequence[str] = (),
    generate: Callable[[int], Iterator[Row]] | None = None,
    shown: Mapping[int, int] | None = None,
) -> dict[str, list[Row]]:
    """Return the rows of every split, with ids; splits without rows are left out. Deterministic.

    Raises DataError if there are not so many different questions.

    Args:
        sizes: Maps a split to its number of rows.
        rows_of: Makes an endless iterator of a split's rows from its name and its index in `sizes`.
        world: The pack's own fields that make two rows with the same prompt different questions.
        generate: Makes the rows of demonstrations, from a seed.
        shown: Maps a seed to the number of its rows used in demonstrations: no split may contain one of them.
    """
    known = (
        row
        for seed, count in (shown or {}).items()
        if generate
        for row in islice(generate(seed), count)
    )
    seen = {question(row["prompt"], row, world) for row in known}
    splits: dict[str, list[Row]] = {}
    for number, (split, count) in enumerate(sizes.items()):
        rows: list[Row] = []
        repeated = 0
        for row in rows_of(split, number) if count else ():
            key = question(row["prompt"], row, world)
            repeated = repeated + 1 if key in seen else 0
            if repeated == MOST_REPEATED:
                raise DataError(
                    f"The split {split} has {len(rows)} of {count} rows,"
                    f" and the next {repeated:,} drawn repeat earlier questions.",
                    hint="Ask for fewer rows, or let `rows_of` make more of them; see `world`.",
                )
            if repeated:
                continue
            seen.add(key)
            rows.append({"id": f"{split}-{len(rows):04d}", **row})
            if len(rows) == count:
                break
        if rows:
            splits[split] = rows
    return splits
