"""Drift: where the ids of an episode differ from the chat template's own rendering.

The ids are trained either way; this finds and classifies the differences. Four kinds, mildest first:

- `resegmented`: the same text in other tokens. A model may sample any segmentation.
- `reserialised`: the same meaning, written differently: spaces in a call's JSON, trimmed content.
- `by_design`: the template drops or rewrites the model's own text (earlier thinking, text beside a call), or cannot
  render this conversation at all.
- `structural`: a separator, a role or a stop token is missing or different. The model would train on something that it
  never sees again: this raises an alert, and such episodes are skipped unless `algo.skip.drift: false`.

`check_delta` compares one turn and the delta after it, at a cost that does not grow with the conversation;
`check_episode` renders the whole conversation once, or each branch of it. `DriftGuard` (drift_guard.py) does both for a
running episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.spans import shared_prefix
from agentrl_cli.chat.template_syntax import Tools
from agentrl_cli.chat.thinking import MARKERS, same_but_thinking
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Drift, Episode, Int32, Message, Origin

KINDS = ("resegmented", "reserialised", "by_design", "structural")
"""Mildest first."""

EXCERPT = 24
"""Tokens of each side that a Drift quotes."""


def worst(drifts: Sequence[Drift]) -> str:
    """Return the most severe kind among them, empty for none."""
    return max((drift.kind for drift in drifts), key=KINDS.index, default="")


def check_delta(
    chat: Chat,
    turn_ids: Sequence[int] | Int32,
    delta_ids: Sequence[int] | Int32,
    message: Message,
    new_messages: Sequence[Message],
    tools: Tools = None,
    *,
    turn: int = 0,
    position: int = 0,
) -> list[Drift]:
    """Compare one assistant turn and the delta after it with the template's own rendering of both.

    `turn_ids` are the sampled (and forced) ids, `delta_ids` what `Chat.extend` gave, `message` the parsed assistant
    message. `position` is the index of the first of `turn_ids` in the episode. Empty if all is equal.
    """
    got = [int(id_) for id_ in (*turn_ids, *delta_ids)]
    try:
        expected = chat.continuation([*_drop_moved_texts(chat, [message]), *new_messages], tools)
    except TemplateError as error:
        return [_refusal(error, turn, position)]
    if expected == got:
        return []
    model = [index < len(turn_ids) for index in range(len(got))]
    return [
        _drift(chat, kind, turn, position + at_got, expected[at_expected:], got[at_got:])
        for kind, at_expected, at_got in _differences(chat, expected, got, model)
    ]


def check_episode(
    episode: Episode,
    chat: Chat,
    tools: Tools = None,
    *,
    contexts: Mapping[int, Tools] | None = None,
) -> list[Drift]:
    """Compare a finished episode with one rendering of its whole conversation: a Drift per block that differs.

    An episode may end before the template's text does: that is not drift. Each branch is a conversation of its own;
    what several share is reported once. `contexts`: if they differ in their tools, or some are not to be compared, the
    tools of those that are, by their first turn.
    """
    found: dict[tuple[str, int, int], Drift] = {}
    for branch in episode.sequences:
        first = next(iter(branch.turns), -1)
        if contexts is not None and first not in contexts:
            continue
        own = tools if contexts is None else contexts[first]
        for drift in _check_chain(episode.chain(branch), chat, own):
            turn, position = (
                _number_in_episode(branch.turns, drift.turn),
                _number_in_episode(branch.positions, drift.position),
            )
            found.setdefault(
                (drift.kind, turn, position), replace(drift, turn=turn, position=position)
            )
    return list(found.values())


def _drop_moved_texts(chat: Chat, messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages without the texts that the template would move away from the calls beside them.

    The model's own text stays where it is. It differs by design, and all that follows is compared.
    """
    if not chat.syntax.moves_text:
        return messages
    return [
        {**message, "content": ""} if message.get("tool_calls") else message for message in messages
    ]


def _number_in_episode(places: Sequence[int] | NDArray[np.int64], index: int) -> int:
    """Return a branch's number in the episode's; one past the end is one past the last; −1 stays."""
    if index < 0 or not len(places):
        return index
    return int(places[index]) if index < len(places) else int(places[-1]) + 1


def _check_chain(episode: Episode, chat: Chat, tools: Tools) -> list[Drift]:
    messages = episode.messages
    if not messages:
        return []
    got = [int(id_) for id_ in episode.tokens.ids]
    try:
        open_end = messages[-1].get("role") != "assistant"
        expected = chat.rendered_ids(
            _drop_moved_texts(chat, messages), tools, add_generation_prompt=open_end
        )
    except TemplateError as error:
        return [_refusal(error, -1, 0)]
    if expected[: len(got)] == got:
        return []
    model = [int(value) in {Origin.MODEL, Origin.FORCED} for value in episode.tokens.origin]
    drifts: list[Drift] = []
    for kind, at_expected, at_got in _differences(chat, expected, got, model):
        turn = next((turn.index for turn in episode.turns if turn.start <= at_got < turn.end), -1)
        drifts.append(_drift(chat, kind, turn, at_got, expected[at_expected:], got[at_got:]))
    return drifts


class _Segment(NamedTuple):
    """Ids `start` to `body_end` and the next control token (the last segment may have none)."""

    start: int
    body_end: int
    end: int
    control: int | None


def _cut(chat: Chat, ids: Sequence[int], inside: bool) -> list[_Segment]:
    """Return ids cut at control tokens, but not at the messages within a turn.

    `inside`: the first of `ids` are within a turn.
    """
    # Markers of calls and thinking are the model's own words even where they are control tokens.
    markers = {chat.tokenizer.id_of(text) for text in (*chat.parser.markers, *MARKERS)}
    control = frozenset(chat.tokenizer.special_ids | set(chat.stop_ids)) - markers
    # Ids that end one message of a turn and begin the next, if a turn may have several.
    between = chat.tokenizer.encode(chat.stops.next_message)
    segments: list[_Segment] = []
    begins, start, index = list(between[1:]), 0, 0
    while index < len(ids):
        if between and inside and list(ids[index : index + len(between)]) == list(between):
            index += len(between)
            continue
        if begins and ids[index] == begins[0]:
            inside = list(ids[index : index + len(begins)]) == begins
        if ids[index] in control:
            segments.append(_Segment(start, index, index + 1, ids[index]))
            start = index + 1
        index += 1
    if start < len(ids):
        segments.append(_Segment(start, len(ids), len(ids), None))
    return segments


def _differences(
    chat: Chat, expected: Sequence[int], got: Sequence[int], model: Sequence[bool]
) -> Iterator[tuple[str, int, int]]:
    """(kind, position in expected, position in got) of every block that differs."""
    theirs, ours = (_cut(chat, ids, bool(model and model[0])) for ids in (expected, got))
    swapped = {
        chat.tokenizer.id_of(text)
        for text in (chat.stops.texts[0], chat.stops.history)
        if chat.stops.history
    }
    for number, own in enumerate(ours):
        last = number == len(ours) - 1
        if number >= len(theirs):
            # In header style the sampled stop token has no counterpart if nothing follows it.
            if not (last and own.control in chat.stop_ids and own.body_end == own.start):
                yield "structural", len(expected), own.start
            return
        other = theirs[number]
        body = list(got[own.start : own.body_end])
        wanted = list(expected[other.start : other.body_end])
        sampled = any(model[own.start : own.end])
        if own.control != other.control and sampled and {own.control, other.control} == swapped:
            # The model samples the one, the history has the other: sampled tokens are kept.
            yield "by_design", other.body_end, own.body_end
        elif own.control != other.control:
            ended = last and (
                own.control is None or (other.control is None and own.control in chat.stop_ids)
            )
            # In header style no token closes a turn: what a template writes at the very end is its own.
            ended |= (
                last
                and not chat.stops.closing
                and {own.control, other.control} <= set(chat.stop_ids)
            )
            if not ended:
                yield (
                    "structural",
                    other.start + shared_prefix(wanted, body),
                    own.start + shared_prefix(wanted, body),
                )
                return
            if not sampled or own.control is None:
                wanted = wanted[: len(body)]
        if body != wanted:
            at = shared_prefix(wanted, body)
            yield (
                _kind(chat, chat.decode(wanted), chat.decode(body), sampled),
                other.start + at,
                own.start + at,
            )


def _kind(chat: Chat, expected: str, got: str, sampled: bool) -> str:
    """Return the kind of the difference between two texts of one block; `sampled`: the model wrote (part of) it."""
    if expected == got:
        return "resegmented"
    if not sampled:
        return "structural"
    theirs, ours = parse_text(expected, chat.parser), parse_text(got, chat.parser)
    calls = [
        [(call.name, call.arguments, call.error and call.raw) for call in p.calls]
        for p in (theirs, ours)
    ]
    broken = [call.raw for call in ours.calls if call.arguments is None]
    if broken and all(raw in expected for raw in broken):
        return "by_design"  # a malformed call is content, unchanged; the template decides what surrounds it
    if calls[0] != calls[1]:
        return "by_design" if same_but_thinking(theirs.content, ours.content) else "structural"
    if _without_spaces(theirs.content) == _without_spaces(ours.content):
        same = _without_spaces(theirs.thinking) == _without_spaces(ours.thinking)
        return "reserialised" if same else "by_design"
    if calls[0] or same_but_thinking(theirs.content, ours.content):
        return "by_design"
    return "structural"


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _drift(
    chat: Chat, kind: str, turn: int, position: int, expected: Sequence[int], got: Sequence[int]
) -> Drift:
    return Drift(kind, turn, position, chat.decode(expected[:EXCERPT]), chat.decode(got[:EXCERPT]))


def _refusal(error: TemplateError, turn: int, position: int) -> Drift:
    return Drift("by_design", turn, position, f"(no rendering: {error.message})", "")
