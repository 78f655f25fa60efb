"""Writes docs/algorithms.md from the records of estimators and losses: python docs/make_algorithms.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from agentrl_cli.config.choice import Algorithm
from agentrl_cli.config.estimators import ESTIMATORS, Estimator
from agentrl_cli.config.losses import LOSSES

TARGET = Path(__file__).with_name("algorithms.md")

HEAD = """\
# Algorithms

<!-- Written by docs/make_algorithms.py from the records in agentrl_cli/config/; edit those. -->

`algo.advantage` decides what an episode's tokens are worth, `algo.loss` how that becomes a gradient. Both are a name,
or a name with options: `--set algo.advantage.name=gae --set algo.advantage.lambda=0.95`. An estimator or a loss of your
own is `file.py:function`.

Where to start: one reward per episode and groups of attempts, `grpo` (the default). Rewards of single turns,
`turn_returns`, `mt_grpo` or `gigpo`. Several reward parts on different scales, `gdpo`. A stronger model of the same
family, `distill`. Prompts instead of weights: [`agentrl optimize`](prompts.md).
"""
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


def render() -> str:
    """The whole page."""
    lines = [HEAD.rstrip(), "", "## Advantages"]
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
    for option, info in record.options.model_fields.items():
        if option != "name":
            yield f"- `{info.alias or option}` ({info.default!r}): {info.description}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
