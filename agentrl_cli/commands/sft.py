"""`agentrl sft`: fine-tunes on demonstrations or the store's best episodes; also makes what a recipe describes."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_cli.commands.common import (
    ConfigOption,
    DbOption,
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
from agentrl_cli.commands.outputs import writing
from agentrl_cli.commands.progress import Progress
from agentrl_cli.errors import ConfigError, RunFailed, UsageError

OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="The folder to write the model to.")
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="FOLDER",
        help="How a model is made: recipe.yaml, and recipe.py beside it.",
    ),
]
StepsOption = Annotated[int | None, typer.Option("--steps", min=1, help="Steps of demonstrations.")]
RateOption = Annotated[float | None, typer.Option("--lr", min=0, help="Peak learning rate.")]
ToolRateOption = Annotated[
    float | None,
    typer.Option("--tool-rate", min=0, max=1, help="Share of demonstrations that use the tool."),
]
FromStoreOption = Annotated[
    str | None,
    typer.Option(
        "--from-store",
        metavar="FILTER",
        help='Episodes of the store, e.g. "run:base outcome:solved".',
    ),
]
BestOfOption = Annotated[
    int | None,
    typer.Option(
        "--best-of", min=1, help="At most this many episodes of each task, the best ones."
    ),
]
EpochsOption = Annotated[
    int,
    typer.Option(
        "--epochs", min=1, help="Passes over the store's episodes or the file, without --steps."
    ),
]
ShareOption = Annotated[
    float | None,
    typer.Option(
        "--demonstrations",
        min=0.01,
        max=0.99,
        help="Share of demonstrations beside the store's episodes.",
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="FILE", help="Conversations of a JSONL file, e.g. OpenAI's."),
]
TeacherOption = Annotated[
    str | None,
    typer.Option(
        "--teacher",
        metavar="URL",
        help="An OpenAI-compatible address whose solved episodes are trained on.",
    ),
]
TeacherModelOption = Annotated[
    str | None, typer.Option("--teacher-model", help="Its name of the teacher.")
]
CountOption = Annotated[
    int, typer.Option("--count", "-n", min=1, help="With --teacher: tasks that it attempts.")
]
GroupOption = Annotated[
    int, typer.Option("--group", "-g", min=1, help="With --teacher: its attempts at each task.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Write into a folder that is not empty.")
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue a training from random weights that was stopped in OUT."
    ),
]
TEACHER_TOKENS = 512
"""Minimum tokens of a teacher's turn."""


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
    resume: ResumeOption = False,
    data: DataOption = None,
    from_store: FromStoreOption = None,
    best_of: BestOfOption = None,
    epochs: EpochsOption = 2,
    demonstrations: ShareOption = None,
    teacher: TeacherOption = None,
    teacher_model: TeacherModelOption = None,
    count: CountOption = 64,
    group: GroupOption = 1,
    project: ProjectOption = None,
    db: DbOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on demonstrations: a warm start before RL, or with --recipe a model from scratch or a pack's adapter.

    The packs' own demonstrations, or with --from-store or --best-of the store's best episodes; --demonstrations mixes
    both. --data trains on a file of conversations. With --teacher another model attempts the tasks (its key:
    remote.api_key_env); what it solved is trained on. A recipe may take hours: Ctrl-C finishes the step and saves,
    --resume continues.
    """
    stored = from_store is not None or best_of is not None or teacher is not None
    _require_fit(recipe, resume, stored, tool_rate, demonstrations)
    _require_data_alone(data, stored or recipe is not None or bool(pack))
    _require_teacher(teacher, from_store, teacher_model)
    given = _given(steps=steps, lr=lr, tool_rate=tool_rate, seed=seed)
    _require_folder(out)
    flags = {"model.name": model, "task.packs": pack or None}
    context = None if recipe is not None else open_project(project, db, config, sets, flags)
    with data_stdout(), writing(out, "sft", context.db if context else None):
        _require_empty(out, force or resume)
        if context is None:
            last = _from_recipe(recipe or "", given, out, resume)
        else:
            from_store = (
                from_store
                if teacher is None
                else _taught(context, teacher, teacher_model, count, group)
            )
            kept = (
                _FromStore(from_store or "", best_of, epochs, demonstrations or 0.0)
                if stored
                else None
            )
            last = _fine_tune(
                context, given, out, kept, (data, epochs) if data is not None else None
            )
        _conclude(out, last, as_json)


def _conclude(out: Path, loss: float, as_json: bool) -> None:
    if as_json:
        echo_json({"folder": str(out), "loss": loss})
    narrate(
        f"The model is in {out}; loss {loss:.3f}. Train it further: agentrl train --model {out}"
    )


def _require_fit(
    recipe: str | None,
    resume: bool,
    stored: bool,
    tool_rate: float | None,
    demonstrations: float | None,
) -> None:
    """Raises UsageError for options that do not go together."""
    if resume and recipe is None:
        raise UsageError(
            "--resume continues a --recipe.", hint="agentrl sft OUT --recipe FOLDER --resume"
        )
    if recipe is not None and stored:
        raise UsageError("--recipe and --from-store exclude each other.")
    if tool_rate is not None and stored and demonstrations is None:
        raise UsageError(
            "--tool-rate applies to the packs' demonstrations only, not to episodes from the store."
        )
    if demonstrations is not None and not stored:
        raise UsageError(
            "--demonstrations needs episodes from the store.", hint="Add --from-store or --best-of."
        )


def _require_data_alone(data: Path | None, others: bool) -> None:
    if data is not None and others:
        raise UsageError("--data excludes --recipe, --from-store, --best-of, --teacher and --pack.")


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _require_folder(out: Path) -> None:
    if any(place.is_file() for place in (out, *out.parents)):
        raise UsageError(f"{out} is not a folder.", hint="Name another: agentrl sft NEW-FOLDER")


def _require_empty(out: Path, kept: bool) -> None:
    if out.exists() and any(out.iterdir()) and not kept:
        raise UsageError(f"{out} is not empty.", hint="Name another folder, or use --force.")


def _require_teacher(teacher: str | None, from_store: str | None, model: str | None) -> None:
    """Raises UsageError for options that do not go with a teacher, or need one."""
    if teacher is not None and from_store is not None:
        raise UsageError(
            "--teacher and --from-store exclude each other: its episodes are selected by their reward."
        )
    if teacher is None and model:
        raise UsageError("--teacher-model needs --teacher.", hint="--teacher http://HOST:8000/v1")


def _taught(context: Any, url: str, model: str | None, count: int, group: int) -> str:
    """Let a teacher attempt training tasks; returns the filter of what it solved.

    Raises RunFailed if it solved none.
    """
    import asyncio

    from agentrl_cli.commands.rollout import sample

    config = context.config.model_copy(deep=True)
    endpoint = {
        "backend": "openai",
        "mode": "chat",
        "url": url,
        "model": model or config.remote.model,
    }
    config.remote = config.remote.model_copy(update=endpoint)
    # A teacher writes longer turns than the student has been configured for.
    config.rollout.max_new_tokens = max(config.rollout.max_new_tokens, TEACHER_TOKENS)
    config.rollout.max_tokens = max(config.rollout.max_tokens, 4 * TEACHER_TOKENS)
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


def _from_recipe(name: str, given: dict[str, Any], out: Path, resume: bool) -> float:
    """Make what a recipe describes; Ctrl-C or SIGTERM finishes the step."""
    from agentrl_cli.sft.recipe import RecipeRun, find_recipe, load_settings
    from agentrl_cli.sft.train import use_recipe

    path = find_recipe(name)
    settings = load_settings(path, given)
    stopped = threading.Event()
    with Progress("sft", 0) as progress, _stopping(stopped):
        losses = _Losses(progress)

        def report(step: int, steps: int, loss: float) -> None:
            progress.done, progress.total = step - 1, steps  # a resumed training begins further on
            losses(step, loss, 0.0)

        run = RecipeRun(
            settings=settings,
            path=path,
            folder=out,
            report=report,
            stopped=stopped.is_set,
            resume=resume,
        )
        done = use_recipe(run)
    if not done:
        narrate(
            f"Stopped after step {losses.step}. Continue: agentrl sft {out} --recipe {name} --resume"
        )
        raise typer.Exit(130)
    return losses.mean


@contextlib.contextmanager
def _stopping(stopped: threading.Event) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM set `stopped`; a second one does what it did before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: object) -> None:
        restore()
        stopped.set()
        narrate("stopping after this step; again to stop now")

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()


def _fine_tune(
    context: Any,
    given: dict[str, Any],
    out: Path,
    kept: _FromStore | None,
    data: tuple[Path, int] | None = None,
) -> float:
    """Fine-tune the configured model on the packs' demonstrations, the store's episodes, or a file's conversations."""
    from agentrl_cli.models.checkpoint import written_whole
    from agentrl_cli.models.save import save_model
    from agentrl_cli.policies.load import load_policy
    from agentrl_cli.sft import from_file
    from agentrl_cli.sft.demonstrations import Recipe
    from agentrl_cli.sft.from_store import batches
    from agentrl_cli.sft.train import train, with_demonstrations
    from agentrl_cli.store import Store
    from agentrl_cli.tasks import load_packs

    alone = data is not None or (kept is not None and not kept.share)
    packs = {} if alone else load_packs(context.config.task.packs, base=context.project)
    rows = from_file.read(data[0]) if data is not None else []
    for pack in packs.values():
        if not hasattr(pack.module, "demonstrate") and not pack.solver:
            raise ConfigError(
                f"The pack {pack.name} has no demonstrations.",
                hint="Its task.py needs `solve(row)` or `demonstrate(row, rng, tool_rate)`; or use --from-store, or"
                " --teacher.",
            )
    seed = int(given.get("seed", context.config.seed))
    with Store.open(context.db) if kept else contextlib.nullcontext() as store:
        loaded = load_policy(
            None, context.config, base=context.project, store=store, trainable=True
        )
        vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
        episodes = kept.episodes(store, loaded.hash, out.name, vocabulary) if kept else []
    shown = (
        min(Recipe.rows - 1, max(1, round(kept.share * Recipe.rows))) if kept and kept.share else 0
    )
    if kept:
        given = {"steps": max(1, -(-kept.epochs * len(episodes) // (Recipe.rows - shown))), **given}
    if data is not None:
        given = {"steps": max(1, -(-data[1] * len(rows) // Recipe.rows)), **given}
    recipe = Recipe(packs=dict.fromkeys(packs, 1.0), **{**given, "seed": seed})
    stream = batches(episodes, min(Recipe.rows - shown, len(episodes)), seed) if kept else None
    if data is not None:
        stream = from_file.batches(loaded.chat, rows, min(Recipe.rows, len(rows)), seed)
    if stream is not None and shown:
        stream = with_demonstrations(stream, loaded.chat, packs, recipe, shown)
    with Progress("sft", recipe.steps) as progress:
        losses = _Losses(progress)
        budget = context.config.train.token_budget
        train(loaded.model, loaded.chat, packs, recipe, losses, batches=stream, budget=budget)
    assert loaded.folder is not None
    with written_whole(out, keep=True) as folder:
        save_model(loaded.model, loaded.folder, folder)
    return losses.mean


@dataclasses.dataclass(frozen=True)
class _FromStore:
    """Selects the stored episodes to train on."""

    filter: str
    best_of: int | None
    epochs: int
    share: float = 0.0
    """Share of demonstrations in each step."""

    def episodes(self, store: Any, tokenizer: str, name: str, vocabulary: int) -> list[Any]:
        """Return the episodes, tagged with their use, so that `ls -f tag:sft-NAME` lists them."""
        from agentrl_cli.sft.from_store import choose

        limits: dict[str, Any] = {"best_of": self.best_of, "vocabulary": vocabulary}
        found = choose(store, self.filter, tokenizer, narrate=narrate, **limits)
        tasks = len({(episode.pack, episode.task_id) for episode in found})
        rewards = [episode.graded_reward for episode in found if episode.graded]
        mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "not graded"
        narrate(f"{len(found)} episodes of {tasks} tasks, {mean}; tagged sft-{name}")
        with store.transaction():
            for episode in found:
                store.marks.tag(episode.id, f"sft-{name}")
        return found


class _Losses:
    """Reports losses to the progress bar; `mean` is over the last fifty."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.step = 0
        self.last: list[float] = []

    def __call__(self, step: int, loss: float, seconds: float) -> None:
        self.step = step
        self.last = [*self.last[-49:], loss]
        self.progress.advance(f"loss {self.mean:.3f}")

    @property
    def mean(self) -> float:
        return sum(self.last) / max(1, len(self.last))
