"""Families in which questions name their arguments, and conversations that ask the same tools again and again.

A tool's words are read once and used for every question of a conversation, so choosing among tools and telling
arguments apart are learned from a few tokens each instead of a whole prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .phrasing import CHINESE_ENDINGS, CHINESE_QUESTIONS, LONG, QUESTIONS, answer, ask, noun, topic
from .quantities import ENGLISH, Named, name_parameters
from .rows import Message, Row, call, prompt, result, say
from .schemas import Parameter, Tool, invent
from .task_row import CHINESE, make_row
from .values import Value, draw, result_text
from .words import name_alike, word

Round = tuple[str, list[Message]]
"""A question, and the turns that it gets."""
COUNTED = ("{v} {w}s", "{v} {w}s", "{v} {w}", "{w} {v}", "{w}: {v}")
ALIKE = (["word"], ["code"], ["integer"], ["name"], ["date"], ["text"], ["word", "integer"])


@dataclass(frozen=True, slots=True)
class Bound:
    """A tool whose arguments have names that questions use."""

    tool: Tool
    named: tuple[Named, ...]

    def ask(self, rng: random.Random, zh: bool) -> tuple[str, dict[str, Any]]:
        """A question with new values, and the arguments that it names; an optional one is left out of most."""
        said, arguments = self.say(rng, zh)
        return (_chinese if zh else _english)(rng, self.tool, said), arguments

    def say(self, rng: random.Random, zh: bool) -> tuple[list[str], dict[str, Any]]:
        """The values with their names in any order, most often all in one form, and the arguments."""
        form = rng.randrange(len(ENGLISH)) if rng.random() < 0.7 else None
        said, arguments = [], {}
        for one, parameter in zip(self.named, self.tool.parameters, strict=True):
            if parameter.default is not None and rng.random() < 0.6:
                continue
            value = one.make(rng)
            said.append(one.say(rng, value, zh, form))
            arguments[parameter.name] = value.json
        rng.shuffle(said)
        return said, arguments


def bind(rng: random.Random, taken: Sequence[str] = ()) -> Bound:
    """Invent a tool of one to four named arguments, of which one may be optional."""
    named = name_parameters(rng, rng.choices((1, 2, 3, 4), (6, 43, 38, 13))[0])
    parameters = [one.parameter for one in named]
    if len(named) > 1 and rng.random() < 0.35:
        parameters[-1] = replace(parameters[-1], default=named[-1].make(rng).json)
    return Bound(replace(invent(rng, [], taken), parameters=tuple(parameters)), tuple(named))


def bind_drill(rng: random.Random) -> Row:
    """Many calls of one tool from values and their names alone: which value belongs to which name."""
    if rng.random() < 0.6:
        return _count_drill(rng)
    kind = rng.choices(("integer", "word", "name", "date"), (80, 10, 5, 5))[0]
    named = name_parameters(rng, rng.choices((2, 3, 4), (45, 40, 15))[0], kind)
    tool = replace(invent(rng, []), parameters=tuple(one.parameter for one in named))
    rounds = []
    for _ in range(rng.randint(5, 9)):
        said, arguments = Bound(tool, tuple(named)).say(rng, rng.random() < CHINESE)
        question = rng.choice((", ", ", ", " and ", " ")).join(said)
        rounds += [*prompt(None, question), call((tool.name, arguments))]
    return Row("bind_drill", (tool.schema,), tuple(rounds))


def _count_drill(rng: random.Random) -> Row:
    """Numbers beside their names, all in one form.

    A value before its name is the harder one: nothing at the value can know the name, so the name has to hold it.
    """
    keys = _draw_keys(rng, rng.choices((2, 3, 4), (50, 40, 10))[0])
    high, form = rng.choice((9, 9, 40, 99, 999)), rng.choice(COUNTED)
    drawn = Value("integer", high, str(high), {"type": "integer"})
    said = rng.choice(("", "How many {}s."))
    parameters = [Parameter(key, drawn, said.format(one)) for one, key in keys.items()]
    tool = replace(invent(rng, []), parameters=tuple(parameters))
    between, rounds = rng.choice((", ", ", ", " and ", " ")), list[Message]()
    for _ in range(rng.randint(3, 7)):
        values = {one: rng.randint(1, high) for one in keys}
        shown = [form.format(v=value, w=one) for one, value in values.items()]
        rng.shuffle(shown)
        arguments = {keys[one]: value for one, value in values.items()}
        rounds += [*prompt(None, between.join(shown)), call((tool.name, arguments))]
    return Row("bind_drill", (tool.schema,), tuple(rounds))


def _draw_keys(rng: random.Random, count: int) -> dict[str, str]:
    """Draw so many words, each with the name of its argument: the word itself or its plural. All names differ."""
    keys: dict[str, str] = {}
    while len(keys) < count:
        one = word(rng)
        key = one + rng.choice(("", "s", "s"))
        if one not in keys and key not in keys.values():
            keys[one] = key
    return keys


def bound(rng: random.Random) -> Row:
    """One question whose arguments its words name, whatever their order."""
    one, zh = bind(rng), rng.random() < CHINESE
    question, arguments = one.ask(rng, zh)
    found = result_text(rng)
    turns = [call((one.tool.name, arguments)), result(one.tool.name, found), say(answer(found))]
    return make_row(rng, "bound", [one.tool], zh, question, turns)


def session(rng: random.Random) -> Row:
    """Several questions of one conversation: of alike tools, of named arguments, or of two steps."""
    zh = rng.random() < CHINESE
    make = rng.choices((_alike, _named, _steps), (38, 40, 22))[0]
    tools, ask_next = make(rng, zh)
    # Telling arguments apart takes the most examples, and a further one costs a question instead of a prompt.
    count = rng.randint(5, 9) if make is _named else rng.randint(3, 6)
    first, *others = (ask_next() for _ in range(count))
    row = make_row(rng, "session", tools, zh, first[0], first[1], alone=True)
    more = [message for asked, turns in others for message in (*prompt(None, asked), *turns)]
    return replace(row, messages=(*row.messages, *more))


Session = tuple[list[Tool], Callable[[], Round]]


def _alike(rng: random.Random, zh: bool) -> Session:
    """Two to five tools that take the same arguments: the question's words alone show which."""
    kinds = rng.choice(ALIKE)
    naming = name_alike(rng) if rng.random() < 0.4 else None
    tools: list[Tool] = []
    for _ in range(rng.choices((2, 3, 4, 5), (25, 35, 25, 15))[0]):
        tools.append(invent(rng, kinds, [one.name for one in tools], naming))

    def ask_next() -> Round:
        tool = rng.choice(tools).again(rng)
        found = result_text(rng)
        question = ask(rng, tool, zh and not tool.about[0].isascii())
        return question, [
            call((tool.name, tool.arguments)),
            result(tool.name, found),
            say(answer(found)),
        ]

    return tools, ask_next


def _named(rng: random.Random, zh: bool) -> Session:
    """One tool or two with named arguments."""
    tools = [bind(rng)]
    if rng.random() < 0.5:
        tools.append(bind(rng, [tools[0].tool.name]))

    def ask_next() -> Round:
        one, found = rng.choice(tools), result_text(rng)
        question, arguments = one.ask(rng, zh)
        return question, [
            call((one.tool.name, arguments)),
            result(one.tool.name, found),
            say(answer(found)),
        ]

    return [one.tool for one in tools], ask_next


def _steps(rng: random.Random, zh: bool) -> Session:
    """Two tools, of which one takes the other's result; some questions need one of them alone."""
    first = invent(rng, [rng.choice(("word", "name", "code"))])
    second = invent(rng, [rng.choice(("integer", "code", "word", "name", "date"))], [first.name])
    if first.about[0].isascii() and rng.random() < 0.6:  # named by what the first tool returns
        renamed = replace(second.parameters[0], name=first.about[0])
        second = replace(second, parameters=(renamed, *second.parameters[1:]))

    def ask_next() -> Round:
        one, two, found = first.again(rng), second.again(rng), result_text(rng)
        if rng.random() < 0.25:
            alone = rng.choice((one, two))
            turns = [call((alone.name, alone.arguments)), result(alone.name, found)]
            return ask(rng, alone, zh), [*turns, say(answer(found))]
        between = two.given[0]
        joint = "的" if zh else rng.choice((" of ", " for ", " of the ", " that has ", " with "))
        inner, shown = noun(rng, one, zh), one.given[0].value.said
        part = f"{shown}{joint}{inner}" if zh else f"{inner}{joint}{shown}"
        turns = [call((one.name, one.arguments)), result(one.name, str(between.value.json))]
        turns += [call((two.name, two.arguments)), result(two.name, found), say(answer(found))]
        return ask(rng, two, zh, {between.name: part}), turns

    return [first, second], ask_next


def choose_drill(rng: random.Random) -> Row:
    """Many short questions of two to five tools without arguments worth reading: which one has the question's words."""
    tools: list[Tool] = []
    for _ in range(rng.randint(2, 5)):
        tools.append(invent(rng, [draw(rng, "word").kind], [one.name for one in tools]))
    rounds = []
    for _ in range(8):
        one = rng.choice(tools).again(rng)
        asked = f"{' '.join(topic(rng, one))} {one.given[0].value.said}"
        rounds += [*prompt(None, asked), call((one.name, one.arguments))]
    return Row("choose_drill", tuple(one.schema for one in tools), tuple(rounds))


def _english(rng: random.Random, tool: Tool, said: Sequence[str]) -> str:
    about, form, opening = " ".join(topic(rng, tool)), rng.random(), rng.choice(QUESTIONS)
    values = rng.choice((" and ", ", ", ", ", " with ", " ")).join(said)
    if len(said) > 2 and rng.random() < 0.5:
        values = f"{', '.join(said[:-1])} and {said[-1]}"
    link = rng.choice(("", "for ", "of ", "with ", "given ", "if "))
    if form < 0.1:
        thing = rng.choice((tool.about[-1], word(rng)))
        text = f"{opening} {about} {rng.choice(('has', 'is', 'does', 'for'))} the {thing} {link}{values}"
    elif form < 0.35:
        text = f"{opening} {about} {link}{values}"
    elif form < 0.55:
        text = f"{values}: {opening.lower()} {about}"
    elif form < 0.7:
        text = f"{values}. {opening} {about}"
    elif form < 0.8:
        text = f"{about}: {values}"
    elif form < 0.9:
        text = rng.choice(LONG).format(about=about, values=values)
    else:
        text = f"{opening} {about}, {values}"
    text = " ".join(text.split())
    if rng.random() < 0.7 and not text.startswith(tuple(said)):
        text = text[0].upper() + text[1:]
    return text + rng.choice(("?", "?", ".", ""))


def _chinese(rng: random.Random, tool: Tool, said: Sequence[str]) -> str:
    about = rng.choice(("", " ", "的")).join(topic(rng, tool))
    values = rng.choice(("，", "、", " ", "，", " 和 ")).join(said)
    form = rng.random()
    if form < 0.6:
        text = f"{rng.choice(CHINESE_QUESTIONS)}{values}{rng.choice(('，', '的', ' '))}{about}"
    else:
        text = f"{rng.choice(CHINESE_QUESTIONS)}{about}{rng.choice(('：', '，', ' '))}{values}"
    return text + rng.choice(CHINESE_ENDINGS)
