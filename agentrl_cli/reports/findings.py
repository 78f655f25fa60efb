"""The rules about the set-up: functions from evidence to a number, the words of a text, and an episode."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, takewhile
from typing import Any

import numpy as np

from agentrl_cli.reports.evidence import Evidence, answer_in, answer_of, plain
from agentrl_cli.rollout.flags import CALLED_WRONGLY, TOOL_FAULTS, find_flags, short
from agentrl_cli.store.queries import message_lines
from agentrl_cli.types import (
    FAULTS,
    Episode,
    Outcome,
    StopReason,
    ToolCall,
    ToolResult,
    group_pairs,
)

LIMITS = {
    Outcome.TIMEOUT: "rollout.timeout.episode",
    Outcome.AGENT_TIMEOUT: "the agent's timeout (task.yaml; else rollout.timeout.episode)",
}
"""Outcomes of episodes that a limit on time ended, and the setting that has it."""
ENOUGH, HALF, NEARLY = 8, 0.5, 0.8
"""Episodes or calls below which a share says nothing; shares from which most, and nearly all, are at fault."""
HARDLY, FEW_ERRORS = 0.05, 0.05
"""Share solved below which nothing can be reinforced; share of errors that a whole training survives."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A number over its threshold, the words of the text, and the episode that proves it."""

    value: float
    threshold: float | None = None
    episode: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)


Find = Callable[[Evidence], Hit | None]


def count(key: str, flag: str = "") -> Find:
    """Return a rule for a count of episodes that should be zero."""

    def find(e: Evidence) -> Hit | None:
        proof = next((one.id for one in e.episodes if flag in one.flags), "") if flag else ""
        return Hit(value, 0.0, proof) if (value := e.count(key)) else None

    return find


def over(key: str, limit: float, flag: str = "") -> Find:
    """Return a rule for a number that should stay below a limit; `flag`: of the episodes that prove it."""

    def find(e: Evidence) -> Hit | None:
        value = e.mean(key)
        proof = next((one.id for one in e.graded if flag in one.flags), "") if flag else ""
        return Hit(value, limit, proof) if value is not None and value >= limit else None

    return find


def too_long(e: Evidence) -> Hit | None:
    share = e.count("outcomes/too_long") / max(1.0, outcomes(e))
    return Hit(share, HALF) if share >= HALF else None


def outcomes(e: Evidence) -> float:
    """Return the number of episodes of the newest steps."""
    return e.count(
        *{key for row in e.steps[-e.width :] for key in row if key.startswith("outcomes/")}
    )


def gap(e: Evidence) -> Hit | None:
    """Sampling ahead makes single tokens differ: then only the mean measures a mismatch."""
    return (
        None
        if e.now.get("staleness/max")
        else over("sampling/sampling_logp_difference/max", 1.0)(e)
    )


def stop(e: Evidence) -> Hit | None:
    cut = [
        (one, turn)
        for one in e.graded
        for turn in one.turns
        if turn.stop_reason is StopReason.LENGTH
    ]
    wrote = []
    for one, turn in cut:
        ids = one.tokens.ids[turn.start : turn.end][one.tokens.trained_mask[turn.start : turn.end]]
        wrote += [(one, e.controls[int(token)]) for token in ids[np.isin(ids, list(e.controls))]]
    turns = {one.id for one, _ in wrote}
    if len(turns) < max(ENOUGH, len(cut) * HALF):
        return None
    return Hit(len(turns), len(cut) * HALF, wrote[0][0].id, {"of": len(cut), "token": wrote[0][1]})


def parser(e: Evidence) -> Hit | None:
    if not e.foreign or (e.mean("tools/call_frequency") or 0.0) > HALF:
        return None
    name = e.foreign.rpartition("model.chat.parser=")[2].rstrip(".")
    return Hit(1.0, words={"text": e.foreign.partition(" If the model")[0], "parser": name})


def unless_contradicted(find: Find) -> Find:
    """Return a rule about calls, which a training corrects, that yields to a grader which the rows contradict."""
    return lambda e: hit if (hit := find(e)) and _find_contradiction(e) is None else None


def malformed(*, read: bool) -> Find:
    """Find calls of which most do not fit their tool, or (`read` false) cannot be read: a syntax explains those."""

    def find(e: Evidence) -> Hit | None:
        bad = [(one, c) for one in e.graded for t in one.turns for c in t.calls if c.error]
        steps = {one.step for one in e.graded}  # calls of those that a fault ended may have fitted
        masked = [one for one in e.episodes if one.outcome in FAULTS and one.step in steps]
        share = len({one.id for one, _ in bad}) / max(ENOUGH, len(e.graded) + len(masked))
        fitting = 2 * sum(call.arguments is not None for _, call in bad) > len(bad)
        if share < HALF or fitting is not read:
            return None
        ((text, number),) = Counter(
            short((call.error or "").partition(". Expected: ")[0]) for _, call in bad
        ).most_common(1)
        return Hit(share, HALF, bad[0][0].id, {"text": text, "count": number})

    return find


def errors(e: Evidence) -> Hit | None:
    counts = {name: number for name in FAULTS if (number := e.count(f"outcomes/{name}"))}
    few = e.width > 1 and sum(counts.values()) < FEW_ERRORS * outcomes(e)  # an alert counts each
    if not counts or few:
        return None
    over = [f"{counts[n]:.0f} took longer than {key}" for n, key in LIMITS.items() if n in counts]
    late = (
        f"; {' and '.join(over)} of their own (the model's turns and other programs do not count)"
    )
    broken = next((one for one in e.episodes if one.outcome in counts), None)
    error = f": {short(broken.error)}" if broken is not None and broken.error else ""
    words = {"named": ",".join(counts), "late": late if over else "", "error": error}
    return Hit(sum(counts.values()), 0.0, broken.id if broken is not None else "", words)


def tools(e: Evidence) -> Hit | None:
    """Find the tool that fails most: a call that does not fit its schema never reaches it."""
    ran = group_pairs((item[1].name, item) for item in _list_executed(e))
    hits = [hit for name, items in ran.items() if (hit := _failures(name, items))]
    return max(hits, key=lambda hit: int(hit.words["of"]), default=None)


def _list_executed(e: Evidence) -> list[tuple[Episode, ToolCall, ToolResult]]:
    """Return the calls that a tool answered: they could be read, and fit its schema."""
    refused = {"malformed_call", *CALLED_WRONGLY}
    return [item for item in e.results if item[2].error not in refused]


def _failures(tool: str, ran: Sequence[tuple[Episode, ToolCall, ToolResult]]) -> Hit | None:
    """Find failures in most of a tool's calls that are its own, not those of arguments that the model made up."""
    raised = [item for item in ran if item[2].error in TOOL_FAULTS]
    share = len(raised) / max(ENOUGH, len(ran))
    if share < HALF or len(raised) < ENOUGH:
        return None
    texts = [short(result.text, 160).rstrip(".") for _, _, result in raised]
    # messages that differ in their arguments alone are one error
    stems = [re.sub(r"[^A-Za-z ]", "", text)[:24] for text in texts]
    ((stem, number),) = Counter(stems).most_common(1)
    given = sum(not _foreign_words(*item[:2]) for item in raised)
    if number < HALF * len(raised) and given < HALF * len(ran):
        return None
    at = stems.index(stem)
    found = {"count": number, "of": len(raised), "tool": tool, "text": texts[at]}
    one, call, _ = raised[at]
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return Hit(share, HALF, one.id, {**found, "arguments": arguments})


def arguments(e: Evidence) -> Hit | None:
    """Whether calls of attempts at unsolved tasks refer to anything that stands in the question."""
    solved = sum(one.solved for one in e.graded) / max(1, len(e.graded))
    ran = _list_executed(e)
    if solved > HARDLY or len(ran) < ENOUGH:
        return None
    wrong = [item for item in ran if item[2].error is not None or _foreign_words(*item[:2])]
    share = len(wrong) / len(ran)
    if share < HALF:
        return None
    one, call, result = wrong[0]
    asked = next((t for t in one.turns if t.role == "user"), one.turns[0])
    question = short(" ".join(message_lines(list(asked.messages[-1:]))))
    answer = f" (it answered: {short(result.text)})" if result.error else ""
    shown = ", ".join(f"{key}={value!r}" for key, value in (call.arguments or {}).items())
    return Hit(
        share,
        HALF,
        one.id,
        {"call": f"{call.name}({shown})", "question": question, "answer": answer},
    )


def _foreign_words(one: Episode, call: Any) -> bool:
    """Whether an argument has words that do not stand in the texts that the model was given before the call."""
    before = takewhile(lambda turn: call not in turn.calls, one.turns)
    read = [m for turn in before if turn.role != "assistant" for m in turn.messages]
    given = " ".join(message_lines(read)).lower()
    values = [str(value).lower() for value in (call.arguments or {}).values()]
    return any(word not in given for value in values for word in re.findall(r"\w+", value))


def ungraded(e: Evidence) -> Hit | None:
    keys = {key for row in e.steps for key in row if key.startswith("ungraded/")}
    counts = {key.partition("/")[2]: number for key in keys if (number := e.count(key))}
    named = ", ".join(f"{name} of {number:.0f}" for name, number in sorted(counts.items()))
    proof = next((one.id for one in e.episodes if one.outcome is Outcome.UNGRADED), "")
    return Hit(sum(counts.values()), 0.0, proof, {"named": named}) if counts else None


def noise(e: Evidence) -> Hit | None:
    alike = group_pairs(((one.task_id, one.tokens.ids.tobytes()), one) for one in e.graded)
    pairs = [pair for same in alike.values() for pair in combinations(same[:8], 2)]
    odd = [
        (a, b) for a, b in pairs if None not in (a.primary, b.primary) and a.primary != b.primary
    ]
    if len(odd) < 2:
        return None
    a, b = odd[0]
    return Hit(len(odd), 0.0, a.id, {"of": len(pairs), "one": a.primary, "other": b.primary})


def _find_contradiction(e: Evidence) -> Hit | None:
    """Compare the grader with the rows' own answers, by family, as far as they are known."""
    known = [(one, e.expected(one), answer_of(one)) for one in e.graded]
    right = [one for one, want, said in known if want and said == want]
    refused = [one for one in right if not one.solved]
    families = {one.family for one in right if one.solved}
    wrong = [o for o, want, said in known if want and said != want and o.family in families]
    paid = [one for one in wrong if one.solved]
    copied = _list_copied(e)
    rows = {one.id: row for one, row, _ in copied}
    other = [one for one, row, _ in copied if row and not one.solved]
    longer = [one for one, row, around in copied if around and not row and not one.solved]
    says = "expects {want!r} and the tool answers {said!r}"
    for cases, of, most, text in (
        (refused, right, HALF, "gives {value:g} to the row's own answer"),
        (paid, wrong, HALF, "gives {value:g} to another answer than the row's"),
        (other, copied, NEARLY, f"{says}, the answer of the row {{row}},"),
        (longer, copied, NEARLY, says),
    ):
        if len(cases) >= 3 and len(cases) > most * len(of):
            one = cases[0]
            words = {"want": e.expected(one), "said": answer_of(one), "row": rows.get(one.id, "")}
            text = text.format(value=one.primary or 0.0, **words)
            return Hit(len(cases), most, one.id, {"of": len(of), "text": text})
    return None


def _list_copied(e: Evidence) -> list[tuple[Episode, str, bool]]:
    """Return the attempts that answer with the result of a call in the question's words.

    With each: the other row that has this answer, "" if it is the row's own or rows are too much alike; and whether the
    row's answer stands in it among other words, or is this number with a unit.
    """
    answers = {task.id: answer_in(task) for task in e.tasks.values()}
    rows = {text: name for name, text in answers.items() if text}
    found: dict[str, tuple[Episode, str, bool]] = {}
    for one, call, result in e.results:
        said, want = answer_of(one), e.expected(one)
        if not (want and said) or result.error is not None or _foreign_words(one, call):
            continue
        if _holds(plain(result.text), said):
            row = rows.get(said, "") if said != want and len(rows) > HALF * len(answers) else ""
            unit = said[-1:].isdigit() and re.fullmatch(rf"\D*{re.escape(said)}\D*", want)
            found[one.id] = one, row, said != want and (bool(unit) or _holds(said, want))
    return list(found.values())


def _holds(text: str, part: str) -> bool:
    """Whether a text has a part as whole words and numbers."""
    return re.search(rf"(?<![\w.]){re.escape(part)}(?!\w|\.\w)", text) is not None


def grader(e: Evidence) -> Hit | None:
    """Find a grader that the rows' own answers contradict, or that gives a single value."""
    if (hit := _find_contradiction(e)) is not None:
        return hit
    values = {0.0 if one.primary is None else one.primary for one in e.graded}
    if len(e.graded) < 2 * ENOUGH or len(values) > 1 or values & {0.0, 1.0}:
        return None
    words = {"of": len(e.graded), "text": f"gives the same, {next(iter(values)):g},"}
    return Hit(len(e.graded), None, e.graded[0].id, words)


def reasons(episodes: Sequence[Episode]) -> list[tuple[str, int, str]]:
    """Return why episodes are not solved, the most frequent reason first: its text, a count, an episode."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for one in episodes:
        flags = find_flags(one)
        if one.graded and flags and not one.solved:
            text = re.sub(r" 1×(?=:)|\.? Expected: .*", "", flags[0].evidence)
            found[flags[0].name].append((text, one.id))
        elif not one.solved:
            results = [result for turn in one.turns for result in turn.results]
            copied = bool(results) and answer_of(one) == plain(results[-1].text)
            text = f"a wrong answer{', the last that a tool gave' * copied}"
            text = text if one.graded else str(one.outcome)
            found[text].append((text, one.id))
    listed = []
    for same in found.values():  # calls of several tools may have one flag
        ((text, _),) = Counter(text for text, _ in same).most_common(1)
        listed.append((text, len(same), next(proof for said, proof in same if said == text)))
    return sorted(listed, key=lambda item: -item[1])
