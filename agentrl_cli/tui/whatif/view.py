"""A what-if without a screen: its text as arguments, its events, and these as lines of rich text. No textual."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from agentrl_cli.errors import AgentRLError, UsageError
from agentrl_cli.tui.chat.client import ChatClient
from agentrl_cli.tui.chat.commands import unescape
from agentrl_cli.tui.common.text import BAD, FAINT, GOOD, TITLE, clip, num, pad, wrap

MODULE = "agentrl_cli.chat_session.whatif"
KEYS = {
    "turn": "--turn",
    "n": "--samples",
    "t": "--temperature",
    "seed": "--seed",
    "model": "--model",
}
EXAMPLE = (
    "For example: rerun, or turn=2 n=4 T=1.0 seed=0 model=my-run@best, and edit=TEXT at the end."
)


def whatif_arguments(text: str) -> list[str]:
    """Parse `rerun`, or `turn=2 n=4 T=1.0 seed=0 model=RUN@best edit=…` (the edit goes last). Raises UsageError."""
    words, mark, edit = text.strip().partition("edit=")
    if words.strip() == "rerun":
        return ["--rerun"]
    out: list[str] = []
    for word in words.split():
        key, equals, value = word.partition("=")
        option = KEYS.get(key.lower())
        if option is None or not equals or not value:
            raise UsageError(f"A what-if cannot be read: {word!r}.", hint=EXAMPLE)
        digits = value.replace(".", "", key.lower() == "t")
        least = " above 0" * (key.lower() == "n")
        if key.lower() != "model" and not (digits.isdecimal() and (not least or int(digits))):
            raise UsageError(f"{key}= needs a number{least}, not {value!r}.", hint=EXAMPLE)
        out += [option, value]
    if "--turn" not in out:
        raise UsageError("From which turn?", hint=EXAMPLE)
    if mark:
        out.append(f"--edit={unescape(edit)}")
    return out


async def stream_events(arguments: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a what-if's process, which ends with the loop. Raises AgentRLError for a fatal one."""
    client = ChatClient(arguments, MODULE)
    try:
        await client.start()
        async for event in client.events():
            if event["ev"] == "fatal":
                error = AgentRLError(event["message"], hint=event["hint"])
                error.exit_code = event["code"]
                raise error
            yield event
    finally:
        await client.kill()


def event_lines(event: dict[str, Any], width: int = 100) -> list[Text]:
    """Return the lines of an event; none for events that only steer."""
    return LINES[event["ev"]](event, width) if event["ev"] in LINES else []


def ready_lines(event: dict[str, Any]) -> list[Text]:
    """Return the model and its weights, and the notes about them."""
    note, weights = event.get("note"), event["weights"]
    before = event.get("sampled_by", weights)
    weights += f"; the episode was sampled by {before}" * (before != weights)
    lines = [Text(f"! {note}", BAD)] * bool(note)
    return lines + [Text(f"{event['model']}  weights {weights}", FAINT)] * bool(event["model"])


def rerun_lines(event: dict[str, Any], width: int) -> list[Text]:
    """Return one call's lines: the same answer, or the difference."""
    arguments = (
        "" if event["arguments"] is None else json.dumps(event["arguments"], ensure_ascii=False)
    )
    verdict = (
        "same"
        if event["same"]
        else "not recorded"
        if event["before"] is None
        else event["diverged"]
    )
    head = f"turn {event['turn']}  {event['name'] or '(malformed call)'} {arguments}"
    room = width - len(verdict) - 12
    lines = [Text(clip(" ".join(head.split()), max(room, 20)), no_wrap=True)]
    lines[0].append(f"   {verdict}", GOOD if event["same"] else BAD)
    lines[0].append(f"  {event['seconds'] * 1000:.0f} ms", FAINT)
    effects = event.get("changed") or ()
    lines += [Text(clip(f"    {text}", width), FAINT, no_wrap=True) for text in effects]
    if event["same"]:
        return lines
    if event["error_before"] != event["error_after"]:
        lines.append(
            Text(f"    {event['error_before'] or 'ok'} -> {event['error_after'] or 'ok'}", BAD)
        )
    shown = event["diff"] or [f"+{line}" for line in event["after"].splitlines()]
    for line in shown[:40]:
        style = BAD if line.startswith("-") else GOOD if line.startswith("+") else FAINT
        lines.append(Text(clip(f"    {line}", width), style, no_wrap=True))
    return lines


def reward_lines(event: dict[str, Any], width: int) -> list[Text]:
    """Return every reward part before and now, the total, the advantage."""
    before = {part["name"]: part for part in event["before"]}
    lines = [Text(f"{'REWARD':<16}{'was':>8}{'now':>8}", TITLE)]
    for part in event["after"]:
        old = before.pop(part["name"], None)
        was = old["value"] if old is not None else None
        style = "" if was == part["value"] else BAD
        mark = "*" if part["primary"] else " "
        note = f"{'FAKEABLE ' * part['fakeable']}{part['detail']}"
        row = f"{mark}{pad(part['name'], 15)}{num(was, '.2f'):>8}{num(part['value'], '.2f'):>8}  {note}"
        lines.append(Text(row.rstrip(), style))
    lines += [
        Text(f" {pad(name, 15)}{num(part['value'], '.2f'):>8}{'missing':>8}", FAINT)
        for name, part in before.items()
    ]
    lines.append(
        Text(
            f"{' total':<16}{num(event['total_before'], '.2f'):>8}{num(event['total_after'], '.2f'):>8}",
            "bold",
        )
    )
    if event["advantage_after"] is not None:
        was, now = num(event["advantage_before"]), num(event["advantage_after"])
        lines.append(Text(f"{' advantage':<16}{was:>8}{now:>8}   by GRPO in its group", FAINT))
    if event["episode"]:
        lines.append(Text(f"stored with its new rewards: agentrl replay {event['episode']}", GOOD))
    elif not event["same"]:
        text = "not stored: other answers would be other tokens; re-roll from that turn instead"
        lines += [Text(part, FAINT) for part in wrap(text, width)]
    return lines


def parent_lines(event: dict[str, Any], width: int) -> list[Text]:
    """Return the column titles of the re-rolled episodes, and the episode itself."""
    head = (
        f"    {'episode':<14} {'reward':>6} {'adv':>5}  {'outcome':<16} {'turns':>5} {'sampled':>7}"
        "  flags, last words"
    )
    first = f"    {_columns(event)}  as recorded"
    return [
        Text(clip(head, width), TITLE, no_wrap=True),
        Text(clip(first, width), GOOD if event["outcome"] == "solved" else FAINT, no_wrap=True),
    ]


def _columns(event: dict[str, Any]) -> str:
    return (
        f"{event['episode']:<14} {num(event['reward'], '6.2f'):>6} {num(event['advantage']):>5}  "
        f"{event['outcome']:<16} {event['turns']:>5} {event['tokens']:>7}"
    )


def child_line(event: dict[str, Any], width: int) -> Text:
    """Return the line of one re-rolled episode."""
    text = " ".join(event["text"].split())
    more = "  ".join(filter(None, [" ".join(event["flags"]), text]))
    line = f"#{event['sample']:<2} {_columns(event)}  {more}"
    return Text(clip(line, width), GOOD if event["outcome"] == "solved" else "", no_wrap=True)


LINES: Mapping[str, Callable[[dict[str, Any], int], list[Text]]] = {
    "ready": lambda event, width: ready_lines(event),
    "rerun": rerun_lines,
    "diverged": rerun_lines,
    "rewards": reward_lines,
    "from": parent_lines,
    "child": lambda event, width: [child_line(event, width)],
    "fatal": lambda event, width: (
        [Text(f"! {part}", BAD) for part in wrap(event["message"], width)]
        + [Text(f"  {part}", FAINT) for part in event["hint"].splitlines()]
    ),
}
"""The lines of each kind of event at a width."""
