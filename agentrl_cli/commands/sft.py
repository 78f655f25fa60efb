"""`agentrl sft`: fine-tunes on demonstrations or the store's best episodes; also makes the model of a recipe."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_cli.commands.common import (
    Context,
    JsonOption,
    announce_loading,
    data_stdout,
    echo_json,
    narrate,
)
from agentrl_cli.commands.options import ForceOption, ModelOptions, RateOption, refuse_idle
from agentrl_cli.commands.progress import Progress
from agentrl_cli.errors import RunFailed, UsageError
from agentrl_cli.models.output_lock import writing

COUNT, GROUP, EPOCHS = 64, 1, 2
"""Tasks that a teacher attempts, its attempts at each, and passes over the data, by default."""
TEACHER_TOKENS = 512
"""Minimum tokens of a teacher's turn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """The data to train on. Raises UsageError for options that do not go together."""

    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="FOLDER",
            help="How a model is made: recipe.yaml, and recipe.py beside it.",
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue a training from random weights that was stopped in OUT."
        ),
    ] = False
    tool_rate: Annotated[
        float | None,
        typer.Option(
            "--tool-rate", min=0, max=1, help="Share of demonstrations that use the tool."
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Conversations of a file (JSONL, JSON, Parquet, CSV), e.g. of OpenAI's form.",
        ),
    ] = None
    from_store: Annotated[
        str | None,
        typer.Option(
            "--from-store",
            metavar="FILTER",
            help='Episodes of the store, e.g. "run:base outcome:solved".',
        ),
    ] = None
    best_of: Annotated[
        int | None,
        typer.Option(
            "--best-of", min=1, help="At most this many episodes of each task, the best ones."
        ),
    ] = None
    epochs: Annotated[
        int,
        typer.Option(
            "--epochs",
            min=1,
            help="Passes over the store's episodes or the file, without --steps.",
        ),
    ] = EPOCHS
    demonstrations: Annotated[
        float | None,
        typer.Option(
            "--demonstrations",
            min=0.01,
            max=0.99,
            help="Share of demonstrations beside the store's episodes.",
        ),
    ] = None
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            metavar="URL",
            help="An OpenAI-compatible address whose solved episodes are trained on; its model: remote.model.",
        ),
    ] = None
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="With --teacher: tasks that it attempts.")
    ] = COUNT
    group: Annotated[
        int,
        typer.Option(
            "--group", "-g", min=1, max=2**16, help="With --teacher: its attempts at each task."
        ),
    ] = GROUP

    @property
    def stored(self) -> bool:
        """Whether episodes of the store are trained on."""
        return bool(self.from_store is not None or self.best_of or self.teacher)

    def require_consistent(self, packs: bool, steps: bool) -> None:
        """Raise UsageError for options that do not go together."""
        of_packs = self.data is None and (not self.stored or self.demonstrations is not None)
        for wrong, text, hint in (
            (self.resume and self.recipe is None, "--resume continues a --recipe.",
             "agentrl sft OUT --recipe FOLDER --resume"),
            (self.recipe is not None and self.stored,
             "--recipe and --from-store exclude each other.", ""),
            (self.tool_rate is not None and not of_packs,
             "--tool-rate applies to the packs' demonstrations only, not to episodes from the store or a file.", ""),
            (self.demonstrations is not None and not self.stored,
             "--demonstrations needs episodes from the store.", "Add --from-store or --best-of."),
            (self.data is not None and (self.stored or self.recipe is not None or packs),
             "--data excludes --recipe, --from-store, --best-of, --teacher and --pack.", ""),
            (self.teacher is not None and self.from_store is not None,
             "--teacher and --from-store exclude each other: its episodes are selected by their reward.", ""),
            (self.teacher is None and (self.count, self.group) != (COUNT, GROUP),
             "--count and --group are of the attempts of a --teacher.", ""),
            (self.epochs != EPOCHS and (steps or (self.data is None and not self.stored)),
             "--epochs counts passes over the store's episodes or a file, without --steps.", ""),
        ):  # fmt: skip
            if wrong:
                raise UsageError(text, hint=hint)


def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write the model to.")],
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps of demonstrations.")
    ] = None,
    lr: RateOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    *,
    data: DataOptions,
    work: ModelOptions,
) -> None:
    """Train on demonstrations: a warm start before RL, or with --recipe a model from scratch or a pack's adapter.

    The packs' own demonstrations, or with --from-store or --best-of the store's best episodes; --demonstrations mixes
    both. --data trains on a file of conversations. With --teacher another model attempts the tasks (its key:
    remote.api_key_env); what it solved is trained on. A recipe may take hours: Ctrl-C finishes the step and saves,
    --resume continues.
    """
    data.require_consistent(bool(work.pack), steps is not None)
    settings = {"--model": work.model, "--pack": work.pack, "--config": work.config}
    refuse_idle("with --recipe", {**settings, "--set": work.sets} if data.recipe else {})
    given = {"steps": steps, "lr": lr, "tool_rate": data.tool_rate, "seed": work.seed}
    given = {key: value for key, value in given.items() if value is not None}
    if any(place.exists() and not place.is_dir() for place in (out, *out.parents)):
        raise UsageError(f"{out} is not a folder.", hint="Name another: agentrl sft NEW-FOLDER")
    context = None if data.recipe is not None else work.open({"model.name": work.model})
    with data_stdout(), writing(out, "sft", context.db if context else None):
        if out.exists() and any(out.iterdir()) and not (force or data.resume):
            raise UsageError(f"{out} is not empty.", hint="Name another folder, or use --force.")
        announce_loading(context.config.model.name if context else f"the recipe {data.recipe}")
        if context is None:
            loss = _use_recipe(data.recipe or "", given, out, data.resume)
        else:
            loss = _fine_tune(context, given, out, data)
        if as_json:
            echo_json({"folder": str(out), "loss": loss})
    further = f"agentrl train --model {shlex.quote(str(out))}"
    narrate(f"The model is in {out}; loss {loss:.3f}. Train it further: {further}")


class _Losses(Progress):
    """A progress bar with the mean of the last fifty losses."""

    def __init__(self) -> None:
        super().__init__("sft")
        self.last: deque[float] = deque(maxlen=50)

    def report(self, step: int, loss: float, seconds: float = 0.0) -> None:
        """Show the loss of a step; a resumed training begins further on."""
        self.done = step - 1
        self.last.append(loss)
        self.advance(f"loss {self.mean:.3f}")

    @property
    def mean(self) -> float:
        return sum(self.last) / max(1, len(self.last))


def _use_recipe(name: str, given: dict[str, Any], out: Path, resume: bool) -> float:
    """Make the model of a recipe and return the loss; Ctrl-C or SIGTERM finishes the step."""
    from agentrl_cli.sft.recipe import RecipeRun, find_recipe, load_settings, stop_on_signal
    from agentrl_cli.sft.train import use_recipe

    path = find_recipe(name)
    settings = load_settings(path, given)
    with _Losses() as losses, stop_on_signal(narrate) as stopped:

        def report(step: int, steps: int, loss: float) -> None:
            losses.total = steps
            losses.report(step, loss)

        done = use_recipe(
            RecipeRun(
                settings=settings,
                path=path,
                folder=out,
                report=report,
                stopped=stopped,
                resume=resume,
            )
        )
    if not done:
        again = f"agentrl sft {shlex.quote(str(out))} --recipe {shlex.quote(name)} --resume"
        narrate(f"Stopped after step {losses.done}. Continue: {again}")
        raise typer.Exit(130)
    return losses.mean


def _fine_tune(context: Context, given: dict[str, Any], out: Path, data: DataOptions) -> float:
    """Fine-tune the configured model and return the loss."""
    filter = data.from_store or ("" if data.stored else None)
    if data.teacher is not None:
        filter = _ask_teacher(context, data.teacher, data.count, data.group)
    from agentrl_cli.sft.fine_tune import fine_tune

    with _Losses() as losses:

        def start(steps: int) -> Callable[[int, float, float], None]:
            losses.total = steps
            return losses.report

        fine_tune(
            context.config,
            context.project,
            context.db,
            out,
            given,
            file=data.data,
            filter=filter,
            best_of=data.best_of,
            epochs=data.epochs,
            share=data.demonstrations or 0.0,
            start=start,
            narrate=narrate,
        )
    return losses.mean


def _ask_teacher(context: Context, url: str, count: int, group: int) -> str:
    """Let a teacher attempt training tasks; returns the filter of the solved ones.

    Raises RunFailed if it solved none.
    """
    from agentrl_cli.commands.rollout import sample

    rollout = context.config.rollout
    config = context.config.replace(
        remote={"backend": {"name": "openai", "mode": "chat"}, "url": url},
        rollout={  # a teacher writes longer turns than the student has been configured for
            "max_new_tokens": max(rollout.max_new_tokens, TEACHER_TOKENS),
            "max_tokens": max(rollout.max_tokens, 4 * TEACHER_TOKENS),
        },
    )
    teaching = dataclasses.replace(context, config=config)
    run, episodes = asyncio.run(sample(teaching, None, count, group, config.task.split_train, True))
    solved = sum(episode.solved for episode in episodes)
    narrate(f"the teacher solved {solved} of {len(episodes)} episodes of {run.name}")
    if not solved:
        error = next((episode.error for episode in episodes if episode.error), "")
        raise RunFailed(
            f"The teacher solved none of {len(episodes)} episodes. {error}".rstrip(),
            hint=f"Look inside one: agentrl replay last. List them: agentrl ls -f run:{run.name}",
        )
    return f"run:{run.name} outcome:solved"
