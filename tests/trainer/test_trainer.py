"""The trainer over a tiny random model: every episode has a fact, what was computed is stored, and it learns.

An update beside a cancelled turn, whose step goes on in the sampler's thread, on the model that is trained.
"""

import asyncio
import math
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.errors import ModelError, NotFound, PolicyError, StoreError, TemplateError
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.learning.forward import logprobs, trained_logprobs
from agentrl_cli.learning.packing import Segment, pack
from agentrl_cli.models.load import load_model
from agentrl_cli.store import Store
from agentrl_cli.trainer import Trainer
from agentrl_cli.types import Episode, Fact, Outcome, Sampling
from tests.helpers.local import policy_of, prompts, tiny
from tests.helpers.processes import soon
from tests.helpers.train import after_training, as_bytes, episodes_of, trainer_of, write_pack
from tests.helpers.trees import grafted


async def test_every_episode_has_a_fact_and_every_step_its_metrics(
    tmp_path: Path, model: Path
) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    held: list[float] = []

    class Weigher:
        def on_step_start(self) -> None:
            policy: Any = trainer.loaded.policy
            held.append(policy.metrics["rollout/kv_blocks"])

    async with trainer_of(tmp_path, model, [Weigher()]) as trainer:
        trainer.on_step = lambda step, metrics: seen.append((step, metrics))
        run = await trainer.train()
        for number in (signal.SIGINT, signal.SIGTERM):
            assert not asyncio.get_running_loop().remove_signal_handler(number)
        store = trainer.store
        assert (run.status, run.step, run.error) == ("finished", 2, "") and run.ended > run.started
        assert [step for step, _ in seen] == [1, 2] and held == [0, 0]
        for (step, metrics), stored in zip(seen, store.runs.steps(run.id), strict=True):
            episodes = episodes_of(store, run, step)
            facts = Counter(e.fact for e in episodes)
            assert len(episodes) == 8 and facts.keys() <= {str(fact) for fact in Fact}
            wanted = {
                **{f"facts/{fact}": count for fact, count in facts.items()},
                "reward": np.mean([e.reward for e in episodes]),
                "rewards/length/mean": np.mean([e.trained_tokens for e in episodes]),
                "solved": np.mean([e.outcome is Outcome.SOLVED for e in episodes]),
                "learning_rate": 1e-3,
            }
            assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
            assert metrics["grad_norm"] > 0 and math.isfinite(metrics["loss"])
            # What the policy said of its tokens while sampling is what training finds: the same weights.
            assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
            assert metrics["time/step"] >= metrics["time/rollout"] > 0
            assert {name: stored[name] for name in metrics} == pytest.approx(metrics)
        assert not store.live.all(run.id)
        assert [(c.kind, c.step) for c in store.runs.checkpoints(run.id)] == [("last", 2)]


async def test_signals_are_stored_and_read_back(tmp_path: Path, model: Path) -> None:
    """What is stored counts only for the same task and seed: the data may change between a kill and the resume."""
    async with after_training(tmp_path, model, train={"steps": 1}) as (trainer, run):
        episodes = episodes_of(trainer.store, run)
        trained = [e for e in episodes if e.fact == Fact.TRAINED]
        # Token mean: every token of the step weighs advantage / number of tokens.
        total = sum(e.trained_tokens for e in trained)
        for episode in episodes:
            signals = trainer.store.signals.get(episode.id)
            if episode.fact != Fact.TRAINED:
                assert signals is None
                continue
            mask, said = episode.tokens.trained_mask, episode.tokens.logp_policy
            assert signals is not None and signals.logp_ref is signals.value is None
            assert np.isnan(signals.advantage[~mask]).all() and not signals.clipped.any()
            for found, wanted in (
                (signals.advantage, episode.advantage),
                (signals.ratio, 1.0),  # one on-policy update
                (signals.logp_train, said[mask]),
                (signals.weight * total, episode.advantage),
            ):
                assert found[mask] == pytest.approx(wanted, abs=1e-4)
        for group in {e.group_id for e in trained}:
            gains = [e.advantage or 0.0 for e in trained if e.group_id == group]
            assert gains and sum(gains) == pytest.approx(0, abs=1e-4)
        first, second, *rest = trainer.collector.jobs(0)
        assert len(trainer.collector.finished([first, second, *rest])) == len(rest) + 2
        changed = [
            replace(first, seed=first.seed + 1),
            replace(second, task=replace(second.task, id="else")),
        ]
        assert len(trainer.collector.finished([*changed, *rest])) == len(rest)


async def test_learning_still_works(tmp_path: Path, model: Path) -> None:
    rollout = {"group_size": 8, "prompts_per_step": 4, "max_new_tokens": 1}
    train = {"steps": 10, "lr": 3e-2}
    async with after_training(tmp_path, model, rollout=rollout, train=train) as (trainer, run):
        rewards = [row["reward"] for row in trainer.store.runs.steps(run.id)]
    assert 0.3 < np.mean(rewards[:2]) < 0.7 and np.mean(rewards[-4:]) > 0.85


# --- checkpoints -----------------------------------------------------------------------------------------------------


async def test_checkpoints_rotate_and_load_in_transformers(tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    often = {"save_every": 1, "keep_last": 2, "eval_every": 2}
    train = {"steps": 4, "eval_tasks": 3, "eval_samples": 2, **often}
    async with after_training(tmp_path, model, train=train) as (trainer, run):
        store, weights = trainer.store, trainer.loaded.model.state_dict()
        kept = {(c.kind, c.step): Path(c.path) for c in store.runs.checkpoints(run.id)}
        evals = {row.step: row.pass_rate or 0.0 for row in store.runs.evals(run.id)}
    best = max(evals, key=lambda step: (evals[step], -(step or 0)))
    assert set(kept) == {("step", 2), ("step", 3), ("best", best), ("last", 4)}
    assert set(evals) == {0, 2, 4}, "the base is evaluated first"
    folders = {path.name for path in (Path(run.dir) / "checkpoints").iterdir()}
    assert folders == {path.name for path in kept.values()}, "nothing else is left there"
    # A resume takes over an evaluation of its step, unless it measures otherwise.
    for temperature in (1.0, 0.5):
        other: dict[str, Any] = {"train": train, "eval": {"temperature": temperature}}
        async with trainer_of(tmp_path, model, run=run, **other) as trainer:
            trainer.step, trainer.best = 4, 1.0
            result = await trainer.evaluate()
            again = result is not None and (result.reused, trainer.best) == (0, result.pass_rate)
            rows = trainer.store.runs.evals(run.id)
            found = [(row.step, row.metrics["temperature"]) for row in rows]
            assert found == [(0, 1.0), (2, 1.0), (4, temperature)] and again == (temperature < 1)
            trainer.step = 1  # as after a resume that could use none of the later checkpoints
            await trainer._save("step")
            steps = [c.step for c in trainer.store.runs.checkpoints(run.id) if c.kind == "step"]
            assert sorted(steps) == [1, 2, 3]
    loaded = AutoModelForCausalLM.from_pretrained(kept["last", 4]).state_dict()
    assert as_bytes(weights).items() <= as_bytes(loaded).items()
    assert AutoTokenizer.from_pretrained(kept["last", 4]).chat_template
    untrained = load_model(model, trainer.config.model, base=tmp_path).state_dict()
    assert as_bytes(untrained) != as_bytes(weights)


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
async def test_the_reference_is_the_model_before_training(
    tmp_path: Path, model: Path, lora: bool
) -> None:
    sections: dict[str, Any] = {"algo": {"kl_coef": 0.1}, "adapter": {"enabled": lora, "r": 4}}
    async with after_training(tmp_path, model, train={"lr": 1e-2}, **sections) as (trainer, run):
        store = trainer.store
        start = load_model(model, trainer.config.model, base=tmp_path)
        one, two = (row["kl"] for row in store.runs.steps(run.id))
        found = {e.id: (e, store.signals.get(e.id)) for e in episodes_of(store, run, 2)}
    assert one == pytest.approx(0, abs=1e-6) and two > 1e-5
    moved = []
    for episode, signals in found.values():
        if signals is not None and signals.logp_ref is not None:
            mask = episode.tokens.trained_mask
            with torch.no_grad():
                _, out = trained_logprobs(start, [[Segment.of(episode)]])
            assert signals.logp_ref[mask] == pytest.approx(out.logp.numpy(), abs=1e-4)
            moved.append(np.abs(signals.logp_ref[mask] - signals.logp_train[mask]).max())
    assert max(moved) > 1e-3


# --- drift -----------------------------------------------------------------------------------------------------------

# A last user message with "Go" gets a word that disappears once the model has answered: no audit
# foresees that.
SHIFTING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}{{ ' now' if loop.last and m.role == 'user' and 'Go' in m.content }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ALWAYS_SHIFTING = SHIFTING.replace(" and 'Go' in m.content", "")


@pytest.mark.parametrize(
    ("structural", "fact", "groups"),
    [("skip", "skipped:drift", (4, 0)), ("train", "trained", (2, 2))],
)
async def test_structural_drift(
    tmp_path: Path, model: Path, structural: str, fact: str, groups: tuple[int, int]
) -> None:
    """A group that it skips carries no signal, though its rewards differ: another is sampled."""
    (tmp_path / "shifting.jinja").write_text(SHIFTING)
    sections: dict[str, Any] = {
        "model": {"chat_template": "shifting.jinja"},
        "drift": {"structural": structural},
        "algo": {"drop_zero_variance": False},
        "rollout": {"resample_rounds": 1},
        "train": {"steps": 1},
    }
    async with after_training(tmp_path, model, **sections) as (trainer, run):
        episodes, marks = episodes_of(trainer.store, run), trainer.store.marks
        assert [e.fact for e in episodes] == [fact] * 4 * groups[0]
        for episode in episodes:
            got = [row.got for row in marks.drift(episode.id) if row.kind == "structural"]
            assert got and " now" in got[0]
        assert trainer.store.journal.folded_alerts(run.id), "structural drift is an alert"
        (metrics,) = trainer.store.runs.steps(run.id)
    assert (metrics["groups/sampled"], metrics["groups/signal"]) == groups
    assert len({e.reward for e in episodes}) > 1


async def test_a_template_that_cannot_be_appended_to_is_refused_or_accepted(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "shifting.jinja").write_text(ALWAYS_SHIFTING)
    named: dict[str, Any] = {"chat_template": "shifting.jinja"}
    with pytest.raises(TemplateError, match="cannot be extended by appending") as refused:
        async with trainer_of(tmp_path, model, model=named):
            pass
    assert "model.chat.append_only=true" in refused.value.hint
    assert refused.value.message.count("begin") == 1
    sections: dict[str, Any] = {"algo": {"drop_zero_variance": False}, "train": {"steps": 1}}
    sections["model"] = {**named, "append_only": True}
    async with after_training(tmp_path, model, **sections) as (trainer, run):
        episodes, store = episodes_of(trainer.store, run), trainer.store
        kinds = {row.kind for episode in episodes for row in store.marks.drift(episode.id)}
        lines = [line for line in store.journal.logs(run.id) if "by design" in line["text"]]
    assert [e.fact for e in episodes] == ["trained"] * 8
    assert "by_design" in kinds and "structural" not in kinds and len(lines) == 1


# --- hooks and controls ----------------------------------------------------------------------------------------------


class Diary:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_run_start(self) -> None:
        self.lines.append("run start")

    async def on_step_start(self) -> None:
        self.lines.append("step")

    def on_rollout_end(self, rollout: Episode) -> dict[str, float]:
        self.lines.append("rollout")
        return {"extra": 1.0}

    def on_batch(self, batch: Any) -> None:
        shape = batch.attention_mask.shape
        self.lines.append(f"batch {batch.input_ids.shape == shape and batch.response_mask.any()}")

    def on_update(self, metrics: dict[str, float]) -> None:
        self.lines.append(f"update {'loss' in metrics}")

    def on_eval(self, result: Any) -> None:
        self.lines.append(f"eval {len(result.attempts)}")

    async def on_checkpoint(self, path: Path) -> None:
        self.lines.append(f"checkpoint {path.name}")

    def on_run_end(self, error: BaseException | None) -> None:
        self.lines.append(f"run end {error}")


async def test_hooks_are_called_in_order(tmp_path: Path, model: Path) -> None:
    diary = Diary()
    train = {"steps": 2, "eval_every": 2, "eval_tasks": 1, "eval_samples": 1, "save_every": 1}
    sections: dict[str, Any] = {"algo": {"drop_zero_variance": False}, "train": train}
    async with after_training(tmp_path, model, [diary], **sections) as (trainer, run):
        parts = episodes_of(trainer.store, run)[0].reward_parts
    assert [part.value for part in parts if part.name == "extra"] == [1.0]
    step = ["step", *["rollout"] * 8, "batch True", "update True"]
    assert diary.lines == [
        "run start",
        *("rollout", "eval 1", "checkpoint best"),
        *(*step, "checkpoint step-000001"),
        *(*step, "rollout", "eval 1"),  # not better than the base
        "checkpoint last",
        "run end None",
    ]


class Asking:
    """Asks the run for something through the store, as the watch screen does, once after its first step."""

    def __init__(self, db: Path, *controls: tuple[str, dict[str, Any]]) -> None:
        self.db, self.asked, self.controls = db, controls, list(controls)

    def on_update(self, run: Any) -> None:
        with Store.open(self.db) as store:
            (row,) = store.runs.all()
            while self.controls:
                store.controls.add(row.id, *self.controls.pop(0))


async def test_controls_set_checkpoint_evaluate_and_stop(tmp_path: Path, model: Path) -> None:
    wanted: dict[str, list[Any]] = {
        "train.lr": [0.25, -1],
        "model.name": ["x"],
        "train.steps": [3],
        "train.eval.every": [3],
    }
    given = [("set", {"key": key, "value": v}) for key, values in wanted.items() for v in values]
    given += [("checkpoint", {}), ("evaluate", {}), ("evaluate", {})]
    asking = Asking(tmp_path / "runs" / "agentrl.db", *given)
    algo, train = {"drop_zero_variance": False}, {"steps": 2, "eval_tasks": 2, "eval_samples": 1}
    async with after_training(tmp_path, model, [asking], algo=algo, train=train) as (trainer, run):
        store = trainer.store
        assert [row["learning_rate"] for row in store.runs.steps(run.id)] == [1e-3, 0.25, 0.25]
        assert (run.status, run.step, run.total_steps) == ("finished", 3, 3)
        refused = {a["name"]: a for a in store.journal.folded_alerts(run.id)}["set_refused"]
        assert refused["count"] == 2 and "model.name" in refused["text"]
        # A changed setting is never applied to steps from before it: a kill leads back to this checkpoint.
        assert [c.step for c in store.runs.checkpoints(run.id) if c.kind == "step"] == [1]
        assert [(row.step, row.n_tasks) for row in store.runs.evals(run.id)] == [(1, 2), (3, 2)]
        assert "step 1 was evaluated already: 0" in str(store.journal.logs(run.id))
        # What was changed is written down: a resume continues with it.
        assert run.config["train"]["lr"] == trainer.config.train.lr == 0.25
        assert "lr: 0.25" in (Path(run.dir) / "config.yaml").read_text()
        taken = [(one.action, one.taken is not None) for one in store.controls.all(run.id)]
        assert taken == [(action, True) for action, _ in asking.asked]
        assert store.controls.take(run.id) == []


async def test_a_changed_setting_is_stored_with_its_checkpoint_or_not_at_all(
    tmp_path: Path, model: Path
) -> None:
    """Else a resume would use it for steps that were made without it, from the checkpoint before."""
    asking = Asking(tmp_path / "runs" / "agentrl.db", ("set", {"key": "train.lr", "value": 0.25}))
    async with trainer_of(tmp_path, model, [asking], train={"steps": 3}) as trainer:
        (Path(trainer.run.dir) / "checkpoints").write_text("")  # so that none can be written
        with pytest.raises(StoreError, match="step-000001"):
            await trainer.train()
        run = trainer.store.runs.get(trainer.run.id)
    assert (run.status, run.step, run.config["train"]["lr"]) == ("failed", 1, 1e-3)


async def test_a_control_stops_the_run_after_its_step(tmp_path: Path, model: Path) -> None:
    asking = Asking(tmp_path / "runs" / "agentrl.db", ("stop", {}))
    async with after_training(tmp_path, model, [asking], train={"steps": 5}) as (trainer, run):
        assert (run.status, run.step) == ("stopped", 1) and "control" in run.error
        assert [(c.kind, c.step) for c in trainer.store.runs.checkpoints(run.id)] == [("last", 1)]


class Stuck:
    """An episode waits until it is cancelled: without `stop {"now": true}` the step would never end."""

    def __init__(self, db: Path) -> None:
        self.db = db

    async def on_rollout_start(self, **_: Any) -> None:
        with Store.open(self.db) as store:
            run = store.runs.all()[0].id
            if not store.controls.all(run):
                store.controls.add(run, "stop", {"now": True})
        await asyncio.sleep(3600)


class Interrupt:
    """Twice Ctrl-C while the run starts."""

    async def on_run_start(self, **_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(3600)


@pytest.mark.parametrize("kind", [Stuck, Interrupt])
async def test_what_stops_a_run_at_once_leaves_its_status(
    tmp_path: Path, model: Path, kind: Any
) -> None:
    hook = kind(tmp_path / "runs" / "agentrl.db") if kind is Stuck else kind()
    diary = Diary()
    async with trainer_of(tmp_path, model, [hook, diary], train={"steps": 5}) as trainer:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(trainer.train())
        assert diary.lines[-1] == "run end ", "what a hook opened is closed"
        store, run = trainer.store, trainer.store.runs.get(trainer.run.id)
        assert (run.status, run.error, run.step) == ("stopped", "stopped at once", 0) and run.ended
        events = [row["kind"] for row in store.journal.events(run.id)]
        assert events == ["inputs", "machine", *["control:stop"] * (kind is Stuck)]
        assert all(one.taken for one in store.controls.all(run.id))


async def test_a_paused_run_waits(tmp_path: Path, model: Path) -> None:
    db = tmp_path / "runs" / "agentrl.db"
    async with trainer_of(tmp_path, model, [Asking(db, ("pause", {}))]) as trainer:
        training, store = asyncio.create_task(trainer.train()), trainer.store

        def paused() -> bool:
            events = store.journal.events(trainer.run.id, 0)
            return any(row["kind"] == "control:pause" for row in events)

        assert await soon(paused)
        await asyncio.sleep(0.5)
        assert trainer.step == 1 and not training.done()
        with Store.open(db) as screen:
            screen.controls.add(trainer.run.id, "resume")
        run = await training
    assert (run.status, run.step) == ("finished", 2)


async def test_tasks_of_several_packs(tmp_path: Path, model: Path) -> None:
    for name in ("one", "two"):
        write_pack(tmp_path / name)
        text = (tmp_path / name / "task.yaml").read_text()
        (tmp_path / name / "task.yaml").write_text(text.replace("name: bandit", f"name: {name}"))
    odd = tmp_path / "two" / "data" / "train.jsonl"
    odd.write_text(odd.read_text().replace('"even"', '"odd"'))
    (tmp_path / "one" / "data" / "test.jsonl").unlink()
    task = {"packs": ["one", "two"], "limit": 2}
    async with trainer_of(tmp_path, model, task=task, train={"eval_every": 1}) as trainer:
        assert [item.pack for item in trainer.collector.tasks] == ["one", "one", "two", "two"]
        assert {item.pack for item in trainer.eval_tasks} == {"two"}
        run = await trainer.train()
        lines = "\n".join(row["text"] for row in trainer.store.journal.logs(run.id))
        assert re.search(
            r"^step 1/.*  solved by pack one [\d.]+, two [\d.]+  [\d.]+ s$", lines, re.M
        )
    async with trainer_of(tmp_path, model, task={**task, "families": ["odd"]}) as trainer:
        assert [item.pack for item in trainer.collector.tasks] == ["two", "two"]
    with pytest.raises(NotFound, match="odds"):
        async with trainer_of(tmp_path, model, task={**task, "families": ["odds"]}):
            pass


async def test_a_step_trains_branched_episodes_and_stores_every_tokens_numbers(
    tmp_path: Path,
    model: Path,
) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 1},
        "algo": {"advantage": "dr_grpo", "aggregation": "episode_mean"},
    }
    async with after_training(tmp_path / "first", model, **sections) as (trainer, run):
        made = sorted(episodes_of(trainer.store, run), key=lambda e: (e.group_id or "", e.sample))
    async with trainer_of(tmp_path / "second", model, **sections) as trainer:
        trees = {}
        for n, one in enumerate(made):
            # the answer of a sibling to the same prompt, as a second branch
            sibling = made[n - n % 4 + (n + 1) % 4]
            at = next(turn.index for turn in one.turns if turn.role == "assistant")
            tree = grafted(one, sibling, at)
            trees[one.id] = tree.with_(run_id=trainer.run.id, fact="", advantage=None)
        trainer.store.episodes.add(trees.values(), tokenizer=trainer.loaded.hash)
        await trainer.train()
        back = episodes_of(trainer.store, trainer.run)
        assert {e.id for e in back} == set(trees)  # none was sampled again
        assert trainer.store.runs.steps(trainer.run.id)[-1]["branches/mean"] == 2.0
        trained = [e for e in back if e.fact == "trained"]
        assert trained
        for e in trained:
            assert len(e.branches) == 2 and e.turns == trees[e.id].turns
            signals, mask = trainer.store.signals.get(e.id), e.tokens.trained_mask
            assert signals is not None and np.isnan(signals.weight[~mask]).all()
            weight = (e.advantage or 0.0) / (e.trained_tokens * len(trained))
            assert np.allclose(signals.weight[mask], weight, rtol=1e-4)
            # each branch under the weights that sampled it: the log-probabilities of then, token by token
            assert np.allclose(signals.logp_train[mask], e.tokens.logp_policy[mask], atol=1e-4)


# --- updates beside cancelled turns ---


UPDATES, TURNS = 3, 24


class SlowStep:
    """A hook of a module that keeps the sampler's thread inside its forward for a moment."""

    def __init__(self) -> None:
        self.inside = threading.Event()

    def __call__(self, module: torch.nn.Module, given: Any) -> None:
        if threading.current_thread().name.startswith("policy"):
            self.inside.set()
            time.sleep(0.002)


async def cancelled_in_a_step(
    policy: LocalPolicy, step: SlowStep, number: int
) -> list[asyncio.Task[Any]]:
    """Turns that were cancelled while the sampler's thread computes one of their tokens; they are not awaited."""
    sampling = Sampling(max_new_tokens=60)
    turns = [
        asyncio.create_task(policy.generate(f"{number}-{n}", [5, 6, 7 + n], sampling))
        for n in range(TURNS)
    ]
    step.inside.clear()
    while not step.inside.is_set():
        await asyncio.sleep(0)
    for turn in turns:
        turn.cancel()
    return turns


async def weights_after(
    trainer: Trainer, groups: Sequence[Sequence[Episode]], disturbed: bool
) -> dict[str, torch.Tensor]:
    policy: Any = trainer.policy
    step, turns = SlowStep(), list[asyncio.Task[Any]]()
    if disturbed:
        policy.model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(step)
        policy.set_version(policy.weights_version)  # with new weights it looks for hooks
    before = trainer.loaded.model.config._attn_implementation
    for number in range(UPDATES):
        if disturbed:
            turns += await cancelled_in_a_step(policy, step, number)
        facts, _ = await trainer.learn(groups, number)
        assert "trained" in facts.values()
        for model in (trainer.loaded.model, policy.model):
            assert model.config._attn_implementation == before and not model.training
    ended = await asyncio.gather(*turns, return_exceptions=True)
    assert {type(error) for error in ended} <= {asyncio.CancelledError}
    return {name: weight.clone() for name, weight in trainer.loaded.model.state_dict().items()}


@pytest.mark.parametrize("staleness", [0, 1])
async def test_turns_cancelled_before_every_update_change_nothing(
    tmp_path: Path, model: Path, staleness: int
) -> None:
    weights, groups = [], None
    given: dict[str, Any] = {
        "rollout": {"async_staleness": staleness},
        "train": {"steps": UPDATES},
    }
    for disturbed in (False, True):
        async with trainer_of(tmp_path / str(disturbed), model, **given) as trainer:
            groups = groups or await trainer.collector.sample(0)
            weights.append(await weights_after(trainer, groups, disturbed))
    assert as_bytes(weights[0]) == as_bytes(weights[1])


@pytest.mark.parametrize("waits", ["rest", "turn"])
async def test_who_cancels_a_turn_can_wait_until_its_step_is_over(waits: str) -> None:
    policy, step, done = policy_of(tiny()), SlowStep(), []
    policy.model.get_submodule("model.layers.0").register_forward_pre_hook(step)
    policy.model.get_submodule("model.layers.1").register_forward_hook(lambda *_: done.append(1))
    policy.set_version("hooked")
    turn, *_ = await cancelled_in_a_step(policy, step, 0)
    begun = len(done)
    await (policy.rest() if waits == "rest" else asyncio.wait([turn]))
    after = len(done)
    await asyncio.sleep(0.01)
    assert after == len(done) > begun
    assert waits == "turn" or policy.metrics["rollout/kv_blocks"] == 0
    said = await policy.generate("b", prompts()[1], Sampling(max_new_tokens=3, stop_ids=()))
    assert len(said.ids) == 3
    await policy.close()


async def test_a_model_that_was_changed_is_named_without_internals() -> None:
    def without(module: Any, args: Any, given: Any) -> Any:
        """Take from a layer what tells it how to attend."""
        return args, {name: one for name, one in given.items() if name not in ("view", "packing")}

    policy = policy_of(tiny())
    packed = pack([[Segment(np.arange(6, 12, dtype=np.int32), np.arange(6) > 2)]])
    logprobs(policy.model, packed)
    for layer in policy.model.model.layers:
        layer.self_attn.register_forward_pre_hook(without, with_kwargs=True)
    policy.set_version("changed")
    with pytest.raises(PolicyError, match="was changed while it was in use") as sampling:
        await policy.generate("a", prompts()[0], Sampling(max_new_tokens=3))
    with pytest.raises(ModelError, match="was changed while it was in use") as learning:
        logprobs(policy.model.train(), packed)
    for error in (sampling.value, learning.value):
        assert "agentrl train --resume last" in error.hint and "asked" not in error.message
    await policy.close()
