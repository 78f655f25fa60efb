"""The words of the screens, the store and the commands, for `agentrl show --words`, the key W and docs/glossary.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping

from agentrl_cli.errors import NotFound, nearest
from agentrl_cli.reports.diagnosis import RULES

LEGEND: dict[str, dict[str, str]] = {
    "On the screens": {
        "adv": "the advantage: how far an attempt's reward is above (+) or below (−) the mean of its group",
        "push": "how far the step moved a token: `up, 3 of 7` is the glyph `3`, each step twice the one below; 7 is "
        "the strongest 5 % of the run, and `up, 7 of 7 (2.0×)` twice what that takes",
        "p": "the probability that the model gave the token; `logp` is its natural logarithm",
        "most likely": "the five tokens that the model would have sampled most often here, `>` the one it did",
        "group": "the attempts at one task in one step; `sd` is how much their rewards differ, 0 teaches nothing",
        "tr": "its turns",
        "trained, context": "whether a turn's tokens are trained on; what the model only reads is context",
        "diff, fork": "the first token at which an attempt at the same task went another way",
        "best, worst, odd": "attempts of the last step worth opening; the odd one has the rarest flags",
        "no signal": "the share of groups in which every attempt has the same reward: nothing is learned from them",
        "at the ceiling": "every attempt is solved: nothing is left to learn on these rows",
        "cut off": "the share of attempts that a limit on tokens or turns ended",
        "clipped": "the share of tokens at a clipping bound: they are not trained further",
        "KL": "how far the model is from the reference model, in nats a token; a rise that speeds up is a warning",
        "entropy": "how undecided the model is at a token, in nats; near 0 it tries nothing new. The curve is a mean "
        "over the trained tokens, so groups in which every attempt has the same reward are not in it",
        "grad norm": "the size of the update's gradient before it is limited",
        "eval": "the share solved on tasks that are not trained on, with its 95 % interval",
        "G=8 x 8 prompts": "8 attempts at each of 8 tasks in a step",
        "ns, docker, landlock, bare": "how the sandbox isolated a tool call, the strictest first",
    },
    "Nouns": {
        "pack": "a folder with a task: description, tools, data, rewards, defaults",
        "task": "one row of a pack's data",
        "episode": "one attempt at a task: turns, tokens, rewards, an outcome",
        "turn": "one message of system, user, model or tool, with its span of tokens",
        "branch": "the turns from the first to one that no other continues: what the model saw. An episode has "
        "several if its agent changed the history or began another context; tokens that branches share are trained "
        "once, in the first",
        "run": "one training, rollout, evaluation or chat",
        "sample": "the number of an attempt within its group",
        "family": "a kind of task; held-out families never occur in training",
        "checkpoint": "the weights after a step, written `RUN@best`, `RUN@last`, `RUN@40`",
        "what-if": "an episode sampled again from one of its turns, as it was or rewritten",
    },
    "Training": {
        "policy": "the model in training",
        "base": "the model before training, which evaluations compare with",
        "reference model": "the model from which a KL term measures the distance",
        "advantage": "how far an episode's reward is above the mean of its group, usually over their standard "
        "deviation; one number an episode in plain GRPO",
        "ratio": "the probability of a token under the new policy over that under the old one; beyond a bound it is "
        "clipped and has no gradient",
        "mask": "which tokens are trained; what is masked is not",
        "drift": "a rendering of the conversation differs in its structure from the stored tokens",
        "staleness": "how many steps older than the newest the sampling weights were",
        "warm start": "supervised fine-tuning on demonstrations before reinforcement learning",
        "adapter": "the few added weights that LoRA trains",
        "reward hacking": "the reward rises, but the task is not done better",
        "pass@k": "the probability that at least one of k attempts solves a task",
    },
    "Outcomes: how an episode ended": {
        "solved": "the pack's primary reward part is 1",
        "failed": "it ended by itself, unsolved",
        "truncated_turns, truncated_tokens": "a limit cut it off",
        "too_long": "the prompt does not fit",
        "timeout, env_error, sandbox_error": "the infrastructure failed: masked, never a zero",
        "agent_error, agent_timeout": "the agent program failed, or was stopped at its time limit, and gave no "
        "reward: masked, never a zero. With a reward, or if the model caused the error, it is `solved` or `failed`",
        "no_calls": "the agent ended without a call of the model: its reward says nothing about the model, and it is "
        "masked",
        "foreign_text": "an assistant turn has text that the policy did not sample: the reward may be owed to that "
        "text, and it is masked",
        "ungraded": "the primary reward part is None, so the episode has no grade: masked, never a zero",
        "drift": "a training episode was ended at its first structural drift: what was appended is not what the "
        "template writes",
        "cancelled": "stopped, or a chat without a score",
    },
    "Facts: the disposition of an episode in training": {
        "trained": "its tokens were trained",
        "skipped:no_signal": "nothing to learn from: all rewards of the group were equal, fewer than two of its "
        "episodes could be used, the model sampled no token, or the greedy attempt to compare with has no grade",
        "skipped:fault": "something outside the policy failed; the reason is the outcome",
        "skipped:ungraded": "it has no grade",
        "skipped:limit": "the prompt was too long; with `algo.skip` also out of tokens, or a void turn",
        "skipped:drift": "its turn structure drifted",
        "skipped:bad_tokens": "the stored ids or log-probabilities cannot come from the model's sampling",
        "skipped:unused": "cancelled, sampled with weights that are too old, replaced after a change, left over by a "
        "resume with fewer or smaller groups, left out by `algo.skip.groups`, or a greedy attempt to compare with",
    },
    "Layers: the colours of tokens in replay, by key": {
        "1 push": "gradient weight × (1 − p), what the step moved the token's logit by: `1` to `7` up, `a` to `g` "
        "down, each twice the one before, `0` hardly moved, `~` clipped, `.` not trained",
        "2 advantage": "one number an episode in plain GRPO",
        "3 log-probability": "how likely the sampled token was",
        "4 entropy": "how undecided the policy was there",
        "5 ratio": "new policy over old; clipped ones are marked",
        "6 mask": "which tokens were trained",
        "7 origin": "template, system, user, tool, model, forced",
        "8 plain": "nothing",
        "9 KL": "distance from the reference model, where there is one",
        "0 gradient weight": "−∂L/∂log p of the policy term: `+ #` pushed up, `- =` pushed down, strong from half "
        "the episode's largest",
    },
    "Flags: anomalies of an episode, by rules": {
        "TOOLFAIL": "a tool raised, or took too long",
        "BADARG": "a tool was unknown or got arguments that do not fit its schema",
        "NOTOOL": "no tool was called",
        "LOOP": "the same call again and again, or a text that repeats itself",
        "TRUNC": "cut off: tokens, turns or the context ran out",
        "AFTERERR": "answered right after a failed tool call",
        "MALFORMED": "a call that could not be parsed",
        "DRIFT": "a rendering of the conversation differs in its structure from the ids",
        "DIVERGED": "continues a stored episode (a re-roll, a chat), one of whose calls returned another result when "
        "run again",
        "MASK": "the mask is wrong: sampled tokens outside the model's turns, or without a log-probability",
    },
}
"""Section to its words and their meanings, those that a screen shows first."""
RULES_TITLE = "Rules of `agentrl why`"


def find_words(word: str = "") -> dict[str, dict[str, str]]:
    """Return the sections with the entries that a word names, whole or in part; without one the legend.

    The rules of the diagnosis have names too. Raises NotFound with the nearest words.
    """
    if not word:
        return LEGEND
    every, low = {**LEGEND, **rule_words()}, word.lower().strip()
    exact = re.compile(rf"(?<![\w-]){re.escape(low)}(?![\w-])")
    for fits in (exact.search, lambda name: low in name):
        found = {
            title: {n: t for n, t in section.items() if fits(n.lower())}
            for title, section in every.items()
        }
        if any(found.values()):
            return {title: section for title, section in found.items() if section}
    near = nearest(
        low,
        [
            part
            for section in every.values()
            for name in section
            for part in name.lower().split(", ")
        ],
    )
    raise NotFound(
        f"No word {word!r} is explained.",
        hint=f"Near: {', '.join(near)}." if near else "`agentrl show --words` lists them.",
    )


def rule_words() -> dict[str, dict[str, str]]:
    """Return the section of the diagnosis' rules: names to text, advice and command of every rule of that name."""
    rules: dict[str, str] = {}
    for r in RULES:
        before = f"{rules[r.name]} Or: " if r.name in rules else ""
        rules[r.name] = f"{before}{plain(r.text)} {plain(r.advice)} `{r.command}`"
    return {RULES_TITLE: rules}


def plain(text: str) -> str:
    """Return the text of a rule with … for each value that is filled in."""
    filled = re.sub(r"\{[^}]*\}", "…", text).replace("{", "").replace("|", "/")
    return "the finding itself" if filled == "…" else filled


def legend_lines(found: Mapping[str, Mapping[str, str]], width: int) -> Iterator[str]:
    """Yield the sections as lines: each word, and its meaning wrapped beside it."""
    for number, (title, section) in enumerate(found.items()):
        yield from ("",) * bool(number)
        yield title
        for name, text in section.items():
            head = f"  {name:<16} "
            yield from textwrap.wrap(
                text.replace("`", ""),
                width,
                initial_indent=head,
                subsequent_indent=" " * 19,
                break_on_hyphens=False,
            )


def rule_lines(width: int) -> Iterator[str]:
    """Yield the names of the diagnosis' rules as lines: their texts are long."""
    yield from ("", f"{RULES_TITLE}: `agentrl show --words NAME` explains one".replace("`", ""))
    names = ", ".join(dict.fromkeys(rule.name for rule in RULES))
    yield from textwrap.wrap(names, width, initial_indent="  ", subsequent_indent="  ")
