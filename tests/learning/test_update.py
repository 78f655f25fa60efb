"""One training step's arithmetic: micro-batches add up, every token's weight is what it says, and NaN stops it.

Learning from episodes whose turns branch: gradients of hand-built sequences, weights of tokens, values, metrics.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli import Batch
from agentrl_cli.config import Config, RolloutConfig
from agentrl_cli.config.records import LearnerSettings
from agentrl_cli.errors import ConfigError, TrainingStopped
from agentrl_cli.learning.compute import Compute, MicroBatch
from agentrl_cli.learning.dispositions import decide, flaw
from agentrl_cli.learning.estimator_inputs import (
    AdvantageInput,
    anchor_states,
    turn_paths,
    turn_rewards,
)
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.length_shaping import Shaping
from agentrl_cli.learning.optimizers import move_state
from agentrl_cli.learning.packing import Segment, pack, select_segments
from agentrl_cli.learning.turn_advantages import (
    gae_raw,
    gigpo,
    mt_grpo,
    rewards_to_go,
    turn_returns,
)
from agentrl_cli.learning.update import Learner
from agentrl_cli.types import TOP_K, Episode, Fact, Origin, Outcome, RewardPart, Task, Tokens
from tests.helpers.train import VOCABULARY
from tests.helpers.trees import Said, chain, fork, sub_agent, three_leaves, with_logps
from tests.helpers.trees import episode as said_episode


@pytest.fixture
def model(start: Any) -> Any:
    return copy.deepcopy(start)


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {"train": {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e9}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


def episodes(model: Any, rewards: Sequence[Sequence[float]], seed: int = 0) -> list[list[Episode]]:
    """Groups of episodes that share a prompt of ten tokens and say three to nine of their own."""
    rng = np.random.default_rng(seed)
    groups = []
    for g, values in enumerate(rewards):
        prompt = rng.integers(5, VOCABULARY, 10)
        group = []
        for m, value in enumerate(values):
            said = rng.integers(5, VOCABULARY, int(rng.integers(3, 10)))
            ids = np.concatenate([prompt, said]).astype(np.int32)
            mask = np.arange(len(ids)) >= 10
            with torch.no_grad():
                _, out = trained_logprobs(model, [[Segment(ids, mask)]])
            logp = np.full(len(ids), np.nan, np.float32)
            logp[mask] = out.logp.numpy()
            tokens = Tokens(
                ids,
                np.where(mask, Origin.MODEL, Origin.USER).astype(np.int8),
                *(logp, logp.copy(), np.zeros(len(ids), np.float32)),
                np.full((len(ids), TOP_K), -1, np.int32),
                np.full((len(ids), TOP_K), np.nan, np.float32),
            )
            group.append(
                Episode(
                    f"{g}-{m}",
                    f"t{g}",
                    group_id=f"g{g}",
                    sample=m,
                    tokens=tokens,
                    reward_parts=(RewardPart("r", value, 1.0, True),),
                    outcome=Outcome.FAILED,
                )
            )
        groups.append(group)
    return groups


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


SPREAD: list[list[float]] = [[0, 1, 1], [1, 0, 0.5]]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizers_state_that_waits_elsewhere_changes_nothing(start: Any, name: str) -> None:
    groups, after = episodes(start, SPREAD), []
    for aside in (False, True):
        model = copy.deepcopy(start)
        learner = Learner(model, config(train={"optimizer": name}), aside=aside)
        for step in range(3):
            learner.update(groups, step)
            if step == 1:
                learner.load_state(learner.state())
        after.append(weights(model))
        # what a GPU would get back: every number of the state, counts of steps apart
        parts = getattr(learner.compute.optimizer, "optimizers", [learner.compute.optimizer])
        move_state(learner.compute.optimizer, "meta")
        held = [t for one in parts for state in one.state.values() for t in state.values()]
        assert sum(t.numel() for t in held if t.device.type == "cpu" and t.ndim) == 0
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_later_epochs_are_clipped_against_the_first_log_probabilities(
    model: Any, dropout: float
) -> None:
    groups = episodes(model, SPREAD)
    model.config.attention_dropout = dropout
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    learner = Learner(model, config(algo={"epochs": 6, "minibatches": 2}, train={"lr": 5e-2}))
    update = learner.update(groups, 0)
    assert {int(state["step"]) for state in learner.compute.optimizer.state.values()} == {12}
    clipped = 0
    for episode in [episode for group in groups for episode in group]:
        signals, mask = update.signals[episode.id], episode.tokens.trained_mask
        assert signals.logp_train[mask] == pytest.approx(episode.tokens.logp_policy[mask], abs=1e-4)
        ratio, out = signals.ratio[mask], signals.clipped[mask].astype(bool)
        if advantage := update.advantages[episode.id]:
            assert (out == (ratio > 1.28 if advantage > 0 else ratio < 0.8)).all()
            assert (signals.weight[mask][out] == 0).all()
        clipped += int(out.sum())
    assert clipped > 0


def test_gradients_are_clipped_to_the_norm(start: Any) -> None:
    norms, moved = [], []
    begun = torch.cat([p.detach().flatten() for p in start.parameters()])
    for norm in (1e9, 1e-3):
        model = copy.deepcopy(start)
        compute = Compute(model, LearnerSettings.of(config()))  # with another norm, as another rank
        settings = config(train={"max_grad_norm": norm})
        learner: Any = Learner(model, settings, compute=compute)
        learner.compute.optimizer = torch.optim.SGD(model.parameters())
        norms.append(learner.update(episodes(start, SPREAD), 0).metrics["grad_norm"])
        now = torch.cat([p.detach().flatten() for p in model.parameters()])
        moved.append(float((now - begun).norm()))
    assert norms[0] == pytest.approx(norms[1]), "the metric is the norm before clipping"
    rate = 1e-2
    assert moved == pytest.approx([rate * norms[0], rate * 1e-3], rel=1e-2)


@pytest.mark.parametrize("stop", [True, False])
def test_a_loss_that_is_no_number_leaves_the_weights_alone(model: Any, stop: bool) -> None:
    groups = episodes(model, SPREAD)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    before = weights(model)
    learner = Learner(model, config(train={"stop_on": ["nan"] if stop else []}))
    if stop:
        with pytest.raises(TrainingStopped, match="nan") as caught:
            learner.update(groups, 0)
        assert "train.lr" in caught.value.hint
    else:
        metrics = learner.update(groups, 0).metrics
        assert not np.isfinite([metrics["grad_norm"], metrics["loss"]]).any()
    for name, weight in model.named_parameters():
        assert weight.grad is None
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0, equal_nan=True)


def test_nothing_to_train_on_is_nothing(model: Any) -> None:
    before = weights(model)
    update = Learner(model, config()).update([], 0)
    assert (update.metrics, update.signals, update.advantages) == ({}, {}, {})
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize(
    ("train", "rates"),
    [
        ({}, [0.5, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "cosine"}, [0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]),
        ({"warmup_steps": 0}, [1] * 7),
    ],
)
def test_schedules(train: dict[str, Any], rates: list[float]) -> None:
    settings = config(train={"lr": 1.0, "steps": 6, "warmup_steps": 2, **train})
    learner = Learner(torch.nn.Linear(2, 2), settings)
    assert [learner.learning_rate(step) for step in range(7)] == pytest.approx(rates)


def test_what_cannot_be(model: Any) -> None:
    with pytest.raises(ConfigError, match="frozen"):
        Learner(copy.deepcopy(model).requires_grad_(False), config())
    with pytest.raises(ConfigError, match="temperature"):
        Learner(model, config(rollout={"temperature": 0}))
    with pytest.raises(ConfigError, match="reference"):
        Learner(model, config(algo={"kl_coef": 0.1})).update(episodes(model, SPREAD), 0)


@pytest.mark.parametrize(("limits", "passes"), [((99, 99), 1.0), ((40, 99), 2.0), ((40, 40), 3.3)])
def test_a_long_prompt_costs_a_token_no_more_than_a_short_one_where_memory_allows(
    model: Any, limits: tuple[int, int], passes: float
) -> None:
    done: list[int] = []
    settings = LearnerSettings.of(config(train={"token_budget": 40}))

    def work(prompt: int) -> float:
        """Return how often a token of the group is computed in an update, recomputations included."""
        ids = np.arange(prompt + 4, dtype=np.int32) % VOCABULARY
        group = [
            Segment(np.append(ids[:prompt], [m] * 4), np.arange(len(ids)) >= prompt)
            for m in range(4)
        ]
        compute = Compute(model, settings, row_tokens=lambda: limits)
        done.clear()
        for row in compute.split([group]):
            batch = MicroBatch(select_segments([group], row))
            torch.autograd.backward(compute._logprobs(model, pack(batch.groups)).logp.sum())
        return sum(done) / pack([group]).tokens

    work(20)  # the model is tried first
    model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, given: done.append(given[0].shape[1])
    )
    assert work(20) == 1 and work(39) == pytest.approx(passes, rel=0.15)


# --- a fact for every episode of a step ---


SAMPLED = Tokens.from_ids([1, 2, 3], [Origin.USER, Origin.MODEL, Origin.MODEL])
GIVEN = Tokens.from_ids([1, 2], [Origin.USER, Origin.TEMPLATE])


def episode(
    name: str, reward: float = 0.0, outcome: Outcome = Outcome.FAILED, tokens: Tokens = SAMPLED
) -> Episode:
    return Episode(
        name, "t", reward_parts=(RewardPart("r", reward),), outcome=outcome, tokens=tokens
    )


def group(*rewards: float, name: str = "e") -> list[Episode]:
    return [episode(f"{name}{n}", reward) for n, reward in enumerate(rewards)]


SPREAD_OF_TWO, TRAINED, EQUAL = group(0, 1), Fact.TRAINED, Fact.SKIPPED_ZERO_VARIANCE
ENDS = {
    Outcome.ENV_ERROR: Fact.SKIPPED_ENV_ERROR,
    Outcome.SANDBOX_ERROR: Fact.SKIPPED_SANDBOX_ERROR,
    Outcome.TIMEOUT: Fact.SKIPPED_TIMEOUT,
    Outcome.CANCELLED: Fact.SKIPPED_CANCELLED,
    Outcome.TOO_LONG: Fact.SKIPPED_TOO_LONG,
    # what is not an answer of the policy
    **{
        Outcome(name): Fact(f"skipped:{name}")
        for name in ("agent_error", "agent_timeout", "no_calls", "foreign_text")
    },
    Outcome.SOLVED: TRAINED,
    Outcome.TRUNCATED_TURNS: TRAINED,
    Outcome.TRUNCATED_TOKENS: TRAINED,
}
LATE = episode("x", 0.0, Outcome.TIMEOUT)
CUT = episode("cut", 0.3, Outcome.TRUNCATED_TOKENS)
DRIFTED: dict[str, Any] = {"drift": {"e1": "structural"}}
FACTS: list[tuple[list[list[Episode]], dict[str, Any], list[Fact]]] = [
    ([group(0, 1, 0)], {}, [TRAINED] * 3),
    ([group(1, 1, 1)], {}, [EQUAL] * 3),
    ([group(1, 1)], {"drop_zero_variance": False}, [TRAINED] * 2),
    ([group(0.3, 0.1 + 0.2)], {}, [EQUAL] * 2),  # rounding is not spread
    ([group(0, 1, name="a"), group(0, 0, name="b")], {}, [TRAINED] * 2 + [EQUAL] * 2),
    *(
        ([[*SPREAD_OF_TWO, episode("x", 1, outcome)]], {}, [TRAINED, TRAINED, fact])
        for outcome, fact in ENDS.items()
    ),
    # an error gives a group no spread
    (
        [[*group(1, 1), episode("x", 0.0, Outcome.ENV_ERROR)]],
        {},
        [EQUAL, EQUAL, Fact.SKIPPED_ENV_ERROR],
    ),
    # a group that errors left with one is too small, and a group of one by choice is not
    ([[*group(1), LATE]], {}, [Fact.SKIPPED_GROUP_TOO_SMALL, Fact.SKIPPED_TIMEOUT]),
    ([group(0.0)], {}, [TRAINED]),
    ([[LATE]], {}, [Fact.SKIPPED_TIMEOUT]),
    ([group(0, 1, 1)], DRIFTED, [TRAINED, Fact.SKIPPED_DRIFT, TRAINED]),
    ([SPREAD_OF_TWO], {**DRIFTED, "train_drifted": True}, [TRAINED] * 2),
    *(
        ([SPREAD_OF_TWO], {"drift": {"e1": mild}}, [TRAINED] * 2)
        for mild in ("resegmented", "reserialised", "by_design")
    ),
    ([SPREAD_OF_TWO], DRIFTED, [Fact.SKIPPED_GROUP_TOO_SMALL, Fact.SKIPPED_DRIFT]),
    # what its limit of tokens cut may be masked, and what its limit of turns ended is trained
    (
        [[*SPREAD_OF_TWO, CUT, episode("x", 0.2, Outcome.TRUNCATED_TURNS)]],
        {"mask_overlong": True},
        [TRAINED, TRAINED, Fact.SKIPPED_OVERLONG, TRAINED],
    ),
    (
        [[*group(1), CUT]],
        {"mask_overlong": True},
        [Fact.SKIPPED_GROUP_TOO_SMALL, Fact.SKIPPED_OVERLONG],
    ),
    # nothing sampled is nothing to train
    (
        [[*SPREAD_OF_TWO, episode("x", 1.0, tokens=GIVEN)]],
        {},
        [TRAINED, TRAINED, Fact.SKIPPED_NO_MODEL_TOKENS],
    ),
    ([], {}, []),
    ([[]], {}, []),
    # what is stale is skipped and its group decided without it
    (
        [group(1.0, 0.0, 0.5), group(1.0, 0.0, name="f")],
        {"stale": {"e1", "f0"}},
        [TRAINED, Fact.SKIPPED_STALE, TRAINED, Fact.SKIPPED_STALE, Fact.SKIPPED_GROUP_TOO_SMALL],
    ),
]


@pytest.mark.parametrize(("groups", "given", "wanted"), FACTS)
def test_every_episode_of_a_step_has_its_fact(
    groups: list[list[Episode]], given: dict[str, Any], wanted: list[Fact]
) -> None:
    found = decide(groups, **{"drift": {}, **given})
    assert list(found.items()) == [
        (one.id, fact) for one, fact in zip((e for g in groups for e in g), wanted, strict=True)
    ], "no silent drops"
    errors = [one for group in groups for one in group if one.outcome and one.outcome.is_error]
    assert all(one.reward is None for one in errors)
    # Facts of errors and the list of outcomes that are masked agree.
    assert all(outcome.is_error <= (fact is not TRAINED) for outcome, fact in ENDS.items())


# --- episodes whose turns branch ---


TREES = {"fork": fork(), "sub_agent": sub_agent(), "three_leaves": three_leaves()}


def rate_one(**sections: Any) -> Config:
    return config(**{**sections, "train": {"lr": 1.0, **sections.get("train", {})}})


def sequences(one: Episode) -> list[Segment]:
    """The sequences that train something, written down without `Episode.sequences`: walk up from each leaf."""
    done: set[int] = set()
    out = []
    for leaf in (t.index for t in one.turns if t.index not in one.parents):
        path, at = list[int](), leaf
        while at >= 0:
            path.insert(0, at)
            at = one.parents[at]
        ids: list[int] = []
        trained: list[bool] = []
        for index in path:
            turn = one.turns[index]
            ids += one.tokens.ids[turn.start : turn.end].tolist()
            trained += [turn.role == "assistant" and index not in done] * (turn.end - turn.start)
        done.update(path)
        out.append(Segment(np.array(ids, np.int32), np.array(trained)))
    return out


def tree_group(model: Any, *shapes: list[Said]) -> list[Episode]:
    """Episodes of these shapes, of which the first was rewarded; their log-probabilities are the model's."""
    out = []
    for n, said in enumerate(shapes):
        one = said_episode(said, f"e{n}", 0.0 if n else 1.0, sample=n)
        whole = np.zeros(len(one.tokens), np.float32)
        for branch in one.sequences:
            with torch.no_grad():
                _, made = trained_logprobs(model, [[Segment.of(one, branch)]])
            whole[branch.positions[branch.trained]] = made.logp.numpy()
        out.append(with_logps(one, whole[one.tokens.trained_mask]))
    return out


def descend(start: Any, episodes: list[Episode], **sections: Any) -> tuple[Any, Any]:
    """A model after one step of plain gradient descent at a rate of 1, and the update."""
    model = copy.deepcopy(start)
    learner: Any = Learner(model, rate_one(**sections))
    learner.compute.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, learner.update([episodes], 0)


def moved(start: Any, model: Any) -> torch.Tensor:
    """What gradient descent at a rate of 1 changed: minus the gradient."""
    pairs = zip(start.parameters(), model.parameters(), strict=True)
    return torch.cat([(after - before).detach().flatten() for before, after in pairs])


@pytest.mark.parametrize("budget", [4096, 8])
@pytest.mark.parametrize(
    ("shape", "aggregation"),
    [*zip(sorted(TREES), ("token_mean", "episode_mean", "seq_mean"), strict=True)],
)
def test_the_gradient_is_that_of_the_hand_built_sequences(
    start: Any, shape: str, aggregation: str, budget: int
) -> None:
    episodes = tree_group(start, TREES[shape], chain())
    algo = {"advantage": "dr_grpo", "aggregation": aggregation}
    model, _ = descend(start, episodes, algo=algo, train={"token_budget": budget})
    by_hand = copy.deepcopy(start)
    total, count = sum(e.trained_tokens for e in episodes), sum(len(sequences(e)) for e in episodes)
    loss = torch.zeros(())
    for one, advantage in zip(episodes, (0.5, -0.5), strict=True):
        for segment in sequences(one):
            _, out = trained_logprobs(by_hand, [[segment]])
            each = {
                "token_mean": total,
                "episode_mean": one.trained_tokens * 2,
                "seq_mean": len(out.logp) * count,
            }[aggregation]
            loss = loss - (advantage * out.logp / each).sum()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    gradient = torch.cat(
        [(p.grad if p.grad is not None else p * 0).flatten() for p in by_hand.parameters()]
    )
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(moved(start, model), -gradient, rtol=0, atol=1e-6)


def test_explicit_parents_of_a_chain_change_nothing_at_all(start: Any) -> None:
    named = [Said(s.role, s.ids, n - 1) for n, s in enumerate(chain())]
    plain, other = (descend(start, tree_group(start, said, fork()))[0] for said in (chain(), named))
    assert torch.equal(moved(start, plain), moved(start, other))


def test_what_is_recorded_of_a_token_is_recorded_where_it_stands(start: Any) -> None:
    pair = tree_group(start, sub_agent(), chain())
    algo = {"advantage": {"name": "gae", "gamma": 0.9}, "kl_coef": 0.1, "minibatches": 1}
    settings = rate_one(algo=algo, train={"lr": 1e-3})
    learner = Learner(copy.deepcopy(start), settings, reference=copy.deepcopy(start))
    signals: Any = learner.update([pair], 0).signals["e0"]
    mask, said = pair[0].tokens.trained_mask, pair[0].tokens.logp_policy
    for found in (signals.logp_train, signals.logp_ref):
        assert np.allclose(found[mask], said[mask], atol=1e-5)
    assert np.isnan(signals.logp_train[~mask]).all() and signals.value is not None
    # a head of zeros: the return of a token is the discounted reward at the end of its branch
    assert np.allclose(signals.returns[mask], [0.9**3, 0.9**2, 0.9, 1, 0.9, 1], atol=1e-6)


def test_a_correction_reads_the_sampler_of_the_same_tokens(start: Any) -> None:
    one, other = tree_group(start, three_leaves(), chain())
    places = np.arange(len(one.tokens), dtype=np.float32)
    shifted = replace(one.tokens, logp_sampled=one.tokens.logp_policy - places / np.float32(10))
    algo = {
        "advantage": "dr_grpo",
        "aggregation": "token_mean",
        "correction": "tis",
        "correction_cap": 9.0,
    }
    _, update = descend(start, [one.with_(tokens=shifted), other], algo=algo)
    mask = one.tokens.trained_mask
    expected = 0.5 / 12 * np.exp(places[mask] / 10)
    assert np.allclose(update.signals["e0"].weight[mask], expected, rtol=1e-4)


# --- advantages -------------------------------------------------------------------------------------------------------


def rewarded(one: Episode, reward: float, *turns: int) -> Episode:
    """The episode with a reward at some of its turns."""
    made = (replace(t, reward=reward) if t.index in turns else t for t in one.turns)
    return one.with_(turns=tuple(made))


def test_credit_follows_the_path_by_hand() -> None:
    one = rewarded(said_episode(three_leaves(), reward=2.0), 0.5, 2, 4)
    assert [path.tolist() for path in turn_paths(one)] == [[0, 1], [0, 2], [3]]
    # both answers to the first turn
    np.testing.assert_equal(turn_rewards(one), [1.0, np.nan, np.nan, np.nan])
    # tokens: 20 21 | 22 | 23 24 | 25; the turn reward 1.0 lies at the end of the first turn, 2.0 at each branch's end
    x = AdvantageInput.of([one], gamma=0.5)
    assert rewards_to_go(x, 0.5)[0].tolist() == [1.0, 2.0, 2.0, 1.0, 2.0, 2.0]
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    x = AdvantageInput.of([one], gamma=1.0, lam=0.0, values=(values,), bootstrap=np.array([7.0]))
    # δ = r + V(next on the path) − V; the last branch was left in a state of value 7
    assert gae_raw(x)[0].tolist() == [0 + 2 - 1, 1 + 3 - 2, 2 - 3, 5 - 4, 2 - 5, 2 + 7 - 6]


@pytest.mark.parametrize(
    ("said", "states"),
    [
        (fork(), [(True, [10, 11, 12]), (False, [30]), (False, [31, 32])]),
        (sub_agent(), [(True, [10, 11, 12]), (True, [40, 41]), (False, [33])]),
    ],
)
def test_anchor_states_are_read_along_the_path(
    said: list[Said], states: list[tuple[bool, list[int]]]
) -> None:
    keys: Any = anchor_states(said_episode(said))
    assert [(first, np.frombuffer(ids, np.int32).tolist()) for first, ids in keys] == states


def test_turns_are_compared_at_the_same_depth_of_their_paths() -> None:
    tree, line = said_episode(three_leaves(), "tree", 1.0), said_episode(chain()[:2], "line", 0.0)
    x = AdvantageInput.of([tree, line], eps=0.0)
    # depth 0: assistants 0 and 3 of the tree (returns 1, 1) and the line's only turn (0); depth 1: assistants 1 and 2,
    # the branch that ended with assistant 3, and the line's end
    one, _, _ = normalised(1.0, 1.0, 0.0)
    two, *_ = normalised(1.0, 1.0, 1.0, 0.0)
    assert turn_returns(x)[0] == pytest.approx([one, one, two, two, two, one])
    x = AdvantageInput.of([rewarded(tree, 1.0, 3), line], eps=0.0)
    # earned from there on: assistants 0 (through the first branch) and 1 one each, 3 and 2 nothing, the line nothing
    base = 0.5**0.5
    high0, low0, _ = normalised(1.0, 0.0, 0.0)
    high1, low1, *_ = normalised(1.0, 0.0, 0.0, 0.0)
    expected = [base + high0] * 2 + [base + high1] + [base + low1] * 2 + [base + low0]
    assert mt_grpo(x)[0] == pytest.approx(expected)
    assert len(gigpo(x)[0]) == tree.trained_tokens


def normalised(*returns: float) -> list[float]:
    values = np.array(returns)
    return [float(one) for one in (values - values.mean()) / values.std(ddof=1)]


def test_overlong_is_about_the_longest_sequence() -> None:
    algo = {"overlong_penalty": 1.0, "overlong_buffer": 5}
    shaping = Shaping(rate_one(algo=algo).algo, RolloutConfig(), 10)
    (part,) = shaping.on_rollout_end(said_episode(fork()), Task("t", "p", "f", "train", ()))
    # branches of 9 and 8, 12 in all
    assert part.value == pytest.approx(-0.8) and part.detail.startswith("9 of 10")


# --- dispositions and batches -----------------------------------------------------------------------------------------


def test_a_crooked_tree_is_not_trained() -> None:
    good = said_episode(fork(), "good")
    crooked = (*good.turns[:2], replace(good.turns[2], parent=9), *good.turns[3:])
    late = good.with_(id="late", turns=crooked)
    roots = [Said("user", (1, 2)), Said("assistant", (3,)), Said("assistant", (4, 5), parent=-1)]
    bare, line = said_episode(roots, "bare"), said_episode(chain(), "line", 0.0)
    assert flaw(good) == "" and "turn 2 continues turn 9" in flaw(late)
    assert "first token" in flaw(bare)
    bad = Fact.SKIPPED_BAD_TOKENS
    wanted = {"good": Fact.TRAINED, "late": bad, "bare": bad, "line": Fact.TRAINED}
    assert decide([[good, late, bare, line]], drift={}) == wanted


def test_a_padded_batch_has_a_row_per_branch_with_shared_tokens_as_context() -> None:
    one, gains = said_episode(fork(), reward=0.5), np.arange(6, dtype=np.float32)
    batch: Any = Batch.from_episodes([one], advantages=[gains])
    assert batch.episode_ids == ("e", "e") and batch.rewards.tolist() == [0.5, 0.5]
    there, own = batch.attention_mask.bool(), batch.response_mask.bool()
    assert [ids[mask].tolist() for ids, mask in zip(batch.input_ids, there, strict=True)] == [
        [10, 11, 12, 20, 21, 30, 22, 23, 24],
        [10, 11, 12, 20, 21, 31, 32, 25],
    ]
    assert batch.responses[own].tolist() == [20, 21, 22, 23, 24, 25]
    assert batch.advantages[own].tolist() == [0, 1, 2, 3, 4, 5]
