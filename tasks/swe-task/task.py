"""Small repositories with a bug: a test that is shown fails, and a hidden one decides."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl_cli.rewards.script import passes
from agentrl_cli.tasks import draw_splits

Row = dict[str, Any]
Bug = tuple[str, str, str, str, str]
"""Source with `{}` in place of a line, the right line, the wrong one, the shown test, the hidden test."""

WORDS = (
    "basket",
    "depot",
    "garage",
    "harvest",
    "ledger",
    "market",
    "orchard",
    "parcel",
    "quarry",
    "station",
)
CASE = """\
import unittest

from {package}.{module} import {name}


class Test(unittest.TestCase):
    def test_{module}(self):
        {test}


if __name__ == "__main__":
"""
SHOWN = f"{CASE}    unittest.main()\n"
HIDDEN = f"""\
import sys

sys.path.insert(0, "/app")
{CASE}    if unittest.main(exit=False).result.wasSuccessful():
        print("{{word}}")
"""
USER = """\
from {package}.{module} import {name}


def run(*given):
    return {name}(*given)
"""
SCRIPT = """\
#!/bin/bash
cd /app
said=$(python3 /tests/test_hidden.py | tail -n 1)
if [ "$said" = {word} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
# An exit status would be the repository's to choose: code under test can leave with 0. It does not know the word.
PROMPT = (
    "`python -m unittest` in this repository fails. Find the bug in the package {package} and repair it. "
    "Leave tests/ as it is."
)


def _pages(rng: random.Random) -> Bug:
    size, number = rng.randint(2, 5), rng.randint(6, 9)
    items = list(range(number))
    wanted = [items[at : at + size] for at in range(0, number, size)]
    source = f"def {{name}}(items, size={size}):\n    pages = []\n{{line}}\n"
    source += "        pages.append(items[at:at + size])\n    return pages\n"
    right = "    for at in range(0, len(items), size):"
    wrong = "    for at in range(0, len(items) - size, size):"
    test = f"self.assertEqual({{name}}(list(range({number}))), {wanted})"
    more = [[1, 2], [3]]
    return (
        source,
        right,
        wrong,
        test,
        f"{test}\n        self.assertEqual({{name}}([1, 2, 3], 2), {more})",
    )


def _total(rng: random.Random) -> Bug:
    prices = [rng.randint(2, 30) for _ in range(3)]
    rate = rng.choice((5, 10, 20, 25))
    source = f"def {{name}}(prices, rate={rate}):\n    total = sum(prices)\n{{line}}\n"
    right, wrong = "    return total - total * rate / 100", "    return total + total * rate / 100"
    due = sum(prices) - sum(prices) * rate / 100
    test = f"self.assertEqual({{name}}({prices}), {due})"
    return (
        source,
        right,
        wrong,
        test,
        f"{test}\n        self.assertEqual({{name}}([10, 10], 50), 10)",
    )


def _parse(rng: random.Random) -> Bug:
    mark = rng.choice(("=", ":", ";"))
    source = "def {name}(text):\n    found = {{}}\n    for line in text.splitlines():\n{line}\n"
    source += "        found[key.strip()] = value.strip()\n    return found\n"
    right = f'        key, _, value = line.partition("{mark}")'
    wrong = '        key, _, value = line.partition(" ")'
    number = str(rng.randint(1, 9))
    test = f'self.assertEqual({{name}}("a {mark} {number}\\nb {mark} x"), '
    test += f'{{{{"a": "{number}", "b": "x"}}}})'
    more = f'self.assertEqual({{name}}("k{mark}long value"), {{{{"k": "long value"}}}})'
    return source, right, wrong, test, f"{test}\n        {more}"


def _oldest(rng: random.Random) -> Bug:
    room = rng.randint(2, 4)
    source = f"def {{name}}(queue, item, room={room}):\n    queue = [*queue, item]\n"
    source += "    if len(queue) > room:\n{line}\n    return queue\n"
    right, wrong = "        queue = queue[1:]", "        queue = queue[:-1]"
    items = list(range(room))
    test = f"self.assertEqual({{name}}({items}, 9), {[*items[1:], 9]})"
    more = "self.assertEqual({name}([1, 2], 3, 2), [2, 3])"
    return source, right, wrong, test, f"{test}\n        {more}"


FAMILIES: dict[str, tuple[Callable[[random.Random], Bug], int]] = {
    "pages": (_pages, 1),
    "total": (_total, 1),
    "parse": (_parse, 1),
    "oldest": (_oldest, 0),
}
"""Family → (generator, its weight in training and test; 0: held out)."""
HELDOUT = [name for name, (_, weight) in FAMILIES.items() if not weight]
SPLITS = {"train": 120, "test": 40, "heldout": 20, "validation": 20}


def _row(rng: random.Random, family: str) -> Row:
    package, module, other, name = rng.sample(WORDS, 4)
    source, right, wrong, shown, hidden = FAMILIES[family][0](rng)
    names = {"package": package, "module": module, "name": name}
    made = source.format(name=name, line=wrong)
    files = {
        f"{package}/__init__.py": "",
        f"{package}/{module}.py": made,
        f"{package}/{other}.py": USER.format(**names),
        "tests/__init__.py": "",
        f"tests/test_{module}.py": SHOWN.format(test=shown.format(name=name), **names),
    }
    word = f"{rng.getrandbits(64):016x}"
    setup = f"import os\nfor path, text in {files!r}.items():\n"
    setup += "    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)\n    open(path, 'w').write(text)\n"
    edit = f"import pathlib; p = pathlib.Path('{package}/{module}.py'); "
    edit += f"p.write_text(p.read_text().replace({wrong!r}, {right!r}))"
    return {
        "family": family,
        "prompt": PROMPT.format(package=package),
        "setup": setup + "del path, text, os",
        "path": f"{package}/{module}.py",
        "source": made,
        "wrong": wrong,
        "right": right,
        "tests": {
            "test.sh": SCRIPT.format(word=word),
            "test_hidden.py": HIDDEN.format(test=hidden.format(name=name), word=word, **names),
        },
        "root": "/app",
        "timeout": 20.0,
        "solution": f"#!/bin/bash\ncd /app\npython3 -c {json.dumps(edit)}\n",
    }


def generate(seed: int, families: list[str] | None = None) -> Iterator[Row]:
    """Yields endless rows without ids; deterministic in the seed."""
    rng = random.Random(f"swe-task {seed}")
    names = families or [name for name, (_, weight) in FAMILIES.items() if weight]
    while True:
        yield _row(rng, rng.choice(names))


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no repository is in two splits."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        yield from generate(number, HELDOUT if split == "heldout" else None)

    return draw_splits(SPLITS, rows_of)


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution: view, edit, test."""
    source = row["source"]
    shown = "\n".join(f"{number}\t{line}" for number, line in enumerate(source.splitlines(), 1))
    line = source[: source.index(row["wrong"])].count("\n") + 1
    calls = [
        ("files", {"action": "view", "path": row["path"]}, shown),
        ("files", {"action": "edit", "path": row["path"], "old": row["wrong"], "new": row["right"]},
         f"Edited {row['path']} at line {line}."),
    ]  # fmt: skip
    said: list[dict[str, Any]] = []
    for name, arguments, answer in calls:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})
        said.append({"role": "tool", "name": name, "content": answer})
    return [*said, {"role": "assistant", "content": "Repaired."}]


REWARDS = {"passes": passes}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data again."""
    for split, rows in build().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
