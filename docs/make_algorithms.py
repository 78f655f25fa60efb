"""Writes docs/algorithms.md from the records of estimators and losses: python docs/make_algorithms.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from agentrl_cli.config.choice import Algorithm
from agentrl_cli.config.estimators import ESTIMATORS, Estimator
from agentrl_cli.config.losses import LOSSES

TARGET = Path(__file__).with_name("algorithms.md")
_RESULTS = TARGET.parent.parent / "benchmarks" / "results"
RESULTS = {
    _RESULTS / "algorithms.json": "code-task's test split",
    _RESULTS / "turn_credit.json": "guess-task from 1 to 20",
}
"""File → the task of its runs."""

HEAD = """\
# Algorithms

<!-- Written by docs/make_algorithms.py from the records in agentrl_cli/config/; edit those. -->

`algo.advantage` decides what an episode's tokens are worth, `algo.loss` how that becomes a gradient. Both are a name,
or a name with options: `--set algo.advantage.name=gae --set algo.advantage.lambda=0.95`. An estimator or a loss of your
own is `file.py:function`.

Where to start: one reward per episode and groups of attempts, `grpo` (the default). Rewards of single turns,
`turn_returns`, `mt_grpo` or `gigpo`. Several reward parts on different scales, `gdpo`. A stronger model of the same
family, `distill`. Games that the model plays with itself, `rae`. Prompts instead of weights:
[`agentrl optimize`](prompts.md).

"Measured" is pass@1 at temperature 1 before → after, by seed, and the mean of the CPU seconds on a shared x86-64 core.
`code-task` rewards an episode, `guess-task` each guess (`benchmarks/README.md`).

Terms that go with every estimator and loss, each off until it is set:
"""
TERMS: Sequence[tuple[str, str, str]] = (
    (
        "`algo.off_policy.correction`",
        "weighs tokens by the gap between sampler and trainer: `tis` truncates the ratio, `mis` masks",
        "arxiv.org/abs/2510.18855",
    ),
    (
        "`rollout.truncation.replay`",
        "top-p, top-k and min-p sampling trained exactly: under the tokens that each draw had left",
        "arxiv.org/abs/2512.02556",
    ),
    (
        "`algo.off_policy.reject`",
        "leaves out tokens or sequences beyond a gap: `seq_mean_k1` is the geometric mean's ratio, `k2` and `k3` are"
        " divergences (verl's `rollout_rs`)",
        "richardli.xyz/rl-collapse",
    ),
    (
        "`algo.off_policy.bypass`",
        "ratios against the sampler, no forward before the step (verl's bypass mode)",
        "richardli.xyz/rl-collapse",
    ),
    (
        "`algo.off_policy.mask`",
        "no gradient for bad sequences that have become unlikely since they were sampled",
        "arxiv.org/abs/2512.02556",
    ),
    (
        "`algo.entropy.share`",
        "a gradient for the most uncertain tokens alone",
        "arxiv.org/abs/2506.01939",
    ),
    (
        "`algo.skip.overlong`, `algo.skip.void`",
        "skip episodes that ran out of tokens, or that have a void turn",
        "arxiv.org/abs/2503.14476, arxiv.org/abs/2509.02479",
    ),
    (
        "`algo.kl.coef`, `algo.kl.ref_ema`",
        "KL to a reference, which may follow the weights as their moving average",
        "arxiv.org/abs/2404.09656",
    ),
    (
        "`algo.entropy.coef`",
        "an entropy bonus, constant or steered",
        "arxiv.org/abs/2505.22312",
    ),
)
"""Settings, what they do, and where they come from."""

COMPARES: Mapping[str, str] = {
    "rewards": "the rewards of a group; groups of equal rewards are skipped",
    "group": "reward parts or turns within a group",
    "batch": "all tokens of the batch",
    "nothing": "nothing: every episode trains",
}
NEEDS: Mapping[str, str] = {
    "values": "a value head",
    "baseline": "a greedy attempt at each task",
    "teacher": "a teacher",
}


@cache
def measured() -> dict[str, list[str]]:
    """By the name of an estimator or loss, what the benchmarks found: a line for each task, its seeds side by side."""
    found: dict[str, list[str]] = {}
    for path, task in RESULTS.items():
        runs: dict[str, list[Any]] = {}
        for run in json.loads(path.read_text(encoding="utf-8"))["results"]:
            given = dict(pair.split("=", 1) for pair in run["set"])
            runs.setdefault(
                given.get("algo.loss") or given.get("algo.advantage") or "grpo", []
            ).append(run)
        for name, seeds in runs.items():
            before, after = (
                [f"{run[key]['pass_at']['1']['value']:.3f}" for run in seeds]
                for key in ("base", "trained")
            )
            start = before[:1] if len(set(before)) == 1 else before
            cost = mean(run["cpu_seconds"] for run in seeds)
            numbers = ", ".join(str(run["seed"]) for run in seeds)
            found.setdefault(name, []).append(
                f"{task}, {seeds[0]['steps']} steps, seed {numbers}:"
                f" {', '.join(start)} → {', '.join(after)} in {cost:.0f} CPU s"
            )
    return found


def render() -> str:
    """The whole page."""
    lines = [HEAD.rstrip(), "", "| setting | what it does | source |", "| --- | --- | --- |"]
    for setting, does, sources in TERMS:
        links = ", ".join(f"<https://{source}>" for source in sources.split(", "))
        lines.append(f"| {setting} | {does} | {links} |")
    lines += ["", "## Advantages"]
    for name, record in ESTIMATORS.items():
        lines += ["", *_record(name, record)]
    lines += ["", "## Losses"]
    for name, loss in LOSSES.items():
        lines += ["", *_record(name, loss)]
    return "\n".join(lines) + "\n"


def _record(name: str, record: Algorithm) -> Iterator[str]:
    yield from (f"### {name}", "", record.text, "")
    if isinstance(record, Estimator):
        yield f"- compares {COMPARES[record.compares]}"
        if record.needs:
            yield f"- needs {NEEDS[record.needs]}"
    if record.aggregation:
        yield f"- aggregation of its paper: `{record.aggregation}`"
    yield f"- source: <{record.source}>"
    yield from (f"- measured: {line}" for line in measured().get(name, ()))
    for option, info in record.options.model_fields.items():
        if option != "name":
            yield f"- `{info.alias or option}` ({info.default!r}): {info.description}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
