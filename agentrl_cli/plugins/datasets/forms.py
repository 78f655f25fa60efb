"""Rows of published data sets.

humaneval   task_id, prompt (code), entry_point, test, canonical_solution
mbpp        task_id, text (or prompt), code, test_list, test_setup_code (or test_imports)
spider      db_id, question, query
bfcl        question (turns of messages), function (schemas), ground_truth of possible_answer/
"""

from __future__ import annotations

from agentrl_cli.errors import DataError
from agentrl_cli.tasks.forms import Form, Row, message_list, tool_names


def humaneval(row: Row) -> Row:
    """Ask for the whole code: https://github.com/openai/human-eval, checked by `check(candidate)` in `test`."""
    if not isinstance(row.get("prompt"), str):
        raise DataError("`prompt` must be the code to complete.")
    row.setdefault("code_prompt", row["prompt"])
    row.setdefault("id", str(row.get("task_id") or "").replace("/", "-") or None)
    row["prompt"] = (
        f"Complete this Python function. Answer with the whole code.\n```python\n{row['prompt']}```"
    )
    return row


def mbpp(row: Row) -> Row:
    """Ask for code, of https://github.com/google-research/google-research/tree/master/mbpp, full and sanitized."""
    asked, tests = row.get("prompt") or row.get("text"), row["test_list"]
    if (
        not isinstance(asked, str)
        or not isinstance(tests, list)
        or not all(isinstance(test, str) for test in tests)
    ):
        raise DataError("`text` (or `prompt`) must be a text, and `test_list` a list of texts.")
    shown = "\n".join(tests)
    row.setdefault("id", f"mbpp-{row['task_id']}" if row.get("task_id") is not None else None)
    row["prompt"] = (
        f"{asked}\nAnswer with the whole code. It should pass these tests:\n```python\n{shown}\n```"
    )
    return row


def spider(row: Row) -> Row:
    """Ask for SQL: https://yale-lily.github.io/spider; `database/DB_ID/DB_ID.sqlite` is beside task.yaml."""
    if not all(isinstance(row[name], str) for name in ("db_id", "question", "query")):
        raise DataError("`db_id`, `question` and `query` must be texts.")
    row.setdefault("database", f"database/{row['db_id']}/{row['db_id']}.sqlite")
    row.setdefault("family", row["db_id"])
    row["prompt"] = row["question"]
    return row


def bfcl(row: Row) -> Row:
    """Ask for one turn's calls of functions that only the row declares: https://gorilla.cs.berkeley.edu/leaderboard.html"""
    asked, functions = row["question"], row["function"]
    turns = asked if asked and isinstance(asked, list) and isinstance(asked[0], list) else [asked]
    if len(turns) != 1:
        raise DataError(
            "`question` must have one turn: multi-turn rows need BFCL's own classes of tools."
        )
    if not isinstance(
        row.setdefault("ground_truth", [] if "irrelevance" in str(row.get("id")) else None), list
    ):
        raise DataError("`ground_truth` must be a list: that of the same id in possible_answer/.")
    row["prompt"] = message_list(turns[0], "question")
    row["tool_schemas"] = functions if isinstance(functions, list) else [functions]
    tool_names(row["tool_schemas"])
    return row


HUMANEVAL = Form(lambda row: {"prompt", "entry_point", "test"} <= set(row), humaneval)
MBPP = Form(lambda row: "test_list" in row and ("text" in row or "prompt" in row), mbpp)
SPIDER = Form(
    lambda row: {"db_id", "question", "query"} <= set(row) and "prompt" not in row, spider
)
BFCL = Form(lambda row: {"question", "function"} <= set(row) and "prompt" not in row, bfcl)
