"""`agentrl report`: what a run learned, as one HTML file or as Markdown with pictures."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.commands.common import DbOption, JsonOption, ProjectOption, echo_json, narrate
from agentrl_cli.commands.place import find_db
from agentrl_cli.errors import StoreError, UsageError

if TYPE_CHECKING:
    from agentrl_cli.reports.report import RunReport


class Form(StrEnum):
    """The form of a report."""

    html = "html"
    md = "md"


def command(
    run: Annotated[str, typer.Argument(help="A run: name, id or unique prefix; `last`.")] = "last",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The file, or a folder for it; default: report-RUN.html or .md, here.",
        ),
    ] = None,
    format: Annotated[
        Form, typer.Option("--format", help="html: one file; md: with SVG pictures beside it.")
    ] = Form.html,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    mask: Annotated[
        bool, typer.Option("--mask/--no-mask", help="Mask what looks like a secret.")
    ] = True,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Write a report of a run: curves, evaluations with intervals, flipped tasks, the best, worst and oddest episode.

    Settings and machine are in it too. The HTML is one file without scripts that loads nothing. The pictures of
    Markdown lie in a folder beside it: its name without `.md`, or with `-pictures` where it has no suffix.
    JSON: {"path", "pictures", "episodes", "flipped"}.
    """
    from agentrl_cli.reports.report import make_report
    from agentrl_cli.reports.report_pages import html_page, markdown_page
    from agentrl_cli.store import Store
    from agentrl_cli.tui.common.load_episode import token_texts

    with Store.open(find_db(project, db), readonly=True) as store:
        found = make_report(store, run, token_texts, masked=mask)
    path = out or Path()
    path = path / f"report-{found.run.name}.{format}" if path.is_dir() else path
    if path.exists() and not force:
        raise UsageError(f"{path} exists already.", hint="--force overwrites it.")
    try:
        if format is Form.html:
            _write(path, html_page(found))
        else:
            folder = (
                path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-pictures")
            )
            _pictures(folder, found)
            _write(path, markdown_page(found, folder.name))
    except OSError as error:
        raise StoreError(
            f"{path} could not be written: {error.strerror}.", hint="Choose another place."
        ) from error
    if json:
        pictures = [name for name, _ in found.pictures]
        episodes = {sample.why: sample.row.id for sample in found.samples}
        echo_json(
            {
                "path": path,
                "pictures": pictures,
                "episodes": episodes,
                "flipped": len(found.flipped),
            }
        )
    else:
        narrate(found.verdict)
        narrate(f"The report of {found.run.name} is in {path}.")


def _pictures(folder: Path, report: RunReport) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in report.pictures:
        _write(folder / f"{name}.svg", svg)


def _write(path: Path, text: str) -> None:
    """Writes a file, which appears only when it is complete."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
