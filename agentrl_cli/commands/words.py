"""`agentrl words`: the legend of the screens and the store."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl_cli.commands.common import JsonOption, console, echo, echo_json


def command(
    word: Annotated[
        str, typer.Argument(help="A word, label, flag, outcome or rule. None: the whole legend.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Explain the words of the screens: labels, layers, flags, outcomes, facts, rules. W shows the same in a screen.

    --json prints {section: {word: meaning}}.
    """
    from agentrl_cli.reports.legend import find_words, legend_lines

    found = find_words(word)
    if json:
        return echo_json(found)
    for line in legend_lines(found, min(console().width, 100)):
        echo(line)
