"""Every key of `algo` changes the number that it should, what cannot be is refused, and steered coefficients move."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl_cli.commands import main
from agentrl_cli.config import AlgoConfig, Config, load_config
from agentrl_cli.config.choice import option_names
from agentrl_cli.config.estimators import ESTIMATORS, Distill
from agentrl_cli.config.losses import LOSSES
from agentrl_cli.config.models import leaves
from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.learning.advantages import compares_groups, drops_equal, has_signal, needs, options
from agentrl_cli.learning.coefficients import Coefficients
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.losses import AGGREGATIONS
from agentrl_cli.learning.objective import aggregation_name, loss_config
from agentrl_cli.learning.protocols import Update
from agentrl_cli.learning.update import Learner
from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Origin, Outcome, RewardPart, Tokens, ToolResult, Turn
from tests.helpers.train import write_model, write_project
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
def learned(
    start: Any, groups: list[list[Episode]]
) -> Callable[[dict[str, Any]], tuple[Any, list[Update]]]:
    """Weights and updates of `run` by these keys; each combination is trained once."""
    known: dict[str, tuple[Any, list[Update]]] = {}

    def of(keys: dict[str, Any]) -> tuple[Any, list[Update]]:
        if repr(keys) not in known:
            model, updates = run(start, groups, keys)
            known[repr(keys)] = weights(model), updates
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
# Which teacher there is, and what it sees: tests/learning/test_distill.py.
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
    other, _ = learned({**base, key: value})
    assert furthest(learned(base)[0], other) > 1e-5


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_changes_what_is_learned(learned: Any, key: str) -> None:
    base, value = OPTIONS[key]
    choice, _, option = key.partition(".")
    plain, other = (
        learned({choice: base, **MANY}),
        learned({choice: {**base, option: value}, **MANY}),
    )
    assert furthest(plain[0], other[0]) > 1e-5


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_can_be_trained_with(
    start: Any, groups: list[list[Episode]], name: str
) -> None:
    given = groups
    if name == "mt_grpo":
        given = [[_with_tool_reward(episode) for episode in group] for group in groups]
    _, (update,) = run(start, given, {"advantage": name}, steps=1)
    for episode in (e for group in given for e in group):
        mask = episode.tokens.trained_mask
        assert np.isfinite(update.signals[episode.id].advantage[mask]).all()
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
    found: list[Tensor] = []
    measured: list[dict[str, float]] = []
    for budget in (4096, 1):
        model = copy.deepcopy(start)
        with torch.no_grad():
            model.lm_head.weight += 0.1
        learner: Any = Learner(
            model, config(algo=keys, train={"token_budget": budget, "lr": 1e3}), reference=start
        )
        learner.compute.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = weights(model)
        metrics = learner.update(groups, 0).metrics
        found.append(
            torch.cat(
                [(before[name] - p.detach()).flatten() for name, p in model.named_parameters()]
            )
        )
        measured.append({name: metrics[name] for name in metrics if "time" not in name})
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5
    assert measured[1] == pytest.approx(measured[0], rel=1e-4, abs=1e-6)


def test_options_reach_the_estimator_and_the_loss() -> None:
    assert options(algo(advantage={"name": "gae", "gamma": 0.9, "lambda": 0.8})) == {
        "gamma": 0.9,
        "lam": 0.8,
    }
    own = {"name": "own.py:mine", "gamma": 0.9, "lambda": 0.8, "k": 3, "turn_coef": 0.7, "eps": 0.1}
    own["decay"] = 0.5
    assert options(algo(advantage=own)) == {
        "decay": 0.5,
        "gamma": 0.9,
        "lam": 0.8,
        "k": 3,
        "turn_coef": 0.7,
        "eps": 0.1,
    }
    settings: dict[str, Any] = {"kl": "k1", "correction_cap": 4.0}
    c = loss_config(
        LearnerSettings.of(
            Config(
                algo=algo(
                    loss={"name": "sapo", "negative": 1.5}, **settings, correction="mis_sequence"
                )
            )
        )
    )
    assert {
        name: getattr(c, name) for name in settings
    } == settings and c.correction == "mis_sequence"
    assert c.options.model_dump() == {"name": "sapo", "positive": 1.0, "negative": 1.5}
    truncated = Config.model_validate({"rollout": {"top_k": 5}})
    assert loss_config(LearnerSettings.of(Config())).correction == "none"
    assert loss_config(LearnerSettings.of(truncated)).correction == "tis"
    truncated = truncated.replace(algo={"off_policy": {"correction": "none"}})
    assert loss_config(LearnerSettings.of(truncated)).correction == "none"


def test_the_clip_bounds_that_a_paper_has_where_none_are_set() -> None:
    def bounds(**keys: Any) -> tuple[float, float]:
        c: Any = loss_config(LearnerSettings.of(Config(algo=algo(**keys)))).options
        return c.clip_low, c.clip_high

    assert bounds() == bounds(loss="cispo") == (0.2, 0.28)
    assert bounds(loss="gspo") == (3e-4, 4e-4) and bounds(loss="geo_mean") == (0.4, 0.4)
    assert bounds(loss={"name": "gspo", "clip_low": 0.03, "clip_high": 0.04}) == (0.03, 0.04)
    assert bounds(loss="gspo", clip_high=0.04, clip_low=None) == (3e-4, 0.04), "the old key"


def test_the_aggregation_that_a_paper_pairs_with_its_loss() -> None:
    def meant(**keys: Any) -> str:
        return aggregation_name(algo(**keys))

    assert meant() == meant(loss="dapo") == meant(loss="cispo") == "token_mean"
    assert meant(loss="gspo") == meant(loss="sapo") == "seq_mean"
    assert meant(advantage="dr_grpo") == "seq_mean_norm"
    assert meant(loss="geo_mean") == "seq_mean"
    assert meant(loss="gspo", aggregation="token_mean") == "token_mean"


def test_verls_names_of_aggregations() -> None:
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    ours = ["token_mean", "seq_mean", "seq_mean_token_sum", "seq_mean_norm"]
    assert [aggregation_name(algo(aggregation=mode)) for mode in modes] == ours and set(
        ours
    ) <= set(AGGREGATIONS)


def test_what_estimators_need(tmp_path: Path) -> None:
    assert [needs(algo(advantage=name)) for name in ("gae", "remax", "grpo")] == [
        "values",
        "baseline",
        "",
    ]
    own = tmp_path / "own.py"
    own.write_text(
        "def mine(x):\n    return x\n\n\nmine.needs = 'values'\n\n\ndef odd(x):\n    return x\n\n\nodd.needs = 3\n"
    )
    assert needs(algo(advantage=f"{own}:mine")) == "values"
    with pytest.raises(ConfigError, match="needs '3'"):
        needs(algo(advantage=f"{own}:odd"))


def test_zero_variance_groups_are_dropped_only_where_they_teach_nothing() -> None:
    def drops(**keys: Any) -> bool:
        return drops_equal(algo(**keys))

    assert drops() and drops(advantage="rloo")
    assert not drops(drop_zero_variance=False)
    assert (
        not drops(advantage="gae")
        and not drops(advantage="reinforce_pp")
        and not drops(advantage="remax")
    )
    assert not drops(kl_coef=0.1, kl_in="reward") and drops(kl_coef=0.1)


def test_what_counts_as_a_group_with_signal() -> None:
    """Dynamic sampling asks the estimator: equal rewards teach most of them nothing, but not all."""

    def attempt(sample: int, parts: dict[str, float], turn: float | None = None) -> Episode:
        tokens = Tokens.from_ids(
            [1, 2, 3], [int(Origin.USER), int(Origin.MODEL), int(Origin.MODEL)]
        )
        answered = Turn(2, "tool", (), 3, 3, results=(ToolResult("ok", reward=turn),))
        turns = (Turn(0, "user", (), 0, 1), Turn(1, "assistant", (), 1, 3), answered)
        given = tuple(RewardPart(name, value, primary=name == "a") for name, value in parts.items())
        return Episode(
            f"e{sample}",
            "t",
            group_id="g",
            sample=sample,
            tokens=tokens,
            turns=turns,
            reward_parts=given,
        )

    equal = [attempt(n, {"a": 1.0, "b": 0.0}) for n in range(3)]
    apart = [attempt(n, {"a": float(n == 0), "b": 0.0}) for n in range(3)]
    parts = [
        attempt(n, {"a": float(n == 0), "b": 0.5 * (n != 0), "c": 0.5 * (n != 0)}) for n in range(3)
    ]
    turns = [attempt(n, {"a": 1.0, "b": 0.0}, turn=float(n)) for n in range(3)]

    def signal(name: str, **more: Any) -> list[bool]:
        return [
            has_signal(algo(advantage=name, **more), group)
            for group in (equal, apart, parts, turns, [])
        ]

    for name in (
        "grpo",
        "rloo",
        "dr_grpo",
        "opo",
        "pass_at_k",
        "grpo_passk",
        "reinforce_pp_baseline",
    ):
        assert (
            signal(name)
            == signal(name, drop_zero_variance=False)
            == [False, True, False, False, False]
        )
    assert signal("gdpo") == [False, True, True, False, False]
    for name in ("turn_returns", "mt_grpo"):
        assert signal(name) == [False, True, False, True, False]
    for name in ("gae", "reinforce_pp", "remax"):
        assert signal(name) == [True, True, True, True, False]
    assert signal("grpo", kl_coef=0.1, kl_in="reward") == [True, True, True, True, False]
    assert compares_groups(AlgoConfig()) and not compares_groups(algo(advantage="gae"))


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


def test_a_wrong_name_is_refused_before_anything_is_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = write_project(tmp_path, write_model(tmp_path / "model"))
    monkeypatch.chdir(project)
    assert main(["train", "--set", "algo.advantage=gro", "--steps", "1"]) == 2
    assert "Did you mean grpo" in capfd.readouterr().err
    assert not (project / "runs").exists(), "no run of that name was written down"


@pytest.mark.parametrize(
    ("settings", "said", "code"),
    [
        (["--dry-run", "--lora", "--set", "model.quantization=4bit"], "4bit needs bitsandbytes", 3),
        (["--lora", "--set", "model.quantization=8bit"], "leave model.quantization at none", 3),
        (["--full", "--set", "model.quantization=4bit"], "Train an adapter over them: --lora", 2),
        (["--set", "train.optimizer=adamw8bit"], "train.optimizer=adamw, or adamw_offload", 3),
    ],
)
def test_what_a_cpu_cannot_train_is_refused_before_anything_is_written(
    tmp_path: Path,
    settings: list[str],
    said: str,
    code: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = write_project(tmp_path, write_model(tmp_path / "model"))
    monkeypatch.chdir(project)
    assert main(["train", "--set", "model.device=cpu", "--steps", "1", *settings]) == code
    assert said in capfd.readouterr().err
    if (project / "runs" / "agentrl.db").is_file():
        with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
            assert not store.runs.all()


def test_the_entropy_coefficient_is_steered() -> None:
    c = Coefficients.of(AlgoConfig().replace(entropy={"coef": 0.01, "target": 0.5, "step": 0.002}))
    c.adapt({"entropy": 0.4}, 100)
    assert c.entropy == pytest.approx(0.012) and c.bonus == pytest.approx(0.012)
    c.adapt({"entropy": 0.6}, 100)
    assert c.entropy == pytest.approx(0.010) and c.bonus == 0.0, "above the target the bonus is off"
    assert c.metrics() == {"entropy_coef": 0.0}
    again = Coefficients.of(c.algo)
    again.load(c.state())
    assert again == c


def test_the_kl_coefficient_is_steered() -> None:
    c = Coefficients.of(AlgoConfig().replace(kl={"coef": 0.1, "target": 0.01}))
    c.adapt({"kl": 1.0}, 10_000)
    assert c.kl == pytest.approx(0.12) and c.metrics() == {"kl_coef": pytest.approx(0.12)}
    assert c.apply(loss_config(LearnerSettings.of(Config()))).kl_coef == pytest.approx(0.12)
    reward = Coefficients.of(AlgoConfig().replace(kl={"coef": 0.1, "where": "reward"}))
    assert reward.apply(loss_config(LearnerSettings.of(Config()))).kl_coef == 0.0
    reward.adapt({"kl": 1.0}, 10_000)
    assert reward.kl == 0.1, "without a target it stays"


def test_kl_in_the_reward_by_hand(start: Any, groups: list[list[Episode]]) -> None:
    _, (update,) = run(
        start,
        groups,
        {"advantage": "dr_grpo", "kl_coef": 0.5, "kl": "k1", "kl_in": "reward"},
        steps=1,
    )
    for group in groups:
        returns = []
        for episode in group:
            found, mask = update.signals[episode.id], episode.tokens.trained_mask
            assert found.logp_ref is not None
            returns.append(
                episode.graded_reward - 0.5 * float((found.logp_train - found.logp_ref)[mask].sum())
            )
        expected = np.array(returns) - np.mean(returns)
        assert [update.advantages[episode.id] for episode in group] == pytest.approx(
            expected.tolist(), abs=1e-4
        )
