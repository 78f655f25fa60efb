"""Every key of `algo` changes the number that it should, what cannot be is refused, and steered coefficients move."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl_cli.config import AlgoConfig, Config, load_config
from agentrl_cli.config.choice import option_names
from agentrl_cli.config.estimators import ESTIMATORS, Distill
from agentrl_cli.config.losses import LOSSES
from agentrl_cli.config.models import leaves
from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.learning.advantages import drops_equal, has_signal, needs, options
from agentrl_cli.learning.coefficients import Coefficients
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.losses import AGGREGATIONS
from agentrl_cli.learning.objective import aggregation_name, loss_config
from agentrl_cli.learning.protocols import Update
from agentrl_cli.learning.update import Learner
from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Origin, Outcome, RewardPart, Tokens, ToolResult, Turn
from tests.helpers.cli import Cli
from tests.helpers.train import write_project
from tests.learning.test_update import SPREAD, config, episodes, weights


@pytest.fixture(scope="module")
def groups(start: Any) -> list[list[Episode]]:
    def one(episode: Episode) -> Episode:
        n, mask = len(episode.tokens), episode.tokens.trained_mask
        first = int(np.flatnonzero(mask)[0])
        turns = (Turn(0, "user", (), 0, first), Turn(1, "assistant", (), first, n))
        outcome = Outcome.TRUNCATED_TOKENS if episode.sample == 1 else Outcome.FAILED
        shift = np.where(np.arange(n) % 2, np.log(3), -np.log(3)).astype(np.float32)
        tokens = replace(
            episode.tokens,
            logp_sampled=episode.tokens.logp_sampled + shift,
            logp_policy=episode.tokens.logp_policy + shift,
        )
        return episode.with_(turns=turns, tokens=tokens, outcome=outcome)

    return [[one(episode) for episode in group] for group in episodes(start, SPREAD)]


def algo(**keys: Any) -> AlgoConfig:
    return Config.model_validate({"algo": keys}).algo


@pytest.fixture(scope="module")
def learned(start: Any, groups: list[list[Episode]]) -> Callable[[dict[str, Any]], Any]:
    """Weights after `run` by these keys; each combination is trained once."""
    known: dict[str, Any] = {}

    def of(keys: dict[str, Any]) -> Any:
        if repr(keys) not in known:
            known[repr(keys)] = weights(run(start, groups, keys)[0])
        return known[repr(keys)]

    return of


def furthest(first: Any, second: Any) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def run(
    start: Any, groups: list[list[Episode]], keys: Mapping[str, Any], steps: int = 2
) -> tuple[Any, list[Update]]:
    """Some updates from a slightly moved start, so that there is a distance to the reference."""
    torch.manual_seed(0)
    model = copy.deepcopy(start)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.03 * torch.randn_like(tensor)
    algo, _ = load_config(flags={f"algo.{key}": value for key, value in keys.items()})
    settings = config(algo=algo.algo.model_dump(), train={"lr": 3e-2})
    chosen = settings.algo.advantage
    teacher = Teacher(chosen, start) if isinstance(chosen, Distill) else None
    learner = Learner(model, settings, reference=start, teacher=teacher)
    baselines = {f"g{g}": 0.25 for g in range(2)}
    return model, [learner.update(groups, step, baselines) for step in range(steps)]


MANY = {"epochs": 3}
COV = {"name": "clip_cov", "fraction": 0.5, "low": -100.0, "high": 100.0}
KEYS: dict[str, tuple[dict[str, Any], Any]] = {
    "advantage": ({}, "rloo"),
    "loss": (MANY, "sapo"),
    "aggregation": ({}, "seq_mean"),
    "kl": ({}, 0.5),
    "kl.estimate": ({"kl": 0.5}, "k2"),
    "kl.where": ({"kl": 0.5, "advantage": "dr_grpo"}, "reward"),
    "kl.unbiased": ({"kl": 0.5}, True),
    "kl.target": ({"kl": 0.5}, 1e-6),
    "kl.ref_ema": ({"kl": 0.5}, 0.5),
    "kl.ref_ema_steps": ({"kl": 0.5, "kl.ref_ema": 0.5}, 2),
    "entropy": ({}, 0.1),
    "entropy.target": ({"entropy": 0.1}, 1e-3),
    "entropy.step": ({"entropy": 0.1, "entropy.target": 100.0}, 0.5),
    "entropy.share": ({}, 0.5),
    "off_policy": ({}, "tis"),
    "off_policy.cap": ({"off_policy": "tis"}, 1.1),
    "off_policy.floor": ({"off_policy": "tis"}, 0.9),
    "off_policy.mask": ({}, 1e-6),
    "off_policy.bypass": ({}, True),
    "off_policy.reject": ({"off_policy.reject_upper": 1.5}, "token_k1"),
    "off_policy.reject_upper": (
        {"off_policy.reject": "token_k1", "off_policy.reject_upper": 1.5},
        5.0,
    ),
    "off_policy.reject_lower": (
        {"off_policy.reject": "token_k1", "off_policy.reject_upper": 5.0},
        0.5,
    ),
    "epochs": ({}, 2),
    "minibatches": ({}, 2),
}
OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "advantage.gamma": ({"name": "reinforce_pp"}, 0.5),
    "advantage.lambda": ({"name": "gae"}, 0.5),
    "advantage.value_lr": ({"name": "gae"}, 1e-1),
    "advantage.value_clip": ({"name": "gae", "value_lr": 1e-1}, 1e-3),
    "advantage.value_bootstrap": ({"name": "gae", "value_lr": 1e-1}, True),
    "advantage.value_coef": ({"name": "gae"}, 0.5),
    "advantage.k": ({"name": "pass_at_k"}, 1),
    "advantage.turn_coef": ({"name": "gigpo"}, 3.0),
    "advantage.eps": ({"name": "grpo"}, 1.0),
    "advantage.coef": ({"name": "distill"}, 3.0),
    "advantage.reward_coef": ({"name": "distill"}, 1.0),
    "advantage.decay": ({"name": "rae"}, 0.1),
    "advantage.form": ({"name": "distill"}, "full"),
    "advantage.top_k": ({"name": "distill", "form": "top_k"}, 2),
    "loss.clip_low": ({"name": "ppo_clip"}, 0.01),
    "loss.clip_high": ({"name": "ppo_clip"}, 0.01),
    "loss.clip_dual": ({"name": "ppo_clip"}, 1.001),
    "loss.positive": ({"name": "sapo"}, 3.0),
    "loss.negative": ({"name": "sapo"}, 3.0),
    "loss.fraction": (COV, 0.1),
    "loss.low": (COV, 0.5),
    "loss.high": (COV, 0.0),
    "loss.divergence": ({"name": "dppo", "threshold": 1e-3}, "kl"),
    "loss.threshold": ({"name": "dppo"}, 1e-6),
    "loss.kl_coef": ({"name": "kl_cov", "fraction": 0.5}, 0.0),
}
# Which teacher there is, and what it sees: tests/learning/test_ppo.py.
TEACHERS = {f"advantage.{key}" for key in ("teacher", "hint", "server_model", "api_key_env")}
# Keys that decide what is trained on and what it is worth, before any of this.
ELSEWHERE = {
    *("skip", "skip.zero_variance", "skip.overlong", "skip.void", "skip.drift", "skip.groups"),
    *("length_penalty", "length_penalty.overlong", "length_penalty.buffer"),
}


def test_no_key_is_left_out() -> None:
    every = {key.removeprefix("algo.") for key in leaves() if key.startswith("algo.")}
    assert every - ELSEWHERE == set(KEYS) | set(OPTIONS) | TEACHERS


@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_what_is_learned(learned: Any, key: str) -> None:
    base, value = KEYS[key]
    assert furthest(learned(base), learned({**base, key: value})) > 1e-5


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_changes_what_is_learned(learned: Any, key: str) -> None:
    base, value = OPTIONS[key]
    choice, _, option = key.partition(".")
    more = MANY if choice == "loss" or option == "value_clip" else {}
    plain = learned({choice: base, **more})
    assert furthest(plain, learned({choice: {**base, option: value}, **more})) > 1e-5


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_can_be_trained_with(
    start: Any, groups: list[list[Episode]], name: str
) -> None:
    given = groups
    if name == "mt_grpo":
        given = [[_with_tool_reward(episode) for episode in group] for group in groups]
    _, (update,) = run(start, given, {"advantage": name}, steps=1)
    for episode in (e for group in given for e in group):
        found = update.signals[episode.id].advantage[episode.tokens.trained_mask]
        assert np.isfinite(found).all()
    assert update.metrics["grad_norm"] > 0


def _with_tool_reward(episode: Episode) -> Episode:
    n = len(episode.tokens)
    answered = Turn(2, "tool", (), n, n, results=(ToolResult("ok", reward=float(episode.sample)),))
    return episode.with_(turns=(*episode.turns, answered))


@pytest.mark.parametrize(
    ("loss", "aggregation"), [*zip(sorted(LOSSES), cycle(sorted(AGGREGATIONS)), strict=False)]
)
def test_micro_batches_give_the_gradient_of_the_whole(
    start: Any, groups: list[list[Episode]], loss: str, aggregation: str
) -> None:
    options: dict[str, Any] = {"fraction": 0.3, "low": -9.0, "high": 9.0}
    own = option_names(LOSSES[loss].options)
    keys = {
        "loss": {"name": loss} | {key: value for key, value in options.items() if key in own},
        "aggregation": aggregation,
        "kl": 0.1,
        "entropy": 0.01,
        "off_policy": "tis_sequence",
    }
    found: list[tuple[Tensor, dict[str, float]]] = []
    for budget in (4096, 1):
        model = copy.deepcopy(start)
        with torch.no_grad():
            model.lm_head.weight += 0.1
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        settings = config(algo=keys, train={"token_budget": budget, "lr": 1e3})
        learner: Any = Learner(model, settings, reference=start)
        learner.compute.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        metrics = learner.update(groups, 0).metrics
        moved = before - torch.cat([p.detach().flatten() for p in model.parameters()])
        found.append((moved, {name: metrics[name] for name in metrics if "time" not in name}))
    (whole, measured), (parts, again) = found
    assert float((whole - parts).norm() / whole.norm()) < 1e-5
    assert again == pytest.approx(measured, rel=1e-4, abs=1e-6)


def test_options_reach_the_estimator_and_the_loss() -> None:
    more = {"lambda": 0.8, "k": 3, "turn_coef": 0.7, "eps": 0.1, "decay": 0.5}
    own = {"lam": 0.8, "k": 3, "turn_coef": 0.7, "eps": 0.1, "decay": 0.5}
    gae, mine = {"gamma": 0.9, "lambda": 0.8}, {"name": "own.py:mine", "gamma": 0.9}
    assert options(algo(advantage={"name": "gae", **gae})) == {"gamma": 0.9, "lam": 0.8}
    assert options(algo(advantage=mine | more)) == {"gamma": 0.9, **own}
    named = algo(loss={"name": "sapo", "negative": 1.5}, kl="k1", correction_cap=4.0)
    c = loss_config(LearnerSettings.of(Config(algo=named)))
    assert (c.kl, c.correction_cap) == ("k1", 4.0)
    assert c.options.model_dump() == {"name": "sapo", "positive": 1.0, "negative": 1.5}


@pytest.mark.parametrize(
    ("sections", "correction"),
    [
        ({}, "none"),
        ({"rollout": {"top_k": 5}}, "tis"),
        ({"rollout": {"top_p": 0.9}}, "tis"),
        ({"rollout": {"top_k": 5}, "algo": {"off_policy": {"correction": "none"}}}, "none"),
        ({"algo": {"off_policy": {"correction": "mis_sequence"}}}, "mis_sequence"),
    ],
)
def test_what_was_sampled_from_another_distribution_is_corrected(
    sections: dict[str, Any], correction: str
) -> None:
    assert loss_config(LearnerSettings.of(Config.model_validate(sections))).correction == correction


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        ({}, (0.2, 0.28)),
        ({"loss": "cispo"}, (0.2, 0.28)),
        ({"loss": "gspo"}, (3e-4, 4e-4)),
        ({"loss": "geo_mean"}, (0.4, 0.4)),
        ({"loss": {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04}}, (0.03, 0.04)),
        ({"loss": "gspo", "clip_high": 0.04, "clip_low": None}, (3e-4, 0.04)),  # the old key
    ],
)
def test_the_clip_bounds_that_a_paper_has_where_none_are_set(
    keys: dict[str, Any], bounds: tuple[float, float]
) -> None:
    c: Any = loss_config(LearnerSettings.of(Config(algo=algo(**keys)))).options
    assert (c.clip_low, c.clip_high) == bounds


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "token_mean"),
        ({"loss": "dapo"}, "token_mean"),
        ({"loss": "cispo"}, "token_mean"),
        ({"loss": "gspo"}, "seq_mean"),
        ({"loss": "sapo"}, "seq_mean"),
        ({"loss": "geo_mean"}, "seq_mean"),
        ({"advantage": "dr_grpo"}, "seq_mean_norm"),
        ({"loss": "gspo", "aggregation": "token_mean"}, "token_mean"),
        # verl's names
        ({"aggregation": "token-mean"}, "token_mean"),
        ({"aggregation": "seq-mean-token-mean"}, "seq_mean"),
        ({"aggregation": "seq-mean-token-sum"}, "seq_mean_token_sum"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "seq_mean_norm"),
    ],
)
def test_the_aggregation_that_is_meant(keys: dict[str, Any], name: str) -> None:
    assert aggregation_name(algo(**keys)) == name and name in AGGREGATIONS


def test_what_estimators_need_those_of_files_included(start: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def mine(x):\n    return x\n\n\nmine.needs = 'values'\n\n\ndef odd(x):\n    return x\n\n\nodd.needs = 3\n"
        "\n\ndef bare(x):\n    return x\n"
    )
    wanted = {"gae": "values", "remax": "baseline", "grpo": "", f"{own}:mine": "values"}
    assert {name: needs(algo(advantage=name)) for name in wanted} == wanted
    assert Learner(start, config(algo={"advantage": f"{own}:bare"})).estimator.__name__ == "bare"
    with pytest.raises(ConfigError, match="needs '3'"):
        needs(algo(advantage=f"{own}:odd"))


@pytest.mark.parametrize(
    ("keys", "drops"),
    [
        ({}, True),
        ({"advantage": "rloo"}, True),
        ({"kl_coef": 0.1}, True),
        ({"drop_zero_variance": False}, False),
        ({"advantage": "gae"}, False),
        ({"advantage": "reinforce_pp"}, False),
        ({"advantage": "remax"}, False),
        ({"kl_coef": 0.1, "kl_in": "reward"}, False),
    ],
)
def test_zero_variance_groups_are_dropped_only_where_they_teach_nothing(
    keys: dict[str, Any], drops: bool
) -> None:
    assert drops_equal(algo(**keys)) is drops


def attempt(sample: int, parts: dict[str, float], turn: float | None = None) -> Episode:
    origins = [int(Origin.USER), int(Origin.MODEL), int(Origin.MODEL)]
    answered = Turn(2, "tool", (), 3, 3, results=(ToolResult("ok", reward=turn),))
    turns = (Turn(0, "user", (), 0, 1), Turn(1, "assistant", (), 1, 3), answered)
    given = tuple(RewardPart(name, value, primary=name == "a") for name, value in parts.items())
    return Episode(
        f"e{sample}",
        "t",
        group_id="g",
        sample=sample,
        tokens=Tokens.from_ids([1, 2, 3], origins),
        turns=turns,
        reward_parts=given,
    )


EQUAL, APART = {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
SUM = {"a": 0.0, "b": 0.5, "c": 0.5}  # as much as one with a alone
GROUPS: list[list[Episode]] = [
    [attempt(n, EQUAL) for n in range(3)],
    [attempt(n, EQUAL if n == 0 else APART) for n in range(3)],
    [attempt(n, {"a": 1.0, "b": 0.0, "c": 0.0} if n == 0 else SUM) for n in range(3)],
    [attempt(n, EQUAL, turn=float(n)) for n in range(3)],
    [],
]
BY_REWARD, BY_TURN = [False, True, False, False, False], [False, True, False, True, False]
ALWAYS = [True, True, True, True, False]
NAMES = ("grpo", "rloo", "dr_grpo", "opo", "pass_at_k", "grpo_passk", "reinforce_pp_baseline")


@pytest.mark.parametrize(
    ("name", "more", "signal"),
    [
        *((name, {}, BY_REWARD) for name in NAMES),
        *((name, {"drop_zero_variance": False}, BY_REWARD) for name in NAMES),
        ("gdpo", {}, [False, True, True, False, False]),
        *((name, {}, BY_TURN) for name in ("turn_returns", "mt_grpo")),
        *((name, {}, ALWAYS) for name in ("gae", "reinforce_pp", "remax")),
        ("grpo", {"kl_coef": 0.1, "kl_in": "reward"}, ALWAYS),
    ],
)
def test_what_counts_as_a_group_with_signal(
    name: str, more: dict[str, Any], signal: list[bool]
) -> None:
    """Dynamic sampling asks the estimator: equal rewards teach most of them nothing, but not all."""
    assert [has_signal(algo(advantage=name, **more), group) for group in GROUPS] == signal


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algo={advantage: gdpo, kl: {coef: 0.1, where: reward}}", "set algo.kl.where: loss"),
        ("algo.kl.estimate=k4", "'k1', 'k2', 'k3' or 'abs'"),
        ("algo.kl.where=both", "'loss' or 'reward'"),
        (
            "algo.off_policy.correction=mask",
            "'auto', 'none', 'tis', 'tis_sequence', 'mis' or 'mis_sequence'",
        ),
        (
            "algo.advantage={name: gae, gamma: 1.5}",
            "algo.advantage.gamma: Input should be less than or equal to 1",
        ),
        ("algo.clip_dual=0.5", "greater than 1"),
        ("algo.loss={name: clip_cov, fraktion: 1}", "did you mean algo.loss.fraction?"),
        ("algo.advantage={name: rloo, eps: 1}", "rloo has no options"),
        ("algo.loss=[gspo]", "expected a name"),
        ("algo.advantage={name: gae, value_clip: 0}", "greater than 0"),
        ("algo.loss={name: clip_cov, low: 6}", "must be below algo.loss.high"),
        ("algo.kl.target=0.1", "algo.kl.coef, which is 0"),
        ("algo.lamda=1", "did you mean algo.advantage.lambda?"),
        ("algo.clip_ratio=0.2", "algo.loss.clip"),
        (
            "algo.off_policy.bypass=true; train.stop_on=[mismatch]",
            "does not measure the gap between trainer and sampler",
        ),
        ("algo={reject: seq_mean_k3}", "needs reject_upper"),
        ("algo={reject: token_k1, reject_upper: 0.5}", "must be below"),
        ("algo={reject: token_k3, reject_upper: 1, reject_lower: 0.5}", "with k1"),
        ("algo={bypass: true, correction: tis}", "bypass leaves out"),
        ("algo={ref_ema: 0.5}", "algo.kl.coef is 0"),
        (
            "rollout={replay_truncation: true, repetition_penalty: 1.1}",
            "repetition_penalty changes",
        ),
    ],
)
def test_a_wrong_setting_names_what_fits(setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(sets=setting.split("; "))
    assert said in caught.value.message and len(caught.value.message) < 300, caught.value.message


@pytest.mark.parametrize(
    ("key", "name", "near"),
    [
        ("advantage", "gro", "grpo"),
        ("loss", "gpso", "gspo"),
        ("aggregation", "seq_men", "seq_mean"),
    ],
)
def test_a_wrong_name_names_the_nearest(start: Any, key: str, name: str, near: str) -> None:
    with pytest.raises(NotFound, match=name) as caught:
        Learner(start, config(algo={key: name}))
    assert near in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "said", "code"),
    [
        (["--dry-run", "--lora", "--set", "model.quantization=4bit"], "4bit needs bitsandbytes", 3),
        (["--lora", "--set", "model.quantization=8bit"], "leave model.quantization at none", 3),
        (["--full", "--set", "model.quantization=4bit"], "Train an adapter over them: --lora", 2),
        (["--set", "train.optimizer=adamw8bit"], "train.optimizer=adamw, or adamw_offload", 3),
        (["--set", "algo.advantage=gro"], "Did you mean grpo", 2),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    tmp_path: Path, model: Path, settings: list[str], said: str, code: int, cli: Cli
) -> None:
    write_project(tmp_path, model)
    cli("train", "--set", "model.device=cpu", "--steps", "1", *settings, code=code, said=said)
    if (tmp_path / "runs" / "agentrl.db").is_file():
        with Store.open(tmp_path / "runs" / "agentrl.db", readonly=True) as store:
            assert not store.runs.all()


def test_the_entropy_coefficient_is_steered() -> None:
    c = Coefficients.of(AlgoConfig().replace(entropy={"coef": 0.01, "target": 0.5, "step": 0.002}))
    c.adapt({"entropy": 0.4}, 100)
    assert (c.entropy, c.bonus) == pytest.approx((0.012, 0.012))
    c.adapt({"entropy": 0.6}, 100)
    assert (c.entropy, c.bonus) == pytest.approx((0.010, 0.0)), "above the target the bonus is off"
    assert c.metrics() == {"entropy_coef": 0.0}
    again = Coefficients.of(c.algo)
    again.load(c.state())
    assert again == c


def test_the_kl_coefficient_is_steered() -> None:
    plain = loss_config(LearnerSettings.of(Config()))
    c = Coefficients.of(AlgoConfig().replace(kl={"coef": 0.1, "target": 0.01}))
    reward = Coefficients.of(AlgoConfig().replace(kl={"coef": 0.1, "where": "reward"}))
    for one in (c, reward):
        one.adapt({"kl": 1.0}, 10_000)
    assert (c.kl, c.apply(plain).kl_coef) == pytest.approx((0.12, 0.12))
    assert c.metrics() == {"kl_coef": c.kl}
    assert (reward.kl, reward.apply(plain).kl_coef) == (0.1, 0.0), "without a target it stays"


def test_kl_in_the_reward_by_hand(start: Any, groups: list[list[Episode]]) -> None:
    keys = {"advantage": "dr_grpo", "kl_coef": 0.5, "kl": "k1", "kl_in": "reward"}
    _, (update,) = run(start, groups, keys, steps=1)
    for group in groups:
        returns = []
        for episode in group:
            found, mask = cast("Any", update.signals[episode.id]), episode.tokens.trained_mask
            kl = float((found.logp_train - found.logp_ref)[mask].sum())
            returns.append(episode.graded_reward - 0.5 * kl)
        expected = np.array(returns) - np.mean(returns)
        advantages = [update.advantages[episode.id] for episode in group]
        assert advantages == pytest.approx(expected.tolist(), abs=1e-4)
