"""The store: one SQLite file that holds runs, episodes, every token of them and what training made of it.

```python
with Store.open("runs/agentrl.db") as store:
    episode = store.episode("last")
```
"""

from __future__ import annotations

from agentrl_cli.store.base import StoreBase
from agentrl_cli.store.claims import ClaimStore
from agentrl_cli.store.episode_reader import EpisodeReader
from agentrl_cli.store.episode_writer import EpisodeWriter
from agentrl_cli.store.rows import (
    CheckpointRow,
    ControlRow,
    DriftRow,
    EpisodeRow,
    EvalRow,
    LiveRow,
    RunRow,
    TokenizerRow,
)
from agentrl_cli.store.run_reader import RunReader
from agentrl_cli.store.run_writer import MarkWriter, RunWriter
from agentrl_cli.store.scores import Score, ScoreStore
from agentrl_cli.store.statements import episode_key


class Store(RunWriter, ClaimStore, EpisodeWriter, MarkWriter, RunReader, EpisodeReader, ScoreStore, StoreBase):
    """A store file, open for writing or (`readonly=True`) for reading."""


__all__ = [
    "CheckpointRow",
    "ControlRow",
    "DriftRow",
    "EpisodeRow",
    "EvalRow",
    "LiveRow",
    "RunRow",
    "Score",
    "Store",
    "TokenizerRow",
    "episode_key",
]
