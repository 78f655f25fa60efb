"""What a click in a pane of replay means: a sibling, a turn, a place on the map. Pure; panels.py draws the panes."""

from __future__ import annotations

from agentrl_cli.tui.common.episode_view import EpisodeView
from agentrl_cli.tui.common.panels import GROUP_ROWS, MAP_GUTTER, TURN_ROWS, first_row


def sibling_at(view: EpisodeView, line: int) -> str | None:
    """The sibling on a line of the group's pane."""
    ids = [row.id for row in view.siblings]
    if len(ids) < 2:
        return None
    here = ids.index(view.episode.id) if view.episode.id in ids else 0
    head = 2 + any(row.reward is not None for row in view.siblings)
    index = line - head + first_row(here, len(ids), GROUP_ROWS)
    shown = head <= line < head + GROUP_ROWS and index < len(ids)
    return str(ids[index]) if shown else None


def turn_at(view: EpisodeView, current: int, line: int) -> int | None:
    """The first token of the turn on a line of the turns' pane, `current` being the cursor's turn."""
    index = line - 1 + first_row(current, len(view.blocks), TURN_ROWS)
    shown = 1 <= line <= TURN_ROWS and index < len(view.blocks)
    return view.blocks[index].start if shown else None


def token_on_map(view: EpisodeView, column: int, width: int) -> int | None:
    """The token under a column of the map, drawn `width` wide."""
    n = len(view.tokens)
    inner = min(max(width - MAP_GUTTER, 8), n)
    at = column - MAP_GUTTER
    return min(at * n // inner, n - 1) if n and 0 <= at < inner else None
