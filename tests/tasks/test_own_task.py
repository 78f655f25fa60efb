"""A task of one's own: what `init --blank` and `--from` write, the estimate of `check`, a teacher, and the pages of the
docs with commands in order, run as they are written.
"""

import asyncio
import dataclasses
import datetime
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl_cli import Store, load_pack
from agentrl_cli.commands import main
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.evaluate.reward_spread import estimate
from agentrl_cli.paths import bundled_model
from agentrl_cli.registry import resolve
from agentrl_cli.rewards import RewardContext
from agentrl_cli.tools import ToolContext
from agentrl_cli.types import Episode, Outcome, RewardPart, Task, ToolCall, ToolResult, Turn
from tests.helpers.web import completion, served

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "your-own-task.md").read_text(encoding="utf-8")
TOOLS = '''
from typing import Literal

def metres(value: float, unit: Literal["km", "mile"]) -> float:
    """A length in metres, by {unit}.

    Args:
        value: The length.
        unit: Its unit.
    """
    return value * {"km": 1000, "mile": 1609}[unit]

def table_of(name: str) -> str:
    """The table of a guest."""
    raise ValueError("no such guest")

def helper(x):
    return x
'''

BOUNDED = '''
from typing import Annotated

from pydantic import Field

def label(
    days: Annotated[int, Field(lt=10)],
    degrees: Annotated[int, Field(le=0)],
    part: Annotated[float, Field(gt=0, lt=0.05)],
) -> str:
    """The label of a sample."""
    return f"{days} {degrees} {part}"
'''

Init = Callable[..., tuple[int, str]]


@pytest.fixture
def init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Init:
    """`init(...)` runs `agentrl init` in tmp_path: (code, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> tuple[int, str]:
        return main(["init", *args]), capsys.readouterr().err

    return call


def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in asyncio.run(check_pack(load_pack(folder), None))]


def test_functions_become_a_pack_whose_questions_they_answer(init: Init, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(TOOLS)
    code, err = init("mine", "--from", "tool.py")
    assert (
        code == 0
        and "helper has no docstring" in err
        and "No question was drawn that table_of answers" in err
    )
    pack = load_pack(tmp_path / "mine")
    assert problems(tmp_path / "mine") == [] and [tool.name for tool in pack.tools] == [
        "metres",
        "table_of",
    ]
    rows = pack.tasks("train")
    call = rows[0].data["call"]
    factor = {"km": 1000, "mile": 1609}[call["arguments"]["unit"]]
    assert len(rows) == 200 and call["result"] == str(call["arguments"]["value"] * factor)
    assert "by {unit}: value" in rows[0].prompt[-1]["content"]


def test_drawn_numbers_keep_their_bounds(init: Init, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(BOUNDED)
    code, err = init("mine", "--from", "tool.py")
    assert code == 0 and "drawn" not in err
    calls = [row.data["call"]["arguments"] for row in load_pack(tmp_path / "mine").tasks("train")]
    assert len(calls) == 200 and {call["days"] for call in calls} == set(range(1, 10))
    assert max(call["degrees"] for call in calls) <= 0
    assert {call["part"] for call in calls} == {0.01, 0.02, 0.03, 0.04}


def test_rows_become_splits_and_need_an_answer(init: Init, tmp_path: Path) -> None:
    rows = [{"question": f"What is {n}+1?", "answer": f"so #### {n + 1}"} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tool.py").write_text(TOOLS)
    assert init("mine", "--from", "rows.jsonl", "--from", "tool.py")[0] == 0
    pack = load_pack(tmp_path / "mine")
    assert [len(pack.tasks(split)) for split in ("train", "validation", "test")] == [10, 2, 4]
    assert problems(tmp_path / "mine") == [] and pack.tasks("train")[0].data["answer"].isdigit()
    for count, splits in ((3, "validation and test"), (5, "validation")):
        (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        err = init(f"few{count}", "--from", "few.jsonl")[1]
        assert f"Too few rows for {splits}: {count}." in err
    chat = {"prompt": [{"role": "system", "content": "Box it."}, {"role": "user", "content": "?"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat | {"answer": 1}) + "\n")
    assert "In 1 of 1 rows a system message" in init("chat", "--from", "chat.jsonl")[1]


ANSWER, ONE = "no answer to compare with", '{"q": "1+1?", "a": 2}\n'


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        *(
            ("a.csv", text, says)
            for text, says in (
                (
                    "word,meaning\nhi,hallo\n",
                    [
                        "a.csv:2: no column is the question; there are: word, meaning",
                        "`prompt` (or",
                    ],
                ),
                ("q,word\nhi,hallo\n", [f"{ANSWER}; their fields: word", "`answer` (or a"]),
                ("q,a\nhi,hallo,you\n", ["a.csv:2: 3 cells, and the head line names 2"]),
                ("q,q\nhi,hallo\n", ["a column twice"]),
                ('q,a\nhi,3\n"hi,hallo\n\n\n', ["a.csv:3: not CSV"]),
                ("", ["a.csv has no rows"]),
                (f"q,word\nhi,{'hallo ' * 30_000}\n", [ANSWER]),
            )
        ),
        ("bare.jsonl", '{"prompt": "Hi", "mood": "good"}\n', ["their fields: mood"]),
        (
            "named.jsonl",
            '{"prompt": "Hi", "answer": 1, "tools": ["find"]}\n',
            ["code is not given: find"],
        ),
        (
            "twice.jsonl",
            "".join(f'{{"id": "r{n // 2}", "prompt": "{n}+1?", "answer": 1}}\n' for n in range(4)),
            ["twice.jsonl:2: the id 'r0' is also in line 1."],
        ),
        (
            "endless.jsonl",
            f'{ONE}{{"q": "0/0?", "a": NaN}}\n{{"q": "1/0?", "a": 1e999}}\n',
            ["endless.jsonl:2, endless.jsonl:3: the answer is NaN or infinite"],
        ),
        (
            "two.jsonl",
            f'{ONE}{{"id": "x", "q": "1+1?", "a": 2}}\n{{"q": "1+1?", "a": 6}}\n',
            ["two.jsonl:1 and two.jsonl:3 ask the same and have the answers 2 and 6."],
        ),
        ("open.py", "\ndef find(x:\n", ["open.py:2: not Python: '(' was never closed"]),
        ("rows.txt", "", [".jsonl, .json, .parquet, .csv, .tsv"]),
        ("a folder", None, ["a folder is a folder"]),
        ("gymm:FrozenLake-v1", None, ["Did you mean gym?"]),
        ("tool:total", None, ["No file named 'tool:total'"]),
        ("https://a.b/c.json", None, ["No file named 'https://a.b/c.json'"]),
    ],
    ids=lambda value: value[:18] if isinstance(value, str) else "",
)
def test_what_no_pack_can_be_made_of_says_what_it_has(
    init: Init, tmp_path: Path, name: str, text: str | None, says: list[str]
) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "tool.py").write_text(TOOLS)
    if text is not None:
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    code, err = init("mine", "--from", name)
    assert code == 2 and all(part in err for part in says), err
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", '\ufeffQ, A \r\n"What is 1+1,\r\nplease?",2\r\nWhat is 2+2?,4\r\n'),
        ("b.csv", "id;Question;Expected\n7;What is 1+1,\\nplease?;2\n;;\n8;What is 2+2?;4\n"),
        ("c.tsv", "问题\t答案\nWhat is 1+1?\t2\nWhat is 2+2?\t4\n"),
        ("d.jsonl", '\ufeff{"q": "What is 1+1?", "a": 2}\n{"q": "What is 2+2?", "a": 4}\n'),
        ("f.json", '\ufeff[{"q": "What is 1+1?", "a": 2}, {"q": "What is 2+2?", "a": 4}]'),
        ("e.csv", 'messages,label\n"[{""role"": ""user"", ""content"": ""What is 1+1?""}]",2\n'),
    ],
)
def test_tables_and_other_names_of_columns_become_rows(
    init: Init, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    code, err = init("mine", "--from", name)
    assert code == 0, err
    pack = load_pack(tmp_path / "mine")
    texts = [path.read_text() for path in (tmp_path / "mine" / "data").iterdir()]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    answer = next(key for key in ("answer", "expected", "label") if key in rows[0])
    assert "What is 1+1" in str(rows[0]["prompt"]) and str(rows[0][answer]) == "2"
    assert problems(tmp_path / "mine") == [] and pack.row == (answer,)


def test_columns_that_json_lacks_become_rows(init: Init, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    day = datetime.datetime(2026, 1, 2, 3)
    row = {"q": "1+1?", "a": Decimal("2.50"), "at": day, "on": day.date(), "id": 1, "raw": b"a"}
    took = {"took": datetime.timedelta(seconds=5), "when": [day.time()]}
    parquet.write_table(pyarrow.Table.from_pylist([row | took]), tmp_path / "rows.parquet")
    code, err = init("mine", "--from", "rows.parquet")
    assert code == 0, err
    (task,) = load_pack(tmp_path / "mine").tasks("train")
    given = [task.data[name] for name in ("answer", "at", "on", "took", "when", "raw")]
    assert given[:3] == [2.5, "2026-01-02 03:00:00", "2026-01-02"]
    assert given[3:] == ["0:00:05", ["03:00:00"], "b'a'"]


@pytest.mark.parametrize(
    ("ending", "text", "encoding"),
    [
        (".csv", "q,a\nh\xe9 ist 2€?,2\n", "cp1252"),
        (".csv", "问题,答案\n二?,2\n", "gbk"),
        (".csv", "q\ta\né?\t2\n", "utf-16"),
        (".jsonl", '{"q": "二?", "a": 2}\n{"q": "三?", "a": 3}\n', "gb18030"),
        (".jsonl", '{"q": "二?", "a": 2}\n{"q": "三?", "a": 3}\n', "utf-16"),
        (".json", '[{"q": "h\xe9?", "a": 2}]', "cp1252"),
    ],
)
def test_rows_in_another_encoding_are_converted_by_the_command_that_is_printed(
    init: Init, tmp_path: Path, ending: str, text: str, encoding: str
) -> None:
    (tmp_path / f"a b{ending}").write_bytes(text.encode(encoding))
    code, err = init("mine", "--from", f"a b{ending}")
    assert code == 2 and "not UTF-8" in err and ("CSV UTF-8" in err) is (ending == ".csv")
    subprocess.run(err[err.index("iconv -f") :], shell=True, check=True)
    assert (tmp_path / f"a b-utf8{ending}").read_text("utf-8") == text
    code, err = init("mine", "--from", f"a b-utf8{ending}")
    assert code == 0, err


def test_rows_that_ask_the_same_are_never_dropped_in_silence(init: Init, tmp_path: Path) -> None:
    row = {"prompt": "2+3?", "answer": 5}
    others = [{"prompt": f"{n}+3?", "answer": n + 3} for n in range(4, 12)]
    rows = [row, {**row, "id": "x"}, *others, {**row, "level": "easy"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    code, err = init("mine", "--from", "a.jsonl")
    assert code == 0 and "left out: 1 of 11 (a.jsonl:2)" in err
    pack = load_pack(tmp_path / "mine")
    assert sum(len(pack.tasks(split)) for split in pack.splits()) == 10
    assert problems(tmp_path / "mine") == []  # the two of one question are in one split


def test_files_beside_a_tool_and_an_agent_come_along(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop" / "units").mkdir(parents=True)
    for name, text in {
        "look.py": 'from db import STOCK\n\ndef stock(name: str) -> int:\n    """How many {name} there are."""\n'
        "    from units.metric import ONE\n    return STOCK[name] * ONE\n",
        "db.py": "import json\nfrom pathlib import Path\n"
        'STOCK = json.loads(Path(__file__).with_name("stock.json").read_text())\n',
        "stock.json": '{"bolt": 7}',
        "units/metric.py": "ONE = 1\n",
        "agent.py": "import db\ndef solve(task, base_url):\n    return float(db.STOCK['bolt'])\n",
        "secret.txt": "",
        "unused.py": "",
        "rows.jsonl": '{"prompt": "How many bolts?", "answer": 7}\n',
    }.items():
        (tmp_path / "shop" / name).write_text(text)
    sources = ("rows.jsonl", "look.py", "agent.py")
    code, err = init("mine", *(word for name in sources for word in ("--from", f"shop/{name}")))
    assert code == 0, err
    made = {
        str(path.relative_to(tmp_path / "mine"))
        for path in (tmp_path / "mine").rglob("*")
        if path.is_file()
    }
    assert {"look.py", "agent.py", "db.py", "stock.json", "units/metric.py"} < made
    assert not {"unused.py", "secret.txt", "rows.jsonl"} & made
    (tmp_path / "shop").rename(tmp_path / "away")
    pack = load_pack(tmp_path / "mine")
    assert problems(tmp_path / "mine") == [] and pack.agent is not None
    (tool,) = pack.tools
    assert asyncio.run(tool.call(ToolContext(), {"name": "bolt"})).text == "7"
    assert resolve("agents", {}, pack.agent.function, base=pack.dir)(None, "") == 7.0
    before = pack.agent.code
    (tmp_path / "mine" / "db.py").write_text("STOCK = {'bolt': 9}\n")
    assert pack.agent.code != before  # an evaluation is another one then
    (tmp_path / "away" / "db.py").rename(tmp_path / "away" / "task.py")
    (tmp_path / "away" / "look.py").write_text(
        (tmp_path / "away" / "look.py").read_text().replace("db", "task")
    )
    code, err = init("other", "--from", "away/look.py")
    assert code == 2 and "has a task.py of its own" in err


MAIN = "if __name__ == '__main__':\n    main()\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def solve(task, base_url, api_key, model):\n    return 1.0\n", "agent.py:solve"),
        (f"import openai\n\nTOOLS = [{{}}]\n\n\ndef main():\n    1 / 0\n\n\n{MAIN}", "python agent.py"),
        ("from openai import OpenAI\n\nprint(OpenAI().models)\n", "python agent.py"),
    ],
)  # fmt: skip
def test_an_agent_is_recognised_and_its_rows_are_to_be_written(
    code: str, said: str, init: Init, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(code)
    assert init("mine", "--from", "agent.py")[0] == 0
    agent = load_pack(tmp_path / "mine").agent
    assert agent is not None and agent.text == said
    assert "mine/train-0000: the row is a placeholder: write a question and its answer" in problems(
        tmp_path / "mine"
    )


@pytest.fixture
def address() -> Iterator[str]:
    """A server that is a teacher for `badge`."""

    def answer(path: str, body: Any) -> Any:
        if body is None:
            return path
        last = body["messages"][-1]
        if last["role"] == "tool":
            return completion(f"Answer: {last['content']}")
        said = last["content"].split()  # Floor 3, Badi: …
        function = {
            "name": "badge",
            "arguments": json.dumps(
                {"name": said[2].rstrip(":"), "floor": int(said[1].rstrip(","))}
            ),
        }
        call = {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        }
        return {"choices": [{"message": call, "finish_reason": "stop"}]}

    with served(answer) as url:
        yield url


def test_a_teacher_warms_a_model_up_on_what_it_solved(
    init: Init, tmp_path: Path, address: str
) -> None:
    assert init("--blank", "badges")[0] == 0
    flags = ["--project", "badges", "--model", "tiny"]
    assert (
        main(["sft", "warm", "--teacher", f"{address}/v1", "-n", "3", "--steps", "1", *flags]) == 0
    )
    assert (tmp_path / "warm" / "config.json").is_file()
    with Store.open(tmp_path / "badges" / "runs" / "agentrl.db", readonly=True) as store:
        rows = store.episodes.rows(store.episodes.ids("tag:sft-warm", "time"))
    assert len(rows) == 3 and all(row.outcome is Outcome.SOLVED for row in rows)


def episodes(*solved: str) -> list[Episode]:
    return [
        Episode(
            f"{task}-{n}",
            str(task),
            reward_parts=(RewardPart("exact", float(mark), primary=True),),
            outcome=Outcome.SOLVED if mark == "1" else Outcome.FAILED,
        )
        for task, marks in enumerate(solved)
        for n, mark in enumerate(marks)
    ]


def test_the_estimate_of_groups_with_spread() -> None:
    even = estimate(episodes("01"), 2)  # mean 1/2, so Beta(2, 2): E[p^2] = 2*3/(4*5), twice
    assert even.chance == pytest.approx(1 - 2 * 0.3) and even.verdict == "ready"
    none = estimate(episodes(*["0000"] * 4), 8)
    assert none.verdict == "unsolved" and none.chance < 0.1
    assert estimate(episodes("11", "11"), 8).verdict == "done"
    lost = Episode("a", "t", outcome=Outcome.ENV_ERROR)
    assert (
        estimate([lost], 8).verdict == "ungraded"
        and estimate([*episodes("01"), lost], 8).ungraded == 1
    )


def console(page: str) -> list[str]:
    """The commands that a page shows, in their order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("page", ["your-own-task.md", "tutorial.md"])
def test_the_tutorials_run_as_written(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = console(page)
    short = ["--steps", "1", "--set", "rollout.prompts_per_step=1", "--set", "rollout.group_size=2"]
    less = {
        "check": ["--rollouts", "2"],
        "rollout": ["-n", "2"],
        "train": [*short, "--set", "train.eval.every=0"],
        "eval": ["--set", "eval.limit=2", "--set", "eval.k=1"],
        "replay": ["--plain"],
    }
    assert {"init", "check", "rollout", "train", "eval"} <= {
        line.split()[1] for line in lines if "agentrl" in line
    }
    monkeypatch.chdir(tmp_path)
    for line in lines:
        words = shlex.split(line.removesuffix(" --watch"))
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        else:
            assert words[0] == "agentrl" and main([*words[1:], *less.get(words[1], [])]) == 0, line


BRIEF = ["--set", "rollout.max_new_tokens=16"]  # random weights never stop a turn
SMALL = ["--set", "rollout.prompts_per_step=2", "--set", "rollout.group_size=2"]
SIGNAL = ["--set", "algo.skip.zero_variance=false"]  # random weights earn nothing
# The commands of docs/real-run.md with less to do.
SHORTER = {
    "train": [*SMALL, *SIGNAL, "--set", "train.eval.every=0", *BRIEF],
    "eval": ["--set", "eval.limit=2", "--set", "eval.k=1", *BRIEF],
    "rollout": ["-n", "2", *SMALL[2:], *BRIEF],
}


def test_the_page_of_a_real_run_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "real-run.md").read_text(encoding="utf-8")
    lines = console("real-run.md")
    settings = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert settings is not None and len(lines) == 14
    # random weights of Qwen2.5's architecture, and the bundled tokenizer and template
    weights = shutil.ignore_patterns("*.safetensors", "config.json")
    tiny = Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=768,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    said = {}
    for line in lines:
        words = shlex.split(line.replace("--steps 101", "--steps 2"))
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            # a folder has precedence over the hub's name
            folder = Path("Qwen/Qwen2.5-0.5B-Instruct")
            shutil.copytree(bundled_model(), folder, ignore=weights)
            torch.manual_seed(0)
            Qwen2ForCausalLM(tiny).save_pretrained(folder)
            Path("qwen.yaml").write_text(settings[1].replace("steps: 100", "steps: 1"))
            continue
        brief = [] if "--dry-run" in words else SHORTER.get(words[1], [])
        code = main([*words[1:], *brief])
        said[line] = "".join(capfd.readouterr())
        # a machine may lack a sandbox
        assert code in ((0, 3) if words[1] == "doctor" else (0,)), (line, said[line])
    planned = said["agentrl train --config qwen.yaml --dry-run --fit --gpu-memory 8GiB"]
    assert "nothing has to change" in planned and "available  8,192 MiB" in planned
    with Store.open(Path("runs/agentrl.db"), readonly=True) as store:
        trained = next(run for run in store.runs.all() if run.kind == "train")
        assert (trained.status, trained.step) == ("finished", 2)
        table = page.partition("| curve")[2].partition("\n\n")[0]
        heads = "".join(re.findall(r"^\| (`[^|]*) \| ", table, re.MULTILINE))
        curves = re.findall(r"`([a-z_/]+)`", heads)
        assert len(curves) == 6 and set(curves) <= set(store.runs.steps(trained.id)[-1])
    assert Path("trained/config.json").is_file()


@pytest.mark.parametrize("kind", [Episode, Turn, ToolCall, ToolResult, RewardContext, Task])
def test_the_tutorial_has_every_field_of_an_episode_and_its_context(kind: Any) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    names |= {name for name, value in vars(kind).items() if isinstance(value, property)}
    text = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", PAGE))))
    assert sorted(name for name in names if not name.startswith("_") and name not in text) == []
