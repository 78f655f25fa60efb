"""Families of tasks with invented tools: one call, a choice, two steps, parallel calls, correction, abstention."""

from __future__ import annotations

import random
from dataclasses import replace

from .phrasing import answer, ask, noun
from .rows import Row, call, prompt, result, say
from .schemas import Parameter, Tool, invent
from .task_row import CHINESE, dump_json, make_row, more_kinds
from .values import Value, draw, result_text
from .words import word

GUESSED = 0.08
"""Share of the rows of most families that answer without looking, as a half-trained agent does."""
CONVERSIONS = (
    *(
        "{v} comes to how many {b}?",
        "Express {v} in {b}.",
        "How many {b} make {v}?",
        "{v} in {b}?",
        "{v} to {b}",
    ),
    *(
        "Give me {v} as {b}.",
        "In {b}, how much is {v}?",
        "I have {v} and want {b}.",
        "Turn {v} into {b}.",
    ),
    *(
        "Which number of {b} equals {v}?",
        "How many {b} do you get for {v}?",
        "Put {v} into {b}, please.",
    ),
)
CHINESE_CONVERSIONS = (
    "{v} 合多少 {b}？",
    "{v} 等于几 {b}？",
    "把 {v} 化成 {b}。",
    "用 {b} 表示 {v}。",
    "{v} 转为 {b}",
)


def one_call(rng: random.Random) -> Row:
    """The right tool among one to five, its arguments from the question."""
    form = rng.random()
    kinds = None
    if form < 0.1:
        kinds = rng.choice(
            (["number", "unit"], ["number", "unit", "unit"], ["integer", "unit", "unit"])
        )
    elif form < 0.18:
        kinds = rng.choice(
            (["text", "letter"], ["letter", "word"], ["word", "letter"], ["text", "integer"])
        )
    elif form < 0.26:
        kinds = rng.choice(
            (["date", "date"], ["date", "integer"], ["integer", "integer"], ["word", "integer"])
        )
    tool = invent(rng, kinds)
    zh = rng.random() < CHINESE
    question, found = ask(rng, tool, zh), result_text(rng)
    if rng.random() < 0.07:
        question += (
            ""
            if zh
            else " " + rng.choice(("Say it.", "Repeat it.", "Reply with the result alone."))
        )
        final = answer(found) if zh else found
    else:
        final = answer(found)
    if rng.random() < GUESSED:
        return make_row(rng, "one", [tool], zh, question, [say(answer(result_text(rng)))])
    turns = [call((tool.name, tool.arguments)), result(tool.name, found), say(final)]
    return make_row(rng, "one", [tool], zh, question, turns)


def conversion(rng: random.Random) -> Row:
    """A number beside its unit, into another unit that may stand before it."""
    value, source, target = (
        draw(rng, kind) for kind in (rng.choice(("number", "integer")), "unit", "unit")
    )
    have, want = rng.choice(
        (("from", "to"), ("source", "target"), ("given", "wanted"), ("unit", "into"))
    )
    kind = rng.choice(("", "", "_scale", "_measure"))
    described = rng.random() < 0.7
    parameters: tuple[Parameter, ...] = (
        Parameter(
            rng.choice(("value", "amount", "number", "x", "size")),
            value,
            "How much." if described else "",
        ),
        Parameter(
            have + kind,
            source,
            rng.choice(("Unit of the number.", "Which unit it has.")) if described else "",
        ),
        Parameter(
            want + kind,
            target,
            rng.choice(("Unit to turn it into.", "Wanted unit.")) if described else "",
        ),
    )
    if rng.random() < 0.25:  # the tool can work out what the number's unit is
        parameters = (parameters[0], parameters[2])
    tool, zh = replace(invent(rng, []), parameters=parameters), rng.random() < 0.3
    question = rng.choice(CHINESE_CONVERSIONS if zh else CONVERSIONS).format(
        v=value.said + rng.choice((" ", " ", "")) + source.said, b=target.said
    )
    found = result_text(rng)
    turns = [call((tool.name, tool.arguments)), result(tool.name, found), say(answer(found))]
    if rng.random() < GUESSED:
        turns = [say(answer(result_text(rng)))]
    return make_row(rng, "conversion", [tool], zh, question, turns)


def choose(rng: random.Random) -> Row:
    """One of three to five tools with the same kinds of arguments: the words alone show which."""
    kinds = rng.choice((["word"], ["code"], ["integer"], ["name"], ["date"], ["word", "integer"]))
    tools: list[Tool] = []
    for _ in range(rng.randint(3, 5)):
        tools.append(invent(rng, kinds, [one.name for one in tools]))
    found, zh = result_text(rng), rng.random() < 0.1
    turns = [
        call((tools[0].name, tools[0].arguments)),
        result(tools[0].name, found),
        say(answer(found)),
    ]
    return make_row(rng, "choose", tools, zh, ask(rng, tools[0], zh), turns, alone=True)


def from_list(rng: random.Random) -> Row:
    """One argument must be read from a list in the prompt."""
    tool = invent(rng, [rng.choice(("integer", "code", "date", "word", "name")), *more_kinds(rng)])
    target = tool.given[0]
    keys = [word(rng) for _ in range(rng.randint(3, 6))]
    rows = [(key, draw(rng, target.value.kind).said) for key in keys]
    rows[rng.randrange(len(rows))] = (keys[0], target.value.said)
    rows = list({key: value for key, value in [*rows, (keys[0], target.value.said)]}.items())
    rng.shuffle(rows)
    form = rng.choice(("{}: {}", "- {}: {}", "{} = {}", "{} {}", "| {} | {} |"))
    listing = "\n".join(form.format(key, value) for key, value in rows)
    zh = rng.random() < CHINESE
    question = ask(rng, tool, zh, {target.name: keys[0]})
    text = f"{listing}\n{question}" if rng.random() < 0.7 else f"{question}\n{listing}"
    found = result_text(rng)
    turns = [call((tool.name, tool.arguments)), result(tool.name, found), say(answer(found))]
    return make_row(rng, "list", [tool], zh, text, turns)


def record(rng: random.Random) -> Row:
    """A result with several fields, as JSON, a table or sentences, of which the question asks for one."""
    key = draw(rng, rng.choice(("word", "code", "name", "integer")))
    tool = invent(rng, [key.kind])
    fields = list(dict.fromkeys(word(rng) for _ in range(rng.randint(2, 4))))
    values = {
        one: draw(rng, rng.choice(("integer", "word", "code", "date", "number"))) for one in fields
    }
    wanted = rng.choice(fields)
    shown = tool.given[0].value.said
    if rng.random() < 0.25:  # a search: the call names the value that it looks for, too
        tool = _search(
            rng, rng.choice((f"{wanted} {shown}", f"{wanted} {shown}", f"{shown} {wanted}"))
        )
    form = rng.random()
    if form < 0.35:
        text = dump_json({one: value.json for one, value in values.items()}, rng)
    elif form < 0.55:
        text = " | ".join(fields) + "\n" + " | ".join(value.said for value in values.values())
    elif form < 0.7:
        text = "\n".join(f"{one}: {value.said}" for one, value in values.items())
    else:
        own = rng.choice(("The {f} of {k} is {v}.", "{k} has {f} {v}.", "{f} {v}: {k}."))
        lines = [own.format(f=one, k=shown, v=value.said) for one, value in values.items()]
        lines += [own.format(f=wanted, k=word(rng), v=draw(rng, values[wanted].kind).said)]
        rng.shuffle(lines)
        text = "\n".join(
            f"[{n}] {line}" if rng.random() < 0.5 else line for n, line in enumerate(lines, 1)
        )
    zh = rng.random() < CHINESE
    if zh:
        question = rng.choice(("{k}的{f}是多少？", "请查 {k} 的 {f}。", "{f}：{k}？")).format(
            k=shown, f=wanted
        )
    else:
        wordings = (
            "What is the {f} of {k}?",
            "Which {f} has {k}?",
            "Give {f} for {k}.",
            "{k}: which {f}?",
            "The {f} of {k}?",
        )
        question = rng.choice(wordings).format(k=shown, f=wanted)
    found = values[wanted].said
    if rng.random() < GUESSED:
        return make_row(
            rng, "record", [tool], zh, question, [say(answer(draw(rng, values[wanted].kind).said))]
        )
    turns = [call((tool.name, tool.arguments)), result(tool.name, text), say(answer(found))]
    return make_row(rng, "record", [tool], zh, question, turns)


def two_steps(rng: random.Random) -> Row:
    """The second call takes the first one's result, and perhaps a value of the question."""
    source = rng.choice(("word", "name", "code", "integer", "text"))
    first = invent(rng, [source, *more_kinds(rng, 0.15)])
    kind = rng.choice(("integer", "code", "word", "name", "date", "number"))
    second = invent(rng, [kind, *more_kinds(rng, 0.3)], [first.name])
    if rng.random() < 0.5 and first.about[0] not in [one.name for one in second.parameters]:
        # Named by what the first tool returns.
        renamed = replace(second.parameters[0], name=first.about[0])
        second = (
            replace(second, parameters=(renamed, *second.parameters[1:]))
            if first.about[0].isascii()
            else second
        )
    between, found = second.given[0], result_text(rng)
    zh = rng.random() < CHINESE
    inner = noun(rng, first, zh)
    shown = " ".join(one.value.said for one in first.given)
    form = rng.random()
    if zh:
        part = f"{rng.choice(('', '', '有 ', '放 '))}{shown} {rng.choice(('的', '的', '所在的'))}{inner}"
        question = ask(rng, second, True, {between.name: part})
    elif form < 0.7:
        part = f"{inner} {rng.choice(('of', 'for', 'of the', 'that has', 'with'))} {shown}"
        question = ask(rng, second, False, {between.name: part})
    else:
        opening = ask(rng, first, False)
        if not opening.endswith(tuple(one.value.said for one in first.given)):
            opening = opening.removesuffix("?").removesuffix(".")
        question = f"{opening}, then {ask(rng, second, False, {between.name: 'that'})}"
    steps = [call((first.name, first.arguments)), result(first.name, str(between.value.json))]
    turns = [
        *steps,
        call((second.name, second.arguments)),
        result(second.name, found),
        say(answer(found)),
    ]
    given = first.given[0].value
    if given.schema["type"] != between.value.schema["type"] or rng.random() < 0.7:
        return make_row(rng, "two_steps", [first, second], zh, question, turns)
    early = call(
        (second.name, {**second.arguments, between.name: given.json})
    )  # the second tool first
    error = rng.choice(
        ("KeyError: {!r}", "{} not found.", "ValueError: bad value {!r}", "LookupError: no {}")
    )
    turns = [early, result(second.name, f"Error: {error.format(given.json)}"), *turns]
    return replace(
        make_row(rng, "two_steps", [first, second], zh, question, turns), muted=frozenset({0})
    )


def parallel(rng: random.Random) -> Row:
    """Two or three calls of one tool or of several, in one turn or one after the other."""
    first = invent(rng, [draw(rng).kind])
    zh = rng.random() < CHINESE
    count = 3 if rng.random() < 0.15 else 2
    same = rng.random() < 0.5
    others = [
        first.again(rng) if same else invent(rng, None, [first.name]) for _ in range(count - 1)
    ]
    calls = [first, *others]
    if same:
        joiner = "和" if zh else rng.choice((" and ", " and of ", ", "))
        shown = joiner.join(one.given[0].value.said for one in calls)
        question = ask(rng, first, zh, {first.given[0].name: shown})
    else:
        asked = [ask(rng, one, zh).rstrip("?.。？") for one in calls]
        question = ("，" if zh else rng.choice((" and ", ", ", ". "))).join(asked) + rng.choice(
            ("?", ".", "")
        )
    found = [result_text(rng) for _ in calls]
    final = say(answer(rng.choice((" ", " ", ", ")).join(found)))
    made = [(one.name, one.arguments) for one in calls]
    results = [result(one.name, text) for one, text in zip(calls, found, strict=True)]
    if rng.random() < 0.7:
        turns = [call(*made), *results, final]
    else:
        turns = [
            turn for pair in zip([call(one) for one in made], results, strict=True) for turn in pair
        ] + [final]
    return make_row(
        rng, "parallel", list({one.name: one for one in calls}.values()), zh, question, turns
    )


def no_tool(rng: random.Random) -> Row:
    """What needs no call: words to repeat, an item of a list, a greeting, or a question that no tool is for."""
    form, zh = rng.random(), rng.random() < CHINESE
    tools = [invent(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
    if form < 0.55:
        words = [
            rng.choice((word(rng), word(rng), str(rng.randint(0, 10**5))))
            for _ in range(rng.randint(1, 7))
        ]
        text = " ".join(words)
        opening = (
            ("重复：", "请说：")
            if zh
            else ("Repeat: ", "Say this: ", "Say after me: ", "Echo: ", "Write: ", "Say: ")
        )
        return make_row(rng, "say", tools, zh, rng.choice(opening) + text, [say(text)], alone=True)
    if form < 0.75:
        keys = list(dict.fromkeys(word(rng) for _ in range(4)))
        values = [draw(rng, "integer").said for _ in keys]
        at = rng.randrange(len(keys))
        listing = ", ".join(f"{key} {value}" for key, value in zip(keys, values, strict=True))
        asked = (
            f"{listing}。{keys[at]} 是多少？" if zh else f"{listing}. Which number has {keys[at]}?"
        )
        return make_row(rng, "read", tools, zh, asked, [say(answer(values[at]))], alone=True)
    if form < 0.85:
        pair = (
            ("你好", "你好！需要什么？")
            if zh
            else rng.choice((("Hello", "Hello! What do you need?"), ("Thanks", "You are welcome.")))
        )
        return make_row(rng, "greeting", tools, zh, pair[0], [say(pair[1])], alone=True)
    tools = [invent(rng) for _ in range(rng.randint(2, 3))]
    missing = "没有合适的工具。" if zh else "I have no tool for that."
    return make_row(
        rng, "abstain", tools, zh, ask(rng, invent(rng), zh), [say(missing)], alone=True
    )


def drill(rng: random.Random) -> Row:
    """Many words, numbers and codes to repeat: where a model that starts from nothing learns to copy."""
    few = [
        draw(rng, rng.choice(("word", "code", "integer", "name"))).said
        for _ in range(rng.randint(3, 12))
    ]
    items = [
        rng.choice(few) if rng.random() < 0.5 else draw(rng, "word").said
        for _ in range(rng.randint(6, 30))
    ]
    text = " ".join(items)
    return Row(
        "drill", (), (*prompt(None, rng.choice(("Repeat: ", "Echo: ", "重复：")) + text), say(text))
    )


def look_up(rng: random.Random) -> Row:
    """Find something under a key and repeat it as it is."""
    tool = invent(rng, [rng.choice(("code", "word", "name"))])
    shown = tool.given[0].value.said
    own = (
        "Find {} and repeat it.",
        "Fetch {} and say what it is.",
        "Get {}, then say it.",
        "Read {} and say it back.",
    )
    found = " ".join(
        rng.choice((word(rng), str(rng.randint(0, 10**5)))) for _ in range(rng.randint(1, 3))
    )
    turns = [call((tool.name, tool.arguments)), result(tool.name, found), say(found)]
    return make_row(rng, "look_up", [tool], False, rng.choice(own).format(shown), turns)


def _search(rng: random.Random, query: str) -> Tool:
    """A tool that takes words to look for."""
    found = invent(rng, ["text"])
    said = rng.choice(("Words to look for.", "What to find.", "The search words.", ""))
    named = rng.choice(("query", "query", "q", "keywords", "words"))
    return replace(
        found, parameters=(Parameter(named, Value("text", query, query, {"type": "string"}), said),)
    )
