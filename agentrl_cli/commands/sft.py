"""`agentrl sft`: supervised fine-tuning on demonstrations, and the making of the bundled model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_cli.commands.common import (
    ConfigOption,
    JsonOption,
    ModelOption,
    PackOption,
    ProjectOption,
    SeedOption,
    SetOption,
    data_stdout,
    echo_json,
    narrate,
    open_project,
)
from agentrl_cli.commands.progress import Progress
from agentrl_cli.errors import ConfigError, UsageError

OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="The folder that the model is written to.")]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", help='"tiny-agent" (how the bundled model was made) or a YAML file.')
]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Steps of demonstrations.")]
RateOption = Annotated[float | None, typer.Option("--lr", min=0, help="Peak learning rate.")]
ToolRateOption = Annotated[
    float | None, typer.Option("--tool-rate", min=0, max=1, help="Share of demonstrations that use the tool.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")]


def command(
    out: OutArgument,
    recipe: RecipeOption = None,
    model: ModelOption = None,
    steps: StepsOption = None,
    lr: RateOption = None,
    tool_rate: ToolRateOption = None,
    seed: SeedOption = None,
    pack: PackOption = None,
    force: ForceOption = False,
    project: ProjectOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on the packs' own demonstrations: a warm start before RL, or with --recipe a model from nothing."""
    if out.exists() and any(out.iterdir()) and not force:
        raise UsageError(f"{out} is not empty.", hint="Another folder, or --force.")
    given: dict[str, Any] = {"steps": steps, "lr": lr, "tool_rate": tool_rate, "seed": seed}
    given = {key: value for key, value in given.items() if value is not None}
    with data_stdout():
        if recipe is not None:
            last = _from_nothing(recipe, given, out)
        else:
            flags = {"model.name": model, "task.packs": pack or None}
            last = _fine_tune(open_project(project, None, config, sets, flags), given, out)
        if as_json:
            echo_json({"folder": str(out), "loss": last})
    narrate(f"The model is in {out}; loss {last:.3f}. Train it further: agentrl train --model {out}")


def _from_nothing(name: str, given: dict[str, Any], out: Path) -> float:
    from agentrl_cli.sft import load_recipe, make

    recipe = load_recipe(None if name == "tiny-agent" else Path(name))
    recipe = dataclasses.replace(recipe, **given)
    with Progress("sft", recipe.drills + recipe.steps) as progress:
        losses = _Losses(progress)
        make(recipe, out, losses)
    return losses.mean


def _fine_tune(context: Any, given: dict[str, Any], out: Path) -> float:
    """Fine-tune the configured model on the demonstrations of the configured packs."""
    from agentrl_cli.policies.local_load import load_policy, save_model
    from agentrl_cli.sft import Recipe, train
    from agentrl_cli.tasks import load_packs

    packs = load_packs(context.config.task.packs, base=context.project)
    for pack in packs.values():
        if not hasattr(pack.module, "generate") or not hasattr(pack.module, "demonstrate"):
            raise ConfigError(
                f"The pack {pack.name} has no demonstrations.",
                hint="Its task.py needs `generate(seed)` and `demonstrate(row, rng, tool_rate)`.",
            )
    loaded = load_policy(None, context.config, base=context.project, trainable=True)
    recipe = Recipe(packs=dict.fromkeys(packs, 1.0), **{"seed": context.config.seed, **given})
    with Progress("sft", recipe.steps) as progress:
        losses = _Losses(progress)
        train(loaded.model, loaded.chat, packs, recipe, losses)
    assert loaded.folder is not None
    out.mkdir(parents=True, exist_ok=True)
    save_model(loaded.model, loaded.folder, out)
    return losses.mean


class _Losses:
    """Reports to the progress bar; `mean` of the last fifty."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.last: list[float] = []

    def __call__(self, step: int, loss: float, seconds: float) -> None:
        self.last = [*self.last[-49:], loss]
        self.progress.advance(f"loss {self.mean:.3f}")

    @property
    def mean(self) -> float:
        return sum(self.last) / max(1, len(self.last))
