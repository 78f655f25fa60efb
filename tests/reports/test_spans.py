"""Where the time goes: spans by hand-computed numbers, of an episode and of a step."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl_cli.registry.plugins import spread_settings
from agentrl_cli.reports.spans import (
    GLYPHS,
    episode_spans,
    of_episode,
    of_step,
    totals_of,
    waterfall_lines,
)
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Outcome, RewardPart, ToolCall, ToolResult, Turn
from tests.helpers.cli import Cli

# Begins 0.5 s late, waits 0.5 s, samples 3 s, waits 0.5 s, two calls of 1.5 s together, samples 2
# s, is graded 2 s.
TEN = (
    Turn(0, "user", (), 0, 0, started=100.5),
    Turn(
        1,
        "assistant",
        (),
        0,
        0,
        (ToolCall("1", "a", {}, ""), ToolCall("1", "a", {}, "")),
        started=101.0,
        seconds=3.0,
    ),
    Turn(
        2,
        "tool",
        (),
        0,
        0,
        results=(ToolResult("x", seconds=1.0), ToolResult("y", seconds=0.5)),
        started=106.0,
    ),
    Turn(3, "assistant", (), 0, 0, started=106.0, seconds=2.0),
)


def made(id: str = "e", turns: tuple[Turn, ...] = TEN, at: float = 0.0, **more: object) -> Episode:
    moved = tuple(Turn(t.index, t.role, (), 0, 0, t.calls, t.results, started=t.started + at, seconds=t.seconds,
                       parent=t.parent) for t in turns)  # fmt: skip
    return Episode(id, "p/task-1", turns=moved, started=100.0 + at, ended=110.0 + at, outcome=Outcome.FAILED,
                   reward_parts=(RewardPart("r", 0.0, 1.0, True),), **more)  # type: ignore[arg-type]  # fmt: skip


def rows(episode: Episode) -> list[tuple[str, float, float, str]]:
    return [
        (s.kind, round(s.start, 3), round(s.seconds, 3), s.label) for s in episode_spans(episode)
    ]


def test_spans_of_an_episode() -> None:
    assert rows(made()) == [
        ("waiting", 0.0, 0.5, "begin"),
        ("waiting", 0.5, 0.5, "1 assistant 0 tok"),
        ("sampling", 1.0, 3.0, "1 assistant 0 tok"),
        ("waiting", 4.0, 0.5, "2 tool"),
        ("tool", 4.5, 1.5, "2 2×a"),
        ("sampling", 6.0, 2.0, "3 assistant 0 tok"),
        ("grading", 8.0, 2.0, "grading"),
    ]
    assert totals_of(episode_spans(made())) == {
        "sampling": 5.0,
        "grading": 2.0,
        "waiting": 1.5,
        "tool": 1.5,
    }
    assert episode_spans(Episode("e", "t")) == []


def test_spans_of_others_begin_when_a_tool_did() -> None:
    tool = Turn(2, "tool", (), 0, 0, results=(ToolResult("x", seconds=1.5),), started=104.0)
    turns = (*TEN[:2], tool, *TEN[3:])
    assert ("tool", 4.0, 1.5, "2 2×a") in rows(made(turns=turns, kind="import"))


def test_a_file_without_durations_has_only_the_times_between_messages() -> None:
    bare = tuple(replace(turn, seconds=0.0, results=()) for turn in TEN)
    found = episode_spans(made(turns=bare, kind="import"))
    assert [(s.kind, s.seconds, s.label) for s in found[:3]] == [
        ("between messages", 0.5, "0 user"),
        ("between messages", 0.5, "1 assistant"),
        ("between messages", 5.0, "2 tool"),
    ]


def test_an_agents_program_runs_between_its_requests_and_branches_are_apart() -> None:
    turns = (
        Turn(0, "user", (), 0, 0, started=105.0),  # recorded with its answer
        Turn(
            1, "assistant", (), 0, 0, (ToolCall("1", "search", {}, ""),), started=101.0, seconds=4.0
        ),
        Turn(2, "tool", (), 0, 0, started=109.0),
        Turn(3, "assistant", (), 0, 0, started=107.0, seconds=2.0),
        Turn(4, "user", (), 0, 0, started=103.0, parent=-1),
        Turn(5, "assistant", (), 0, 0, started=102.0, seconds=1.0, parent=4),
    )
    found = episode_spans(made(turns=turns))
    assert [(s.kind, s.start, s.seconds, s.label, s.branch) for s in found] == [
        ("waiting", 0.0, 1.0, "begin", 0),
        ("sampling", 1.0, 4.0, "1 assistant 0 tok", 0),
        ("agent", 5.0, 2.0, "2 search", 0),
        ("sampling", 7.0, 2.0, "3 assistant 0 tok", 0),
        ("waiting", 0.0, 2.0, "begin", 1),
        ("sampling", 2.0, 1.0, "5 assistant 0 tok", 1),
        ("grading", 9.0, 1.0, "grading", 0),
    ]


def fill(
    path: Path, rollout: float, update: float, config: dict[str, object], **more: float
) -> None:
    with Store.open(path) as store:
        store.runs.add(
            RunRow(
                "r", "run", kind="train", status="finished", step=1, total_steps=1, config=config
            )
        )
        for n in range(4):
            one = made(
                f"e{n}", at=0.5 * n, run_id="r", step=1, kind="train", sample=n, fact="trained"
            )
            store.episodes.finish(one)
        took = {
            "time/step": rollout + update,
            "time/rollout": rollout,
            "time/update": update,
        } | more
        store.runs.add_step("r", 1, took)
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("UPDATE steps SET at=?", (100.0 + rollout + update,))


@pytest.mark.parametrize(
    ("rollout", "update", "config", "advice", "setting"),
    [
        (12.0, 1.0, {}, "Sampling takes 50%", "rollout.max_new_tokens=128"),
        (12.0, 4.0, {}, "nothing is sampled meanwhile", "rollout.async_staleness=1"),
        (
            12.0,
            4.0,
            {"rollout": {"async_staleness": 1}},
            "Sampling takes 50%",
            "rollout.max_new_tokens=128",
        ),
        (12.0, 20.0, {}, "The update takes 62%", "train.token_budget=8192"),
        (12.0, 20.0, {"algo": {"epochs": 2}}, "in 2 passes", "algo.epochs=1"),
        (40.0, 4.0, {}, "The last", "rollout.async_staleness=1"),
    ],
)
def test_a_step_names_the_setting_that_shortens_it(
    tmp_path: Path,
    rollout: float,
    update: float,
    config: dict[str, object],
    advice: str,
    setting: str,
) -> None:
    fill(tmp_path / "a.db", rollout, update, config)
    with Store.open(tmp_path / "a.db", readonly=True) as store:
        found = of_step(store, store.runs.get("run"))
    assert found.totals == {"sampling": 20.0, "grading": 8.0, "waiting": 6.0, "tool": 6.0}
    assert found.seconds == rollout + update
    assert advice in found.advice and setting in found.command
    assert [label for label, _ in found.rows][:2] == ["all episodes", "update"]
    lines = waterfall_lines(found, 80)
    assert lines[2].count(GLYPHS["sampling"]) == int(rollout / found.seconds * 54)
    assert all(len(line) <= 80 for line in lines[2:-2])


@pytest.mark.parametrize(
    ("config", "more", "setting"),
    [
        ({"cluster": {"kind": "here", "workers": 1}}, {"time/cpu": 14.0}, "cluster.workers=2"),
        ({}, {"time/cpu": 14.0}, "cluster.kind=processes"),
        ({}, {"time/cpu": 25.0}, "rollout.async_staleness=1"),
        ({}, {"time/cpu": 14.0, "gpu/memory": 1.0}, "rollout.async_staleness=1"),
        (
            {"cluster": {"kind": "ray", "workers": 4}},
            {"time/cpu": 3.0},
            "rollout.async_staleness=1",
        ),
    ],
)
def test_a_step_that_leaves_a_core_idle_names_workers(
    tmp_path: Path, config: dict[str, object], more: dict[str, float], setting: str
) -> None:
    if not spread_settings():
        pytest.skip("needs two cores, and the plugin that has workers")
    fill(tmp_path / "a.db", 12.0, 4.0, config, **more)
    with Store.open(tmp_path / "a.db", readonly=True) as store:
        assert setting in of_step(store, store.runs.get("run")).command


def test_the_command_prints_the_same(tmp_path: Path, cli: Cli) -> None:
    db = tmp_path / "a.db"
    fill(db, 12.0, 1.0, {})
    cli.always = ("--db", str(db))
    text = cli("show", "e1", "--time")
    assert "TIME episode e1: 10.00 s" in text and "2 2×a" in text
    found = cli.json("show", "run", "--time")
    assert found["totals"]["sampling"] == 20.0 and found["command"].startswith(
        "agentrl train --set"
    )
    cli("show", "run", "--step", "7", code=2, said="Its last is 1.")
    with Store.open(db, readonly=True) as store:
        assert of_episode(store, store.episodes.get("e1")).report()["seconds"] == 10.0
