"""Examples under the help of each command; and flags are shown without a type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer

from agentrl_cli.registry.plugins import offers

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("agentrl demo", "agentrl demo numbers --pack calc-task"),
    "init": ("agentrl init --blank badges", "agentrl init shop --from tool.py"),
    "check": ("agentrl check", "agentrl check --model Qwen/Qwen2.5-0.5B-Instruct --rollouts 32"),
    "doctor": ("agentrl doctor", "agentrl doctor --model warm"),
    "config show": ("agentrl config show", "agentrl config show train.lr --set train.lr=1e-4"),
    "config schema": ("agentrl config schema > schema.json", "agentrl config schema | less"),
    "config validate": ("agentrl config validate", "agentrl config validate other.yaml"),
    "rollout": ("agentrl rollout -n 16", "agentrl rollout -n 4 -g 8 --split test --model RUN@best"),
    "train": ("agentrl train --watch", "agentrl train --steps 60 --set train.lr=1e-4"),
    "eval": (
        "agentrl eval RUN@best --fail-under 0.9",
        "agentrl eval --bench math --model tiny-tools --json",
    ),
    "chat": ("agentrl chat", "agentrl chat --model RUN@best --task test-0003"),
    "sft": ("agentrl sft warm", "agentrl sft warm --teacher http://127.0.0.1:8000/v1 --count 200"),
    "serve": ("agentrl serve", "agentrl serve --model RUN@best --record"),
    "merge": ("agentrl merge best merged", "agentrl merge RUN@40 merged-40"),
    "watch": ("agentrl watch", "agentrl watch RUN --plain"),
    "why": ("agentrl why", "agentrl why RUN --json", "agentrl why EPISODE@t2.31"),
    "replay": ("agentrl replay best", "agentrl replay last --plain"),
    "ls": (
        "agentrl ls -f 'outcome:failed tool:run_python'",
        "agentrl ls --grep Traceback --ids",
        "agentrl ls --sql 'SELECT count(*) FROM episodes' --format csv",
    ),
    "show": (
        "agentrl show last",
        "agentrl show RUN --time --step 12",
        "agentrl show --words NOTOOL",
    ),
    "tools list": ("agentrl tools list", "agentrl tools list --json"),
    "tools show": ("agentrl tools show calculator", "agentrl tools show run_python --json"),
    "tools call": (
        'agentrl tools call calculator \'{"expression": "2*3"}\'',
        'agentrl tools call task.py:badge \'{"name": "Ada"}\'',
    ),
    "compare": (
        "agentrl compare FIRST SECOND",
        "agentrl compare last --rewards --reward exact=task.py:exact",
    ),
    "export": (
        "agentrl export best --format html --out best.html",
        "agentrl export -f outcome:solved -o solved.jsonl",
        "agentrl export RUN --report --format md --out docs/run.md",
    ),
    "db rename": ("agentrl db rename last baseline", "agentrl db rename RUN NAME --json"),
    "db delete": ("agentrl db delete RUN", "agentrl db delete RUN --yes"),
    "db path": ("agentrl db path", "agentrl db path --project other"),
    "db status": ("agentrl db status", "agentrl db status --json"),
    "db backup": ("agentrl db backup copy.db", "agentrl db backup copy.db --json"),
    "db prune": (
        "agentrl db prune --older-than 30d --dry-run",
        "agentrl db prune --what alternatives --yes",
    ),
    "db vacuum": ("agentrl db vacuum", "agentrl db vacuum --json"),
    "sandbox run": ("agentrl sandbox run program.py", "agentrl sandbox run --bash script.sh"),
    "sandbox build-image": ("agentrl sandbox build-image", "agentrl sandbox build-image --json"),
}


def with_examples(command: Any, path: str) -> None:
    """Put the examples of a command and its subcommands under their help, and hide the type of their flags.

    What Rich would take for markup in the help, `[id]` for instance, is escaped, or it would be left out.
    """
    command.help = re.sub(r"\[(?=[a-z#/@][^\[]*\])", r"\\[", command.help or "")
    known: dict[str, tuple[str, ...]] = {**offers("examples"), **EXAMPLES}
    examples: Sequence[str] = known.get(path, ())
    children = getattr(command, "commands", {})
    if not examples:
        examples = [known[f"{path} {name}"][0] for name in children][:2]
    if examples:
        command.epilog = "Examples:\n" + "\n".join(f"  {line}" for line in examples)
    context = typer.Context(command, help_option_names=["-h", "--help"])
    for parameter in (*command.params, command.get_help_option(context)):
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    for name, child in children.items():
        with_examples(child, f"{path} {name}")
