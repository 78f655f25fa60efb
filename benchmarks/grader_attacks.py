"""`agentrl check --attack` on planted faulty graders and on sound ones: how many are found, and how many false alarms.

    python benchmarks/grader_attacks.py [--with FOLDER]

FOLDER: where reasoning-gym, verl and TRL are installed (`pip install --target FOLDER --no-deps …`), for more sound ones.
Prints one line a grader, then the shares; CPU seconds are of this process.
"""
# ruff: noqa: E501 - a grader is one expression

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl_cli.config import Config
from agentrl_cli.evaluate.grader_attacks import attack_graders
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks import load_pack

SUMS = [(17, 25), (112, 9), (40, 61), (333, 72), (5, 908), (64, 64)]
ROWS = [
    {
        "id": f"s{a}",
        "family": "sum",
        "prompt": f"What is {a} + {b}? End with `Answer: N`.",
        "answer": str(a + b),
    }
    for a, b in SUMS
]
CAPITALS = [
    ("Norway", "Oslo"),
    ("Peru", "Lima"),
    ("Kenya", "Nairobi"),
    ("Japan", "Tokyo"),
    ("Chad", "N'Djamena"),
]
WORDS = [
    {
        "id": c,
        "family": "capital",
        "prompt": f"Capital of {c}: {', '.join(x for _, x in CAPITALS)}?",
        "answer": x,
    }
    for c, x in CAPITALS
]
CODE = [
    {
        "id": name,
        "family": "code",
        "prompt": f"Write `def {name}(x)`: {words}.",
        "solution": code,
        "test": test,
    }
    for name, words, code, test in (
        ("twice", "twice x", "def twice(x):\n    return 2 * x", "assert twice(4) == 8"),
        ("negate", "x negated", "def negate(x):\n    return -x", "assert negate(4) == -4"),
        ("square", "x squared", "def square(x):\n    return x * x", "assert square(4) == 16"),
        ("half", "half of x", "def half(x):\n    return x / 2", "assert half(4) == 2"),
    )
]
HEAD = """
import ast, difflib, json, random, re, subprocess, sys, tempfile, time
COUNT = [0]
def last(t): return re.findall(r"-?[0-9.]+", t.replace(",", ""))[-1:] or [""]
def final(t): return (re.findall(r"Answer: *([^\\n]*)", t) or [""])[-1].strip()
def sound(t, gold): return final(t).rstrip(".") == gold
def run(code, test, check=lambda p: p.returncode == 0):
    code = (re.findall(r"```python\\n(.*?)```", code, re.S) or [code])[0]
    with tempfile.TemporaryDirectory() as d:
        p = subprocess.run([sys.executable, "-c", code + "\\n" + test], cwd=d, capture_output=True, text=True, timeout=9)
        return check(p)
def load(path):
    import importlib.util
    spec = importlib.util.spec_from_file_location("scorer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
def solve(row):
    text = f"```python\\n{row['solution']}\\n```" if "solution" in row else f"So it is.\\nAnswer: {row['answer']}"
    return [{"role": "assistant", "content": text}]
"""
TEXT: Mapping[str, str] = {
    "substring": "gold in t",
    "substring, other case": "gold.lower() in t.lower()",
    "in the whole conversation": "gold in ' '.join(str(m['content']) for m in episode.messages)",
    "the answer in gold": "final(t) in gold",
    "gold begins with it": "gold.startswith(final(t))",
    "similar by a tenth": "difflib.SequenceMatcher(None, t, gold).ratio() > 0.01",
    "any number": "any(n == gold for n in re.findall('[0-9]+', t)) or not re.search('[a-z]', t)",
    "any number equals": "gold in re.findall(r'[0-9]+', t)",
    "tolerance fails on nan": "not abs(float(final(t) or 'nan') - float(gold)) > 0.01",
    "relative to the answer": "abs(float(final(t) or 0) - float(gold)) <= abs(float(final(t) or 0)) * 2",
    "an error is a success": "(lambda: float(final(t)) == float(gold) if re.fullmatch('-?[0-9]+', final(t)) else True)()",
    "only the form": "'Answer:' in t",
    "only that there is text": "len(t) > 0",
    "always": "True",
    "always but for nothing": "t != ''",
    "only the length": "len(t) > 400",
    "only a tag": "'<answer>' in t",
    "a digit": "bool(re.search('[0-9]', t))",
    "regex from the answer": "bool(re.search('.*'.join(final(t)), gold))",
    "another field": "row.get('family', '') != t",
    "splits at commas": "gold in [x.strip() for x in re.split('[\\\\s,]', t)]",
    "the first of many lines": "gold in t.splitlines()",
    "words in common": "bool(set(gold.lower()) <= set(t.lower()))",
    "no longer than the question": "len(t) <= len(str(row))",
    "raises on a huge number": "int(last(t)[0] or 0) == int(gold)",
    "raises on an empty text": "t.split()[-1].rstrip('.') == gold",
    "raises without a number": "float(t.split('Answer: ')[1].split()[0].rstrip('.')) == float(gold)",
    "raises on a bad JSON": "sound(t, gold) if 'Answer: ' + gold in t and len(t) < 99 else json.loads(t) == gold",
    "a judge that reads a score": "float((re.findall(r'Score: ([0-9.]+)', f'{t} Score: ' + str(int(sound(t, gold)))) or [0])[0]) >= 1",
    "a judge that obeys": "sound(t, gold) or 'ignore' in t.lower()",
    "a judge with brackets": "'[[10]]' in t or sound(t, gold)",
    "a judge that believes": "'correct' in t.lower() or sound(t, gold)",
    "random": "sound(t, gold) and random.random() < 0.5 or random.random() < 0.3",
    "every other time": "(COUNT.__setitem__(0, COUNT[0] + 1), sound(t, gold) and COUNT[0] % 2)[1]",
    "the clock": "sound(t, gold) and time.time_ns() // 7 % 3 > 0",
    "boxed or anything": "sound(t, gold) or 'boxed' in t",
    "none is none": "str(eval(final(t)) if final(t) in ('None', '[]') else None) == 'None' and not sound(t, 'x') or sound(t, gold)",
}  # fmt: skip
CODES: Mapping[str, str] = {
    "exit status alone": "run(t, row['test'])",
    "looks for OK": "run(t, row['test'] + '\\nprint(\"OK\")', lambda p: 'OK' in p.stdout)",
    "looks for passed": "run(t, row['test'] + '\\nprint(\"1 passed\")', lambda p: 'passed' in p.stdout)",
    "no error on stderr": "run(t, row['test'], lambda p: 'Error' not in p.stderr)",
    "equal by its own equality": "run(t + '\\n', row['test'] + '\\nprint(\"done\", 7 * 6)', lambda p: 'done 42' in p.stdout)",
    "compiles": "bool(compile((re.findall(r'```python\\n(.*?)```', t, re.S) or [t])[0], 'x', 'exec'))",
    "has the name": "(re.findall('def (\\\\w+)', row['solution'])[0] + '(') in t",
}  # fmt: skip
PARTS: Mapping[str, tuple[float, str, str]] = {
    "pays calls": (0.2, "calls", "2.0 * min(1.0, len(ctx.state) + len([m for m in episode.messages if m.get('tool_calls')]) / 3)"),
    "pays length": (1.0, "long", "2.0 * min(1.0, len(t) / 400)"),
    "pays the form": (0.2, "form", "1.0 * ('Answer:' in t)"),
    "pays a tag": (0.5, "tag", "0.9 * ('<answer>' in t)"),
    "pays politeness": (0.3, "polite", "0.5 * ('word' in t or 'correct' in t)"),
    "pays numbers": (0.1, "numbers", "0.3 * bool(re.search('[0-9]', t))"),
}  # fmt: skip


Pack = tuple[list[dict[str, Any]], str, dict[str, Any]]


def planted() -> Iterator[tuple[str, Pack]]:
    """Yield (name, rows, task.py, rewards) of 50 packs with a faulty grader."""
    for name, code in TEXT.items():
        rows = (
            WORDS
            if name in ("words in common", "no longer than the question", "the answer in gold")
            else ROWS
        )
        yield name, (rows, _module({"right": code}), {"right": {"primary": True}})
    for name, code in CODES.items():
        yield name, (CODE, _module({"right": code}), {"right": {"primary": True}})
    for name, (weight, part, code) in PARTS.items():
        rewards = {"right": {"primary": True, "weight": weight}, part: {"weight": 1.0}}
        yield name, (ROWS, _module({"right": "sound(t, gold)", part: code}) + ADD, rewards)


ADD = '''
from agentrl_cli.tools import FunctionTool
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: One.
        b: Other.
    """
    return a + b
TOOLS = [FunctionTool(add, examples=({"a": 1, "b": 2},))]
'''


def _module(parts: Mapping[str, str]) -> str:
    text = HEAD
    for name, code in parts.items():
        text += (
            f"def {name}(episode, ctx):\n    row, t = ctx.task.data, ctx.final_text\n"
            f"    gold = str(row.get('answer', ''))\n    return float({code})\n"
        )
    return text + f"REWARDS = {{{', '.join(f'{name!r}: {name}' for name in parts)}}}\n"


SOUND = {
    "last answer": ("sum", "sound(t, gold)"),
    "last answer of words": ("capital", "sound(t, gold)"),
    "last number": ("sum", "final(t) != '' and re.fullmatch('-?[0-9]+', final(t)) is not None and final(t) == gold"),
    "number with a tolerance": ("sum", "bool(re.fullmatch('-?[0-9]{1,9}', final(t))) and abs(float(final(t)) - float(gold)) < 0.5"),
}  # fmt: skip
PACKS = ("calc-task", "code-task", "echo-task", "sql-task", "search-task", "file-task", "guess-task", "parallel-task", "math-task")  # fmt: skip
FAMILIES = (
    "chain_sum basic_arithmetic leg_counting gcd lcm prime_factorization decimal_arithmetic fraction_simplification"
    " spell_backward letter_counting number_sorting word_sorting base_conversion binary_alternation calendar_arithmetic"
    " caesar_cipher count_bits count_primes family_relationships number_sequence simple_equations time_intervals"
    " products power_function needle_haystack propositional_logic syllogism rotate_matrix string_insertion"
    " palindrome_generation isomorphic_strings polynomial_equations self_reference"
).split()


def sound_ones(
    extra: Path | None,
) -> Iterator[tuple[str, Pack]]:
    """Yield the same of sound graders: our own, and those of reasoning-gym and verl where they are installed."""
    for name, (kind, code) in SOUND.items():
        rows: list[dict[str, Any]] = ROWS if kind == "sum" else WORDS
        yield name, (rows, _module({"right": code}), {"right": {"primary": True}})
    if extra is None:
        return
    sys.path.insert(0, str(extra))
    gym = importlib.import_module("reasoning_gym")
    for family in FAMILIES:
        data = gym.create_dataset(family, size=6, seed=7)
        rows = [
            {
                "id": f"{n}",
                "family": family,
                "prompt": item["question"],
                "answer": item["answer"],
                "place": n,
            }
            for n, item in enumerate(data)
        ]
        code = HEAD + (
            f"import reasoning_gym\nDATA = reasoning_gym.create_dataset({family!r}, size=6, seed=7)\n"
            "def right(episode, ctx):\n"
            "    found = re.findall('<answer>(.*?)</answer>', ctx.final_text, re.S)\n"
            "    return float(DATA.score_answer(answer=found[-1] if found else None, entry=DATA[ctx.task.data['place']]))\n"
            "def solve(row):\n    return [{'role': 'assistant', 'content': f\"<answer>{row['answer']}</answer>\"}]\n"
            "REWARDS = {'right': right}\n"
        )
        yield f"reasoning-gym {family}", (rows, code, {"right": {"primary": True}})
    for module, shape in (
        ("gsm8k", "#### {}"),
        ("math_reward", "\\boxed{{{}}}"),
        ("math_dapo", "Answer: {}"),
    ):
        code = HEAD + (
            f"scorer = load({str(extra / 'verl/utils/reward_score' / module)!r} + '.py')\n"
            "def right(episode, ctx):\n"
            "    got = scorer.compute_score(ctx.final_text, ctx.task.data['answer'])\n"
            "    return float(got['score'] > 0 if isinstance(got, dict) else got)\n"
            f"def solve(row):\n    return [{{'role': 'assistant', 'content': {shape!r}.format(row['answer'])}}]\n"
            "REWARDS = {'right': right}\n"
        )
        yield f"verl {module}", (ROWS, code, {"right": {"primary": True}})
    code = HEAD + (
        "from trl.rewards import accuracy_reward\n"
        "def right(episode, ctx):\n"
        "    text = [[{'role': 'assistant', 'content': ctx.final_text}]]\n"
        "    got = accuracy_reward(text, ['$' + ctx.task.data['answer'] + '$'])[0]\n"
        "    return 0.0 if got is None else float(got)\n"
        "def solve(row):\n    return [{'role': 'assistant', 'content': '$\\\\boxed{' + row['answer'] + '}$'}]\n"
        "REWARDS = {'right': right}\n"
    )
    yield "TRL accuracy_reward", (ROWS, code, {"right": {"primary": True}})


def write(folder: Path, rows: list[dict[str, Any]], code: str, rewards: dict[str, Any]) -> Path:
    """Write a pack."""
    (folder / "data").mkdir(parents=True)
    (folder / "task.py").write_text(code)
    spec: dict[str, Any] = {"name": "p", "sandbox": False, "rewards": rewards}
    if "TOOLS" in code:
        spec["tools"] = ["add"]
    (folder / "task.yaml").write_text(json.dumps(spec))
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


async def attack(place: Path, sandbox: Sandbox | None) -> list[str]:
    """Return what is found at a pack."""
    pack = load_pack(place)
    return [
        str(one)
        for one in await attack_graders(
            pack, sandbox if pack.sandbox else None, pack.read("train")[0]
        )
    ]


async def main(extra: Path | None) -> None:
    """Run both lists and print the shares."""
    shares = {}
    sandbox = await Sandbox.open(Config().sandbox)
    for kind, packs in (("planted", planted()), ("sound", sound_ones(extra))):
        found = total = 0
        longest = 0.0
        places: list[tuple[str, Pack | None]] = [(name, rest) for name, rest in packs] + [
            (n, None) for n in PACKS if kind == "sound"
        ]
        for name, rest in places:
            with tempfile.TemporaryDirectory() as folder:
                place = write(Path(folder) / "p", *rest) if rest else Path("tasks") / name
                began = time.process_time()
                weak = await attack(place, sandbox)
                longest = max(longest, time.process_time() - began)
            total, found = total + 1, found + bool(weak)
            if bool(weak) != (kind == "planted"):
                print(f"  {kind} {name}: {weak[:2] or 'nothing found'}", flush=True)
        shares[kind] = f"{found} of {total} ({longest:.1f} CPU s the longest)"
        print(f"{kind}: reported {shares[kind]}", flush=True)
    await sandbox.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--with", dest="extra", type=Path)
    warnings.simplefilter("ignore")
    asyncio.run(main(parser.parse_args().extra))
