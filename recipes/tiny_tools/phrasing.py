"""Questions, system texts and answers in English and Chinese, around values that stand there as they are."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .schemas import Parameter, Tool
from .values import UNITS
from .words import ENGLISH, chinese, word, words_in

SYSTEMS = (
    *(
        "Answer with the tools.",
        "Use a tool, then answer.",
        "You are a helpful assistant.",
        "Call a tool to find out.",
    ),
    *(
        "Solve it. Use the tool.",
        "You have tools. Use them.",
        "Look it up and answer.",
        "Be brief.",
        "Answer briefly.",
    ),
    *(
        "You work for a shop. Look things up.",
        "Find the answer by a call.",
        "Work out the answer with the tools below.",
    ),
    *(
        "Answer as `Answer: …`.",
        "End with a line `Answer: …`.",
        "Give the answer in the form `Answer: VALUE`.",
    ),
    *(
        "Never guess: call the tool.",
        "You can call functions.",
        "Think, call, answer.",
        "Help the user.",
    ),
    *(
        "Use the function to find the value.",
        "One question, one answer.",
        "Solve the problem with what you have.",
    ),
)
CHINESE_SYSTEMS = (
    "请使用工具回答问题。",
    "你是一个有用的助手。",
    "先调用工具，再回答。",
    "不要猜，请调用工具。",
    "用工具解决问题。",
)
QUESTIONS = (
    *(
        "What is the",
        "What is",
        "How many",
        "How much is the",
        "Which",
        "Give the",
        "Give me the",
        "Find the",
        "Find",
    ),
    *(
        "Tell me the",
        "Compute the",
        "Show the",
        "How often is",
        "I need the",
        "Please find the",
        "Work out the",
        "What",
    ),
    *(
        "Can you get the",
        "Check the",
        "How long is the",
        "When is the",
        "Where is the",
        "Who is the",
        "Look for the",
    ),
)
CHINESE_QUESTIONS = ("请问", "帮我查一下", "请计算", "我想知道", "请给出", "查询", "")
PREPOSITIONS = (
    "of",
    "for",
    "in",
    "to",
    "by",
    "with",
    "from",
    "and",
    "at",
    "on",
    "between",
    "after",
    "into",
    "than",
)
LOOKS = {
    "number": "integer",
    "text": "word",
    "enum": "word",
    "name": "word",
    "words": "word",
    "boolean": "word",
}
"""Kinds whose values look alike, so that only their order or a name says which is which."""
CHINESE_ENDINGS = (
    "是多少？",
    "是什么？",
    "是哪一个？",
    "有几个？",
    "？",
    "。",
    "怎么算？",
    "是几？",
    "吧。",
)
MEASURES = tuple("个件条张本台位只份块克度次元斤箱天字行米".strip())
"""Chinese measure words, which stand between a number and its noun."""
LONG = (
    "I am looking for the {about}; it is about {values}. Thank you.",
    "Could you be so kind and find the {about} with {values}?",
    "My colleague needs the {about}. It has {values}.",
    "For the report we want the {about} for {values}, nothing more.",
    "We noted {values}. Kindly let us have the {about}.",
    "There must be a number: the {about}, {values}. Which one is it?",
    "{values} is what I have. Now I wonder about the {about}.",
    "Given that {values}, which {about} do we get?",
)
"""Long questions that need one call."""


def system(rng: random.Random, chinese_prompt: bool) -> str | None:
    """A system text, or None."""
    if rng.random() < 0.12:
        return None
    if chinese_prompt and rng.random() < 0.6:
        return rng.choice(CHINESE_SYSTEMS)
    text = rng.choice(SYSTEMS)
    if rng.random() < 0.2:
        text = f"{' '.join(word(rng) for _ in range(rng.randint(2, 6))).capitalize()}. {text}"
    return text


def topic(rng: random.Random, tool: Tool) -> list[str]:
    """Some of the words that a tool is described by."""
    said = [one for one in tool.about if rng.random() < 0.65] or list(tool.about[:1])
    if rng.random() < 0.3 and not set(words_in(tool.name)) & set(said):
        said.insert(0, rng.choice(words_in(tool.name)))
    return [
        one + rng.choice(("s", "ing", "ed")) if rng.random() < 0.08 and one.isascii() else one
        for one in said
    ]


def ask(
    rng: random.Random, tool: Tool, chinese_prompt: bool, values: dict[str, str] | None = None
) -> str:
    """A question that has the tool's values in it; `values` puts other words in place of some (by parameter)."""
    said = {one.name: (values or {}).get(one.name, one.value.said) for one in tool.given}
    return _chinese(rng, tool, said) if chinese_prompt else _english(rng, tool, said)


def noun(rng: random.Random, tool: Tool, chinese_prompt: bool) -> str:
    """The words for what a tool returns, as part of a longer question."""
    if chinese_prompt and rng.random() < 0.5:
        return chinese(rng)
    if chinese_prompt:
        return "".join(topic(rng, tool)) if rng.random() < 0.5 else " ".join(topic(rng, tool))
    return "the " + " ".join(topic(rng, tool))


def phrase_values(
    rng: random.Random, parameters: Sequence[Parameter], said: dict[str, str], named: bool
) -> str:
    """The values, each behind a preposition; `named` behind its parameter's name, in any order."""
    order = ordered(rng, parameters, named)
    text = ""
    previous = ""
    for one in order:
        beside = (
            one.value.kind == "unit" and previous in ("integer", "number") and rng.random() < 0.8
        )
        if beside:
            text += rng.choice(("", " ")) + said[one.name]
        else:
            label = one.name.replace("_", " ") if rng.random() < 0.5 else one.name
            label = f"{label}{rng.choice((' ', ' ', ': ', '=', ' is '))}" if named else ""
            lead = rng.choice(PREPOSITIONS) + " " if not named or rng.random() < 0.5 else ""
            article = (
                rng.choice(("the ", "the ", "a "))
                if one.value.kind == "word" and rng.random() < 0.25
                else ""
            )
            text += f" {lead}{label}{article}{said[one.name]}"
            if (
                one.value.kind == "integer" and rng.random() < 0.15
            ):  # the noun counted is not an argument
                text += f" {rng.choice(UNITS) if rng.random() < 0.4 else rng.choice(ENGLISH) + 's'}"
        if rng.random() < 0.06:
            text += rng.choice((",", f" {word(rng)}"))
        previous = one.value.kind
    return text.strip()


def ordered(rng: random.Random, parameters: Sequence[Parameter], named: bool) -> list[Parameter]:
    """The order in which a question has them: any, where names or looks say which is which."""
    order = list(parameters)
    looks = [LOOKS.get(one.value.kind, one.value.kind) for one in order]
    if named or (len(set(looks)) == len(looks) and "unit" not in looks and rng.random() < 0.4):
        rng.shuffle(order)
    return order


def _english(rng: random.Random, tool: Tool, said: dict[str, str]) -> str:
    if rng.random() < 0.12:
        about = rng.choice((" ", " of the ", " of ")).join(topic(rng, tool))
        named = [
            f"{one.name.replace('_', ' ')} {said[one.name]}"
            for one in ordered(rng, tool.given, True)
        ]
        text = rng.choice(LONG).format(about=about, values=rng.choice((" and ", ", ")).join(named))
        return text[0].upper() + text[1:]
    about, form = " ".join(topic(rng, tool)), rng.random()
    values = phrase_values(rng, tool.given, said, rng.random() < 0.35)
    opening = rng.choice(QUESTIONS)
    if form < 0.5:
        text = f"{opening} {about} {values}"
    elif form < 0.62:
        bare = rng.choice((" and ", ", ", " ")).join(
            said[one.name] for one in ordered(rng, tool.given, False)
        )
        text = f"{opening} {about} {bare}"
    elif form < 0.72:
        text = f"{about} {values}"
    elif form < 0.82:
        first, _, rest = values.partition(" ")
        text = f"{rest if first in PREPOSITIONS else values}: {opening.lower()} {about}"
    elif form < 0.92:
        text = (
            f"{rng.choice(('For', 'With', 'I have', 'Take', 'Given'))} {values}. {opening} {about}"
        )
    else:
        text = f"{opening} {values} {about}"
    text = text.strip()
    if rng.random() < 0.8 and not text.startswith(tuple(said.values())):
        text = text[0].upper() + text[1:]
    return text + rng.choice(("?", "?", ".", ""))


def _chinese(rng: random.Random, tool: Tool, said: dict[str, str]) -> str:
    about = (
        topic(rng, tool) if rng.random() < 0.6 else [chinese(rng) for _ in range(rng.randint(1, 2))]
    )
    joined = "的".join(about) if rng.random() < 0.5 else " ".join(about)
    named = rng.random() < 0.3
    order = ordered(rng, tool.given, named)
    values = rng.choice(("和", "、", " ", "，", "到", " 与 ", " 到 ", " ")).join(
        (f"{one.name} {rng.choice(('', '为 ', '是 ', '= '))}" if named else "")
        + _counted(rng, one, said[one.name])
        for one in order
    )
    gap = rng.choice(("", " "))
    form = rng.random()
    if form < 0.45:
        between = rng.choice(("的", "的", "对应的", "换成", "那个"))
        text = f"{rng.choice(CHINESE_QUESTIONS)}{gap}{values}{gap}{between}{joined}"
    elif form < 0.6:
        links = (
            "是",
            "有多少",
            "的",
            "在",
            "里",
            "之后是哪",
            "中有几个",
            "要多少",
            "等于多少",
            "所在的",
            "前的",
        )
        text = f"{values}{gap}{rng.choice(links)}{joined}"
    elif form < 0.75:
        text = f"{rng.choice(('把', '请把', '将', '从', '用'))}{gap}{values}{gap}{joined}"
    else:
        text = f"{rng.choice(CHINESE_QUESTIONS)}{joined}{gap}{rng.choice(('：', '，', ' ', '用 '))}{values}"
    return text.strip() + rng.choice(CHINESE_ENDINGS)


def _counted(rng: random.Random, one: Parameter, said: str) -> str:
    """A value, with a measure word behind some numbers."""
    if one.value.kind != "integer" or rng.random() < 0.6:
        return said
    return f"{said}{rng.choice((' ', ''))}{rng.choice(MEASURES)}"


def answer(text: str) -> str:
    """The final turn that the packs' rewards and the benchmark read."""
    return f"Answer: {text}"
