"""The store: one SQLite file with runs, episodes, all their tokens and what training computed for each.

```python
with Store.open("runs/agentrl.db") as store:
    episode = store.episodes.get(store.episodes.resolve("last"))
```
"""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.store.connection import BUSY_MS
from agentrl_cli.store.episode_sql import episode_key
from agentrl_cli.store.episodes import Episodes, Stats
from agentrl_cli.store.file import StoreFile
from agentrl_cli.store.journal import Controls, Journal, Live, Workers
from agentrl_cli.store.marks import Marks, Score, Scores, Signals
from agentrl_cli.store.references import Tasks, Tokenizers
from agentrl_cli.store.rows import (
    CheckpointRow,
    ControlRow,
    EpisodeRow,
    EvalRow,
    LiveRow,
    RunRow,
    TokenizerRow,
    WorkerRow,
)
from agentrl_cli.store.runs import Claims, Runs


class Store(StoreFile):
    """A store file, open for writing or (`readonly=True`) for reading. Each part reads and writes its own tables."""

    def __init__(self, path: Path | str, *, readonly: bool = False, busy_ms: int = BUSY_MS) -> None:
        super().__init__(path, readonly=readonly, busy_ms=busy_ms)
        self.runs = Runs(self)
        self.claims = Claims(self)
        self.episodes = Episodes(self)
        self.signals = Signals(self)
        self.marks = Marks(self)
        self.scores = Scores(self)
        self.stats = Stats(self)
        self.live = Live(self)
        self.workers = Workers(self)
        self.journal = Journal(self)
        self.controls = Controls(self)
        self.tasks = Tasks(self)
        self.tokenizers = Tokenizers(self)


__all__ = [
    "CheckpointRow",
    "ControlRow",
    "EpisodeRow",
    "EvalRow",
    "LiveRow",
    "RunRow",
    "Score",
    "Store",
    "TokenizerRow",
    "WorkerRow",
    "episode_key",
]
