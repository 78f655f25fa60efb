"""Repair a small package: view, edit, run the check; hidden tests decide."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl_cli.tasks import draw_splits

Row = dict[str, Any]

WORDS = ("bill", "cart", "fee", "gain", "load", "rank", "rate", "span", "toll", "wage")
CHECK = """\
from {package}.{module} import {name}

for args, expect in {cases}:
    got = {name}(*args)
    if got != expect:
        raise SystemExit(f"{name}{{args}} is {{got}}, expected {{expect}}")
print("ok")
"""


def _operator(rng: random.Random) -> tuple[str, str, str]:
    a, b = rng.randint(2, 9), rng.randint(2, 30)
    return (
        f"def {{}}(x, y):\n    total = x * {a}\n    ",
        f"return total + y - {b}\n",
        f"return total - y + {b}\n",
    )


def _bound(rng: random.Random) -> tuple[str, str, str]:
    limit, extra = rng.randint(5, 40), rng.randint(2, 9)
    rest = f" y:\n        return x + {extra}\n    return {limit}\n"
    return "def {}(x, y):\n    ", f"if x <={rest}", f"if x <{rest}"


def _constant(rng: random.Random) -> tuple[str, str, str]:
    a, b = rng.randint(3, 40), rng.randint(3, 40)
    return (
        f"def {{}}(x, y):\n    base = x + {b}\n    ",
        f"return base * y + {a}\n",
        f"return base * y + {a + 1}\n",
    )


def _branch(rng: random.Random) -> tuple[str, str, str]:
    a = rng.randint(2, 9)
    right = f"return x * {a} if x > y else y\n"
    return "def {}(x, y):\n    ", right, f"return y if x > y else x * {a}\n"


def _row(rng: random.Random, make: Callable[[random.Random], tuple[str, str, str]]) -> Row:
    package, module, name = rng.sample(WORDS, 3)
    head, right, wrong = make(rng)
    head = head.format(name)
    points = [(x, y) for x in (1, 7, 12) for y in (1, 7, 20)]
    scope: dict[str, Any] = {}
    exec(head + right, scope)
    cases = [((x, y), scope[name](x, y)) for x, y in points]
    files = {
        f"{package}/__init__.py": f"from {package}.{module} import {name}\n",
        f"{package}/{module}.py": head + wrong,
        "check.py": CHECK.format(package=package, module=module, name=name, cases=cases[:5]),
    }
    setup = f"import os\nfor path, text in {files!r}.items():\n"
    setup += "    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)\n    open(path, 'w').write(text)\n"
    setup += "del path, text, os"
    return {
        "prompt": f"The function {name} in {package}/{module}.py has a bug. `python check.py` shows it. Repair it.",
        "setup": setup,
        "path": f"{package}/{module}.py",
        "wrong": wrong.rstrip("\n"),
        "right": right.rstrip("\n"),
        "source": head + wrong,
        "tests": [{"call": name, "args": list(args), "expect": expect} for args, expect in cases],
    }


FAMILIES: dict[str, tuple[Callable[[random.Random], Row], int]] = {
    "operator": (lambda rng: _row(rng, _operator), 1),
    "bound": (lambda rng: _row(rng, _bound), 1),
    "constant": (lambda rng: _row(rng, _constant), 1),
    "branch": (lambda rng: _row(rng, _branch), 0),
}
"""Family → (generator, its weight in training and test; 0: held out)."""

HELDOUT = [name for name, (_, weight) in FAMILIES.items() if not weight]
SPLITS = {"train": 120, "test": 40, "heldout": 24, "validation": 20}


def generate(seed: int, families: list[str] | None = None) -> Iterator[Row]:
    """Yields endless rows without ids; deterministic in the seed."""
    rng = random.Random(f"file-task {seed}")
    names = families or [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    while True:
        family = rng.choice(names)
        yield {"family": family, **FAMILIES[family][0](rng)}


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no question is in two splits."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        return generate(number, HELDOUT if split == "heldout" else None)

    return draw_splits(SPLITS, rows_of)


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution: view, edit, check."""
    lines = row["source"].splitlines()
    shown = "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, 1))
    line = row["source"][: row["source"].index(row["wrong"])].count("\n") + 1
    return [
        _call("files", action="view", path=row["path"]),
        {"role": "tool", "name": "files", "content": shown},
        _call("files", action="edit", path=row["path"], old=row["wrong"], new=row["right"]),
        {"role": "tool", "name": "files", "content": f"Edited {row['path']} at line {line}."},
        _call("bash", command="python check.py"),
        {"role": "tool", "name": "bash", "content": "ok"},
        {"role": "assistant", "content": "Repaired."},
    ]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver, or for a share `1 - tool_rate` of the rows an agent that looks and repairs nothing."""
    messages = solve(row)
    return messages if rng.random() < tool_rate else [*messages[:2], messages[-1]]


async def repaired(episode: Any, ctx: Any) -> Any:
    """1 if the module passes every hidden test (primary)."""
    from agentrl_cli.errors import UsageError

    try:
        source = (await (await ctx.session()).read(ctx.task.data["path"])).decode(
            "utf-8", "replace"
        )
    except UsageError as error:
        return ctx.part(0.0, str(error))
    graded = await ctx.grade(source, ctx.task.data["tests"])
    return ctx.part(float(graded.ok), f"{graded.passed} of {graded.total} tests pass")


def tool_errors(episode: Any, ctx: Any) -> float:
    """−1 if any tool call failed or could not be parsed, else 0."""
    return -1.0 if episode.tool_errors else 0.0


REWARDS = {"repaired": repaired, "tool_errors": tool_errors}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data again."""
    for split, rows in build().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
