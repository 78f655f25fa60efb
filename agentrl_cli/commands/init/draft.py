"""A new pack as far as it is known, and its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader

from agentrl_cli.errors import DataError
from agentrl_cli.registry import load_file
from agentrl_cli.tasks.called import SPLIT, as_jsonl, shares, split_rows
from agentrl_cli.tasks.drawing import PLACEHOLDER, Row, question
from agentrl_cli.tasks.forms import detect
from agentrl_cli.types import group_pairs

TEST = Path(__file__).with_name("test_task.py.txt")
AGAIN = "Then `python task.py` writes the rows again."
SYSTEM = "Use the tools where they help. End with a line `Answer: …`."
DEFAULTS: dict[str, dict[str, float]] = {
    "rollout": {
        "group_size": 8,
        "prompts_per_step": 8,
        "max_turns": 4,
        "max_new_tokens": 96,
        "max_tokens": 768,
    },
    "train": {"steps": 60, "lr": 3.0e-4, "token_budget": 4096, "eval": 20},
}


@dataclass
class Draft:
    """A pack in the making."""

    name: str
    tools: list[Any] = field(default_factory=list)
    """Entries of `tools` in task.yaml."""
    names: list[str] = field(default_factory=list)
    """The tools' names, for rows that are still to be written."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Files that are copied into the pack."""
    code: str = ""
    """How task.py begins: the tools, or where they are."""
    asks: dict[str, str] = field(default_factory=dict)
    """Name and text of the functions that draw questions."""
    rows: list[Row] | None = None
    """Rows in AgentRL's own form; None: they are drawn, or still to be written."""
    places: list[str] = field(default_factory=list)
    """Where each row stands: `file:line`."""
    answer: str = "answer"
    """The rows' field with the right answer; empty without one."""
    agent: str | dict[str, Any] = ""
    system: str = SYSTEM
    spec: dict[str, Any] = field(default_factory=dict)
    """Keys of task.yaml besides the usual ones."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By section, those that differ from the default ones."""
    target: Path = Path()
    """The folder that it is for."""
    model: str = ""
    """The model that its settings will name."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user: what was left out, what remains to do."""


def build(draft: Draft, folder: Path) -> None:
    """Write the pack into an empty folder.

    Draws its rows by running its task.py, if it has questions to draw. Raises EnvError if that file fails.
    """
    for name, content in draft.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if draft.answer:
        loader = FileSystemLoader(Path(__file__).parent)
        environment = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)
        code = environment.get_template("task.py.jinja").render(
            name=draft.name,
            code=draft.code,
            asks=list(draft.asks.values()),
            names=list(draft.asks),
            answer=draft.answer,
        )
        (folder / "task.py").write_text(code, encoding="utf-8")
    (folder / "test_task.py").write_bytes(TEST.read_bytes())
    (folder / "data").mkdir(exist_ok=True)
    splits = _splits(draft, folder)
    for split, rows in splits.items():
        (folder / "data" / f"{split}.jsonl").write_text(as_jsonl(rows), encoding="utf-8")
    (folder / "task.yaml").write_text(_description(draft, splits), encoding="utf-8")


def _splits(draft: Draft, folder: Path) -> dict[str, list[Row]]:
    rows = draft.rows
    if rows is None and draft.asks:
        try:
            splits = split_rows(load_file(folder / "task.py").generate(1))
            drawn = {row["family"] for part in splits.values() for row in part}
            for name in (name for name in draft.names if name not in drawn):
                draft.notes.append(
                    f"No question was drawn that {name} answers: edit its questions in task.py. {AGAIN}"
                )
            return splits
        except DataError as problem:
            draft.notes.append(f"{problem.message}. {problem.hint} {AGAIN}")
    if rows is not None:
        groups = group_pairs((question(row["prompt"], row), row) for row in rows)
        splits = shares([*groups.values()])
        if missing := [split for split in SPLIT if split not in splits]:
            text = f"Too few rows for {' and '.join(missing)}: {len(rows)}."
            draft.notes.append(
                f"{text} Add rows (hundreds are usual): tasks that were trained on measure memory."
            )
        return splits
    wanted = [f"a question that needs the tool {name}" for name in draft.names] or ["a question"]
    draft.notes.append(
        "Write questions and answers into data/train.jsonl: no row could be made from what there is."
    )
    return {
        "train": [
            {"id": f"train-{n:04d}", "prompt": f"{PLACEHOLDER} {text}", "answer": "its answer"}
            for n, text in enumerate(wanted)
        ]
    }


def _description(draft: Draft, splits: dict[str, list[Row]]) -> str:
    """Return the text of task.yaml."""
    spec: dict[str, Any] = {
        "name": draft.name,
        "description": f"What {draft.name} is about, in a sentence.",
    }
    spec |= {"system": draft.system, "tools": draft.tools} if draft.system else {}
    if draft.agent:
        spec |= {"agent": draft.agent}
    if draft.answer:
        spec |= {"rewards": {"exact": {"weight": 1.0, "primary": True}}, "row": [draft.answer]}
    if any(detect(row) != "own" for rows in splits.values() for row in rows[:1]):
        spec["data"] = {split: {"path": f"data/{split}.jsonl", "form": "own"} for split in splits}
    spec |= {
        "sandbox": False,
        "defaults": {
            section: DEFAULTS.get(section, {}) | draft.settings.get(section, {})
            for section in dict.fromkeys([*DEFAULTS, *draft.settings])
        },
        **draft.spec,
    }
    head = (
        "# The pack: what it is about, its tools, and what counts. docs/tasks.md has every key.\n"
    )
    if not spec["sandbox"]:
        head += "# Tools run in this process: `sandbox: true` and the tool run_python are for a model's own code.\n"
    return head + yaml.safe_dump(
        spec, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None
    )
