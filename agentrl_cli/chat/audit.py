"""The template audit behind `agentrl doctor --template`: whether a template can be trained with, and its oddities.

It plays conversations: a scripted model writes exactly the template's own text, deltas are appended, and the result is
compared with full renderings. So it finds what would happen in training, for any template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from weakref import WeakKeyDictionary

from agentrl_cli.chat.drift import check_episode
from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.spans import Rendered, shared_prefix
from agentrl_cli.chat.template_probe import PROBE_TOOL, tool, user
from agentrl_cli.chat.template_syntax import Tools
from agentrl_cli.chat.thinking import drop_empty, drop_empty_lines, family_thinking, has_thinking
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Episode, Message, Origin, Tokens, Turn

_SHOWN = re.compile(r": (?:it asks with|a full rendering has) ")
"""Separates a problem's reason from the texts that differ, which are each probe's own."""


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
    first_difference: tuple[str, str] | None = None
    """(full rendering, appended) from the first difference on; None if they are equal."""
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
            found.setdefault(_SHOWN.split(text)[0], ([], text))[0].append(name)
        return tuple(f"{', '.join(names)}: {text}" for names, text in found.values())

    @property
    def reason(self) -> str:
        """The problems in one line."""
        return "; ".join(self.distinct)

    @property
    def ok(self) -> bool:
        return self.append_only and self.stop_token_trained


_REPORTS: WeakKeyDictionary[Chat, dict[Conversations, AuditReport]] = WeakKeyDictionary()


def audit(chat: Chat, which: Conversations = EVERY) -> AuditReport:
    """Play the probes that are among these conversations. One audit is kept for each chat and `which`.

    Never raises; if a template refuses to render anything, that is its problem.
    """
    reports = _REPORTS.setdefault(chat, {})
    if which not in reports:
        reports[which] = _audit(chat, which)
    return reports[which]


def _audit(chat: Chat, which: Conversations) -> AuditReport:
    problems: list[str] = []
    notes: list[str] = []
    difference: tuple[str, str] | None = None
    for name, messages, needs in _plays():
        if not needs.among(which):
            continue
        play = _play_answer if messages[-1]["role"] == "assistant" else _play
        problem, found = play(chat, messages, [PROBE_TOOL] if needs.tools else None)
        if problem:
            problems.append(f"{name}: {problem}")
            difference = difference or found
    thinking = _drops_thinking(chat)
    if thinking:
        notes.append(
            "thinking of earlier turns is dropped by the template; appended ids keep it (drift by_design)"
        )
    several = [user("u"), _calls(2), tool("r", "c00000000"), tool("s", "c00000001")]
    parallel = chat.able.results and _renders(chat, several)
    if chat.able.results and not parallel:
        notes.append(
            "the template accepts one tool call a turn; results of several are appended one by one"
        )
    if not chat.stops.closing:
        stops = ", ".join(chat.stops.texts)
        notes.append(
            f"nothing closes an assistant turn: the model stops with the next message's first token ({stops})"
        )
    notes += _lacking(chat)
    return AuditReport(
        append_only=not problems,
        stop_token_trained=_stop_trained(chat, problems),
        thinking_by_design=thinking,
        problems=tuple(problems),
        notes=tuple(notes),
        supports_tools=chat.supports_tools,
        supports_system=chat.able.system,
        parallel_calls=parallel,
        parser=chat.parser.name,
        reads_calls=chat.reads_calls,
        first_difference=difference,
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
    if not chat.reads_calls:
        raise TemplateError(
            f"The parser {chat.parser.name} does not read the tool calls that the chat template writes.",
            hint="Name the one for this syntax (--set model.chat.parser=NAME), or one of your own (module:object).",
        )


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(count: int = 1, text: str = "", first: int = 0) -> Message:
    calls = [
        {
            "id": f"c{first + n:08d}",
            "type": "function",
            "function": {"name": "probe", "arguments": {"x": f"v{n}"}},
        }
        for n in range(count)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _lacking(chat: Chat) -> list[str]:
    """Return notes on texts that the adapter writes (template_syntax.py), and on calls that the parser cannot read."""
    able, name = chat.able, chat.parser.name
    lacks = {
        "no system role: the system text is put before the first user message": able.system,
        f"no tool schemas: they are described in the system text, with {name}'s syntax": able.schemas,
        f"no tool calls: they stand in the assistant's text, in {name}'s syntax": able.calls,
        "no tool results: they come as user messages, in <tool_response> tags": able.results,
    }
    found = [f"the template has {what}" for what, has in lacks.items() if not has]
    if not chat.reads_calls:
        found.append(
            f"the parser {name} does not read the tool calls that the template writes: --set model.chat.parser=NAME"
        )
    return found


def _plays() -> list[tuple[str, list[Message], Conversations]]:
    """Return probes: a name, the conversation, and the contents that a pack must have for it."""
    nothing, called = Conversations(False, False, False), Conversations(users=False, system=False)
    spoken, talked = replace(nothing, system=True), Conversations(system=False)
    tools_twice = [user("one"), _calls(), tool("r"), _calls(first=1), tool("s", "c00000001")]
    return [
        (
            "several turns",
            [user("one"), _answer("first"), user("two"), _answer("second"), user("three")],
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
            [user("one"), _calls(), tool("r"), _answer("done"), user("two")],
            talked,
        ),
        ("an answer", [user("one"), _answer("first")], nothing),
        (
            "an answer to a system text",
            [{"role": "system", "content": "s"}, user("one"), _answer("first")],
            spoken,
        ),
    ]


def _play(
    chat: Chat, messages: Sequence[Message], tools: Tools
) -> tuple[str, tuple[str, str] | None]:
    """Return the problem when `messages` are played as an episode (empty: none), and both texts
    from the difference on.
    """
    try:
        whole = chat.conversation(messages, tools)
        appended = _as_history(chat, whole)
        first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        asked = len(chat.render(messages[:first], tools).ids)
        full = chat.render(messages, tools, add_generation_prompt=True).ids
    except TemplateError as error:
        return error.message, None
    if appended == full:
        return "", None
    at = shared_prefix(appended, full)
    texts = chat.decode(full[at : at + 16]), chat.decode(appended[at : at + 16])
    both = chat.decode(full), chat.decode(appended)
    if both[0] == both[1]:
        return "", None  # the same text in other tokens: not the template's fault
    if has_thinking("".join(both)) and any(
        bare(both[0]) == bare(both[1]) for bare in (drop_empty, drop_empty_lines)
    ):
        return "", None  # empty blocks of thinking depend on the position of a turn: by design
    return (
        f"{_trait(chat, whole, at, asked)}: a full rendering has {texts[0]!r} where appending gives {texts[1]!r}",
        texts,
    )


def _play_answer(
    chat: Chat, messages: Sequence[Message], tools: Tools
) -> tuple[str, tuple[str, str] | None]:
    """Return the same for an episode that ends with an answer, compared as the drift guard does."""
    try:
        whole = chat.conversation(messages, tools)
    except TemplateError as error:
        return error.message, None
    spans = enumerate(zip(messages, whole.spans, strict=True))
    turns = tuple(
        Turn(n, role, (message,), start, end) for n, (message, (role, start, end)) in spans
    )
    episode = Episode(
        "audit", "audit", turns=turns, tokens=Tokens.from_ids(whole.ids, whole.origin)
    )
    lost = next(
        (drift for drift in check_episode(episode, chat, tools) if drift.kind == "structural"), None
    )
    if lost is None:
        return "", None
    texts = lost.expected, lost.got
    return (
        f"it rewrites the prompt: a full rendering has {texts[0]!r} where appending gives {texts[1]!r}",
        texts,
    )


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


def _as_history(chat: Chat, appended: Rendered) -> list[int]:
    """Return the ids of a conversation that continues, each sampled stop token as the template's history writes it."""
    stop, history = chat.stop_ids[0], chat.tokenizer.id_of(chat.stops.history)
    if history is None:
        return appended.ids
    owned = zip(appended.ids, appended.origin, strict=True)
    return [history if id_ == stop and origin == Origin.MODEL else id_ for id_, origin in owned]


def _drops_thinking(chat: Chat) -> bool:
    """True if a later user message makes the template drop an earlier turn's thinking."""
    write = family_thinking(chat.source) or "<think>\n{}\n</think>\n\n".format
    thought = parse_text(f"{write('qqthought')}first", chat.parser).message
    try:
        text = chat.decode(chat.render([user("one"), thought, user("two")]).ids)
    except TemplateError:
        return False
    return "qqthought" not in text


def _renders(chat: Chat, messages: Sequence[Message]) -> bool:
    try:
        chat.render(messages, [PROBE_TOOL] if any(m.get("tool_calls") for m in messages) else None)
    except TemplateError:
        return False
    return True


def _stop_trained(chat: Chat, problems: list[str]) -> bool:
    """True if the last id of a demonstrated turn is a stop token. Adds to `problems` if the template refuses one."""
    try:
        ids = chat.assistant_ids(_answer("done"))
    except TemplateError as error:
        problems.append(f"a turn: {error.message}")
        return False
    return bool(ids) and ids[-1] in chat.stop_ids
