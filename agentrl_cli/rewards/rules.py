"""Built-in rule-based rewards: numbers, required texts, HumanEval's and MBPP's tests, rows of SQL. All are 0 or 1.

Named in task.yaml by path: `function: "agentrl_cli.rewards.rules:gsm8k"`.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from decimal import Decimal, InvalidOperation
from typing import Any

from agentrl_cli.errors import EnvError
from agentrl_cli.hooks.threads import in_thread
from agentrl_cli.registry.old_modules import keep_old_names
from agentrl_cli.rewards import RewardContext, Scored
from agentrl_cli.types import Episode

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|(?<![\w.])\.\d+)")
_ASCII = str.maketrans("．－＋−", ".-+-")
"""Full-width signs, as their digits are read, too; and the minus of typesetting. A full-width comma lists numbers."""
SQL_SECONDS, SQL_ROWS = 10.0, 100_000
"""Limits of a query that is compared."""


def final_number(text: str) -> str | None:
    """Return the number after the last `####`, else the last one, without thousands separators; None if absent."""
    found = _numbers(text.rpartition("####")[2])
    if not found:
        return None
    return found[0] if "####" in text else found[-1]


def _numbers(text: str) -> list[str]:
    """Return the numbers in a text, in order, without thousands separators."""
    return [number.replace(",", "") for number in _NUMBER.findall(text.translate(_ASCII))]


def same_number(said: str | None, expected: str) -> bool:
    """True if both are the same number; `72` equals `72.0`."""
    expected = expected.translate(_ASCII)
    try:  # a float has no more than 15 digits
        return said is not None and abs(Decimal(said) - Decimal(expected.replace(",", ""))) < 1e-9
    except InvalidOperation:
        return said == expected.strip()


def gsm8k(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if the final number is the row's `answer` (or `ground_truth`)."""
    expected = _find_expected(ctx, "answer", "ground_truth")
    said = final_number(str(ctx.state.get("answer") or ctx.final_text))
    return ctx.part(float(same_number(said, str(expected))), f"said {said}, expected {expected}")


def contains(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if every text of the row's `gt` occurs in the answer, numbers as whole numbers.

    The answer is what `submit` was called with, else the final turn.
    """
    wanted = _find_expected(ctx, "gt", "ground_truth", "answer")
    texts = [str(item) for item in (wanted if isinstance(wanted, list) else [wanted])]
    answer = str(ctx.state.get("answer") or ctx.final_text)
    numbers = set(_numbers(answer))
    lost = [
        text
        for text in texts
        if not (
            any(same_number(number, text) for number in numbers)
            if _NUMBER.fullmatch(text.translate(_ASCII))
            else text.casefold() in answer.casefold()
        )
    ]
    return ctx.part(float(not lost), f"missing {', '.join(lost)}" if lost else "")


async def humaneval(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if the final turn's code passes the row's `test` (HumanEval's `check(candidate)`), in a fresh sandbox.

    A function body continues the prompt's code; a whole function gets the imports and helpers that precede it in the
    prompt. HumanEval's checks are code in the solution's own process: the part is `fakeable`.
    """
    code, prompt = code_of(ctx.final_text), str(ctx.task.data.get("code_prompt") or "")
    entry, test = _find_expected(ctx, "entry_point"), _find_expected(ctx, "test")
    head = re.compile(rf"\bdef {re.escape(str(entry))}\b")
    before = head.split(prompt, maxsplit=1)[0] if head.search(code) else prompt
    result = await ctx.grade(f"{before}{code}", [f"{test}\n\ncheck({entry})"])
    return ctx.part(result.score, "\n".join(result.failures)[-300:])


async def mbpp(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if the final turn's code passes the row's `test_list`, in a fresh sandbox; MBPP's tests are asserts.

    They run in the solution's own process: the part is `fakeable`.
    """
    data, tests = ctx.task.data, _find_expected(ctx, "test_list")
    imports = data.get("test_imports") or []
    setup = "\n".join(
        [
            *([imports] if isinstance(imports, str) else imports),
            str(data.get("test_setup_code") or ""),
        ]
    )
    result = await ctx.grade(code_of(ctx.final_text), [f"{setup}\n{test}" for test in tests])
    return ctx.part(float(result.score == 1), "\n".join(result.failures)[-300:])


async def same_rows(episode: Episode, ctx: RewardContext) -> Scored:
    """1 if the final turn's SQL gives the rows of the row's `query` on its database (Spider's execution match).

    The order of the rows counts if `query` orders them. Needs the tool `sql` in the pack.
    """
    if "sql" not in ctx.state:
        raise EnvError("same_rows needs the tool `sql` in the pack: it holds the database.")
    said, query = sql_of(ctx.final_text), str(_find_expected(ctx, "query"))
    connection: Any = ctx.state["sql"]
    wanted = await in_thread(_rows, connection, query)
    if isinstance(wanted, str):
        raise EnvError(f"The query of the row {ctx.task.id} fails: {wanted}")
    found = await in_thread(_rows, connection, said) if said else "no SQL"
    if isinstance(found, str):
        return ctx.part(0.0, found)
    ordered = re.search(r"(?i)\border\s+by\b", query)
    same = found == wanted if ordered else Counter(found) == Counter(wanted)
    return ctx.part(float(same), f"{len(found)} rows, expected {len(wanted)}")


def sql_of(text: str) -> str:
    """Return the last fence of SQL in a text, else the text if it is a query, else empty."""
    query = (_fences(text, "sql") or [text])[-1].strip().rstrip(";")
    return query if re.match(r"(?i)\s*(select|with|values)\b", query) else ""


def _rows(connection: Any, query: str) -> list[Any] | str:
    """Return the rows of a query, or why it failed; it changes nothing and takes at most SQL_SECONDS."""
    ends = time.thread_time() + SQL_SECONDS
    connection.set_progress_handler(lambda: int(time.thread_time() > ends), 1000)
    try:
        connection.execute("PRAGMA query_only=1")
        return list(connection.execute(query).fetchmany(SQL_ROWS))
    except sqlite3.Error as error:
        return str(error)
    finally:
        connection.set_progress_handler(None, 0)
        connection.execute("PRAGMA query_only=0")


def code_of(text: str) -> str:
    """Return the last fenced block of Python in a text, else the text."""
    return (_fences(text, "python", "py") or [text])[-1]


def _fences(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks of these languages, and of none; the others are passed over whole."""
    found = re.findall(r"(?s)```([^\s`]*)\s*\n(.*?)```", text)
    return [block for language, block in found if language.lower() in ("", *languages)]


def interaction(episode: Episode, ctx: RewardContext) -> float:
    """Return the last reward that the simulated user gave, 0 if absent."""
    feedback = ctx.state.get("feedback") or [0.0]
    return float(feedback[-1])


def _find_expected(ctx: RewardContext, *names: str) -> Any:
    for name in names:
        if ctx.task.data.get(name) is not None:
            return ctx.task.data[name]
    raise EnvError(f"The row {ctx.task.id} has no {' or '.join(names)}.")


keep_old_names(__name__)
