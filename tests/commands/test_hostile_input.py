"""Hostile filters, SQL, patterns, YAML, rows and HTTP bodies: always a sentence, never a traceback of Python or SQLite.

Each kind of input has the cases that broke it once, and a few thousand seeded ones. Packs of others are announced as
code, and stored text does not steer a terminal.
"""

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl_cli import load_config, load_pack
from agentrl_cli.config.yamlfile import load_yaml, parse_scalar, read_yaml
from agentrl_cli.errors import AgentRLError, ConfigError, DataError, NotFound, UsageError
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.filters import compile_filter, compile_sort, fields
from agentrl_cli.store.queries import grep, run_query
from agentrl_cli.tasks.sources import source_of
from agentrl_cli.types import Episode, Outcome, Tokens, Turn
from tests.helpers.cli import Cli
from tests.helpers.train import write_pack

DEEP = 50_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("hostile") / "a.db") as opened:
        opened.runs.add(RunRow(id="r1", name="grpo-07"))
        turn = Turn(0, "assistant", ({"role": "assistant", "content": "one, two (three"},), 0, 0)
        episode = Episode(
            "a",
            "calc/1",
            pack="calc",
            run_id="r1",
            step=1,
            turns=(turn,),
            tokens=Tokens.empty(),
            outcome=Outcome.FAILED,
        )
        opened.episodes.add([episode])
        yield opened


@contextlib.contextmanager
def a_sentence(kind: type[AgentRLError]) -> Iterator[None]:
    """Let an error of that kind pass, whose message can be written."""
    try:
        yield
    except kind as error:
        assert error.message.encode()


def pieces(rng: random.Random, parts: list[str], most: int) -> str:
    return "".join(rng.choice(parts) for _ in range(rng.randint(1, most)))


# --- filters, SQL, patterns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fields())
def test_commas_alone(store: Store, name: str) -> None:
    for text in (f"{name}:,", f"-{name}:,,,", f'{name}:","'):
        with a_sentence(UsageError):
            store.episodes.ids(text)
    if name != "text":
        with pytest.raises(UsageError, match=f"{name}.*needs a value"):
            compile_filter(f"{name}:,")


def test_many_terms(store: Store) -> None:
    many = range(999)
    for text in (
        " ".join(f"task:calc/{n}" for n in many),
        " ".join(f"-text:word{n}" for n in many),
        "id:a," + ",".join(f"id{n}" for n in many[1:]),
        "tool:" + ",".join(f"-{n}*" for n in many),
    ):
        store.episodes.ids(text)
    assert len(store.episodes.ids("id:a," + ",".join(map(str, many[1:])))) == 1
    for text in (" ".join(["step:1"] * 1100), "step:" + ",".join(["1"] * 1100), "x " * 1001):
        with pytest.raises(UsageError, match="more than 1,000 terms"):
            compile_filter(text)
    with pytest.raises(UsageError, match="more than 10,000 characters"):
        compile_filter("text:" + "a" * 60_000)
    store.episodes.ids('text:"' + "%" * 9_999 + '"')
    assert compile_sort(",".join(["reward", "-step"] * 3_000)).count("NULLS LAST") == 2


def test_filters_at_random(store: Store) -> None:
    rng = random.Random(13)
    signs = [
        *",:-\"\\*?%_<>=. \t'();[]{}|\x00é",
        "..",
        "none",
        "e9",
        "1",
        "-1",
        "0.5",
        "\ud800",
        "[",
        "a\u0661",
    ]
    parts = [*signs, *(f" {name}:" for name in fields()), *(f" -{name}:" for name in fields())]
    ran = 0
    for _ in range(1_200):
        text = pieces(rng, parts, 8)
        with a_sentence(UsageError):
            store.episodes.ids(text, "-time,reward")
            ran += 1
    assert ran > 100
    for _ in range(300):
        text = pieces(rng, ["-", "+", ",", "reward", "time", "step", "x", " ", "\ud800"], 6)
        with a_sentence(UsageError):
            store.episodes.ids("", text)


SQL = (
    *(
        "select",
        "select 1",
        "select x'ff'",
        "select cast(x'ff' as text)",
        "select zeroblob(999999999999)",
        "\x00",
        ";",
    ),
    *(
        "select 1; select 2",
        "select ?",
        "select 'a\ud800'",
        "select printf('%.*c', 300000001, 'x')",
        "drop table runs",
    ),
    *(
        "select " + "(" * 5_000,
        "select " + "1+" * 5_000 + "1",
        "select 1 where 1 in (" + "?," * 40_000 + "?)",
    ),
    *(
        "select abs(-9223372036854775807-1)",
        "select json('[')",
        "select * from v_episodes where id like 'a",
        "/*",
    ),
    "select " + ",".join(["1"] * 5_000),
)


def test_sql(store: Store) -> None:
    rng = random.Random(14)
    words = "select from where runs episodes 1 'a ( ) , * ? ; union all group by json_tree x'f limit -1 cast as".split()
    for sql in (
        *SQL,
        *(" ".join(rng.choice(words) for _ in range(rng.randint(1, 9))) for _ in range(400)),
    ):
        with a_sentence(UsageError):
            list(run_query(Path(store.path), sql, timeout=10)[1])
    assert len(store.runs.all()) == 1


@pytest.mark.filterwarnings("ignore")  # of `re`: patterns that may mean something else later
def test_patterns(store: Store) -> None:
    rng = random.Random(15)
    given = [
        "(" * DEEP,
        "a{99999999999}",
        "(?P<a>.)(?P<a>.)",
        "[",
        "\\",
        "(?z)",
        "a{2,1}",
        "\ud800",
        "*",
        "(?<=a*)b",
    ]
    given += [pieces(rng, [*"()[]{}|\\*+?^$.,-:!=<>0aP#é", "(?"], 7) for _ in range(500)]
    for pattern in given:
        with a_sentence(UsageError):
            list(grep(store, pattern))


# --- YAML ------------------------------------------------------------------------------------------------------------

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
BAD_YAML = (
    *(
        "[" * DEEP,
        "{a: " * 5_000,
        "- " * DEEP,
        "a: &a [*a]",
        "a: &a {b: *a}",
        LAUGHS,
        'a: "\\ud800"',
        "a: !!int x",
    ),
    *(
        "a: 2024-99-99",
        "a: !!timestamp x",
        "a: !!bool maybe",
        "a: !!binary é",
        "? [a]\n: 1",
        "a: !!python/object:os.x 1",
    ),
    *(
        "a: !!float x",
        "a: " + "9" * 5_000,
        "\x00",
        "a: \x07",
        "a: 1\na: 2",
        "%YAML 9.9\n---\na",
        "a: !x 1",
        "--- a\n--- b",
    ),
)


@pytest.mark.parametrize("text", BAD_YAML, ids=range(len(BAD_YAML)))
def test_yaml_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "agentrl.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_yaml(tmp_path / "agentrl.yaml")
    assert str(tmp_path) in error.value.message and len(error.value.message) < 400
    with pytest.raises(ConfigError):
        load_yaml(tmp_path / "agentrl.yaml") if "a: 2" not in text else read_yaml(
            tmp_path / "agentrl.yaml"
        )


def test_yaml_at_random(tmp_path: Path) -> None:
    rng = random.Random(16)
    parts = [
        "a: ",
        "- ",
        "\n",
        "  ",
        "[",
        "]",
        "{",
        "}",
        "&a ",
        "*a",
        "!!int ",
        "!!set ",
        "!!omap ",
        "!!binary ",
        "!!timestamp ",
        "2024-13-40",
        "0x",
        "1:2:3",
        "'",
        '"',
        "\\u",
        "|",
        ">",
        "? ",
        "<<: ",
        "%",
        "#",
        "\t",
        "é",
        "train:",
        "lr: ",
        "steps: ",
        "null",
        "~",
        ".inf",
        ".nan",
        "1e999",
        "\ud800",
        "\x01",
        ",",
    ]
    for _ in range(300):
        text = pieces(rng, parts, 9)
        path = tmp_path / "x.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with a_sentence(ConfigError):
            load_config([path])
        with a_sentence(ConfigError):
            load_yaml(path)
        with a_sentence(ConfigError):
            parse_scalar(text, "--set x")


# --- rows ------------------------------------------------------------------------------------------------------------

BAD_ROWS = (
    *(
        b"[" * 5_000,
        b'{"a":' * 5_000,
        b'{"id": "\\ud800", "prompt": "x"}',
        b'{"id": "\xff"}',
        b"9" * 5_000,
        b"\x00",
        b"{",
    ),
    *(
        b'{"id": "a", "prompt": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"\\udfff": 1}',
        b"null",
        b'{"id": 5, "prompt": 5}',
    ),
)


def test_rows_that_cannot_be_read(tmp_path: Path) -> None:
    pack_folder = write_pack(tmp_path / "pack")
    good = b'{"id": "good", "prompt": "x", "emoji": "\\ud83d\\ude00"}'
    (pack_folder / "data" / "train.jsonl").write_bytes(b"\n".join([*BAD_ROWS, good]))
    tasks, bad = load_pack(pack_folder).read("train")
    assert [task.id for task in tasks] == ["bandit/good"] and len(bad) == len(BAD_ROWS)
    for line in bad:
        line.text.encode()
    for text in BAD_ROWS:
        (pack_folder / "rows.json").write_bytes(text)
        with pytest.raises(DataError, match=r"rows\.json"):
            list(source_of(pack_folder, "x", "rows.json").rows())


def test_rows_at_random(tmp_path: Path) -> None:
    rng = random.Random(17)
    parts = [
        '{"id": "',
        '"}',
        '"prompt": ',
        '"x"',
        ", ",
        "[",
        "]",
        "{",
        "}",
        "\\ud800",
        "\\u",
        "\xff",
        "1e999",
        "NaN",
        '"messages": ',
        '"conversations": ',
        '"role": "user"',
        '"content": null',
        '"tools": ',
        '"question": "q"',
        '"answer": 1',
        '"tool_calls": ',
        "true",
        "null",
        '"family": ',
        '"tool_choice": ',
        '"arguments": "["',
        ": ",
    ]
    keys = [
        "id",
        "prompt",
        "messages",
        "conversations",
        "tools",
        "question",
        "answer",
        "reward_model",
        "extra_info",
        "tool_choice",
        "family",
        "test",
        "entry_point",
        "gt",
        "data_source",
        "agent_name",
    ]
    values: list[Any] = [
        None,
        5,
        "x",
        [],
        {},
        [5],
        [{}],
        {"role": "user"},
        [{"role": "user", "content": 5}],
        True,
        "[",
        1.5,
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "x", "content": "y"}],
        [[[]]],
        {"a": {}},
    ]
    lines = [pieces(rng, parts, 9).encode("latin-1") for _ in range(2_000)]
    for _ in range(3_000):
        chosen = rng.sample(keys, rng.randint(1, 5))
        lines.append(json.dumps({key: rng.choice(values) for key in chosen}).encode())
    pack_folder = write_pack(tmp_path / "pack")
    (pack_folder / "data" / "train.jsonl").write_bytes(b"\n".join(lines))
    _, bad = load_pack(pack_folder).read("train")
    assert len(bad) > 2_000 and all(line.text for line in bad)


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line(cli: Cli, store: Store) -> None:
    project = cli.folder = write_pack(cli.folder / "project")
    (project / "agentrl.yaml").write_text("task: {packs: [.]}\n")
    (project / "deep.yaml").write_text("[" * DEEP)
    (project / "latin.yaml").write_bytes(b"train: {steps: 3} # \xe9")
    db = ["--db", str(store.path)]
    for args in (
        *(
            ["ls", "-f", "step:,", *db],
            ["ls", "-f", "tag:,", *db],
            ["ls", "-f", " ".join(["a"] * 1100), *db],
        ),
        *(
            ["ls", "-f", "text:a\udced", *db],
            ["grep", "(" * DEEP, *db],
            ["grep", "\udcff", *db],
            ["query", "\udcff", *db],
        ),
        *(
            ["query", "select 1;select 2", *db],
            ["query", "select " + "(" * 5000, *db],
            ["export", "-f", "id:,", *db],
        ),
        *(["config", "validate", "-c", "deep.yaml"], ["config", "validate", "-c", "latin.yaml"]),
        *(
            ["config", "show", "--set", "train.lr=" + "[" * DEEP],
            ["config", "show", "--set", 'run.name="\\ud800"'],
        ),
        ["tools", "call", "run_python", "[" * 5000],
        ["--model\udc80"],
    ):
        cli(*args, code=2)
        assert len(cli.err) < 2_000, args
    cli("tools", "call", "run_python", '{"code": "\\ud800"}', code=1)
    (project / "data" / "train.jsonl").write_bytes(b"\n".join(BAD_ROWS))
    cli("check", code=1)


def test_a_bug_with_such_a_text_still_has_its_log(tmp_path: Path) -> None:
    code = "import sys\nfrom agentrl_cli.commands import report\nsys.exit(report(RuntimeError('a\\udced')))\n"
    done = subprocess.run(
        [sys.executable, "-c", code, b"\xed"], capture_output=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1 and done.stderr.count(b"Traceback") == 0, done.stderr
    assert b"The traceback is in" in done.stderr


def test_yaml_that_was_fine_stays_fine(tmp_path: Path) -> None:
    text = "a: 1\nb: {c: [1, 2.5, yes, null], d: 2024-01-02}\ne: &x {f: 'g'}\nh: *x\n"
    (tmp_path / "x.yaml").write_text(text)
    assert load_yaml(tmp_path / "x.yaml") == yaml.safe_load(text)
    assert parse_scalar("[1, a]", "--set x") == [1, "a"] and parse_scalar("", "--set x") is None
    with pytest.raises(NotFound):
        load_yaml(tmp_path / "y.yaml")


def test_rows_that_are_no_file(tmp_path: Path) -> None:
    """A link that leads nowhere was `No data file named X. Did you mean X?`."""
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("link.jsonl", "folder.jsonl"):
        with pytest.raises(DataError, match=f"{name} is not a regular file"):
            list(source_of(tmp_path, "train", name).rows())


# --- packs are code, and stored text must not steer a terminal ---
