"""Each rule names its planted cause first, with a number and a command; sound trainings raise none."""

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from agentrl_cli.config import load_config
from agentrl_cli.config.train import Stop
from agentrl_cli.errors import DataError
from agentrl_cli.paths import PROJECT_FILE
from agentrl_cli.reports.advice import keep_settings
from agentrl_cli.reports.diagnosis import (
    RULES,
    STAGES,
    conclude,
    diagnose,
    first_fault,
    suggest,
)
from agentrl_cli.reports.evidence import Evidence
from agentrl_cli.reports.read_evidence import read_evidence
from agentrl_cli.reports.reference import (
    BASES,
    FILE,
    Reference,
    describe_bases,
    read_reference,
)
from agentrl_cli.reports.run_data import load
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.journal import INPUTS
from agentrl_cli.store.new_run import new_run
from agentrl_cli.trainer.inputs import hash_rows
from agentrl_cli.tui.watch.charts import chart_grid
from agentrl_cli.types import Outcome, Task, ToolCall, ToolResult
from tests.guards.test_recommended import commands_in, problem_of
from tests.helpers.cli import Cli
from tests.helpers.train import trainer_of
from tests.reports.planted import (
    BAD,
    BOLTS,
    CONFIG,
    FLAT,
    GOOD,
    PLANTED,
    RAISED,
    attempt,
    call,
    case,
    rate,
    steps,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_first(name: str) -> None:
    found = diagnose(PLANTED[name])
    cause = first_fault(found)
    assert cause is not None and cause.name == name
    metrics = [re.search(r"\w+/\w+_\w+", one.text) for one in found]
    assert metrics == [None] * len(found), "no names of metrics"
    assert "{" not in cause.text and cause.text[-1] == "." and cause.command
    for line in commands_in(cause.line):
        assert not problem_of(line, mention=False), line
    assert any(commands_in(f"`{cause.command}`")), "a command that can be typed"


def test_every_rule_has_a_planted_case_a_stage_and_a_place_in_stop_on() -> None:
    assert list(dict.fromkeys(rule.name for rule in RULES)) == list(PLANTED)
    order = list(STAGES)
    places = [order.index(rule.stage) for rule in RULES]
    assert places == sorted(places), "the rules stand in the order of the walk"
    assert set(get_args(Stop)) == {rule.name for rule in RULES if rule.stage != "machine"}


@pytest.mark.parametrize("file", ["learning", "packs", "algorithms"])
def test_the_learning_tables_good_runs_raise_nothing(file: str) -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["results"]
    checked = 0
    for one in runs:
        rows = [
            {"step": p["step"], "solved": p["solved"], "reward": p.get("reward", p["solved"]),
             "tools/call_frequency": p.get("tool_call_rate", 0.0)}
            for p in one.get("curve") or ()
        ]  # fmt: skip
        for n in range(1, len(rows) + 1, 1 if file == "packs" else 9):
            found = first_fault(diagnose(case(rows[:n], width=5)))
            fell = (one.get("pack"), one.get("seed")) == ("search-task", 2) and n >= 14
            assert (found.name if found else "") == ("collapse" if fell else ""), (file, one, n)
            checked += 1
    assert checked > 80


SHORT = ToolCall("c", "pallets", {"site": "Molde"}, "{}", 'argument "item" is missing')
MISFITS = [attempt(n, call=SHORT, result=BAD) for n in range(9)]
ANSWER = {"t0": Task("t0", "p", "", "train", (), {"answer": "1,234"})}
SAID = [attempt(n, "Answer: 1234", primary=1.0) for n in range(3)]
PAID = steps([0.5] * 25, reward=[0.3 + 0.02 * n for n in range(25)])
ERROR = "(9 of 9) it raises: KeyError: ('steel bolts are', 'Molde')"
# What it is about → the evidence, the names of all findings, texts in the first one's line, and texts that are not.
# A learning rate 100 times too high: 0.75, then nothing is solved, turns are cut, groups are equal.
CUT: dict[str, list[float]] = {
    "groups/all_failed": [0.1, 1, 1, 1, 1],
    "completions/clipped_ratio": [0, 1, 1, 1, 1],
}
FALL = steps([0.75, 0, 0, 0, 0], **CUT)
SOLVED = steps([1.0] * 6, **{"groups/all_solved": 1.0})


FOUND: dict[str, tuple[Evidence, list[str], list[str], list[str]]] = {
    **{
        f"what follows from a fall is not the cause, after {n} steps": (
            case(FALL[:n], evals=[rate(0, 0.7, 40), rate(4, 0.0, 40)]),
            ["collapse"],
            [
                "from 0.75",
                "go on from the base",
                "`agentrl train --model tiny-tools --set train.lr=3e-05`",
            ],
            [],
        )
        for n in range(2, 6)
    },
    "a fall from what an evaluation found better": (
        case(FALL, evals=[rate(0, 0.3, 40), rate(2, 0.7, 40), rate(4, 0.0, 40)]),
        ["collapse"],
        ["--model demo@best"],
        [],
    ),
    "everything is solved": (
        case(SOLVED, evals=[rate(0, 0.9, 40), rate(4, 1.0, 40)]),
        ["all_solved"],
        ["`agentrl eval demo@best`"],
        [],
    ),
    "everything is solved, and the best is the base": (
        case(SOLVED, evals=[rate(0, 0.9, 40), rate(4, 0.9, 40)]),
        ["all_solved"],
        ["`agentrl eval demo@last`"],
        [],
    ),
    "everything that a rollout made is solved": (
        case(SOLVED, run=RunRow("r", "demo", kind="rollout", status="finished", config=CONFIG)),
        ["all_solved"],
        ["`agentrl eval demo@base`"],
        [],
    ),
    "neither a collapse yet, nor what may follow from one": (
        case(steps([0.22, 0.0], **{name: share[:2] for name, share in CUT.items()})),
        [],
        [],
        [],
    ),
    "noise is not a fall": (case(steps([0.6, 0.4, 0.5, 0.35, 0.6])), [], [], []),
    "a reward that is paid for something else names its part": (
        PLANTED["reward_hacking"],
        ["reward_hacking"],
        ["friendly brought", "0.70 to 1.84", "0.90 to 0.25"],
        [],
    ),
    "no part": (
        case(PAID, evals=[rate(step, 0.4, 40) for step in (0, 12, 24)]),
        ["reward_hacking"],
        ["`agentrl check --all`"],
        [],
    ),
    "evaluations that rise": (
        case(PAID, evals=[rate(0, 0.4, 40), rate(12, 0.45, 40), rate(24, 0.5, 40)]),
        [],
        [],
        [],
    ),
    "a tool's error comes with its text and count": (
        PLANTED["tools"],
        ["tools", "arguments"],
        [ERROR, "agentrl tools call pallets", '"site": "Molde"', "agentrl replay e0"],
        [],
    ),
    "its command can be read in any script": (
        case(steps(FLAT), [attempt(n, call=call(site="上海"), result=RAISED) for n in range(9)]),
        ["tools", "arguments"],
        ['"site": "上海"'],
        [],
    ),
    "calls that do not fit never reach the tool": (
        replace(
            PLANTED["tools"],
            episodes=[
                *PLANTED["tools"].episodes,
                *(attempt(n, call=call(item=n), result=BAD) for n in range(9, 24)),
                *(
                    attempt(n, call=call(item=n), result=replace(BAD, error="malformed_call"))
                    for n in range(24, 40)
                ),
            ],
        ),
        ["tools", "arguments"],
        [ERROR],
        [],
    ),
    "too few to say anything": (
        case(steps(FLAT), [attempt(n, call=BOLTS, result=RAISED) for n in range(2)]),
        [],
        [],
        [],
    ),
    "the tool is not to blame": (
        case(
            steps(FLAT),
            [
                attempt(
                    n,
                    call=call(item=word, site="Molde"),
                    result=replace(RAISED, text=f"KeyError: ('{word}', 'Molde')"),
                )
                for n, word in enumerate(
                    ("roin", "sable", "quarn", "tolb", "vesk", "mirn", "dakel", "pruse", "fonda")
                )
            ],
        ),
        ["arguments"],
        [],
        [],
    ),
    "calls that are not read": (
        PLANTED["malformed"],
        ["malformed"],
        ["a call that cannot be parsed", "set model.chat.parser"],
        [],
    ),
    "calls that are read but do not fit do not concern the parser": (
        case(steps([0.0]), MISFITS),
        ["malformed"],
        ["a call that does not fit its tool"],
        ["parser"],
    ),
    "an agent's exceptions come first": (
        case(
            steps([0.0], **{"outcomes/agent_error": 20.0}),
            [
                *MISFITS,
                *(attempt(n, outcome=Outcome.AGENT_ERROR, error="KeyError") for n in range(20, 40)),
            ],
        ),
        ["errors"],
        [],
        [],
    ),
    "training corrects calls, but no grader": (
        case(
            steps([0.0]),
            [*MISFITS, *(attempt(n, "Answer: 1234") for n in range(50, 54))],
            tasks=ANSWER,
        ),
        ["grader", "few_rows"],
        [],
        [],
    ),
    "one value follows from such calls": (
        case(steps([0.0]), [attempt(n, call=SHORT, result=BAD, primary=0.2) for n in range(16)]),
        ["malformed", "grader"],
        [],
        [],
    ),
    "the grader gives 1 to what is wrong": (
        case(
            steps([1.0]),
            [*SAID, *(attempt(n, f"Answer: {n}", primary=1.0) for n in range(3, 9))],
            tasks=ANSWER,
        ),
        ["grader", "few_rows"],
        ["gives 1 to another answer than the row's in 6 of 6"],
        [],
    ),
    "the grader is fair": (
        case(
            steps([0.3]), [*SAID, *(attempt(n, f"Answer: {n}") for n in range(3, 9))], tasks=ANSWER
        ),
        ["few_rows"],
        [],
        [],
    ),
    "the grader gives everything the same": (
        case(
            steps([0.0]),
            [attempt(n, f"Answer: {n}", primary=0.5, ids=(n, n + 1)) for n in range(20)],
        ),
        ["grader"],
        ["gives the same, 0.5,"],
        [],
    ),
    "time limits stand in the text of errors": (
        PLANTED["errors"],
        ["errors"],
        ["3 took longer than rollout.timeout.episode", "agentrl ls -f outcome:env_error,timeout"],
        [],
    ),
    "errors without a time limit": (
        case(steps(FLAT, **{"outcomes/env_error": 1.0})),
        ["errors"],
        [],
        ["took longer"],
    ),
    "equal rewards": (case(steps([0.5] * 5, frac_reward_zero_std=1.0)), ["no_signal"], [], []),
    "equal rewards of an estimator that learns from them": (
        case(steps([0.5] * 5, frac_reward_zero_std=1.0), compares=False),
        [],
        [],
        [],
    ),
    "a step that trains one group has little entropy": (
        case(steps([0.5] * 10, entropy=[0.4] * 8 + [0.001, 0.002])),
        [],
        [],
        [],
    ),
    "what is solved needs no entropy": (case(steps([1.0] * 9, entropy=0.001)), [], [], []),
}


@pytest.mark.parametrize(("evidence", "names", "shown", "absent"), FOUND.values(), ids=FOUND)
def test_what_is_found(
    evidence: Evidence, names: list[str], shown: list[str], absent: list[str]
) -> None:
    found = diagnose(evidence)
    assert [one.name for one in found] == names
    line = found[0].line if found else ""
    assert (
        [text for text in shown if text not in line]
        == [text for text in absent if text in line]
        == []
    )


@pytest.mark.parametrize(
    ("answers", "result", "says"),
    [
        (("61", "48.5"), '{"price": 48.5}', "'61' and the tool answers '48.5', the answer of the row t1, in 3 of 3"),
        (("26", "31"), "26 pieces", "expects '26' and the tool answers '26 pieces' in 3 of 3"),
        (("26 pieces", "31 pieces"), "26", "expects '26 pieces' and the tool answers '26' in 3 of 3"),
        (("26个", "31个"), "26", "expects '26个' and the tool answers '26' in 3 of 3"),
        (("26.5 pieces", "31 pieces"), "26", ""),
        (("yes", "no", "no", "yes", "no"), "no", ""),
        (("61", "48.5"), "12", ""),
    ],
)  # fmt: skip
def test_what_the_tool_answers_is_compared_with_the_rows(
    answers: Sequence[str], result: str, says: str
) -> None:
    tasks = {
        f"t{n}": Task(f"t{n}", "p", "", "train", (), {"answer": answer})
        for n, answer in enumerate(answers)
    }
    said = result.removeprefix('{"price": ').rstrip("}")
    copied = [
        attempt(n, f"Answer: {said}", call=BOLTS, result=ToolResult(result)) for n in range(3)
    ]
    raised = [attempt(n, call=BOLTS, result=RAISED) for n in range(3, 20)]
    invented = call(item="roin", site="Molde")
    made_up = [
        attempt(n, f"Answer: {said}", call=invented, result=ToolResult(result))
        for n in range(20, 23)
    ]
    found = first_fault(diagnose(case(steps([0.0]), [*copied, *raised, *made_up], tasks=tasks)))
    assert found is not None and found.name == ("grader" if says else "tools"), found
    assert says in found.text
    asked, answered = raised[0].turns[1:3]
    other = replace(asked, index=2, parent=0, calls=(invented,))  # of another branch, meanwhile
    turns = raised[0].turns[0], asked, other, replace(answered, index=3, parent=1)
    pairs = case([], [replace(raised[0], turns=turns)]).results
    assert [made for _, made, _ in pairs] == [BOLTS], "an answer was taken for another call's"


@pytest.mark.parametrize(
    ("solved", "rates", "first", "second"),
    [
        (GOOD, (0.2, 0.8), "rose from 0.26 to 0.72", "agentrl train --resume demo --steps 60"),
        (GOOD, (0.2, 0.8), "and on the validation tasks it rose from 0.20 to 0.80", ""),
        (GOOD, (), "exact moved most, by +0.46", "still rising"),
        (GOOD, (0.3, 0.3), "but on the validation tasks it stayed at 0.30", "memorised"),
        ([0.3] * 10 + [0.7] * 30, (), "rose", "outcome:failed"),
        ([0.4, 0.6] * 8, (), "stayed at 0.50", "Try more steps"),
        (GOOD[::-1], (), "fell from 0.72 to 0.26", "Lower train.lr"),
    ],
)
def test_the_last_lines_of_a_training(
    solved: list[float], rates: tuple[float, ...], first: str, second: str
) -> None:
    rows: list[dict[str, Any]] = steps(solved, **{"rewards/exact/mean": list(solved)})
    evals = [rate(step, share) for step, share in zip((0, len(rows)), rates, strict=False)]
    what, following = conclude(case(rows, evals=evals))
    assert first in what and second in following
    assert conclude(case(rows[:3])) == [], "a few steps prove nothing"
    short = case(rows, run=RunRow("r", "demo", total_steps=len(rows) + 1, config=CONFIG))
    assert suggest(short) == "", "a run that was cut short is resumed first"


def test_the_command_reads_a_store(tmp_path: Path, cli: Cli) -> None:
    where, seen = ["--db", str(tmp_path / "a.db")], PLANTED["tools"]
    with Store.open(tmp_path / "a.db") as store:
        run = store.runs.add(RunRow("r", "demo", status="finished", config=CONFIG))
        store.episodes.add(one.with_(run_id=run.id, kind="train") for one in seen.episodes)
        for row in seen.steps:
            store.runs.add_step(run.id, row["step"], row)
    said = cli("why", *where).replace(f" {' '.join(where)}", "").splitlines()
    assert said[1:4] == ["  template    ok", "  calls       ok", "  tools       warn"]
    assert said[4] == first_fault(diagnose(seen)).line  # type: ignore[union-attr]
    found = cli.json("why", "demo", *where)
    assert found["finding"]["line"] == said[4] and found["finding"]["episode"] == "e0"
    assert [one["stage"] for one in found["stages"]] == list(STAGES)
    reason = "pallets failed 1×: KeyError: ('steel bolts are', 'Molde')"
    assert reason in cli("why", "e3", *where)
    cli("why", "unknown", *where, code=2, said="unknown")
    with Store.open(tmp_path / "a.db") as store:
        for step in (0, 12):  # their numbers were pruned: whether it moved is not known
            unknown = attempt(step, run_id=run.id, kind="eval").with_(step=step)
            unknown.tokens.logp_policy[:] = np.nan
            store.episodes.add([unknown.with_(id=f"eval{step}")])
            store.runs.add_eval(replace(rate(step, 0.5, 12), run_id=run.id))
        assert read_evidence(store, run).moved is None
        fresh = store.runs.add(RunRow("", "fresh", config=CONFIG))
        store.episodes.start(seen.episodes[0].with_(id="begun", run_id=fresh.id, outcome=None))
    assert cli("why", "begun", *where).startswith("begun: running\n")
    assert "there is nothing to judge" in cli("why", "fresh", *where)


# --- reference curves ---


STEADY = Reference(
    {"train.lr": 3e-4},
    {"solved": [[0.4] * 8, [0.6] * 8], "reward": [[1.0] * 8], "reward_std": [[0.1] * 12]},
)


def test_a_command_keeps_the_settings_that_a_run_was_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of flags, which the project's file does not have; without any the command is as short as before."""
    (tmp_path / PROJECT_FILE).write_text("train: {steps: 3, save_every: 5}\n")
    command = "agentrl train --set train.lr=1e-05"
    for flags, wanted in (
        ({"model.name": "tiny-tools"}, "agentrl train --config runs/calc-grpo/config.yaml --set"),
        ({}, command),
        ({"train.steps": 3}, command),
    ):
        config, _ = load_config([tmp_path / PROJECT_FILE], flags=flags, base=tmp_path)
        with Store.open(tmp_path / "runs" / "agentrl.db") as store:
            run = new_run(config, store, kind="train", packs=["calc"], tokenizer="")
            run = store.runs.get(run.id)
        with contextlib.chdir(tmp_path):
            assert keep_settings(command, run).startswith(wanted)
        assert (str(tmp_path) in keep_settings(command, run)) == ("model.name" in flags)
        found, _ = load_config([Path(run.dir) / "config.yaml"], base=tmp_path)
        assert found == config, "the file gives the same settings again"
        caplog.clear()
        keep_settings(command, run)
        assert not caplog.text, "an old name is warned of once, not with every advice"
    (tmp_path / "task.yaml").write_text("name: calc\ndefaults: {train: {lr: 0.5}}\n")
    assert "config.yaml" in keep_settings(command, run), "its pack sets another rate by now"
    bad = replace(PLANTED["malformed"], run=run)
    for solution, solved, wanted in (
        ("def solve(row): ...", 1.0, "agentrl sft warm"),
        ("from x import solve", 1.0, "agentrl sft warm"),
        ("# solve it", 1.0, f"agentrl sft warm --from-store 'run:{run.name} outcome:solved'"),
        ("", 0.0, "agentrl doctor --model tiny"),
    ):
        (tmp_path / "task.py").write_text(solution)
        more = [*bad.episodes, attempt(9, primary=solved)]
        cause = first_fault(diagnose(replace(bad, episodes=more)))
        assert cause is not None and cause.command == wanted


def test_the_band_holds_the_seeds_and_half_their_distance_more() -> None:
    assert STEADY.band("solved") == [pytest.approx((0.28, 0.72))] * 8
    assert [*STEADY.band("entropy"), *STEADY.differences({"train": {"lr": 3e-4}})] == []
    zigzag = Reference({}, {"solved": [[0.0, 0.2, 0.0, 0.2, 0.0]]})
    low, high = zigzag.band("solved")[
        -1
    ]  # mean 0.08; steps of 0.2: an error of 0.2/√2, over 5 steps
    beyond = 0.02 + 2.5 * 0.02**0.5 / 5**0.5
    assert (low, high) == pytest.approx((0.08 - beyond, 0.08 + beyond))


@pytest.mark.parametrize(
    ("key", "values", "since"),
    [
        ("solved", [0.5] * 8, 0),
        ("solved", [0.0] * 8, 1),
        ("solved", [0.5] * 3 + [0.0] * 5, 6),  # means 0.375, 0.3, 0.25, 0.21, 0.19
        ("solved", [0.5] * 4 + [0.0] * 4, 0),  # 0.25 at the end is below 0.28: one step alone
        ("solved", [1.0] * 8, 0),  # more is better
        ("reward", [1.5] * 8, 1),
        ("reward", [1.0] * 6 + [1.5] * 2, 0),  # not for LASTING steps
        ("reward_std", [0.4] * 9, 0),  # not before step WINDOW
        ("reward_std", [0.4] * 10, 8),
        ("reward_std", [0.0] * 8, 0),  # attempts that agree are not a fault
        ("solved", [0.0] * 9, 0),  # longer than the reference
    ],
)
def test_a_run_leaves_the_band_after_three_steps_outside(
    key: str, values: Sequence[float], since: int
) -> None:
    assert STEADY.leaves(key, values) == since


async def test_a_pack_s_reference_reaches_the_diagnosis_and_the_charts(
    tmp_path: Path, model: Path
) -> None:
    async def train(**more: Any) -> tuple[RunRow, str]:
        async with trainer_of(tmp_path / "pack", model, train={"steps": 4}, **more) as trainer:
            run = await trainer.train()
            (event,) = [
                row for row in trainer.store.journal.events(run.id) if row["kind"] == INPUTS
            ]
            return run, hash_rows(event["data"]["rows"])

    run, rows = await train()
    curves = {"solved": [[0.9, 0.9, 0.9, 0.9, 0.9]] * 2, "reward": [[2.0] * 5]}
    content = {"model": run.model, "rows": rows, "settings": {"train.lr": 1.0}, "curves": curves}
    (tmp_path / "pack" / FILE).write_text(json.dumps(content))
    second, _ = await train(seed=1)
    with Store.open(tmp_path / "pack" / "runs" / "agentrl.db", readonly=True) as store:
        first, found = (
            [one for one in diagnose(read_evidence(store, row)) if one.name == "off_reference"]
            for row in (run, second)
        )
    with Store.open(tmp_path / "pack" / "runs" / "agentrl.db") as store:
        for _ in range(1000):  # as of an agent that writes to stderr in each episode
            store.journal.add_event(second.id, "agent_stderr", {"episode": "e", "text": "x"})
        data = load(store, second.id)
    assert not first  # it began before the pack had a reference
    assert "Since step 1 solved is outside" in found[0].text
    assert "there 0.88 to 0.92" in found[0].text
    assert "train.lr 0.001 (there 1.0)" in found[0].text
    low, high = data.band("solved")
    assert [x for x, _ in low] == [x for x, _ in high] == [1, 2, 3, 4]
    assert [y for _, y in low + high] == pytest.approx([0.88] * 4 + [0.92] * 4)
    assert data.band("loss") == []
    assert "the range of the reference curves" in "\n".join(map(str, chart_grid(data, 80)))


def test_a_reference_counts_for_its_model_and_its_rows_alone(tmp_path: Path) -> None:
    assert read_reference(tmp_path, "tiny-tools", "abcd") is None
    content = {"model": "tiny-tools", "rows": "abcd", "settings": {}, "curves": {"solved": [[0.5]]}}
    (tmp_path / FILE).write_text(json.dumps(content))
    assert read_reference(tmp_path, "tiny-tools", "abcd") == content
    assert read_reference(tmp_path, "tiny-tools", "other") is None
    assert read_reference(tmp_path, "smollm2", "abcd") is None
    (tmp_path / FILE).write_text('{"settings": {}, "curves": {"solved": "high"}}')
    with pytest.raises(DataError, match=r"reference\.json is not a reference of curves"):
        read_reference(tmp_path, "tiny-tools", "abcd")


def test_bases_say_where_a_model_will_not_learn(tmp_path: Path) -> None:
    assert describe_bases(tmp_path, "sums", "tiny-tools") == ""
    kept = {"tiny-tools": {"sums?terms=2": [0, 24], "coins": [0, 24], "coins?level=1": [16, 24]}}
    (tmp_path / BASES).write_text(json.dumps(kept))
    text = describe_bases(tmp_path, "sums?terms=9", "tiny-tools")
    assert text.startswith("tiny-tools solved 0 of 24 of `sums?terms=2` when this was measured")
    assert "will not learn here: take a larger one, --model" in text
    text = describe_bases(tmp_path, "coins?level=3", "tiny-tools")
    assert "0 of 24 of `coins`, 16 of 24 of `coins?level=1`" in text and "not learn" not in text
    assert describe_bases(tmp_path, "sums", "smollm2") == ""
