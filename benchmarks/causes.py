"""Is a planted cause the first that `agentrl why` names? 28 causes on three packs, and good runs (none).

    python benchmarks/causes.py [--work DIR] [--only NAME …] [--write]

Each is a real training of the bundled models in a process of its own, as a user starts it: a project by `agentrl init`,
one fault put into it (a file or a setting), a few steps. A run that is refused at its start counts as named if the
error says the words that are expected. `stock` is a pack made from 48 rows and one typed function. With --work the
projects are kept, and a second call only diagnoses them again. Writes benchmarks/results/causes.json, and with --write
the table between the `causes` markers of benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.learning import machine  # noqa: E402  # works without an installation

README = ROOT / "benchmarks" / "README.md"
MARKS = ("<!-- causes:start -->", "<!-- causes:end -->")
COMMON = [
    "rollout.prompts_per_step=4",
    "train.schedule.warmup_steps=0",
    "train.eval.tasks=12",
    "train.eval.samples=2",
]
ITEMS = ("steel bolts", "oak planks", "blue paint", "roof tiles", "copper wire", "glass panes")
SITES = ("Molde", "Bergen", "Narvik", "Oslo", "Harstad", "Larvik", "Skien", "Hamar")
PLAIN, ODD = (
    'Pallets of "{item}" at "{site}"?',
    "{site} wants its {item} counted, by pallet, please.",
)
STOCK = """\
STOCK = {stock}


def pallets(item: str, site: str) -> int:
    \"\"\"Return the number of pallets of an item at a site.

    Args:
        item: The item.
        site: The site.
    \"\"\"
    return STOCK[(item, site)]
"""
Change = Callable[[Path], None]


@dataclass(frozen=True)
class Cause:
    """A fault, the pack that it is put into, and the rules that name it (or words of the refusal)."""

    name: str
    pack: str
    named: tuple[str, ...]
    sets: tuple[str, ...] = ()
    change: Change = lambda folder: None
    steps: int = 5


def append(code: str, file: str = "task.py") -> Change:
    """Code at the end of a file, where it replaces what the file defined."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(path.read_text() + "\n\n" + code)

    return change


def edit(file: str, old: str, new: str) -> Change:
    """One text of a file replaced by another."""

    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text, f"{file} has no {old!r}"
        (folder / file).write_text(text.replace(old, new))

    return change


def rows(keep: int | None = None, copy: bool = False) -> Change:
    """Few training rows; or the validation split a copy of some."""

    def change(folder: Path) -> None:
        train = folder / "data" / "train.jsonl"
        lines = train.read_text().splitlines(keepends=True)[: keep or 48]
        train.write_text("".join(lines))
        if copy:
            (folder / "data" / "validation.jsonl").write_text(
                "".join(lines).replace('"train-', '"validation-')
            )

    return change


def ask(wording: str) -> Change:
    """Other questions for the same rows."""

    def change(folder: Path) -> None:
        write_rows(folder / "data", wording)

    return change


def write_rows(data: Path, wording: str = PLAIN, stock: int = 7) -> None:
    """The rows of stock: 6 items at 8 sites, the first 36 to train on."""
    rng = random.Random(stock)
    pairs = [(item, site) for item in ITEMS for site in SITES]
    made = [
        {"id": f"row-{n}", "prompt": wording.format(item=item, site=site), "answer": str(amount(item, site))}
        for n, (item, site) in enumerate(rng.sample(pairs, len(pairs)))
    ]  # fmt: skip
    for split, part in (("train", made[:32]), ("validation", made[32:40]), ("test", made[40:])):
        text = "".join(json.dumps({**row, "family": "stock"}) + "\n" for row in part)
        (data / f"{split}.jsonl").write_text(text)


def amount(item: str, site: str) -> int:
    return 10 + (len(item) * 37 + sum(map(ord, site))) % 89


def families(*names: str) -> Change:
    """The rows of other families as those of training."""

    def change(folder: Path) -> None:
        data = folder / "data"
        found = [json.loads(line) for f in data.glob("*.jsonl") for line in f.open()]
        own = [row for row in found if row["family"] in names]
        for split, part in (("train", own[::2]), ("validation", own[1::2])):
            (data / f"{split}.jsonl").write_text(
                "".join(
                    json.dumps({**row, "id": f"{split}-{n}"}) + "\n" for n, row in enumerate(part)
                )
            )
        spec = folder / "task.yaml"
        spec.write_text(spec.read_text().replace("heldout: [rest, power]", "heldout: []"))

    return change


def other_stop(folder: Path) -> None:
    """The bundled model with a template that ends turns by another token than the model writes."""
    from agentrl_cli.paths import bundled_model

    model = folder / "model"
    model.mkdir()
    for file in bundled_model("tiny").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        text = (model / name).read_text()
        if name == "chat_template.jinja":
            text = text.replace("<|im_end|>", "<|endoftext|>")
        else:
            text = text.replace('"eos_token": "<|im_end|>"', '"eos_token": "<|endoftext|>"')
            text = text.replace('"eos_token_id": 2', '"eos_token_id": 0')
        (model / name).write_text(text)


PRIMARY = "def exact(episode, ctx):\n    return {}\n\n\nREWARDS['exact'] = exact\n"
GAMED = (
    "def calls(episode, ctx):\n    return episode.tool_calls / 4\n\n\nREWARDS['calls'] = calls\n"
)
RAISES = "_N = [0]\n_pallets = pallets\n\n\n" + STOCK.partition("\n\n\n")[2].replace(
    "    return STOCK[(item, site)]\n",
    "    _N[0] += 1\n    if _N[0] % 2:\n        raise ConnectionError('the stock server is busy')\n"
    "    return _pallets(item, site)\n",
)

CAUSES = (
    Cause("wrong parser", "calc-task", ("parser",), ("model.chat.parser=mistral",)),
    Cause("grader gives 0 to all", "calc-task", ("grader",), change=append(PRIMARY.format("0.0"))),
    Cause("grader gives 1 to all", "calc-task", ("grader",), change=append(PRIMARY.format("1.0"))),
    Cause("grader gives 0.5 to all", "stock", ("grader",), change=append(PRIMARY.format("0.5"))),
    Cause(
        "random grader",
        "calc-task",
        ("grader_noise",),
        change=append("import random\n\n\n" + PRIMARY.format("float(random.random() < 0.5)")),
    ),
    Cause(
        "grader reads another field",
        "calc-task",
        ("grader",),
        change=edit(
            "task.py",
            'float(said == ctx.task.data["answer"])',
            'float(said == ctx.task.data["expression"])',
        ),
    ),
    Cause(
        "a gamed reward part",
        "calc-task",
        ("reward_hacking",),
        ("train.lr=1e-3",),
        lambda f: (
            append(GAMED)(f),
            edit(
                "task.yaml",
                "exact: {weight: 1.0, primary: true}",
                "exact: {weight: 0.2, primary: true}\n  calls: {weight: 2.0}",
            )(f),
        )[0],
        24,
    ),
    Cause("primary is None", "stock", ("ungraded",), change=append(PRIMARY.format("None"))),
    Cause(
        "learning rate 10 times too high", "sql-task", ("collapse",), ("train.lr=1e-2",), steps=12
    ),
    Cause("learning rate 10 times too high", "stock", ("collapse",), ("train.lr=3e-3",), steps=12),
    Cause("learning rate 100 times too high", "stock", ("collapse",), ("train.lr=3e-2",), steps=6),
    Cause(
        "learning rate 100 times too high", "calc-task", ("collapse",), ("train.lr=3e-2",), steps=6
    ),
    Cause(
        "learning rate 100 times too low",
        "calc-task",
        ("no_movement",),
        ("train.lr=3e-6",),
        steps=8,
    ),
    Cause(
        "learning rate 100 times too low", "stock", ("no_movement",), ("train.lr=3e-6",), steps=8
    ),
    Cause("everything truncated", "calc-task", ("truncated",), ("rollout.max_new_tokens=5",)),
    Cause("prompts too long", "sql-task", ("too_long", "too_long:"), ("rollout.max_tokens=130",)),
    Cause("stop token untrained", "calc-task", ("stop",), ("model.name=model",), other_stop),
    Cause(
        "temperature 0", "calc-task", ("rollout.temperature above 0",), ("rollout.temperature=0",)
    ),
    Cause("temperature 0.01", "calc-task", ("same_attempts",), ("rollout.temperature=0.01",)),
    Cause(
        "adapter on no layer",
        "calc-task",
        ("adapter.target_modules",),
        ("adapter.enabled=true", "adapter.target_modules=[nothing]"),
    ),
    Cause("groups of one", "calc-task", ("no_signal",), ("rollout.group_size=1",)),
    Cause("a tool raises half the time", "stock", ("tools",), change=append(RAISES, "tool.py")),
    Cause(
        "a tool that hangs",
        "stock",
        ("tools",),
        ("rollout.timeout.tool=0.2",),
        edit(
            "tool.py", "    return STOCK", "    import time\n\n    time.sleep(20)\n    return STOCK"
        ),
        2,
    ),
    Cause(
        "a phrasing that the model cannot read", "stock", ("arguments", "tools"), change=ask(ODD)
    ),
    Cause("all too easy", "echo-task", ("all_solved",), steps=12),
    Cause("all too hard", "calc-task", ("all_failed",), change=families("rest", "power")),
    Cause("four rows", "sql-task", ("few_rows",), change=rows(4), steps=6),
    Cause("a leaking split", "sql-task", ("leak",), change=rows(copy=True), steps=6),
)
GOOD = (
    Cause("good", "calc-task", (), steps=16),
    Cause("good", "sql-task", (), steps=12),
    Cause("good", "stock", (), steps=12),
    Cause("good", "search-task", (), steps=8),
)


def agentrl(folder: Path, *words: str) -> tuple[int, str, str]:
    """A command in a project: its exit status, and what it wrote."""
    path = os.pathsep.join(
        [os.environ.get("CAUSES_PACKAGE", str(ROOT)), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-m", "agentrl_cli", *words], check=False, cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def make(cause: Cause, folder: Path) -> str:
    """The project with its fault, trained. Returns what the training wrote."""
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    if cause.pack == "stock":
        source = parent / f"{folder.name}-source"
        source.mkdir()
        known = {(item, site): amount(item, site) for item in ITEMS for site in SITES}
        (source / "tool.py").write_text(STOCK.replace("{stock}", repr(known)))
        (source / "rows.jsonl").write_text(
            '{"prompt": "?", "answer": "1"}\n{"prompt": "!", "answer": "2"}\n'
        )
        words = ["--from", str(source / "rows.jsonl"), "--from", str(source / "tool.py")]
    else:
        words = [cause.pack]
    code, _, err = (
        agentrl(parent, "init", *words, folder.name)
        if cause.pack != "stock"
        else agentrl(parent, "init", folder.name, *words)
    )
    if code:
        raise SystemExit(err)
    if cause.pack == "stock":
        write_rows(folder / "data")
    cause.change(folder)
    every = max(2, cause.steps // 2)
    sets = [*COMMON, f"train.steps={cause.steps}", f"train.eval.every={every}", *cause.sets]
    _, out, err = agentrl(folder, "train", *(word for one in sets for word in ("--set", one)))
    (folder / "train.log").write_text(out + err)
    return out + err


def diagnose(cause: Cause, folder: Path) -> dict[str, Any]:
    """What is named first: a rule with its text, or the error that refused the run."""
    code, out, err = agentrl(folder, "why", "last", "--json")
    log = (folder / "train.log").read_text()
    if code == 0 and out:
        found = json.loads(out)["finding"]
        name, text = (found["name"], found["line"]) if found else ("", json.loads(out)["summary"])
    else:
        name, text = "refused", (log.strip().splitlines() or [err])[-2:]
        text = " ".join(text)
    right = name in cause.named or (name == "refused" and any(word in log for word in cause.named))
    right = right or any(word in text for word in cause.named if " " in word)
    good = not cause.named and not name
    return {
        "cause": cause.name,
        "pack": cause.pack,
        "named": name,
        "text": text,
        "right": right or good,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each cause."""
    planted = [one for one in results if one["cause"] != "good"]
    good = [one for one in results if one["cause"] == "good"]
    lines = ["| planted | pack | named first | its words |", "| --- | --- | --- | --- |"]
    for one in results:
        words = one["text"].replace("|", "/").replace("\n", " ")
        mark = "" if one["right"] else "**wrong** "
        lines.append(
            f"| {one['cause']} | {one['pack']} | {mark}{one['named'] or 'nothing'} | {words} |"
        )
    return "\n".join(
        [*lines, "", f"{sum(one['right'] for one in planted)} of {len(planted)} planted causes named first;"
         f" {sum(not one['right'] for one in good)} of {len(good)} good runs raise one."]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--work", type=Path, help="keep the projects here; those that exist are not trained again"
    )
    parser.add_argument("--only", nargs="+", help="causes whose name has one of these words")
    parser.add_argument("--make", action="store_true", help="only train")
    parser.add_argument("--write", action="store_true", help="write the results and the table")
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        for cause in [*CAUSES, *GOOD]:
            if given.only and not any(word in f"{cause.name} {cause.pack}" for word in given.only):
                continue
            words = "".join(c if c.isalnum() else "-" for c in f"{cause.name} {cause.pack}")
            folder = (work / words).resolve()
            if not (folder / "train.log").is_file():
                make(cause, folder)
            if not given.make:
                results.append(diagnose(cause, folder))
                print(
                    "ok   " if results[-1]["right"] else "WRONG",
                    cause.name,
                    cause.pack,
                    "→",
                    results[-1]["named"],
                    "|",
                    results[-1]["text"],
                    flush=True,
                )
    if given.write:
        text = json.dumps({"machine": machine(), "results": results}, indent=1, ensure_ascii=False)
        (ROOT / "benchmarks" / "results" / "causes.json").write_text(text + "\n", encoding="utf-8")
        before, start, rest = README.read_text(encoding="utf-8").partition(MARKS[0])
        _, end, after = rest.partition(MARKS[1])
        assert start and end
        README.write_text(f"{before}{start}\n{table(results)}\n{end}{after}", encoding="utf-8")
    elif results:
        print(table(results).rpartition("\n")[2])


if __name__ == "__main__":
    main()
