"""Chat events as lines of rich text, for the screen and for `--plain`. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from agentrl_cli.tui.common.episode_view import EpisodeView, blocks_of, text_of_turn
from agentrl_cli.tui.common.layers import LAYERS, shade
from agentrl_cli.tui.common.layout import Kind, Layout, call_notes
from agentrl_cli.tui.common.text import BAD, FAINT, GOOD, HERE, TITLE, num, pad
from agentrl_cli.tui.common.token_text import TokenTexts
from agentrl_cli.types import Episode, Tokens, ToolCall, Turn

MODES = {"": None, "tokens": "origin", "mask": "mask", "logprobs": "logp"}
AGAIN = {"user": "", "assistant": "/as-model ", "tool": "/as-tool "}
ROLES = {
    "assistant": "bold #8fbfff",
    "user": "bold #e8d890",
    "tool": "bold #f0b878",
    "system": "bold #b0b0d0",
}


def event_lines(event: dict[str, Any], decoder: TokenTexts, mode: str, width: int) -> list[Text]:
    """Return the lines of an event; none for events that only steer."""
    if event["ev"] == "turn":
        return turn_lines(event, decoder, mode, width)
    return LINES[event["ev"]](event) if event["ev"] in LINES else []


def _ask_lines(event: dict[str, Any]) -> list[Text]:
    several = event.get("of", 1) > 1
    which = f" {event['name']}, call {event['number']} of {event['of']}" if several else ""
    more = "   all, none: and the rest" if several else ""
    ask = f"run{which or ' this'}?  y yes   n no{more}   /as-tool TEXT answers in the tool's place"
    if any(call.get("error") for call in (event.get("calls") or [])[:1]):
        which = which or " this"
        ask = f"a malformed call{which}: report it to the model?  y yes   n no{more}"
    return [Text(ask.replace(" this:", ":"), HERE)]


def _result_lines(event: dict[str, Any]) -> list[Text]:
    status = f"ERROR {event['error']}" if event["error"] else "ok"
    head = f"◂ {event['name']}  {status}  {event['seconds'] * 1000:.0f} ms  (by hand)"
    return [Text(head, FAINT), *(Text(f"  {row}") for row in str(event["text"]).splitlines())]


def _reward_lines(event: dict[str, Any]) -> list[Text]:
    rows = [
        f"  {pad(part['name'], 14)} {num(part['value'], '.2f'):>6} x {part['weight']:g}  {part['detail']}"
        for part in event["parts"]
    ]
    total = Text(f"REWARD {num(event['total'], '.3f')}", TITLE)
    return [total, *(Text(row.rstrip()) for row in rows)]


def error_lines(event: dict[str, Any]) -> list[Text]:
    """Return an error and what to do."""
    hint = str(event.get("hint") or "").splitlines()
    return [Text(f"! {event['message']}", BAD), *(Text(f"  {row}", FAINT) for row in hint)]


def taken_back(turns: Sequence[dict[str, Any]], keep: int, decoder: TokenTexts) -> str:
    """Return the line that repeats the first of the turns from `keep` on: as the user, the model or the tool."""
    first = next((turn for turn in turns if turn["index"] >= keep and turn["role"] in AGAIN), None)
    if first is None:
        return ""
    # a person's answer is the result of each of several calls
    text = str(first["results"][0]["text"] if first["results"] else first["content"])
    if first["role"] == "assistant":  # its calls are in its tokens alone
        text = text_of_turn(turn_view(first, decoder), 0)
    return text if first["role"] == "user" else AGAIN[first["role"]] + text.replace("\\", "\\\\")


def ready_lines(event: dict[str, Any]) -> list[Text]:
    """Return the model, its tools and its sandbox."""
    tools = ", ".join(event["tools"]) or "none"
    about = f"({event['weights']}, context {event['context']})"
    simulated = "a simulated user answers: /simulate off lets you, /simulate asks it once"
    rows = (
        (f"{event['model']}  {about}   tools: {tools}", TITLE),
        (f"sandbox {event['sandbox']}" if event.get("sandbox") else "", FAINT),
        (simulated if event.get("user") else "", FAINT),
        (f"! {event['note']}" if event.get("note") else "", BAD),
    )
    lines = [Text(text, style) for text, style in rows if text]
    return lines + (task_lines(event["tasks"]) if event.get("tasks") else [])


def task_lines(tasks: Sequence[dict[str, Any]]) -> list[Text]:
    """Return tasks to choose from."""
    if not tasks:
        return [Text("no tasks: a pack has them, --pack NAME", FAINT)]
    lines = [Text("tasks to try: /task 1 opens the first, /task shows others", FAINT)]
    for task in tasks:
        line = Text(f"  {task['number']}  ", GOOD)
        line.append(f"{task['id']}  ", FAINT)
        lines.append(line.append(task["text"]))
    return lines


def turn_lines(event: dict[str, Any], decoder: TokenTexts, mode: str, width: int) -> list[Text]:
    """Return one turn: its text and calls; in a token mode every token with its glyphs."""
    role, lens, stop = event["role"], MODES.get(mode), event.get("stop")
    if event.get("again") and lens is None:  # a loop of calls that cannot be run is a line a turn
        raw = event["calls"][0]["raw"] if event["calls"] else ""
        again = f"{event['again']}× in a row no call that can be run: {' '.join(raw.split())[:40]}"
        return [Text(f"assistant  {again}", BAD)] if role == "assistant" else []
    head = Text(f"{role}", ROLES.get(role, "bold"))
    head.append(f"  {len(event['ids'])} tokens", FAINT)
    head.append(f"  {event['seconds']:.1f} s" if event.get("seconds", 0) >= 0.05 else "", FAINT)
    head.append(f"  ended by {stop}" if stop and stop != "stop" else "", BAD)
    lines = [head]
    if lens is not None:
        lines += token_text(event, decoder, lens, width)
    elif role == "tool":
        for result in event["results"]:
            count, error = result.get("images"), result["error"]
            lines += [Text(f"  ERROR {error}", BAD)] * bool(error)
            texts = result["text"].splitlines() or [""]
            lines += [Text(f"  {row}", BAD if error else "") for row in texts]
            if count:
                lines.append(Text(f"  ▣ {count} image{'s' if count > 1 else ''}", FAINT))
    else:
        lines += [Text(f"  {row}") for row in event["content"].strip().splitlines()]
    for call in event["calls"]:
        shown = ToolCall("", call["name"], call["arguments"], call["raw"], call["error"])
        notes = call_notes(shown)
        lines += [Text(f"  {text}", BAD if style == "error" else GOOD) for style, text in notes]
    return lines


def token_text(event: dict[str, Any], decoder: TokenTexts, lens: str, width: int) -> list[Text]:
    """Return every token of a turn with the layer's colour behind and its glyph under it."""
    view, layer = turn_view(event, decoder), LAYERS[lens]
    classes, layout = view.classes(layer), Layout(view, max(width - 2, 20), glyphs="all")
    lines = []
    for kind, a, b in layout.lines:
        if kind not in (Kind.TEXT, Kind.GLYPH):
            continue
        line = Text("  ", no_wrap=True)
        for piece in range(a, b):
            level = layer.levels[classes[layout.piece_token[piece]]]
            glyphs = level.glyph * layout.piece_cells[piece]
            text, style = (layout.piece_text[piece], "") if kind == Kind.TEXT else (glyphs, FAINT)
            line.append(text, f"on {shade(level.color)}" if level.color else style)
        lines.append(line)
    known = [value for value in event["logp"] if value is not None]
    if lens == "origin":
        lines.append(Text("  ids " + " ".join(str(i) for i in event["ids"]), FAINT))
    elif lens == "logp" and known:
        mean, least = sum(known) / len(known), math.exp(min(known))
        lines.append(Text(f"  mean logp {mean:.3f}   least likely p {least:.4f}", FAINT))
    return lines


def turn_view(event: dict[str, Any], decoder: TokenTexts) -> EpisodeView:
    """Return a turn's tokens as a view of their own."""
    n = len(event["ids"])
    given = Tokens.from_ids(event["ids"], event["origin"])
    logp = np.asarray([math.nan if value is None else value for value in event["logp"]], np.float32)
    tokens = Tokens(
        given.ids, given.origin, logp, logp, given.entropy, given.top_ids, given.top_logps
    )
    turn = Turn(0, event["role"], (), 0, n)
    episode = Episode("", "", turns=(turn,), tokens=tokens)
    return EpisodeView(episode, decoder.texts(tokens.ids), blocks_of((turn,), n), decoder=decoder)


def context_lines(turns: list[dict[str, Any]], decoder: TokenTexts, template: str) -> list[Text]:
    """Return the exact context: every id that was sent or sampled, as text with its special tokens, then the ids, then
    the
    chat template that renders it."""
    count = sum(len(event["ids"]) for event in turns)
    lines = [Text(f"CONTEXT {count} tokens, exactly as sent and sampled", TITLE)]
    for event in turns:
        style = ROLES.get(event["role"], "bold")
        lines.append(Text(f"{event['role']}  {len(event['ids'])} ids", style))
        lines += [Text(line) for line in decoder.text(event["ids"]).removesuffix("\n").split("\n")]
        lines.append(Text(" ".join(str(i) for i in event["ids"]), FAINT))
    if template:
        lines += [
            Text(""),
            Text("CHAT TEMPLATE", TITLE),
            *(Text(line, FAINT) for line in template.splitlines()),
        ]
    return lines


LINES: Mapping[str, Callable[[dict[str, Any]], list[Text]]] = {
    "ready": ready_lines,
    "ask": _ask_lines,
    "result": _result_lines,
    "reward": _reward_lines,
    "saved": lambda event: [Text(f"saved: agentrl replay {event['episode']}", GOOD)],
    "cut": lambda event: [Text(f"--- back to {event['turns']} turns ---", FAINT)],
    "tasks": lambda event: task_lines(event["tasks"]),
    "note": lambda event: [Text(event["text"], FAINT)],
    "error": error_lines,
    "fatal": error_lines,
}
"""The lines of each kind of event but a turn."""
