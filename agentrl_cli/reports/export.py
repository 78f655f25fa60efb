"""Episodes as JSON Lines: one object a line, with everything stored, secrets masked.

    {"id", "task_id", …, "split", "tags": [tag, …], "note",
     "reward_parts": [{"name", "value", "weight", "primary", "detail", "fakeable"}],
     "turns": [{"index", "role", "messages", "start", "end", "calls", "results", "parent", …}],
     "branches": [[turn, …], …],
     "tokens": {"ids", "origin", "logp_sampled", "logp_policy", "entropy", "top_ids", "top_logps"},
     "signals": {"advantage", "logp_train", "ratio", "clipped", "weight", …}}

NaN is null. If a secret was masked, the token ids, which spell it, are left out and `masked` is true.

For trainers `sequence_rows` gives a row per token sequence instead: an episode, or one of its branches.

    {"episode", "branch", "branches", "task_id", "group", "reward", "outcome", "fact", "turns": [turn, …], "input_ids",
     "loss_mask", "old_log_probs", "advantages"}

`loss_mask` is 1 where a token is trained, and 0 in turns that a branch shares with an earlier one: context here.
"""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.errors import writing
from agentrl_cli.store import EpisodeRow, Store
from agentrl_cli.store.codec import dumps
from agentrl_cli.types import Episode, TrainSignals
from agentrl_cli.types.masking import mask

_ARRAYS = ("tokens", "signals")


def write_lines(lines: Iterable[str], path: Path) -> int:
    """Write lines to a file, which appears only when it is complete. Returns how many. Raises StoreError.

    A pipe or a device is written to; a link stays one.
    """
    special = path.exists() and not path.is_file()
    path = path if special else Path(os.path.realpath(path))
    part = path if special else path.with_name(path.name + ".part")
    count = 0
    with writing(str(path), hint="Choose another place."):
        try:
            with part.open("w", encoding="utf-8") as file:
                for count, line in enumerate(lines, 1):  # noqa: B007 - the count is returned
                    file.write(line + "\n")
            part.replace(path)
        finally:
            if not special:
                part.unlink(missing_ok=True)
    return count


def export_lines(
    store: Store, episode_ids: Iterable[str], *, tokens: bool = True, masked: bool = True
) -> Iterator[str]:
    """Yield one JSON text per episode."""
    for episode_id in episode_ids:
        signals = store.signals.get(episode_id) if tokens else None
        row = episode_object(store.episodes.get(episode_id), signals, tokens=tokens)
        row |= marks_of(store.episodes.row(episode_id))
        yield dumps(mask_secrets(row) if masked else row)


def sequence_rows(
    store: Store,
    episode_ids: Sequence[str],
    *,
    masked: bool = True,
    narrate: Callable[[str], None] = lambda text: None,
) -> Iterator[str]:
    """Yield one JSON text per token sequence; `narrate` gets a line about those left out."""
    left: Counter[str] = Counter()
    for episode_id in episode_ids:
        episode, signals = store.episodes.get(episode_id), store.signals.get(episode_id)
        if masked and mask_secrets(episode_object(episode, tokens=False))["masked"]:
            left["their ids spell what looks like a secret"] += 1
            continue
        rows = [*_list_sequences(episode, signals)]
        if not rows:
            left["no model of this store sampled their tokens (imported, or never asked)"] += 1
        yield from map(dumps, rows)
    for why, count in left.items():
        narrate(f"{count} of {len(episode_ids)} episodes are left out: {why}.")


def _list_sequences(episode: Episode, signals: TrainSignals | None) -> Iterator[dict[str, Any]]:
    """Yield the token sequences of an episode that train a token, as plain JSON values.

    Log-probabilities and advantages are null where the mask is 0, and advantages everywhere if it was not trained.
    """
    branches = episode.sequences
    for number, branch in enumerate(branches):
        if not branch.trained.any():
            continue
        logps = np.where(
            branch.trained, episode.tokens.logp_policy[branch.positions], np.float32(np.nan)
        )
        gains = None if signals is None else signals.advantage[branch.positions]
        yield {
            "episode": episode.id,
            "branch": number,
            "branches": len(branches),
            "task_id": episode.task_id,
            "group": episode.group_id,
            "reward": episode.reward,
            "outcome": episode.outcome,
            "fact": episode.fact,
            "turns": list(branch.turns),
            "input_ids": episode.tokens.ids[branch.positions].tolist(),
            "loss_mask": branch.trained.astype(int).tolist(),
            "old_log_probs": _array(logps),
            "advantages": None
            if gains is None
            else _array(np.where(branch.trained, gains, np.float32(np.nan))),
        }


def episode_object(
    episode: Episode, signals: TrainSignals | None = None, *, tokens: bool = True
) -> dict[str, Any]:
    """Return an episode as plain JSON values, unmasked."""
    derived = {"reward": episode.reward, "primary": episode.primary}
    row = _plain(episode) | {name: _plain(value) for name, value in derived.items()}
    row["branches"] = [list(branch) for branch in episode.branches]
    row |= {"tokens": row.pop("tokens"), "signals": _plain(signals)}
    return row if tokens else {name: row[name] for name in row if name not in _ARRAYS}


def marks_of(row: EpisodeRow) -> dict[str, Any]:
    """Return what is kept beside an episode: its split, its tags and its note."""
    return {"split": row.split, "tags": list(row.tags), "note": row.note}


def mask_secrets(row: dict[str, Any]) -> dict[str, Any]:
    """Return an episode's object without secrets; if it held one, without token ids and numbers too."""
    texts = {name: value for name, value in row.items() if name not in _ARRAYS}
    clean: dict[str, Any] = mask(texts)
    found = json.dumps(clean, default=str) != json.dumps(texts, default=str)
    if found and "tokens" in row:
        return {**clean, "tokens": None, "signals": None, "masked": True}
    return {**row, **clean, "masked": found}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: records as objects, arrays as lists, images in base64, NaN as null."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _array(array: Any) -> Any:
    """Return nested lists, NaN as null; float32 by its shortest decimal."""
    if array.dtype.kind != "f":
        return array.tolist()
    if array.ndim > 1:
        return [_array(row) for row in array]
    return [None if np.isnan(number) else float(str(number)) for number in array]
