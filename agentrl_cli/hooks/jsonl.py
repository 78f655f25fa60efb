"""A logger, and an example of a hook: one JSON line per step and evaluation, in metrics.jsonl of the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.hooks.base import Hook


class JsonlLogger(Hook):
    """Appends to `path`, or to metrics.jsonl in the folder of the run (`run.dir`); without either it writes nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on_run_start(self, run: Any) -> None:
        if self.path is None and run is not None and run.dir:
            self.path = Path(run.dir) / "metrics.jsonl"

    def on_update(self, metrics: Mapping[str, float], step: int) -> None:
        self._write({"step": step, **metrics})

    def on_eval(self, result: Any, step: int) -> None:
        self._write({"step": step, "eval": _fields(result)})

    def _write(self, row: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        plain = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain, default=str, ensure_ascii=False) + "\n")


def _fields(result: Any) -> Mapping[str, Any]:
    """Return an EvalResult's summary (its fields hold every attempt), the fields of another dataclass, else a text."""
    if hasattr(result, "report"):
        report: Mapping[str, Any] = result.report()
        return report
    return (
        asdict(result)
        if is_dataclass(result) and not isinstance(result, type)
        else {"result": str(result)}
    )
