"""The commands of an advice: a rule's pattern with the values of its run, and the settings that the run had."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
from pathlib import Path
from typing import Any

from agentrl_cli.config import load_config
from agentrl_cli.errors import AgentRLError
from agentrl_cli.paths import PROJECT_FILE, find_project, pack_path
from agentrl_cli.reports.evidence import Evidence
from agentrl_cli.reports.findings import Hit
from agentrl_cli.store import RunRow

TRAIN = "agentrl train" + " --set"
"""The beginning of a command that trains from the start with one setting changed."""
WARM = "agentrl sft warm"


def fill(command: str, hit: Hit, e: Evidence) -> str:
    """Return a command with the values of this run for its capitals."""
    lr, words = e.get("train", "lr", 1e-4), hit.words
    best = any(rate > e.rates[0] for rate in e.rates)
    model = (
        f"{e.run.name}@best" if best and "lr" in command else str(e.get("model", "name", "MODEL"))
    )
    longer = str(e.get("rollout", "max_new_tokens", 256) * 4)
    command = command.replace("…", words.get("named", ""))
    if command == WARM and not _demonstrated(e.run):
        right = any(one.solved for one in e.episodes)
        command = (
            f"{WARM} --from-store 'run:RUN outcome:solved'"
            if right
            else "agentrl doctor --model MODEL"
        )
    if "PART" in command and not words.get("moved"):
        return "agentrl check --all"
    if not best:  # the best checkpoint is the base, the only one of a run that trained nothing
        command = command.replace("RUN@best", "RUN@last" if e.run.kind == "train" else "RUN@base")
    values = {
        "RUN": e.run.name, "MODEL": shlex.quote(model), "LOWER": f"{lr / 10:.1g}",
        "HIGHER": f"{lr * 30:.1g}", "LONGER": longer,
        "PARSER": words.get("parser", ""), "PART": words.get("moved", ""),
        "TOOL": words.get("tool", ""), "ARGUMENTS": shlex.quote(words.get("arguments", "{}")),
    }  # fmt: skip
    return keep_settings(re.sub(r"\b[A-Z]{3,}\b", lambda m: values.get(m[0], m[0]), command), e.run)


def _demonstrated(run: RunRow) -> bool:
    """Whether every pack of a run has demonstrations, as its task.py reads without being run."""
    has = re.compile(r"^(?:\w.*)?\b(?:solve|demonstrate)\b", re.MULTILINE)
    files = [folder / "task.py" for folder in _packs_of(run)[1]]
    return all(f.is_file() and has.search(f.read_text("utf-8", "replace")) for f in files)


def _packs_of(run: RunRow) -> tuple[Path | None, list[Path]]:
    """Return the project of a run and the folders of its packs."""
    project = find_project(Path(run.dir)) if run.dir else None
    packs = [pack_path(name, project) for name in run.config["task"]["packs"]] if project else []
    return project, [folder for folder in packs if folder is not None]


def keep_settings(command: str, run: RunRow) -> str:
    """Return a command that trains with a setting, with the run's others too if its project's files have not got them.

    Without it, a run that was started with flags is repeated without them, perhaps with another model.
    """
    file = Path(run.dir) / "config.yaml"
    if not (run.dir and command.startswith(TRAIN) and file.is_file()):
        return command
    project, packs = _packs_of(run)
    read = [*([project / PROJECT_FILE] if project else []), *(p / "task.yaml" for p in packs)]
    with contextlib.suppress(
        AgentRLError, OSError
    ):  # a project that is no longer valid says nothing
        if _read_settings(project, *(path.stat().st_mtime_ns for path in read)) == run.config:
            return command
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return command.replace(" --set", f" --config {shlex.quote(str(shown))} --set", 1)


@functools.lru_cache(maxsize=1)
def _read_settings(project: Path | None, *_: int) -> dict[str, Any]:
    """Return what the files of a project set, read once for all advice until one changes: it may warn of old names."""
    files = [project / PROJECT_FILE] if project else []
    return load_config(files, env=os.environ, base=project)[0].model_dump(mode="json")
