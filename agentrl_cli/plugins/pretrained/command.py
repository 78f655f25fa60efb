"""`agentrl model`: pretrained models by pip, and the contents of the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl_cli.commands.common import JsonOption, data_stdout, echo, echo_json, narrate
from agentrl_cli.commands.progress import Progress
from agentrl_cli.commands.tables import Format, print_rows
from agentrl_cli.paths import models_cache

app = typer.Typer(
    no_args_is_help=True, help="Pretrained models by pip, from whatever index it has."
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A name of `agentrl model ls`.")]


@app.command()
def get(name: NameArgument, as_json: JsonOption = False) -> None:
    """Fetch a model by pip and convert it, once: `--model NAME` then finds it.

    JSON: {"name", "folder"}
    """
    with data_stdout():
        from agentrl_cli.plugins.pretrained.fetch import get as fetch

        with Progress(name, bar=False):  # pip draws one
            folder = fetch(name)
        if as_json:
            echo_json({"name": name, "folder": str(folder)})
        else:
            echo(str(folder))
    narrate(f"Try it: agentrl chat --model {name}")


@app.command()
def ls(as_json: JsonOption = False) -> None:
    """List the models that can be fetched, and those in the cache with their size.

    JSON: [{"name", "cached": true, "mb", "licence", "from"}]
    """
    from agentrl_cli.plugins.pretrained.fetch import PACKAGES, cached

    here, rows = cached(), []
    for name in dict.fromkeys([*PACKAGES, *here]):
        package = PACKAGES.get(name)
        files = [path for path in (models_cache() / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) // 10**6 if name in here else None
        source = (package.licence, package.requirement) if package else ("", "a GGUF file")
        rows.append((name, name in here, size, *source))
    names = ("name", "cached", "mb", "licence", "from")
    print_rows(names, rows, Format.json if as_json else Format.table)


@app.command()
def rm(name: NameArgument) -> None:
    """Delete a model from the cache."""
    from agentrl_cli.plugins.pretrained.fetch import remove

    remove(name)
    narrate(f"{name} is no longer in {models_cache()}")
