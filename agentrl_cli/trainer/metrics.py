"""The numbers of a step, the CPU time of this process with its sandbox, and the machine."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from agentrl_cli.rewards.context import answer_turns
from agentrl_cli.types import Episode, Fact, Outcome, StopReason


def step_metrics(
    groups: Sequence[Sequence[Episode]],
    facts: Mapping[str, Fact],
    drift: Sequence[str] = (),
    packs: Collection[str] = (),
    primaries: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, float]:
    """Means over a step's episodes; those that ended in an error count in `outcomes/…` alone.

    `drift` holds the worst kind of drift of each episode, empty texts for those without. If a run mixes several
    `packs`, each has its own `packs/NAME/reward` and `packs/NAME/solved` in the steps that attempt its tasks.
    `primaries`: pack to the name of its primary reward; episodes in which that is None count as `ungraded/NAME`.
    """
    episodes = [episode for group in groups for episode in group]
    good = [e for e in episodes if e.outcome is not None and e.graded]
    graded = {e.id for e in good}
    rewards = [[r for e in group if e.id in graded for r in _rewards(e)] for group in groups]
    metrics: dict[str, float] = {"num_tokens": float(sum(len(e.tokens) for e in episodes))}
    if good:
        known = [[e for e in group if e.id in graded] for group in groups]
        metrics |= _graded_means(good, rewards) | _equal([group for group in known if group])
    for name in sorted({part.name for e in good for part in e.reward_parts}):
        values = [part.value for e in good for part in e.reward_parts if part.name == name]
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = float(np.std(values))
    for name in packs if len(packs) > 1 else ():
        own = [e for e in good if e.pack == name]
        if own:
            metrics[f"packs/{name}/reward"] = _mean([e.graded_reward for e in own])
            metrics[f"packs/{name}/solved"] = _mean([float(e.solved) for e in own])
    ungraded = [e for e in episodes if e.outcome is Outcome.UNGRADED]
    counted = {
        "ungraded": [primaries.get(e.pack, e.pack) for e in ungraded],
        "outcomes": [str(e.outcome) for e in episodes],
        "flags": [flag for e in episodes for flag in e.flags],
        "drift": [kind for kind in drift if kind],
        "facts": [fact.kind for fact in facts.values()],
    }
    for kind, names in counted.items():
        metrics |= {f"{kind}/{name}": float(n) for name, n in Counter(names).items()}
    return metrics


def _graded_means(good: Sequence[Episode], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Means over the graded episodes; `rewards` are theirs by group."""
    spread = [float(np.std(r, ddof=1)) if len(r) > 1 else 0.0 for r in rewards]
    lengths = [e.trained_tokens for e in good]
    calls = sum(e.tool_calls for e in good)
    branches = [len(e.branches) for e in good if not e.linear]
    forked = (
        {"branches/mean": (sum(branches) + len(good) - len(branches)) / len(good)}
        if branches
        else {}
    )
    alone = [float(e.solved) for e in good if len(e.players) < 2]
    forked |= {"solved": _mean(alone)} if alone else {}
    return forked | {
        "reward": _mean([e.graded_reward for e in good]),
        "reward_std": _mean(spread),
        "frac_reward_zero_std": _mean([float(s < 1e-8) for s in spread]),
        "completions/mean_length": _mean(lengths),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": _mean([float(_cut(e)) for e in good]),
        "tools/call_frequency": _mean([float(e.tool_calls > 0) for e in good]),
        "tools/failure_frequency": sum(e.tool_errors for e in good) / calls if calls else 0.0,
        "turns/mean": _mean([float(len(answer_turns(e.turns))) for e in good]),
    }


def _equal(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Return the shares of groups without spread in which every attempt, or none, was solved."""
    flat = [
        g
        for g in groups
        if len(g) > 1 and np.ptp([reward for e in g for reward in _rewards(e)]) < 1e-8
    ]
    return {
        "groups/all_solved": sum(all(e.solved for e in g) for g in flat) / len(groups),
        "groups/all_failed": sum(not any(e.solved for e in g) for g in flat) / len(groups),
    }


def _rewards(episode: Episode) -> list[float]:
    """Return an episode's reward; of a game that the model plays against itself, each player's."""
    return list(episode.players.values()) if len(episode.players) > 1 else [episode.graded_reward]


class Clock:
    """The seconds of a step."""

    def __init__(self) -> None:
        self._started = self._sampled = time.monotonic()
        self._cpu = cpu_seconds()

    def sampled(self) -> None:
        """Sampling is done; what follows is the update."""
        self._sampled = time.monotonic()

    def metrics(self) -> dict[str, float]:
        now = time.monotonic()
        return {
            "time/step": now - self._started,
            "time/rollout": self._sampled - self._started,
            "time/update": now - self._sampled,
            "time/cpu": cpu_seconds() - self._cpu,
        }


def cpu_seconds() -> float:
    """CPU seconds of this process and its descendants so far (the sandbox runs in them); Linux reads them in /proc.

    A descendant that ended and whose parent did not wait for it is not counted.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    proc = Path("/proc")
    if not proc.is_dir():
        return total
    parents: dict[int, tuple[int, float]] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue  # the process ended meanwhile
            fields = text.rpartition(")")[2].split()
            parents[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / tick)
    return total + sum(seconds for pid, (_, seconds) in parents.items() if _descends(pid, parents))


def _descends(pid: int, parents: Mapping[int, tuple[int, float]]) -> bool:
    me, at = os.getpid(), pid
    while at in parents and at != me:
        at = parents[at][0]
    return at == me and pid != me


def _cut(episode: Episode) -> bool:
    reasons = [turn.stop_reason for turn in episode.turns if turn.stop_reason is not None]
    return episode.outcome is Outcome.TRUNCATED_TOKENS or reasons[-1:] == [StopReason.LENGTH]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def machine(device: str) -> dict[str, str]:
    """Processor, memory, GPU, versions; without a host's name."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(named, "") or platform.processor() or platform.machine()
    found = {"processor": f"{processor}, {os.cpu_count()} cores"}
    if {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(os.sysconf_names):
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found["memory"] = f"{size / 2**30:.1f} GiB"
    if device != "cpu" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(device if device.startswith("cuda") else "cuda")
    return found | {
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
