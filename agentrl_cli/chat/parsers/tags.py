"""Calls whose arguments are one tag each, values as bare text, or as JSON if the schema or the tag wants another type.

glm           `<tool_call>f`, then `<arg_key>` and `<arg_value>` in turn: GLM-4.5 and later
qwen3_coder   `<function=f>` and `<parameter=x>`, a line block each
minimax_m2    `<invoke name="f">` and `<parameter name="x">` in a section
deepseek_v32  the same with a prefix; `string="true"` marks text. Its section has another name in V4
kimi_k3       tags of control tokens with the type of each argument
minimax_m3    nested elements, every tag after `]<]minimax[>[`

In MiniMax M3 a list is `<item>` elements. Types come from the tool's schema: the template writes values without them.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl_cli.chat.parsers.base import (
    MOST_ARGUMENTS,
    BlockParser,
    Markers,
    ParsedText,
    call,
    call_with,
    parse_blocks,
    read_json,
    typed_as,
    typed_value,
)
from agentrl_cli.types import ToolCall, ToolSchema


@dataclass
class TagParser:
    """A syntax with one tag for each argument."""

    name: str
    block: Markers
    head: re.Pattern[str]
    """What begins a block; the group is the tool's name."""
    head_error: str
    argument: re.Pattern[str]
    """One argument: the groups `key`, `value`, and perhaps `kind` ("string", "true": text; else JSON) or `quoted`."""
    opening: str
    """How an argument begins."""
    written: str
    """The format of a call, with `{name}` and `{arguments}`."""
    pair: str
    """The format of an argument, with `{key}`, `{value}` and `{kind}`."""
    markers: tuple[str, ...]
    sections: tuple[Markers, ...] = ()
    """What may surround the blocks; the first that a turn contains counts."""
    join: bool = False
    """Several sections in a turn are one: the text between them is markup, of a message for each call."""
    closing: str = ""
    """How an argument ends; its absence is then an error of its own."""
    stray: str = "unexpected text"
    """The error for other text between the arguments, which follows it."""
    tail: str = ""
    """What must end the arguments inside the block."""
    key: Callable[[str], str] = str
    """An argument's name from the text of its tag."""
    kind: Callable[[Any], str] = lambda value: ""
    quote: Callable[[str], str] = str
    """How a text is written."""
    escape: Callable[[str], str] = str
    """How a name is written."""
    prepare: Callable[[str], str] = str
    """Takes markup out of a turn that is not content."""
    whole: re.Pattern[str] | None = None
    """The form in which all arguments stand in one JSON object, if the syntax has one too."""

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        text = self.prepare(text)
        section = next((pair for pair in self.sections if pair[0] in text), None)
        if section is not None and self.join and text.count(section[0]) > 1:
            *parts, last = text.split(section[0])
            heads = [part.partition(section[1]) for part in parts]
            closed = [head if end else head + section[0] for head, end, _ in heads]
            text = "".join(closed) + last
        return parse_blocks(text, self.block, self._read, section, tools)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        pairs = ""
        for key, value in arguments.items():
            quoted = isinstance(value, str)
            text = self.quote(value) if quoted else json.dumps(value, ensure_ascii=False)
            pairs += self.pair.format(key=self.escape(key), value=text, kind=self.kind(value))
        return self.written.format(name=self.escape(name), arguments=pairs)

    def _read(self, raw: str, tools: Sequence[ToolSchema]) -> ToolCall:
        head = self.head.match(raw)
        if not head:
            return call(raw=raw, error=self.head_error)
        name, body = self.key(head[1]).strip(), raw[head.end() :]
        if not name:
            return call(raw=raw, error="the function has no name")
        if self.whole and (whole := self.whole.fullmatch(body.strip())):
            return call_with(name, whole[1], raw)
        try:
            return call(name, self._arguments(name, body, tools), raw=raw)
        except ValueError as error:
            return call(name, raw=raw, error=str(error))

    def _arguments(self, name: str, body: str, tools: Sequence[ToolSchema]) -> dict[str, Any]:
        """Return the arguments of a call. Raises ValueError with the fault."""
        if self.tail:
            body, closed, rest = body.partition(self.tail)
            if not closed:
                raise ValueError(f"{self.tail} is missing")
            if rest.strip():
                raise ValueError(f"there is text after {self.tail}: {rest.strip()[:40]!r}")
        if body.count(self.opening) > MOST_ARGUMENTS:  # each is searched for to the end of the text
            raise ValueError(f"more than {MOST_ARGUMENTS} arguments")
        if loose := self.argument.sub("", body).strip():
            unclosed = self.closing and loose.startswith(self.opening)
            raise ValueError(
                f"{self.closing} is missing" if unclosed else f"{self.stray} {loose[:40]!r}"
            )
        found: dict[str, Any] = {}
        for match in self.argument.finditer(body):
            key = self.key(match["key"])
            found[key] = _value(match, tools, name, key)
        return found


def _value(match: re.Match[str], tools: Sequence[ToolSchema], name: str, key: str) -> Any:
    groups = match.groupdict()
    kind, quoted, text = groups.get("kind"), groups.get("quoted"), groups["value"]
    if quoted is not None or kind in ("string", "true"):
        return text if quoted is None else quoted
    if kind is None:
        return typed_value(text, tools, name, key)
    value, error = read_json(text.strip())
    if error:
        raise ValueError(f'the value of "{key}" is {error}')
    return value


def key_tags(name: str, mark: str = "", after_name: str = "") -> TagParser:
    """Keys and values in turn, as GLM writes them; `mark` ends the name of every tag."""
    key, value = ((f"<arg_{what}{mark}>", f"</arg_{what}{mark}>") for what in ("key", "value"))
    block = f"<tool_call{mark}>", f"</tool_call{mark}>"
    return TagParser(
        name,
        block,
        head=re.compile(r"\s*([\w.\-]+)\s*" + (after_name or r"(?=<arg_|\Z)")),
        head_error=f"the tool's name must stand right after {block[0]}",
        argument=re.compile(
            rf"{key[0]}(?P<key>.*?){key[1]}\s*{value[0]}(?P<value>.*?){value[1]}", re.DOTALL
        ),
        opening=key[0],
        written=f"{block[0]}{{name}}\n{{arguments}}{block[1]}",
        pair=f"{key[0]}{{key}}{key[1]}\n{value[0]}{{value}}{value[1]}\n",
        markers=(*block, *key, *value),
        stray=f"an {key[0]} without its {value[0]}, or text between them:",
        key=str.strip,
    )


def function_tags(name: str, opening: str, closing: str) -> TagParser:
    """Parameters in line blocks, as Qwen3-Coder writes them."""
    return TagParser(
        name,
        (opening, closing),
        head=re.compile(r"\s*<function=([^>\n]*)>"),
        head_error="<function=NAME> is missing at its start",
        argument=re.compile(
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL
        ),
        opening="<parameter=",
        closing="</parameter>",
        tail="</function>",
        written=f"{opening}\n<function={{name}}>\n{{arguments}}</function>\n{closing}",
        pair="<parameter={key}>\n{value}\n</parameter>\n",
        markers=(opening, closing, "<function=", "</function>", "<parameter=", "</parameter>"),
    )


def invoke_tags(name: str, prefix: str, *names: str, kind: str = "") -> TagParser:
    """`<invoke name="f">` with `<parameter name="x">` in a section; `names` are those that its tag may have."""
    sections = tuple((f"<{prefix}{section}>", f"</{prefix}{section}>") for section in names)
    block = f'<{prefix}invoke name="', f"</{prefix}invoke>"
    opening, closing = f'<{prefix}parameter name="', f"</{prefix}parameter>"
    return TagParser(
        name,
        block,
        head=re.compile(r'\s*([^\s"<>]+)\s*">'),
        head_error=f'{block[0]}NAME"> must begin a call',
        argument=re.compile(
            rf'{opening}(?P<key>[^"\n]+)"(?: string="(?P<kind>true|false)")?>(?P<value>.*?){closing}',
            re.DOTALL,
        ),
        opening=opening,
        closing=closing,
        written=f'{sections[0][0]}\n{block[0]}{{name}}">\n{{arguments}}{block[1]}\n{sections[0][1]}',
        pair=f'{opening}{{key}}"{kind}>{{value}}{closing}\n',
        markers=(*(text for pair in sections for text in pair), *block, opening, closing),
        sections=sections,
        join=True,
    )


GLM = key_tags("glm")

QWEN3_CODER = function_tags("qwen3_coder", "<tool_call>", "</tool_call>")
MINIMAX_M2 = invoke_tags("minimax_m2", "", "minimax:tool_call")
DEEPSEEK_V32 = replace(
    invoke_tags(
        "deepseek_v32", "｜DSML｜", "function_calls", "tool_calls", kind=' string="{kind}"'
    ),
    kind=lambda value: "true" if isinstance(value, str) else "false",
)

THOUGHT = "<|close|>think<|sep|>"
AROUND = re.compile(r"<\|(?:open|close)\|>(?:response|message)(?: [^<]*)?<\|sep\|>")
"""What stands around an answer and is not part of it."""
KINDS = {
    str: "string",
    bool: "boolean",
    type(None): "null",
    int: "number",
    float: "number",
    dict: "object",
}

KIMI_K3 = TagParser(
    "kimi_k3",
    ('<|open|>call tool="', "<|close|>call<|sep|>"),
    head=re.compile(r'([^"\n]+)"(?: index="\d+")?<\|sep\|>'),
    head_error='<|open|>call tool="NAME" index="1"<|sep|> must begin a call',
    argument=re.compile(
        r'<\|open\|>argument key="(?P<key>[^"]*)" type="(?P<kind>\w+)"<\|sep\|>'
        r"(?P<value>.*?)<\|close\|>argument<\|sep\|>",
        re.DOTALL,
    ),
    opening="<|open|>argument",
    written='<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{arguments}'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    pair='<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>',
    markers=("<|open|>", "<|close|>", "<|sep|>"),
    sections=(("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
    stray="an argument without its key, type and end:",
    key=html.unescape,
    kind=lambda value: KINDS.get(type(value), "array"),
    escape=html.escape,
    prepare=lambda text: AROUND.sub(
        "", text.rpartition(THOUGHT)[2]
    ),  # a call in thinking is not a call
    whole=re.compile(
        r'<\|open\|>json type="object"<\|sep\|>(.*?)<\|close\|>json<\|sep\|>', re.DOTALL
    ),
)


NS = "]<]minimax[>["
SECTION = f"{NS}<tool_call>", f"{NS}</tool_call>"
BLOCK = f'{NS}<invoke name="', f"{NS}</invoke>"
TAG = re.compile(re.escape(NS) + r"<(/?)([^<>\s]+)>")
DEPTH = 64
"""How deep elements may be nested."""


def _write_elements(name: str, arguments: Mapping[str, Any]) -> str:
    elements = "".join(
        f"{NS}<{key}>{_write_element(value)}{NS}</{key}>" for key, value in arguments.items()
    )
    return f'{SECTION[0]}\n{BLOCK[0]}{name}">{elements}{BLOCK[1]}\n{SECTION[1]}'


def _write_element(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(
            f"{NS}<{key}>{_write_element(item)}{NS}</{key}>"
            for key, item in value.items()
            if item is not None
        )
    if isinstance(value, (list, tuple)):
        return "".join(f"{NS}<item>{_write_element(item)}{NS}</item>" for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def _read_elements(raw: str, tools: Sequence[ToolSchema]) -> ToolCall:
    name, found, body = raw.partition('">')
    if not found or not re.fullmatch(r"[^\s\"<>]+", name):
        return call(raw=raw, error=f'{BLOCK[0]}NAME"> must begin a call')
    function: Mapping[str, Any] = next(
        (t["function"] for t in tools if t["function"]["name"] == name), {}
    )
    schema = {"type": "object", **function.get("parameters", {})}
    try:
        value = _element_value(_pieces(body), schema, "", 0)
    except ValueError as error:
        return call(name, raw=raw, error=str(error))
    return call(name, value if isinstance(value, dict) else {}, raw=raw)


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yield ("text", …), ("open", name), ("close", name), and ("end", "") last."""
    done = 0
    for match in TAG.finditer(text):
        if match.start() > done:
            yield "text", text[done : match.start()]
        yield ("close" if match[1] else "open"), match[2]
        done = match.end()
    if done < len(text):
        yield "text", text[done:]
    yield "end", ""


def _element_value(
    pieces: Iterator[tuple[str, str]], schema: Mapping[str, Any], inside: str, depth: int
) -> Any:
    """Return the value up to the tag that closes `inside`. Raises ValueError with the fault."""
    if depth > DEPTH:
        raise ValueError(f"elements are nested deeper than {DEPTH}")
    text, items = "", []
    for kind, what in pieces:
        if kind == "text":
            text += what
        elif kind == "open":
            listed = schema.get("type") == "array"
            inner = schema.get("items") if listed else schema.get("properties", {}).get(what)
            below = inner if isinstance(inner, Mapping) else {}
            items.append((what, _element_value(pieces, below, what, depth + 1)))
        elif what != inside:
            wanted = f"{NS}</{inside}>" if inside else "the end of the call"
            raise ValueError(
                f"{wanted} is missing"
                if kind == "end"
                else f"{wanted} must come before {NS}</{what}>"
            )
        else:
            break
    if not items:
        known: dict[str, Any] = {"array": [], "object": {}}
        return (
            known[schema["type"]]
            if schema.get("type") in known and not text.strip()
            else typed_as(text, schema)
        )
    if text.strip():
        raise ValueError(f"there is text beside elements: {text.strip()[:40]!r}")
    listed = schema.get("type") == "array" or (
        schema.get("type") != "object" and {name for name, _ in items} == {"item"}
    )
    return [item for _, item in items] if listed else dict(items)


MINIMAX_M3 = BlockParser("minimax_m3", BLOCK, _write_elements, _read_elements, SECTION, inner=(NS,))
"""`<tool_call><invoke name="f"><x>1</x></invoke></tool_call>`, each tag after the namespace's token."""
