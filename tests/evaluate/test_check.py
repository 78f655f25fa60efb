"""The conformance check finds what it claims to find; `agentrl doctor --model` what a model does with unseen tools."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agentrl_cli import ByteTokenizer, Chat, Config, ScriptedPolicy, load_pack
from agentrl_cli.evaluate.abilities import ABILITIES, Found, measure, verdict
from agentrl_cli.evaluate.grader_attacks import attack_graders
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.paths import bundled_model, packs_dir
from agentrl_cli.policies.load import Loaded
from benchmarks.grader_attacks import attack, planted, sound_ones, write
from recipes.tiny_tools.words import HELD_OUT
from tests.helpers.chat import call
from tests.helpers.cli import Cli


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    folder = tmp_path / "echo-task"
    shutil.copytree(packs_dir() / "echo-task", folder)
    return folder


async def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in await check_pack(load_pack(folder), None)]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "\n\ndef exact(episode, ctx):\n    return 0.0\n\n\nREWARDS = {'exact': exact}\n",
            "the reference solution ends as failed",
        ),
        ("\n\nREWARDS = {'exact': lambda episode, ctx: 1.0}\n", "an empty answer scores 1.0"),
        ("", "the solver has the tool answer 'lie'"),
    ],
)
async def test_a_wrong_solution_a_scoring_blank_and_a_lying_tool_result(
    pack: Path, more: str, said: str
) -> None:
    code, answer = (pack / "task.py").read_text(), '"content": row["answer"]},\n        final'
    lying = code.replace(answer, answer.replace('row["answer"]', '"lie"'))
    (pack / "task.py").write_text(code + more if more else lying)
    assert any(said in problem for problem in await problems(pack))


async def test_an_answer_that_a_training_shows_whole_is_not_cut(pack: Path) -> None:
    """400 letters are 100 tokens of a model, and 400 of the check's."""
    code, answer = (pack / "task.py").read_text(), '"content": row["answer"]},\n        final'
    code = code.replace('{number}"', '{number}" + " and so on" * 40', 1)
    code = code.replace(answer, answer.replace('row["answer"]', 'lookup(row["key"])'))
    (pack / "task.py").write_text(code)
    assert await problems(pack) == []


async def test_a_bad_row_a_task_in_two_splits_and_an_unlisted_family(pack: Path) -> None:
    train, test = pack / "data" / "train.jsonl", pack / "data" / "test.jsonl"
    rows = train.read_text().splitlines()
    same, row = rows[0].replace("train-0000", "test-0000"), json.loads(rows[0])
    shouts = same.replace('"say"', '"shout"').replace('"look"', '"shout"')
    test.write_text(f"{shouts}\n{json.dumps({**row, 'prompt': 'Another question?'})}\n")
    found = await problems(pack)
    assert f"echo-task/{row['id']}: a row of train has this id, too" in found
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
    marked = """

REWARDS = {'exact': lambda episode, ctx: float(ctx.final_text == '#### ' + ctx.task.data['answer'])}
"""
    (pack / "task.py").write_text(code + marked)
    cli("check", str(pack), said="no `solve(row)`; `#### ")
    for words, said in (
        ("--model tiny --rollouts 8", "--model and --rollouts do nothing for packs"),
        ("--model tiny --rollouts 0", "--model does nothing"),
    ):
        cli("check", str(pack), *words.split(), code=2, said=said)
    zero = "\n\nREWARDS = {'exact': lambda episode, ctx: ctx.part(0.0, 'compared with None')}\n"
    (pack / "task.py").write_text(code + zero)
    cli("check", str(pack), said=("is unsolved by its own answer", "compared with None"))
    (pack / "task.py").write_text(code + "\n\nREWARDS = {'exact': lambda episode, ctx: 1.0}\n")
    (result,) = cli.json("check", str(pack), code=1)
    assert not result["solver"] and result["problems"]
    assert all("an empty answer scores 1.0" in one["text"] for one in result["problems"])
    (pack / "agent.py").write_text("def solve(task, base_url):\n    return 1.0\n")
    with (pack / "task.yaml").open("a") as file:
        file.write("agent: agent.py:solve\n")
    cli("check", str(pack), said="made by agent.py:solve, which only rollouts run")


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


async def test_a_solver_that_raises_is_a_problem_of_the_attacks_too(pack: Path) -> None:
    code = (pack / "task.py").read_text()
    (pack / "task.py").write_text(code + "\n\ndef solve(row):\n    raise KeyError('answer')\n")
    own = load_pack(pack)
    (found,) = await attack_graders(own, None, own.tasks("train"))
    assert "solve(row) raised" in found.text and "answer" in found.text


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


@pytest.mark.parametrize("name", WORDS)
async def test_a_faulty_grader_is_named(name: str, tmp_path: Path) -> None:
    assert len(PLANTED) == 50
    rows, code, rewards = PLANTED[name]
    found = await attack(write(tmp_path / "p", rows[:1], code, rewards), None)
    assert any(WORDS[name] in text for text in found), found
    assert {*re.findall(r"of (\d+) tasks", " ".join(found))} <= {"1", "2", "3"}, "by task"


@pytest.mark.parametrize("number", range(4))
async def test_a_sound_grader_is_left_alone(number: int, tmp_path: Path) -> None:
    _, (rows, code, rewards) = list(sound_ones(None))[number]
    assert await attack(write(tmp_path / "p", rows[:2], code, rewards), None) == []


# --- what a model does with tools that it has never seen ---

TOKENIZER = ByteTokenizer()


def able(key: str, ids: Sequence[int]) -> str:
    """Does everything: calls, copies, corrects, takes a second step, chooses, and says hello without a call."""
    user = TOKENIZER.decode(ids).partition("<|im_start|>user\n")[2]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", user, re.DOTALL)
    if found := re.search(r"mean (p-\w+)", results[-1] if results else ""):
        return call("seat_of", passenger=found[1])
    if "badge" in user and len(results) == 1:
        return call("badge_of", driver=results[0])
    if results:
        return f"Answer: {results[-1]}"
    rules = {
        r"When is the (\w+) open": "opening_hours shop",
        r"parcel (\S+)\?": "parcel_status code",
        r"seat has (\w+)": "seat_of passenger",
        r"route (\d+)": "driver_of route",
    }
    for pattern, named in rules.items():
        if match := re.search(pattern, user):
            name, parameter = named.split()
            return call(name, **{parameter: match[1]})
    if "ferry" in user:
        return call("ferry_fare", passengers=6)
    return call("museum_fee", age=41) if "museum" in user else "Hello!"


def shares(policy: ScriptedPolicy, seconds: float = 60.0) -> dict[str, Found]:
    loaded = Loaded(policy, Chat(TOKENIZER), None, "scripted", None)
    return {one.name: one for one in asyncio.run(measure(loaded, Config(), seconds))}


def one_step(key: str, ids: Sequence[int]) -> str:
    text = able(key, ids)
    return "Answer: 3" if "badge_of" in text or '"p-' in text else text


EVERY = {ability.name for ability in ABILITIES}


@pytest.mark.parametrize(
    ("model", "shown", "said"),
    [
        (able, EVERY, "RL can begin:"),
        (lambda key, ids: "Answer: 3", {"abstains"}, "cannot begin"),
        (one_step, EVERY - {"two steps", "corrects a call"}, "two steps"),
    ],
)
def test_a_model_shows_the_abilities_that_it_has(
    model: Callable[[str, Sequence[int]], str], shown: set[str], said: str
) -> None:
    found = shares(ScriptedPolicy(model, TOKENIZER))
    assert {name: one.share for name, one in found.items()} == {
        name: float(name in shown) for name in EVERY
    }
    assert all(one.attempts >= 20 for one in found.values())
    assert said in verdict(list(found.values()))


def test_the_time_limit_holds() -> None:
    found = shares(ScriptedPolicy(able, TOKENIZER, delay=5.0), 0.2)
    assert all(one.share is None for one in found.values())
    assert verdict(list(found.values())).startswith("Nothing is known")
    found["calls a new tool"] = Found("calls a new tool", 4, 4, needed=True)
    assert verdict(list(found.values())).startswith("RL can begin: all that was tried")


def test_no_bundled_model_was_trained_on_these_tools() -> None:
    assert {tool.__name__ for ability in ABILITIES for tool in ability.tools} <= HELD_OUT


def test_the_command_reports_each_ability_and_a_verdict(cli: Cli) -> None:
    lines = {one["name"]: one for one in cli.json("doctor", "--model", "scripted", code=3)}
    assert [*lines] == [*(ability.name for ability in ABILITIES), "verdict"]
    assert lines["calls a new tool"]["status"] == "warn" and lines["abstains"]["status"] == "ok"
    assert "RL cannot begin" in lines["verdict"]["detail"]


def test_a_template_without_tools_is_named_before_the_rollouts(tmp_path: Path, cli: Cli) -> None:
    cli("init", "echo-task", ".")
    cli("check", "--rollouts", "1")
    assert "the template" not in cli.err
    shutil.copytree(bundled_model("tiny"), tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    said = "echo-task: the template has no tool schemas: they are described in the system text"
    cli("check", "--rollouts", "1", "--model", "bare", said=said)
