"""Planted failures are distinguished by what they did; scanners tag, and agree with people as far as they do."""

import json
import random
from collections import Counter
from math import comb, isnan
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.plugins.failures.modes import (
    ANSWER,
    Act,
    Attempt,
    find_modes,
    generalise,
)
from agentrl_cli.plugins.failures.scan import load_scanner, scan
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Episode, Outcome, ToolCall, ToolResult
from tests.helpers.cli import Cli
from tests.helpers.growth import exponent
from tests.helpers.remote import server
from tests.reports.planted import attempt

KINDS = ("no call", "other tool", "argument", "raises", "loops", "ignores")


def planted(rng: random.Random, kind: str, city: str, degrees: int) -> tuple[list[Act], str]:
    """Return the acts of an attempt at `degrees of city`, and its outcome."""

    def ask(turn: int, place: str, result: object, error: str = "", tool: str = "weather") -> Act:
        return Act(turn, tool, json.dumps({"city": place, "unit": "C"}), error, str(result))

    def answer(value: object, turn: int = 4) -> Act:
        return Act(turn, ANSWER, f"Answer: {value}")

    asked, other = ask(2, city, degrees), degrees + rng.randint(1, 30)
    raised = f"KeyError: '{city[: rng.randint(0, 4)]}' (line {rng.randint(1, 99)})"
    loops = [ask(2 * n, city, degrees) for n in range(rng.randint(3, 6))]
    acts = {
        "solved": [asked, answer(degrees)],
        "no call": [answer(rng.randint(0, 9), turn=2)],
        "other tool": [ask(2, city, "12:31", tool="clock"), answer("12:31")],
        "argument": [ask(2, city[: rng.randint(1, 3)], other), answer(other)],
        "raises": [ask(2, city, raised, "exception"), answer(other)],
        "loops": loops,
        "ignores": [asked, answer(other)],
    }
    cut_off = rng.choice(["truncated_turns", "truncated_tokens"])
    outcomes = {"solved": "solved", "no call": "no_calls", "loops": cut_off}
    return acts[kind], outcomes.get(kind, "failed")


def make(rng: random.Random, failures: int) -> tuple[list[Attempt], dict[str, str]]:
    attempts: list[Attempt] = []
    kinds: dict[str, str] = {}
    number = 0
    while len(kinds) < failures:
        task, never = f"p:{number}", number % 3 == 0
        city, degrees = rng.choice(["Bergen", "Molde", "Oslo", "Narvik"]), rng.randint(-20, 40)
        for sample in range(8):
            kind = "solved" if not never and sample < 3 else rng.choice(KINDS)
            if kind != "solved" and len(kinds) == failures:
                continue
            acts, outcome = planted(rng, kind, city, degrees)
            id = f"{number}-{sample}"
            attempts.append(Attempt(id, task, "f", number // 5, outcome, "", (), tuple(acts)))
            if kind != "solved":
                kinds[id] = kind
        number += 1
    return attempts, kinds


def adjusted_rand(one: list[str], other: list[str]) -> float:
    """Hubert and Arabie 1985."""
    both, rows, columns = Counter(zip(one, other, strict=True)), Counter(one), Counter(other)
    same, mine, theirs = (
        sum(comb(n, 2) for n in found.values()) for found in (both, rows, columns)
    )
    chance = mine * theirs / comb(len(one), 2)
    return (same - chance) / ((mine + theirs) / 2 - chance)


@pytest.mark.parametrize("seed", range(3))
def test_six_planted_kinds_are_distinguished(seed: int) -> None:
    attempts, kinds = make(random.Random(seed), 200)
    found = {one.attempt.id: mode.text for mode in find_modes(attempts) for one in mode.failures}
    assert found.keys() == kinds.keys()
    score = adjusted_rand([kinds[id] for id in kinds], [found[id] for id in kinds])
    assert score >= 0.8, Counter((kinds[id], found[id]) for id in kinds)


def test_a_call_that_reached_no_tool_is_not_what_is_right() -> None:
    asked, answer = Act(4, "stock", '{"item": "nut"}', "", "5"), Act(6, ANSWER, "Answer: 5")
    missed = Act(2, "patck", '{"item": "nut"}', "unknown_tool", "unknown tool")
    other = Act(2, "price", '{"item": "nut"}', "", "12")
    attempts = [
        Attempt("a", "p:1", "f", 1, "solved", "", (), (missed, asked, answer)),
        Attempt("b", "p:1", "f", 1, "failed", "", (), (other, answer)),
    ]
    assert [mode.text for mode in find_modes(attempts)] == ["calls price where stock is right"]


def test_the_cost_grows_with_the_number_of_attempts() -> None:
    assert exponent(lambda size: find_modes(make(random.Random(0), size)[0]), 250) < 1.3


def test_the_course_and_the_recovery_are_counted_by_hand() -> None:
    rng = random.Random(0)
    rows = [
        ("solved", 1),
        ("no call", 1),
        ("no call", 1),
        ("solved", 2),
        ("solved", 3),
        ("solved", 3),
        ("no call", 3),
    ]
    attempts = [
        Attempt(str(n), f"p:{step}", "f", step, outcome, "", (), tuple(acts))
        for n, (kind, step) in enumerate(rows)
        for acts, outcome in [planted(rng, kind, "Oslo", 4)]
    ]
    assert [mode.course for mode in find_modes([one for one in attempts if one.step != 2])] == [
        None
    ]
    (mode,) = find_modes(attempts)
    assert (mode.text, mode.course) == ("answers without calling weather", (2 / 3, 1 / 3))
    assert mode.recovery == (1 + 1 + 2, 2 + 2 + 2)  # all forks are the first act
    assert [one.attempt.id for one in mode.examples] == ["1", "6"]


def test_errors_of_a_kind_have_the_same_words() -> None:
    one = "KeyError: 'Bergen' in /home/me/a.py line 12\nmore"
    assert generalise(one) == generalise("KeyError: 'Oslo' in /tmp/x/b.py line 7")
    texts = ("sh: 1: g++-12: not found", "The page is empty. " + 30 * "Try again. ", 30 * "word ")
    short = "sh: N: g++-N: not found", "The page is empty", (16 * "word ")[:79] + "…"
    assert tuple(map(generalise, texts)) == short


def store_of(path: Path, episodes: list[Episode]) -> Store:
    store = Store.open(path)
    run = store.runs.add(RunRow("", "r", kind="train", status="finished"))
    store.episodes.add(one.with_(run_id=run.id, kind="train", group_id=None) for one in episodes)
    return store


def misfit(problem: str, name: str = "pallets") -> ToolCall:
    """Return a call with its error as the parser words it: several lines, with an example."""
    form = 'Expected: <tool_call>\n{"name": "pallets"}\n</tool_call>'
    return ToolCall("c", name, {"place": "Molde"}, "{}", f"Bad tool call: {problem} {form}")


def episodes() -> list[Episode]:
    call = ToolCall("c", "pallets", {"site": "Molde"}, "{}")
    missing = misfit('argument "site" is missing.')
    unknown = misfit('unknown tool "palletsAt"; did you mean pallets?', "palletsAt")
    return [
        attempt(1, "Answer: 7", call=call, result=ToolResult("7"), primary=1.0),
        attempt(
            2, "Answer: 3", call=call, result=ToolResult("KeyError: 'Molde'", error="exception")
        ),
        attempt(3, "Answer: 8", call=call, result=ToolResult("7")),
        attempt(4, "I give up", outcome=Outcome.NO_CALLS),
        attempt(5, call=missing, result=ToolResult(missing.error or "", error="bad_arguments")),
        attempt(6, call=missing, result=ToolResult("")),  # of an agent, which got no answer
        attempt(7, call=unknown, result=ToolResult(unknown.error or "", error="unknown_tool")),
        attempt(8, call=unknown, result=ToolResult("")),
        attempt(9, outcome=Outcome.TOO_LONG, turns=attempt(9).turns[:1]),
    ]


def test_the_command_reports_modes_and_flags(cli: Cli) -> None:
    with store_of(cli.folder / "agentrl.db", episodes()) as store:
        for id, tag in (("e4", "quits"), ("e3", "quits"), ("e1", "not:quits"), ("e2", "not:quits")):
            store.marks.tag(id, tag)
    db = ("--db", "agentrl.db")
    report = cli.json("failures", *db)
    assert report["failed"] == 8 and {mode["mode"] for mode in report["modes"]} == {
        "pallets fails (exception): KeyError: …",
        "answers otherwise than pallets says",
        "answers without calling pallets",
        "pallets refuses the call (bad_arguments): argument … is missing",
        "calls a tool that does not exist",
        "does not begin: the prompt is too long",
    }
    said = cli("failures", *db).replace(f" {' '.join(db)}", "")
    assert "agentrl replay e9@t0" in said and 'agentrl replay e4 --whatif "turn=1 n=4"' in said
    assert not isnan(report["modes"][0]["share"])
    (cli.folder / "s.py").write_text(
        "def long(episode):\n    return len(episode.tokens) > 9\n"
        "async def picky(episode):\n    assert episode.id != 'e3', 'no'\n    return episode.id == 'e4'\n"
        "def gave_up(episode):\n    return 'give up' in episode.turns[-1].messages[-1]['content']\n"
        "def every(episode):\n    return True\n"
    )
    scan = ("failures", "--label", "quits", *db, "--scan")
    gave_up = cli.json(*scan, "s.py:gave_up")
    assert (gave_up["flagged"], gave_up["failed"]) == (["e4"], [])
    assert [row["id"] for row in cli.json("ls", *db, "-f", "tag:scan:gave_up")] == ["e4"]
    found = gave_up["agreement"]  # 3 of 4 agree, 1 of 2 by chance
    assert (found["kappa"], found["labelled"]) == (0.5, 4) and found["low"] < 0 < found["high"] <= 1
    assert cli.json(*scan, "s.py:every")["agreement"]["kappa"] == 0.0
    assert cli.json("failures", "--scan", "s.py:long", "--label", "x", *db)["agreement"] is None
    picky = cli.json(*scan, "s.py:picky")
    [(id, error)] = picky["failed"]
    assert id == "e3" and "AssertionError: no" in error
    assert (picky["agreement"]["kappa"], picky["agreement"]["labelled"]) == (1.0, 3)  # not of e3
    (cli.folder / "my judge.yaml").write_text("{question: '?', url: 'http://h/v1', model: x}")
    flags = cli("failures", "--scan=my judge.yaml", "--kind=eval", *db)
    assert "ls -f 'tag:\"scan:my judge\"'" in flags
    cli("failures", "--label", "x", *db, code=2, said="--scan")
    for way in ("--scan=s.py:long", "--json"):
        said = f"--limit does nothing with {way.partition('=')[0]}"
        cli("failures", way, "--limit", "1", *db, code=2, said=said)


async def test_a_judge_that_decides_nothing_gives_no_verdict(tmp_path: Path) -> None:
    said = {
        "e1": "**No.** It was asked",
        "e2": "Yes\nThe",
        "e3": "Not sure",
        "e4": "No idea",
        "e5": "Yes/no",
        "e6": "Nope",
        "e7": "yes it loops",
    }
    answers = iter(said.values())

    async def handle(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"choices": [{"message": {"content": next(answers)}}]}

    async with server(handle) as url:
        (tmp_path / "j.yaml").write_text(f"{{question: '?', url: '{url}', model: x, cache: null}}")
        with store_of(tmp_path / "agentrl.db", episodes()[: len(said)]) as store:
            rows = sorted(
                store.episodes.used("", "time", store.runs.get("r").id), key=lambda row: row.id
            )
            assert [row.id for row in rows] == list(said)
            flagged, failed = await scan(store, rows, *load_scanner("j.yaml", tmp_path))
    assert flagged == ["e2", "e7"] and [id for id, _ in failed] == ["e3", "e4", "e5", "e6"]
    assert all("neither yes nor no" in error for _, error in failed)
