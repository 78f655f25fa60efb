"""Begin a run in the store: its row, its folder, and the settings in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl_cli._version import __version__
from agentrl_cli.config import Config
from agentrl_cli.config.show import full_yaml
from agentrl_cli.store import RunRow, Store


def new_run(
    config: Config,
    store: Store,
    *,
    kind: str,
    packs: Sequence[str],
    tokenizer: str,
    model: str = "",
    id: str = "",
) -> RunRow:
    """Return a run's row and its folder beside the store, under a free name; a kill meanwhile leaves no row."""
    name = f"{'-'.join(packs)}-{config.algo.advantage.name if kind == 'train' else kind}"
    with store.transaction():
        row = store.runs.add(
            RunRow(
                id=id,
                name=name,
                kind=kind,
                model=model or config.model.name,
                pack=",".join(packs),
                seed=config.seed,
                total_steps=config.train.steps if kind == "train" else 0,
                tokenizer=tokenizer,
                version=__version__,
                config=config.model_dump(mode="json"),
            )
        )
        row = store.runs.add_folder(row)
        (Path(row.dir) / "config.yaml").write_text(full_yaml(config), encoding="utf-8")
    return row


def keep_settings(run: RunRow, config: Config, store: Store) -> None:
    """Store a run's settings: in its row, which a resume reads, and in its folder, for people."""
    (Path(run.dir) / "config.yaml").write_text(full_yaml(config), encoding="utf-8")
    store.runs.update(run.id, config=config.model_dump(mode="json"), total_steps=config.train.steps)
