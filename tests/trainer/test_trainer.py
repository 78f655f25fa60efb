"""The trainer over a tiny random model: every episode has a fact, what was computed is stored, and it learns."""

import asyncio
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.errors import NotFound, TemplateError
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.packing import Segment
from agentrl_cli.models.load import load_model
from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Fact, Outcome
from tests.helpers.train import TASK_PY, after_training, episodes_of, trainer_of, write_pack
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
        assert held == [0, 0]
        for number in (signal.SIGINT, signal.SIGTERM):
            assert not asyncio.get_running_loop().remove_signal_handler(number)
        store = trainer.store
        assert (run.status, run.step, run.error) == ("finished", 2, "") and run.ended > run.started
        assert [step for step, _ in seen] == [1, 2]
        for step, metrics in seen:
            episodes = episodes_of(store, run, step)
            assert len(episodes) == 8 and all(
                e.kind == "train" and e.outcome is not None for e in episodes
            )
            facts = [e.fact for e in episodes]
            assert set(facts) <= {str(fact) for fact in Fact}
            for fact in set(facts):
                assert metrics[f"facts/{fact}"] == facts.count(fact)
            assert metrics["reward"] == pytest.approx(np.mean([e.reward for e in episodes]))
            assert metrics["rewards/length/mean"] == pytest.approx(
                np.mean([e.trained_tokens for e in episodes])
            )
            assert metrics["solved"] == np.mean([e.outcome is Outcome.SOLVED for e in episodes])
            assert (
                metrics["learning_rate"] == 1e-3
                and metrics["grad_norm"] > 0
                and math.isfinite(metrics["loss"])
            )
            # What the policy said of its tokens while sampling is what training finds: the same weights.
            assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
            assert metrics["time/step"] >= metrics["time/rollout"] > 0
            stored = next(row for row in store.runs.steps(run.id) if row["step"] == step)
            assert {name: stored[name] for name in metrics} == pytest.approx(metrics)
        assert [row["step"] for row in store.runs.steps(run.id)] == [1, 2]
        assert not store.live.all(run.id)
        (kept,) = store.runs.checkpoints(run.id)
        assert (kept.kind, kept.step) == ("last", 2)


async def test_signals_are_stored_and_read_back(tmp_path: Path, model: Path) -> None:
    """What is stored counts only for the same task and seed: the data may change between a kill and the resume."""
    async with after_training(tmp_path, model, train={"steps": 1}) as (trainer, run):
        trained = [e for e in episodes_of(trainer.store, run) if e.fact == Fact.TRAINED]
        skipped = [e for e in episodes_of(trainer.store, run) if e.fact != Fact.TRAINED]
        assert trained and all(trainer.store.signals.get(e.id) is None for e in skipped)
        groups: dict[str | None, list[float]] = {}
        for episode in trained:
            signals = trainer.store.signals.get(episode.id)
            assert signals is not None
            mask = episode.tokens.trained_mask
            assert (
                np.isnan(signals.advantage[~mask]).all()
                and not np.isnan(signals.advantage[mask]).any()
            )
            assert signals.advantage[mask] == pytest.approx(episode.advantage, abs=1e-6)
            assert (
                signals.ratio[mask] == pytest.approx(1.0) and not signals.clipped.any()
            )  # one on-policy update
            assert signals.logp_train[mask] == pytest.approx(
                episode.tokens.logp_policy[mask], abs=1e-4
            )
            assert signals.logp_ref is None and signals.value is None
            # Token mean: every token of the step weighs advantage / number of tokens.
            total = sum(e.trained_tokens for e in trained)
            assert signals.weight[mask] == pytest.approx(signals.advantage[mask] / total, rel=1e-4)
            groups.setdefault(episode.group_id, []).append(episode.advantage or 0.0)
        assert all(sum(advantages) == pytest.approx(0, abs=1e-4) for advantages in groups.values())
        jobs = trainer.collector.jobs(0)
        assert len(trainer.collector.finished(jobs)) == len(jobs)
        other = [
            replace(jobs[0], seed=jobs[0].seed + 1),
            replace(jobs[1], task=replace(jobs[1].task, id="else")),
        ]
        assert len(trainer.collector.finished([*other, *jobs[2:]])) == len(jobs) - 2


async def test_learning_still_works(tmp_path: Path, model: Path) -> None:
    rewards: list[float] = []
    rollout = {"group_size": 8, "prompts_per_step": 4, "max_new_tokens": 1}
    async with trainer_of(
        tmp_path, model, rollout=rollout, train={"steps": 14, "lr": 2e-2}
    ) as trainer:
        trainer.on_step = lambda step, metrics: rewards.append(metrics["reward"])
        await trainer.train()
    assert 0.3 < np.mean(rewards[:2]) < 0.7
    assert np.mean(rewards[-4:]) > 0.85


async def test_errors_are_masked_and_counted(tmp_path: Path, model: Path) -> None:
    broken = "    if ctx.task.id.endswith('0'):\n        raise RuntimeError('the grader broke')\n"
    write_pack(
        tmp_path, rows=2, code=TASK_PY.replace("ctx):\n    said", f"ctx):\n{broken}    said")
    )
    async with after_training(tmp_path, model) as (trainer, run):
        assert run.status == "finished"
        for step in (1, 2):
            episodes = episodes_of(trainer.store, run, step)
            bad = [e for e in episodes if e.task_id.endswith("0")]
            good = [e for e in episodes if not e.task_id.endswith("0")]
            assert len(bad) == len(good) == 4
            assert {(e.outcome, e.fact) for e in bad} == {
                (Outcome.ENV_ERROR, "skipped:fault: env_error")
            }
            assert all("the grader broke" in e.error for e in bad)
            metrics = trainer.store.runs.steps(run.id)[step - 1]
            assert metrics["outcomes/env_error"] == metrics["facts/skipped:fault"] == 4
            assert metrics["reward"] == pytest.approx(
                np.mean([e.reward for e in good])
            )  # never a zero


# --- checkpoints -----------------------------------------------------------------------------------------------------


async def test_checkpoints_rotate_and_load_in_transformers(tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train = {
        "steps": 4,
        "save_every": 1,
        "keep_last": 2,
        "eval_every": 2,
        "eval_tasks": 3,
        "eval_samples": 2,
    }
    async with after_training(tmp_path, model, train=train) as (trainer, run):
        store, weights = trainer.store, trainer.loaded.model.state_dict()
        kept = {(c.kind, c.step): Path(c.path) for c in store.runs.checkpoints(run.id)}
        evals = {row.step: row.pass_rate or 0.0 for row in store.runs.evals(run.id)}
    best = max(evals, key=lambda step: (evals[step], -(step or 0)))
    assert set(kept) == {("step", 2), ("step", 3), ("best", best), ("last", 4)}
    assert set(evals) == {0, 2, 4}, "the base is evaluated first"
    folders = {path.name for path in (Path(run.dir) / "checkpoints").iterdir()}
    assert folders == {path.name for path in kept.values()}, "nothing else is left there"
    last = kept["last", 4]
    loaded = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert AutoTokenizer.from_pretrained(last).chat_template
    untrained = load_model(model, trainer.config.model, base=tmp_path).state_dict()
    assert any(not torch.equal(untrained[name], tensor) for name, tensor in weights.items())


async def test_a_lora_run_leaves_a_peft_adapter(tmp_path: Path, model: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    async with trainer_of(
        tmp_path, model, adapter={"enabled": True, "r": 4, "alpha": 8}
    ) as trainer:
        base = {n: p.clone() for n, p in trainer.loaded.model.named_parameters() if "lora" not in n}
        run = await trainer.train()
        own = dict(trainer.loaded.model.named_parameters())
        assert all(torch.equal(own[name], tensor) for name, tensor in base.items()), (
            "only the adapter moves"
        )
        folder = next(
            Path(c.path) for c in trainer.store.runs.checkpoints(run.id) if c.kind == "last"
        )
        assert (folder / "adapter_config.json").is_file() and not (
            folder / "model.safetensors"
        ).exists()
        fresh = AutoModelForCausalLM.from_pretrained(model)
        adapted = PeftModel.from_pretrained(fresh, folder).eval()
        ids = torch.arange(10, 30)[None]
        with torch.no_grad():
            ours, theirs = trainer.loaded.model.eval()(ids).logits, adapted(ids).logits
            with adapted.disable_adapter():
                bare = adapted(ids).logits
        assert torch.allclose(ours, theirs, atol=1e-6) and not torch.allclose(ours, bare, atol=1e-6)


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
async def test_the_reference_is_the_model_before_training(
    tmp_path: Path, model: Path, lora: bool
) -> None:
    sections: dict[str, Any] = {"algo": {"kl_coef": 0.1}, "adapter": {"enabled": lora, "r": 4}}
    async with after_training(tmp_path, model, train={"steps": 2, "lr": 1e-2}, **sections) as (
        trainer,
        run,
    ):
        store = trainer.store
        start = load_model(model, trainer.config.model, base=tmp_path)
        kl = [row["kl"] for row in store.runs.steps(run.id)]
        assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-5
        moved = 0.0
        for episode in episodes_of(store, run, 2):
            signals = store.signals.get(episode.id)
            if signals is None:
                continue
            assert signals.logp_ref is not None
            mask = episode.tokens.trained_mask
            with torch.no_grad():
                _, out = trained_logprobs(start, [[Segment.of(episode)]])
            assert signals.logp_ref[mask] == pytest.approx(out.logp.numpy(), abs=1e-4)
            moved = max(
                moved, float(np.abs(signals.logp_ref[mask] - signals.logp_train[mask]).max())
            )
        assert moved > 1e-3


# --- drift -----------------------------------------------------------------------------------------------------------

# A last user message with "Go" gets a word that disappears once the model has answered: no audit
# foresees that.
SHIFTING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}{{ ' now' if loop.last and m.role == 'user' and 'Go' in m.content }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ALWAYS_SHIFTING = SHIFTING.replace(" and 'Go' in m.content", "")


@pytest.mark.parametrize(("structural", "fact"), [("skip", "skipped:drift"), ("train", "trained")])
async def test_structural_drift(tmp_path: Path, model: Path, structural: str, fact: str) -> None:
    (tmp_path / "shifting.jinja").write_text(SHIFTING)
    changed = {"chat_template": "shifting.jinja"}
    drift, algo = {"structural": structural}, {"drop_zero_variance": False}
    async with after_training(
        tmp_path, model, model=changed, drift=drift, algo=algo, train={"steps": 1}
    ) as (trainer, run):
        episodes = episodes_of(trainer.store, run)
        assert [e.fact for e in episodes] == [fact] * 8
        for episode in episodes:
            found = [
                row for row in trainer.store.marks.drift(episode.id) if row.kind == "structural"
            ]
            assert found and " now" in found[0].got
        assert trainer.store.journal.alerts(run.id), "structural drift is an alert"


async def test_a_group_that_drift_skips_carries_no_signal(tmp_path: Path, model: Path) -> None:
    (tmp_path / "shifting.jinja").write_text(SHIFTING)
    changed = {"chat_template": "shifting.jinja"}
    again, once = {"resample_rounds": 1}, {"steps": 1}
    async with after_training(tmp_path, model, model=changed, rollout=again, train=once) as (
        trainer,
        run,
    ):
        episodes = episodes_of(trainer.store, run)
        assert {e.fact for e in episodes} == {"skipped:drift"}
        assert len({e.reward for e in episodes}) > 1, "rewards differ, but nothing is trained"
        (metrics,) = trainer.store.runs.steps(run.id)
        assert (metrics["groups/sampled"], metrics["groups/signal"]) == (4, 0)


async def test_a_template_that_cannot_be_appended_to_is_refused_or_accepted(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "shifting.jinja").write_text(ALWAYS_SHIFTING)
    changed: dict[str, Any] = {"chat_template": "shifting.jinja"}
    with pytest.raises(TemplateError, match="cannot be extended by appending") as refused:
        async with trainer_of(tmp_path, model, model=changed):
            pass
    assert (
        "model.chat.append_only=true" in refused.value.hint
        and refused.value.message.count("begin") == 1
    )
    changed |= {"append_only": True}
    algo = {"drop_zero_variance": False}
    async with after_training(tmp_path, model, model=changed, algo=algo, train={"steps": 1}) as (
        trainer,
        run,
    ):
        episodes = episodes_of(trainer.store, run)
        kinds = {row.kind for episode in episodes for row in trainer.store.marks.drift(episode.id)}
        lines = [
            line["text"]
            for line in trainer.store.journal.logs(run.id)
            if "by design" in line["text"]
        ]
    assert [e.fact for e in episodes] == ["trained"] * 8
    assert "by_design" in kinds and "structural" not in kinds and len(lines) == 1


# --- hooks and controls ----------------------------------------------------------------------------------------------


class Diary:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_run_start(self, run: Any) -> None:
        self.lines.append("run start")

    async def on_step_start(self, step: int) -> None:
        self.lines.append("step")

    def on_rollout_end(self, rollout: Episode) -> dict[str, float]:
        self.lines.append("rollout")
        return {"extra": 1.0}

    def on_batch(self, batch: Any, step: int) -> None:
        assert (
            batch.input_ids.shape == batch.attention_mask.shape
            and int(batch.response_mask.sum()) > 0
        )
        self.lines.append("batch")

    def on_update(self, metrics: dict[str, float]) -> None:
        self.lines.append(f"update {'loss' in metrics}")

    def on_eval(self, result: Any, step: int) -> None:
        self.lines.append(
            f"eval {result.n_tasks if hasattr(result, 'n_tasks') else len(result.attempts)}"
        )

    async def on_checkpoint(self, path: Path, step: int) -> None:
        self.lines.append(f"checkpoint {path.name}")

    def on_run_end(self, error: BaseException | None) -> None:
        self.lines.append(f"run end {error}")


async def test_hooks_are_called_in_order(tmp_path: Path, model: Path) -> None:
    diary = Diary()
    train = {"steps": 2, "eval_every": 2, "eval_tasks": 1, "eval_samples": 1, "save_every": 1}
    async with after_training(
        tmp_path, model, [diary], algo={"drop_zero_variance": False}, train=train
    ) as (trainer, run):
        extra = [
            part for part in episodes_of(trainer.store, run)[0].reward_parts if part.name == "extra"
        ]
    assert [part.value for part in extra] == [1.0]
    step = ["step", *["rollout"] * 8, "batch", "update True"]
    evaluated = ["rollout", "eval 1", "checkpoint best"]
    assert diary.lines == [
        *(
            "run start",
            *evaluated,
            *step,
            "checkpoint step-000001",
            *step,
            *evaluated[:2],  # not better than the base
            "checkpoint last",
            "run end None",
        ),
    ]


class Asking:
    """Asks the run for something through the store, as the watch screen does, once after its first step."""

    def __init__(self, db: Path, *controls: tuple[str, dict[str, Any]]) -> None:
        self.db, self.controls = db, list(controls)

    def on_update(self, run: Any) -> None:
        with Store.open(self.db) as store:
            row = store.runs.all()[0]
            for action, data in self.controls:
                store.controls.add(row.id, action, data)
        self.controls = []


async def test_controls_set_checkpoint_evaluate_and_stop(tmp_path: Path, model: Path) -> None:
    asking = Asking(
        tmp_path / "runs" / "agentrl.db",
        ("set", {"key": "train.lr", "value": 0.25}),
        ("set", {"key": "train.lr", "value": -1}),
        ("set", {"key": "model.name", "value": "x"}),
        ("set", {"key": "train.steps", "value": 3}),
        ("set", {"key": "train.eval.every", "value": 3}),
        ("checkpoint", {}),
        ("evaluate", {}),
    )
    algo, train = {"drop_zero_variance": False}, {"steps": 2, "eval_tasks": 2, "eval_samples": 1}
    async with after_training(tmp_path, model, [asking], algo=algo, train=train) as (trainer, run):
        store = trainer.store
        assert [row["learning_rate"] for row in store.runs.steps(run.id)] == [1e-3, 0.25, 0.25]
        assert (run.step, run.total_steps) == (3, 3)
        refused = [
            alert for alert in store.journal.alerts(run.id) if alert["name"] == "set_refused"
        ]
        assert len(refused) == 2 and "model.name" in refused[1]["text"]
        # A changed setting is never applied to steps from before it: a kill leads back to this checkpoint.
        assert [c.step for c in store.runs.checkpoints(run.id) if c.kind == "step"] == [1]
        assert [(row.step, row.n_tasks) for row in store.runs.evals(run.id)] == [(1, 2), (3, 2)]
        # What was changed is written down: a resume continues with it.
        assert run.config["train"]["lr"] == 0.25 and trainer.config.train.lr == 0.25
        assert "lr: 0.25" in (Path(run.dir) / "config.yaml").read_text()
        assert run.status == "finished" and store.controls.take(run.id) == []


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
        training = asyncio.create_task(trainer.train())
        while not any(
            row["kind"] == "control:pause"
            for row in trainer.store.journal.events(trainer.run.id, 0)
        ):
            await asyncio.sleep(0.02)
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
        lines = [
            row["text"]
            for row in trainer.store.journal.logs(run.id)
            if row["text"].startswith("step 1/")
        ]
        assert re.search(r"  solved by pack one [\d.]+, two [\d.]+  [\d.]+ s$", lines[0])
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
    async with after_training(tmp_path / "first", model, **sections) as (trainer, _):
        made = episodes_of(trainer.store, trainer.run)
    async with trainer_of(tmp_path / "second", model, **sections) as trainer:
        groups: dict[str | None, list[Episode]] = {}
        for one in made:
            groups.setdefault(one.group_id, []).append(one)
        trees = {}
        for group in groups.values():
            for one, other in zip(group, [*group[1:], group[0]], strict=True):
                at = next(turn.index for turn in one.turns if turn.role == "assistant")
                tree = grafted(
                    one, other, at
                )  # the answer of a sibling to the same prompt, as a second branch
                trees[one.id] = tree.with_(run_id=trainer.run.id, fact="", advantage=None)
        trainer.store.episodes.add(trees.values(), tokenizer=trainer.loaded.hash)
        await trainer.train()
        back = episodes_of(trainer.store, trainer.run)
        assert {e.id for e in back} == set(trees)  # none was sampled again
        assert trainer.store.runs.steps(trainer.run.id)[-1]["branches/mean"] == 2.0
        trained = [e for e in back if e.fact == "trained"]
        assert trained
        count = len(trained)
        for e in trained:
            assert len(e.branches) == 2 and e.turns == trees[e.id].turns
            signals, mask = trainer.store.signals.get(e.id), e.tokens.trained_mask
            assert signals is not None and np.isnan(signals.weight[~mask]).all()
            weight = (e.advantage or 0.0) / (e.trained_tokens * count)
            assert np.allclose(signals.weight[mask], weight, rtol=1e-4)
            # each branch under the weights that sampled it: the log-probabilities of then, token by token
            assert np.allclose(signals.logp_train[mask], e.tokens.logp_policy[mask], atol=1e-4)
