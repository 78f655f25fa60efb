"""`sql` and `search`: what they answer, and what they refuse; tools as a pack's files configure them."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import ByteTokenizer, Chat, load_pack
from agentrl_cli.errors import ConfigError, DataError, EnvError
from agentrl_cli.tools import ToolContext, validate_arguments
from agentrl_cli.tools.configured import load_tools
from agentrl_cli.tools.search import SearchTool, pieces, read_documents
from agentrl_cli.tools.sql import SqlTool, open_database
from agentrl_cli.types import Origin, Outcome, Task, ToolResult
from tests.helpers.chat import CHAT, call
from tests.helpers.growth import exponent
from tests.helpers.packs import answers, pack, play, row
from tests.helpers.web import Site, calls, serve_pages

SHOP = "CREATE TABLE item (name TEXT, price REAL); INSERT INTO item VALUES ('pen', 1.5), ('cup', 4), ('hat', NULL);"


async def query(tool: SqlTool, *statements: str, database: str = SHOP) -> list[ToolResult]:
    return await calls(tool, *({"query": statement} for statement in statements), database=database)


COUNT = "SELECT count(*) AS n FROM item"


# --- sql -------------------------------------------------------------------------------------------------------------


async def test_sql_answers_a_table() -> None:
    rows, none, wrong, bad = await query(
        SqlTool(),
        "SELECT * FROM item ORDER BY name",
        "SELECT 1 AS x WHERE 0",
        "SELECT nme FROM item",
        "SELEC 1",
    )
    assert rows.text == "name | price\ncup | 4.0\nhat | NULL\npen | 1.5" and rows.error is None
    assert none.text == "x\n(no rows)"
    assert (wrong.error, wrong.text) == ("exception", "Error: no such column: nme")
    assert bad.error == "exception" and "syntax error" in bad.text


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO item VALUES ('a', 1)",
        "DELETE FROM item",
        "UPDATE item SET price = 0",
        "CREATE TABLE x (a)",
        "CREATE TEMP TABLE x (a)",
        "DROP TABLE item",
        "ATTACH '/tmp/x.db' AS x",
        "VACUUM INTO '/tmp/agentrl-vacuum.db'",
        "PRAGMA max_page_count=1000000",
        "PRAGMA writable_schema=ON",
        "SELECT load_extension('x')",
        "CREATE VIRTUAL TABLE t USING fts5(a)",
        "SELECT 1; SELECT 2",
    ],
)
async def test_a_read_only_database_is_only_read(statement: str) -> None:
    refused, after = await query(SqlTool(), statement, COUNT)
    assert refused.error in ("refused", "exception") and after.text == "n\n3"
    assert not Path("/tmp/agentrl-vacuum.db").exists()


async def test_a_writable_database_is_the_episodes_own() -> None:
    tool = SqlTool(writable=True)
    first = await query(
        tool, "CREATE TABLE x (a)", "INSERT INTO x VALUES (1), (2)", "DELETE FROM item", COUNT
    )
    changed = [f"OK, {n} rows changed." for n in (0, 2, 3)]
    assert [result.text for result in first] == [*changed, "n\n0"]
    passing = (
        "CREATE TEMP TABLE y (a TEXT PRIMARY KEY)",
        "CREATE INDEX temp.z ON y (a)",
        "CREATE TEMP TRIGGER t AFTER INSERT ON y BEGIN DELETE FROM item; END",
        "DROP TRIGGER t",
        "DROP INDEX z",
        "DROP TABLE y",
    )
    assert {result.text for result in await query(tool, *passing)} == {"OK, 0 rows changed."}
    refused = (
        "ATTACH ':memory:' AS x",
        "VACUUM INTO '/tmp/agentrl-vacuum.db'",
        "PRAGMA journal_mode=WAL",
    )
    fresh, table, *others = await query(tool, COUNT, "PRAGMA table_info(item)", *refused)
    assert fresh.text == "n\n3" and table.text.startswith("cid | name")
    assert {result.error for result in others} == {"refused"}
    assert not Path("/tmp/agentrl-vacuum.db").exists()


async def test_sql_is_bounded_in_rows_time_and_memory() -> None:
    tool = SqlTool(rows=2, seconds=0.2, memory_mb=1, writable=True)
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT count(*) FROM c"
    many, slow, wide, big, after = await query(
        tool,
        "SELECT 1 UNION SELECT 2 UNION SELECT 3",
        endless,
        "SELECT printf('%.*c', 5000, 'x')",
        "CREATE TABLE big AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c LIMIT 20000) "
        "SELECT printf('%.*c', 200, 'x') FROM c",
        "SELECT 1",
    )
    assert many.text.endswith("[more than 2 rows; narrow the query]") and many.text.count("\n") == 3
    assert slow.error == "timeout" and "0.2 s" in slow.text
    assert len(wide.text) < 300 and big.error is not None and after.error is None


async def test_databases_from_files_and_those_that_cannot_be(tmp_path: Path) -> None:
    shop(tmp_path / "shop.db")
    (tmp_path / "shop.sql").write_text(SHOP)
    for name in ("shop.db", "shop.sql"):
        tool = SqlTool(name, writable=True).at(tmp_path)
        for statement, said in (("DELETE FROM item", "OK, 3 rows changed."), (COUNT, "n\n3")):
            assert (await calls(tool, {"query": statement}))[0].text == said
    for source in ("missing.db", "CREATE TABEL x"):
        with pytest.raises(EnvError):
            await calls(SqlTool().at(tmp_path), database=source)
    with pytest.raises(ConfigError):
        SqlTool(rows=0)


def shop(path: Path) -> None:
    with closing(sqlite3.connect(path)) as original:
        original.executescript(SHOP)


async def test_calls_of_one_turn_share_a_connection() -> None:
    tool = SqlTool()
    context = ToolContext(task=Task("p/1", "p", "", "train", (), {"database": SHOP}))
    state = await tool.create(context)
    asked = [tool.call(state, {"query": f"SELECT {n} AS n"}) for n in range(8)]
    assert [result.text for result in await asyncio.gather(*asked)] == [f"n\n{n}" for n in range(8)]
    assert context.state["sql"] is state
    await tool.release(state)


# --- search ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [
        {"id": "1", "title": "Titan", "text": "Titan is the largest moon of Saturn."},
        {"id": "2", "contents": "Io is a moon of Jupiter,\nfull of volcanoes."},
        {"id": "3", "title": "Peru", "text": "The Amazon is a river in Peru."},
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


async def test_search_finds_by_words(corpus: Path) -> None:
    tool = SearchTool("corpus.jsonl").at(corpus)
    first, two, none, blank = await calls(
        tool,
        {"query": "largest moon Saturn", "top_k": 1},
        {"query": "moon"},
        {"query": "zebra"},
        {"query": " "},
    )
    assert first.text == "[1] Titan: Titan is the largest moon of Saturn."
    assert first.metrics == {"found": 1.0}
    assert two.text.count("\n") == 1 and "[2]" in two.text and "volcanoes" in two.text
    assert none.text == "No passage has these words." and blank.error == "bad_arguments"
    own = SearchTool().at(corpus)
    (again,) = await calls(own, {"query": "peru"}, corpus="corpus.jsonl")  # the row's own corpus
    assert again.text == "[1] Peru: The Amazon is a river in Peru."
    examples = await calls(tool, *map(dict, SearchTool.examples))
    assert [result.error for result in examples] == [None] * len(examples) and examples


async def test_a_large_index_takes_no_time_of_the_first_search(tmp_path: Path) -> None:
    words = " ".join(f"word{n}" for n in range(400))
    rows = [json.dumps({"contents": f"page{n} {words}"}) for n in range(1500)]
    (tmp_path / "large.jsonl").write_text("\n".join(rows))
    (found,) = await calls(SearchTool("large.jsonl", seconds=0.2).at(tmp_path), {"query": "page7"})
    assert found.error is None and "page7" in found.text


async def test_a_row_names_a_corpus_of_its_pack_alone(corpus: Path) -> None:
    pack = corpus / "pack"
    pack.mkdir()
    (pack / "link.jsonl").symlink_to(corpus / "corpus.jsonl")
    for place in ("../corpus.jsonl", str(corpus / "corpus.jsonl"), "link.jsonl"):
        with pytest.raises(EnvError, match="lies outside of its pack"):
            await calls(SearchTool().at(pack), {"query": "peru"}, corpus=place)
        (found,) = await calls(SearchTool(anywhere=True).at(pack), {"query": "peru"}, corpus=place)
        assert "Amazon" in found.text
    with pytest.raises(EnvError, match="lies outside of its pack"):  # beside a retriever, too
        await calls(SearchTool(url="http://127.0.0.1:1").at(pack), {"query": "x"}, corpus="../x")
    (pack / "own.jsonl").write_text('{"text": "Lima is in Peru."}')
    beside = SearchTool(url="http://127.0.0.1:1").at(pack)  # where no one listens
    (found,) = await calls(beside, {"query": "peru"}, corpus="own.jsonl")
    assert "Lima" in found.text
    (found,) = await calls(SearchTool("../corpus.jsonl").at(pack), {"query": "peru"})
    assert "Amazon" in found.text  # the pack's own setting


async def test_search_reads_folders_of_texts_and_sees_changes(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# Cats\n\nCats sleep.\n\n" + "x" * 1300 + "\n\nCats purr loudly."
    )
    (tmp_path / "b.txt").write_text("Dogs bark.")
    (tmp_path / "dead.md").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.txt").mkdir()
    tool = SearchTool(".").at(tmp_path)
    assert (await calls(tool, {"query": "purr", "top_k": 5}))[0].text == "[1] a: Cats purr loudly."
    (tmp_path / "b.txt").write_text("Dogs purr, too, it is said.")
    assert "Dogs purr" in (await calls(tool, {"query": "purr dogs"}))[0].text
    assert pieces("a\n\nb\n\n" + "c" * 1300) == ["a\n\nb", "c" * 1300]


def test_a_corpus_may_hold_any_character_and_begin_with_a_mark(tmp_path: Path) -> None:
    rows = '{"text": "a\u2028b"}\n{"text": "c\x85d"}\n'
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8-sig")
    assert [one.text for one in read_documents(tmp_path / "rows.jsonl")] == ["a\u2028b", "c\x85d"]


async def test_corpora_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "old.txt").write_bytes(b"caf\xe9")
    for corpus, error, words in (
        ("", EnvError, "neither a corpus"),
        ("missing", EnvError, "does not exist"),
        ("bad.jsonl", DataError, r"bad\.jsonl:2: a document needs"),
        ("old.txt", DataError, r"old\.txt cannot be read as UTF-8 text"),
    ):
        with pytest.raises(error, match=words):
            await calls(SearchTool(corpus).at(tmp_path), {"query": "a"})
    with pytest.raises(ConfigError, match="not both"):
        SearchTool("a", url="http://b")


@pytest.fixture
def site() -> Iterator[Site]:
    with serve_pages() as made:
        yield made


async def test_search_asks_a_retriever(site: Site) -> None:
    found = {"document": {"contents": '"Titan"\nTitan is a moon.'}, "score": 3.0}
    body = json.dumps({"result": [[found, {"document": {"text": "Io.", "title": "Io"}}]]}).encode()
    site.pages = {"/retrieve": (200, {}, body), "/other": (200, {}, b'{"hits": []}')}
    (result,) = await calls(SearchTool(url=f"{site.url}/retrieve"), {"query": "moons", "top_k": 2})
    assert result.text == "[1] Titan: Titan is a moon.\n[2] Io: Io."
    assert json.loads(site.seen[0][2]) == {"queries": ["moons"], "topk": 2, "return_scores": True}
    for path, words in (("other", "in another form"), ("missing", "answered 404")):
        with pytest.raises(EnvError, match=words):
            await calls(SearchTool(url=f"{site.url}/{path}"), {"query": "moons"})


# --- what code of others must not do ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["like", "glob"])
async def test_one_statement_of_sql_cannot_hold_a_thread(how: str) -> None:
    many = "replace(hex(zeroblob(200000)), '0', 'a')"
    few = "replace(hex(zeroblob(5000)), '0', 'a')"
    wild = "%" if how == "like" else "*"
    result, short = await query(
        SqlTool(seconds=0.2),
        f"SELECT {many} {how} '{wild}' || {few} || 'b'",
        f"SELECT 'pencil' {how} 'pen{wild}' AS fits",
    )
    assert result.error is not None and short.text == "fits\n1"
    # The worst that is left: a function of two long values, which no interrupt looks into, many times over.
    half = "printf('%.*c', 60000, 'a')"
    slow = " + ".join([f"instr({half}, {half} || 'b')"] * 200)
    (held,) = await query(SqlTool(seconds=0.02), f"SELECT {slow}")
    assert held.error == "timeout"


async def test_trim_takes_no_time_by_the_square() -> None:
    """SQLite's own looks for each character in the whole of the other text, and is not interrupted meanwhile."""
    connection = open_database("", None, 64)
    slow = "SELECT length(trim(printf('%.*c', 15 * ?, 'a'), printf('%.*c', ?, 'b') || 'a'))"

    def trim(size: int) -> None:
        assert connection.execute(slow, (size, size)).fetchone() == (0,)

    assert exponent(trim, 1000) < 1.5
    likewise = "SELECT trim('xxaxx', 'x'), ltrim('xxa', 'x'), rtrim('axx', 'x'), trim(5.5, 5), trim(NULL, 'a')"
    assert connection.execute(likewise).fetchone() == ("a", "a", "a", ".", None)
    connection.close()


@pytest.mark.parametrize("name", ["printf", "format"])
def test_printf_is_sqlites_own_up_to_a_length(name: str) -> None:
    """SQLite's own counts to the precision, 8 s of a processor for one call, and answers NULL."""
    connection = open_database("", None, 64)
    for words in ("'%.*c', 1000000000, 'x'", "'%.1000000000c', 'x'", "'%*d', '-1000000000', 1",
                 "'%s %.*f', 'a', 1000000000, 0.1", "'%.60000c%.60000c%.60000c', 'a', 'b', 'c'"):  # fmt: skip
        with pytest.raises(sqlite3.DataError, match="too big"):
            connection.execute(f"SELECT {name}({words})")
    same = ("'%s|%-6d|%06.2f|%,d|%x|%%|%c|%q|%Q|%w', 'é', 42, 3.14159, 1234567, 255, 'xyz', 'it''s', NULL, 'a'",
            "'%*d|%-*d|%.*f|%.*c', 5, 42, '6', 7, 2, 3.14159, 3, 'x'", "'%d %s'", "'%.3s%lld%!.5s', 'abcdef', 9, 'ü'",
            "NULL, 1", "", "5", "'%s %s', 1.5, x'6162'", "'%y %d', 1")  # fmt: skip
    with closing(sqlite3.connect(":memory:")) as plain:
        for words in same:
            wanted = plain.execute(f"SELECT printf({words}), typeof(printf({words}))").fetchone()
            assert (
                connection.execute(f"SELECT {name}({words}), typeof({name}({words}))").fetchone()
                == wanted
            ), words
    connection.close()


async def test_rows_name_databases_of_their_pack_alone(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    for folder in (tmp_path, pack):
        shop(folder / "shop.db")
    (pack / "link.db").symlink_to(tmp_path / "shop.db")
    asked, inside = {"query": COUNT}, {"database": "shop.db"}
    for source in (str(tmp_path / "shop.db"), "../shop.db", "link.db"):
        given = {"database": source}
        with pytest.raises(EnvError, match="outside of its pack"):
            await calls(SqlTool().at(pack), **given)
        # The pack's own settings may say otherwise.
        for tool, own in ((SqlTool(source), {}), (SqlTool(anywhere=True), given)):
            assert (await calls(tool.at(pack), asked, **own))[0].text == "n\n3"
    assert (await calls(SqlTool().at(pack), asked, **inside))[0].text == "n\n3"


# --- tools.yaml in the short form and with classes, limits of what tools return, tool_choice ---

SHORT = """
- name: plus
  description: Sum of two.
  parameters: {a: number, b: {type: number, description: Second.}}
  function: "task.py:add"
  timeout: 3
  pure: true
- name: calculator
  description: Compute.
- finish
"""


async def test_the_short_form(tmp_path: Path) -> None:
    tools = ["tools.yaml", {"name": "sql", "config": {"rows": 1}}]
    made = pack(tmp_path, {"tools": tools}, [row()], tools__yaml=SHORT)
    plus, calculator, finish, sql = made.tools
    assert plus.schema["function"] == {
        "name": "plus",
        "description": "Sum of two.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number"},
                "b": {"type": "number", "description": "Second."},
            },
            "required": ["a", "b"],
        },
    }
    assert (plus.timeout, plus.pure, finish.name, sql.name) == (3, True, "finish", "sql")
    theirs = load_pack("calc-task").tools[0].schema["function"]["description"]
    assert calculator.schema["function"]["description"] == "Compute." != theirs
    done = await play(made, [call("plus", a=2, b=3), call("calculator", expression="2+3"), "5"])
    assert answers(done) == ["5", "5"] and done.outcome is Outcome.SOLVED


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (3, "a name or a mapping"),
        ({"nme": "a"}, "unknown keys: nme"),
        ({"description": "a"}, "needs a name"),
        (
            {"name": "sql", "config": {"row": 1}},
            "config takes: anywhere, database, memory_mb, rows",
        ),
        (
            {"name": "calculator", "parameters": {"x": "number"}},
            "calculator has no parameter x; it has expression",
        ),
        (
            {"name": "calculator", "parameters": {"expression": 3}},
            "parameters.expression must be a type or a schema, not 3",
        ),
        (
            {"name": "run_python", "config": {"timeout": 5}},
            "run_python is a function and takes no config. Its limits (concurrency",
        ),
        *(
            ({"name": "calculator", key: value}, f"tool 1.{key}: Input should be {said}")
            for key, value, said in (
                ("pure", "maybe", "a valid boolean"),
                ("external", 1, "a valid boolean"),
                ("timeout", "soon", "a valid number"),
                ("rate", 0, "greater than 0"),
                ("concurrency", True, "a valid integer"),
            )
        ),
        ({"class_name": "pathlib.Path"}, "neither a Tool nor a class that a plugin reads"),
    ],
)
def test_entries_that_cannot_be(tmp_path: Path, entry: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tools([entry], tmp_path)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_parameters_with_a_default_stay_optional(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text('def roll(sides: int = 6) -> int:\n    """Roll a die."""\n')
    entry = {"name": "roll", "function": "own.py:roll", "parameters": {"sides": "integer"}}
    (made,) = load_tools([entry], tmp_path)
    assert validate_arguments(made.schema, {}) is None


def test_two_tools_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two tools are named 'finish'"):
        pack(tmp_path, {"tools": ["finish", {"name": "finish"}]}, [row()])


async def test_limits_of_user_turns_characters_and_response(tmp_path: Path) -> None:
    made = pack(tmp_path, {"tools": [{"name": "sql"}]}, [row()])
    long = call("sql", query="SELECT 'abcdefghij' || 'klmnopqrst' AS x")
    cut = await play(made, [long, "5"], observation={"chars": 10, "cut": "right"})
    assert answers(cut) == ["x\nabcdefgh[… 12 characters cut …]"]
    assert cut.turns[-2].results[0].truncated
    once = await play(made, [long, long, "5"], max_user_turns=1)
    assert once.outcome is Outcome.TRUNCATED_TURNS and len(answers(once)) == 1
    # nothing was left to answer
    assert (await play(made, [long, "wrong"], max_user_turns=1)).outcome is Outcome.FAILED
    short = await play(made, [long, long, "5"], response_tokens=150)
    prompt = next(turn.start for turn in short.turns if turn.role == "assistant")
    # and the stop token that closes the turn
    assert (short.outcome, len(short.tokens) - prompt) == (Outcome.TRUNCATED_TOKENS, 150 + 1)


# --- tool_choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("choice", "error"), [("none", "unknown_tool"), ("auto", None)])
async def test_tool_choice_none_and_auto(tmp_path: Path, choice: str, error: str | None) -> None:
    made = pack(tmp_path, {"tools": ["calculator"]}, [row(tool_choice=choice)])
    done = await play(made, [call("calculator", expression="2+3"), "5"])
    assert done.turns[-2].results[0].error == error and done.outcome is Outcome.SOLVED
    prompt = CHAT.decode(done.tokens.ids[: done.turns[0].end].tolist())
    assert ("calculator" in prompt) == (choice == "auto")
    assert Origin.FORCED not in done.tokens.origin[:-2]


@pytest.mark.parametrize(
    ("choice", "free"),
    [
        ("required", "calculator"),
        ({"type": "function", "function": {"name": "calculator"}}, '{"expression'),
    ],
)
async def test_tool_choice_forces_the_beginning_of_a_call(
    tmp_path: Path, choice: Any, free: str
) -> None:
    made = pack(tmp_path, {"tools": ["calculator", "finish"]}, [row(tool_choice=choice)])
    whole = call("calculator", expression="2+3")
    begins = whole[: whole.index(free)]
    done = await play(made, [whole.removeprefix(begins), "5"])
    assert answers(done) == ["5"] and (done.outcome, done.flags) == (Outcome.SOLVED, ())
    first, last = (turn for turn in done.turns if turn.role == "assistant")
    origin, forced = done.tokens.origin[first.start : first.end], len(CHAT.tokenizer.encode(begins))
    assert (origin[:forced] == Origin.FORCED).all() and origin[forced] == Origin.MODEL
    assert CHAT.decode(done.tokens.ids[first.start : first.start + forced].tolist()) == begins
    # The second turn is free: else an episode could not end.
    assert done.tokens.origin[last.start] == Origin.MODEL


@pytest.mark.parametrize(
    "parser", ["hermes", "llama3_json", "mistral", "qwen3_coder", "glm", "deepseek"]
)
def test_every_parser_reads_a_call_that_was_begun_for_the_model(parser: str) -> None:
    chat = Chat(ByteTokenizer(), parser=parser)
    schemas = [tool.schema for tool in load_pack("calc-task").tools]
    whole = chat.parser.example("calculator", {"expression": "2+3"})
    for choice in ("required", {"type": "function", "function": {"name": "calculator"}}):
        begun = chat.syntax.forced_text(schemas, choice)
        assert begun and whole.startswith(begun)
        assert ("calculator" in begun) == (choice != "required")
    assert chat.syntax.forced_text(schemas, "auto") == ""
    assert chat.syntax.forced_text((), "required") == ""
