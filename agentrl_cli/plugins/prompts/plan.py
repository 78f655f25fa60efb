"""The settings of a search, as options of its command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a search: the same ones continue it."""

    method: Annotated[Literal["gepa", "apo"], typer.Option(help="The search.")] = "gepa"
    budget: Annotated[int, typer.Option(min=1, help="Episodes that the search may make.")] = 400
    reflect_with: Annotated[
        str,
        typer.Option(help="What writes the prompts: served, http://host/v1, or file.py:function."),
    ] = "served"
    reflect_model: Annotated[str, typer.Option(help="The model's name at that address.")] = ""
    parts: Annotated[
        list[str] | None,
        typer.Option(
            "--part", help="system or tools.NAME.description; repeatable. Default: system."
        ),
    ] = None
    train: Annotated[
        int, typer.Option("--train-tasks", min=1, help="Training tasks to learn from.")
    ] = 32
    validation: Annotated[
        int, typer.Option("--validation-tasks", min=1, help="Tasks that choose the best.")
    ] = 16
    test: Annotated[
        int, typer.Option("--test-tasks", min=0, help="Tasks of the final comparison; 0: none.")
    ] = 64
    minibatch: Annotated[int, typer.Option(min=1, help="Attempts that one reflection sees.")] = 4
    beam: Annotated[int, typer.Option(min=1, help="apo: prompts that stay after a round.")] = 2
    branch: Annotated[int, typer.Option(min=1, help="apo: new prompts of each in a round.")] = 2
    rounds: Annotated[int, typer.Option(min=1, help="apo: rounds.")] = 3
    temperature: Annotated[
        float, typer.Option("--temperature", "-T", min=0, help="0 is greedy.")
    ] = 0.0
