"""math-task: word problems, the rows of GSM8K and MATH, and a grader by the library math-verify.

An answer that math-verify cannot read leaves its episode ungraded, with the reason; a missing answer is wrong.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Lock, Timer
from typing import Any

from agentrl_cli.errors import DataError, MissingDependency
from agentrl_cli.tasks import draw_splits
from agentrl_cli.tasks.forms import normal
from agentrl_cli.tasks.sources import source_of

Row = dict[str, Any]
HERE = Path(__file__).parent
SECONDS = 3
"""math-verify's own limit for reading a text, and for comparing two."""
LIMIT = 20.0
"""For a whole answer, the start of the process included."""

TEXTS: dict[str, tuple[str, str, str]] = {
    "boxes": (
        "A box holds {a} pens. A school buys {b} boxes and {c} single pens. How many pens does it buy?",
        "每盒有 {a} 支笔。学校买了 {b} 盒，又买了 {c} 支。一共买了多少支笔？",
        "{a} * {b} + {c}",
    ),
    "left": (
        "A farm has {b} trees with {a} apples each. {c} apples are sold. How many apples are left?",
        "果园有 {b} 棵树，每棵结 {a} 个苹果，卖掉了 {c} 个。还剩多少个苹果？",
        "{a} * {b} - {c}",
    ),
    "speed": (
        "A train drives {a} km in each of {b} hours, and a bus {c} km less in all. How many km does the bus drive?",
        "火车每小时行 {a} 千米，行了 {b} 小时；汽车行驶的路程比火车少 {c} 千米。汽车行了多少千米？",
        "{a} * {b} - {c}",
    ),
    "share": (
        "{a} litres of milk are shared equally by {b} families. How many litres does each get? Answer with a fraction.",
        "{a} 升牛奶平均分给 {b} 户人家。每户得到多少升？用分数回答。",
        "{a} / {b}",
    ),
}
"""Family → (English, Chinese, expression)."""
HELDOUT = ("share", "share-zh")
SPLITS = {"train": 300, "test": 120, "heldout": 40, "validation": 60}


def generate(seed: int, heldout: bool = False) -> Iterator[Row]:
    """Endless rows without ids; deterministic in the seed. Half of them are Chinese, with `-zh` after the family."""
    rng = random.Random(f"math-task {seed}")
    while True:
        family = rng.choice([name for name in TEXTS if (name in HELDOUT) == heldout])
        chinese = rng.random() < 0.5
        a, b, c = rng.randint(12, 98), rng.randint(13, 97), rng.randint(11, 99)
        expression = TEXTS[family][2].format(a=a, b=b, c=c)
        if family == "share":
            result, steps = str(Fraction(a, b)), expression
        else:
            result, steps = (
                str(eval(expression, {"__builtins__": {}})),
                f"{a} * {b} = {a * b}\n{expression}",
            )
        yield {
            "family": family + "-zh" * chinese,
            "prompt": TEXTS[family][chinese].format(a=a, b=b, c=c),
            "answer": result,
            "solution": f"{steps} = {result}\n#### {result}",
            "tools": [],
        }


def build() -> dict[str, list[Row]]:
    """The rows in `data/`: no question is in two splits."""
    return draw_splits(SPLITS, lambda split, number: generate(number, split == "heldout"))


class Rows:
    """Rows of a file or of a dataset of the hub, with tools and with solved examples before each question.

    Args:
        path: A data file of the pack, or `hub`: a dataset's name, with `config`, `split` and `revision`.
        shots: Solved examples before each question, as turns of a conversation; the first rows of `examples`.
        examples: A data file, or a dataset's name (its split `train`).
        tools: Names of the tools that the model may call; none is chain of thought.
    """

    def __init__(
        self, shots: int = 0, examples: str = "", tools: tuple[str, ...] = (), **source: Any
    ) -> None:
        self.source, self.shots, self.tools = source, shots, list(tools)
        self.examples: Row = {"path": examples}
        if not examples.startswith("data/"):
            self.examples = {**source, "hub": examples, "split": "train"}

    def __iter__(self) -> Iterator[Row]:
        shown = [message for row in self._examples() for message in _turns(row)]
        for row in rows(self.source):
            prompt = (
                [*shown, {"role": "user", "content": row["prompt"]}] if shown else row["prompt"]
            )
            yield {**row, "prompt": prompt, "tools": self.tools}

    def _examples(self) -> list[Row]:
        return (
            [row for row, _ in zip(rows(self.examples), range(self.shots), strict=False)]
            if self.shots
            else []
        )


def rows(source: Row) -> Iterator[Row]:
    """The rows of a source in the form of this pack. Raises DataError for a row that has no question and answer."""
    for number, row in source_of(HERE, "rows", source).rows():
        if isinstance(row, str):
            raise DataError(f"row {number}: {row}")
        made = normal(row)
        made.setdefault("id", f"{number:05d}")
        if not isinstance(made.get("answer"), str):
            raise DataError(f"row {number} has no `answer`.")
        yield made


def _turns(row: Row) -> list[Row]:
    return [{"role": "user", "content": row["prompt"]}, *solve(row)]


def solve(row: Row) -> list[Row]:
    """The row's solution as an answer."""
    steps = re.sub(r"<<.*?>>", "", str(row.get("solution", ""))).rpartition("####")
    return [
        {
            "role": "assistant",
            "content": f"{(steps[0] or steps[2]).strip()}\nAnswer: {row['answer']}",
        }
    ]


def demonstrations(split: str) -> Iterator[Row]:
    """The rows of a split with the calculator, solved by one call: conversations for `agentrl sft --data`."""
    from agentrl_cli.tasks import load_pack

    pack = load_pack(HERE)
    for task in pack.tasks(split):
        expression, _, result = task.data["solution"].splitlines()[-2].rpartition(" = ")
        call = {
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": expression}},
        }
        solved = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": result},
            {"role": "assistant", "content": f"Answer: {result}"},
        ]
        yield {
            "messages": [*task.prompt, *solved],
            "tools": [tool.schema for tool in pack.tools_of(task)],
        }


_MARKED = re.compile(
    r"(?:^|\n)[ \t*]*(?:(?i:answer)|答案)[ \t*]*[:：][ \t*]*\n?[ \t*]*(\S[^\n]*?)[ \t*]*(?=\n|$)|####[ \t]*(\S[^\n]*)"
)


def answer_of(text: str) -> str | None:
    """What follows the last `Answer:`, `答案：` or `####`; else from the last `\\boxed` on; None if there is none."""
    found = _MARKED.findall(text)
    if found:
        return str(found[-1][0] or found[-1][1]).strip()
    return text[text.rindex("\\boxed") :] if "\\boxed" in text else None


def correct(episode: Any, ctx: Any) -> Any:
    """1 if math-verify finds the answer equal to the row's (primary); None if it cannot read one of them."""
    said, expected = answer_of(ctx.final_text), str(ctx.task.data["answer"])
    if said is None:
        return ctx.part(0.0, "no line `Answer: …`, no `####` and no \\boxed")
    if said == expected:
        return ctx.part(1.0, said)
    if (plain := _number(said)) is not None and (wanted := _number(expected)) is not None:
        return ctx.part(float(plain == wanted), f"said {said}, expected {expected}")
    if find_spec("math_verify") is None:
        raise MissingDependency(
            "math-task needs math-verify.", hint="pip install 'agentrl-cli[math]'"
        )
    found = JUDGE.ask(expected, said)
    return (
        ctx.ungraded(found)
        if isinstance(found, str)
        else ctx.part(found, f"said {said}, expected {expected}")
    )


class Judge:
    """math-verify in a process of its own: its limits are alarms, for which all episodes here would wait."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: Popen[str] | None = None

    def ask(self, expected: str, said: str) -> float | str:
        """1 if both are equal, else 0; why not, as text, if one cannot be read within LIMIT seconds."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                command = [sys.executable, __file__, "judge"]
                self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, encoding="utf-8")
            child = self._process
            timer = Timer(LIMIT, child.kill)
            timer.start()
            try:
                child.stdin.write(json.dumps([expected, said]) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
            except BrokenPipeError:
                line = ""
            finally:
                timer.cancel()
            if line:
                return json.loads(line)
            child.kill()
            child.communicate()
            return f"math-verify cannot read the answer {said!r}"


JUDGE = Judge()


def judge() -> None:
    """The other process: one JSON line [expected, said] in, one out."""
    for line in sys.stdin:
        expected, said = json.loads(line)
        print(json.dumps(_judged(expected, said)), flush=True)


def _judged(expected: str, said: str) -> float | str:
    from math_verify import verify

    gold, answer = _read(expected), _read(said)
    if not gold or not answer:
        what = f"the answer {said!r}" if gold else f"the row's answer {expected!r}"
        return f"math-verify cannot read {what}"
    return float(verify(gold, answer, timeout_seconds=SECONDS))


def _number(text: str) -> Fraction | None:
    """A plain number, with separators of thousands; None for anything else, and for one of 1,000 digits."""
    bare = text.removesuffix(".")
    return (
        Fraction(bare.replace(",", ""))
        if len(bare) < 1000 and re.fullmatch(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", bare)
        else None
    )


def _read(text: str) -> list[Any]:
    """What math-verify makes of a text, which is LaTeX or plain; empty if it cannot read it."""
    from math_verify import parse

    latex = f"${text.strip('$')}$"
    for form in (latex, text) if set(text) & set("\\^{") else (text, latex):
        found: list[Any] = parse(form, parsing_timeout=SECONDS)
        if any(not isinstance(one, str) for one in found):  # the text alone is not an expression
            return found
    return []


def format(episode: Any, ctx: Any) -> float:
    """1 if the final turn has an answer."""
    return float(answer_of(ctx.final_text) is not None)


REWARDS = {"correct": correct, "format": format}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data again."""
    for split, made in build().items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
        (Path(folder) / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["judge"]:
        judge()
    elif sys.argv[1:2] == ["demonstrations"]:
        for row in demonstrations((sys.argv[2:] or ["train-calculator"])[0]):
            print(json.dumps(row, ensure_ascii=False))
    else:
        write(str(HERE))
