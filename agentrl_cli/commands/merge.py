"""`agentrl merge`: a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    JsonOption,
    RunOption,
    data_stdout,
    echo,
    echo_json,
    narrate,
    warn,
)
from agentrl_cli.commands.options import ForceOption, ProjectOptions, plugin_settings
from agentrl_cli.commands.progress import Progress
from agentrl_cli.errors import NotFound, UsageError
from agentrl_cli.models.output_lock import writing
from agentrl_cli.registry import resolve

if TYPE_CHECKING:
    from agentrl_cli.store import Store

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="[CHECKPOINT]",
        help="RUN@best, best, last, a step, an adapter or model folder.",
        autocompletion=completion.checkpoints,
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype", help="auto (as stored; an adapter: as its base), float32, bfloat16, float16."
    ),
]


def command(
    checkpoint: SourceArgument,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)
    ] = None,
    run: RunOption = None,
    dtype: DtypeOption = "auto",
    force: ForceOption = False,
    as_json: JsonOption = False,
    *,
    where: ProjectOptions,
) -> None:
    """Write a checkpoint as a plain Hugging Face folder: weights, tokenizer, chat template, model card.

    An adapter is merged into its base. A single argument is OUT: the newest run's best checkpoint is written there.

    JSON: {"folder", "source", "adapter": true, "dtype": "float32", "files": […]}
    """
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        hint = "Choose auto, float32, bfloat16 or float16."
        raise UsageError(f"Unknown --dtype {dtype}.", hint=hint)
    target, name = (Path(checkpoint), None) if out is None else (out, checkpoint)
    context = where.open(required=False)
    with data_stdout(), writing(target.expanduser(), "merge", context.db):
        from agentrl_cli.models.merge import merge
        from agentrl_cli.reports.model_card import model_card
        from agentrl_cli.store import Store

        narrate(f"Writing {target} …")
        opened = Store.open(context.db, readonly=True) if context.db.is_file() else nullcontext()
        with opened as store, Progress("merge"):
            full = _name_checkpoint(store, name, run)
            done = merge(
                full,
                target.expanduser(),
                context.config.model,
                base=context.project,
                store=store,
                dtype=dtype,
                force=force,
                card=partial(model_card, full, store),
            )
        done = replace(done, files=(*done.files, *_write_forms(done.folder)))
        if as_json:
            echo_json(done)
        else:
            echo(str(done.folder))
            what = "adapter merged into its base" if done.adapter else "full weights"
            chat = f"agentrl chat --model {shlex.quote(str(done.folder))}"
            narrate(f"{full}: {what}, {done.dtype}. Try it: {chat}")


def _name_checkpoint(store: Store | None, name: str | None, run: str | None) -> str:
    """Return the full name of the checkpoint to write. Raises NotFound if nothing was trained."""
    from agentrl_cli.store.checkpoint_names import explain_best, full_name

    full = full_name(store, name, run) if store is not None else name
    if full is None:
        hint = "`agentrl train` trains; or name a model folder: agentrl merge FOLDER OUT"
        raise NotFound("Nothing was trained here yet.", hint=hint)
    if store is not None and (doubt := explain_best(store, full)):
        warn(doubt)
    return full


def _write_forms(folder: Path) -> list[str]:
    """Write the forms of the model that the options of plugins ask for. Returns the names of their files."""
    asked = [(name, value) for name, value in plugin_settings().items() if value is not None]
    return [resolve("writers", {}, name)(folder, value).name for name, value in asked]
