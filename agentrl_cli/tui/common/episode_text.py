"""An episode or a run as plain text: turns, calls, results, rewards, flags with their evidence. Imports no textual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from agentrl_cli.errors import pluralise
from agentrl_cli.rollout.flags import find_flags
from agentrl_cli.store import EpisodeRow, RunRow, Store
from agentrl_cli.store.display import image_line
from agentrl_cli.store.queries import message_texts
from agentrl_cli.store.rows import episode_state, part_note
from agentrl_cli.tui.common.plain_text import align_rows, cell, local_time
from agentrl_cli.tui.common.reader import decoder_of
from agentrl_cli.tui.common.token_text import TokenTexts, visible
from agentrl_cli.tui.common.tree import continues, spans
from agentrl_cli.types import Episode, Origin, TrainSignals, Turn
from agentrl_cli.types.content import content_text


def episode_lines(
    store: Store, episode_id: str, *, tokens: bool = False, turn: int | None = None
) -> Iterator[str]:
    """Yield an episode, or one turn of it; `tokens`: every token with its numbers in place of the messages."""
    row, episode = store.episodes.row(episode_id), store.episodes.get(episode_id)
    signals = store.signals.get(episode_id) if tokens else None
    run = next((item for item in store.runs.all() if item.id == row.run_id), None)
    texts = decoder_of(store, row.tokenizer) if tokens else None
    if turn is None:
        yield from _head(store, row, run, episode)
    for item in episode.turns:
        if turn in (None, item.index):
            yield from _turn(item, episode, signals, texts)
    if turn is None:
        yield from _tail(store, row, run, episode)


def _head(store: Store, row: EpisodeRow, run: RunRow | None, episode: Episode) -> Iterator[str]:
    step = f"step {row.step}" if row.step is not None else ""
    where = [f"run {run.name}" if run else "", step, f"sample {row.sample}"]
    yield f"episode {row.id}   {row.task_id}   {'   '.join(filter(None, where))}   {row.kind}"
    took = f"   {row.seconds:.1f} s" if row.seconds is not None else ""
    yield (
        f"{episode_state(row, run)}   reward {cell(row.reward)}   advantage {cell(row.advantage)}"
        f"   {row.fact or 'not trained'}   {pluralise(row.n_turns, 'turn')}   {row.n_tokens} tokens"
        f" ({row.n_model_tokens} sampled)   {pluralise(row.n_calls, 'call')} ({row.n_tool_errors} failed){took}"
    )
    facts = {
        "started": local_time(row.started),
        "weights": row.weights_version,
        "sandbox": row.level,
        "error": row.error,
        "tags": " ".join(row.tags),
        "note": row.note,
        "parent": row.parent_id,
        "branches": "" if episode.linear else ", ".join(map(spans, episode.branches)),
        "task": store.episodes.group_reason(row.group_id, row.run_id),
    }
    yield "   ".join(f"{name} {value}" for name, value in facts.items() if value)


def _turn(
    turn: Turn, episode: Episode, signals: TrainSignals | None, texts: TokenTexts | None
) -> Iterator[str]:
    yield ""
    span = episode.tokens.slice(turn.start, turn.end)
    link = continues(episode, turn.index)
    facts = [
        *filter(None, [turn.player, link]),
        pluralise(len(span), "token"),
        f"{int(span.trained_mask.sum())} sampled" if span.trained_mask.any() else "not trained",
    ]
    facts += [str(turn.stop_reason)] if turn.stop_reason else []
    facts += [f"{turn.seconds:.2f} s"] if turn.seconds else []
    yield f"── turn {turn.index} {turn.role} ── {'   '.join(facts)}"
    yield from _messages(turn) if texts is None else _tokens(turn, episode, signals, texts)


def _messages(turn: Turn) -> Iterator[str]:
    for message in turn.messages:
        role = message.get("role", turn.role)
        if role != turn.role:
            yield f"[{role}]"
        plain = {**message, "tool_calls": None}
        for text in message_texts(plain):
            yield from text.splitlines()
    yield from (f"  ▣ {image_line(image)}" for image in turn.images)
    for call in turn.calls:
        given = (
            call.raw
            if call.arguments is None
            else ", ".join(f"{k}={v!r}" for k, v in call.arguments.items())
        )
        yield f"→ {call.name or 'call'}({given})" + (
            f"   MALFORMED: {call.error}" if call.error else ""
        )
    for result in turn.results:
        state = f"ERROR {result.error}" if result.error else "ok"
        marks = "".join(
            [", cut" if result.truncated else "", ", ends the episode" if result.done else ""]
        )
        yield f"← {state} ({result.seconds * 1000:.0f} ms{', ' + result.isolation if result.level else ''}{marks})"
        shown = " ".join(content_text(message.get("content")) for message in turn.messages)
        yield from (f"  ▣ {image_line(image)}" for image in result.images)
        if result.text not in shown:
            yield from (f"  {line}" for line in result.text.splitlines())


def _tokens(
    turn: Turn, episode: Episode, signals: TrainSignals | None, texts: TokenTexts
) -> Iterator[str]:
    tokens = episode.tokens
    names = ["at", "id", "origin", "logp", "entropy", "ratio", "clip", "adv", "weight", "text"]
    rows: list[list[Any]] = []
    pieces = texts.texts(tokens.ids)
    for at in range(turn.start, turn.end):
        trained: list[Any] = [None] * 4
        if signals is not None:
            ratio, advantage, weight = (
                _number(column[at]) for column in (signals.ratio, signals.advantage, signals.weight)
            )
            clipped = None if ratio is None else bool(signals.clipped[at])
            trained = [ratio, clipped, advantage, weight]
        numbers = [_number(tokens.logp_policy[at]), _number(tokens.entropy[at]), *trained]
        head = [at, int(tokens.ids[at]), Origin(int(tokens.origin[at])).name.lower()]
        rows.append([*head, *numbers, f"|{visible(pieces[at])}|"])
    yield from align_rows(names, rows)


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _tail(store: Store, row: EpisodeRow, run: RunRow | None, episode: Episode) -> Iterator[str]:
    if episode.reward_parts:
        yield ""
        parts = [
            [p.name + "*" * p.primary, p.value, p.weight, p.value * p.weight, part_note(p)]
            for p in episode.reward_parts
        ]
        total = ["total", None, None, row.reward, ""]
        yield from align_rows(["reward", "value", "weight", "sum", "detail"], [*parts, total])
    scores = store.scores.get(row.id)
    if scores:
        yield ""
        rescored = [
            [s.name, s.reward, s.delta, s.advantage, s.fact, [f"{t:+.2f}" for t in s.turns]]
            for s in scores
        ]
        yield from align_rows(
            ["rescored", "reward", "delta", "advantage", "fact", "advantage by turn"], rescored
        )
    flags = find_flags(episode)
    drift = store.marks.drift(row.id)
    if flags or drift:
        yield ""
    for flag in flags:
        where = f" (turn {flag.turn})" if flag.turn is not None else ""
        yield f"! {flag.name}{where}: {flag.evidence}"
    for item in drift:
        yield f"! DRIFT {item.kind} at token {item.position}: expected {item.expected!r}, got {item.got!r}"
    if stderr := store.journal.agent_stderr(row.run_id, row.id):
        yield ""
        yield "stderr of the agent:"
        yield from stderr.splitlines()
    siblings = store.episodes.siblings(row.id)
    if len(siblings) > 1:
        yield ""
        yield f"group {row.group_id}:"
        rows = [
            [">" * (r.id == row.id), r.sample, r.id, episode_state(r, run), r.reward, r.advantage]
            for r in siblings
        ]
        yield from align_rows(["", "#", "id", "outcome", "reward", "adv"], rows)


def run_lines(store: Store, run: RunRow) -> Iterator[str]:
    """Yield a run: its state, alerts, the metrics of its last step, its evaluations."""
    steps, alerts = store.runs.steps(run.id), store.journal.folded_alerts(run.id)
    of = f" of {run.total_steps}" if run.total_steps else ""
    yield f"run {run.name}   {run.kind}   {run.state}   step {run.step}{of}   id {run.id}"
    when = f"started {local_time(run.started)}"
    when += f"   ended {local_time(run.ended)}" if run.ended else ""
    yield f"model {run.model or '-'}   pack {run.pack or '-'}   seed {run.seed}   {when}"
    if run.error:
        yield f"error {run.error}"
    keys = ("name", "level", "count", "first_step", "last_step", "value", "threshold", "text")
    heads = ["alert", "level", "count", "first", "last", "value", "threshold", "what to try"]
    last = steps[-1] if steps else {}
    for names, rows in (
        (heads, [[alert[key] for key in keys] for alert in alerts]),
        (["metric", "value"], [[name, last[name]] for name in sorted(last) if name != "at"]),
        (
            ["step", "eval", "split", "pass@1", "low", "high"],
            [
                [item.step, item.name, item.split, item.pass_rate, item.low, item.high]
                for item in store.runs.evals(run.id)
            ],
        ),
    ):
        if rows:
            yield ""
            yield from align_rows(names, rows)
