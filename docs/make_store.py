"""Writes docs/store.md from the schema's descriptions: python docs/make_store.py. A test fails if it is stale."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.store.schema_docs import described

TARGET = Path(__file__).with_name("store.md")

HEAD = """\
# The store

<!-- Written by docs/make_store.py from agentrl_cli/store/schema_docs.py; edit that. -->

`runs/agentrl.db` is one SQLite file. Read it with `agentrl query "select …"`, with sqlite3, or from Python:

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
