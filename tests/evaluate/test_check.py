"""The conformance check finds what it claims to find."""

import json
import shutil
from pathlib import Path

import pytest

from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.paths import packs_dir
from agentrl_cli.tasks import load_pack
from benchmarks.grader_attacks import attack, planted, sound_ones, write
from tests.helpers.cli import Cli


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    folder = tmp_path / "echo-task"
    shutil.copytree(packs_dir() / "echo-task", folder)
    return folder


async def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in await check_pack(load_pack(folder), None)]


async def test_a_wrong_solution_a_scoring_blank_and_a_lying_tool_result(pack: Path) -> None:
    code = (pack / "task.py").read_text()
    (pack / "task.py").write_text(
        code + "\n\ndef exact(episode, ctx):\n    return 0.0\n\n\nREWARDS = {'exact': exact}\n"
    )
    assert any(
        "the reference solution ends as failed" in problem for problem in await problems(pack)
    )
    (pack / "task.py").write_text(code + "\n\nREWARDS = {'exact': lambda episode, ctx: 1.0}\n")
    assert any("an empty answer scores 1.0" in problem for problem in await problems(pack))
    (pack / "task.py").write_text(
        code.replace(
            '"content": row["answer"]},\n        final', '"content": "lie"},\n        final'
        )
    )
    assert any(
        "the solver has the tool answer 'lie'" in problem for problem in await problems(pack)
    )


async def test_a_bad_row_a_task_in_two_splits_and_an_unlisted_family(pack: Path) -> None:
    train, test = pack / "data" / "train.jsonl", pack / "data" / "test.jsonl"
    rows = train.read_text().splitlines()
    test.write_text(
        rows[0]
        .replace("train-0000", "test-0000")
        .replace('"say"', '"shout"')
        .replace('"look"', '"shout"')
        + "\n"
    )
    found = await problems(pack)
    assert any("the same task is in train" in problem for problem in found)
    assert any("'shout'" in problem for problem in found)
    train.write_text("\n".join([rows[0], "{not json"]) + "\n")
    assert any("train.jsonl:2: not JSON" in problem for problem in await problems(pack))


async def test_every_bad_line_is_reported_and_the_good_ones_are_still_checked(pack: Path) -> None:
    train = pack / "data" / "train.jsonl"
    rows = [json.loads(line) for line in train.read_text().splitlines()[:6]]
    bad = [
        {**rows[1], "tools": ["lokup"]},
        {**rows[2], "prompt": [{"role": "usr", "content": "a"}]},
    ]
    del rows[3]["answer"]
    rows[4]["family"] = "shout"
    train.write_text("\n".join(map(json.dumps, [rows[0], *bad, *rows[3:]])) + "\n{\n")
    lines = await problems(pack)
    assert [text for text in lines if text.startswith("data/train.jsonl:")] == [
        "data/train.jsonl:2: the pack has no tool 'lokup'; it has lookup.",
        "data/train.jsonl:3: `prompt`, message 0: the role 'usr' is not one of system, user, assistant, tool.",
        "data/train.jsonl:4: the row lacks answer.",
        lines[3],
    ]
    assert lines[3].startswith("data/train.jsonl:7: not JSON")
    assert any("'shout'" in text for text in lines[4:])


async def test_all_rows_are_run_on_demand(pack: Path) -> None:
    train = pack / "data" / "train.jsonl"
    code = (pack / "task.py").read_text()
    last = json.loads(train.read_text().splitlines()[-1])["id"]
    (pack / "task.py").write_text(
        code
        + f"\n\ndef exact(episode, ctx):\n    return 0.0 if ctx.task.data['id'] == {last!r} else EXACT(episode, ctx)\n"
        "\n\nEXACT = REWARDS['exact']\nREWARDS = {'exact': exact}\n"
    )
    assert await problems(pack) == []
    (found,) = await check_pack(load_pack(pack), None, every=True)
    assert (
        found.where == f"echo-task/{last}" and "the reference solution ends as failed" in found.text
    )


def test_a_pack_without_a_solver_is_reported_and_its_blanks_are_tested(
    pack: Path, cli: Cli
) -> None:
    code = (pack / "task.py").read_text().replace("def solve(", "def _unused(")
    (pack / "task.py").write_text(code)
    cli(
        "check",
        str(pack),
        said=("no `solve(row)`; `", "` solves echo-task/train-0000", "echo-task: fine"),
    )
    zero = "\n\nREWARDS = {'exact': lambda episode, ctx: ctx.part(0.0, 'compared with None')}\n"
    (pack / "task.py").write_text(code + zero)
    cli("check", str(pack), said=("is unsolved by its own answer", "compared with None"))
    (pack / "task.py").write_text(code + "\n\nREWARDS = {'exact': lambda episode, ctx: 1.0}\n")
    (result,) = cli.json("check", str(pack), code=1)
    assert not result["solver"] and result["problems"]
    assert all("an empty answer scores 1.0" in one["text"] for one in result["problems"])


def test_the_command_groups_what_is_the_same(pack: Path, cli: Cli) -> None:
    train = pack / "data" / "train.jsonl"
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    for row in rows[1:4]:
        del row["answer"]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cli("check", str(pack), code=1)
    assert cli.err.splitlines()[-2:] == [
        "echo-task: data/train.jsonl:2 and 2 more: the row lacks answer.",
        "echo-task: 3 problems",
    ]
    (result,) = cli.json("check", str(pack), "--all", code=1)
    places = [problem["where"] for problem in result["problems"]]
    assert places == [f"data/train.jsonl:{n}" for n in (2, 3, 4)]


# --- attacks on graders ---


WORDS = {
    "substring": "counts as solved",
    "tolerance fails on nan": "the constant 'nan' counts as solved",
    "raises on a huge number": "makes the grader fail",
    "a judge that reads a score": "an order to the judge counts as solved",
    "exit status alone": "leaves before the tests run",
    "pays calls": "lower its weight",
    "every other time": "graded differently",
}
PLANTED = dict(planted())


def test_there_are_fifty_planted_graders() -> None:
    assert len(PLANTED) == 50


@pytest.mark.parametrize("name", WORDS)
async def test_a_faulty_grader_is_named(name: str, tmp_path: Path) -> None:
    rows, code, rewards = PLANTED[name]
    found = await attack(write(tmp_path / "p", rows[:3], code, rewards), None)
    assert any(WORDS[name] in text for text in found), found


@pytest.mark.parametrize("number", range(4))
async def test_a_sound_grader_is_left_alone(number: int, tmp_path: Path) -> None:
    _, (rows, code, rewards) = list(sound_ones(None))[number]
    assert await attack(write(tmp_path / "p", rows[:4], code, rewards), None) == []
