"""The nouns that everything passes around: small frozen dataclasses and enums.

Not here: behaviour. Lengths, returns and finished-ness are derived, never stored twice. An episode is an append-only
list of token ids; sampled ids are stored with their log-probabilities and never decoded and encoded again. Every
token carries its origin, and the loss mask follows from the origin. Where an agent changed its history, the turns
branch; what that means for tokens and masks is in branches.py. Nothing here imports torch; arrays are numpy.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from agentrl_cli.types.branches import Branch, path_to, tree_branches
from agentrl_cli.types.content import HASH, digest, images_of
from agentrl_cli.types.groups import group_pairs
from agentrl_cli.types.outcomes import (
    FAULTS,
    Drift,
    Fact,
    Outcome,
    kind_of,
    read_fact,
    stored_facts,
)
from agentrl_cli.types.tokens import (
    TOP_K,
    Float32,
    Generation,
    Int8,
    Int32,
    Origin,
    Sampling,
    StopReason,
    Support,
    Tokens,
    TrainSignals,
    no_support,
    supports,
)

Message = dict[str, Any]
"""An OpenAI chat message: `role`, `content` and, if any, `tool_calls`, `tool_call_id`, `name`."""

ToolSchema = dict[str, Any]
"""An OpenAI function schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

ROOT = -1
"""`Turn.parent` of a turn that continues no other."""

_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id() -> str:
    """Return a time-ordered, collision-safe id of 14 characters (Crockford base 32: 45 bits of ms, 25 of chance)."""
    number = (int(time.time() * 1000) << 25) | secrets.randbits(25)
    return "".join(_BASE32[(number >> shift) & 31] for shift in range(65, -1, -5))


class AgentState(StrEnum):
    """The states of the agent loop (rollout.py)."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it. `error` describes the fault of a malformed one."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str
    """The exact text between the call's markers."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer of a tool. A tool that fails is an observation, not an ending."""

    text: str
    error: str | None = None
    """A short class of failure: `malformed_call unknown_tool bad_arguments exception timeout memory …`."""
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    images: tuple[bytes, ...] = ()
    seconds: float = 0.0
    level: str = ""
    """Isolation level of the sandbox that ran it; empty if none did."""
    truncated: bool = False
    """True if the observation was cut to its limit."""
    done: bool = False
    """True if the tool ends the episode (`submit`, `finish`)."""
    value: Any = None
    """The list that the tool returned, for rewards that take it as it is; None for any other value."""

    @property
    def isolation(self) -> str:
        """The level for display; `bare` is shown as no isolation."""
        return f"{self.level}: NO ISOLATION" if self.level == "bare" else self.level


@dataclass(frozen=True, slots=True)
class Turn:
    """One block of the conversation: the system and user messages of the prompt, an assistant turn, tool results.

    `start` and `end` are the span of its tokens in the episode. The turns of an episode form a tree: where the history
    of a request differs from the recorded one, its new turns continue an earlier one.
    """

    index: int
    role: str
    """system | user | assistant | tool"""
    messages: tuple[Message, ...]
    start: int
    end: int
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    """The results of a tool turn: one for each call of the assistant turn before it."""
    stop_reason: StopReason | None = None
    weights_version: str = ""
    started: float = 0.0  # seconds since the epoch
    seconds: float = 0.0
    reward: float | None = None
    """Reward from user or environment for the assistant turn before this one; for this one if there was no answer."""
    diverged: bool = False  # run again for a what-if, user or environment said otherwise (of a model's turn: spoke up)
    parent: int | None = None
    """Index of the turn that this one continues; None: the previous turn. `ROOT`: none; it starts another context."""
    images: tuple[bytes, ...] = ()
    """Images of its messages (prompt or user) in order, besides those of its results."""
    player: str = ""
    """Name of the player whose conversation it is, in a game of several, or of an import's sub-agent; else empty."""

    @property
    def shown(self) -> tuple[bytes, ...]:
        """Its images and those of its results."""
        return (*self.images, *(image for result in self.results for image in result.images))


OF_PLAYER = "the reward of this player"
"""`RewardPart.detail` of a part that one player of a game has."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One named part of a reward: value × weight is added to the episode's reward."""

    name: str
    value: float
    weight: float = 1.0
    primary: bool = False
    detail: str = ""
    """Text for people: which test failed, what the judge said."""
    fakeable: bool = (
        False  # tests ran in the process of the solution, which could have forged their result
    )


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a pack's data."""

    id: str
    pack: str
    family: str
    split: str
    """train | validation | test | heldout (families that never appear in training)"""
    prompt: Sequence[Message]
    """A tuple; an agent gets a list of its own."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Everything else of the row: hidden tests, set-up code, the expected answer."""
    tools: tuple[str, ...] | None = None
    """Names of the tools this row may use; None: all of the pack's."""

    def __getitem__(self, name: str) -> Any:
        """Return a field of `data`. Raises KeyError."""
        return self.data[name]


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task. Reward is the weighted sum of its parts, derived, never set; None, not 0, if ungraded.

    `tokens` holds the spans of the turns in turn order. If the turns are a chain, that is the sequence that the model
    saw; if they branch, each of `sequences` is.
    """

    id: str
    task_id: str
    pack: str = ""
    family: str = ""
    run_id: str | None = None
    step: int | None = None
    group_id: str | None = None
    sample: int = 0
    """Number of the attempt within its group."""
    seed: int = 0
    kind: str = "rollout"
    """rollout | train | eval | chat | whatif | demo"""
    parent_id: str | None = None
    parent_turn: int | None = None
    weights_version: str = ""
    turns: tuple[Turn, ...] = ()
    tokens: Tokens = field(default_factory=Tokens.empty)
    reward_parts: tuple[RewardPart, ...] = ()
    outcome: Outcome | None = None
    error: str = ""
    """The error, if the outcome is one."""
    flags: tuple[str, ...] = ()
    fact: str = ""  # a `Fact` value once a training step decided; empty before
    advantage: float | None = None
    started: float = 0.0
    ended: float = 0.0

    @property
    def graded(self) -> bool:
        """Whether it was scored. Episodes with an infrastructure error or without a reward part were not."""
        return bool(self.reward_parts) and (self.outcome is None or not self.outcome.is_error)

    @property
    def reward(self) -> float | None:
        """The weighted sum of the reward parts; None if it was not graded."""
        return sum(part.value * part.weight for part in self.reward_parts) if self.graded else None

    @property
    def graded_reward(self) -> float:
        """The reward of an episode that is known to be graded. Raises ValueError if it is not."""
        if (reward := self.reward) is None:
            raise ValueError(f"episode {self.id} was not graded")
        return reward

    @property
    def players(self) -> dict[str, float]:
        """The reward of each player of a game that the model played, by its name; empty if there are none."""
        return {part.name: part.value for part in self.reward_parts if part.detail == OF_PLAYER}

    @property
    def primary(self) -> float | None:
        """Value of the primary part, None if the episode was not graded."""
        return next((part.value for part in self.reward_parts if part.primary), None)

    @property
    def solved(self) -> bool:
        return self.outcome is Outcome.SOLVED

    @property
    def trained_tokens(self) -> int:
        return int(self.tokens.trained_mask.sum())

    @property
    def tool_calls(self) -> int:
        return sum(len(turn.calls) for turn in self.turns)

    @property
    def tool_errors(self) -> int:
        return sum(1 for turn in self.turns for result in turn.results if result.error)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of all turns in the order they were made; `chain` gives the conversation of one branch."""
        return tuple(message for turn in self.turns for message in turn.messages)

    @property
    def parents(self) -> tuple[int, ...]:
        """For each turn the index of the one that it continues, or `ROOT`."""
        return tuple(map(self.parent_of, range(len(self.turns))))

    def parent_of(self, turn: int) -> int:
        """Return the index of the turn that a turn continues, or `ROOT`.

        An impossible parent, as in a half-written run, counts as none: it must be smaller than the index.
        """
        given = self.turns[turn].parent
        return turn - 1 if given is None else given if 0 <= given < turn else ROOT

    @property
    def linear(self) -> bool:
        """Whether each turn continues the one before it: there is one branch."""
        return all(turn.parent in (None, index - 1) for index, turn in enumerate(self.turns))

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """Turn indices from a root to each leaf, in the order of the leaves."""
        parents = self.parents
        leaves = sorted({*range(len(parents))} - {*parents})
        return tuple(path_to(parents, index) for index in leaves)

    @property
    def sequences(self) -> tuple[Branch, ...]:
        """The token sequence of each branch; a sampled token on several is trained in the first of them."""
        mask = self.tokens.trained_mask
        if self.linear:
            return (Branch(tuple(range(len(self.turns))), np.arange(len(mask)), mask),)
        n = len(mask)
        spans = [
            (min(turn.start, n), min(turn.end, n)) for turn in self.turns
        ]  # a half-written run has fewer tokens
        return tree_branches(self.branches, spans, mask)

    @property
    def main(self) -> Branch:
        """The last branch that begins with the first turn: the conversation as the agent left it."""
        return [branch for branch in self.sequences if branch.turns[:1] in ((), (0,))][-1]

    def chain(self, branch: Branch) -> Episode:
        """Return a branch as an episode whose turns are a chain; turn `n` is `branch.turns[n]`
        here. Rewards are kept.
        """
        if self.linear:
            return self
        kept: list[Turn] = []
        start = 0
        for index in branch.turns:
            turn = self.turns[index]
            end = start + turn.end - turn.start
            kept.append(replace(turn, index=len(kept), start=start, end=end, parent=None))
            start = end
        return replace(self, turns=tuple(kept), tokens=self.tokens.take(branch.positions))

    @property
    def images(self) -> tuple[bytes, ...]:
        """Images that the ids have tokens for, in order: those of the prompt, of users and of tool results."""
        found = [image for turn in self.turns for image in turn.shown]
        if not found:
            return ()
        known = {digest(image): image for image in found}
        seen = (
            message for turn in self.turns if turn.end > turn.start for message in turn.messages
        )
        return tuple(
            known.get(part["image"].removeprefix(HASH), b"") for m in seen for part in images_of(m)
        )

    def with_(self, **changes: Any) -> Episode:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task in one step."""

    id: str
    task_id: str
    step: int
    episodes: tuple[Episode, ...]

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(episode.reward for episode in self.episodes)


__all__ = [
    "FAULTS",
    "OF_PLAYER",
    "ROOT",
    "TOP_K",
    "AgentState",
    "Branch",
    "Drift",
    "Episode",
    "Fact",
    "Float32",
    "Generation",
    "Group",
    "Int8",
    "Int32",
    "Message",
    "Origin",
    "Outcome",
    "RewardPart",
    "Sampling",
    "StopReason",
    "Support",
    "Task",
    "Tokens",
    "ToolCall",
    "ToolResult",
    "ToolSchema",
    "TrainSignals",
    "Turn",
    "group_pairs",
    "kind_of",
    "new_id",
    "no_support",
    "read_fact",
    "stored_facts",
    "supports",
]
