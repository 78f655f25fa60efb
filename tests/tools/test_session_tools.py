"""`run_python`, `bash` and `files` in one session: what the model reads, and that links lead nowhere."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import UsageError
from agentrl_cli.sandbox import Sandbox, Session
from agentrl_cli.tools import ToolContext, as_tool
from agentrl_cli.tools.session import LINES, MAX_TEXT
from agentrl_cli.types import ToolResult
from tests.helpers.cli import Cli
from tests.helpers.sandbox import open_sandbox


@pytest.fixture
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    level = getattr(request, "param", "ns")
    async with await open_sandbox(
        backend=level, min_level="landlock", workers=1, wall=2.0
    ) as opened:
        yield opened


@pytest.fixture
async def ctx(sandbox: Sandbox) -> AsyncIterator[ToolContext]:
    context = ToolContext(session_factory=sandbox.session)
    yield context
    await context.close()


async def call(ctx: ToolContext, name: str, **arguments: Any) -> ToolResult:
    return await as_tool(name).call(ctx, arguments, timeout=0.01)  # they end in time by themselves


async def test_the_examples_work_in_their_order(ctx: ToolContext) -> None:
    for name in ("run_python", "bash", "files"):
        assert as_tool(name).examples
        for example in as_tool(name).examples:
            result = await call(ctx, name, **example)
            assert result.error is None and result.text and result.level == ctx.opened.level
    assert (await call(ctx, "bash", command="cat src/a.py n.txt")).text == "x = 2\n1\n2\n3"


async def test_bash_tells_exit_codes_limits_and_keeps_files_only(ctx: ToolContext) -> None:
    failed = await call(ctx, "bash", command="mkdir d; cd d; V=1; echo out; echo err >&2; exit 3")
    assert (failed.text, failed.error) == ("out\nerr\n[exited with code 3]", "exit")
    assert (await call(ctx, "bash", command="ls; echo -$V-")).text == "d\n--"
    missing = await call(ctx, "bash", command="no_such_program")
    assert "not found" in missing.text and "[exited with code 127]" in missing.text
    slow = await call(ctx, "bash", command="sleep 30")
    assert (slow.text, slow.error) == ("[timed out after 2 s]", "timeout")
    loud = await call(ctx, "bash", command="head -c 300000 /dev/zero | tr '\\0' a")
    assert loud.error is None and len(loud.text) < 70_000 and "bytes left out" in loud.text


@pytest.mark.parametrize("sandbox", ["ns", "landlock"], indirect=True)
async def test_python_bash_and_files_share_the_folder(ctx: ToolContext) -> None:
    await call(ctx, "run_python", code="open('a.txt', 'w').write('one\\ntwo\\n')")
    assert (await call(ctx, "files", action="view", path="./a.txt")).text == "1\tone\n2\ttwo"
    await call(ctx, "files", action="edit", path="a.txt", old="two", new="three")
    assert (await call(ctx, "bash", command="cat a.txt")).text == "one\nthree"


async def test_view_shows_ranges_and_says_what_is_left(ctx: ToolContext) -> None:
    async def view(path: str, **lines: int) -> str:
        return (await call(ctx, "files", action="view", path=path, **lines)).text

    texts = {
        "a": "".join(f"line {n}\n" for n in range(1, LINES + 51)),
        "wide": "x" * 600,
        "none": "",
    }
    wrote = [await call(ctx, "files", action="write", path=p, text=texts[p]) for p in texts]
    assert wrote[0].text == f"Wrote a: {LINES + 50} lines, {len(texts['a'])} bytes."
    assert await view("a", start=3, end=4) == "3\tline 3\n4\tline 4"
    first, last = (await view("a")).splitlines(), f"{LINES + 50}\tline {LINES + 50}"
    left = f"[lines 1 to {LINES} of {LINES + 50}; go on with start {LINES + 1}]"
    assert len(first) == LINES + 1 and first[-1] == left
    assert (await view("a", start=LINES + 1)).splitlines()[-1] == last
    beyond = f"Error: a has lines 1 to {LINES + 50}, not 999 to {LINES + 50}"
    assert await view("a", start=999) == beyond and await view("none") == "[none is empty]"
    assert (await view("wide")).endswith("x [… 100 more characters]")


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"action": "view", "path": "missing"}, "missing: there is no such file."),
    ({"action": "view", "path": "bytes"}, "bytes is not text: 2 bytes that are not UTF-8"),
    ({"action": "view", "path": "../x"}, "the path has to be relative and inside the work folder"),
    (
        {"action": "view", "path": "/etc/passwd"},
        "the path has to be relative and inside the work folder",
    ),
    ({"action": "view", "path": "a/b"}, "a part of the path is not a folder"),
    ({"action": "list", "path": "missing"}, "there is no missing"),
    ({"action": "write", "path": "a"}, "write needs text"),
    ({"action": "write", "text": "x"}, "path is needed"),
    ({"action": "write", "path": "d", "text": "x"}, "it is a folder"),
    ({"action": "write", "path": "a", "text": "é" * MAX_TEXT}, f"a file may have {MAX_TEXT}"),
    ({"action": "edit", "path": "a", "old": "x"}, "edit needs new"),
    ({"action": "edit", "path": "a", "old": "q", "new": "x"}, "old does not occur in a; view it"),
    (
        {"action": "edit", "path": "a", "old": "one", "new": "x"},
        "old occurs 2 times in a (lines 1, 3); add what",
    ),
    ({"action": "edit", "path": "a", "old": "one", "new": "one"}, "old and new are the same"),
    ({"action": "edit", "path": "a", "old": "", "new": "one"}, "old is empty"),
]


async def test_what_goes_wrong_is_reported(ctx: ToolContext) -> None:
    await (await ctx.session()).write("bytes", b"\xff\xfe")
    await call(ctx, "bash", command="printf 'one\\ntwo\\none\\n' > a; mkdir d")
    for arguments, says in MISTAKES:
        result = await call(ctx, "files", **arguments)
        assert result.error == "exception" and result.text.startswith("Error: "), arguments
        assert says in result.text
    assert (await call(ctx, "bash", command="cat a")).text == "one\ntwo\none"


async def test_edits_of_one_turn_do_not_lose_each_other(ctx: ToolContext) -> None:
    await call(ctx, "files", action="write", path="a", text="".join(f"<{n}>" for n in range(6)))
    edits = [
        call(ctx, "files", action="edit", path="a", old=f"<{n}>", new=f"[{n}]") for n in range(6)
    ]
    assert [result.error for result in await asyncio.gather(*edits)] == [None] * 6
    assert (await call(ctx, "files", action="view", path="a")).text == "1\t[0][1][2][3][4][5]"


async def test_an_edit_keeps_line_ends_and_permissions(ctx: ToolContext) -> None:
    await call(ctx, "bash", command="printf '#!/bin/sh\\r\\necho 1\\r\\n' > a; chmod 755 a")
    await call(ctx, "files", action="edit", path="a", old="echo 1", new="echo 2")
    assert (await call(ctx, "bash", command="stat -c %a a")).text == "755"
    assert await (await ctx.session()).read("a") == b"#!/bin/sh\r\necho 2\r\n"


HOSTILE = """
import os
os.symlink('/etc/passwd', 'file'); os.symlink('/etc', 'folder'); os.symlink('.', 'self'); os.symlink('loop', 'loop')
os.symlink(CANARY, 'canary'); os.symlink(os.path.dirname(CANARY), 'dir'); os.mkfifo('pipe')
os.mkdir('deep'); os.symlink('../../../../../../etc/passwd', 'deep/up'); os.symlink('/proc/self/mem', 'deep/mem')
for name in ('hard', 'deep/hard'):
    try: os.link(CANARY, name)
    except OSError: pass
"""


@pytest.mark.parametrize("sandbox", ["ns", "landlock"], indirect=True)
async def test_links_lead_nowhere(ctx: ToolContext, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("a secret of the host")
    session: Session = await ctx.session()
    assert (await session.cell(f"CANARY = {str(canary)!r}{HOSTILE}")).ok
    leads = "file folder/passwd self/self/file loop canary dir/canary pipe deep/up deep/mem hard deep/hard".split()
    for path in leads:
        with pytest.raises(UsageError):
            await session.read(path)
        viewed = await call(ctx, "files", action="view", path=path)
        assert viewed.error == "exception"
        assert "root:" not in viewed.text and "secret" not in viewed.text
    for path in ("folder/new", "dir/new", "self/new", "dir/canary"):
        written = await call(ctx, "files", action="write", path=path, text="forged")
        assert written.error == "exception" and "links are not followed" in written.text
    for path in ("canary", "file", "hard", "deep/up"):  # replaced, not followed
        assert (await call(ctx, "files", action="write", path=path, text="mine")).error is None
        assert await session.read(path) == b"mine"
    assert canary.read_text() == "a secret of the host" and sorted(tmp_path.iterdir()) == [canary]
    listed = (await call(ctx, "files", action="list")).text
    assert "dir  (a link, not followed)" in listed and "pipe  (not a regular file)" in listed
    assert "passwd" not in listed


async def test_a_list_reports_that_entries_are_left_out(ctx: ToolContext) -> None:
    session = await ctx.session()
    made = await session.bash("mkdir a; cd a; touch $(seq 999)")
    assert made.ok and not (await session.list()).more and len(await session.list()) == 1000
    assert (await call(ctx, "files", action="list")).text.endswith("\n[800 more]")
    await session.write("z/late", "1")
    listed = await session.list()
    assert listed.more and len(listed) == 1000
    said = "[only 1000 entries of the working folder are looked at]"
    assert (await call(ctx, "files", action="list")).text.endswith(f"\n[800 more]\n{said}")
    assert said in (await call(ctx, "files", action="list", path="missing")).text


def test_the_commands_show_and_call_them(cli: Cli) -> None:
    assert cli("tools", "call", "bash", '{"command": "echo hi"}', said="sandbox ns") == "hi\n"
    assert cli.json("tools", "call", "bash", '{"command": "exit 4"}', code=1)["error"] == "exit"
    for name, limits in (
        ("sql", "access read-only, rows 50, seconds 2.0, memory MiB 64"),
        ("search", "passages 10, characters of a passage 600, timeout 10.0, pure True"),
        ("files", 'action (string, one of "view", "write", "edit", "list")'),
        ("files", "agentrl tools call files"),
        ("files", "sandbox: 5 s a call"),
    ):
        assert limits in cli("tools", "show", name)
