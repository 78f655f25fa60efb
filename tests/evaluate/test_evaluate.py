"""Evaluation: hand-computed statistics, scores of made-up attempts, and whole evaluations with a scripted policy."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, Outcome, Pack, ScriptedPolicy, load_pack
from agentrl_cli.errors import DataError, ModelError, NotFound, PolicyError
from agentrl_cli.evaluate import (
    Attempt,
    EvalResult,
    Score,
    Settings,
    compare,
    difference,
    estimate,
    evaluate,
    evaluate_policy,
    mcnemar,
    pass_at_k,
    pick_tasks,
    score,
    spread,
    wilson,
)
from agentrl_cli.evaluate.plan import Request, make_plan
from agentrl_cli.evaluate.stats import effective_trials
from agentrl_cli.models.load import checkpoint_folder
from agentrl_cli.policies.load import Loaded
from agentrl_cli.rollout import Rollout
from agentrl_cli.store import EvalRow, RunRow, Store
from agentrl_cli.store.checkpoint_names import explain_best, full_name, trained_by
from agentrl_cli.tools import as_tool
from tests.helpers.chat import BYTES, CHAT
from tests.helpers.cli import Cli
from tests.helpers.web import completion, served

# --- statistics ------------------------------------------------------------------------------------------------------


EXACT = 2 * (1 + 12 + 66) / 4096
Z2 = 1.959964**2
# A statistic, what it is given, and its value.
STATISTICS: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    (pass_at_k, (4, 2, 1), 0.5),
    (pass_at_k, (4, 2, 2), 1 - 1 / 6),  # of the 6 pairs one has neither
    (pass_at_k, (4, 1, 4), 1.0),
    (pass_at_k, (4, 0, 4), 0.0),
    (pass_at_k, (4, 3, 2), 1.0),
    (pass_at_k, (10, 3, 5), 1 - 21 / 252),
    (pass_at_k, (2000, 1, 1000), 0.5),  # no overflow
    *(
        (mcnemar, pair, value)
        for pair, value in (
            ((10, 2), EXACT),
            ((2, 10), EXACT),
            ((0, 0), 1.0),
            ((3, 3), 1.0),
            ((5, 0), 2 / 32),
        )
    ),
    (wilson, (1.0, 10), (10 / (10 + Z2), 1.0)),
    # between tasks and attempts: attempts at a task agree, one trial a task
    (effective_trials, ([0, 1, 1, 0], 16), 4),
    (effective_trials, ([1, 1, 1], 12), 3),  # no spread says nothing
    (effective_trials, ([0.5, 0.5], 8), 2),
    # mean 0.5, variance (2 × 0.0625) / 4: 0.25 × 4 / 0.03125 = 32 trials, more than the 16 attempts
    (effective_trials, ([0.25, 0.5, 0.5, 0.75], 16), 16),
    (effective_trials, ([0.0, 0.5, 0.5, 1.0], 16), 8),  # mean 0.5, variance 0.125: 0.25 × 4 / 0.125
]


@pytest.mark.parametrize(("statistic", "given", "value"), STATISTICS)
def test_statistics_by_hand(
    statistic: Callable[..., Any], given: tuple[Any, ...], value: Any
) -> None:
    assert statistic(*given) == pytest.approx(value)


def test_pass_at_k_is_unbiased_and_large_counts_do_not_overflow() -> None:
    for given in ((4, 5, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at_k(*given)
    # Its mean over all outcomes of 5 attempts, each solved with p = 0.3, is exactly 1 - 0.7^k.
    for k in range(1, 6):
        mean = sum(math.comb(5, c) * 0.3**c * 0.7 ** (5 - c) * pass_at_k(5, c, k) for c in range(6))
        assert mean == pytest.approx(1 - 0.7**k)
    assert 0 < mcnemar(600, 0) < 1e-170 and mcnemar(1100, 1000) < 0.05


def test_estimate_of_single_attempts_is_wilsons() -> None:
    assert wilson(0.0, 10) == pytest.approx((0.0, Z2 / (10 + Z2)), abs=1e-6)
    one, perfect, nothing = estimate([1] * 8 + [0] * 2), estimate([1.0] * 150, 600), estimate([])
    assert (one.value, one.n, perfect.value, perfect.high, nothing.n) == (0.8, 10, 1.0, 1.0, 0)
    assert (one.low, one.high, perfect.low) == pytest.approx((0.49016, 0.94331, 0.97503), abs=1e-5)
    assert math.isnan(nothing.value)


def test_difference_of_pairs() -> None:
    """The example of Newcombe 1998 with 36, 12, 2 and 0 pairs: method 10 gives 0.0569 to 0.3404."""
    before, after = [0] * 2 + [1] * 12 + [1] * 36, [1] * 2 + [0] * 12 + [1] * 36
    one, turned = difference(after, before), difference(before, after)
    assert (one.n, difference([], []).n) == (50, 0)
    assert (one.value, one.low, one.high) == pytest.approx((0.2, 0.0569, 0.3404), abs=5e-5)
    assert (turned.low, turned.high) == pytest.approx((-one.high, -one.low))
    same = difference([0.5, 1.0], [0.5, 1.0])
    assert same.value == 0 and same.low <= 0 <= same.high


# --- scores ----------------------------------------------------------------------------------------------------------


def attempts(
    task: str,
    outcomes: str,
    *,
    split: str = "test",
    family: str = "f",
    prefix: str = "",
    pack: str = "pack",
) -> list[Attempt]:
    """One attempt a letter: s solved with a call, f failed, e an infrastructure error."""
    known = {"s": Outcome.SOLVED, "f": Outcome.FAILED, "e": Outcome.SANDBOX_ERROR}
    return [
        Attempt(
            *(
                task,
                pack,
                family,
                split,
                n,
                f"{prefix}{task}{n}",
                known[letter],
                float(letter == "s"),
            ),
            *(int(letter == "s"), 0, 10),
        )
        for n, letter in enumerate(outcomes)
    ]


def result(name: str, *groups: Sequence[Attempt], k: int = 4) -> EvalResult:
    return EvalResult(
        name, k, 0, 1.0, True, tuple(attempt for group in groups for attempt in group)
    )


def test_scores_by_hand() -> None:
    found = score([*attempts("a", "ssff"), *attempts("b", "ffff"), *attempts("c", "ssss")], 4)
    by_hand = {1: (0.5 + 0 + 1) / 3, 2: (5 / 6 + 0 + 1) / 3, 3: 2 / 3, 4: 2 / 3}
    assert {k: one.value for k, one in found.pass_at.items()} == pytest.approx(by_hand)
    assert all(one.low < one.value < one.high for one in found.pass_at.values())
    counts = (found.n_tasks, found.n_attempts, found.reward, found.tool_call_rate, found.tokens)
    assert (*counts, found.errors) == (3, 12, 0.5, 0.5, 10, {})


def test_errors_are_counted_apart_and_never_scored() -> None:
    found = score([*attempts("a", "sse"), *attempts("b", "eee"), *attempts("c", "ffs")], 3)
    assert (found.n_tasks, found.n_attempts, found.errors) == (2, 5, {"sandbox_error": 4})
    assert found.pass_at[1].value == pytest.approx((1 + 1 / 3) / 2) and found.pass_at[1].n == 2
    assert (
        found.pass_at[3].value == 1.0 and found.pass_at[3].n == 1
    )  # only c has three graded attempts
    nothing = score(attempts("a", "ee"), 2)
    assert math.isnan(nothing.pass_rate) and nothing.n_tasks == 0


def test_splits_families_and_packs_stand_apart() -> None:
    one = (
        attempts("a", "ss", family="sum", pack="one"),
        attempts("b", "ff", family="word", pack="one"),
        attempts("h", "sf", split="heldout", family="rest", pack="one"),
    )
    two = attempts("c", "sf", family="sum", pack="two")
    both, alone = result("x", *one, two, k=2), result("x", *one, k=2)

    def rates(parts: dict[str, Score]) -> dict[str, tuple[int, float]]:
        return {name: (part.n_tasks, part.pass_rate) for name, part in parts.items()}

    assert (both.splits, both.pass_rate) == (("test", "heldout"), 0.5)
    assert rates(both.packs("test")) == {"one": (2, 0.5), "two": (1, 0.5)}
    assert rates(alone.families("test")) == {"sum": (1, 1.0), "word": (1, 0.0)}
    assert alone.packs("test") == {} and set(both.packs("heldout")) == {"one"}
    metrics = {"pass@1": 0.5, "heldout/pass@2": 1.0, "pack/one": 0.5, "heldout/pack/one": 0.5}
    assert both.metrics | metrics == both.metrics
    assert alone.metrics["heldout/family/rest"] == 0.5
    row = alone.row()
    assert (row.split, row.n_tasks, row.n_samples, row.pass_rate) == ("test", 2, 2, 0.5)
    assert row.low is not None and row.high is not None and 0 < row.low < 0.5 < row.high < 1
    report = json.loads(json.dumps(both.report(), allow_nan=False))
    assert set(report["splits"]["test"]["packs"]) == {"one", "two"}
    empty = result("x", attempts("a", "ee"))
    assert empty.pass_rate is empty.row().pass_rate is None
    json.dumps(empty.report(), allow_nan=False)


def test_comparison_finds_flipped_tasks() -> None:
    scored = {
        "a": ("ffff", "sssf"),
        "b": ("sfff", "fsss"),
        "c": ("sssf", "ffff"),
        "d": ("ssff", "ssff"),  # a tie is unsolved for both
        "e": ("eeee", "ssss"),  # not graded before: no pair
    }
    before, after = (
        result(name, *(attempts(task, pair[n], prefix="BA"[n]) for task, pair in scored.items()))
        for n, name in enumerate(("base", "best"))
    )
    found = compare(before, after, "test")
    assert (len(found.tasks), found.gained, found.lost, found.p_value) == (4, 2, 1, 1.0)
    assert found.difference.value == pytest.approx((0.75 + 0.5 - 0.75 + 0) / 4)
    # The episodes to open show what happened: not solved before and solved after, or the reverse.
    assert [
        (
            *flip.before,
            *flip.after,
            flip.task_id,
            flip.flip,
            flip.episode_before,
            flip.episode_after,
        )
        for flip in found.flips
    ] == [
        (0, 4, 3, 4, "a", "gained", "Ba0", "Aa0"),
        (1, 4, 3, 4, "b", "gained", "Bb1", "Ab1"),
        (3, 4, 0, 4, "c", "lost", "Bc0", "Ac0"),
    ]
    json.dumps(found.report(), allow_nan=False)


# --- whole evaluations -----------------------------------------------------------------------------------------------

TASK_YAML = """\
name: words
description: Say a word.
sandbox: false
tools: []
rewards:
  exact: {weight: 1.0, primary: true}
families: {train: [one, two], heldout: [three]}
"""
TASK_PY = """\
def exact(episode, ctx):
    if ctx.final_text == "boom":
        raise RuntimeError("the grader broke")
    return ctx.part(float(ctx.final_text == ctx.task.data["answer"]))


REWARDS = {"exact": exact}
"""


def write_pack(folder: Path, answers: Sequence[str] = ("ant", "bee", "cow", "dog")) -> Path:
    (folder / "data").mkdir(parents=True)
    (folder / "task.yaml").write_text(TASK_YAML)
    (folder / "task.py").write_text(TASK_PY)
    rows = [
        {"id": f"t{n}", "family": ("one", "two")[n % 2], "prompt": f"Word {n}?", "answer": answer}
        for n, answer in enumerate(answers)
    ]
    held = [{"id": "h0", "family": "three", "prompt": "Word 9?", "answer": "emu"}]
    (folder / "data" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data" / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    return folder


@pytest.fixture
def packs(tmp_path: Path) -> dict[str, Pack]:
    return {"words": load_pack(write_pack(tmp_path / "words"))}


class Scripted(ScriptedPolicy):
    """A candidate that answers by the number in the question; `replies` are used up one by one, the last one stays."""

    def __init__(
        self, replies: dict[int, list[str]], fail_after: int | None = None, **loaded: Any
    ) -> None:
        super().__init__(self._answer, BYTES)
        self.answers, self.fail_after, self.asked = replies, fail_after, list[int]()
        self.loaded: dict[str, Any] = {"name": "scripted", "folder": None, **loaded}

    def _answer(self, key: str, ids: Sequence[int]) -> str:
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise PolicyError("out of memory")
        number = int(BYTES.decode(list(ids)).rpartition("Word ")[2][0])
        texts = self.answers.get(number, [""])
        self.asked.append(number)
        return texts.pop(0) if len(texts) > 1 else texts[0]


async def run_evaluation(
    candidate: Scripted,
    packs: dict[str, Pack],
    store: Store,
    model: Mapping[str, Any] | None = None,
    **given: Any,
) -> EvalResult:
    """Evaluate it on the test split unless other tasks are `given`."""
    given = {"tasks": pick_tasks(packs, ["test"]), **given}
    config = quiet().replace(model=model or {})
    rollout = Rollout(candidate, CHAT, packs, config, store=store)
    loaded = Loaded(candidate, CHAT, None, **candidate.loaded)
    return await evaluate(loaded, rollout, **given)


def quiet() -> Config:
    """One episode at a time: the order of what happens is the order of the jobs."""
    return Config.model_validate({"eval": {"k": 2}, "rollout": {"concurrency": 1}})


def right() -> dict[int, list[str]]:
    return {0: ["ant"], 1: ["bee"], 2: ["ass", "cow"], 3: ["cat"], 9: ["emu"]}


async def test_an_evaluation_is_a_run_of_its_own(packs: dict[str, Pack], store: Store) -> None:
    tasks = pick_tasks(packs, ["test", "heldout"])
    seen: list[Attempt] = []
    found = await run_evaluation(Scripted(right()), packs, store, tasks=tasks, on_done=seen.append)
    (run,) = store.runs.all()
    assert (run.kind, run.status, run.model, run.pack) == ("eval", "finished", "scripted", "words")
    assert store.tokenizers.get(run.tokenizer) is not None
    assert store.tasks.get("words/t0") is not None
    assert found.pass_rate == (1 + 1 + 0.5 + 0) / 4 and found.score.pass_at[2].value == 0.75
    assert found.scores["heldout"].pass_rate == 1.0 and len(seen) == len(found.attempts) == 10
    (row,) = store.runs.evals(run.id)
    shown = (row.pass_rate, row.n_tasks, row.n_samples, row.split, row.name)
    assert shown == (0.625, 4, 2, "test", "scripted")
    assert row.metrics["heldout/pass@1"] == 1.0 and row.metrics["family/one"] == 0.75
    episodes = store.episodes.rows(store.episodes.ids(run=run.id))
    assert {episode.kind for episode in episodes} == {"eval"}
    assert sorted(e.id for e in episodes) == sorted(a.episode_id for a in found.attempts)


async def test_seeds_depend_on_task_and_attempt_alone(packs: dict[str, Pack], store: Store) -> None:
    tasks = pick_tasks(packs, ["test"])
    seeds = []
    for name, some in (("a", tasks), ("b", tasks[::-1])):
        found = await run_evaluation(Scripted(right(), name=name), packs, store, tasks=some)
        rows = {(a.task_id, a.sample): store.episodes.row(a.episode_id) for a in found.attempts}
        seeds.append({key: row.seed for key, row in rows.items()})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 8


async def test_an_interrupted_evaluation_goes_on_where_it_stopped(
    packs: dict[str, Pack], store: Store
) -> None:
    with pytest.raises(PolicyError, match="out of memory"):
        await run_evaluation(Scripted(right(), fail_after=5), packs, store)
    assert [run.status for run in store.runs.all()] == ["failed"]
    again = Scripted({0: ["x"], 1: ["x"], 2: ["cow"], 3: ["cat"]})
    found = await run_evaluation(again, packs, store)
    assert (found.reused, again.asked) == (5, [2, 3, 3])  # what was solved is not asked again
    assert found.pass_rate == 0.625  # as if nothing had happened
    (run,) = store.runs.all()
    assert run.status == "finished" and len(store.runs.evals(run.id)) == 1
    assert not store.live.all(run.id)
    # Another one with the same settings starts again; --resume takes what is there.
    fresh = await run_evaluation(Scripted(right()), packs, store)
    kept = Scripted({})
    same = await run_evaluation(kept, packs, store, resume=True)
    assert (fresh.reused, same.reused, kept.asked) == (0, 8, [])
    assert same.run_id == fresh.run_id != found.run_id and same.attempts == fresh.attempts
    assert len(store.runs.evals(same.run_id)) == 1


@pytest.mark.parametrize(
    "changed",
    [Settings(2, 0.5), Settings(2, 1.0, 1), Settings(1), Settings(2, with_tools=False)],
    ids=str,
)
async def test_other_settings_are_another_evaluation(
    packs: dict[str, Pack], store: Store, changed: Settings
) -> None:
    with pytest.raises(PolicyError):
        await run_evaluation(Scripted(right(), fail_after=3), packs, store)
    found = await run_evaluation(Scripted(right()), packs, store, settings=changed)
    assert found.reused == 0 and len(store.runs.all()) == 2
    coarse: dict[str, Any] = {
        "model": {"quantization": "8bit"},
        "settings": changed,
        "resume": True,
    }
    assert (await run_evaluation(Scripted(right()), packs, store, **coarse)).reused == 0


async def test_other_weights_code_or_tools_are_another_evaluation(
    packs: dict[str, Pack], store: Store, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()

    def look(word: str) -> str:
        """Look a word up."""
        return word

    def described(text: str) -> None:
        look.__doc__ = text
        packs["words"] = replace(packs["words"], tools=(as_tool(look),))

    folder = packs["words"].dir
    changes = (
        lambda: (weights / "model.safetensors").write_bytes(b"1"),
        lambda: (weights / "model.safetensors").write_bytes(b"12"),
        lambda: (folder / "task.py").write_text(TASK_PY + "# changed\n"),
        lambda: (folder / "helper.py").write_text("LIMIT = 1\n"),
        lambda: (folder / "helper.py").write_text("LIMIT = 2\n"),
        lambda: described("Look a word up."),
        lambda: described("Look a word up, once."),
    )
    for change in changes:
        change()
        for reused in (0, 8):
            candidate = Scripted(right(), folder=weights)
            found = await run_evaluation(candidate, packs, store, resume=True)
            assert found.reused == reused


async def test_errors_are_tried_once_more(packs: dict[str, Pack], store: Store) -> None:
    # Three times a crash in a row for word 0: attempts 0 and 1, then 0 again; its second attempt works at last.
    candidate = Scripted({0: ["boom", "boom", "boom", "ant"], 1: ["bee"], 2: ["cow"], 3: ["dog"]})
    seen: list[Attempt] = []
    found = await run_evaluation(candidate, packs, store, on_done=seen.append)
    assert found.retried == 2 and candidate.asked.count(0) == 4
    assert found.score.errors == {"env_error": 1} and found.score.n_attempts == 7
    assert found.pass_rate == 1.0 and len(seen) == 8  # progress counts every attempt once
    assert "the grader broke" in found.attempts[0].error


async def test_a_trainer_evaluates_its_live_policy(packs: dict[str, Pack], store: Store) -> None:
    tasks = pick_tasks(packs, ["test"])
    run = store.runs.add(RunRow(id="", name="fox"))
    rollout = Rollout(Scripted(right()), CHAT, packs, quiet(), store=store, run=run)
    first = await evaluate_policy(rollout, tasks, 2, 0, run_id=run.id, step=10)
    again = await evaluate_policy(rollout, tasks, 2, 0, run_id=run.id, step=10)
    later = await evaluate_policy(rollout, tasks, 1, 0, run_id=run.id, step=20)
    assert (first.pass_rate, again.reused, later.reused) == (0.625, 8, 0)
    assert again.attempts == first.attempts
    shown = [(row.step, row.name) for row in store.runs.evals(run.id)]
    assert shown == [(10, "step-10"), (20, "step-20")]
    # nothing that a resume would take for episodes of training
    assert store.episodes.find_finished(run.id, 10) == {}
    bare = Rollout(Scripted(right()), CHAT, packs, quiet())
    alone = await evaluate_policy(bare, tasks, 1, 0, run_id=None, step=None)
    assert (alone.name, alone.pass_rate) == ("scripted", 0.5)


def test_a_split_is_of_every_pack_that_has_it_wherever_its_rows_lie(
    packs: dict[str, Pack], tmp_path: Path
) -> None:
    folder = tmp_path / "named"
    folder.mkdir()
    (folder / "task.py").write_text(TASK_PY)
    rows = "data: {test: ../words/data/test.jsonl, heldout: ../words/data/heldout.jsonl}\n"
    (folder / "task.yaml").write_text(TASK_YAML.replace("name: words", "name: named") + rows)
    packs["named"] = load_pack(folder)
    wanted = [f"{name}/t{n}" for name in packs for n in range(4)]
    assert [task.id for task in pick_tasks(packs, ["test"])] == wanted
    config = Config.model_validate({"task": {"packs": [str(folder)]}})
    plan = make_plan(config, tmp_path, tmp_path / "runs" / "agentrl.db", Request())
    assert [task.id for task in plan.tasks] == [*wanted[4:], "named/h0"]


def test_tasks_are_taken_evenly(packs: dict[str, Pack]) -> None:
    both = ["test", "heldout"]
    for splits, more, wanted in (
        (["test"], {"limit": 2}, ["t0", "t2"]),
        (["test"], {"limit": 99}, ["t0", "t1", "t2", "t3"]),
        (both, {"limit": 1}, ["t0", "h0"]),
        (both, {"families": ["three"]}, ["h0"]),
    ):
        found = [task.id.removeprefix("words/") for task in pick_tasks(packs, splits, **more)]
        assert found == wanted
    many = pick_tasks(packs, ["test"]) * 25
    assert [many.index(task) for task in spread(many, 4)] == [0, 1, 2, 3]
    assert len(spread(many, 7)) == 7
    for split, family, unknown in (("test", "thre", "'thre'"), ("tets", "three", "'tets'")):
        with pytest.raises(NotFound, match=unknown):
            pick_tasks(packs, [split], families=[family])
    held = packs["words"].dir / "data" / "heldout.jsonl"
    held.write_text(held.read_text().replace('"h0"', '"t0"'))
    with pytest.raises(DataError, match="words/t0 is a row of test and of heldout"):
        pick_tasks(packs, both)
    held.write_text((held.parent / "test.jsonl").read_text())
    assert pick_tasks(packs, both) == pick_tasks(packs, ["test"])


# --- the command -----------------------------------------------------------------------------------------------------


def test_names_of_checkpoints(store: Store, tmp_path: Path) -> None:
    def folder_of(which: str) -> Path:
        return checkpoint_folder(store, "fox", which, Config().model, base=tmp_path)

    assert full_name(store, None) is None and full_name(store, "base") is None
    with pytest.raises(NotFound, match="nothing was trained"):
        full_name(store, "best")
    run = store.runs.add(RunRow(id="", name="fox", started=1.0, step=21))
    store.runs.add(RunRow(id="", name="eval-fox", kind="eval", started=2.0))
    assert not explain_best(store, "fox@best"), "no checkpoint was saved"
    assert not explain_best(store, "./folder@v1") and trained_by(store, "./folder@v1") is None
    store.runs.add_checkpoint(run.id, 20, tmp_path, {}, "step")
    assert full_name(store, None) == "fox@last"
    # the run was killed before it wrote its last
    store.runs.add_checkpoint(run.id, 10, tmp_path / "ten", {}, "step")
    for which in ("last", "best"):
        assert trained_by(store, f"fox@{which}") == (store.runs.get("fox"), 20)
        assert folder_of(which) == tmp_path
    with pytest.raises(ModelError, match="folder is missing") as caught:
        folder_of("10")
    assert caught.value.hint.endswith("agentrl show fox")
    with pytest.raises(NotFound, match="²"):
        folder_of("²")
    store.runs.add_checkpoint(run.id, 20, tmp_path, {}, "best")
    full = {None: "fox@best", "20": "fox@20", "owl@last": "owl@last", "./folder": "./folder"}
    full["last@10"] = "fox@10"  # of the newest training: an evaluation is a run, too
    assert {name: full_name(store, name) for name in full} == full
    assert checkpoint_folder(store, "last", "20", Config().model, base=tmp_path) == tmp_path
    fox = store.runs.get("fox")
    trained = {"fox@best": (fox, 20), "last@20": (fox, 20), "fox@base": (fox, 0), "tiny": None}
    assert {name: trained_by(store, name) for name in trained} == trained
    assert not explain_best(store, "fox@best") and not explain_best(store, "tiny")
    store.runs.add_checkpoint(run.id, 0, tmp_path, {}, "best")
    assert full_name(store, None) == "fox@last", "nothing but the base was evaluated"
    said = "nothing was evaluated since. fox@last has step 20"
    assert said in explain_best(store, "fox@best")
    store.runs.add_eval(EvalRow(run.id, 20, pass_rate=0.1, n_tasks=4))
    assert full_name(store, None) == "fox@best"
    assert "no later evaluation is better" in explain_best(store, "fox@best")


@pytest.fixture
def project(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    folder = write_pack(tmp_path / "project", ["Hello.", "bee", "Hello.", "dog", "Hello."])
    (folder / "agentrl.yaml").write_text(
        "model: {name: scripted}\ntask: {packs: ['.']}\neval: {k: 2}\n"
    )
    return Cli(capfd, tmp_path, "--project", str(folder))


def test_eval_without_a_training_evaluates_the_base(project: Cli) -> None:
    out = project("eval", said="the base alone")
    assert "split test: 5 tasks, 2 attempts each" in out and "held-out families" in out
    line = next(line for line in out.splitlines() if line.startswith("pass@1"))
    assert "0.600 [0.231, 0.882]" in line and "McNemar" not in out  # Wilson, 3 of 5


def test_eval_of_a_model_beside_a_training(project: Cli, tmp_path: Path) -> None:
    with Store.open(tmp_path / "project" / "runs" / "agentrl.db") as store:
        run = store.runs.add(RunRow(id="", name="fox", started=1.0, step=1))
        store.runs.add_checkpoint(run.id, 1, tmp_path, {}, "last")
    for alone in ([], ["--compare-to", "none"]):
        found = project.json("eval", "--model", "scripted", *alone)["results"]
        assert [one["name"] for one in found] == ["scripted"], "not the training's"
    project("eval", "--model", "scripted", "--compare-to", "tinny", code=2, said="tinny")
    for given in (["fox@last"], ["--run", "fox"]):  # the model is in the base's place
        project("eval", *given, "--model", "tinny", code=2, said="tinny")


def test_eval_asks_with_the_texts_of_the_project(project: Cli, tmp_path: Path) -> None:
    """They changed the tools alone: the tasks kept the pack's own system message and prompt."""
    folder = tmp_path / "project"
    (folder / "prompts.yaml").write_text('system: Be brief.\ntask.prompt: "Now: {prompt}"\n')
    task = {"packs": ["."], "prompts": "prompts.yaml"}
    config = Config.model_validate({"model": {"name": "scripted"}, "task": task})
    first = make_plan(config, folder, folder / "runs" / "agentrl.db", Request()).tasks[0]
    assert [message["content"] for message in first.prompt] == ["Be brief.", "Now: Word 0?"]


def test_eval_gate_json_and_split(project: Cli) -> None:
    asked = "eval --fail-under 0.7 --split test -k 1 -n 3".split()
    read = project.json(*asked, code=4, said="under 0.7")
    assert read["gate"] == {"fail_under": 0.7, "met": False} and read["comparisons"] == []
    assert read["settings"]["splits"] == ["test"]
    found = read["results"][0]["splits"]["test"]
    assert found["pass_at"]["1"]["value"] == pytest.approx(1 / 3)  # t0, t1, t3
    assert found["tasks"] == 3
    project("eval", "--fail-under", "0.6")


def test_eval_compares_two(project: Cli) -> None:
    for words, said in (
        ("scripted --compare-to tinny --json", "tinny"),
        ("fox@best --checkpoint fox@last", "unexpected extra argument"),
        ("fox@best", "No run named 'fox'"),
        ("--families nine", "nine"),
        ("--split tets", "tets"),
        ("--svg none/x.svg", "The folder of none/x.svg does not exist"),
        ("--endpoint @http://127.0.0.1:9/v1", "names no model"),
        ("--model a --model b best", "A checkpoint and models of --model or --endpoint exclude"),
        ("--model a --model b --run best", "--run and models of --model"),
        ("--model a --model b --compare-to best", "--compare-to and models of --model"),
    ):
        assert project("eval", *words.split(), code=2, said=said) == ""
    out = project("eval", "scripted", "--compare-to", "none", "--resume", "--no-tools")
    assert "without tools" in out


def test_eval_of_a_model_beside_an_endpoint(project: Cli, tmp_path: Path) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    with served(lambda path, asked: completion("ant", id="1", model="robot", usage=usage)) as url:
        svg = tmp_path / "x.svg"
        given = ("--endpoint", f"robot@{url}/v1", "--split", "test", "--svg", str(svg))
        both = ("--endpoint", f"robot@{url}/v2", *given, "--fail-under", "0.1")
        said = f"under 0.1: robot@{url}/v2 0.000, robot@{url}/v1 0.000"
        project("eval", *both, code=4, said=said)  # each of them
        out = project("eval", "--model", "scripted", *given)
    heads = next(line for line in out.splitlines() if "scripted" in line)
    rates = next(line for line in out.splitlines() if line.startswith("pass@1"))
    assert heads.split() == ["scripted", "robot"] and rates.split()[1::3] == ["0.600", "0.000"]
    assert "McNemar's exact test p = 0.25" in out and svg.read_text().count("<rect") == 3
