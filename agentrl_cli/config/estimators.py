"""The advantage estimators: one record each, with everything that the rest of the program uses.

To add one: a function in learning/advantages.py (per token or turn: learning/turn_advantages.py), a record here, and a
test with numbers computed by hand. No other code depends on an estimator's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from agentrl_cli.config.choice import Algorithm, Options
from agentrl_cli.types.section import Positive, Unit

Compares = Literal["rewards", "group", "batch", "nothing"]
Needs = Literal["", "values", "baseline", "teacher"]


@dataclass(frozen=True, slots=True)
class Estimator(Algorithm):
    """An advantage estimator."""

    compares: Compares
    """rewards: only the episodes' rewards within their group, so equal rewards carry no signal; group: reward parts or
    turns within the group, which may differ although the rewards are equal; batch: all episodes; nothing."""
    needs: Needs
    """Required inputs: values of a value head, greedy attempts as the baseline, a teacher's log-probabilities."""


class Normalised(Options):
    """Options of estimators that divide by a standard deviation."""

    eps: float = Field(default=1e-4, ge=0, description="added to a standard deviation")


class TokenDiscount(Options):
    """Options of reinforce_pp."""

    gamma: Unit = Field(default=1.0, description="discount per trained token")


class Gae(TokenDiscount):
    """Options of gae."""

    lam: Unit = Field(
        default=1.0, alias="lambda", description="1 trusts the returns, 0 the value head"
    )
    value_lr: float = Field(default=1e-3, gt=0, description="peak learning rate of the value head")
    value_clip: float | None = Field(
        default=0.2,
        gt=0,
        description="clips the value loss beyond this distance from the old value; null: never",
    )
    value_bootstrap: bool = Field(
        default=False,
        description="bootstrap a truncated episode from the value of its last state; false: it ends there with"
        " its reward (as in verl and TRL)",
    )
    value_coef: float = Field(
        default=0.0,
        ge=0,
        description="weight of the value loss in the policy's gradient; 0: train the head only",
    )


class BestOf(Normalised):
    """Options of pass_at_k."""

    k: Positive = Field(default=2, description="k of pass@k")


class Turns(Normalised):
    """Options of turn_returns."""

    gamma: Unit = Field(default=1.0, description="discount per assistant turn")


class TurnsAndEpisode(Turns):
    """Options of mt_grpo and gigpo."""

    turn_coef: float = Field(
        default=1.0, ge=0, description="weight of the turn's advantage beside the episode's"
    )


class Distill(Normalised):
    """Options of distill."""

    teacher: str = Field(
        default="self",
        description="self: the weights that are trained, before the step; a model, a folder, an adapter's folder,"
        " RUN@best; or http://host:8000/v1, a server whose /completions gives log-probabilities of given ids",
    )
    hint: str = Field(
        default="",
        description="appended to the prompt's last user message for the teacher alone; {answer}, {tests} and any other"
        " field of the task's row are filled in",
    )
    form: Literal["sampled", "top_k", "full"] = Field(
        default="sampled",
        description="sampled: the sampled token's reverse KL is its advantage; full: the KL over the vocabulary is a"
        " term of the loss; top_k: over the student's k likeliest tokens and one class of all others; both need a local"
        " teacher",
    )
    top_k: Positive = Field(default=20, description="k of the form top_k")
    coef: float = Field(default=1.0, ge=0, description="weight of the teacher")
    reward_coef: float = Field(
        default=0.0, ge=0, description="weight of the reward's advantage (grpo) beside it"
    )
    server_model: str = Field(default="", description="a server's name of the teacher")
    api_key_env: str = Field(
        default="", description="environment variable that holds the server's key"
    )


class RunningMean(Options):
    """Options of rae."""

    decay: float = Field(
        default=0.95, ge=0, lt=1, description="share of a running mean that one more game leaves"
    )


class CustomEstimator(TurnsAndEpisode, BestOf, Gae, RunningMean):
    """Options of a user's own function: every field of AdvantageInput that is a setting."""

    gamma: Unit = Field(default=1.0, description="discount per token or turn")


_EPISODE = "agentrl_cli.learning.advantages"
_TURN = "agentrl_cli.learning.turn_advantages"

ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator(
        function=f"{_EPISODE}:grpo",
        options=Normalised,
        aggregation="",
        text="(R − group mean) / (group std + eps)",
        source="https://arxiv.org/abs/2402.03300",
        compares="rewards",
        needs="",
    ),
    "dr_grpo": Estimator(
        function=f"{_EPISODE}:dr_grpo",
        options=Options,
        aggregation="seq_mean_norm",
        text="R − group mean, no standard deviation",
        source="https://arxiv.org/abs/2503.20783",
        compares="rewards",
        needs="",
    ),
    "batch": Estimator(
        function=f"{_EPISODE}:batch",
        options=Normalised,
        aggregation="",
        text="(R − group mean) / (std of the whole batch + eps), Lite PPO",
        source="https://arxiv.org/abs/2508.08221",
        compares="rewards",
        needs="",
    ),
    "rloo": Estimator(
        function=f"{_EPISODE}:rloo",
        options=Options,
        aggregation="",
        text="R − mean of the group's other episodes",
        source="https://arxiv.org/abs/2402.14740",
        compares="rewards",
        needs="",
    ),
    "reinforce_pp": Estimator(
        function=f"{_EPISODE}:reinforce_pp",
        options=TokenDiscount,
        aggregation="",
        text="discounted return of each token, whitened over the batch's tokens",
        source="https://arxiv.org/abs/2501.03262",
        compares="batch",
        needs="",
    ),
    "reinforce_pp_baseline": Estimator(
        function=f"{_EPISODE}:reinforce_pp_baseline",
        options=Options,
        aggregation="",
        text="R − group mean, whitened over the batch's tokens",
        source="https://arxiv.org/abs/2501.03262",
        compares="rewards",
        needs="",
    ),
    "remax": Estimator(
        function=f"{_EPISODE}:remax",
        options=Options,
        aggregation="",
        text="return from each token on − reward of a greedy attempt",
        source="https://arxiv.org/abs/2310.10505",
        compares="nothing",
        needs="baseline",
    ),
    "opo": Estimator(
        function=f"{_EPISODE}:opo",
        options=Options,
        aggregation="",
        text="R − length-weighted group mean",
        source="https://arxiv.org/abs/2505.23585",
        compares="rewards",
        needs="",
    ),
    "gdpo": Estimator(
        function=f"{_EPISODE}:gdpo",
        options=Normalised,
        aggregation="",
        text="weighted sum of the reward parts, each normalised in its group, then over the batch",
        source="https://arxiv.org/abs/2601.05242",
        compares="group",
        needs="",
    ),
    "pass_at_k": Estimator(
        function=f"{_EPISODE}:pass_at_k",
        options=BestOf,
        aggregation="",
        text="(E[best of k with this episode] − E[best of k]) / std of the best of k",
        source="https://arxiv.org/abs/2508.10751",
        compares="rewards",
        needs="",
    ),
    "grpo_passk": Estimator(
        function=f"{_EPISODE}:grpo_passk",
        options=Normalised,
        aggregation="",
        text="(best − second best) / (group std + eps) for the group's best, 0 for the others",
        source="https://arxiv.org/abs/2503.19595",
        compares="rewards",
        needs="",
    ),
    "gae": Estimator(
        function=f"{_TURN}:gae",
        options=Gae,
        aggregation="",
        text="generalised advantage estimation with a value head (PPO), whitened over the batch's tokens",
        source="https://arxiv.org/abs/1506.02438",
        compares="batch",
        needs="values",
    ),
    "turn_returns": Estimator(
        function=f"{_TURN}:turn_returns",
        options=Turns,
        aggregation="",
        text="discounted return of each turn, normalised over the group at the same turn",
        source="http://incompleteideas.net/book/the-book.html",
        compares="group",
        needs="",
    ),
    "mt_grpo": Estimator(
        function=f"{_TURN}:mt_grpo",
        options=TurnsAndEpisode,
        aggregation="",
        text="grpo + turn_coef × the rewards from each turn on, normalised over the group at the same turn",
        source="https://arxiv.org/abs/2505.11821",
        compares="group",
        needs="",
    ),
    "turn_gdpo": Estimator(
        function=f"{_TURN}:turn_gdpo",
        options=TurnsAndEpisode,
        aggregation="",
        text="gdpo + turn_coef × the rewards from each turn on, each tool's and the world's normalised apart",
        source="https://arxiv.org/abs/2601.05242",
        compares="group",
        needs="",
    ),
    "gigpo": Estimator(
        function=f"{_TURN}:gigpo",
        options=TurnsAndEpisode,
        aggregation="",
        text="grpo + turn_coef × advantage among turns of the group that started from the same state",
        source="https://arxiv.org/abs/2505.10978",
        compares="group",
        needs="",
    ),
    "maxrl": Estimator(
        function=f"{_EPISODE}:maxrl",
        options=Options,
        aggregation="",
        text="(R − group mean) / group mean, for rewards of 0 and 1: hard tasks weigh more",
        source="https://arxiv.org/abs/2602.02710",
        compares="rewards",
        needs="",
    ),
    "rae": Estimator(
        function=f"{_EPISODE}:rae",
        options=RunningMean,
        aggregation="",
        text="a player's reward − the running mean of its game and player before this episode, for self-play; without"
        " players, of the task's family",
        source="https://arxiv.org/abs/2506.24119",
        compares="nothing",
        needs="",
    ),
    "distill": Estimator(
        function=f"{_EPISODE}:distill",
        options=Distill,
        aggregation="",
        text="coef × (log p of a teacher − log p) of each sampled token + reward_coef × grpo: on-policy distillation",
        source="https://arxiv.org/abs/2306.13649",
        compares="nothing",
        needs="teacher",
    ),
}
