"""On-policy distillation: numbers against a plain computation, hints, servers, and what is refused."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli import Tokenizer
from agentrl_cli.errors import ConfigError, ModelError
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.packing import Segment
from agentrl_cli.learning.protocols import Update
from agentrl_cli.learning.update import Learner
from agentrl_cli.store import Store
from agentrl_cli.trainer.teacher import require_same_tokenizer
from agentrl_cli.types import Episode
from tests.helpers.cli import Cli
from tests.helpers.train import (
    after_training,
    episodes_of,
    trainer_of,
    write_model,
    write_project,
    write_tokenizer,
)
from tests.helpers.web import served
from tests.learning.test_ppo import TEMPERATURE, plain
from tests.learning.test_update import SPREAD, config, episodes, weights


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
