"""A coding agent asks the store, with the official client, why a run failed."""

import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import (
    Episode,
    Origin,
    Outcome,
    RewardPart,
    Tokens,
    ToolCall,
    ToolResult,
    Turn,
)

mcp = pytest.importorskip("mcp")


def episode(number: int, run: str, text: str) -> Episode:
    """Return an attempt; those with an odd number call the wrong tool and fail."""
    bad = number % 2
    call = ToolCall("c", "guess" if bad else "look", {"q": "x"}, "")
    said = {"role": "assistant", "content": text}
    turns = (
        Turn(0, "user", ({"role": "user", "content": "Find x."},), 0, 1),
        Turn(1, "assistant", (said,), 1, 2, calls=(call,)),
        Turn(2, "tool", ({"role": "tool", "content": "3"},), 2, 3, results=(ToolResult("3"),)),
    )
    return Episode(
        f"{number:014d}",
        "find",
        run_id=run,
        kind="rollout",
        turns=turns,
        tokens=Tokens.from_ids([1, 2, 3], [Origin.USER, Origin.FORCED, Origin.TOOL]),
        reward_parts=(RewardPart("exact", 1.0 - bad, primary=True),),
        outcome=Outcome.FAILED if bad else Outcome.SOLVED,
        started=1e9 + number,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "agentrl.db"
    with Store.open(path) as opened:
        run = opened.runs.add(RunRow("", "first", kind="rollout", status="finished")).id
        texts = [
            "key sk-" + "ab" * 60 + " end" + " more" * 40 + "\nkey sk-" + "ab" * 60 + " tail",
            *["word " * 9] * 6,
            ("long " * 30 + "\n") * 80,
        ]
        opened.episodes.add(episode(number, run, text) for number, text in enumerate(texts))
    return path


async def test_why_a_run_failed(store: Path) -> None:
    before = store.read_bytes()
    words = ["-m", "agentrl_cli", "mcp", "--db", str(store)]
    parameters = mcp.StdioServerParameters(command=sys.executable, args=words, cwd=store.parent)
    async with mcp.Client(mcp.stdio_client(parameters)) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == {
            *"runs run why failures episodes search episode".split()
        }
        assert all(tool.annotations.read_only_hint for tool in tools)
        assert not any(tool.input_schema["additionalProperties"] for tool in tools)

        async def ask(tool: str, **given: Any) -> tuple[str, bool]:
            found = await client.call_tool(tool, given)
            return "".join(one.text for one in found.content), bool(found.is_error)

        assert "first" in (await ask("runs"))[0]
        assert (await ask("run"))[0].startswith("run first")
        found, _ = await ask("failures", name="first")
        assert "guess" in found and "4 of 8" in found
        listed, _ = await ask("episodes", filter="outcome:failed", limit=2)
        assert "00000000000007" in listed and "00000000000000" not in listed
        hits, _ = await ask("search", text="b end| tail")  # in a key, and behind one
        assert hits.count("00000000000000@t1 assistant: ") == 2 and "abab" not in hits
        assert "masked:api-key] end" in hits and "masked:api-key] tail" in hits
        whole, _ = await ask("episode", id="00000000000000")
        assert "look" in whole and "abab" not in whole
        for tool, given, said in (
            ("episode", {"id": "--config"}, "is not the name"),
            ("episode", {"id": "../other"}, "is not the name"),
            ("failures", {"name": "--scan=x.py:f"}, "is not the name"),
            ("episode", {"id": "missing"}, "No episode"),
            ("run", {"name": "00000000000000"}, "No run"),
            ("failures", {"run": "first"}, "run\n  Extra inputs"),
        ):
            text, failed = await ask(tool, **given)
            assert failed and said in text
    assert store.read_bytes() == before


async def test_answers_are_bounded(store: Path) -> None:
    from agentrl_cli.plugins.ask.command import LONGEST, make_server

    async with mcp.Client(make_server(store)) as client:
        first, rest = [
            (await client.call_tool("search", {"text": "long", "offset": n})).content[0].text
            for n in (0, LONGEST)
        ]
    assert first.endswith(f"characters follow: offset={LONGEST}") and "\n… " not in rest
    whole = first.partition("\n… ")[0] + rest
    assert LONGEST < len(whole) <= 2 * LONGEST and whole.count("long") > 1_000
