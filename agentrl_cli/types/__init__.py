"""The nouns that everything passes around: small frozen dataclasses and enums.

Not here: behaviour. Lengths, returns and finished-ness are derived, never stored twice. An episode is an
append-only list of token ids; what a model sampled is stored with its log-probability and never decoded and
encoded again. Every token carries its origin, and the loss mask follows from the origin.
Nothing in this module imports torch; arrays are numpy.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl_cli.types.sampling import Sampling as Sampling
from agentrl_cli.types.signals import TrainSignals as TrainSignals

Message = dict[str, Any]
"""An OpenAI chat message: `role`, `content` and, where they apply, `tool_calls`, `tool_call_id`, `name`."""

ToolSchema = dict[str, Any]
"""An OpenAI function schema: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]

TOP_K = 5
"""How many alternatives are stored per sampled token."""

_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id() -> str:
    """A time-ordered, collision-safe id of 14 characters (Crockford base 32: 45 bits of ms, 25 of chance)."""
    number = (int(time.time() * 1000) << 25) | secrets.randbits(25)
    return "".join(_BASE32[(number >> shift) & 31] for shift in range(65, -1, -5))


class Origin(IntEnum):
    """Where a token came from. Only MODEL tokens are ever trained."""

    TEMPLATE = 0
    """Written by the chat template: role markers, separators, generation prompts."""
    SYSTEM = 1
    USER = 2
    TOOL = 3
    MODEL = 4
    """Sampled by the policy (the stop token included)."""
    FORCED = 5
    """Written in the model's turn by us, a closed truncated turn for instance: never trained."""


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model sampled a stop token; it is part of the ids."""
    STOP_STRING = "stop_string"
    LENGTH = "length"
    """The token limit of this turn or of the episode was reached."""
    CANCELLED = "cancelled"


class AgentState(StrEnum):
    """The states of the agent loop (rollout.py)."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class Outcome(StrEnum):
    """How an episode ended; every episode ends with exactly one."""

    SOLVED = "solved"
    """The pack's primary reward part is 1."""
    FAILED = "failed"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TOKENS = "truncated_tokens"
    TOO_LONG = "too_long"
    """The prompt does not fit into the context."""
    TIMEOUT = "timeout"
    ENV_ERROR = "env_error"
    """A tool server, a hook or a grader crashed: never scored, never trained."""
    SANDBOX_ERROR = "sandbox_error"
    UNGRADED = "ungraded"  # the primary reward is None: it does not apply, and nothing says what the episode is worth
    DRIFT = "drift"  # what was appended is not what the template writes, and such turns are not trained
    CANCELLED = "cancelled"

    @property
    def is_error(self) -> bool:
        """True where the fault is ours, or nothing was graded: such an episode is masked, never scored zero."""
        ours = (Outcome.ENV_ERROR, Outcome.SANDBOX_ERROR, Outcome.CANCELLED, Outcome.TIMEOUT)
        return self in (*ours, Outcome.DRIFT, Outcome.UNGRADED)


class Fact(StrEnum):
    """What a training step did with an episode (`episodes.fact`)."""

    TRAINED = "trained"
    SKIPPED_ZERO_VARIANCE = "skipped:zero_variance"
    SKIPPED_ENV_ERROR = "skipped:env_error"
    SKIPPED_SANDBOX_ERROR = "skipped:sandbox_error"
    SKIPPED_TIMEOUT = "skipped:timeout"
    SKIPPED_CANCELLED = "skipped:cancelled"
    SKIPPED_TOO_LONG = "skipped:too_long"
    SKIPPED_OVERLONG = "skipped:overlong"
    SKIPPED_DRIFT = "skipped:drift"
    SKIPPED_STALE = "skipped:stale"
    SKIPPED_UNGRADED = "skipped:ungraded"
    SKIPPED_BAD_TOKENS = "skipped:bad_tokens"  # no model can have sampled what is stored (learning/sound.py)
    SKIPPED_NO_MODEL_TOKENS = "skipped:no_model_tokens"
    SKIPPED_GROUP_TOO_SMALL = "skipped:group_too_small"
    SKIPPED_BASELINE = "skipped:baseline"  # a greedy attempt to compare with: evaluated, never trained
    SKIPPED_NO_BASELINE = "skipped:no_baseline"  # the greedy attempt at the same task could not be graded


@dataclass(frozen=True, slots=True)
class Generation:
    """What a policy sampled for one turn of one episode. All arrays have length n, top ones [n, TOP_K]."""

    ids: Int32
    logp_sampled: Float32
    """log-prob under the distribution really sampled (after penalties, forbidden tokens, top-k, top-p, min-p)."""
    logp_policy: Float32
    """log-prob under the policy at the sampling temperature, untruncated; ratios use this one."""
    entropy: Float32
    """Entropy in nats of the untruncated distribution at the sampling temperature."""
    top_ids: Int32
    top_logps: Float32
    stop_reason: StopReason
    weights_version: str
    seconds: float = 0.0
    forced: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None
    """True where the token was the only one that `Sampling.allow` allowed; None: nowhere."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Parallel per-token arrays of one span. NaN in the float arrays where a token was not sampled."""

    ids: Int32
    origin: Int8
    logp_sampled: Float32
    logp_policy: Float32
    entropy: Float32
    top_ids: Int32
    """[n, TOP_K]; -1 where there is none."""
    top_logps: Float32

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_mask(self) -> NDArray[np.bool_]:
        """[n] bool: the tokens a loss may touch, which are the sampled ones."""
        return np.asarray(self.origin == Origin.MODEL)

    def slice(self, start: int, end: int) -> Tokens:
        """The tokens of a span."""
        return Tokens(*(getattr(self, item.name)[start:end] for item in fields(self)))

    @classmethod
    def empty(cls) -> Tokens:
        return cls.given([], [])

    @classmethod
    def given(cls, ids: Sequence[int] | Int32, origin: Sequence[int] | Int8) -> Tokens:
        """Tokens that were not sampled (template, system, user, tool)."""
        n = len(ids)
        nan = np.full(n, np.nan, np.float32)
        return cls(
            np.asarray(ids, np.int32),
            np.asarray(origin, np.int8),
            nan,
            nan.copy(),
            nan.copy(),
            np.full((n, TOP_K), -1, np.int32),
            np.full((n, TOP_K), np.nan, np.float32),
        )

    @classmethod
    def sampled(cls, generation: Generation) -> Tokens:
        """The tokens of a generation, of origin MODEL but for the forced ones."""
        origin = np.full(len(generation.ids), Origin.MODEL, np.int8)
        if generation.forced is not None:
            origin[generation.forced] = Origin.FORCED
        return cls(
            generation.ids,
            origin,
            generation.logp_sampled,
            generation.logp_policy,
            generation.entropy,
            generation.top_ids,
            generation.top_logps,
        )

    @classmethod
    def concat(cls, parts: Sequence[Tokens]) -> Tokens:
        if not parts:
            return cls.empty()
        return cls(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(cls)))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it. `error` says what was wrong with a malformed one."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str
    """The exact text between the call's markers."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered. A tool that fails is an observation, not an ending."""

    text: str
    error: str | None = None
    """A short class of failure: `malformed_call unknown_tool bad_arguments exception timeout memory …`."""
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    images: tuple[bytes, ...] = ()
    seconds: float = 0.0
    level: str = ""
    """Isolation level of the sandbox that ran it, empty where none did."""
    truncated: bool = False
    """True where the observation was cut to its limit."""
    done: bool = False
    """True where the tool ends the episode (`submit`, `finish`)."""

    @property
    def isolation(self) -> str:
        """The level as people are to read it: at `bare` that there was none."""
        return f"{self.level}: NO ISOLATION" if self.level == "bare" else self.level


@dataclass(frozen=True, slots=True)
class Turn:
    """One block of the conversation: the system and user messages of the prompt, an assistant turn, tool results.

    `start` and `end` are the span of its tokens in the episode.
    """

    index: int
    role: str
    """system | user | assistant | tool"""
    messages: tuple[Message, ...]
    start: int
    end: int
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    """Of a tool turn: one for each call of the assistant turn before it."""
    stop_reason: StopReason | None = None
    weights_version: str = ""
    started: float = 0.0  # seconds since the epoch
    seconds: float = 0.0
    reward: float | None = None
    """What user or environment gave for the assistant turn before this one; where nothing was said, for this one."""
    diverged: bool = False  # run again for a what-if, user or environment said otherwise (of a model's turn: spoke up)


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One named part of a reward: value × weight is added to the episode's reward."""

    name: str
    value: float
    weight: float = 1.0
    primary: bool = False
    detail: str = ""
    """Text for people: which test failed, what the judge said."""
    fakeable: bool = False  # tests ran in the process of the solution, which could have forged their result


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a pack's data."""

    id: str
    pack: str
    family: str
    split: str
    """train | validation | test | heldout (families that never appear in training)"""
    prompt: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    """Everything else of the row: hidden tests, set-up code, the expected answer."""
    tools: tuple[str, ...] | None = None
    """Names of the tools this row may use; None: all of the pack's."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task. Reward is the weighted sum of its parts, derived, never set; None, not 0, if ungraded."""

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
    """What happened, where the outcome is an error."""
    flags: tuple[str, ...] = ()
    fact: str = ""
    """A `Fact` value once a training step decided; empty before."""
    advantage: float | None = None
    started: float = 0.0
    ended: float = 0.0

    @property
    def graded(self) -> bool:
        """Whether it was scored. What ended in an error of ours was not, nor what has no reward part."""
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
    def primary(self) -> float | None:
        """Value of the primary part, None where the episode was not graded."""
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
        return tuple(message for turn in self.turns for message in turn.messages)

    @property
    def images(self) -> tuple[bytes, ...]:
        """Images that the tools answered and the ids have tokens for, in order."""
        seen = (turn for turn in self.turns if turn.end > turn.start)
        return tuple(image for turn in seen for result in turn.results for image in result.images)

    def with_(self, **changes: Any) -> Episode:
        """A copy with some fields changed."""
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
