"""The model card of a merged model: its training, its evaluations, and how to load it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from agentrl_cli.config.choice import name_of
from agentrl_cli.models.load import auto_class
from agentrl_cli.models.merge import Merged
from agentrl_cli.reports.compare import all_evals
from agentrl_cli.reports.svg import OPTIONS
from agentrl_cli.store import EvalRow, RunRow, Store
from agentrl_cli.store.checkpoint_names import trained_by


def model_card(name: str, store: Store | None, merged: Merged) -> str:
    """Return README.md for the model that `name` means; without a store it says nothing of a run."""
    found = None if store is None else trained_by(store, name)
    row, step = found or (None, 0)
    base = "" if row is None else str(row.model)
    template = Environment(**{**OPTIONS, "autoescape": False}).get_template("model_card.md.jinja")
    return template.render(
        name=name,
        merged=merged,
        kind=auto_class(merged.folder).__name__,
        hub=base
        if base.count("/") == 1 and base[0] not in "./~" and not Path(base).exists()
        else "",
        facts={} if row is None else _facts(row, step),
        evals=[] if row is None or store is None else _evals(store, row, step),
    )


def _facts(row: RunRow, step: int) -> dict[str, object]:
    settings: Any = dict(row.config)
    algo, train = settings.get("algo") or {}, settings.get("train") or {}
    bundled = f"{row.model} (bundled with agentrl-cli)"
    return {
        "run": f"{row.name}, step {step} of {row.total_steps}",
        "base model": bundled if row.model == "tiny" else Path(row.model).name,
        "tasks": row.pack,
        "advantage, loss": ", ".join(
            name_of(algo.get(key)) or "-" for key in ("advantage", "loss")
        ),
        "learning rate": train.get("lr", "-"),
        "seed": row.seed,
        "agentrl-cli": row.version,
    }


def _evals(store: Store, row: RunRow, step: int) -> Sequence[EvalRow]:
    """Return the evaluations of just these weights with their tools, in the run and by `agentrl eval` afterwards."""
    found = [one for one in all_evals(store, row) if one.step == step]
    measured = [one for one in found if None not in (one.pass_rate, one.low, one.high)]
    return [one for one in measured if one.metrics.get("tools", True)]
