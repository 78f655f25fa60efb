"""The template audit behind `agentrl doctor --template`: can this template be trained with, and what is odd about it.

It plays conversations: a scripted model writes exactly what the template would, deltas are appended, and the result is
compared with full renderings. So what is found is what would happen in training, for any template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl_cli.chat.render import Chat, Tools
from agentrl_cli.chat.rendered import Rendered
from agentrl_cli.chat.spans import shared_prefix
from agentrl_cli.chat.template_probe import PROBE_TOOL, tool, user
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message

_SHOWN = re.compile(r": (?:it asks with|a full rendering has) ")
"""Where a problem goes on to show the texts that differ, which every probe has of its own."""


@dataclass(frozen=True)
class AuditReport:
    """What an audit found. Usable for training as it is where `append_only` and `stop_token_trained`."""

    append_only: bool
    """Prompt, turns and deltas give what a full rendering gives, thinking aside."""
    stop_token_trained: bool
    """Assistant turns end with a token of their own that the model samples."""
    thinking_by_design: bool
    """The template drops the thinking of earlier turns; the appended ids keep it."""
    problems: tuple[str, ...] = ()
    """Why it cannot be used as it is, in words."""
    notes: tuple[str, ...] = ()
    """What is worth knowing."""
    supports_tools: bool = False
    supports_system: bool = False
    parallel_calls: bool = False
    parser: str = ""
    stop_tokens: tuple[str, ...] = ()
    reads_calls: bool = True
    """The parser reads the calls that the template writes."""
    first_difference: tuple[str, str] | None = field(default=None)
    """(full rendering, appended) from the first difference on, where there is one."""

    @property
    def told(self) -> tuple[str, ...]:
        """The problems for people; probes often fail for one reason: it is told once, with what the first shows."""
        found: dict[str, tuple[list[str], str]] = {}
        for problem in self.problems:
            name, _, told = problem.rstrip(".").partition(": ")
            found.setdefault(_SHOWN.split(told)[0], ([], told))[0].append(name)
        return tuple(f"{', '.join(names)}: {told}" for names, told in found.values())

    @property
    def reason(self) -> str:
        """The problems in one line."""
        return "; ".join(self.told)

    @property
    def ok(self) -> bool:
        return self.append_only and self.stop_token_trained


def audit(chat: Chat) -> AuditReport:
    """Play the probes. Never raises; a template that refuses to render anything has that as its problem."""
    problems: list[str] = []
    notes: list[str] = []
    difference: tuple[str, str] | None = None
    for name, messages, with_tools in _plays():
        problem, found = _play(chat, messages, [PROBE_TOOL] if with_tools else None)
        if problem:
            problems.append(f"{name}: {problem}")
            difference = difference or found
    thinking = _drops_thinking(chat)
    if thinking:
        notes.append("thinking of earlier turns is dropped by the template; appended ids keep it (drift by_design)")
    several = [user("u"), _calls(2), tool("r", "c00000000"), tool("s", "c00000001")]
    parallel = chat.able.results and _renders(chat, several)
    if chat.able.results and not parallel:
        notes.append("the template takes one tool call a turn; results of several are appended one by one")
    if not chat.stops.closing:
        stops = ", ".join(chat.stops.texts)
        notes.append(f"nothing closes an assistant turn: the model stops with the next message's first token ({stops})")
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
        stop_tokens=tuple(chat.tokenizer.token_text(id_) for id_ in chat.stop_ids),
        reads_calls=chat.reads_calls,
        first_difference=difference,
    )


def require_append_only(chat: Chat) -> AuditReport:
    """The audit. Raises TemplateError with the reason where the template does not extend by appending."""
    report = chat.audit()
    if not report.append_only and not chat.append_only:
        raise TemplateError(
            f"The chat template cannot be extended by appending: {report.reason}.",
            hint="Give a template that can (--set model.chat_template=FILE), or --set model.append_only=true to"
            " train with the appended rendering, which then differs from this template's own.",
        )
    return report


def require_calls_read(chat: Chat) -> None:
    """Raise TemplateError where the parser does not read the template's own calls: no tool would ever be executed."""
    if not chat.reads_calls:
        raise TemplateError(
            f"The parser {chat.parser.name} does not read the tool calls that the chat template writes.",
            hint="Name the one for this syntax (--set model.parser=NAME), or one of your own (module:object).",
        )


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(count: int = 1, text: str = "", first: int = 0) -> Message:
    calls = [
        {"id": f"c{first + n:08d}", "type": "function", "function": {"name": "probe", "arguments": {"x": f"v{n}"}}}
        for n in range(count)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _lacking(chat: Chat) -> list[str]:
    """What is said in another way, since the template has none of its own (adapt.py), and calls that nobody reads."""
    able, name = chat.able, chat.parser.name
    lacks = {
        "no system role: the system text stands in front of the first user message": able.system,
        f"no tool schemas: they are described in the system text, with {name}'s syntax": able.schemas,
        f"no tool calls: they stand in the assistant's text, in {name}'s syntax": able.calls,
        "no tool results: they come as user messages, in <tool_response> tags": able.results,
    }
    found = [f"the template has {what}" for what, has in lacks.items() if not has]
    if not chat.reads_calls:
        found.append(
            f"the parser {name} does not read the tool calls that the template writes: --set model.parser=NAME"
        )
    return found


def _plays() -> list[tuple[str, list[Message], bool]]:
    """Name, conversation, whether tools are listed."""
    tools_twice = [user("one"), _calls(), tool("r"), _calls(first=1), tool("s", "c00000001")]
    return [
        ("several turns", [user("one"), _answer("first"), user("two"), _answer("second"), user("three")], False),
        ("a tool result", [user("one"), _calls(), tool("r")], True),
        ("two tool turns", tools_twice, True),
        ("a system text", [{"role": "system", "content": "s"}, *tools_twice], True),
        ("an answer after a tool", [user("one"), _calls(), tool("r"), _answer("done"), user("two")], True),
    ]


def _play(chat: Chat, messages: Sequence[Message], tools: Tools) -> tuple[str, tuple[str, str] | None]:
    """What goes wrong when `messages` are played as an episode, and both texts from the first difference on."""
    try:
        whole = chat.conversation(messages, tools)
        appended = whole.ids
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
        return "", None  # the same text in other tokens: no fault of the template
    squeezes = (_squeezed_thinking, _without_thinking) if "<think>" in "".join(both) else ()
    if any(squeezed(both[0]) == squeezed(both[1]) for squeezed in squeezes):
        return "", None  # empty thinking blocks come and go with the position of a turn: by design
    return (
        f"{_trait(chat, whole, at, asked)}: a full rendering has {texts[0]!r} where appending gives {texts[1]!r}",
        texts,
    )


def _trait(chat: Chat, appended: Rendered, at: int, asked: int) -> str:
    """What a template does whose rendering differs from what was appended at token `at`.

    `asked`: where the prompt's messages end, and it asks for the first turn.
    """
    role, start, _ = next((span for span in appended.spans if span[1] <= at < span[2]), ("", 0, 0))
    if at < asked:
        return "it rewrites the prompt when the conversation goes on"
    if start == 0 or (role == "assistant" and at == start):
        return "it begins an earlier turn otherwise than it asked for it"
    if role != "assistant":
        return "what it writes between turns depends on the rest of the conversation"
    if appended.ids[at] in chat.stop_ids:
        return "it ends an earlier turn otherwise than the model did"
    return "it rewrites what the model said"


def _squeezed_thinking(text: str) -> str:
    return re.sub(r"<think>\s*</think>\s*", "", text)


def _without_thinking(text: str) -> str:
    """The same with the line breaks around: MiniMax M2 writes some beside a block that it leaves out."""
    return re.sub(r"\n+", "\n", re.sub(r"\s*<think>\s*</think>\s*", "\n", text))


def _drops_thinking(chat: Chat) -> bool:
    """True where a later user message makes the template forget an earlier turn's thinking."""
    thought = "<think>\nqqthought\n</think>\n\nfirst"
    try:
        text = chat.decode(chat.render([user("one"), _answer(thought), user("two")]).ids)
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
    """True where the last id of a demonstrated turn is a stop token; adds to `problems` where the token is not an
    end token that a model would be stopped by."""
    try:
        ids = chat.assistant_ids(_answer("done"))
    except TemplateError as error:
        problems.append(f"a turn: {error.message}")
        return False
    return bool(ids) and ids[-1] in chat.stop_ids
