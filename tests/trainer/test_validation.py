"""What a training evaluates on and chooses its best checkpoint by: never what it trains on, or is reported on."""

import json
from pathlib import Path

import pytest

from agentrl_cli.errors import NotFound
from agentrl_cli.store import Store
from agentrl_cli.tasks import load_pack
from tests.helpers.train import trainer_of, write_pack

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
