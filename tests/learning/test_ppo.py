"""PPO's value head: by hand, multi-turn, with LoRA and full weights; the greedy baseline; both resume to the bit.

On-policy distillation: numbers against a plain computation, hints, servers, and what is refused.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli import Tokenizer
from agentrl_cli.config.estimators import Gae
from agentrl_cli.errors import ConfigError, ModelError
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.forward import logprobs
from agentrl_cli.learning.packing import Segment, pack
from agentrl_cli.learning.protocols import Update
from agentrl_cli.learning.update import Learner
from agentrl_cli.learning.value import Critic
from agentrl_cli.reports.rescore import estimate
from agentrl_cli.store import RunRow, Store
from agentrl_cli.trainer.teacher import require_same_tokenizer
from agentrl_cli.types import Episode, Fact, Origin, Outcome, Turn
from tests.helpers.cli import Cli
from tests.helpers.train import (
    after_training,
    episodes_of,
    spawn,
    spawn_well,
    trainer_of,
    write_model,
    write_project,
    write_tokenizer,
)
from tests.helpers.web import served
from tests.learning.test_update import SPREAD, config, episodes, weights
from tests.trainer.test_resume import ending, plan, project_of

GAE = {"advantage": "gae", "value_lr": 1e-2}


def multi_turn(episode: Episode) -> Episode:
    """The same tokens with a tool's answer of two tokens in the middle of what was said, if it is long enough."""
    mask = episode.tokens.trained_mask
    first, n = int(np.flatnonzero(mask)[0]), len(mask)
    if n - first <= 3:
        return episode
    origin = episode.tokens.origin.copy()
    origin[first + 1 : first + 3] = Origin.TOOL
    ends = [0, first, first + 1, first + 3, n]
    roles = ("user", "assistant", "tool", "assistant")
    turns = tuple(Turn(i, role, (), ends[i], ends[i + 1]) for i, role in enumerate(roles))
    return episode.with_(tokens=replace(episode.tokens, origin=origin), turns=turns)


def critical(start: Any, algo: dict[str, Any], seed: int = 0, **train: Any) -> Any:
    """A learner whose value head says something."""
    learner: Any = Learner(copy.deepcopy(start), config(algo={**GAE, **algo}, train=train))
    generator = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(learner.compute.critic.head.out.weight, generator=generator)
    return learner


@pytest.mark.parametrize("coef", [0.0, 0.25])
def test_how_much_of_the_value_loss_reaches_the_policy(coef: float) -> None:
    torch.manual_seed(0)
    critic = Critic(3, Gae(name="gae", value_coef=coef))
    torch.nn.init.normal_(critic.head.out.weight)
    states = torch.randn(5, 3, requires_grad=True)
    plain, values = critic.head(states), critic.values(states)
    assert torch.equal(values, plain)
    (whole,) = torch.autograd.grad(plain.sum(), states)
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert critic.head.inner.weight.grad is not None and (states.grad is None) == (coef == 0)
    if states.grad is not None:
        torch.testing.assert_close(states.grad, coef * whole)


def test_values_and_returns_of_a_multi_turn_episode(start: Any) -> None:
    groups = [[multi_turn(e) for e in group] for group in episodes(start, [[0, 1, 1], [1, 0, 0.5]])]
    learner = critical(start, {})
    head = copy.deepcopy(learner.compute.critic.head)
    update = learner.update(groups, 0)
    raw, gains, returns = [], [], []
    for episode in (episode for group in groups for episode in group):
        mask, found = episode.tokens.trained_mask, update.signals[episode.id]
        with torch.no_grad():
            values = head(logprobs(start, pack([[Segment.of(episode)]])).states).numpy()
        np.testing.assert_allclose(found.value[mask], values, atol=1e-5)
        np.testing.assert_allclose(found.returns[mask], episode.graded_reward, atol=1e-5)
        assert np.isnan(found.value[~mask]).all()
        raw.append(found.returns[mask] - found.value[mask])
        gains.append(found.advantage[mask])
        returns.append(found.returns[mask])
    gaps = np.concatenate(raw)
    whitened = (gaps - gaps.mean()) / gaps.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(gains), whitened, atol=1e-4)
    wanted = {
        "value/explained_variance": 1 - gaps.var() / np.concatenate(returns).var(),
        "value/loss": 0.5 * float((gaps**2).mean()),
    }
    assert {name: update.metrics[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("on", [True, False])
def test_an_episode_that_was_cut_off_continues_from_the_value_of_where_it_was_left(
    start: Any, tmp_path: Path, on: bool
) -> None:
    """Of three attempts two were cut off: their return is the reward and the discounted value behind the last token.

    The one that ended gets its reward alone; without the option all do.
    """
    (made,) = episodes(start, [[1, 0.5, 0.25]])
    outcomes = (Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS, Outcome.FAILED)
    group = [
        e.with_(
            outcome=outcome,
            turns=(Turn(0, "user", (), 0, 10), Turn(1, "assistant", (), 10, len(e.tokens))),
        )
        for e, outcome in zip(made, outcomes, strict=True)
    ]
    learner = critical(start, {"gamma": 0.9, "value_bootstrap": on})
    head = copy.deepcopy(learner.compute.critic.head)
    signals = learner.update([group], 0).signals
    for episode in group:
        ids, mask = np.append(episode.tokens.ids, 7).astype(np.int32), episode.tokens.trained_mask
        behind = pack([[Segment(ids, np.arange(len(ids)) == len(ids) - 1)]])
        with torch.no_grad():
            left = float(head(logprobs(start, behind).states))
        more = 0.9 * left if on and episode.outcome is not Outcome.FAILED else 0.0
        expected = 0.9 ** np.arange(mask.sum())[::-1] * (episode.graded_reward + more)
        assert abs(left) > 1e-3 and len(signals[episode.id].logp_train) == len(mask)
        np.testing.assert_allclose(signals[episode.id].returns[mask], expected, atol=1e-5)
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow(id="", name="r", model="m", pack="p", total_steps=1))
        store.episodes.add(episode.with_(run_id=run.id, step=1) for episode in group)
        for episode in group:
            store.signals.add(episode.id, signals[episode.id])
        again = estimate(group, learner.config.algo, store)
    kept = [signals[e.id].advantage[e.tokens.trained_mask] for e in group]
    np.testing.assert_allclose(np.concatenate(again), np.concatenate(kept), atol=1e-4)


@pytest.mark.parametrize("value_coef", [0.0, 0.5])
def test_packing_and_micro_batches_give_the_gradient_of_one_episode_at_a_time(
    start: Any, value_coef: float
) -> None:
    groups = [[multi_turn(e) for e in g] for g in episodes(start, [[0, 1, 1], [1, 0, 0.5]])]
    found = []
    for budget in (4096, 1):
        torch.manual_seed(3)
        algo = {"value_coef": value_coef, "aggregation": "seq_mean"}
        learner = critical(start, algo, seed=1, token_budget=budget, lr=1e3)
        compute, critic = learner.compute, learner.compute.critic
        compute.optimizer = torch.optim.SGD(compute.model.parameters())
        critic.optimizer = torch.optim.SGD(critic.head.parameters(), lr=1.0)
        trained = [*compute.model.parameters(), *critic.head.parameters()]
        before = torch.cat([p.detach().flatten() for p in trained])
        learner.update(groups, 0)
        found.append(before - torch.cat([p.detach().flatten() for p in trained]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


def test_several_epochs_and_mini_batches_fit_the_values(start: Any) -> None:
    groups = episodes(start, [[1, 1, 1], [0, 0, 0]])
    settings = config(algo={**GAE, "epochs": 4, "minibatches": 2, "value_clip": None})
    learner: Any = Learner(copy.deepcopy(start), settings)
    first, *_, last = (learner.update(groups, step).metrics for step in range(6))
    state = learner.compute.critic.optimizer.state_dict()["state"]
    assert {int(s["step"]) for s in state.values()} == {6 * 4 * 2}
    assert "value/clip_ratio" in first
    assert first["value/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert last["value/explained_variance"] > 0.5 and last["value/loss"] < first["value/loss"]


@pytest.mark.parametrize(("clip", "held"), [(1e-4, True), (10.0, False)])
def test_values_are_held_near_the_old_ones(start: Any, clip: float, held: bool) -> None:
    groups = episodes(start, [[1, 1, 1], [1, 1, 1]])  # all values rise towards the returns
    algo = {**GAE, "epochs": 4, "value_clip": clip, "value_lr": 5e-3}
    metrics = Learner(copy.deepcopy(start), config(algo=algo)).update(groups, 0).metrics
    assert metrics["value/clip_ratio"] > 0.5 if held else metrics["value/clip_ratio"] == 0


# --- in the trainer --------------------------------------------------------------------------------------------------


PPO = {
    "advantage": "gae",
    "epochs": 2,
    "minibatches": 2,
    "entropy_coef": 0.01,
    "entropy_target": 4.0,
}


@pytest.mark.parametrize(
    ("algo", "adapter"),
    [(PPO, {"enabled": True, "r": 4}), ({"advantage": "remax"}, {"enabled": False})],
    ids=str,
)
def test_killed_and_resumed_is_never_interrupted(
    tmp_path: Path, model: Path, algo: dict[str, Any], adapter: dict[str, Any]
) -> None:
    whole, cut = (
        project_of(tmp_path / name, model, algo=algo, adapter=adapter) for name in ("whole", "cut")
    )
    spawn_well(whole, "train")
    for event, call, words in (("update", 3, ()), ("batch", 2, ("--resume", "last"))):
        plan(cut, event, call)
        assert spawn(cut, "train", *words)[0] == -9
    spawn_well(cut, "train", "--resume", "last")
    found = ending(cut)
    assert found == ending(whole) and ("critic" in found["state"]) == (algo is PPO)


async def test_remax_compares_with_a_greedy_attempt_that_is_stored_and_not_trained(
    tmp_path: Path, model: Path
) -> None:
    async with after_training(tmp_path, model, algo={"advantage": "remax"}) as (trainer, run):
        store, algo = trainer.store, trainer.config.algo
        rows = store.episodes.rows(store.episodes.ids("kind:baseline step:1", "time", run=run.id))
        trained = episodes_of(store, run, step=1)
        later = [float(a.mean()) for a in estimate(trained, algo, store)]
        again = store.episodes.get(rows[0].id).tokens
    assert [row.fact for row in rows] == [Fact.SKIPPED_BASELINE] * 2
    greedy = {(row.group_id or "").removesuffix("-greedy"): row.reward or 0 for row in rows}
    assert [e.fact for e in trained] == ["trained"] * 8
    advantages = pytest.approx([e.advantage for e in trained], abs=1e-6)
    assert [e.graded_reward - greedy[e.group_id or ""] for e in trained] == advantages
    assert later == advantages, "rescore finds them"
    mask = again.trained_mask
    assert again.ids[mask].tolist() == again.top_ids[mask][:, 0].tolist()


# --- on-policy distillation ---


TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def expert(start: Any) -> Any:
    torch.manual_seed(1)
    model = copy.deepcopy(start)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.1 * torch.randn_like(tensor)
    return model.requires_grad_(False)


def distilled(
    student: Any, teacher: Any, groups: list[list[Episode]], hint: Any = None, **keys: Any
) -> Update:
    settings = config(
        algo={"advantage": {"name": "distill", **keys}},
        train={"optimizer": "adamw"},
        rollout={"temperature": TEMPERATURE},
    )
    chosen: Any = settings.algo.advantage
    learner: Any = Learner(student, settings, teacher=Teacher(chosen, teacher, hint=hint))
    learner.compute.optimizer = torch.optim.SGD(student.parameters(), lr=1.0)
    learner.learning_rate = lambda step: 1.0
    update: Update = learner.update(groups, 0)
    return update


def plain(model: Any, ids: Any) -> Any:
    """[n − 1, V] log-probabilities after each token but the last, by transformers alone."""
    logits = model(
        input_ids=torch.as_tensor(np.asarray(ids, np.int64))[None], use_cache=False
    ).logits[0, :-1]
    return torch.log_softmax(logits.double() / TEMPERATURE, -1)


def test_the_advantage_is_the_reverse_kl_of_the_sampled_token(start: Any, expert: Any) -> None:
    groups = episodes(start, SPREAD)
    update = distilled(copy.deepcopy(start), expert, groups, coef=0.7, reward_coef=0.5)
    gaps = []
    for group in groups:
        rewards = np.array([float(e.graded_reward) for e in group])
        gains = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        for episode, gain in zip(group, gains, strict=True):
            ids, mask = episode.tokens.ids, episode.tokens.trained_mask
            picked = torch.as_tensor(ids[1:].astype(np.int64))[:, None]
            with torch.no_grad():
                own, other = (
                    plain(model, ids).gather(1, picked)[:, 0].numpy()[mask[1:]]
                    for model in (start, expert)
                )
            found: Any = update.signals[episode.id]
            for name, wanted in (
                ("advantage", 0.7 * (other - own) + 0.5 * gain),
                ("logp_teacher", other),
                ("reward_advantage", gain),
            ):
                np.testing.assert_allclose(getattr(found, name)[mask], wanted, atol=1e-5)
            gaps.append(own - other)
    assert update.metrics["distill/kl"] == pytest.approx(np.concatenate(gaps).mean(), abs=1e-5)


@pytest.mark.parametrize("form", ["full", "top_k"])
def test_the_gradient_is_that_of_the_kl_over_the_vocabulary(
    start: Any, expert: Any, form: str
) -> None:
    groups = episodes(start, SPREAD)
    student, other = copy.deepcopy(start), copy.deepcopy(start)
    before = weights(student)
    distilled(student, expert, groups, form=form, top_k=7, coef=0.3)
    terms = []
    for episode in (e for group in groups for e in group):
        rows = torch.as_tensor(episode.tokens.trained_mask[1:])
        own, target = (
            plain(other, episode.tokens.ids)[rows],
            plain(expert, episode.tokens.ids)[rows],
        )
        if form == "top_k":
            kept = own.topk(7, -1).indices
            own, target = (
                torch.cat([part, (1 - part.exp().sum(-1, keepdim=True)).log()], -1)
                for part in (own.gather(1, kept), target.gather(1, kept))
            )
        terms.append((own.exp() * (own - target)).sum(-1))
    (0.3 * torch.cat(terms).mean()).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    for name, weight in student.named_parameters():
        moved = before[name] - weight.detach()
        wanted = dict(other.named_parameters())[name].grad
        torch.testing.assert_close(moved, wanted, atol=1e-5, rtol=1e-3)


def test_a_hint_is_in_the_teachers_prompt_alone(start: Any) -> None:
    groups, more = episodes(start, SPREAD), np.array([9, 8, 7], np.int32)
    update = distilled(copy.deepcopy(start), None, groups, hint=lambda episode: more)
    for episode in (e for group in groups for e in group):
        ids, mask = episode.tokens.ids, episode.tokens.trained_mask
        first = int(np.flatnonzero(mask)[0])
        with torch.no_grad():
            every = plain(start, np.concatenate([ids[:first], more, ids[first:]])).numpy()
        wanted = [every[first + len(more) + n - 1, id_] for n, id_ in enumerate(ids[first:])]
        found: Any = update.signals[episode.id].logp_teacher
        np.testing.assert_allclose(found[mask], wanted, atol=1e-5)


def test_another_tokenizer_is_refused_and_another_template_is_not(tmp_path: Path) -> None:
    for name, template in (("a", None), ("b", "{{ messages }}")):
        write_tokenizer(tmp_path / name, template)
    mine, theirs = (Tokenizer.load(tmp_path / name) for name in "ab")
    require_same_tokenizer("b", theirs, mine)
    file = tmp_path / "b" / "tokenizer.json"
    file.write_text(file.read_text().replace("<tool_call>", "<call>"))
    with pytest.raises(ConfigError, match="another tokenizer"):
        require_same_tokenizer("b", Tokenizer.load(tmp_path / "b"), mine)


# --- through the trainer ---------------------------------------------------------------------------------------------


@contextmanager
def scoring(model: Any, tokenizer: Tokenizer, cut: bool = False) -> Iterator[str]:
    """A server like vLLM's /completions with `echo`; `cut`: one that reports the new token alone."""

    def answer(path: str, asked: Any) -> Any:
        ids = asked["prompt"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0].double()
        logps = [None, *torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]].tolist(), -1.0]
        texts = [*(tokenizer.decode([i]) for i in ids), "x"]
        found = {"token_logprobs": logps[-1:] if cut else logps, "tokens": texts}
        return {"choices": [{"text": "", "finish_reason": "length", "logprobs": found}]}

    with served(answer) as url:
        yield f"{url}/v1"


async def test_a_server_scores_as_the_model_that_it_serves(tmp_path: Path, expert: Any) -> None:
    folder, other = write_model(tmp_path / "model"), tmp_path / "expert"
    expert.save_pretrained(other)
    write_tokenizer(other)
    found, tokenizer = [], Tokenizer.load(folder)

    def by(teacher: str) -> dict[str, Any]:
        return {"advantage": {"name": "distill", "teacher": teacher}}

    with scoring(expert, tokenizer) as url:
        for name, teacher in (("a", url), ("b", str(other))):
            given: dict[str, Any] = {"algo": by(teacher), "train": {"steps": 1}}
            async with after_training(tmp_path / name, folder, **given) as (trainer, run):
                signals = [trainer.store.signals.get(e.id) for e in episodes_of(trainer.store, run)]
            scores = [s.logp_teacher for s in signals if s and s.logp_teacher is not None]
            found.append(np.sort(np.concatenate(scores)))  # the order of the end is not fixed
    assert np.isfinite(found[0]).sum() > 20
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    with scoring(expert, tokenizer) as url:
        async with trainer_of(tmp_path / "seen", folder, algo=by(url)) as trainer:
            learner: Any = trainer.learner
            seen = Segment(np.arange(3, dtype=np.int32), np.arange(3) > 1, (b"an image",))
            with pytest.raises(ConfigError, match="reads text alone"):
                learner.teacher.server([seen])
    with scoring(expert, tokenizer, cut=True) as url, pytest.raises(ModelError, match="no log-pro"):
        async with trainer_of(tmp_path / "c", folder, algo=by(url)):
            pass


def test_the_command_line_trains_with_a_teacher_and_replay_shows_it(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    teacher = write_model(tmp_path / "teacher", only=200)
    chosen = {"name": "distill", "teacher": str(teacher), "form": "full"}
    write_project(tmp_path, model, algo={"advantage": chosen}, train={"lr": 0.02, "steps": 8})
    cli("train")
    with Store.open(tmp_path / "runs" / "agentrl.db") as store:
        (run,) = store.runs.all()
        first = episodes_of(store, run)[0].id
        steps = [row["distill/loss"] for row in store.runs.steps(run.id)]
    assert steps[-1] < 0.5 * steps[0], "the student comes to the teacher"
    shown = cli("replay", first, "--tokens")
    assert "logp_teacher" in shown and "reward_advantage" in shown


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "learns nothing without a hint"),
        ({"hint": "The answer is {nothing}."}, "Fields of its row"),
        ({"teacher": "http://127.0.0.1:9/v1", "form": "full"}, "at temperature 1 only"),
    ],
)
async def test_what_cannot_be_is_refused_at_the_start(
    tmp_path: Path, model: Path, keys: dict[str, Any], said: str
) -> None:
    algo = {"advantage": {"name": "distill", **keys}}
    with pytest.raises(ConfigError) as caught:
        async with trainer_of(tmp_path / "p", model, algo=algo):
            pass
    assert said in f"{caught.value.message} {caught.value.hint}"
