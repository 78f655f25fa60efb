"""`agentrl show`: one episode, or one run, as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    DbOption,
    JsonOption,
    ProjectOption,
    RunOption,
    echo,
    echo_json,
)
from agentrl_cli.commands.place import find_db
from agentrl_cli.commands.tables import aligned, cell, clock
from agentrl_cli.errors import NotFound
from agentrl_cli.store.images import image_line
from agentrl_cli.types.content import content_text

if TYPE_CHECKING:
    from agentrl_cli.store import EpisodeRow, RunRow, Store
    from agentrl_cli.tui.common.token_text import TokenTexts
    from agentrl_cli.types import Episode, TrainSignals, Turn

ORIGINS = ("template", "system", "user", "tool", "model", "forced")


def command(
    name: Annotated[
        str,
        typer.Argument(
            help="An episode (id, unique prefix, last, best, worst), or a run.",
            autocompletion=completion.episodes_and_runs,
        ),
    ] = "last",
    run: RunOption = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", "-t", help="Every token with its numbers.")
    ] = False,
    turn: Annotated[int | None, typer.Option("--turn", help="Only this turn.")] = None,
    json: JsonOption = False,
    project: ProjectOption = None,
    db: DbOption = None,
) -> None:
    """Print an episode: turns, calls, results, rewards, flags with their evidence; with --tokens every token.

    --json prints {"id", "task_id", "reward_parts", "turns", …} as `agentrl export` does, tokens included with --tokens.
    """
    from agentrl_cli.reports.export import episode_object
    from agentrl_cli.store import Store

    with Store.open(find_db(project, db), readonly=True) as store:
        found = _find(store, name, run)
        if not isinstance(found, str):
            _show_run(store, found, json)
            return
        episode, signals = store.episodes.get(found), store.signals.get(found)
        if turn is not None and turn not in [item.index for item in episode.turns]:
            raise NotFound(
                f"Episode {found} has no turn {turn}.",
                hint=f"It has {len(episode.turns)}, counted from 0.",
            )
        if json:
            echo_json(episode_object(episode, signals, tokens=tokens))
            return
        row = store.episodes.row(found)
        if turn is None:
            for line in _head(store, row, episode):
                echo(line)
        texts = _decoder(store, row) if tokens else None
        for item in episode.turns:
            if turn in (None, item.index):
                for line in _turn(item, episode, signals, texts):
                    echo(line)
        if turn is None:
            for line in _tail(store, row, episode):
                echo(line)


def _find(store: Store, name: str, run: str | None) -> str | RunRow:
    """Return an episode's id, or a run if the name matches no episode."""
    run_id = store.runs.get(run).id if run else None
    try:
        return store.episodes.resolve(name, run_id)
    except NotFound as nothing:
        try:
            return store.runs.get(name)
        except NotFound:
            raise nothing from None


def _head(store: Store, row: EpisodeRow, episode: Episode) -> Iterator[str]:
    from agentrl_cli.store.rows import episode_state
    from agentrl_cli.tui.common.tree import spans

    run = next((item for item in store.runs.all() if item.id == row.run_id), None)
    step = f"step {row.step}" if row.step is not None else ""
    where = [f"run {run.name}" if run else "", step, f"sample {row.sample}"]
    yield f"episode {row.id}   {row.task_id}   {'   '.join(filter(None, where))}   {row.kind}"
    took = f"   {row.seconds:.1f} s" if row.seconds is not None else ""
    yield (
        f"{episode_state(row, run)}   reward {cell(row.reward)}   advantage {cell(row.advantage)}"
        f"   {row.fact or 'not trained'}   {row.n_turns} turns   {row.n_tokens} tokens ({row.n_model_tokens} sampled)"
        f"   {row.n_calls} calls ({row.n_tool_errors} failed){took}"
    )
    facts = {
        "started": clock(row.started),
        "weights": row.weights_version,
        "sandbox": row.level,
        "error": row.error,
    }
    facts |= {"tags": " ".join(row.tags), "note": row.note, "parent": row.parent_id or ""}
    facts |= {"branches": "" if episode.linear else ", ".join(map(spans, episode.branches))}
    facts |= {"task": store.episodes.group_reason(row.group_id, row.run_id)}
    yield "   ".join(f"{name} {value}" for name, value in facts.items() if value)


def _turn(
    turn: Turn, episode: Episode, signals: TrainSignals | None, texts: TokenTexts | None
) -> Iterator[str]:
    from agentrl_cli.tui.common.tree import continues

    yield ""
    span = episode.tokens.slice(turn.start, turn.end)
    link = continues(episode, turn.index)
    facts = [
        *([link] if link else []),
        f"{len(span)} tokens",
        f"{int(span.trained_mask.sum())} sampled" if span.trained_mask.any() else "not trained",
    ]
    facts += [str(turn.stop_reason)] if turn.stop_reason else []
    facts += [f"{turn.seconds:.2f} s"] if turn.seconds else []
    yield f"── turn {turn.index} {turn.role} ── {'   '.join(facts)}"
    if texts is not None:
        yield from _tokens(turn, episode, signals, texts)
        return
    yield from _messages(turn)


def _messages(turn: Turn) -> Iterator[str]:
    from agentrl_cli.store.queries import message_texts

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
    from agentrl_cli.tui.common.token_text import visible

    tokens = episode.tokens
    names = ["at", "id", "origin", "logp", "entropy", "ratio", "clip", "adv", "weight", "text"]
    rows: list[list[Any]] = []
    pieces = texts.texts(tokens.ids)
    for at in range(turn.start, turn.end):
        trained: list[Any] = [None] * 4
        if signals is not None:
            clipped = bool(signals.clipped[at]) if not np.isnan(signals.ratio[at]) else None
            trained = [
                _number(signals.ratio[at]),
                clipped,
                _number(signals.advantage[at]),
                _number(signals.weight[at]),
            ]
        numbers = [_number(tokens.logp_policy[at]), _number(tokens.entropy[at]), *trained]
        rows.append(
            [
                at,
                int(tokens.ids[at]),
                ORIGINS[tokens.origin[at]],
                *numbers,
                f"|{visible(pieces[at])}|",
            ]
        )
    yield from aligned(names, rows)


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _decoder(store: Store, row: EpisodeRow) -> TokenTexts:
    from agentrl_cli.tui.common.token_text import TokenTexts

    stored = store.tokenizers.get(row.tokenizer) if row.tokenizer else None
    return TokenTexts(stored.tokenizer_json if stored else None)


def _tail(store: Store, row: EpisodeRow, episode: Episode) -> Iterator[str]:
    from agentrl_cli.rollout.flags import find_flags
    from agentrl_cli.store.rows import episode_state, part_note

    if episode.reward_parts:
        yield ""
        parts = [
            [
                *(
                    part.name + ("*" if part.primary else ""),
                    part.value,
                    part.weight,
                    part.value * part.weight,
                ),
                part_note(part),
            ]
            for part in episode.reward_parts
        ]
        yield from aligned(
            ["reward", "value", "weight", "sum", "detail"],
            [*parts, ["total", None, None, row.reward, ""]],
        )
    scores = store.scores.get(row.id)
    if scores:
        yield ""
        rescored = [
            [s.name, s.reward, s.delta, s.advantage, s.fact, [f"{t:+.2f}" for t in s.turns]]
            for s in scores
        ]
        yield from aligned(
            ["rescored", "reward", "delta", "advantage", "fact", "advantage by turn"], rescored
        )
    flags = find_flags(episode)
    drift = store.marks.drift(row.id)
    if flags or drift:
        yield ""
    for flag in flags:
        yield (
            f"! {flag.name}"
            + (f" (turn {flag.turn})" if flag.turn is not None else "")
            + f": {flag.evidence}"
        )
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
        run = next((item for item in store.runs.all() if item.id == row.run_id), None)
        rows = [
            [
                ">" if item.id == row.id else "",
                item.sample,
                item.id,
                episode_state(item, run),
                item.reward,
                item.advantage,
            ]
            for item in siblings
        ]
        yield from aligned(["", "#", "id", "outcome", "reward", "adv"], rows)


def _show_run(store: Store, run: RunRow, json: bool) -> None:
    steps, evals, alerts = (
        store.runs.steps(run.id),
        store.runs.evals(run.id),
        store.journal.folded_alerts(run.id),
    )
    if json:
        echo_json({"run": run, "state": run.state, "last_step": steps[-1] if steps else None, "evals": evals,
                   "alerts": alerts})  # fmt: skip
        return
    of = f" of {run.total_steps}" if run.total_steps else ""
    echo(f"run {run.name}   {run.kind}   {run.state}   step {run.step}{of}   id {run.id}")
    ended = f"   ended {clock(run.ended)}" if run.ended else ""
    echo(
        f"model {run.model or '-'}   pack {run.pack or '-'}   seed {run.seed}   started {clock(run.started)}{ended}"
    )
    if run.error:
        echo(f"error {run.error}")
    if alerts:
        echo("")
        lines = [
            [
                a["name"],
                a["level"],
                a["count"],
                a["first_step"],
                a["last_step"],
                a["value"],
                a["threshold"],
                a["text"],
            ]
            for a in alerts
        ]
        for line in aligned(
            ["alert", "level", "count", "first", "last", "value", "threshold", "what to try"], lines
        ):
            echo(line, painted=True)
    if steps:
        echo("")
        for line in aligned(
            ["metric", "value"],
            [[name, steps[-1][name]] for name in sorted(steps[-1]) if name != "at"],
        ):
            echo(line, painted=True)
    if evals:
        echo("")
        rows = [
            [item.step, item.name, item.split, item.pass_rate, item.low, item.high]
            for item in evals
        ]
        for line in aligned(["step", "eval", "split", "pass@1", "low", "high"], rows):
            echo(line, painted=True)
