"""Before a training: turns that a model of this family may write, scripted and run through the real loop.

The template audit plays the texts that the template itself would write. A model also writes text and its thinking
before a call, and calls that are broken; a template may move or drop these, so that such episodes would be skipped as
drift. Better said before hours of training than after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.chat.drift import check_episode
from agentrl_cli.chat.parsers import parsers_of, reads
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.template_probe import MARK
from agentrl_cli.chat.thinking import THINK_END, family_thinking, gives_empty
from agentrl_cli.config import Config
from agentrl_cli.errors import TemplateError
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rewards import Reward
from agentrl_cli.rollout.job import Job
from agentrl_cli.rollout.run import Rollout
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Message, Outcome, ToolSchema

TEXT, THOUGHT, ANSWER = "Let me look.", "I need the tool.", "Done."
SHOWN = 40
"""Characters of each side that a finding shows."""
LIMITS = {"max_tokens": 30000, "max_new_tokens": 4000, "max_turns": 3}


def look(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return f"{word}: known"


@dataclass(frozen=True, slots=True)
class Finding:
    """A way to write a turn that a training would not learn from."""

    what: str
    """Text before a call, thinking before a call, a malformed call."""
    expected: str
    """What the template writes, an excerpt; empty if the template refused the conversation."""
    got: str
    """What was appended there."""
    parser: str = ""
    """The parser that reads such calls, which this chat's does not."""

    def __str__(self) -> str:
        if self.parser:
            tokens = "and the tokenizer has their tokens"
            return (
                f"{self.what} would not be executed, {tokens}: set model.chat.parser={self.parser}"
            )
        if not self.expected:
            return f"an episode with {self.what} would end as an error: {self.got}"
        return (
            f"an episode with {self.what} would be skipped as drift: the template writes {self.expected!r} where"
            f" {self.got!r} is appended"
        )


async def rehearse(chat: Chat) -> tuple[Finding, ...]:
    """Play texts that a model may write around a call. Returns the findings for which a training would skip episodes.

    Empty too if turns cannot be read from the template: the audit refuses such a template.
    """
    found = [*_unread(chat)]
    zero = Reward("zero", lambda episode, ctx: 0.0)
    pack = Pack.of("rehearsal", [{"prompt": "Look up one word."}], [zero], tools=[look])
    try:
        plays = list(_plays(chat, pack.schemas))
    except TemplateError:
        return tuple(found)
    for what, replies in plays:
        policy = ScriptedPolicy(replies, chat.tokenizer, context_length=LIMITS["max_tokens"])
        rollout = Rollout(
            policy, chat, {pack.name: pack}, Config.model_validate({"rollout": LIMITS})
        )
        episode = await rollout.episode(Job(pack.tasks("train")[0], 0, kind="train"))
        if rollout.drift.get(episode.id) == "structural":
            drifts = check_episode(episode, chat, pack.schemas)
            lost = next((drift for drift in drifts if drift.kind == "structural"), None)
            # None: it was seen at a turn's boundary alone.
            sides = (
                (lost.expected[:SHOWN], lost.got[:SHOWN])
                if lost
                else ("something else", episode.error)
            )
            found.append(Finding(what, *sides))
        elif episode.outcome is Outcome.ENV_ERROR:
            found.append(Finding(what, "", episode.error))
    return tuple(found)


def _unread(chat: Chat) -> Iterator[Finding]:
    """Yield the syntaxes that a tokenizer has tokens for and the parser does not read; the template writes none."""
    if chat.able.calls:
        return
    for other in parsers_of({token.text for token in chat.tokenizer.added}):
        shared = set(other.markers) & set(chat.parser.markers)
        if not shared and not reads(chat.parser, other.example("probe", {"x": MARK})):
            yield Finding(f"calls in the syntax of {other.name}", "", "", other.name)


def _plays(chat: Chat, tools: Sequence[ToolSchema]) -> Iterator[tuple[str, list[str]]]:
    """(description, turns) of each script. Raises TemplateError if the template does not render such turns."""
    closed = f"\n{THINK_END}\n\n" if chat.opens else ""
    call, said = (chat.assistant_text(_message(text, {"word": "x"}), tools) for text in ("", TEXT))
    answer = chat.assistant_text(_message(ANSWER), tools)
    stop = chat.stops.after_call if chat.stops.after_call != chat.stops.texts[0] else ""
    if TEXT not in said or chat.syntax.moves_text:  # a model writes it in front
        said = closed + TEXT + call.removeprefix(closed)
    yield "text before a call", [said + stop, answer]
    think = family_thinking(chat.source)
    if chat.opens:
        yield (
            "thinking before a call",
            [THOUGHT + call + stop, THOUGHT + call + stop, THOUGHT + answer],
        )
    elif think is not None and not gives_empty(
        chat.decode(chat.prompt([_message("", role="user")], tools).ids)
    ):
        yield (
            "thinking before a call",
            [think(THOUGHT) + call + stop, think(THOUGHT) + call + stop, answer],
        )
    ending = chat.stops.suffix.strip()
    body = call.removesuffix(ending)
    at = len(body) - max(3, len(body) // 8)
    yield (
        "a malformed call",
        [body[:at] + ending + ("" if chat.stops.closing else stop), call + stop, answer],
    )


def _message(
    text: str, arguments: Mapping[str, Any] | None = None, role: str = "assistant"
) -> Message:
    if arguments is None:
        return {"role": role, "content": text}
    function = {"name": "look", "arguments": dict(arguments)}
    calls = [{"id": "c00000000", "type": "function", "function": function}]
    return {"role": role, "content": text, "tool_calls": calls}
