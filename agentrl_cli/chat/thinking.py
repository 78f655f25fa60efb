"""Thinking: how the families mark it, how generation prompts begin it, and texts without it.

Templates keep, drop or empty the thinking of earlier turns, and generation prompts open a block, or write an empty one
(`<think>\\n\\n</think>\\n\\n`) so that the model answers at once. One rule for all: if the appended ids and a full
rendering differ only in thinking tokens that the prompt wrote, that is by design. The model sampled none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

BLOCKS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Opening and closing markers of a block of thinking inside a turn."""
THINK, THINK_END = BLOCKS[0]
HARMONY = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
"""The same in gpt-oss, where thinking is a message of its own."""

MARKERS = tuple(marker for block in BLOCKS for marker in block)
_OPENED, _CLOSED = ("|".join(re.escape(block[end]) for block in BLOCKS) for end in (0, 1))
_EMPTY = re.compile(rf"(?:(?:{_OPENED})\s*)?(?:{_CLOSED})\s*")
_GIVEN = re.compile(rf"(?:{_OPENED})\s*(?:(?:{_CLOSED})\s*)?\Z")
_WHOLE = re.compile(
    "|".join(rf"{re.escape(a)}(?:(?!{re.escape(a)}).)*?{re.escape(b)}" for a, b in BLOCKS),
    re.DOTALL,
)
_MARK = re.compile("|".join(map(re.escape, MARKERS)))
_LEADING = re.compile(rf"\A(?:(?!{_OPENED}).)*?(?:{_CLOSED})", re.DOTALL)


def without_given(start: str, full: str) -> str:
    """Return the prompt as it stands at the start of `full`, if it differs from `start` only in the thinking that it
    begins.

    Else `start` unchanged.
    """
    given = _GIVEN.search(start)
    if given is None or not full.startswith(start[: given.start()]):
        return start
    bare = start[: given.start()]
    opening = next(block[0] for block in BLOCKS if given[0].startswith(block[0]))
    # An open block: the turn continues inside it if the template opens it here too.
    if given[0].rstrip() == opening:
        return bare + opening if full.startswith(bare + opening) else bare
    rest = full[len(bare) :]
    empty = _EMPTY.match(rest, len(rest) - len(rest.lstrip()))
    return bare + rest[: empty.end()] if empty else bare


def gives_empty(prompt: str) -> bool:
    """Whether a generation prompt writes an empty block of thinking, so that the model does not think."""
    given = _GIVEN.search(prompt)
    return given is not None and any(given[0].rstrip().endswith(block[1]) for block in BLOCKS)


def drop_empty(text: str) -> str:
    """Return a text without empty blocks of thinking and without unopened closing markers."""
    return _replace_empty(text, "")


def drop_empty_lines(text: str) -> str:
    """Return `drop_empty` with the line breaks around them joined: MiniMax M2 keeps those beside a block that it
    drops.
    """
    return re.sub(r"\n+", "\n", _replace_empty(text, "\n"))


def _replace_empty(text: str, by: str) -> str:
    """Return a text with `by` in place of each empty block and of the white space around it."""
    *before, last = _EMPTY.split(text)
    return by.join([*(part.rstrip() for part in before), last])


def same_but_thinking(a: str, b: str) -> bool:
    """Whether two texts of a turn differ only in thinking, its markers and white space."""
    return not _bare(a).isdisjoint(_bare(b))


def _bare(text: str) -> set[str]:
    """Return a text without thinking and white space, read as it is and as one that begins inside an opened block."""
    found = _WHOLE.sub("", text)
    return {"".join(_MARK.sub("", part).split()) for part in (found, _LEADING.sub("", found))}


def family_thinking(source: str) -> Callable[[str], str] | None:
    """Return the function that writes a thought as this template's family does; None if it has no markers for it."""
    if HARMONY[0] in source:
        return lambda text: f"{HARMONY[0]}{text}{HARMONY[1]}"
    block = next((block for block in BLOCKS if block[0] in source), None)
    if block is None:
        return None
    line, after = (
        ("\n", "\n\n")
        if block[0] == "<think>"
        else ("\n", "")
        if "thought" in block[0]
        else ("", "")
    )
    return lambda text: f"{block[0]}{line}{text}{line}{block[1]}{after}"
