"""Learning from episodes whose turns branch: gradients of hand-built sequences, weights of tokens, values, metrics."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli import Batch, Config
from agentrl_cli.config import RolloutConfig
from agentrl_cli.learning.dispositions import decide, flaw
from agentrl_cli.learning.estimator_inputs import (
    AdvantageInput,
    anchor_states,
    turn_paths,
    turn_rewards,
)
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.length_shaping import Shaping
from agentrl_cli.learning.packing import Segment
from agentrl_cli.learning.turn_advantages import (
    gae_raw,
    gigpo,
    mt_grpo,
    rewards_to_go,
    turn_returns,
)
from agentrl_cli.learning.update import Learner
from agentrl_cli.types import Episode, Fact, Outcome, Task, ToolResult
from tests.helpers.trees import Said, chain, episode, fork, sub_agent, three_leaves, with_logps
from tests.learning.test_update import config as update_config

TREES = {"fork": fork(), "sub_agent": sub_agent(), "three_leaves": three_leaves()}


def config(**sections: Any) -> Config:
    return update_config(**{**sections, "train": {"lr": 1.0, **sections.get("train", {})}})


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


def group(model: Any, *shapes: list[Said]) -> list[Episode]:
    """Episodes of these shapes, of which the first was rewarded; their log-probabilities are the model's."""
    out = []
    for n, said in enumerate(shapes):
        one = episode(said, f"e{n}", 0.0 if n else 1.0, sample=n)
        whole = np.zeros(len(one.tokens), np.float32)
        for branch in one.sequences:
            with torch.no_grad():
                _, made = trained_logprobs(model, [[Segment.of(one, branch)]])
            whole[branch.positions[branch.trained]] = made.logp.numpy()
        out.append(with_logps(one, whole[one.tokens.trained_mask]))
    return out


def step(start: Any, episodes: list[Episode], **sections: Any) -> tuple[Any, Any]:
    """A model after one step of plain gradient descent at a rate of 1, and the update."""
    model = copy.deepcopy(start)
    learner: Any = Learner(model, config(**sections))
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
    episodes = group(start, TREES[shape], chain())
    algo = {"advantage": "dr_grpo", "aggregation": aggregation}
    model, _ = step(start, episodes, algo=algo, train={"token_budget": budget})
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


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("seq_mean", [1 / 12, 1 / 12, 1 / 12, 1 / 8, 1 / 8, 1 / 4]),
        ("episode_mean", [1 / 12] * 6),
        ("token_mean", [1 / 12] * 6),
    ],
)
def test_seq_mean_weighs_branches_and_episode_mean_rollouts(
    start: Any, aggregation: str, weights: list[float]
) -> None:
    algo = {"advantage": "dr_grpo", "aggregation": aggregation}
    _, update = step(start, group(start, three_leaves(), chain()), algo=algo)
    found = update.signals["e0"].weight
    assert found[~np.isnan(found)] / 0.5 == pytest.approx(weights)


def test_explicit_parents_of_a_chain_change_nothing_at_all(start: Any) -> None:
    named = [Said(s.role, s.ids, n - 1) for n, s in enumerate(chain())]
    plain, other = (step(start, group(start, said, fork()))[0] for said in (chain(), named))
    assert torch.equal(moved(start, plain), moved(start, other))


def test_what_is_recorded_of_a_token_is_recorded_where_it_stands(start: Any) -> None:
    pair = group(start, sub_agent(), chain())
    algo = {"advantage": {"name": "gae", "gamma": 0.9}, "kl_coef": 0.1, "minibatches": 1}
    settings = config(algo=algo, train={"lr": 1e-3})
    learner = Learner(copy.deepcopy(start), settings, reference=copy.deepcopy(start))
    signals: Any = learner.update([pair], 0).signals["e0"]
    mask, said = pair[0].tokens.trained_mask, pair[0].tokens.logp_policy
    for found in (signals.logp_train, signals.logp_ref):
        assert np.allclose(found[mask], said[mask], atol=1e-5)
    assert np.isnan(signals.logp_train[~mask]).all() and signals.value is not None
    # a head of zeros: the return of a token is the discounted reward at the end of its branch
    assert np.allclose(signals.returns[mask], [0.9**3, 0.9**2, 0.9, 1, 0.9, 1], atol=1e-6)


def test_a_correction_reads_the_sampler_of_the_same_tokens(start: Any) -> None:
    one, other = group(start, three_leaves(), chain())
    places = np.arange(len(one.tokens), dtype=np.float32)
    shifted = replace(one.tokens, logp_sampled=one.tokens.logp_policy - places / np.float32(10))
    algo = {
        "advantage": "dr_grpo",
        "aggregation": "token_mean",
        "correction": "tis",
        "correction_cap": 9.0,
    }
    _, update = step(start, [one.with_(tokens=shifted), other], algo=algo)
    mask = one.tokens.trained_mask
    expected = 0.5 / 12 * np.exp(places[mask] / 10)
    assert np.allclose(update.signals["e0"].weight[mask], expected, rtol=1e-4)


# --- advantages -------------------------------------------------------------------------------------------------------


def rewarded(one: Episode, reward: float, *turns: int) -> Episode:
    """The episode with a reward at some of its turns."""
    made = (replace(t, reward=reward) if t.index in turns else t for t in one.turns)
    return one.with_(turns=tuple(made))


def test_credit_follows_the_path_by_hand() -> None:
    one = rewarded(episode(three_leaves(), reward=2.0), 0.5, 2, 4)
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
    keys: Any = anchor_states(episode(said))
    assert [(first, np.frombuffer(ids, np.int32).tolist()) for first, ids in keys] == states


def test_turns_are_compared_at_the_same_depth_of_their_paths() -> None:
    tree, line = episode(three_leaves(), "tree", 1.0), episode(chain()[:2], "line", 0.0)
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


def test_a_result_rewards_the_turn_that_asked_on_its_path() -> None:
    one = episode(sub_agent())
    answered = replace(one.turns[4], results=(ToolResult("33", reward=2.0),))
    turns = (*one.turns[:4], answered, one.turns[5])
    np.testing.assert_equal(turn_rewards(one.with_(turns=turns)), [2.0, np.nan, np.nan])


def test_overlong_is_about_the_longest_sequence() -> None:
    algo = {"overlong_penalty": 1.0, "overlong_buffer": 5}
    shaping = Shaping(config(algo=algo).algo, RolloutConfig(), 10)
    (part,) = shaping.on_rollout_end(episode(fork()), Task("t", "p", "f", "train", ()))
    # branches of 9 and 8, 12 in all
    assert part.value == pytest.approx(-0.8) and part.detail.startswith("9 of 10")


# --- dispositions and batches -----------------------------------------------------------------------------------------


def test_a_crooked_tree_is_not_trained() -> None:
    good = episode(fork(), "good")
    crooked = (*good.turns[:2], replace(good.turns[2], parent=9), *good.turns[3:])
    late = good.with_(id="late", turns=crooked)
    roots = [Said("user", (1, 2)), Said("assistant", (3,)), Said("assistant", (4, 5), parent=-1)]
    bare, line = episode(roots, "bare"), episode(chain(), "line", 0.0)
    assert flaw(good) == "" and "turn 2 continues turn 9" in flaw(late)
    assert "first token" in flaw(bare)
    bad = Fact.SKIPPED_BAD_TOKENS
    wanted = {"good": Fact.TRAINED, "late": bad, "bare": bad, "line": Fact.TRAINED}
    assert decide([[good, late, bare, line]], drift={}) == wanted


@pytest.mark.parametrize("name", ["agent_error", "agent_timeout", "no_calls", "foreign_text"])
def test_what_is_no_answer_of_the_policy_is_masked(name: str) -> None:
    one = episode(chain(), "e", 1.0, outcome=Outcome(name))
    assert one.reward is None and decide([[one]], drift={}) == {"e": Fact(f"skipped:{name}")}


def test_a_padded_batch_has_a_row_per_branch_with_shared_tokens_as_context() -> None:
    one, gains = episode(fork(), reward=0.5), np.arange(6, dtype=np.float32)
    batch: Any = Batch.from_episodes([one], advantages=[gains])
    assert batch.episode_ids == ("e", "e") and batch.rewards.tolist() == [0.5, 0.5]
    there, own = batch.attention_mask.bool(), batch.response_mask.bool()
    assert [ids[mask].tolist() for ids, mask in zip(batch.input_ids, there, strict=True)] == [
        [10, 11, 12, 20, 21, 30, 22, 23, 24],
        [10, 11, 12, 20, 21, 31, 32, 25],
    ]
    assert batch.responses[own].tolist() == [20, 21, 22, 23, 24, 25]
    assert batch.advantages[own].tolist() == [0, 1, 2, 3, 4, 5]
