"""The token sequences of one training step, and the record of their tokens.

An episode is one sequence, or one per branch. Sequences that begin alike lie together in a bundle, so that what they
share is computed once; a group is one bundle unless agents in it began several contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from agentrl_cli.learning.losses import Totals
from agentrl_cli.learning.packing import Segment, segments_of
from agentrl_cli.learning.token_record import Member, TokenRecord
from agentrl_cli.types import Branch, Episode, Float32
from agentrl_cli.types.branches import join_trained, split_trained

_PER_TOKEN = tuple(
    item.name for item in fields(TokenRecord) if item.name not in ("after", "teacher_states")
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a sequence comes from."""

    number: int
    """Number of its episode in the step."""
    episode: Episode
    branch: Branch

    @property
    def last(self) -> bool:
        """Whether it ends with the episode's last turn: a limit that cut the episode cut this sequence."""
        return not self.episode.turns or self.branch.turns[-1] == len(self.episode.turns) - 1

    def sampled(self, name: str) -> Float32:
        """[n] one array of the episode's tokens, over the tokens that are trained in this sequence."""
        values: Float32 = getattr(self.episode.tokens, name)[
            self.branch.positions[self.branch.trained]
        ]
        return values


@dataclass(frozen=True, slots=True)
class Step:
    """The groups of one update as bundles of segments. A `Member` is (bundle, number within it)."""

    number: int
    episodes: list[Episode]
    bundles: list[list[int]]
    """For each group its bundles."""
    segments: list[list[Segment]]
    """The segments of each bundle."""
    sources: dict[Member, Source]
    seen: dict[Member, TokenRecord]
    members: list[list[Member]]
    """For each episode its sequences, in the order of its branches."""

    @classmethod
    def of(cls, number: int, groups: Sequence[Sequence[Episode]]) -> Step:
        episodes = [episode for group in groups for episode in group]
        step = cls(number, episodes, [], [], {}, {}, [[] for _ in episodes])
        at = 0
        for group in groups:
            first = len(step.segments)
            for sequences in _bundled(group, at):
                for m, (source, _) in enumerate(sequences):
                    member = (len(step.segments), m)
                    step.sources[member], step.seen[member] = source, TokenRecord()
                    step.members[source.number].append(member)
                step.segments.append([segment for _, segment in sequences])
            step.bundles.append(list(range(first, len(step.segments))))
            at += len(group)
        for members in step.members:
            members.sort(key=lambda member: step.sources[member].branch.turns[-1:])
        return step

    @property
    def branched(self) -> bool:
        """Whether an episode has several sequences."""
        return len(self.sources) > len(self.episodes)

    def batch(self, groups: Sequence[int]) -> list[int]:
        """Return the bundles of some groups."""
        return [bundle for group in groups for bundle in self.bundles[group]]

    def in_batch(self, bundles: Sequence[int]) -> list[Member]:
        """Return the sequences of some bundles."""
        return [(bundle, m) for bundle in bundles for m in range(len(self.segments[bundle]))]

    def sampler(self, member: Member) -> Float32:
        """[n] the sampler's log-probabilities of what the trainer computes: among the tokens left, if stored."""
        stored = self.sources[member].episode.tokens.support is not None
        return self.sources[member].sampled("logp_sampled" if stored else "logp_policy")

    def sizes(self, members: Sequence[Member]) -> list[int]:
        """Trained tokens of the episode of each sequence, without those that were rejected."""
        return [
            sum(
                int(self.seen[other].valid.sum())
                for other in self.members[self.sources[member].number]
            )
            for member in members
        ]

    def totals(self, batch: Sequence[int], max_tokens: int) -> Totals:
        """Totals of a mini-batch: tokens that were not rejected, and the sequences and episodes left."""
        counts = {member: int(self.seen[member].valid.sum()) for member in self.in_batch(batch)}
        left = [
            member for member, count in counts.items() if count or self.seen[member].kept is None
        ]
        episodes = len({self.sources[member].number for member in left})
        return Totals(sum(counts.values()), len(left), max_tokens, episodes)

    def joined(self, name: str) -> list[Any]:
        """One field of the records, for each episode over its trained tokens in token order; None if it is not known.

        A token that several branches share has the number of the first branch, which trains it.
        """
        return [self._joined(number, name) for number in range(len(self.episodes))]

    def give(self, name: str, arrays: Sequence[Float32]) -> None:
        """Set one field of the records from an array per episode, as `joined` returns them."""
        for number, values in enumerate(arrays):
            members = self.members[number]
            if len(members) == 1:
                setattr(self.seen[members[0]], name, values)
                continue
            branches = [self.sources[member].branch for member in members]
            parts = split_trained(
                branches, self.episodes[number].tokens.trained_mask, np.asarray(values)
            )
            for member, part in zip(members, parts, strict=True):
                setattr(self.seen[member], name, part)

    def records(self) -> Iterator[tuple[Episode, TokenRecord]]:
        """Yield each episode with the record of all its trained tokens."""
        for number, episode in enumerate(self.episodes):
            yield episode, TokenRecord(**{name: self._joined(number, name) for name in _PER_TOKEN})

    def after(self) -> list[float]:
        """For each episode the value of the state that it was left in; 0 if it ended, as all but the last branch do."""
        return [sum(self.seen[member].after for member in members) for members in self.members]

    def _joined(self, number: int, name: str) -> Any:
        members = self.members[number]
        parts = [getattr(self.seen[member], name) for member in members]
        if len(parts) == 1 or any(part is None for part in parts):
            return parts[0]
        branches = [self.sources[member].branch for member in members]
        return join_trained(branches, self.episodes[number].tokens.trained_mask, parts)


def _bundled(group: Sequence[Episode], at: int) -> list[list[tuple[Source, Segment]]]:
    """Return a group's sequences by the turn that they begin with; one bundle if all its episodes are linear."""
    found: dict[bytes, list[tuple[Source, Segment]]] = {}
    alike = all(episode.linear for episode in group)
    for number, episode in enumerate(group, at):
        for branch, segment in segments_of(episode):
            root = episode.turns[branch.turns[0]] if branch.turns and not alike else None
            key = b"" if root is None else episode.tokens.ids[root.start : root.end].tobytes()
            found.setdefault(key, []).append((Source(number, episode, branch), segment))
    return list(found.values())
