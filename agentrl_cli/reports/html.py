"""Episodes as one self-contained HTML file.

Token texts, numbers and results travel as JSON inside the page; a short script draws them: a list of episodes, the
transcript with a choice of layers, the numbers of the token under the pointer, rewards. Secrets are masked;
an episode with a masked secret has no tokens, which spell it, and shows its messages instead.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.reports.export import write_lines
from agentrl_cli.rollout.flags import find_flags
from agentrl_cli.store import EpisodeRow, Store
from agentrl_cli.store.display import short_runs
from agentrl_cli.store.rows import part_note
from agentrl_cli.types import Episode, TrainSignals
from agentrl_cli.types.content import content_text, data_uri
from agentrl_cli.types.masking import mask, mask_text

Texts = Callable[["Store", "EpisodeRow", list[int]], list[str]]
"""Decodes ids one by one with the tokenizer of an episode."""

PUSH_STEPS = 7
"""Steps of the push in each direction, each twice the one below; the last holds pushes of the run's scale and more."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
PAGE = Path(__file__).with_name("page.html")
_SIGNALS = (
    "advantage",
    "push",
    "weight",
    "ratio",
    "logp_train",
    "logp_ref",
    "logp_teacher",
    "reward_advantage",
)


def export_html(
    store: Store,
    episode_ids: Iterable[str],
    path: Path,
    texts: Texts,
    *,
    title: str = "",
    masked: bool = True,
) -> int:
    """Write episodes to a page, which appears only when it is complete. Returns how many. Raises StoreError."""
    rows = [page_object(store, episode_id, texts, masked=masked) for episode_id in episode_ids]
    write_lines([page(rows, title or "agentrl episodes")], path)
    return len(rows)


def page(rows: list[dict[str, Any]], title: str) -> str:
    """Return the page around the data; `<` is escaped, so no text of an episode can end the script."""
    data = json.dumps(rows, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    head, script, tail = _SCRIPT.split(PAGE.read_text("utf-8"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'"  # no script but this page's own, whatever an episode holds
    text = head.replace("@TITLE@", html.escape(title)).replace("@POLICY@", policy)
    return f"{text.replace('@DATA@', data)}<script>{script}</script>{tail}"


_SCRIPT = re.compile(r"<script>(.*)</script>", re.DOTALL)


def push_step(push: float) -> int:
    """Return −7 to 7 for a push as a share of the run's scale; 0 if it is too small to matter or NaN."""
    if not math.isfinite(push) or not push:
        return 0
    size = max(0, min(PUSH_STEPS, math.floor(math.log2(abs(push)) + 1e-6) + PUSH_STEPS))
    return size if push > 0 else -size


def page_object(
    store: Store, episode_id: str, texts: Texts, *, masked: bool = True
) -> dict[str, Any]:
    """Return one episode as the page's script reads it."""
    row = store.episodes.row(episode_id)
    episode, signals = store.episodes.get(row.id), store.signals.get(row.id)
    run = store.runs.get(row.run_id).name if row.run_id else ""
    facts: dict[str, Any] = {
        "id": row.id,
        "run": run,
        "task": row.task_id,
        "step": row.step,
        "sample": row.sample,
        "kind": row.kind,
        "outcome": str(row.outcome or "running"),
        "reward": row.reward,
        "advantage": row.advantage,
        "fact": row.fact,
        "weights": row.weights_version,
        "tags": list(row.tags),
        "note": row.note,
        "flags": [f"{flag.name} {flag.evidence}".strip() for flag in find_flags(episode)],
        "parts": [
            [p.name, p.value, p.weight, p.primary, part_note(p)] for p in episode.reward_parts
        ],
        "turns": _turns(episode),
    }
    clean: dict[str, Any] = mask(facts) if masked else facts
    tokens = _tokens(store, row, episode, signals, texts)
    spelled = "".join(tokens["texts"])  # what a model thought is in no message here
    hidden = masked and mask_text(spelled) != spelled
    hidden |= json.dumps(clean, default=str) != json.dumps(facts, default=str)
    clean |= {"masked": hidden, "tokens": None if hidden else tokens}
    if not hidden:  # the tokens hold the same text
        for turn in clean["turns"]:
            turn["messages"] = []
    return clean


def _turns(episode: Episode) -> list[dict[str, Any]]:
    return [
        {
            "role": turn.role,
            "parent": parent,
            "start": turn.start,
            "end": turn.end,
            "stop": str(turn.stop_reason or ""),
            "seconds": round(turn.seconds, 3),
            "messages": [content_text(message.get("content")) for message in turn.messages],
            "images": [data_uri(image) for image in turn.shown],
            "calls": [[call.name, call.raw if call.arguments is None else call.arguments, call.error or ""]
                      for call in turn.calls],
            "results": [[result.error or "", round(result.seconds * 1000), result.level] for result in turn.results],
        }
        for turn, parent in zip(episode.turns, episode.parents, strict=True)
    ]  # fmt: skip


def _tokens(
    store: Store, row: EpisodeRow, episode: Episode, signals: TrainSignals | None, texts: Texts
) -> dict[str, Any]:
    tokens = episode.tokens
    tops = [[] if ids[0] < 0 else ids for ids in tokens.top_ids.tolist()]
    known = sorted({i for ids in tops for i in ids if i >= 0})
    names = dict(zip(known, texts(store, row, known), strict=True)) if known else {}
    out: dict[str, Any] = {
        "ids": tokens.ids.tolist(),
        "texts": short_runs(texts(store, row, tokens.ids.tolist()), tokens.ids.tolist()),
        "origin": tokens.origin.tolist(),
        "logp": _numbers(tokens.logp_policy),
        "entropy": _numbers(tokens.entropy),
        "top": [
            [
                [names[i], _number(p)]
                for i, p in zip(ids, np.exp(row_).tolist(), strict=False)
                if i >= 0
            ]
            for ids, row_ in zip(tops, tokens.top_logps, strict=True)
        ],
    }
    if signals is not None:
        for name in _SIGNALS:
            array = getattr(signals, name)
            if array is not None and len(array) == len(tokens):
                out[name] = _numbers(array)
        out["clipped"] = signals.clipped.tolist()
        out["push_scale"] = store.signals.push_scale(row.run_id)
    return out


def _numbers(array: Any) -> list[float | None]:
    return [_number(value) for value in array.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
