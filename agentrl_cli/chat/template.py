"""Chat templates: Jinja in a sandbox, with the filters and functions that Hugging Face templates expect.

Two intended differences from transformers: the clock is read once, when the template is compiled, so a conversation
that crosses midnight does not drift; and tool-call arguments are passed as the template wants them, object or text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from agentrl_cli.chat.template_limits import LimitedEnvironment, TooMuch
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message, ToolSchema

PROBE = "zqcontent"
FAILURES = (RecursionError, MemoryError, ArithmeticError, LookupError, ValueError, AttributeError)
"""What Python raises inside a template, besides the TypeErrors that say how it wants its arguments."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names that templates have for a message's thinking; the first is the one that messages have here."""


class ChatTemplate:
    """A compiled chat template. `specials` are the token texts it may name (`bos_token`, `eos_token`)."""

    def __init__(
        self,
        source: str,
        specials: Mapping[str, str] | None = None,
        *,
        with_tools: str | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> None:
        """`with_tools`: the template that a model ships for conversations with tools, if it is another one.

        `variables` are further names (`enable_thinking`). Raises TemplateError if a source does not compile.
        """
        self.source = source + (with_tools or "")
        self._now = now or datetime.now()
        given: Any = {"variables": variables, "now": self._now}
        self._tool = ChatTemplate(with_tools, specials, **given) if with_tools else self
        self._variables = {
            "bos_token": "",
            "eos_token": "",
            **(specials or {}),
            **(variables or {}),
        }
        self._arguments_as_text = False
        used = [n for n in THOUGHTS if re.search(rf"""(?:message|m)\.{n}\b|['"]{n}['"]""", source)]
        self._thinking = [*used, THOUGHTS[0]][0]
        environment = self._environment = LimitedEnvironment(
            {"tojson": _tojson},
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._now.strftime
        self._content_as_parts = False
        try:
            environment.start()
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateError(
                f"The chat template does not compile: {error} (line {error.lineno})."
            ) from error
        except (SyntaxError, *FAILURES) as error:
            # SyntaxError: Python's own limits, as on the levels of an expression
            raise TemplateError(f"The chat template does not compile: {_kind(error)}.") from error
        self._content_as_parts = self._wants_parts()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation. Raises TemplateError with the template's own reason if it refuses."""
        if tools and self._tool is not self:
            return self._tool.render(messages, tools, add_generation_prompt)
        as_text, called = self._arguments_as_text, any(m.get("tool_calls") for m in messages)
        try:
            try:
                return self._render(messages, tools, add_generation_prompt, as_text)
            except TypeError:
                if as_text or not called:
                    raise
            # DeepSeek's template joins the arguments to text, so it needs JSON text; all others need an object.
            found = self._render(messages, tools, add_generation_prompt, True)
        except TypeError as error:
            raise TemplateError(f"The chat template failed: {error}.") from error
        self._arguments_as_text = True
        return found

    def _plain(self, message: Message, arguments_as_text: bool) -> Message:
        """Return a copy as templates expect it: content is text, call arguments are an object (or JSON text), no field
        is None.
        """
        plain = {key: value for key, value in message.items() if value is not None}
        content = plain.setdefault("content", "")
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            plain["content"] = "".join(part["text"] for part in content)
        if calls := plain.pop("tool_calls", None):
            plain["tool_calls"] = [_plain_call(call, arguments_as_text) for call in calls]
        if THOUGHTS[0] in plain:
            plain[self._thinking] = plain.pop(THOUGHTS[0])
        if self._content_as_parts and isinstance(plain["content"], str):
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        return plain

    def _wants_parts(self) -> bool:
        """True if the template shows a content only as a list of parts (vision models)."""
        probe: list[Message] = [{"role": "user", "content": PROBE}]
        for parts in (False, True):
            self._content_as_parts = parts
            with contextlib.suppress(TemplateError, TypeError):
                if PROBE in self._render(probe, None, False, False):
                    return parts
        return False

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        generation: bool,
        as_text: bool,
    ) -> str:
        try:
            self._environment.start()
            return self._template.render(
                messages=[self._plain(message, as_text) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=generation,
                **self._variables,
            )
        except TooMuch as error:
            raise TemplateError(
                f"The chat template is refused: {error}.",
                hint="Use another: --set model.chat.template=FILE",
            ) from error
        except FAILURES as error:
            raise TemplateError(f"The chat template failed: {_kind(error)}.") from error
        except JinjaError as error:
            raise TemplateError(f"The chat template refuses this conversation: {error}") from error


def _plain_call(call: Mapping[str, Any], arguments_as_text: bool) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    arguments = function.get("arguments") or {}  # servers send "" for a call without arguments
    if arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not arguments_as_text and isinstance(arguments, str):
        with contextlib.suppress(json.JSONDecodeError):  # text that is not JSON is shown unchanged
            arguments = json.loads(arguments)
    function["arguments"] = arguments
    return {
        "type": "function",
        **{k: v for k, v in call.items() if k in {"id", "type"}},
        "function": function,
    }


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks trained text in some templates, renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _kind(error: BaseException) -> str:
    """Return an error of Python inside a template, in one line."""
    if isinstance(error, RecursionError):
        return "it calls itself without an end, or is nested too deeply"
    if isinstance(error, MemoryError):
        return "it takes more memory than there is"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"


def _raise_exception(message: str) -> None:
    raise JinjaError(message)
