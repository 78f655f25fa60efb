"""Checks that every tool-call parser passes; the transcripts are in tests/chat, and in a plugin's own tests."""

import re
from random import Random
from typing import Any

from agentrl_cli.chat.parse import example_arguments, parse_text
from agentrl_cli.chat.parsers import load_parser
from tests.helpers.chat import schema
from tests.helpers.growth import exponent

TOOLS = [schema("add", {"a": "integer", "b": "integer"}), schema("say", {"text": "string"})]
ADD = {"a": 1, "b": 2}
FORMS: dict[str, dict[str, Any]] = {"add": {"a": 0, "b": 0}, "say": {"text": "..."}}
"""The arguments that an error shows for each tool."""
BITS = [*"\"'\\{}[]<;=\n\ta1", "b c", "  ", "é", "日本", "</x>", "```", "null"]
NESTED = schema("nest", {"s": "string", "o": "object", "a": "array", "b": "boolean"})


def doubled(text: str, inner: str, between: str = "") -> str:
    assert inner in text
    return text.replace(inner, f"{inner}{between}{inner}")


def inside(text: str, opening: str, closing: str) -> str:
    """The part of a transcript between two texts, these included."""
    return text[text.index(opening) : text.index(closing) + len(closing)]


def check_calls(name: str, good: str, several: str, id_: str = "c00010000") -> None:
    """One call, two of them, the parser's own example, and answers that are none."""
    parser = load_parser(name)
    parsed = parse_text(good, parser, TOOLS, turn=1)
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.error, call.id) == ("add", ADD, None, id_)
    assert call.raw and call.raw in good and parsed.content == ""
    assert parsed.message["tool_calls"][0]["function"] == {"name": "add", "arguments": ADD}
    calls = parse_text(several, parser, TOOLS).calls
    assert [(one.name, one.arguments, one.error) for one in calls] == [("add", ADD, None)] * 2
    assert len({one.id for one in calls}) == 2
    (said,) = parse_text(parser.example("say", {"text": "a 'b'"}), parser, TOOLS).calls
    assert (said.name, said.arguments, said.error) == ("say", {"text": "a 'b'"}, None)
    for text in ("", "It is 42.", "[1, 2]", '{"answer": 42}', "if a < b: return {}"):
        parsed = parse_text(text, parser, TOOLS)
        assert (parsed.content, parsed.calls) == (text, ())
        assert parsed.message == {"role": "assistant", "content": text}


def check_malformed(name: str, text: str, reason: str) -> None:
    """The error says what was wrong and what is expected; rendered again, the turn is what the model wrote."""
    parser = load_parser(name)
    parsed = parse_text(text, parser, TOOLS)
    call = next(call for call in parsed.calls if call.error)
    assert call.arguments is None and call.error is not None
    assert reason in call.error and call.error.startswith("Malformed tool call: ")
    shown = next((word for word in (call.name, *re.findall(r"\w+", call.raw)) if word in FORMS), "")
    form = parser.example(shown or "NAME", FORMS.get(shown, {}))
    assert call.error.endswith(f" Expected: {form}")
    assert ("; there are: add, say. " in call.error) is not bool(shown)
    assert parsed.message == {"role": "assistant", "content": text}


def check_time(name: str) -> None:
    """Thousands of openings, none of them closed: no search to the text's end for each, and no recursion."""
    parser = load_parser(name)
    example = parser.example("say", {"text": "1"})
    start, _, end = example.rpartition("1")
    for marker in (*parser.markers, "".join(parser.markers[:2]), example):
        for head, tail in (("", ""), (start, ""), (start, end)):

            def read(count: int, marker: str = marker, head: str = head, tail: str = tail) -> None:
                for call in parse_text(head + marker * count + tail, parser, TOOLS).calls:
                    assert call.arguments is not None or call.error

            assert exponent(read, 100) < 1.5, (head, marker, tail)


def check_bad_arguments(name: str) -> None:
    """Unknown tools, a missing argument and one of the wrong type: no error shows the form of another tool."""
    parser = load_parser(name)
    (unknown,) = parse_text(parser.example("ad", ADD), parser, TOOLS[::-1]).calls
    expected = parser.example("add", example_arguments(TOOLS[0]))
    wanted = f'Bad tool call: unknown tool "ad"; did you mean add? Expected: {expected}'
    assert (unknown.error, unknown.arguments) == (wanted, ADD)
    (other,) = parse_text(parser.example("weather", {"of": "say"}), parser, TOOLS).calls
    assert other.error == 'Bad tool call: unknown tool "weather"; there are: add, say.'
    (other,) = parse_text(parser.example("weather", {}), parser, TOOLS[:1]).calls
    assert other.error is not None and other.error.endswith(f"there are: add. Expected: {expected}")
    wrong = 'argument "b" must be an integer, not a string ("two")'
    for more, text in (({}, 'argument "b" is missing'), ({"b": "two"}, wrong)):
        (call,) = parse_text(parser.example("add", {"a": 1, **more}), parser, TOOLS).calls
        assert call.error is not None and text in call.error


def check_nested(name: str, between: str = "\n") -> None:
    """Any arguments that a syntax writes are read back unchanged; `between` calls, "" if a turn has only one."""
    random, parser = Random(0), load_parser(name)

    def text() -> str:
        return "".join(random.choice(BITS) for _ in range(random.randint(0, 6)))

    def value(depth: int) -> Any:
        if depth == 3 or random.random() < 0.5:
            return random.choice([text(), random.randint(-9, 9), random.random(), True, None])
        count = random.randint(0, 3)
        if random.random() < 0.5:
            return [value(depth + 1) for _ in range(count)]
        return {text(): value(depth + 1) for _ in range(count)}

    def arguments() -> dict[str, Any]:
        lists = [value(1), value(1)]
        return {"s": text(), "o": {text(): value(1)}, "a": lists, "b": random.random() < 0.5}

    for _ in range(100):
        every = [arguments() for _ in range(random.randint(1, 3) if between else 1)]
        written = between.join(parser.example("nest", one) for one in every)
        calls = parse_text(written, parser, [NESTED]).calls
        assert [(c.name, c.arguments, c.error) for c in calls] == [
            ("nest", one, None) for one in every
        ]
