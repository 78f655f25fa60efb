"""How a pack draws the rows of its splits: no question stands in two of them, nor among a model's demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

Row = dict[str, Any]

WORLD = ("setup",)
"""Fields besides the prompt that make a question in every pack; a pack adds its own by `WORLD` in its task.py."""


def question(prompt: Any, data: Mapping[str, Any], world: Sequence[str] = ()) -> str:
    """What makes two rows the same question: the prompt and the fields that say what it is asked about."""
    return repr((prompt, [data.get(name) or None for name in (*WORLD, *world)]))


def draw_splits(
    sizes: Mapping[str, int],
    rows_of: Callable[[str, int], Iterator[Row]],
    *,
    world: Sequence[str] = (),
    generate: Callable[[int], Iterator[Row]] | None = None,
    shown: Mapping[int, int] | None = None,
) -> dict[str, list[Row]]:
    """The rows of every split, with ids; a split without rows is left out. The same arguments give the same rows.

    Args:
        sizes: Split to the number of its rows.
        rows_of: Makes the endless rows of a split from its name and its place in `sizes`.
        world: The pack's own fields that make two rows with one prompt two questions.
        generate: Makes the rows that models were shown, from a seed.
        shown: Seed to how many of these rows stand in demonstrations: no split may have one of them.
    """
    known = (row for seed, count in (shown or {}).items() if generate for row in islice(generate(seed), count))
    seen = {question(row["prompt"], row, world) for row in known}
    splits: dict[str, list[Row]] = {}
    for number, (split, count) in enumerate(sizes.items()):
        rows: list[Row] = []
        for row in rows_of(split, number) if count else ():
            key = question(row["prompt"], row, world)
            if key in seen:
                continue
            seen.add(key)
            rows.append({"id": f"{split}-{len(rows):04d}", **row})
            if len(rows) == count:
                break
        if rows:
            splits[split] = rows
    return splits
