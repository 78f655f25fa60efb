"""How a chat template ends an assistant turn: found by rendering probes, not by knowing families.

Two styles exist. *Closing*: the turn ends with a token of its own (`<|im_end|>`) that the model samples, and the next
message brings its own header. *Header*: nothing closes the turn; the model stops by sampling the first token of the
next message (`<|user|>`, `<|observation|>` in GLM), so that token is both the stop and the start of what follows.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from agentrl_cli.chat.spans import shared_prefix
from agentrl_cli.chat.tokenizer import BaseTokenizer
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message, ToolSchema

RenderText = Callable[[Sequence[Message], Sequence[ToolSchema] | None, bool], str]
"""(messages, tools, add_generation_prompt) -> text"""

MARK = f"zq{secrets.token_hex(6)}m"
RESULT = f"zq{secrets.token_hex(6)}r"
TEXT = f"zq{secrets.token_hex(6)}t"
"""Words that no conversation contains."""

PROBE_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "A text."}},
            "required": ["x"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Stops:
    """How assistant turns end."""

    texts: tuple[str, ...]
    """Texts of the tokens that a template writes where an assistant turn ends; the first follows a plain answer."""
    closing: bool
    """True if the token belongs to the assistant turn, False if it opens the next message."""
    suffix: str = ""
    """The template's text between the content and the stop token; the model samples this too. If it is more than
    blanks (`<|END_RESPONSE|>` of Command R7B), it does not belong to what the turn says."""
    after_call: str = ""
    """The text that follows a turn with tool calls; empty if the template has no tools."""
    history: str = ""
    """What the template writes in place of the stop token once the conversation continues, if that is another token
    (`<|end|>` of gpt-oss, which samples `<|return|>`). It ends a message, not the turn: it is not a stop token."""
    next_message: str = ""
    """With a `history`: the text between two messages of one turn."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, calls: Sequence[tuple[str, str]] = ()) -> Message:
    """Return an assistant message; `calls` are (id, name), their argument is the marker."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": {"x": MARK}}}
            for id_, name in calls
        ]
    return message


def tool(text: str, id_: str = "c00000000", name: str = "probe") -> Message:
    return {"role": "tool", "tool_call_id": id_, "name": name, "content": text}


def find_stops(render: RenderText, tokenizer: BaseTokenizer, markers: Sequence[str]) -> Stops:
    """Return how assistant turns of this template end. Raises TemplateError if no special token ends them."""
    control = [
        token.text for token in tokenizer.added if token.special and token.text not in markers
    ]
    followed = render([user("u"), assistant(MARK), user("v")], None, False)
    alone = render([user("u"), assistant(MARK)], None, False)
    found = _find_first(followed, control)
    if found is None:
        raise TemplateError(
            "The chat template writes no control token after an assistant turn, so a model cannot learn to stop.",
            hint="Use the template of an instruction-tuned model: --set model.chat.template=FILE.",
        )
    stop, suffix = found
    stop, suffix = _find_own_end(stop, suffix, (followed, alone), tokenizer)
    stop, history = _find_sampled(stop, _find_first(alone, control), tokenizer)
    after_call = ""
    with suppress(TemplateError):  # no tools in this template: the audit reports it
        call = [user("u"), assistant(MARK, [("c00000000", "probe")]), tool(RESULT)]
        text = render(call, [PROBE_TOOL], False).partition(RESULT)[0]
        after = _find_first(text, [stop]) or _find_first(text, control)
        after_call = after[0] if after else ""
    texts = tuple(dict.fromkeys(text for text in (stop, after_call) if text))
    asked, closed = (render([user("u")], None, ask) for ask in (True, False))
    between = history + asked.removeprefix(closed) if history else ""
    closing = _find_first(alone, [stop]) is not None
    return Stops(texts, closing, suffix if closing else "", after_call, history, between)


def _find_own_end(
    stop: str, suffix: str, texts: Sequence[str], tokenizer: BaseTokenizer
) -> tuple[str, str]:
    """Return the stop token and the text before it, where the model's own end token directly follows the first one.

    Command R7B ends its text with `<|END_RESPONSE|>` and its turn with `<|END_OF_TURN_TOKEN|>`.
    """
    ends = [token.text for token in tokenizer.added if token.id in tokenizer.eos_ids]
    for end in ends:
        if stop not in ends and all(
            text.rpartition(MARK)[2].startswith(suffix + stop + end) for text in texts
        ):
            return end, suffix + stop
    return stop, suffix


def _find_sampled(
    written: str, last: tuple[str, str] | None, tokenizer: BaseTokenizer
) -> tuple[str, str]:
    """Return the stop token that a model samples, and the history's own in its place (empty: the same).

    They differ if the very last turn ends with another token than the turns before it, and only that one is an end
    token of the model.
    """
    ends = {token.text for token in tokenizer.added if token.id in tokenizer.eos_ids}
    if last is None or last[0] not in ends or written in ends:
        return written, ""
    return last[0], written


def find_called(
    render: RenderText,
    write: Callable[[Message], str] | None = None,
    ends: re.Pattern[str] | None = None,
) -> str:
    """Return the text of a turn that calls the probe: by `write`, else all that the template adds, up to one of `ends`.

    `write` fails if the turn does not begin as the generation prompt does. Empty if the template refuses.
    """
    call = assistant("", [("c00000000", "probe")])
    if write is not None:
        with suppress(TemplateError):
            return write(call)
    with suppress(TemplateError):
        before, whole = (render([user("u"), *more], [PROBE_TOOL], False) for more in ([], [call]))
        text = whole[shared_prefix(before, whole) :]
        end = ends.search(text) if ends is not None else None
        return text[: end.start()] if end else text
    return ""


def _find_first(text: str, candidates: Sequence[str]) -> tuple[str, str] | None:
    """Return the first of `candidates` after the last marker, and the text between; None if there is none."""
    _, marked, after = text.rpartition(MARK)
    places = [(after.find(one), -len(one), one) for one in candidates if marked and one in after]
    if not places:
        return None
    position, _, candidate = min(places)
    return candidate, after[:position]
