"""Screens by name, so that each can open any other without importing it."""

from __future__ import annotations

from typing import Any

from textual.screen import Screen

from agentrl_cli.registry import resolve

SCREENS: dict[str, str] = {
    "chat": "agentrl_cli.tui.chat.screen:ChatScreen",
    "compare": "agentrl_cli.tui.compare.screen:CompareScreen",
    "episodes": "agentrl_cli.tui.runs.episodes:EpisodesScreen",
    "replay": "agentrl_cli.tui.replay.screen:ReplayScreen",
    "reading": "agentrl_cli.tui.replay.reading:ReadingScreen",
    "runs": "agentrl_cli.tui.runs.screen:RunsScreen",
    "versus": "agentrl_cli.tui.compare.versus:VersusScreen",
    "watch": "agentrl_cli.tui.watch.screen:WatchScreen",
    "whatif": "agentrl_cli.tui.whatif.screen:WhatIfScreen",
}
"""Name to the module and class of a screen, each imported when it is first opened."""


def screen(name: str, *args: Any, **options: Any) -> Screen[Any]:
    """Return a new screen; the arguments are its constructor's. Raises NotFound for a name that is not in SCREENS."""
    made: Screen[Any] = resolve("screens", SCREENS, name)(*args, **options)
    return made
