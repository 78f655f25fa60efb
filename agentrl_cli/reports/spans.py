"""Where the time goes: an episode and a step as spans of sampling, tools, grading and waiting, and a setting for it.

The store holds when a turn began and how long it was sampled, how long each call took, and when the episode ended; the
spans between these are the user, an agent's own program, grading, or waiting.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.cells import cell_len, set_cell_size

from agentrl_cli.errors import NotFound
from agentrl_cli.registry.plugins import spread_settings
from agentrl_cli.reports.advice import keep_settings
from agentrl_cli.reports.evidence import NO_RUN
from agentrl_cli.reports.reference import get_setting
from agentrl_cli.store import EpisodeRow, RunRow, Store
from agentrl_cli.types import Episode, Turn

GLYPHS = {"sampling": "█", "tool": "▓", "user": "▒", "agent": "▒", "grading": "░", "waiting": "·", "update": "▚",
          "rest": " ", "between messages": "╌"}  # fmt: skip
"""Kind of a span to its glyph; the rest of a step is evaluation and saving."""
SHOWN = 8
"""Episodes of a step that are drawn, those that end last."""
ONE_CORE = 1.4
"""CPU seconds a second below which a step leaves a second core idle."""
IMPORTED = "import"
"""Kind of episodes that another program made: no setting here shortens them."""
UNKNOWN = "The file says when each message was there, and not how long anything took."
AHEAD = "agentrl train --set rollout.async_staleness=1"
SMALL = 0.02
"""Share of the whole below which waiting has no line of its own."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an episode or a step, in seconds from its begin."""

    kind: str
    start: float
    seconds: float
    label: str
    branch: int = 0
    """The branch of the episode, from 0."""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Spans over `seconds`, the seconds of each kind, and what would shorten it."""

    title: str
    seconds: float
    spans: Sequence[Span]
    totals: Mapping[str, float]
    rows: Sequence[tuple[str, Sequence[Span]]]
    """Label and spans of each line that is drawn."""
    advice: str = ""
    command: str = ""

    def report(self) -> dict[str, Any]:
        """Return it for --json."""
        spans = [asdict(span) for span in self.spans]
        rest = {"totals": dict(self.totals), "advice": self.advice, "command": self.command}
        return {"title": self.title, "seconds": self.seconds, "spans": spans, **rest}


def episode_spans(episode: Episode) -> list[Span]:
    """Return the spans of an episode in the order of its turns; empty if it stores no times."""
    found, ends = list[Span](), dict[int, float]()
    timed = any(result.seconds for turn in episode.turns for result in turn.results)
    known = timed or episode.kind != IMPORTED or any(turn.seconds for turn in episode.turns)
    for turn, parent in zip(episode.turns, episode.parents, strict=True):
        if not turn.started:
            continue
        branch = next((n for n, one in enumerate(episode.branches) if turn.index in one), 0)
        at, word = ends.get(parent, episode.started), f"{turn.index} {turn.role}"
        if not known:
            pieces = [("between messages", word, max(turn.started, at))]
        elif turn.role == "assistant":
            word += f" {turn.end - turn.start} tok"
            begin = max(turn.started, at)
            pieces = [("waiting", word, begin), ("sampling", word, begin + turn.seconds)]
        else:
            pieces = _between(episode, turn, parent, at, timed=timed)
        for kind, label, end in pieces:
            if end - at > 1e-6:
                found.append(Span(kind, at - episode.started, end - at, label, branch))
            at = max(at, end)
        ends[turn.index] = at
    last = max(ends.values(), default=episode.ended)
    if episode.ended > last:
        kind = "grading" if episode.reward_parts else "waiting"
        found.append(Span(kind, last - episode.started, episode.ended - last, "grading"))
    return found


def _between(
    episode: Episode, turn: Turn, parent: int, at: float, *, timed: bool
) -> list[tuple[str, str, float]]:
    """Return (kind, label, end) of the time before a turn that the model did not sample; `timed`: calls have times."""
    # an agent's turns are recorded with the request that brings them
    both = zip(episode.turns, episode.parents, strict=True)
    later = [one.started for one, before in both if before == turn.index and one.started]
    end = max(min([turn.started, *later]), at)
    took = sum(result.seconds for result in turn.results)
    if took and episode.kind == IMPORTED:  # spans of others say when a tool began
        end = max(end, min([turn.started + took, *later]))
    calls = Counter(call.name for call in episode.turns[parent].calls) if parent >= 0 else {}
    names = ", ".join(f"{n}×{name}" if n > 1 else name for name, n in calls.items())
    word = f"{turn.index} {names or turn.role}"
    if took:
        return [
            ("waiting", f"{turn.index} {turn.role}", end - min(took, end - at)),
            ("tool", word, end),
        ]
    if parent < 0 or episode.turns[parent].role == "system":
        return [("waiting", "begin", end)]
    if turn.role == "user" and not calls:
        return [("user", word, end)]
    # a call that was not run, or an agent's own program between its requests
    return [("waiting" if timed else "agent", word, end)]


def totals_of(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each kind, the longest first."""
    sums = {
        k: sum(s.seconds for s in spans if s.kind == k)
        for k in dict.fromkeys(s.kind for s in spans)
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def of_episode(store: Store, episode: Episode) -> Waterfall:
    """Return the waterfall of an episode. Raises NotFound if it stores no times."""
    spans = episode_spans(episode)
    if not spans:
        raise NotFound(f"{episode.id} stores no times: it did not begin, or was imported.")
    seconds, totals = max(span.start + span.seconds for span in spans), totals_of(spans)
    many = len({span.branch for span in spans}) > 1
    rows = [(f"{f'b{s.branch} ' * many}{s.label}", (s,)) for s in spans
            if s.kind != "waiting" or s.seconds >= SMALL * seconds]  # fmt: skip
    run = store.runs.get(episode.run_id) if episode.run_id else NO_RUN
    text, command = _shorten(totals, spans, run.config)
    if episode.kind == IMPORTED:
        text, command = UNKNOWN * ("between messages" in totals), ""
    command = keep_settings(command, run)
    return Waterfall(f"episode {episode.id}", seconds, spans, totals, rows, text, command)


def of_step(store: Store, run: RunRow, step: int | None = None) -> Waterfall:
    """Return the waterfall of a step of a training, by default of its last. Raises NotFound."""
    number = run.step if step is None else step
    rows = (row for row in store.runs.steps(run.id, number) if row["step"] == number)
    row = next((row for row in rows if "time/step" in row), None)
    if row is None:
        raise NotFound(
            f"{run.name} has no finished step {number or 1}.",
            hint=f"Its last is {run.step}." if run.step else "It has none yet.",
        )
    began, end = float(row["at"]) - row["time/step"], float(row["time/step"])
    sampled = float(row.get("time/rollout", end))
    parts = [
        Span("sampling", 0.0, sampled, "all episodes"),
        Span("update", sampled, end - sampled, "update"),
    ]
    following = _episodes(store, run, number + 1)[:1]
    if following and (idle := following[0].started - began - end) > 0:
        parts.append(Span("rest", end, idle, "evaluation, saving"))
    drawn = list[tuple[float, str, list[Span]]]()
    for one in _episodes(store, run, number):
        spans = episode_spans(store.episodes.get(one.id))
        # prefetched ones, and those before a resume, began before the step
        moved = [replace(s, start=max(s.start + one.started - began, 0.0), branch=0) for s in spans]
        if moved:
            label = f"{one.task_id.rpartition('/')[2]} #{one.sample}"
            drawn.append((moved[-1].start + moved[-1].seconds, label, moved))
    drawn.sort(key=lambda item: -item[0])
    every = [span for _, _, spans in drawn for span in spans]
    totals, seconds, ends = (
        totals_of(every),
        sum(part.seconds for part in parts),
        [end for end, _, _ in drawn],
    )
    text, command = _shorten_step(parts, ends, seconds, run.config, row) or _shorten(
        totals, every, run.config
    )
    shown = [
        *((part.label, (part,)) for part in parts),
        *((label, spans) for _, label, spans in drawn[:SHOWN]),
    ]
    title = f"{run.name} step {number}, {len(drawn)} episodes"
    spans, command = [*parts, *every], keep_settings(command, run)
    return Waterfall(title, seconds, spans, totals, shown, text, command)


def _episodes(store: Store, run: RunRow, step: int) -> list[EpisodeRow]:
    return store.episodes.used(f"step:{step} kind:train", "time", run.id)


def _shorten_step(
    parts: Sequence[Span],
    ends: Sequence[float],
    seconds: float,
    config: Mapping[str, Any],
    row: Mapping[str, float],
) -> tuple[str, str] | None:
    """Return (text, command) if the time of a step lies outside of its episodes; None if it lies in them."""
    share = {part.kind: part.seconds / (seconds or 1.0) for part in parts}
    if share.get("rest", 0.0) > 0.4:
        every = int(get_setting(config, "train.eval.every") or 20)
        return (f"Evaluating and saving take {share['rest']:.0%}: evaluate less often.",
                f"agentrl train --set train.eval.every={2 * every}")  # fmt: skip
    if share.get("update", 0.0) > 0.5:
        both = (get_setting(config, key) or 1 for key in ("algo.epochs", "algo.minibatches"))
        passes = math.prod(both)
        text = f"The update takes {share['update']:.0%}"
        if passes > 1:
            return (
                f"{text}, in {passes} passes over the episodes: take one.",
                "agentrl train --set algo.epochs=1 --set algo.minibatches=1",
            )
        budget = int(get_setting(config, "train.token_budget") or 4096)
        return (
            f"{text}: larger micro-batches, as far as memory goes.",
            f"agentrl train --set train.token_budget={2 * budget}",
        )
    busy = row.get("time/cpu", math.inf) / (seconds or 1.0)
    on_gpu = any(name.startswith("gpu/") for name in row)
    spread = {} if on_gpu or busy > ONE_CORE else spread_settings(config)
    if spread:
        return (
            f"Sampling takes {share['sampling']:.0%}, with {busy:.1f} cores busy: sample in two processes.",
            " ".join(["agentrl train", *(f"--set {key}={value}" for key, value in spread.items())]),
        )
    if get_setting(config, "rollout.async_staleness"):
        return None
    whole = parts[0].seconds
    most = sorted(ends)[len(ends) * 3 // 4] if ends else whole
    if most < 0.5 * whole:
        late = sum(end > most for end in ends)
        text = f"The last {late} of {len(ends)} episodes take {whole - most:.1f} s more than the others"
        return f"{text}: let the next step's begin meanwhile.", AHEAD
    if share.get("update", 0.0) > 0.2:
        text = f"The update takes {share['update']:.0%}, and nothing is sampled meanwhile"
        return f"{text}: sample the next step during it.", AHEAD
    return None


def _shorten(
    totals: Mapping[str, float], spans: Sequence[Span], config: Mapping[str, Any]
) -> tuple[str, str]:
    """Return (text, command): the setting that shortens the largest part of an episode's time."""
    kind, whole = next(iter(totals), "sampling"), sum(totals.values()) or 1.0
    text = f"{kind.capitalize()} takes {totals.get(kind, 0.0) / whole:.0%}"
    longest = max((s for s in spans if s.kind == kind), key=lambda s: s.seconds, default=None)
    if longest is not None and kind != "waiting":
        text += f", at most {longest.seconds:.2f} s at once ({longest.label})"
    count = int(get_setting(config, "rollout.concurrency") or 64)
    limit = float(get_setting(config, "rollout.timeout.tool") or 10.0)
    most = int(get_setting(config, "rollout.max_new_tokens") or 256)
    fewer, more = max(count // 2, 1), 2 * count
    outside = (
        "outside of the model; more episodes at once fill it",
        f"agentrl train --set rollout.concurrency={more}",
    )
    said = {
        "sampling": (
            "the model computes then: shorter turns, or a GPU",
            f"agentrl train --set rollout.max_new_tokens={max(most // 2, 16)}",
        ),
        "tool": (
            "a lower limit ends slow calls",
            f"agentrl train --set rollout.timeout.tool={limit / 2:g}",
        ),
        "waiting": (
            "for the sampler, the sandbox or a tool: let fewer run at once",
            f"agentrl train --set rollout.concurrency={fewer}",
        ),
        "user": outside,
        "agent": outside,
    }
    if kind not in said:
        return f"{text}: the reward functions run then.", "agentrl check"
    return f"{text}, {said[kind][0]}.", said[kind][1]


def waterfall_lines(one: Waterfall, width: int) -> list[str]:
    """Return a waterfall as text: a head with the shares, a line for each row, what would shorten it."""
    whole = sum(one.totals.values()) or 1.0
    shares = "  ".join(
        f"{GLYPHS[kind]} {kind} {part / whole:.0%}" for kind, part in one.totals.items()
    )
    name = min(max((cell_len(label) for label, _ in one.rows), default=5), 22)
    room = max(width - name - 14, 10)
    lines = [f"TIME {one.title}: {one.seconds:.2f} s", f" {shares}"]
    for label, spans in one.rows:
        cells = [" "] * room
        for span in spans:
            first = min(int(span.start / one.seconds * room), room - 1)
            for at in range(
                first,
                min(max(int((span.start + span.seconds) / one.seconds * room), first + 1), room),
            ):
                cells[at] = GLYPHS[span.kind] if span.kind != "rest" else "-"
        took = sum(span.seconds for span in spans)
        lines.append(f" {set_cell_size(label, name)} │{''.join(cells)}│ {took:7.2f} s")
    return [*lines, *(f" {text}" for text in (one.advice, one.command) if text)]
