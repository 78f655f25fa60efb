"""Arguments that a question names, before or behind their values and in any order.

Half of them are everyday quantities, as people say them ("182 cm tall", "an hour and a half" is not among them); the
other half are drawn words, which only the schema ties to an argument: nothing but reading it tells which is which.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .phrasing import MEASURES
from .schemas import Parameter
from .values import Value, draw
from .words import chinese, word

EVERYDAY = """
height height_cm | {v} cm tall; {v} cm high; height {v} cm; a height of {v} | 身高 {v} 厘米; 高 {v} | 30 250
weight weight_kg mass | {v} kg; weighs {v} kg; weight {v}; {v} kg heavy; a weight of {v} kg | 体重 {v} 公斤; 重 {v} | 1 300
age years_old | {v} years old; age {v}; aged {v} | {v} 岁; 年龄 {v} | 1 99
price price_eur cost | {v} euros; costs {v}; a price of {v}; at {v} euros each | {v} 元; 价格 {v} | 1 900
quantity count amount | {v} pieces; {v} of them; a quantity of {v} | {v} 个; 数量 {v} | 1 60
hours duration_hours | {v} hours; {v} h; for {v} hours; takes {v} hours | {v} 小时; {v} 个小时 | 1 48
minutes duration_min mins | {v} minutes; {v} min; for {v} minutes; takes {v} minutes | {v} 分钟; 时长 {v} 分钟 | 1 180
seconds secs | {v} seconds; {v} s; in {v} seconds | {v} 秒 | 1 600
days num_days | {v} days; for {v} days | {v} 天; {v} 日 | 1 90
weeks | {v} weeks; for {v} weeks | {v} 周; {v} 个星期 | 1 52
years term_years | {v} years; over {v} years; for {v} years | {v} 年; 为期 {v} 年 | 1 40
distance distance_km km | {v} km; a distance of {v} km; {v} km far; {v} kilometres | {v} 公里; 距离 {v} | 1 2000
speed speed_kmh | {v} km/h; at {v} km/h; a speed of {v}; {v} km an hour | 时速 {v} 公里; 速度 {v} | 5 300
temperature temp degrees | {v} degrees; {v} °C; at {v} degrees; a temperature of {v} | {v} 度; 温度 {v} | 1 99
width width_m | {v} m wide; width {v}; a width of {v} | 宽 {v} 米; 宽度 {v} | 1 90
length length_m | {v} m long; length {v}; a length of {v} | 长 {v} 米; 长度 {v} | 1 90
depth depth_m | {v} m deep; depth {v}; a depth of {v} | 深 {v} 米; 深度 {v} | 1 90
litres volume_l liters | {v} litres; {v} l; a volume of {v} litres | {v} 升; 容量 {v} 升 | 1 200
rate percent interest | {v} %; {v} percent; at {v} %; a rate of {v} | 百分之 {v}; {v}% | 1 30
discount discount_pct | {v} % off; a discount of {v}; discount {v} % | 优惠 {v}%; 折扣 {v} | 1 60
tax tax_pct | {v} % tax; a tax of {v} %; taxed at {v} % | 税率 {v}% | 1 40
salary wage pay | earns {v}; a wage of {v}; paid {v}; {v} an hour | 工资 {v}; 每小时 {v} 元 | 8 900
people guests persons num_people | {v} people; for {v} guests; {v} persons; a party of {v} | {v} 人; {v} 位客人 | 1 80
rooms | {v} rooms; with {v} rooms | {v} 间房; {v} 个房间 | 1 20
watts power | {v} W; {v} watts; a power of {v} | {v} 瓦; 功率 {v} | 1 3000
floor level | floor {v}; on floor {v}; level {v} | {v} 楼; 第 {v} 层 | 1 60
score points | {v} points; a score of {v}; scored {v} | {v} 分; 得分 {v} | 0 100
start start_time from_time | from {v}; starts at {v}; begins at {v}; start {v} | {v} 开始; 从 {v} 起 | time
end end_time until | until {v}; ends at {v}; to {v}; end {v} | {v} 结束; 到 {v} 为止 | time
start_date since from_date | from {v}; since {v}; starting on {v}; start {v} | 从 {v} 开始; {v} 起 | date
end_date until due | until {v}; up to {v}; ending on {v}; due {v} | 到 {v} 为止; {v} 止 | date
origin source from_city departure | from {v}; leaving {v}; starting in {v} | 从 {v} 出发; 出发地 {v} | name
destination target to_city arrival | to {v}; going to {v}; arriving in {v} | 到 {v}; 目的地 {v} | name
sender author | sent by {v}; by {v}; from {v}; {v} wrote it | {v} 发的; 由 {v} | name
recipient receiver | sent to {v}; for {v}; to {v} | 发给 {v}; 给 {v} | name
color colour | in {v}; {v} in colour; colour {v} | 颜色 {v}; {v} 色 | word
product item article | a {v}; item {v}; of the {v}; product {v} | 商品 {v}; {v} 这件商品 | word
"""  # noqa: E501  # a table
"""Names of the parameter | as English says it | as Chinese says it | from and to, or the kind of value."""
ENGLISH = (
    "{w} {v}; {w} {v}; {v} {w}; {v} {w}s; {v} {w}s; {v} {u}s of {w}; {v} {u} of {w}; {w} of {v}; {w}: {v}; {w} is {v};"
    " {w}={v}; a {w} of {v}; {v} as {w}; {v} as the {w}; {v} for {w}; the {w} {v}; with {v} {w}s; {w}s: {v}; {v} ({w});"
    " {v} is the {w}"
).split("; ")
CHINESE = (
    "{w} {v}; {w}为{v}; {w}是 {v}; {v} 的{w}; {v} 个{w}; {w}：{v}; {w} = {v}; 用 {v} 作{w};"
    " {v} {m} {w}; {v} {m}{w}"
).split("; ")
HOLDERS = "piece pair box bag cup sack crate slice drop bundle".split()
"""Nouns between a number and the thing that is counted, beside drawn words."""
GENERIC = {
    "integer": 50,
    "number": 10,
    "word": 12,
    "name": 7,
    "date": 4,
    "time": 4,
    "code": 3,
    "enum": 6,
    "boolean": 4,
    "integers": 18,
    "words": 4,
}
"""Kind of a parameter with a drawn name → how often."""
DESCRIPTIONS = (
    *("The {w}.", "{w}.", "How many {w}s.", "Number of {w}s.", "{w} of it.", "Its {w}."),
    *("How much {w}.", "The {w} in it."),
)


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter, and the forms in which questions say it beside its value."""

    parameter: Parameter
    english: tuple[str, ...]
    chinese: tuple[str, ...]
    make: Callable[[random.Random], Value]

    def say(self, rng: random.Random, value: Value, zh: bool, form: int | None = None) -> str:
        """The value with its name, as a question has it; `form` is the form's place among those of drawn names."""
        if value.kind == "boolean":
            yes = value.json is True
            name = self.parameter.name.replace("_", " ")
            if zh:
                return f"{'要' if yes else '不要'}{name}"
            return rng.choice(("with {}", "{} please") if yes else ("without {}", "no {}")).format(
                name
            )
        forms = self.chinese if zh else self.english
        chosen = rng.choice(forms) if form is None else forms[form % len(forms)]
        return chosen.format(v=value.said)


def name_parameters(rng: random.Random, count: int, kind: str | None = None) -> list[Named]:
    """Parameters of one tool; three of five times, or with a `kind`, only their names tell them apart."""
    alike, everyday = (rng.random() < 0.6, 0.5) if kind is None else (True, 0.0)
    kind = kind or rng.choices(list(GENERIC), list(GENERIC.values()))[0]
    high = rng.choice((9, 40, 99, 999, None))  # alike too: else the sizes tell which is which
    found: list[Named] = []
    while len(found) < count:
        if rng.random() < everyday:
            one = _everyday(rng, [row for row in TABLE if not alike or kind in ("integer", row[3])])
        else:
            own = kind if alike else rng.choices(list(GENERIC), list(GENERIC.values()))[0]
            one = _generic(rng, own, high)
        names = {each.parameter.name for each in found}
        forms = {form for each in found for form in each.english}
        if one.parameter.name not in names and not forms & set(one.english):
            found.append(one)
    return found


Everyday = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str]


def _read(table: str) -> list[Everyday]:
    rows = []
    for line in table.strip().splitlines():
        names, english, chinese_forms, kind = (part.strip() for part in line.split(" | "))
        rows.append(
            (
                tuple(names.split()),
                tuple(english.split("; ")),
                tuple(chinese_forms.split("; ")),
                kind,
            )
        )
    return rows


TABLE = _read(EVERYDAY)


def _everyday(rng: random.Random, rows: Sequence[Everyday]) -> Named:
    names, english, chinese_forms, kind = rng.choice(rows or TABLE)
    make = _maker(kind, rng.random() < 0.25)
    form, said = rng.random(), ""
    if 0.4 <= form < 0.7:
        said = f"{names[0].replace('_', ' ').capitalize()}."
    elif form >= 0.7:
        said = _plain(rng.choice(english)).capitalize() + "."
    # A name that says little leaves it to the description.
    name = rng.choice("abcxyzpq") if said and rng.random() < 0.12 else rng.choice(names)
    return Named(Parameter(name, make(rng), said), english, chinese_forms, make)


def _plain(form: str) -> str:
    """A form without its value, as a description."""
    return " ".join(form.replace("{v}", "").split()) or "value"


def _maker(kind: str, fractions: bool) -> Callable[[random.Random], Value]:
    if not kind[0].isdigit():
        return lambda rng: draw(rng, kind)
    low, high = (int(part) for part in kind.split())

    def make(rng: random.Random) -> Value:
        number: Any = rng.randint(low, high)
        if not fractions:
            return Value("integer", number, str(number), {"type": "integer"})
        if rng.random() < 0.5:
            number = round(number + rng.choice((0.5, 0.25, 0.1, 0.75)), 2)
        return Value("number", number, str(number), {"type": "number"})

    return make


def _generic(rng: random.Random, kind: str, high: int | None) -> Named:
    first = draw(rng, kind)
    options = first.schema.get("enum")

    def make(rng: random.Random) -> Value:
        if kind == "integer" and high:  # people mostly count little
            return replace(first, json=(number := rng.randint(1, high)), said=str(number))
        if options is None:
            return draw(rng, kind)
        text = rng.choice(options)
        return Value("enum", text, text, first.schema)

    w, form = word(rng), rng.random()
    said = rng.choice(DESCRIPTIONS).format(w=w) if rng.random() < 0.5 else ""
    name = rng.choice((w, w, w, w + "s", f"n_{w}", f"{w}_count", f"num_{w}s", f"{word(rng)}_{w}"))
    shown = [w]
    if kind == "boolean":
        name, said = w, rng.choice(("", f"Whether with {w}.", f"With {w} or without."))
    elif form < 0.15:  # the description alone says it
        name, said = rng.choice("abcmnxyzpqk"), rng.choice(DESCRIPTIONS).format(w=w)
    elif form < 0.25:
        c = chinese(rng)
        said, shown = f"{c}。", [c]
    said = said[:1].upper() + said[1:]
    holder = rng.choice(HOLDERS) if rng.random() < 0.5 else word(rng)
    english = tuple(one.replace("{w}", w).replace("{u}", holder) for one in ENGLISH)
    measure = rng.choice(MEASURES)
    return Named(
        Parameter(name, first, said),
        english,
        tuple(one.replace("{w}", rng.choice(shown)).replace("{m}", measure) for one in CHINESE),
        make,
    )
