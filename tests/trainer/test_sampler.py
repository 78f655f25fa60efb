"""Which groups a step is made of: dynamic sampling, curriculum, difficulty balance; length terms. Seeded, resumable."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, Hook, Store, load_pack
from agentrl_cli.errors import NotFound
from agentrl_cli.learning.dispositions import decide
from agentrl_cli.learning.length_shaping import Shaping, overlong
from agentrl_cli.trainer.sampler import Record
from agentrl_cli.types import (
    Episode,
    Fact,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Task,
    Tokens,
    Turn,
)
from tests.helpers.train import TASK_PY, episodes_of, trainer_of, write_pack

SURE = """\
def even(episode, ctx):
    '''Tasks with an even number are never solved; the others by every second attempt.'''
    number = int(ctx.task.id[-1])
    return 0.0 if number % 2 == 0 else float(episode.sample % 2)


REWARDS = {"even": even}
"""
YAML = (
    "name: bandit\ndescription: d\nsandbox: false\nrewards:\n  even: {weight: 1.0, primary: true}\n"
)


def project(folder: Path) -> Path:
    write_pack(folder, code=SURE, rows=8)
    (folder / "task.yaml").write_text(YAML)
    return folder


def solved(store: Store, run: Any, tasks: dict[str, tuple[int, int]], step: int = 1) -> None:
    for task, (good, tried) in tasks.items():
        for sample in range(tried):
            outcome = Outcome.SOLVED if sample < good else Outcome.FAILED
            store.episodes.finish(
                Episode(
                    f"{step}{task}{sample:02d}", task, "bandit", run_id=run.id, step=step, kind="train", sample=sample,
                    group_id=f"{step}-{task}", outcome=outcome, reward_parts=(RewardPart("even", 0.0),),
                )
            )  # fmt: skip


async def test_dynamic_sampling_goes_on_until_enough_groups_carry_signal(
    tmp_path: Path, model: Path
) -> None:
    rollout = {"group_size": 2, "prompts_per_step": 3, "resample_rounds": 6}
    async with trainer_of(
        project(tmp_path / "p"), model, rollout=rollout, train={"steps": 1}
    ) as trainer:
        await trainer.train()
        store, run = trainer.store, trainer.run
        episodes = episodes_of(store, run)
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group_id or "", []).append(episode)
        facts = Counter(e.fact for e in episodes)
        assert facts["trained"] == 6, "three groups of two carry signal"
        assert facts["skipped:no_signal: all rewards of the group are equal"] == 2 * (
            len(groups) - 3
        )
        (metrics,) = store.runs.steps(run.id)
        assert metrics["groups/signal"] == 3 and metrics["groups/sampled"] == len(groups) > 3
        assert len({e.task_id for e in episodes}) == len(groups), (
            "no task twice while there are others"
        )
        again = [name for name in groups if int(name.split("-")[1]) >= 3]
        assert all(
            "sampled again, round" in store.episodes.group_reason(name, run.id) for name in again
        )
        assert all(
            store.episodes.group_reason(name, run.id) == "" for name in set(groups) - set(again)
        )


async def test_dynamic_sampling_is_bounded_and_off_by_default(tmp_path: Path, model: Path) -> None:
    dead = SURE.replace("float(episode.sample % 2)", "0.0")
    for rounds, groups in ((0, 2), (2, 6)):
        folder = project(tmp_path / str(rounds))
        (folder / "task.py").write_text(dead)
        rollout = {"group_size": 2, "prompts_per_step": 2, "resample_rounds": rounds}
        async with trainer_of(folder, model, rollout=rollout, train={"steps": 1}) as trainer:
            await trainer.train()
            episodes = episodes_of(trainer.store, trainer.run)
            assert len(episodes) == 2 * groups and {e.fact for e in episodes} == {
                "skipped:no_signal: all rewards of the group are equal"
            }
            metrics = trainer.store.runs.steps(trainer.run.id)[0]
            assert metrics.get("groups/rounds") == (rounds + 1 if rounds else None)


class Stop(Hook):
    def __init__(self) -> None:
        self.calls, self.most = 0, 10**9

    def on_rollout_end(self, rollout: Episode, task: Task) -> None:
        self.calls += 1

    def on_trace_start(self, task: Task, run: Any) -> None:
        if self.calls >= self.most:
            raise asyncio.CancelledError


@pytest.mark.parametrize("order", ["curriculum", "balanced"])
async def test_a_resume_samples_the_same_groups(tmp_path: Path, model: Path, order: str) -> None:
    sections: dict[str, Any] = {
        "rollout": {"group_size": 2, "prompts_per_step": 2, "resample_rounds": 2, "concurrency": 1},
        "train": {"steps": 3, "save_every": 1},
        "task": {"packs": ["."], "order": order},
        "deterministic": True,
    }

    def ending(trainer: Any) -> list[Any]:
        done = [
            e for e in episodes_of(trainer.store, trainer.run) if e.outcome is not Outcome.CANCELLED
        ]
        return sorted(
            (e.group_id, e.sample, e.task_id, e.tokens.ids.tolist(), e.fact) for e in done
        )

    async with trainer_of(project(tmp_path / "whole"), model, **sections) as trainer:
        await trainer.train()
        whole = ending(trainer)
    folder, stop = project(tmp_path / "cut"), Stop()
    stop.most = len([row for row in whole if row[0] < "000002"]) + 5
    async with trainer_of(folder, model, [stop], **sections) as trainer:
        run = trainer.run
        with pytest.raises(asyncio.CancelledError):
            await trainer.train()
        assert 0 < len(ending(trainer)) < len(whole)
    async with trainer_of(folder, model, run=run, **sections) as trainer:
        await trainer.train()
        assert ending(trainer) == whole


async def test_a_resume_with_smaller_groups_leaves_the_rest_out(
    tmp_path: Path, model: Path
) -> None:
    folder, stop = project(tmp_path / "p"), Stop()
    train = {"steps": 2, "save_every": 1}
    rollout = {"group_size": 4, "prompts_per_step": 2, "concurrency": 1}
    stop.most = 8 + 7
    async with trainer_of(folder, model, [stop], rollout=rollout, train=train) as trainer:
        run = trainer.run
        with pytest.raises(asyncio.CancelledError):
            await trainer.train()
    rollout |= {"group_size": 2, "prompts_per_step": 1}
    async with trainer_of(folder, model, run=run, rollout=rollout, train=train) as trainer:
        await trainer.train()
        rows = episodes_of(trainer.store, run)
        left = [e for e in rows if e.fact == Fact.SKIPPED_CUT]
        assert sorted(((e.group_id or "").partition("~")[0], e.sample) for e in left) == [
            *(("000002-000", sample) for sample in range(4)),
            *(("000002-001", sample) for sample in (0, 1, 2)),
        ]
        sizes = Counter(e.group_id for e in rows)
        assert (sizes["000001-000"], sizes["000002-000"]) == (4, 2)


async def test_the_curriculum_draws_what_is_solved_half_the_time(
    tmp_path: Path, model: Path
) -> None:
    sections: dict[str, Any] = {
        "task": {"packs": ["."], "order": "curriculum"},
        "rollout": {"prompts_per_step": 2},
    }
    async with trainer_of(project(tmp_path / "p"), model, **sections) as trainer:
        tasks = {f"bandit/train{n}": (16 * (n == 0) + 8 * (n == 1), 16) for n in range(8)}
        solved(
            trainer.store, trainer.run, tasks
        )  # train0 always, train1 half the time, the rest never
        collector = trainer.collector
        drawn = Counter(
            job.task.id for step in range(1, 41) for job in collector.jobs(step) if job.sample == 0
        )
        assert drawn["bandit/train1"] >= 25, "of 40 steps of 2; by chance 10"
        assert sum(drawn.values()) == 80 and len(drawn) > 4, (
            "the others are still looked at now and then"
        )
        assert collector.ranking(1) == collector.ranking(1) != collector.ranking(2)
        assert {task for task, _ in collector.ranking(1)} == set(range(8))
        before = Counter(job.task.id for job in collector.jobs(0) if job.sample == 0)
        assert before == Counter(trainer.collector.tasks[t].id for t, _ in collector.ranking(0)[:2])
        assert all(why == "curriculum: not tried yet" for _, why in collector.ranking(0)), (
            "nothing was known then"
        )
        assert "curriculum: solved 50% lately" in [why for _, why in collector.ranking(1)]


async def test_balance_takes_every_difficulty_in_turn(tmp_path: Path, model: Path) -> None:
    sections: dict[str, Any] = {
        "task": {"packs": ["."], "order": "balanced"},
        "rollout": {"prompts_per_step": 4},
    }
    async with trainer_of(project(tmp_path / "p"), model, **sections) as trainer:
        tries = [(0, 4), (0, 4), (0, 4), (2, 4), (4, 4)]
        levels = {f"bandit/train{n}": pair for n, pair in enumerate(tries)}
        solved(trainer.store, trainer.run, levels)
        for step in range(1, 6):
            picks = trainer.collector.ranking(step)[:4]
            assert sorted(why.split()[1] for _, why in picks) == [
                "easy,",
                "hard,",
                "medium,",
                "new,",
            ]
        hard = {trainer.collector.ranking(step)[1][0] for step in range(1, 12)}
        assert hard == {0, 1, 2}, "drawn at random within a difficulty"


async def test_an_earlier_visit_counts_half(tmp_path: Path, model: Path) -> None:
    async with trainer_of(project(tmp_path / "p"), model) as trainer:
        for step, tried in enumerate([(4, 4), (1, 4), (0, 2)], 1):
            solved(trainer.store, trainer.run, {"bandit/train0": tried}, step)
        seen = [trainer.collector.records(step)[0] for step in range(4)]
    assert seen == [Record(), Record(4, 4), Record(2 + 1, 2 + 4), Record(1 + 0.5, 1 + 2 + 2)]
    assert seen[3].rate == pytest.approx(2.5 / 7) and str(seen[3]) == "solved 30% lately"


def test_records_fade() -> None:
    assert Record().rate == 0.5 and Record().level == "new"
    assert Record(4, 4).rate == pytest.approx(5 / 6) and Record(4, 4).level == "easy"
    assert (
        Record(1, 4).level == "hard"
        and Record(2, 4).level == "medium"
        and str(Record(1, 4)) == "solved 25% lately"
    )


def episode(
    name: str, sampled: int, reason: StopReason = StopReason.STOP, outcome: Outcome | None = None
) -> Episode:
    tokens = Tokens.from_ids([1] * (10 + sampled), [Origin.USER] * 10 + [Origin.MODEL] * sampled)
    turns = (
        Turn(0, "user", (), 0, 10),
        Turn(1, "assistant", (), 10, 10 + sampled, stop_reason=reason),
    )
    return Episode(name, "t", turns=turns, tokens=tokens, outcome=outcome or Outcome.FAILED)


def test_length_terms_by_hand() -> None:
    assert [overlong(n, 100, 40) for n in (0, 60, 61, 80, 100, 130)] == [
        0.0,
        0.0,
        -1 / 40,
        -0.5,
        -1.0,
        -1.0,
    ]
    algo = {"length_penalty": {"coef": 0.1, "overlong": 0.5, "buffer": 40}}
    task = Task("t", "p", "f", "train", ())
    shaping = Shaping(Config.model_validate({"algo": algo}).algo, 100)
    (first, second) = shaping.on_rollout_end(episode("a", 70), task)
    assert (first.name, first.value, first.weight) == (
        "overlong",
        -0.5,
        0.5,
    ) and "80 of 100" in first.detail
    assert (second.name, second.value, second.weight) == ("length_penalty", -0.7, 0.1)
    cut = shaping.on_rollout_end(episode("a", 5, StopReason.LENGTH), task)[0]
    assert cut.value == -1.0 and "cut" in cut.detail
    assert Shaping(Config().algo, 100).on_rollout_end(episode("a", 70), task) == []


async def test_length_terms_are_stored_and_train(tmp_path: Path, model: Path) -> None:
    algo = {"length_penalty": 2.0, "overlong_penalty": 1.0, "overlong_buffer": 96}
    folder = project(tmp_path / "p")
    (folder / "task.py").write_text(SURE.replace("float(episode.sample % 2)", "0.0"))
    train = {"steps": 1, "eval_every": 1, "eval_tasks": 1, "eval_samples": 1}
    async with trainer_of(folder, model, algo=algo, train=train) as trainer:
        await trainer.train()
        for e in episodes_of(trainer.store, trainer.run):
            parts = {part.name: part for part in e.reward_parts}
            assert parts["length_penalty"].value == pytest.approx(-e.trained_tokens / 96)
            cut = e.outcome is Outcome.TRUNCATED_TOKENS
            assert parts["overlong"].value == pytest.approx(-1.0 if cut else -len(e.tokens) / 96)
            assert e.reward == pytest.approx(
                2 * parts["length_penalty"].value + parts["overlong"].value
            )
        (seen,) = [
            trainer.store.episodes.get(r.id)
            for r in trainer.store.episodes.rows(trainer.store.episodes.ids("kind:eval step:1"))
        ]
        assert [part.name for part in seen.reward_parts] == ["even"], (
            "an evaluation has no training terms"
        )


def test_overlong_masking() -> None:
    def made(name: str, reward: float, outcome: Outcome) -> Episode:
        return episode(name, 3, outcome=outcome).with_(
            reward_parts=(RewardPart("r", reward, primary=True),)
        )

    group = [
        made("a", 1.0, Outcome.SOLVED),
        made("b", 0.0, Outcome.FAILED),
        made("c", 0.3, Outcome.TRUNCATED_TOKENS),
        made("d", 0.2, Outcome.TRUNCATED_TURNS),
    ]
    assert Counter(decide([group], drift={}).values()) == {Fact.TRAINED: 4}
    found = decide([group], drift={}, mask_overlong=True)
    assert [str(found[e.id]) for e in group] == [
        "trained",
        "trained",
        "skipped:limit: it ran out of tokens (algo.skip.overlong)",
        "trained",
    ]
    alone = decide([[group[0], group[2]]], drift={}, mask_overlong=True)
    assert [*alone.values()] == [Fact.SKIPPED_GROUP_TOO_SMALL, Fact.SKIPPED_OVERLONG]


# --- what a training evaluates on ---


EVERY = {"steps": 1, "eval_every": 1, "eval_samples": 1}


def evaluated(store: Store, run_id: str) -> set[str]:
    return {row.task_id for row in store.episodes.rows(store.episodes.ids("kind:eval", run=run_id))}


async def test_the_validation_split_is_evaluated_and_the_best_checkpoint_chosen_by_it(
    tmp_path: Path, model: Path
) -> None:
    write_pack(tmp_path)
    rows = [json.dumps({"id": f"v{n}", "family": "even", "prompt": f"Try {n}."}) for n in range(5)]
    (tmp_path / "data" / "validation.jsonl").write_text("\n".join(rows))
    async with trainer_of(tmp_path, model, train={**EVERY, "eval_tasks": 3}) as trainer:
        run = await trainer.train()
        assert evaluated(trainer.store, run.id) == {f"bandit/v{n}" for n in (0, 1, 3)}
        assert [row.split for row in trainer.store.runs.evals(run.id)] == ["validation"] * 2
        assert len(trainer.collector.tasks) == 6
        assert [c.kind for c in trainer.store.runs.checkpoints(run.id)] == ["best", "last"]


async def test_packs_with_that_split_and_without_are_one_evaluation(
    tmp_path: Path, model: Path
) -> None:
    write_pack(tmp_path / "a")
    rows = [json.dumps({"id": f"v{n}", "family": "even", "prompt": f"Try {n}."}) for n in range(2)]
    (tmp_path / "a" / "data" / "validation.jsonl").write_text("\n".join(rows))
    other = write_pack(tmp_path / "b", rows=30)
    named = (other / "task.yaml").read_text().replace("name: bandit", "name: other")
    (other / "task.yaml").write_text(named)
    packs = {"packs": [".", str(other)]}
    async with trainer_of(tmp_path / "a", model, task=packs, train=EVERY) as trainer:
        run = await trainer.train()
        assert len(trainer.eval_tasks) == 2 + 3
        found = [(row.split, row.n_tasks) for row in trainer.store.runs.evals(run.id)]
        assert found == [("validation", 5)] * 2


async def test_without_that_split_a_seeded_tenth_of_training_is_held_out_and_stays_so(
    tmp_path: Path, model: Path
) -> None:
    write_pack(tmp_path, rows=30)
    chosen: list[set[str]] = []
    for seed in (0, 0, 1):
        async with trainer_of(tmp_path, model, seed=seed, train=EVERY) as trainer:
            if not chosen:
                run = await trainer.train()
                assert evaluated(trainer.store, run.id) == {task.id for task in trainer.eval_tasks}
            held = {task.id for task in trainer.eval_tasks}
            assert len(held) == 3 and all(name.startswith("bandit/train") for name in held)
            left = {task.id for task in trainer.collector.tasks}
            assert not held & left and len(left) == 27
            chosen.append(held)
    assert chosen[0] == chosen[1] != chosen[2]
    # Other settings after a resume change nothing: what was held out stays held out.
    more = {**EVERY, "steps": 2, "eval_every": 0}
    async with trainer_of(tmp_path, model, seed=7, run=run, train=more) as trainer:
        assert {task.id for task in trainer.eval_tasks} == chosen[0]
        assert len(trainer.collector.tasks) == 27


async def test_nothing_is_held_out_where_nothing_is_evaluated_or_the_tasks_are_few(
    tmp_path: Path, model: Path
) -> None:
    write_pack(tmp_path / "many", rows=30)
    async with trainer_of(tmp_path / "many", model, train={"steps": 1}) as trainer:
        assert len(trainer.collector.tasks) == 30 and not trainer.eval_tasks
    async with trainer_of(tmp_path / "few", model, train=EVERY) as trainer:
        run = await trainer.train()
        assert len(trainer.collector.tasks) == 6
        assert evaluated(trainer.store, run.id) == {f"bandit/test{n}" for n in range(6)}
    (tmp_path / "few" / "data" / "test.jsonl").unlink()
    async with trainer_of(tmp_path / "few", model, train=EVERY) as trainer:
        assert {task.split for task in trainer.eval_tasks} == {"train"} and len(
            trainer.collector.tasks
        ) == 6
    with pytest.raises(NotFound, match="exam"):
        async with trainer_of(tmp_path / "few", model, train=EVERY, eval={"split": "exam"}):
            pass


async def test_a_run_that_heals_keeps_the_base_where_nothing_could_be_graded(
    tmp_path: Path, model: Path
) -> None:
    fails = "    if episode.kind == 'eval':\n        raise OSError('no grader')\n"
    write_pack(tmp_path, code=TASK_PY.replace("ctx):\n    said", f"ctx):\n{fails}    said"))
    async with trainer_of(tmp_path, model, train={**EVERY, "heal": True}) as trainer:
        run = await trainer.train()
        assert [row.pass_rate for row in trainer.store.runs.evals(run.id)] == [None, None]
        kept = [(one.kind, one.step) for one in trainer.store.runs.checkpoints(run.id)]
        assert kept == [("step", 0), ("last", 1)]


async def test_a_run_that_heals_from_a_resume_on_keeps_where_it_began(
    tmp_path: Path, model: Path
) -> None:
    async with trainer_of(tmp_path, model, train={"steps": 1}) as trainer:
        run = await trainer.train()
    more = {"steps": 2, "heal": True}
    async with trainer_of(tmp_path, model, run=run, train=more) as trainer:
        await trainer.train()
        kept = [(one.kind, one.step) for one in trainer.store.runs.checkpoints(run.id)]
        assert kept == [("step", 1), ("last", 2)]


async def test_the_run_says_what_the_best_checkpoint_is_chosen_on(
    tmp_path: Path, model: Path
) -> None:
    from agentrl_cli.trainer.validation import validation

    for name, rows, said in (
        ("many", 30, "3 of 30 training tasks are held out"),
        ("few", 6, "on the split 'test'"),
    ):
        write_pack(tmp_path / name, rows=rows)
        async with trainer_of(tmp_path / name, model, train=EVERY) as trainer:
            run, lines = trainer.run, list[str]()
            packs = {"bandit": load_pack(tmp_path / name)}
            row = trainer.store.runs.add(type(run)(id="", name="other", kind="train"))
            validation(
                trainer.config,
                packs,
                packs["bandit"].tasks("train"),
                trainer.store,
                row,
                lines.append,
            )
            assert len(lines) == 1 and said in lines[0]
