"""Writes docs/store.md from the schema's descriptions: python docs/make_store.py. A test fails if it is stale."""

from __future__ import annotations

from pathlib import Path

from docs.store_columns import described

TARGET = Path(__file__).with_name("store.md")

HEAD = """\
# The store

<!-- Written by docs/make_store.py from docs/store_columns.py; edit that. -->

`runs/agentrl.db` is one SQLite file. Read it with `agentrl ls --sql "select …"`, with sqlite3, or from Python:

```python
from agentrl_cli.store import Store

with Store.open("runs/agentrl.db", readonly=True) as store:
    run = store.runs.get("last")
    for row in store.episodes.rows(store.episodes.ids("outcome:solved", "-reward", run=run.id)):
        print(row.id, row.reward)
```

| part | holds |
| --- | --- |
| `store.runs` | runs, their steps, evaluations and checkpoints |
| `store.claims` | which process works on a run |
| `store.episodes` | episodes: ids by filter and order, list rows, whole episodes; writing them |
| `store.signals` | what training computed per token |
| `store.marks` | dispositions, drift, tags and notes |
| `store.scores` | rewards and advantages that episodes would have had |
| `store.stats` | counts and means by group, task, tag and tool |
| `store.live` | the state of running episodes |
| `store.workers` | the workers that make a run's episodes |
| `store.journal` | logs, events and alerts |
| `store.controls` | what people ask of a running training |
| `store.tasks`, `store.tokenizers` | what episodes refer to |

Several processes may read and write one file. `with store.transaction():` makes several writes one. Times are seconds
since the epoch, paths are relative to the folder of the store, JSON is text.

Foreign keys (→ below, and every `run_id` and `episode_id`) are checked on every connection that agentrl opens; in
your own, run `PRAGMA foreign_keys=ON` first. Deleting a run deletes what belongs to it; deleting an episode deletes its
turns, tokens, calls, rewards, tags and notes, but not its forks. `agentrl db status --check` counts rows that refer to
nothing.

A newer agentrl reads an older store as it is. Its first command that writes migrates the file, in one transaction,
unless a process of an older agentrl works on a run: then it is refused, and reading goes on. While a store is in use,
its newest rows are in `agentrl.db-wal`: copy both files, or use `agentrl db backup`. A copy without that file is
reported if it is empty, damaged, or has a run whose process is alive; a copy that was made between two checkpoints of
SQLite and is opened after its training has ended looks whole. A store needs file locks: keep it on a local disk.

## Tokens in pandas

`turn_tokens` has a row per turn and an array per column, without a header: `n` numbers, little-endian, one after the
other; `top_ids` and `top_logps` are [n, 5], row by row. `read_tokens(row)` gives numpy arrays from a mapping, a
`sqlite3.Row` or a row of pandas, whatever columns it has besides `n` and `ids`. A number that was never stored is
NaN, −1 in `top_ids`, False in `clipped`. Turns in the order of `idx` make the episode.

```python
import sqlite3

import pandas as pd

from agentrl_cli import read_tokens

with sqlite3.connect("file:runs/agentrl.db?mode=ro", uri=True) as db:
    turns = pd.read_sql("SELECT * FROM turn_tokens ORDER BY episode_id, idx", db)
frames = []
for _, row in turns.iterrows():
    a = read_tokens(row)
    columns = {"id": a["ids"], "origin": a["origin"], "logp": a["logp_policy"]}
    frames.append(pd.DataFrame({"episode": row.episode_id, "turn": row.idx, **columns}))
tokens = pd.concat(frames, ignore_index=True)
sampled = tokens[tokens.origin == 4]
print(sampled.groupby("episode").logp.agg(["count", "mean"]))
```
"""


def render() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    for table, (text, columns) in described().items():
        lines += ["", f"## {table}", "", text, "", "| column | |", "| --- | --- |"]
        lines += [f"| `{name}` | {description} |" for name, description in columns.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
