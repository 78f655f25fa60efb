"""`agentrl import minimind`: another project's weights as a model folder, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.commands.common import JsonOption, data_stdout, echo_json, narrate
from agentrl_cli.errors import UsageError
from agentrl_cli.models.output_lock import writing

SourceArgument = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="Its model folder, or its .pth file.")
]
OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="The folder to write, or a .pth file.")
]
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", help="The folder of a .pth file's tokenizer.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is in OUT.")]


def minimind(
    source: SourceArgument,
    out: OutArgument,
    tokenizer: TokenizerOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Import a model: minimind's own folder or .pth as a Hugging Face folder; to a .pth for its own loader.

    JSON: {"out", "parameters"}
    """
    source, out = source.expanduser(), out.expanduser()
    if out.exists() and (out.is_file() or any(out.iterdir())) and not force:
        raise UsageError(f"{out} exists.", hint="Name another one, or use --force.")
    with data_stdout(), writing(out, "import", None):
        from agentrl_cli.models.checkpoint import written_whole
        from agentrl_cli.plugins.minimind.model import convert

        if out.suffix == ".pth":
            count = convert(source, out)
        else:
            with written_whole(out, keep=True) as folder:
                count = convert(source, folder, tokenizer)
    if as_json:
        echo_json({"out": str(out), "parameters": count})
    narrate(
        f"{out}: {count:,} weights."
        + ("" if out.suffix == ".pth" else f" Try it: agentrl chat --model {out}")
    )
