"""The filter language of `ls --filter`, replay and watch, and the order of a list, compiled to SQL.

    reward:<0.5 step:100..120 task:calc/* tool:calculator flag:LOOP text:"4,5" outcome:failed,timeout -tag:seen

Terms are joined by *and*; `-` in front negates one; a comma means *or*. Numbers take `<`, `<=`, `>`, `>=`, `a..b` and
`a..`; names take `*` and `?`, ignoring case; both take `none`; a bare word searches the text. Nothing here runs a
query.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agentrl_cli.errors import UsageError, suggest
from agentrl_cli.types import Outcome, stored_facts
from agentrl_cli.types.plain import is_text, quote_text

Where = tuple[str, list[Any]]

NUMBERS: dict[str, str] = {
    "reward": "e.reward",
    "primary": "e.primary_score",
    "adv": "e.advantage",
    "step": "e.step",
    "turns": "e.n_turns",
    "branches": (
        "(SELECT count(*) FROM turns t WHERE t.episode_id=e.id AND NOT EXISTS (SELECT 1 FROM turns n"
        " WHERE n.episode_id=t.episode_id AND coalesce(n.parent, n.idx - 1)=t.idx))"
    ),
    "tokens": "e.n_tokens",
    "model_tokens": "e.n_model_tokens",
    "calls": "e.n_calls",
    "errors": "e.n_tool_errors",
    "sample": "e.sample",
    "seed": "e.seed",
    "seconds": "(CASE WHEN e.ended > 0 THEN e.ended - e.started END)",
    "rescored": "(SELECT s.reward FROM scores s WHERE s.episode_id=e.id ORDER BY s.set_id DESC LIMIT 1)",
    "delta": "(SELECT s.delta FROM scores s WHERE s.episode_id=e.id ORDER BY s.set_id DESC LIMIT 1)",
}
"""Fields that hold a number, and their SQL."""

NAMES: dict[str, str] = {
    "task": "e.task_id",
    "pack": "e.pack",
    "family": "e.family",
    "split": "e.split",
    "outcome": "e.outcome",
    "fact": "e.fact",
    "kind": "e.kind",
    "group": "e.group_id",
    "parent": "e.parent_id",
    "id": "e.id",
    "level": "e.level",
    "error": "e.error",
    "weights": "e.weights_version",
}
"""Fields that hold a name."""

LOOKUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tool": ("e.id IN (SELECT episode_id FROM tool_calls WHERE {})", ("name",)),
    "tag": ("e.id IN (SELECT episode_id FROM tags WHERE {})", ("tag",)),
    "run": ("e.run_id IN (SELECT id FROM runs WHERE {})", ("name", "id")),
    "ckpt": (
        "(e.run_id, e.step) IN (SELECT run_id, step FROM checkpoints WHERE {})",
        ("kind",),
    ),
    "drift": ("e.id IN (SELECT episode_id FROM drift WHERE {})", ("kind",)),
}
"""Fields that are looked up in another table: the condition, and the columns that hold the name."""

SORTS: dict[str, str] = {
    "time": "e.started",
    **NUMBERS,
    **{name: NAMES[name] for name in ("task", "outcome", "kind")},
}
"""Orders of a list."""

ALIASES = {"advantage": "adv", "primary_score": "primary", "outcomes": "outcome", "started": "time"}
_TERM = re.compile(r'\s*(-?)(?:([A-Za-z_]\w*):)?("(?:[^"\\]|\\.)*"|\S+)')
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
MOST_CHOICES = 1_000
"""Most terms of a filter plus values between their commas."""
LONGEST = 10_000
"""Characters of a value: SQLite compares patterns up to 50,000, and escapes make them longer."""
_COMPARED = re.compile(r"(\w+)([=<>]+)(.+)")
"""`reward<0.5`, as other languages compare."""
_EXAMPLE = 'For example: reward:<0.5 step:100..120 task:calc/* flag:LOOP text:"4,5" -tag:seen'


def fields() -> list[str]:
    """Return every field of the language, sorted: for help and completion."""
    return sorted([*_TERMS, "text"])


def compile_filter(text: str) -> Where:
    """Return a filter as an SQL condition over `episodes e`, and its parameters.

    Raises UsageError naming the nearest.
    """
    parts: list[str] = []
    params: list[Any] = []
    position = count = 0
    text = text.strip()
    if not is_text(text):
        raise UsageError(f"The filter {quote_text(text)} is not UTF-8 text.", hint=_EXAMPLE)
    while position < len(text):
        match = _TERM.match(text, position)
        if match is None:
            raise UsageError(
                f"The filter cannot be read from here: {text[position:]!r}", hint=_EXAMPLE
            )
        position = match.end()
        minus, name, raw = match.groups()
        quoted = len(raw) > 1 and raw[0] == raw[-1] == '"'
        if raw.startswith('"') and not quoted:
            raise UsageError(f"A quotation mark is not closed: {raw}", hint=_EXAMPLE)
        if not name and raw.endswith(":") and raw[:-1].lower() in {*fields(), *ALIASES}:
            name, raw = raw[:-1], ""
        if not name and (wrong := _COMPARED.match(raw)):
            _refuse_comparison(minus, *wrong.groups())
        value = re.sub(r"\\(.)", r"\1", raw[1:-1]) if quoted else raw
        count += 1 if quoted or not name else 1 + value.count(",")
        if count > MOST_CHOICES:
            raise UsageError(
                f"The filter has more than {MOST_CHOICES:,} terms and values.", hint="Ask in parts."
            )
        sql, values = _term(name or "text", value, quoted=quoted)
        parts.append(f"NOT coalesce({sql}, 0)" if minus else sql)
        params += values
    return _join(parts, "AND") or "1", params


def _refuse_comparison(minus: str, name: str, sign: str, value: str) -> None:
    """Raise UsageError for a field that is compared without a colon."""
    name = ALIASES.get(name.lower(), name.lower())
    if name not in fields():
        return
    sign = {"=": "", "==": "", "=<": "<=", "=>": ">="}.get(sign, sign)
    raise UsageError(
        f"In a filter a colon stands between {name} and its value.",
        hint=_EXAMPLE
        if '"' in value
        else f"Write {minus}{name}:{sign}{value}; a text to search for goes in quotation marks.",
    )


def _join(parts: Sequence[str], word: str) -> str:
    """Conditions joined as a balanced tree: SQLite limits the depth of an expression to 1,000."""
    if len(parts) <= 2:
        return f" {word} ".join(parts)
    half = len(parts) // 2
    return f"({_join(parts[:half], word)}) {word} ({_join(parts[half:], word)})"


def compile_sort(text: str) -> str:
    """`-time`, `reward,-tokens`… as ORDER BY terms; `-` is descending. Raises UsageError naming the nearest."""
    terms: list[str] = []
    seen: set[str] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        name = ALIASES.get(item.lstrip("-+"), item.lstrip("-+"))
        if name not in SORTS:
            raise _unknown_error("No order", name, list(SORTS))
        if name in seen:
            continue
        seen.add(name)
        down = item.startswith("-")
        if name == "time":
            direction = "DESC" if down else "ASC"
            return ", ".join([*terms, f"e.started {direction}", f"e.rowid {direction}"])
        terms.append(f"{SORTS[name]} {'DESC' if down else 'ASC'} NULLS LAST")
    return ", ".join([*terms, "e.rowid DESC"])


def _term(name: str, value: str, *, quoted: bool) -> Where:
    name = ALIASES.get(name.lower(), name.lower())
    if not value:
        raise UsageError(f"{name}: needs a value.", hint=_EXAMPLE)
    choices = [value] if quoted or name == "text" else [item for item in value.split(",") if item]
    if not choices:
        raise UsageError(f"{name}: needs a value beside the commas.", hint=_EXAMPLE)
    if max(map(len, choices)) > LONGEST:
        raise UsageError(f"A value of {name}: has more than {LONGEST:,} characters.", hint=_EXAMPLE)
    if name == "text":
        return _text(value)
    if name not in _TERMS:
        raise _unknown_error("A filter has no field", name, fields())
    if name == "fact":
        choices = [stored for item in choices for stored in stored_facts(item)]
    found = [_TERMS[name](item) for item in choices]
    return f"({_join([part for part, _ in found], 'OR')})", [
        param for _, params in found for param in params
    ]


def _number(name: str, column: str, value: str) -> Where:
    if value == "none":
        return f"{column} IS NULL", []
    if ".." in value:
        low, high = value.split("..", 1)
        bounds = [(sign, _float(name, end)) for sign, end in ((">=", low), ("<=", high)) if end]
        if len(bounds) == 2 and bounds[0][1] > bounds[1][1]:
            raise UsageError(
                f"{name}: needs the smaller number first, not {value!r}.",
                hint=f"{name}:{high}..{low}",
            )
        if bounds:
            return " AND ".join(f"{column} {sign} ?" for sign, _ in bounds), [
                end for _, end in bounds
            ]
    match = re.match(r"<=|>=|<|>|=", value)
    sign = match.group() if match else "="
    return f"{column} {sign} ?", [_float(name, value[len(sign) if match else 0 :])]


def _float(name: str, text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise UsageError(
            f"{name}: needs a number, not {text!r}.",
            hint=f"For example {name}:<0.5, {name}:1..3 or {name}:none.",
        )
    return float(text)


def _name(column: str, value: str) -> Where:
    if value == "none":
        return f"nullif({column}, '') IS NULL", []
    if "*" in value or "?" in value:
        pattern = _like(value).replace("*", "%").replace("?", "_")
        return f"{column} LIKE ? ESCAPE '\\'", [pattern]
    return f"{column} = ? COLLATE NOCASE", [value]


def _lookup(condition: str, columns: Sequence[str], value: str) -> Where:
    if value == "none":
        return f"NOT coalesce({condition.format(1)}, 0)", []
    found = [_name(column, value) for column in columns]
    where = " OR ".join(sql for sql, _ in found)
    return condition.format(where), [param for _, params in found for param in params]


def _outcome(value: str) -> Where:
    known = [outcome.value for outcome in Outcome]
    if value != "none" and not set("*?") & set(value) and value.lower() not in known:
        raise _unknown_error("A filter has no outcome", value, known)
    return _name(NAMES["outcome"], value)


def _flag(value: str) -> Where:
    if value == "none":
        return "e.flags IN ('', '[]')", []
    return "e.flags LIKE ? ESCAPE '\\'", [f'%"{_like(value).replace("*", "%")}"%']


def _note(value: str) -> Where:
    found = "e.id IN (SELECT episode_id FROM notes WHERE text LIKE ? ESCAPE '\\')"
    return found, [f"%{'' if value == '*' else _like(value)}%"]


_STRUCTURE = "role content name type text function arguments id tool_calls tool_call_id system user assistant tool"


def _text(value: str) -> Where:
    """Return a search in messages, which are stored as JSON: the value is escaped as in JSON; keys and roles do not
    match.
    """
    needle = f"%{_like(json.dumps(value, ensure_ascii=False)[1:-1])}%"
    plain = f"%{_like(value)}%"
    like, params = "messages LIKE ? ESCAPE '\\'", [needle]
    if value.lower() in _STRUCTURE or set(value) & set('[]{}:,"'):
        like += (
            " AND EXISTS (SELECT 1 FROM json_tree(messages) WHERE type='text' AND key IS NOT 'role'"
            " AND atom LIKE ? ESCAPE '\\')"
        )
        params = [needle, plain]
    return (
        f"(e.id IN (SELECT episode_id FROM turns WHERE {like})"
        " OR e.id IN (SELECT episode_id FROM tool_calls WHERE raw LIKE ? ESCAPE '\\'))",
        [*params, plain],
    )


def _like(text: str) -> str:
    return re.sub(r"([%_\\])", r"\\\1", text)


def _unknown_error(start: str, name: str, known: Sequence[str]) -> UsageError:
    return UsageError(f"{start} {name!r}.", hint=suggest(name, sorted(known), most=len(known)))


_TERMS: dict[str, Callable[[str], Where]] = {
    **{name: partial(_number, name, column) for name, column in NUMBERS.items()},
    **{name: partial(_name, column) for name, column in NAMES.items()},
    **{name: partial(_lookup, *lookup) for name, lookup in LOOKUPS.items()},
    **{"outcome": _outcome, "flag": _flag, "note": _note},
}
"""Field → the condition for one of its values; `text` is aside, as its value has no commas."""
