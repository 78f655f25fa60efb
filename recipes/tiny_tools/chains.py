"""Two tools of which one takes the other's result, under names that share a word.

Users name tools alike: `desk_of(person)` beside `badge_of(desk)`. A name's shared part says nothing; which tool comes
first follows from the schemas alone: its argument is what no other tool returns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .phrasing import CHINESE_ENDINGS, CHINESE_QUESTIONS, QUESTIONS, answer
from .rows import Message, Row, call, prompt, result, say
from .schemas import Parameter, Tool
from .task_row import CHINESE, make_row
from .values import KINDS, draw, result_text
from .words import HELD_OUT, Naming, chinese, name_alike, word

DESCRIBED = (
    "The {returns} of a {takes}.",
    "The {returns} that a {takes} has.",
    "{returns} of {takes}",
    "Look up the {returns} of one {takes}.",
    "Which {returns} a {takes} belongs to.",
    "Find a {takes}'s {returns}.",
    "The {takes}'s {returns}.",
    "Return {returns} for {takes}.",
)
CHAINED = (
    "{opening} {wanted} of the {between} of {value}",
    "{opening} {wanted} of the {between} that {value} {relation}",
    "{opening} {wanted} of {value}'s {between}",
    "{opening} {wanted} for the {between} of {value}",
    "{opening} {wanted} of the {between} with {value}",
    "{value}: {opening} {wanted} of its {between}",
    "{opening} {adjective} is the {wanted} of the {between} of {value}",
    "{opening} {between} of {value}, then the {wanted} of that",
    "{value}'s {between}'s {wanted}",
    "{wanted} of the {between} for {value}",
    "{opening} {wanted} of who {relation} {value}",
    "{value} has a {between}. {opening} its {wanted}",
)
CHINESE_CHAINED = (
    "{opening}{value}的{between}的{wanted}",
    "{value} 所在{between}的{wanted}",
    "{opening} {value} {between}的{wanted}",
    "{relation} {value} 的{between}的{wanted}",
    "{opening}{value} 的 {between} 的 {wanted}",
    "先查 {value} 的{between}，再查它的{wanted}",
)
SINGLE = ("{opening} {wanted} of {value}", "{value}'s {wanted}", "{opening} {wanted} for {value}")
CHINESE_SINGLE = ("{opening}{value}的{wanted}", "{value} 的 {wanted}")
RELATIONS = "is on;is in;has;belongs to;uses;owns;needs;was given;comes from;sits on;holds".split(
    ";"
)
RETURNED = ("{value}", "{value}", "{value}", "{value}", "{name}: {value}", "The {name} is {value}.")


@dataclass(frozen=True, slots=True)
class Link:
    """A tool from one thing to another, and the words for what it returns."""

    tool: Tool
    returns: str

    def again(self, rng: random.Random) -> Link:
        """Return the same with another value."""
        return replace(self, tool=self.tool.again(rng))


def chain(rng: random.Random) -> Row:
    """Several questions of a chain's end, and some of one tool alone."""
    zh = rng.random() < CHINESE
    first, second, other = _links(rng)
    tools = [one.tool for one in (first, second, other) if one]

    def ask_next() -> tuple[str, list[Message]]:
        one, two = first.again(rng), second.again(rng)
        if rng.random() < 0.3:
            alone = rng.choice([one, two, *([other.again(rng)] if other else [])])
            return _single(rng, alone, zh)
        return _double(rng, one, two, zh, reworded=other is None)

    rounds = [ask_next() for _ in range(rng.choices((1, 2, 3, 4, 5), (30, 10, 20, 25, 15))[0])]
    alone = len(rounds) > 1 or rng.random() < 0.6
    row = make_row(rng, "chain", tools, zh, rounds[0][0], rounds[0][1], alone=alone)
    more = [message for asked, turns in rounds[1:] for message in (*prompt(None, asked), *turns)]
    return replace(row, messages=(*row.messages, *more))


def _links(rng: random.Random) -> tuple[Link, Link, Link | None]:
    """Return the first tool, the second and perhaps one more that takes what one of them does."""
    while True:
        naming = name_alike(rng)
        takes, between, wanted, more = (word(rng) for _ in range(4))
        start = _parameter(rng, takes, rng.choice(("word", "word", "name", "code", "text")))
        kind = rng.choice(("code", "code", "name", "name", "word", "word", "integer", "date"))
        first = _link(rng, naming, start, takes, between)
        second = _link(rng, naming, _parameter(rng, between, kind), between, wanted)
        other = None
        if rng.random() < 0.3:
            source, name = rng.choice(((start, takes), (second.tool.parameters[0], between)))
            other = _link(rng, naming, source, name, more)
        names = [one.tool.name.lower() for one in (first, second, other) if one]
        if len(set(names)) == len(names) and not HELD_OUT & set(names):
            return first, second, other


def _parameter(rng: random.Random, thing: str, kind: str) -> Parameter:
    """Return an argument that is most often named by what it holds."""
    value = draw(rng, kind)
    _, _, names, descriptions = KINDS[value.kind]
    form = rng.random()
    if form < 0.7:
        name = thing
    elif form < 0.82:
        name = f"{thing}_{rng.choice(('id', 'name', 'code', 'key'))}"
    else:
        name = rng.choice(names)
    said = rng.choice(("", f"The {thing}.", "Its name.", f"Its name, such as {value.json}."))
    return Parameter(name, value, rng.choice((said, said, rng.choice(descriptions))))


def _link(
    rng: random.Random, naming: Naming, parameter: Parameter, takes: str, returns: str
) -> Link:
    about = f"{returns} {word(rng)}" if rng.random() < 0.12 else returns
    said = rng.choice(DESCRIBED).format(returns=about, takes=takes)
    said = "" if rng.random() < 0.06 else said[0].upper() + said[1:]
    name = naming(returns, takes)
    return Link(Tool(name, said, tuple(about.split()), (parameter,)), returns)


def _single(rng: random.Random, one: Link, zh: bool) -> tuple[str, list[Message]]:
    found = result_text(rng)
    form = rng.choice(CHINESE_SINGLE if zh else SINGLE)
    return _ask(rng, form, zh, one, one.returns, ""), [
        call((one.tool.name, one.tool.arguments)),
        result(one.tool.name, found),
        say(answer(found)),
    ]


def _double(
    rng: random.Random, one: Link, two: Link, zh: bool, *, reworded: bool
) -> tuple[str, list[Message]]:
    """A question that needs both; `reworded` may call things by words that no schema has."""
    between, wanted, found = one.returns, two.returns, result_text(rng)
    if reworded and rng.random() < (0.6 if zh else 0.12):
        between, wanted = (chinese(rng), chinese(rng)) if zh else (word(rng), wanted)
    passed = two.tool.parameters[0]
    shown = rng.choice(RETURNED).format(name=one.returns, value=passed.value.json)
    return _ask(rng, rng.choice(CHINESE_CHAINED if zh else CHAINED), zh, one, wanted, between), [
        call((one.tool.name, one.tool.arguments)),
        result(one.tool.name, shown),
        call((two.tool.name, two.tool.arguments)),
        result(two.tool.name, found),
        say(answer(found)),
    ]


def _ask(rng: random.Random, form: str, zh: bool, one: Link, wanted: str, between: str) -> str:
    value = one.tool.parameters[0].value
    article = rng.choice(("the ", "the ", "a ", "")) if value.kind == "word" and not zh else ""
    text = form.format(
        opening=rng.choice(CHINESE_QUESTIONS if zh else QUESTIONS),
        value=article + value.said,
        wanted=wanted,
        between=between,
        relation=rng.choice(("放", "有", "用", "在")) if zh else rng.choice(RELATIONS),
        adjective=word(rng),
    ).strip()
    if zh:
        return text + rng.choice(CHINESE_ENDINGS)
    if rng.random() < 0.8 and not text.startswith(value.said):
        text = text[0].upper() + text[1:]
    return text + rng.choice(("?", "?", ".", ""))
