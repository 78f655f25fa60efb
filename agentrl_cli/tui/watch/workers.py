"""The page of the workers: where each one runs, what it does, and why it was lost."""

from __future__ import annotations

from rich.text import Text

from agentrl_cli.tui.common.charts import span
from agentrl_cli.tui.common.text import BAD, FAINT, TITLE, clip
from agentrl_cli.tui.watch.data import WatchData
from agentrl_cli.tui.watch.page import LinesPage, Shown

SILENT = 10.0
"""Seconds after which the time of the last sign of life is shown."""


class WorkersPage(LinesPage):
    """Every worker of the run."""

    def lines_of(self, shown: Shown, width: int) -> list[Text]:
        return worker_lines(shown.data, width)


def worker_lines(data: WatchData, width: int) -> list[Text]:
    """Return a line for each worker, and its last error under it."""
    if not data.workers:
        text = "  the process of the run makes the episodes itself (cluster.kind: here)"
        return [Text("WORKERS", TITLE), Text(text[:width], FAINT)]
    ready = sum(worker.state == "ready" for worker in data.workers)
    rate = sum(worker.rate for worker in data.workers if worker.state == "ready")
    title = (
        f"WORKERS {len(data.workers)} ({data.workers[0].kind}), {ready} ready, {rate:,.0f} tokens/s"
    )
    node = max(8, *(min(len(worker.node), 24) for worker in data.workers))
    head = f"  {'':>4} {'node':<{node}} {'pid':>8} {'state':<9} {'weights':<18}"
    head += f" {'runs':>5} {'done':>8} {'tokens/s':>9} {'lost':>5}"
    lines = [Text(clip(title, width), TITLE), Text(clip(head, width), FAINT)]
    for worker in data.workers:
        row = f"  {worker.number:>4} {clip(worker.node, node):<{node}} {worker.pid:>8} {worker.state:<9}"
        version = (
            worker.version if len(worker.version) <= 18 else f"…{worker.version[-17:]}"
        )  # the step is at its end
        row += f" {version:<18} {worker.running:>5} {worker.finished:>8,} {worker.rate:>9,.0f}"
        row += f" {worker.lost:>5}"
        silent = data.read - worker.at
        if data.run.alive and silent > SILENT:
            row += f"  seen {span(silent)} ago"
        lines.append(
            Text(clip(row, width), BAD if worker.state == "starting" else "", no_wrap=True)
        )
        if worker.error:
            lines.append(Text(clip(f"         {worker.error}", width), BAD, no_wrap=True))
    return lines
