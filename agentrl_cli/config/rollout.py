"""The section `rollout`: how episodes are sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl_cli.types import Sampling
from agentrl_cli.types.section import Count, Group, OnOff, Positive, Repeats, Seconds, Section, Unit

MIN_ROOM = 8
"""An assistant turn with less room than this many tokens is not begun."""


class ObservationConfig(Group):
    """The length of a tool result."""

    tokens: Positive = Field(default=256, description="tokens of one tool result before it is cut")
    chars: Positive | None = Field(
        default=None, description="characters of one tool result before it is cut; null: no limit"
    )
    cut: Literal["left", "middle", "right"] = Field(
        default="middle", description="which part of it is cut out"
    )
    overflow: Literal["stop", "truncate_observation"] = Field(
        default="stop",
        description="if a result does not fit into the episode: end it, or cut the result further",
    )


class TimeoutConfig(Group):
    """Time limits against what hangs."""

    episode: Seconds = Field(
        default=120.0, description="seconds of an episode's tools, environment and grading, against what hangs; the"
        " model's turns do not count (max_turns, max_tokens), nor does what other programs take of the processors",
    )  # fmt: skip
    tool: Seconds = Field(
        default=10.0, description="seconds of one tool call, unless the tool sets its own"
    )


class TruncationConfig(Group):
    """Restrictions of sampling, by which it differs from the policy's own distribution."""

    bare = True

    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="below 1 truncates sampling: training warns and corrects",
    )
    top_k: Count = Field(default=0, description="0: the whole vocabulary")
    min_p: Unit = Field(
        default=0.0, description="drop tokens less likely than this share of the likeliest"
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="above 1 makes tokens of the context less likely; like top_p a truncation",
    )
    bad_tokens: list[str] = Field(
        default_factory=list,
        description="texts of tokens that are never sampled; like top_p a truncation",
    )
    replay: bool = Field(
        default=False,
        description="store the tokens that top_p, top_k and min_p left to each draw, and train under the distribution"
        " over them: exact, where a correction of the ratio is not; needs a local policy",
    )


class RolloutConfig(Section):
    """How episodes are sampled."""

    group_size: Repeats = Field(
        default=8, description="episodes of one task in a step; advantages are relative to them"
    )
    prompts_per_step: Repeats = Field(default=8, description="tasks in a training step")
    resample_rounds: Count = Field(
        default=0,
        description="dynamic sampling: how many times a step samples further tasks while fewer than prompts_per_step"
        " groups carry signal; 0: never",
    )
    concurrency: Positive = Field(default=64, description="episodes that run at once")
    max_turns: Positive = Field(default=6, description="assistant turns of an episode")
    max_new_tokens: Positive = Field(default=256, description="tokens of one assistant turn")
    max_tokens: Positive = Field(default=1024, description="tokens of an episode, prompt included")
    max_parallel_calls: Positive = Field(
        default=4, description="tool calls answered in one turn; more are refused with a text"
    )
    max_user_turns: Positive | None = Field(
        default=None,
        description="tool or user messages before the episode is cut off; null: no limit",
    )
    response_tokens: int | None = Field(
        default=None,
        ge=MIN_ROOM,
        lt=2**63,
        description="tokens of an episode after its prompt, besides max_tokens; null: no limit",
    )
    observation: ObservationConfig = Field(
        default_factory=ObservationConfig,
        description="tokens of one tool result before it is cut; with options: {tokens: 256, cut: left}",
    )
    timeout: TimeoutConfig = Field(
        default_factory=TimeoutConfig,
        description="seconds of an episode; with options: {episode: 120, tool: 10}",
    )
    async_staleness: Count = Field(
        default=0,
        description="steps that sampling may run ahead of the update: 0 samples and trains in turn; above 0 the sampler"
        " has its own copy of the weights and `algo.off_policy: auto` is tis",
    )
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy")
    truncation: TruncationConfig = Field(
        default_factory=TruncationConfig,
        description="top_p, top_k and others that restrict sampling: training warns and corrects",
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="texts that end an assistant turn, besides the template's own stop tokens",
    )
    memory: str = Field(
        default="auto",
        description="memory for the KV cache: 2GiB, 512MB …; auto: half of the free memory",
    )
    cuda_graphs: Annotated[Literal["auto", "off"], OnOff] = Field(
        default="off",
        description="auto: on a GPU decode steps have fixed shapes and are captured as CUDA graphs, where that has the"
        " model's own numbers (not with `deterministic`, nor with an adapter's dropout beside `async_staleness`); never"
        " run on a GPU yet, so off by default; on a CPU this does nothing",
    )

    @property
    def truncates(self) -> bool:
        """True if sampling differs from the policy's own distribution, so that training must correct for it."""
        return not self.truncation.replay and (
            self.sampling().truncated or bool(self.truncation.bad_tokens)
        )

    def sampling(self, **changes: Any) -> Sampling:
        """Return the sampling settings of a turn, with `changes`."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.truncation.top_p,
            "top_k": self.truncation.top_k,
            "min_p": self.truncation.min_p,
            "repetition_penalty": self.truncation.repetition_penalty,
            "stop_strings": tuple(self.stop),
            "max_new_tokens": self.max_new_tokens,
            "keep_support": self.truncation.replay,
        }
        return Sampling(**given | changes)
