"""Calls in a syntax that the parser does not read: the model speaks another family's, and no tool is ever executed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from agentrl_cli.chat.parse import Parsed, parse_text
from agentrl_cli.chat.parsers import PARSERS, Parser, candidates
from agentrl_cli.chat.parsers.base import UNMARKED, load_parser
from agentrl_cli.types import ToolSchema


def foreign_parser(text: str, parsed: Parsed, own: Parser, tools: Sequence[ToolSchema]) -> str:
    """The parser that reads the calls of a turn in which `own` read none; empty if there is none.

    `parsed` is the turn as `own` read it. One that reads a whole call is named first; where `own` saw no call at all,
    also one whose markers begin a call that is malformed.
    """
    if not _marker().search(text):
        return ""
    others = [parser for parser in candidates(text) if parser.name not in (own.name, *UNMARKED)]
    found = [(parser.name, parse_text(text, parser, tools).calls) for parser in others]
    whole = [name for name, calls in found if any(call.arguments is not None for call in calls)]
    begun = [name for name, calls in found if calls and not parsed.calls]
    return next(iter([*whole, *begun]), "")


@cache
def _marker() -> re.Pattern[str]:
    """Any marker of any parser that has some."""
    marked = (load_parser(name) for name in PARSERS if name not in UNMARKED)
    return re.compile("|".join(sorted({re.escape(marker) for parser in marked for marker in parser.markers})))
