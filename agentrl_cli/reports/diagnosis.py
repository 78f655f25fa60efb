"""The diagnosis of a training: one walk from the chat template to the evaluations, one set of rules and texts.

Alerts, the last lines of a training, `agentrl why`, `agentrl check`, the health panel of watch, reports and
docs/troubleshooting.md all take them from RULES, in whose order the first finding is the cause and the rest may follow
from it. To add a rule: a function of the evidence in findings.py, a record here, its name in `Stop` of config/train.py,
and its planted case in tests/reports/planted.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentrl_cli.reports import course
from agentrl_cli.reports import findings as find
from agentrl_cli.reports.advice import WARM, fill
from agentrl_cli.reports.evidence import LEAST, Evidence, describe_change

STAGES = {
    "template": "Whether the model is given, and is trained on, exactly the conversation that its chat template means.",
    "calls": "Whether the model's calls are read, and its turns end where it ends them.",
    "tools": "Whether tools answer: a failure is masked, or teaches the model to leave the tool alone.",
    "grader": "Whether the grader tells right from wrong: the update believes it whatever it says.",
    "reward": "Whether the reward rises with the share solved: the sum of its parts is optimised, nothing else.",
    "groups": "Whether attempts at a task differ in reward: equal rewards have no advantage and teach nothing.",
    "gradient": "Whether an update moves the weights, and no further than one step should.",
    "step size": "Whether the policy stays near its base: one that falls cannot come back by itself.",
    "evaluation": "Whether the gain carries over to tasks that it is not trained on.",
    "machine": "Whether the process and the disk are there.",
}
"""The walk: every stage with the question that it answers."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its place in the walk, its test, and its words. Capitals in a command are filled in."""

    name: str
    stage: str
    level: str
    """done | info | warn | bad: done and info are not faults"""
    find: find.Find
    text: str
    advice: str
    command: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of a rule: a number, its text, advice, a command that runs as it stands, and an episode."""

    name: str
    stage: str
    level: str
    text: str
    advice: str = ""
    command: str = ""
    value: float = 0.0
    threshold: float | None = None
    episode: str = ""

    @property
    def fault(self) -> bool:
        return self.level in ("warn", "bad")

    @property
    def words(self) -> str:
        """The text with its advice and command, the same for the same training."""
        typed = f"`{self.command}`" if self.command else ""
        return " ".join(filter(None, [self.text, self.advice, typed]))

    @property
    def line(self) -> str:
        """Everything in one line."""
        return self.words + (f" See `agentrl replay {self.episode}`." if self.episode else "")


BASE = "agentrl train --model MODEL --set train.lr=LOWER"
RULES: tuple[Rule, ...] = (
    Rule("mask", "template", "bad", find.count("flags/MASK", "MASK"),
         "{value:.0f} episodes count tokens as sampled that lie outside the model's turns, or lack a log-probability.",
         "Their gradient is not the policy's; this is a defect of the sampler.", "agentrl ls -f flag:MASK"),
    Rule("drift", "template", "bad", find.count("drift/structural", "DRIFT"),
         "{value:.0f} episodes differ in structure from the chat template's rendering, and were skipped.",
         "Look at one; `agentrl doctor --template FOLDER` audits the template.", "agentrl ls -f flag:DRIFT"),
    Rule("bad_tokens", "template", "bad", find.count("facts/skipped:bad_tokens"),
         "{value:.0f} episodes hold ids outside the vocabulary or impossible log-probabilities, and were skipped.",
         "What samples is not the model that trains, or the store is damaged.",
         "agentrl ls -f fact:skipped:bad_tokens"),
    Rule("mismatch", "template", "bad", find.over("probe/logp_difference", 0.02),
         "After an update the server and the trainer disagree about the probability of a token by {value:.2g} nats.",
         "The server has other weights or another dtype.", "agentrl train --set model.dtype=float32"),
    Rule("mismatch", "template", "warn", find.gap,
         "Sampler and trainer disagree about the probability of one token by {value:.2g} nats.",
         "Check the dtype; was the model edited?", "agentrl train --set model.dtype=float32"),
    Rule("mismatch", "template", "warn", find.over("sampling/kl", 0.1),
         "Sampler and trainer disagree by {value:.2g} nats a token; {threshold:g} is far.",
         "Check the dtype; with rollout.async_staleness lower it.", "agentrl train --set model.dtype=float32"),
    Rule("too_long", "template", "bad", find.too_long,
         "{value:.0%} of the episodes did not begin: their prompt does not fit into rollout.max_tokens or the context.",
         "Raise the limit, or shorten the rows.", "agentrl train --set rollout.max_tokens=4096"),
    Rule("stop", "calls", "bad", find.stop,
         "{value:.0f} of {of} turns that hit rollout.max_new_tokens go on after {token}: the model ended its turn"
         " there, and the chat template, which ends turns with another token, does not let sampling stop.",
         "Take the template and tokenizer that the model was trained with.", "agentrl doctor --model MODEL"),
    Rule("parser", "calls", "bad", find.parser,
         "The model's calls are not read. {text}",
         "Set the parser of its syntax.", "agentrl train --set model.chat.parser=PARSER"),
    Rule("malformed", "calls", "warn", find.malformed(read=False),
         "{value:.0%} of the episodes hold a call that cannot be parsed, most often: {text} ({count}×).",
         "If this is the model's syntax, set model.chat.parser; else show it well-formed calls first.", WARM),
    Rule("truncated", "calls", "warn", find.over("completions/clipped_ratio", 0.5, "TRUNC"),
         "{value:.0%} of the episodes end at a token limit, and are graded unfinished.",
         "Raise rollout.max_new_tokens or rollout.max_tokens, or set algo.length_penalty.overlong.",
         "agentrl train --set rollout.max_new_tokens=LONGER"),
    Rule("errors", "tools", "bad", find.errors,
         "{value:.0f} episodes ended in an error ({named}) and were masked{late}{error}.",
         "Nothing is learned from them; what is slow is not learned if only it fails.",
         "agentrl ls -f outcome:…"),
    Rule("tools", "tools", "warn", find.unless_contradicted(find.tools),
         "{value:.0%} of the calls that reach {tool} fail. Most often ({count} of {of}) it raises: {text}.",
         "Correct the tool, or let it answer with a sentence that says which arguments it takes.",
         "agentrl tools call TOOL ARGUMENTS"),
    Rule("malformed", "tools", "warn", find.unless_contradicted(find.malformed(read=True)),
         "{value:.0%} of the episodes hold a call that does not fit its tool, most often: {text} ({count}×).",
         "Training fixes it where some calls fit; else show the model right calls first.", WARM),
    Rule("arguments", "tools", "warn", find.unless_contradicted(find.arguments),
         "{value:.0%} of the calls have arguments that are not as the question says them: {call} for"
         " “{question}”{answer}.",
         "Ask shorter, with the arguments in quotes and in the words of the tool's schema; or show right calls first.",
         WARM),
    Rule("ungraded", "grader", "bad", find.ungraded,
         "{value:.0f} episodes have no grade, because their primary reward is None ({named}): masked, not zero.",
         "Return a number from it, or leave the part out for such rows.", "agentrl ls -f outcome:ungraded"),
    Rule("grader_noise", "grader", "bad", find.noise,
         "The grader is not a function of the episode: {value:.0f} of {of} pairs that are token by token the same got"
         " different primary rewards, one of them {one:g} and {other:g}.",
         "Take chance, clocks and other episodes' state out of it; a judge needs a fixed seed.", "agentrl check --all"),
    Rule("grader", "grader", "bad", find.grader,
         "The grader {text} in {value:.0f} of {of} attempts.",
         "It may compare with another field, or accept anything: the check runs it on right and empty answers.",
         "agentrl check --all"),
    Rule("reward_hacking", "reward", "bad", course.hacking,
         "The reward went from {before:.2f} to {after:.2f} while {what} went from {then:.2f} to {now:.2f}{part}.",
         "It is paid for something else than the task: lower that part's weight below the primary's, or close the gap.",
         "agentrl train --set rewards.PART=0"),
    Rule("all_solved", "groups", "done", course.all_solved,
         "Every attempt is solved in {value:.0%} of the groups: nothing is left to learn on these rows.",
         "Stop and evaluate, then take harder rows or task.order=curriculum.", "agentrl eval RUN@best"),
    Rule("same_attempts", "groups", "warn", course.same_attempts,
         "{value:.0%} of the attempts at a task are token by token the same: there is nothing to compare.",
         "Raise rollout.temperature (1 is what the gradient assumes).", "agentrl train --set rollout.temperature=1"),
    Rule("all_failed", "groups", "warn", course.all_failed,
         "Every attempt failed in {value:.0%} of the groups, most often: {why}. There is nothing to reinforce.",
         "If the check finds the grader sound: a warm start on the pack's or a stronger model's solutions"
         " (`agentrl sft --help`), easier rows, a larger group or another model.",
         "agentrl check"),
    Rule("no_signal", "groups", "warn", course.no_signal,
         "{text}", "Try task.order=curriculum, rollout.resample_rounds, a larger group or other rows.",
         "agentrl train --set rollout.group_size=8 --set task.order=curriculum"),
    Rule("nan", "gradient", "bad", course.nan,
         "{names} is not a number: that update was left out.",
         "Lower train.lr or train.max_grad_norm, and go on from the last sound checkpoint.", BASE),
    Rule("no_gradient", "gradient", "bad", course.no_gradient,
         "The gradient was 0 in {value:.0f} steps that had episodes to train on: no trained weight has a part in it.",
         "Compare adapter.target_modules with the model's layers, and look at the advantages.",
         "agentrl config show adapter"),
    Rule("gradients", "gradient", "warn", course.gradients,
         "The gradient norm {value:.3g} is {times:.0f} times its median: one bad batch can undo many steps.",
         "Look at the step's worst episodes; lower train.lr or train.max_grad_norm.", "agentrl replay worst"),
    Rule("no_movement", "gradient", "warn", course.no_movement,
         "The policy did not move: in {steps} steps the same tokens changed by {value:.1g} nats.",
         "Raise train.lr (now {lr:g}), or take more steps.", "agentrl train --set train.lr=HIGHER"),
    Rule("collapse", "step size", "bad", course.collapse,
         "Solved fell from {then:.2f} (steps {first} to {last}) to {now:.2f}: the steps are too large.",
         "Lower train.lr (now {lr:g}) and go on from {place}.", BASE),
    Rule("entropy_collapse", "step size", "warn", course.entropy,
         "The entropy is {value:.2g} nats a token (below {threshold:.2g}): the policy tries nothing new.",
         "Lower train.lr, or raise algo.entropy.coef or rollout.temperature.",
         "agentrl train --set algo.entropy.coef=0.01"),
    Rule("kl_drift", "step size", "warn", find.over("kl", 1.0),
         "The policy is {value:.2g} nats a token away from the reference model; {threshold:g} is far.",
         "Lower train.lr, or raise algo.kl.coef.", "agentrl train --set algo.kl.coef=0.01"),
    Rule("kl_drift", "step size", "warn", find.over("approx_kl", 0.1),
         "The policy moves {value:.2g} nats a token within one step; {threshold:g} is far.",
         "Lower train.lr, algo.epochs or algo.minibatches.", "agentrl train --set algo.epochs=1"),
    Rule("clip_drift", "step size", "warn", course.clip_drift,
         "{value:.0%} of the tokens are at a clipping bound and no longer trained.",
         "Lower train.lr, algo.epochs or algo.minibatches.", "agentrl train --set algo.epochs=1"),
    Rule("leak", "evaluation", "bad", course.leak,
         "{value:.0f} of {of} tasks of the split {split} are training tasks too: an evaluation there measures memory.",
         "Take them out of one of the splits.", "agentrl check"),
    Rule("few_rows", "evaluation", "warn", course.few_rows,
         "All attempts are at {value:.0f} different tasks: their answers are learned, not the task.",
         "Add rows (hundreds are usual); a small split tells nothing either.", "agentrl check"),
    Rule("memorised", "evaluation", "warn", course.memorised,
         "Solved in training {train}, but on tasks that it does not train on it {held}.",
         "It memorised its rows, or the two differ: add rows, and read what is solved in training only.",
         "agentrl eval RUN@last --split train"),
    Rule("off_reference", "evaluation", "warn", course.off_reference,
         "Since step {since} {key} is outside the reference curves of this pack: {value:.2f}, there {low:.2f} to"
         " {high:.2f}.{differs}",
         "The same model has learned these rows: compare template, reward and learning rate with a new copy's."
         " A task that is meant to differ needs no reference.json.",
         "agentrl config show"),
    Rule("process", "machine", "bad", course.process,
         "The training {text}.", "The store has all finished steps: correct that, and resume it.",
         "agentrl train --resume RUN"),
    Rule("disk", "machine", "warn", course.disk,
         "{value:.1f} GiB are left on the store's disk: a full one ends the run.",
         "Remove episodes of old runs, or take another disk.", "agentrl db prune"),
)  # fmt: skip
KINDS = {"all_solved": "no_signal", "all_failed": "no_signal", "same_attempts": "no_signal"}
"""Names that `train.stop_on` knew as one."""
LATE = ("step size", "evaluation", "machine")
"""Stages that see a fall itself; the others see the steps before it. So do rules about the newest step alone."""
NOW = ("nan", "errors", "ungraded", "mismatch", "reward_hacking", "off_reference")


def diagnose(evidence: Evidence, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return every finding, in the order of the walk: the first fault is the cause."""
    found = []
    for rule in rules:
        late = rule.stage in LATE or rule.name in NOW
        hit = rule.find(evidence if late else evidence.before)
        if hit is not None:
            words = {"value": hit.value, "threshold": hit.threshold, **hit.words}
            text, advice = (
                " ".join(part.format(**words).split()) for part in (rule.text, rule.advice)
            )
            command = fill(rule.command, hit, evidence)
            numbers = (hit.value, hit.threshold, hit.episode)
            found.append(
                Finding(rule.name, rule.stage, rule.level, text, advice, command, *numbers)
            )
    return found


def first_fault(found: Sequence[Finding]) -> Finding | None:
    """Return the cause; without a fault that there is nothing left to learn, if so."""
    return next((one for one in found if one.fault), next(iter(found), None))


def stages(found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield one line for each stage of the walk: its first finding, or that it is sound."""
    for stage, question in STAGES.items():
        yield next((one for one in found if one.stage == stage), Finding("", stage, "ok", question))


def report(one: Finding) -> dict[str, Any]:
    """Return a finding as plain values, for JSON."""
    return {**asdict(one), "line": one.line}


def conclude(evidence: Evidence) -> list[str]:
    """Return the last lines of a training: its course, and the cause or the next step."""
    found = [one for one in diagnose(evidence) if one.stage != "machine"]
    cause = first_fault(found)
    return [*filter(None, [summarise(evidence), cause.line if cause else suggest(evidence)])]


def summarise(evidence: Evidence) -> str:
    """Return its course in a sentence, "" if there are too few steps, and how it healed."""
    train, held = evidence.change("solved"), course.carry_over(evidence)
    healed = " ".join(map(describe_change, evidence.changes))
    if train is None:
        return healed
    text = f"Solved in training {train.text} (means of its first and last steps)"
    if held is not None:
        joined = "and" if held.word == train.word else "but"
        text += f", {joined} on the validation tasks it {held.text}"
    return f"{text}; {course.moved_part(evidence)}. {healed}".rstrip()


def suggest(evidence: Evidence) -> str:
    """Return the next step of a training without a fault, "" if there are too few steps or it was cut short."""
    train, solved = evidence.change("solved"), evidence.series("solved")
    if train is None or evidence.steps[-1]["step"] < evidence.run.total_steps:
        return ""
    if train.word != "rose":
        return "Try more steps, a higher train.lr or larger groups (rollout.group_size)."
    # against the steps just before, not the first: a curve that rose early may have been flat for long
    width = max(1, min(10, len(solved) // 4))
    middle = solved[-2 * width : -width]
    if train.after - sum(middle) / len(middle) > LEAST:
        return f"It was still rising: `agentrl train --resume {evidence.run.name} --steps {2 * len(solved)}`"
    return f"It has levelled off; what it still fails: `agentrl ls -f 'run:{evidence.run.name} outcome:failed'`"
