"""Llama 4: a pythonic list of calls, or JSON objects as Llama 3 writes them, one after the other.

Text before the calls stands between `<|python_start|>` and `<|python_end|>`, and so may a pythonic list.
https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.chat.parsers.base import ParsedText
from agentrl_cli.chat.parsers.llama3_json import Llama3JSONParser
from agentrl_cli.chat.parsers.llama3_pythonic import END, START, Llama3PythonicParser
from agentrl_cli.types import ToolSchema

BEFORE = re.compile(rf"\s*{re.escape(START)}(.*?){re.escape(END)}(?=\s*\{{)", re.DOTALL)


class Llama4Parser:
    """`[f(x=1)]`, or `<|python_start|>text<|python_end|>{"name": "f", "parameters": {…}}`"""

    name = "llama4"
    markers: tuple[str, ...] = (START, END)

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedText:
        found = Llama3PythonicParser().parse(text, tools)
        if found.calls:
            return found
        before = BEFORE.match(text)
        found = Llama3JSONParser().parse(text[before.end() :] if before else text, tools)
        if found.calls:
            return ParsedText(before[1] if before else found.content, found.calls)
        return ParsedText(text)

    def example(self, name: str, arguments: Mapping[str, Any]) -> str:
        return Llama3JSONParser().example(name, arguments)


PARSER = Llama4Parser()
