"""The template audit behind `agentrl doctor --template`: whether a template can be trained with, and its oddities.

It plays conversations: a scripted model writes exactly the template's own text, deltas are appended, and the result is
compared with full renderings. So it finds what would happen in training, for any template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from agentrl_cli.chat.drift import check_episode
from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.spans import Rendered, shared_prefix
from agentrl_cli.chat.template_probe import PROBE_TOOL, assistant, tool, user
from agentrl_cli.chat.template_syntax import Tools
from agentrl_cli.chat.thinking import MARKERS, drop_empty, drop_empty_lines, family_thinking
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Episode, Message, Origin, Tokens, Turn


@dataclass(frozen=True, slots=True)
class Conversations:
    """Contents that the conversations of a pack can have. A template is judged by these, not by all possible ones."""

    users: bool = True
    """A second user message: from a simulated user, or from an environment."""
    system: bool = True
    """A system text."""
    tools: bool = True

    def among(self, others: Conversations) -> bool:
        """True if these need nothing that the others cannot contain."""
        own, available = (astuple(one) for one in (self, others))
        return all(there or not needed for needed, there in zip(own, available, strict=True))

    @property
    def lacking(self) -> str:
        """The contents that they cannot have, in words."""
        has = {
            "a second user message": self.users,
            "a system text": self.system,
            "tools": self.tools,
        }
        return " or ".join(name for name, there in has.items() if not there)


EVERY = Conversations()


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit. The template can be trained with as it is if `append_only` and `stop_token_trained`."""

    append_only: bool
    """Prompt, turns and deltas equal a full rendering, thinking aside."""
    stop_token_trained: bool
    """Assistant turns end with a token that the model samples."""
    thinking_by_design: bool
    """The template drops the thinking of earlier turns; the appended ids keep it."""
    problems: tuple[str, ...] = ()
    """Why it cannot be used as it is."""
    notes: tuple[str, ...] = ()
    """Oddities that do not prevent training."""
    supports_tools: bool = False
    supports_system: bool = False
    parallel_calls: bool = False
    parser: str = ""
    reads_calls: bool = True
    """The parser reads the calls that the template writes."""
    append_only_without: str = ""
    """Return the contents that conversations must lack to extend by appending; empty if they do anyway, or if
    nothing helps.
    """
    would_skip: tuple[str, ...] = ()
    """What a model may write around a call that would make training skip the episode (rollout/rehearse.py)."""

    @property
    def distinct(self) -> tuple[str, ...]:
        """The problems, one for each reason, as probes often fail for the same. Each quotes its first probe."""
        found: dict[str, tuple[list[str], str]] = {}
        for problem in self.problems:
            name, _, text = problem.rstrip(".").partition(": ")
            # The reason without the texts that differ, which are each probe's own.
            reason = re.split(r": (?:it asks with|a full rendering has) ", text)[0]
            found.setdefault(reason, ([], text))[0].append(name)
        return tuple(f"{', '.join(names)}: {text}" for names, text in found.values())

    @property
    def reason(self) -> str:
        """The problems in one line."""
        return "; ".join(self.distinct)

    @property
    def ok(self) -> bool:
        return self.append_only and self.stop_token_trained


def audit(chat: Chat, which: Conversations = EVERY) -> AuditReport:
    """Play the probes that are among these conversations; the latest audits are kept.

    Never raises; if a template refuses to render anything, that is its problem.
    """
    return _audit(chat, which)  # a cache takes audit(chat) and audit(chat, EVERY) for two calls


@lru_cache(8)
def _audit(chat: Chat, which: Conversations) -> AuditReport:
    problems: list[str] = []
    for name, messages, needs in _plays():
        if not needs.among(which):
            continue
        play = _play_answer if messages[-1]["role"] == "assistant" else _play
        if problem := play(chat, messages, [PROBE_TOOL] if needs.tools else None):
            problems.append(f"{name}: {problem}")
    thinking = _drops_thinking(chat)
    several = [user("u"), _calls(2), tool("r", "c00000000"), tool("s", "c00000001")]
    parallel = chat.able.results
    try:
        chat.render(several, [PROBE_TOOL])
    except TemplateError:
        parallel = False
    append_only, stopped = not problems, False
    try:
        ids = chat.assistant_ids(assistant("done"))
        stopped = bool(ids) and ids[-1] in chat.stop_ids
    except TemplateError as error:
        problems.append(f"a turn: {error.message}")
    return AuditReport(
        append_only=append_only,
        stop_token_trained=stopped,
        thinking_by_design=thinking,
        problems=tuple(problems),
        notes=_list_notes(chat, thinking, parallel),
        supports_tools=chat.able.results and chat.able.schemas,
        supports_system=chat.able.system,
        parallel_calls=parallel,
        parser=chat.parser.name,
        reads_calls=chat.syntax.reads_calls,
    )


def append_only_without(chat: Chat) -> str:
    """Return the contents that conversations must lack to extend by appending; empty if they do anyway, or if
    nothing helps.
    """
    if audit(chat).append_only:
        return ""
    fewer = (Conversations(users=False), Conversations(users=False, system=False))
    return next((which.lacking for which in fewer if audit(chat, which).append_only), "")


def require_append_only(chat: Chat, which: Conversations = EVERY) -> AuditReport:
    """Return the audit. Raises TemplateError with the reason if the template does not extend these by appending."""
    report = audit(chat, which)
    if not report.append_only and not chat.append_only:
        raise TemplateError(
            f"The chat template cannot be extended by appending: {report.reason}.",
            hint="Use a template that can (--set model.chat.template=FILE), or --set model.chat.append_only=true to"
            " train with the appended rendering, which then differs from this template's own.",
        )
    return report


def require_calls_read(chat: Chat) -> None:
    """Raise TemplateError if the parser cannot read the template's own calls: no tool would ever be executed."""
    if not chat.syntax.reads_calls:
        raise TemplateError(
            f"The parser {chat.parser.name} does not read the tool calls that the chat template writes.",
            hint="Name the one for this syntax (--set model.chat.parser=NAME), or one of your own (module:object).",
        )


def _calls(count: int = 1, first: int = 0) -> Message:
    calls = [
        {
            "id": f"c{first + n:08d}",
            "type": "function",
            "function": {"name": "probe", "arguments": {"x": f"v{n}"}},
        }
        for n in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _list_notes(chat: Chat, thinking: bool, parallel: bool) -> tuple[str, ...]:
    able, name, stops = chat.able, chat.parser.name, ", ".join(chat.stops.texts)
    notes = (
        (
            thinking,
            "thinking of earlier turns is dropped by the template; appended ids keep it (drift by_design)",
        ),
        (
            able.results and not parallel,
            "the template accepts one tool call a turn; results of several are appended one by one",
        ),
        (
            not chat.stops.closing,
            f"nothing closes an assistant turn: the model stops with the next message's first token ({stops})",
        ),
        # What the adapter writes (template_syntax.py).
        (
            not able.system,
            "the template has no system role: the system text is put before the first user message",
        ),
        (
            not able.schemas,
            f"the template has no tool schemas: they are described in the system text, with {name}'s syntax",
        ),
        (
            not able.calls,
            f"the template has no tool calls: they stand in the assistant's text, in {name}'s syntax",
        ),
        (
            not able.results,
            "the template has no tool results: they come as user messages, in <tool_response> tags",
        ),
        (
            not chat.syntax.reads_calls,
            f"the parser {name} does not read the tool calls that the template writes: --set model.chat.parser=NAME",
        ),
    )
    return tuple(note for holds, note in notes if holds)


def _plays() -> list[tuple[str, list[Message], Conversations]]:
    """Return probes: a name, the conversation, and the contents that a pack must have for it."""
    nothing, called = Conversations(False, False, False), Conversations(users=False, system=False)
    spoken, talked = replace(nothing, system=True), Conversations(system=False)
    tools_twice = [user("one"), _calls(), tool("r"), _calls(first=1), tool("s", "c00000001")]
    return [
        (
            "several turns",
            [user("one"), assistant("first"), user("two"), assistant("second"), user("three")],
            replace(talked, tools=False),
        ),
        ("a tool result", [user("one"), _calls(), tool("r")], called),
        ("two tool turns", tools_twice, called),
        (
            "a system text",
            [{"role": "system", "content": "s"}, *tools_twice],
            replace(called, system=True),
        ),
        (
            "an answer after a tool",
            [user("one"), _calls(), tool("r"), assistant("done"), user("two")],
            talked,
        ),
        ("an answer", [user("one"), assistant("first")], nothing),
        (
            "an answer to a system text",
            [{"role": "system", "content": "s"}, user("one"), assistant("first")],
            spoken,
        ),
    ]


def _play(chat: Chat, messages: Sequence[Message], tools: Tools) -> str:
    """Return the problem when `messages` are played as an episode; empty if none."""
    try:
        whole = chat.conversation(messages, tools)
        appended = whole.ids
        stop, history = chat.stop_ids[0], chat.tokenizer.id_of(chat.stops.history)
        if history is not None:  # a sampled stop token, as the template writes it later on
            owned = zip(whole.ids, whole.origin, strict=True)
            ours = int(Origin.MODEL)
            appended = [history if (id_, by) == (stop, ours) else id_ for id_, by in owned]
        first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        asked = len(chat.render(messages[:first], tools).ids)
        full = chat.render(messages, tools, add_generation_prompt=True).ids
    except TemplateError as error:
        return error.message
    both = chat.decode(full), chat.decode(appended)
    if both[0] == both[1]:
        return ""  # in other tokens, if they differ: not the template's fault
    if any(marker in "".join(both) for marker in MARKERS) and any(
        bare(both[0]) == bare(both[1]) for bare in (drop_empty, drop_empty_lines)
    ):
        return ""  # empty blocks of thinking depend on the position of a turn: by design
    at = shared_prefix(appended, full)
    texts = chat.decode(full[at : at + 16]), chat.decode(appended[at : at + 16])
    return _TRAIT.format(_trait(chat, whole, at, asked), *texts)


def _play_answer(chat: Chat, messages: Sequence[Message], tools: Tools) -> str:
    """Return the same for an episode that ends with an answer, compared as the drift guard does."""
    try:
        whole = chat.conversation(messages, tools)
    except TemplateError as error:
        return error.message
    turns = tuple(
        Turn(n, role, (message,), start, end)
        for n, (message, (role, start, end)) in enumerate(zip(messages, whole.spans, strict=True))
    )
    tokens = Tokens.from_ids(whole.ids, whole.origin)
    for drift in check_episode(Episode("audit", "audit", turns=turns, tokens=tokens), chat, tools):
        if drift.kind == "structural":
            return _TRAIT.format("it rewrites the prompt", drift.expected, drift.got)
    return ""


_TRAIT = "{}: a full rendering has {!r} where appending gives {!r}"


def _trait(chat: Chat, appended: Rendered, at: int, asked: int) -> str:
    """Name the template's habit that makes its rendering differ from the appended ids at token `at`.

    `asked`: where the prompt's messages end and the first generation prompt begins.
    """
    role, start, _ = next((span for span in appended.spans if span[1] <= at < span[2]), ("", 0, 0))
    if at < asked:
        return "it rewrites the prompt when the conversation continues"
    if start == 0 or (role == "assistant" and at == start):
        return "it begins an earlier turn differently from its generation prompt"
    if role != "assistant":
        return "what it writes between turns depends on the rest of the conversation"
    if appended.ids[at] in chat.stop_ids:
        return "it ends an earlier turn differently from the model"
    return "it rewrites what the model wrote"


def _drops_thinking(chat: Chat) -> bool:
    write = family_thinking(chat.source) or "<think>\n{}\n</think>\n\n".format
    thought = parse_text(f"{write('qqthought')}first", chat.parser).message
    try:
        text = chat.decode(chat.render([user("one"), thought, user("two")]).ids)
    except TemplateError:
        return False
    return "qqthought" not in text
