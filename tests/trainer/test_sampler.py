"""Which groups a step is made of: dynamic sampling, curriculum, difficulty balance; length terms. Seeded, resumable."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, Hook, Store, load_pack
from agentrl_cli.config.records import TrainerSettings
from agentrl_cli.errors import NotFound
from agentrl_cli.learning.length_shaping import Shaping, overlong
from agentrl_cli.store import RunRow
from agentrl_cli.trainer.sampler import Record
from agentrl_cli.trainer.validation import validation as choose
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
from tests.helpers.train import (
    TASK_PY,
    TASK_YAML,
    after_training,
    episodes_of,
    settings,
    trainer_of,
    write_pack,
)

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


EQUAL = "skipped:no_signal: all rewards of the group are equal"


EVERY = {"steps": 1, "eval_every": 1, "eval_samples": 1}


def project(folder: Path, code: str = SURE) -> Path:
    write_pack(folder, code=code, rows=8)
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
    rollout, once = {"group_size": 2, "prompts_per_step": 3, "resample_rounds": 6}, {"steps": 1}
    async with after_training(project(tmp_path), model, rollout=rollout, train=once) as (
        trainer,
        run,
    ):
        store, episodes = trainer.store, episodes_of(trainer.store, run)
        groups = {e.group_id or "" for e in episodes}
        facts = Counter(e.fact for e in episodes)
        assert facts == {"trained": 6, EQUAL: 2 * (len(groups) - 3)}, "three of two carry signal"
        (metrics,) = store.runs.steps(run.id)
        assert metrics["groups/signal"] == 3 and metrics["groups/sampled"] == len(groups) > 3
        # no task twice while there are others
        assert len({e.task_id for e in episodes}) == len(groups)
        for name in groups:
            reason = store.episodes.group_reason(name, run.id)
            again = int(name.split("-")[1]) >= 3
            assert "sampled again, round" in reason if again else reason == ""


@pytest.mark.parametrize(("rounds", "groups"), [(0, 2), (2, 6)])
async def test_dynamic_sampling_is_bounded_and_off_by_default(
    tmp_path: Path, model: Path, rounds: int, groups: int
) -> None:
    dead = SURE.replace("float(episode.sample % 2)", "0.0")
    rollout = {"group_size": 2, "prompts_per_step": 2, "resample_rounds": rounds}
    sections: dict[str, Any] = {"rollout": rollout, "train": {"steps": 1}}
    async with after_training(project(tmp_path, dead), model, **sections) as (trainer, run):
        assert [e.fact for e in episodes_of(trainer.store, run)] == [EQUAL] * 2 * groups
        (metrics,) = trainer.store.runs.steps(run.id)
    assert metrics.get("groups/rounds") == (rounds + 1 if rounds else None)


class Stop(Hook):
    """Cancels the run before another episode, once so many have ended."""

    def __init__(self, most: int) -> None:
        self.left = most

    def on_rollout_end(self, rollout: Episode, task: Task) -> None:
        self.left -= 1

    def on_trace_start(self, task: Task, run: Any) -> None:
        if self.left <= 0:
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
        found = episodes_of(trainer.store, trainer.run)
        done = [e for e in found if e.outcome is not Outcome.CANCELLED]
        return sorted(
            (e.group_id, e.sample, e.task_id, e.tokens.ids.tolist(), e.fact) for e in done
        )

    async with after_training(project(tmp_path / "whole"), model, **sections) as (trainer, _):
        whole = ending(trainer)
    folder, stop = project(tmp_path / "cut"), Stop(len([r for r in whole if r[0] < "000002"]) + 5)
    run = await cut_off(folder, model, stop, **sections)
    async with trainer_of(folder, model, run=run, **sections) as trainer:
        assert 0 < len(ending(trainer)) < len(whole)
        await trainer.train()
        assert ending(trainer) == whole


async def cut_off(folder: Path, model: Path, stop: Stop, **sections: Any) -> RunRow:
    async with trainer_of(folder, model, [stop], **sections) as trainer:
        with pytest.raises(asyncio.CancelledError):
            await trainer.train()
        return trainer.run


async def test_a_resume_with_smaller_groups_leaves_the_rest_out(
    tmp_path: Path, model: Path
) -> None:
    train, folder = {"steps": 2, "save_every": 1}, project(tmp_path / "p")
    rollout = {"group_size": 4, "prompts_per_step": 2, "concurrency": 1}
    run = await cut_off(folder, model, Stop(8 + 7), rollout=rollout, train=train)
    rollout |= {"group_size": 2, "prompts_per_step": 1}
    async with trainer_of(folder, model, run=run, rollout=rollout, train=train) as trainer:
        await trainer.train()
        rows = episodes_of(trainer.store, run)
    left = [((e.group_id or "")[:10], e.sample) for e in rows if e.fact == Fact.SKIPPED_CUT]
    assert sorted(left) == [
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
        # train0 always, train1 half the time, the rest never
        tasks = {f"bandit/train{n}": (16 * (n == 0) + 8 * (n == 1), 16) for n in range(8)}
        solved(trainer.store, trainer.run, tasks)
        collector = trainer.collector

        def drawn(*steps: int) -> Counter[str]:
            jobs = [job for step in steps for job in collector.jobs(step)]
            return Counter(job.task.id for job in jobs if job.sample == 0)

        later, rank = drawn(*range(1, 41)), collector.ranking
        assert later["bandit/train1"] >= 25, "of 40 steps of 2; by chance 10"
        assert later.total() == 80 and len(later) > 4, "the others are looked at now and then"
        assert rank(1) == rank(1) != rank(2) and {task for task, _ in rank(1)} == set(range(8))
        assert drawn(0) == Counter(collector.tasks[t].id for t, _ in rank(0)[:2])
        assert {why for _, why in rank(0)} == {"curriculum: not tried yet"}, "nothing was known"
        assert "curriculum: solved 50% lately" in [why for _, why in rank(1)]


async def test_balance_takes_every_difficulty_in_turn(tmp_path: Path, model: Path) -> None:
    sections: dict[str, Any] = {
        "task": {"packs": ["."], "order": "balanced"},
        "rollout": {"prompts_per_step": 4},
    }
    async with trainer_of(project(tmp_path / "p"), model, **sections) as trainer:
        tries = [(0, 4), (0, 4), (0, 4), (2, 4), (4, 4)]
        levels = {f"bandit/train{n}": pair for n, pair in enumerate(tries)}
        solved(trainer.store, trainer.run, levels)
        ranked = [trainer.collector.ranking(step) for step in range(1, 12)]
    for picks in ranked:
        found = sorted(why.split()[1] for _, why in picks[:4])
        assert found == ["easy,", "hard,", "medium,", "new,"]
    assert {picks[1][0] for picks in ranked} == {0, 1, 2}, "drawn at random within a difficulty"


async def test_an_earlier_visit_counts_half(tmp_path: Path, model: Path) -> None:
    async with trainer_of(project(tmp_path / "p"), model) as trainer:
        for step, tried in enumerate([(4, 4), (1, 4), (0, 2)], 1):
            solved(trainer.store, trainer.run, {"bandit/train0": tried}, step)
        where: dict[str, Any] = {"run_id": trainer.run.id, "step": 3, "kind": "train"}
        unseen = Episode("long", "bandit/train0", "bandit", outcome=Outcome.TOO_LONG, **where)
        trainer.store.episodes.finish(unseen)  # its prompt did not fit
        seen = [trainer.collector.records(step)[0] for step in range(4)]
    assert seen == [Record(), Record(4, 4), Record(2 + 1, 2 + 4), Record(1 + 0.5, 1 + 2 + 2)]
    assert seen[3].rate == pytest.approx(2.5 / 7) and str(seen[3]) == "solved 30% lately"


@pytest.mark.parametrize(
    ("record", "rate", "level", "text"),
    [
        (Record(), 0.5, "new", "not tried yet"),
        (Record(4, 4), 5 / 6, "easy", "solved 100% lately"),
        (Record(2, 4), 0.5, "medium", "solved 50% lately"),
        (Record(1, 4), 1 / 3, "hard", "solved 25% lately"),
    ],
)
def test_records_fade(record: Record, rate: float, level: str, text: str) -> None:
    assert record.rate == pytest.approx(rate) and (record.level, str(record)) == (level, text)


def episode(name: str, sampled: int, reason: StopReason = StopReason.STOP) -> Episode:
    tokens = Tokens.from_ids([1] * (10 + sampled), [Origin.USER] * 10 + [Origin.MODEL] * sampled)
    turns = (
        Turn(0, "user", (), 0, 10),
        Turn(1, "assistant", (), 10, 10 + sampled, stop_reason=reason),
    )
    return Episode(name, "t", turns=turns, tokens=tokens, outcome=Outcome.FAILED)


def test_length_terms_by_hand() -> None:
    lengths = {0: 0.0, 60: 0.0, 61: -1 / 40, 80: -0.5, 100: -1.0, 130: -1.0}
    assert {n: overlong(n, 100, 40) for n in lengths} == lengths
    algo = {"length_penalty": {"coef": 0.1, "overlong": 0.5, "buffer": 40}}
    task, one = Task("t", "p", "f", "train", ()), episode("a", 70)
    config = Config.model_validate(
        {"algo": algo, "rollout": {"max_tokens": 100, "max_new_tokens": 9}}
    )
    shaping = Shaping(config.algo, config.rollout, 999)
    first, second = shaping.on_rollout_end(one, task)
    assert (first.name, first.value, first.weight) == ("overlong", -0.5, 0.5)
    assert (second.name, second.value, second.weight) == ("length_penalty", -0.7, 0.1)
    cut = shaping.on_rollout_end(episode("a", 5, StopReason.LENGTH), task)[0]
    assert "80 of 100" in first.detail and cut.value == -1.0 and "cut" in cut.detail
    assert Shaping(Config().algo, config.rollout, 100).on_rollout_end(one, task) == []
    for limits, context in (({}, 85), ({"response_tokens": 75}, 999)):
        shaping = Shaping(config.algo, config.rollout.replace(**limits), context)
        first = shaping.on_rollout_end(one, task)[0]
        assert first.value == -0.875 and first.detail == "80 of 85 tokens", "75 after 10"
    agent = Shaping(config.algo, shaping.rollout, 999, {task.pack}).on_rollout_end(one, task)[0]
    assert agent.detail == "80 of 100 tokens", "which response_tokens does not limit"


async def test_length_terms_are_stored_and_train(tmp_path: Path, model: Path) -> None:
    algo = {"length_penalty": 2.0, "overlong_penalty": 1.0, "overlong_buffer": 96}
    dead = SURE.replace("float(episode.sample % 2)", "0.0")
    train = {**EVERY, "eval_tasks": 1}
    async with after_training(project(tmp_path, dead), model, algo=algo, train=train) as (
        trainer,
        run,
    ):
        for e in episodes_of(trainer.store, run):
            cut = e.outcome is Outcome.TRUNCATED_TOKENS
            wanted = {
                "length_penalty": -e.trained_tokens / 96,
                "overlong": -1.0 if cut else -len(e.tokens) / 96,
            }
            parts = {part.name: part.value for part in e.reward_parts if part.name in wanted}
            assert parts == pytest.approx(wanted)
            assert e.reward == pytest.approx(2 * wanted["length_penalty"] + wanted["overlong"])
        (seen,) = trainer.store.episodes.rows(trainer.store.episodes.ids("kind:eval step:1"))
        names = [part.name for part in trainer.store.episodes.get(seen.id).reward_parts]
        assert names == ["even"], "an evaluation has no training terms"


def evaluated(store: Store, run_id: str) -> set[str]:
    return {row.task_id for row in store.episodes.rows(store.episodes.ids("kind:eval", run=run_id))}


async def test_the_validation_split_is_evaluated_and_the_best_checkpoint_chosen_by_it(
    tmp_path: Path, model: Path
) -> None:
    validation(write_pack(tmp_path), 5)
    async with after_training(tmp_path, model, train={**EVERY, "eval_tasks": 3}) as (trainer, run):
        runs = trainer.store.runs
        assert evaluated(trainer.store, run.id) == {f"bandit/v{n}" for n in (0, 1, 3)}
        assert [row.split for row in runs.evals(run.id)] == ["validation"] * 2
        assert len(trainer.collector.tasks) == 6
        assert [c.kind for c in runs.checkpoints(run.id)] == ["best", "last"]


def validation(folder: Path, count: int) -> None:
    rows = [{"id": f"v{n}", "family": "even", "prompt": f"Try {n}."} for n in range(count)]
    (folder / "data" / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)))


async def test_packs_with_that_split_and_without_are_one_evaluation(
    tmp_path: Path, model: Path
) -> None:
    validation(write_pack(tmp_path / "a"), 2)
    other = write_pack(tmp_path / "b", rows=30)
    named = (other / "task.yaml").read_text().replace("name: bandit", "name: other")
    (other / "task.yaml").write_text(named)
    packs = {"packs": [".", str(other)]}
    async with after_training(tmp_path / "a", model, task=packs, train=EVERY) as (trainer, run):
        found = [(row.split, row.n_tasks) for row in trainer.store.runs.evals(run.id)]
    assert found == [("validation", 2 + 3)] * 2


async def test_without_that_split_a_seeded_tenth_of_training_is_held_out_and_stays_so(
    tmp_path: Path, model: Path
) -> None:
    write_pack(tmp_path, rows=30)
    async with after_training(tmp_path, model, train=EVERY) as (trainer, run):
        held = {task.id for task in trainer.eval_tasks}
        assert evaluated(trainer.store, run.id) == held
    # Other settings after a resume change nothing: what was held out stays held out.
    more: dict[str, Any] = {"seed": 7, "run": run, "train": {"steps": 2, "eval_every": 0}}
    for given, same in (({"seed": 0}, True), ({"seed": 1}, False), (more, True)):
        async with trainer_of(tmp_path, model, **{"train": EVERY, **given}) as trainer:
            chosen = {task.id for task in trainer.eval_tasks}
            assert (chosen == held) is same and len(chosen) == 3
            left = {task.id for task in trainer.collector.tasks}
            assert left | chosen == {f"bandit/train{n}" for n in range(30)} and len(left) == 27


async def test_nothing_is_held_out_where_nothing_is_evaluated_or_the_tasks_are_few(
    tmp_path: Path, model: Path
) -> None:
    write_pack(tmp_path / "many", rows=30)
    async with trainer_of(tmp_path / "many", model, train={"steps": 1}) as trainer:
        assert len(trainer.collector.tasks) == 30 and not trainer.eval_tasks
    variants = "variants: {again: {path: data/test.jsonl}}\n"
    (tmp_path / "many" / "task.yaml").write_text(TASK_YAML + variants)
    again = {**EVERY, "eval_split": "again"}
    async with trainer_of(tmp_path / "many", model, train=again) as trainer:
        assert {task.split for task in trainer.eval_tasks} == {"again"}
        assert len(trainer.collector.tasks) == 30
    few = write_pack(tmp_path / "few")
    async with after_training(few, model, train=EVERY) as (trainer, run):
        assert len(trainer.collector.tasks) == 6
        assert evaluated(trainer.store, run.id) == {f"bandit/test{n}" for n in range(6)}
    (few / "data" / "test.jsonl").unlink()
    async with trainer_of(few, model, train=EVERY) as trainer:
        assert {task.split for task in trainer.eval_tasks} == {"train"}
        assert len(trainer.collector.tasks) == 6
    with pytest.raises(NotFound, match="exam"):
        async with trainer_of(few, model, train=EVERY, eval={"split": "exam"}):
            pass


async def test_a_run_that_heals_keeps_the_base_where_nothing_could_be_graded(
    tmp_path: Path, model: Path
) -> None:
    fails = "    if episode.kind == 'eval':\n        raise OSError('no grader')\n"
    write_pack(tmp_path, code=TASK_PY.replace("ctx):\n    said", f"ctx):\n{fails}    said"))
    async with after_training(tmp_path, model, train={**EVERY, "heal": True}) as (trainer, run):
        runs = trainer.store.runs
        assert [row.pass_rate for row in runs.evals(run.id)] == [None, None]
        assert [(c.kind, c.step) for c in runs.checkpoints(run.id)] == [("step", 0), ("last", 1)]


async def test_a_run_that_heals_from_a_resume_on_keeps_where_it_began(
    tmp_path: Path, model: Path
) -> None:
    async with after_training(tmp_path, model, train={"steps": 1}) as (_, run):
        pass
    more = {"steps": 2, "heal": True}
    async with after_training(tmp_path, model, run=run, train=more) as (trainer, _):
        kept = [(one.kind, one.step) for one in trainer.store.runs.checkpoints(run.id)]
    assert kept == [("step", 1), ("last", 2)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [(30, "3 of 30 training tasks are held out"), (6, "on the split 'test'")],
)
def test_the_run_says_what_the_best_checkpoint_is_chosen_on(
    tmp_path: Path, model: Path, rows: int, said: str
) -> None:
    pack, lines = load_pack(write_pack(tmp_path, rows=rows)), list[str]()
    config = TrainerSettings.of(Config.model_validate(settings(model, train=EVERY)))
    with Store.open(tmp_path / "a.db") as store:
        row = store.runs.add(RunRow("", "other"))
        choose(config, {"bandit": pack}, pack.tasks("train"), store, row, lines.append)
    assert len(lines) == 1 and said in lines[0]
