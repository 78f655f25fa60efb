"""`sql`, `search` and `fetch_page`: what they answer, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import ConfigError, DataError, EnvError
from agentrl_cli.tools import Tool, ToolContext
from agentrl_cli.tools.fetch_page import FetchTool, Refused, _public, html_text
from agentrl_cli.tools.search import SearchTool, pieces, read_documents
from agentrl_cli.tools.sql import SqlTool, open_database
from agentrl_cli.types import Task, ToolResult
from tests.helpers.growth import exponent

SHOP = "CREATE TABLE item (name TEXT, price REAL); INSERT INTO item VALUES ('pen', 1.5), ('cup', 4), ('hat', NULL);"


async def calls(tool: Tool, *arguments: dict[str, Any], **row: Any) -> list[ToolResult]:
    """One episode's calls."""
    context = ToolContext(task=Task("p/1", "p", "", "train", (), row))
    state = await tool.create(context)
    try:
        return [await tool.call(state, one) for one in arguments]
    finally:
        await tool.release(state)


async def query(tool: SqlTool, *statements: str, database: str = SHOP) -> list[ToolResult]:
    return await calls(tool, *({"query": statement} for statement in statements), database=database)


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


async def test_every_example_of_sql_works() -> None:
    assert [result.error for result in await calls(SqlTool(), *map(dict, SqlTool.examples))] == [
        None,
        None,
    ]


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
    refused, after = await query(SqlTool(), statement, "SELECT count(*) FROM item")
    assert refused.error in ("refused", "exception") and after.text.endswith("\n3")
    assert not Path("/tmp/agentrl-vacuum.db").exists()


async def test_a_writable_database_is_the_episodes_own() -> None:
    tool = SqlTool(writable=True)
    statements = (
        "CREATE TABLE x (a)",
        "INSERT INTO x VALUES (1), (2)",
        "DELETE FROM item",
        "SELECT count(*) FROM item",
    )
    first = await query(tool, *statements)
    assert [result.text for result in first] == ["OK, 0 rows changed.", "OK, 2 rows changed.", "OK, 3 rows changed.", "count(*)\n0"]  # fmt: skip # noqa: E501
    (fresh,) = await query(tool, "SELECT count(*) FROM item")
    assert fresh.text == "count(*)\n3"
    for statement in (
        "ATTACH ':memory:' AS x",
        "VACUUM INTO '/tmp/agentrl-vacuum.db'",
        "PRAGMA journal_mode=WAL",
    ):
        assert (await query(tool, statement))[0].error in ("refused", "exception")
    assert not Path("/tmp/agentrl-vacuum.db").exists()
    assert (await query(tool, "PRAGMA table_info(item)"))[0].text.startswith("cid | name")


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
    with closing(sqlite3.connect(tmp_path / "shop.db")) as original:
        original.executescript(SHOP)
    (tmp_path / "shop.sql").write_text(SHOP)
    for name in ("shop.db", "shop.sql"):
        tool = SqlTool(name, writable=True).at(tmp_path)
        assert (await calls(tool, {"query": "DELETE FROM item"}))[0].text == "OK, 3 rows changed."
        assert (await calls(tool, {"query": "SELECT count(*) FROM item"}))[0].text == "count(*)\n3"
    for source in ("missing.db", "CREATE TABEL x"):
        with pytest.raises(EnvError):
            await calls(SqlTool().at(tmp_path), database=source)
    with pytest.raises(ConfigError):
        SqlTool(rows=0)


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
    assert first.text == "[1] Titan: Titan is the largest moon of Saturn." and first.metrics == {
        "found": 1.0
    }
    assert two.text.count("\n") == 1 and "[2]" in two.text and "volcanoes" in two.text
    assert none.text == "No passage has these words." and blank.error == "bad_arguments"
    (again,) = await calls(
        SearchTool().at(corpus), {"query": "peru"}, corpus="corpus.jsonl"
    )  # the row's own corpus
    assert again.text == "[1] Peru: The Amazon is a river in Peru."
    for example in SearchTool.examples:
        assert (await calls(tool, dict(example)))[0].error is None


async def test_search_reads_folders_of_texts_and_sees_changes(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# Cats\n\nCats sleep.\n\n" + "x" * 1300 + "\n\nCats purr loudly."
    )
    (tmp_path / "b.txt").write_text("Dogs bark.")
    tool = SearchTool(".").at(tmp_path)
    assert (await calls(tool, {"query": "purr", "top_k": 5}))[0].text == "[1] a: Cats purr loudly."
    (tmp_path / "b.txt").write_text("Dogs purr, too, it is said.")
    assert "Dogs purr" in (await calls(tool, {"query": "purr dogs"}))[0].text
    assert pieces("a\n\nb\n\n" + "c" * 1300) == ["a\n\nb", "c" * 1300]


async def test_corpora_that_cannot_be(tmp_path: Path) -> None:
    for tool, words in (
        (SearchTool(), "neither a corpus"),
        (SearchTool("missing").at(tmp_path), "does not exist"),
    ):
        with pytest.raises(EnvError, match=words):
            await calls(tool, {"query": "a"})
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: a document needs"):
        read_documents(tmp_path / "bad.jsonl")
    with pytest.raises(ConfigError, match="not both"):
        SearchTool("a", url="http://b")


# --- a server for the retriever and the pages ----------------------------------------------------------------------


class Site:
    """Pages by path: (status, headers, body), or a function that writes by itself."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.seen: list[tuple[str, str, bytes]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.seen.append((self.command, self.path, b""))
                self.answer()

            def do_POST(self) -> None:
                site.seen.append(
                    ("POST", self.path, self.rfile.read(int(self.headers["Content-Length"])))
                )
                self.answer()

            def answer(self) -> None:
                status, headers, body = site.pages.get(self.path, (404, {}, b"missing"))
                self.send_response(status)
                for key, value in {"Content-Type": "text/html; charset=utf-8", **headers}.items():
                    self.send_header(key, value)
                self.send_header(
                    "Content-Length", str(1 << 20 if self.path == "/endless" else len(body))
                )
                self.end_headers()
                try:
                    self.wfile.write(body)
                    while self.path == "/endless":
                        time.sleep(0.02)
                        self.wfile.write(b"x")
                except OSError:
                    self.close_connection = True  # the client had enough

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


async def test_search_asks_a_retriever(site: Site) -> None:
    found = {"document": {"contents": '"Titan"\nTitan is a moon.'}, "score": 3.0}
    body = json.dumps({"result": [[found, {"document": {"text": "Io.", "title": "Io"}}]]}).encode()
    site.pages["/retrieve"] = (200, {}, body)
    (result,) = await calls(SearchTool(url=f"{site.url}/retrieve"), {"query": "moons", "top_k": 2})
    assert result.text == "[1] Titan: Titan is a moon.\n[2] Io: Io."
    assert json.loads(site.seen[0][2]) == {"queries": ["moons"], "topk": 2, "return_scores": True}
    site.pages["/retrieve"] = (200, {}, b'{"hits": []}')
    with pytest.raises(EnvError, match="in another form"):
        await calls(SearchTool(url=f"{site.url}/retrieve"), {"query": "moons"})
    with pytest.raises(EnvError, match="answered 404"):
        await calls(SearchTool(url=f"{site.url}/missing"), {"query": "moons"})


# --- fetch_page ------------------------------------------------------------------------------------------------------


def fetcher(site: Site, **config: Any) -> FetchTool:
    return FetchTool(["127.0.0.1"], allow_private=True, **config)


async def fetch(tool: FetchTool, url: str) -> ToolResult:
    return (await calls(tool, {"url": url}))[0]


async def test_a_page_becomes_text(site: Site) -> None:
    html = (
        "<html><head><title>T</title><style>x</style></head><body><h1>Head</h1><p>One &amp; two</p>"
    )
    html += "<script>no()</script>"
    site.pages["/a?b=1"] = (200, {}, f"{html}<ul><li>x<li>y</ul>ü".encode())
    assert (
        await fetch(fetcher(site), f"{site.url}/a?b=1#there")
    ).text == "Head\n\nOne & two\n\nx\ny\n\nü"
    site.pages["/t"] = (200, {"Content-Type": "text/plain"}, b"<b>" + b"x" * 50)
    assert (await fetch(fetcher(site, width=10), f"{site.url}/t")).text == "<b>xxxxxxx\n[… cut …]"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("a<br>b<noscript>c</noscript>d", "a\nbd"),
        ("<!doctype html><head><title>T</title><body><p>No end of head", "No end of head"),
        ("<table><tr><td>a<td>b<tr><td>c<td>d</table>", "a b\nc d"),
        ("<p>one\n  sentence</p><dl><dt>term<dd>meaning</dl>", "one sentence\n\nterm\nmeaning"),
        ("<?xml version='1.0' encoding='latin-1'?><!-- x --><p>ü&nbsp;&lt;b&gt;</p>", "ü <b>"),
        ("<div>" * 1000 + "deep", "deep"),
        ("x" + "<div>" * 20_000 + "too deep", "x"),
        ("<!-- x -->", ""),
        ("", ""),
    ],
)
def test_text_of_pages_that_are_not_tidy(html: str, text: str) -> None:
    assert html_text(html) == text


async def test_fetch_is_off_until_a_host_is_allowed(site: Site) -> None:
    result = await fetch(FetchTool(), f"{site.url}/a")
    assert result.error == "refused" and "is off" in result.text and site.seen == []


@pytest.mark.parametrize(
    ("allow", "url", "words"),
    [
        (["example.org"], "http://example.org.evil.test/", "not on the list"),
        (["*.example.org"], "http://example.org/", "not on the list"),
        (["example.org"], "http://example.org@evil.test/", "user name"),
        (["example.org"], "ftp://example.org/", "not an http or https"),
        (["example.org"], "file:///etc/passwd", "not an http or https"),
        (["example.org"], "http://example.org:22/", "port 22"),
        (["https://example.org/help/"], "https://example.org/helpless", "not on the list"),
        (["https://example.org/help/"], "https://example.org/help/../admin", "not on the list"),
        (["https://example.org/help/"], "http://example.org/help/a", "not on the list"),
        (["localhost"], "http://localhost/", "private address"),
        (["127.0.0.1"], "http://127.0.0.1/", "private address"),
        (["2130706433"], "http://2130706433/", "private address"),  # 127.0.0.1 as one number
        (["*"], "http://[::ffff:10.0.0.1]/", "private address"),
        (["*"], "http://169.254.169.254/latest/meta-data", "private address"),
    ],
)
async def test_addresses_that_are_refused(allow: list[str], url: str, words: str) -> None:
    result = await fetch(FetchTool(allow), url)
    assert result.error == "refused" and words in result.text


def test_addresses_that_fit() -> None:
    tool = FetchTool(["Example.org", "*.python.org", "https://example.com/help/"])
    for url in (
        "http://EXAMPLE.org/x",
        "https://docs.python.org/3/",
        "https://example.com/help/a?b",
    ):
        assert tool.checked(url).hostname
    with pytest.raises(Refused):
        tool.checked("https://example.com/")
    public = {
        "1.1.1.1": True,
        "10.0.0.1": False,
        "::1": False,
        "fe80::1": False,
        "2606:4700::1": True,
    }
    public |= {
        "64:ff9b::7f00:1": False,
        "2002:7f00:1::": False,
        "224.0.0.1": False,
        "100.64.0.1": False,
        "0.0.0.0": False,
    }
    assert {address: _public(address) for address in public} == public


async def test_redirects_are_checked_again(site: Site) -> None:
    site.pages["/in"] = (302, {"Location": "/end"}, b"")
    site.pages["/end"] = (200, {}, b"there")
    site.pages["/out"] = (302, {"Location": f"http://localhost:{site.port}/end"}, b"")
    site.pages["/round"] = (302, {"Location": "/round"}, b"")
    assert (await fetch(fetcher(site), f"{site.url}/in")).text == "there"
    for path, words in (
        ("/out", "localhost is not on the list"),
        ("/round", "more than 5"),
        ("/missing", "answered 404"),
    ):
        result = await fetch(fetcher(site), site.url + path)
        assert result.error == "refused" and words in result.text


async def test_pages_are_bounded_in_size_kind_and_time(site: Site) -> None:
    site.pages["/big"] = (200, {}, b"x" * 300_000)
    site.pages["/endless"] = (200, {}, b"x")
    site.pages["/image"] = (200, {"Content-Type": "image/png"}, b"x")
    for path, words in (("/big", "larger than 64 KiB"), ("/image", "image/png, not text")):
        result = await fetch(fetcher(site, kilobytes=64), site.url + path)
        assert result.error == "refused" and words in result.text
    late = await fetch(fetcher(site, kilobytes=100_000, seconds=0.3), f"{site.url}/endless")
    assert late.error == "timeout"
    closed = await fetch(fetcher(site), "http://127.0.0.1:9/")
    assert closed.error == "exception"
    with pytest.raises(ConfigError):
        FetchTool(["a"], seconds=0)


# --- what code of others must not do ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["like", "glob"])
async def test_one_statement_of_sql_cannot_hold_a_thread(how: str) -> None:
    tool = SqlTool(seconds=0.2)
    many = "replace(hex(zeroblob(200000)), '0', 'a')"
    few = "replace(hex(zeroblob(5000)), '0', 'a')"
    wild = "%" if how == "like" else "*"
    (result, short) = await query(
        tool,
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
    for call in ("'%.*c', 1000000000, 'x'", "'%.1000000000c', 'x'", "'%*d', '-1000000000', 1",
                 "'%s %.*f', 'a', 1000000000, 0.1", "'%.60000c%.60000c%.60000c', 'a', 'b', 'c'"):  # fmt: skip
        with pytest.raises(sqlite3.DataError, match="too big"):
            connection.execute(f"SELECT {name}({call})")
    same = ("'%s|%-6d|%06.2f|%,d|%x|%%|%c|%q|%Q|%w', 'é', 42, 3.14159, 1234567, 255, 'xyz', 'it''s', NULL, 'a'",
            "'%*d|%-*d|%.*f|%.*c', 5, 42, '6', 7, 2, 3.14159, 3, 'x'", "'%d %s'", "'%.3s%lld%!.5s', 'abcdef', 9, 'ü'",
            "NULL, 1", "", "5", "'%s %s', 1.5, x'6162'", "'%y %d', 1")  # fmt: skip
    with closing(sqlite3.connect(":memory:")) as plain:
        for call in same:
            wanted = plain.execute(f"SELECT printf({call}), typeof(printf({call}))").fetchone()
            assert (
                connection.execute(f"SELECT {name}({call}), typeof({name}({call}))").fetchone()
                == wanted
            ), call
    connection.close()


async def test_rows_name_databases_of_their_pack_alone(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    for folder in (tmp_path, pack):
        with closing(sqlite3.connect(folder / "shop.db")) as original:
            original.executescript(SHOP)
    (pack / "link.db").symlink_to(tmp_path / "shop.db")
    outside = (str(tmp_path / "shop.db"), "../shop.db", "link.db")
    for source in outside:
        with pytest.raises(EnvError, match="outside of its pack"):
            await calls(SqlTool().at(pack), database=source)
        # The pack's own settings may say otherwise.
        for tool, row in ((SqlTool(source), {}), (SqlTool(anywhere=True), {"database": source})):
            assert (await calls(tool.at(pack), {"query": "SELECT count(*) AS n FROM item"}, **row))[
                0
            ].text == "n\n3"
    inside = {"database": "shop.db"}
    assert (await calls(SqlTool().at(pack), {"query": "SELECT 1 AS n"}, **inside))[0].text == "n\n1"


def test_no_spelling_of_an_address_reaches_what_is_not_public() -> None:
    closed = (
        "192.0.0.192", "168.63.129.16", "169.254.169.254", "100.100.100.200", "64:ff9b:1::7f00:1", "fec0::1",
        "::127.0.0.1", "::169.254.169.254", "::ffff:10.0.0.1", "2002:a9fe:a9fe::", "fd00:ec2::254",
        "2606:4700::5efe:10.0.0.1", "2606:4700::200:5efe:10.0.0.1", "192.88.99.1",
        "::ffff:0:169.254.169.254", "3fff::1", "5f00::1",
    )  # fmt: skip
    assert [address for address in closed if _public(address)] == []
    assert all(map(_public, ("1.1.1.1", "2606:4700::1111", "64:ff9b::101:101")))
