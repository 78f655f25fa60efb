"""The effects of calls that are run again: files of the session, tables of a database."""

from agentrl_cli.chat_session.changes import compare_worlds
from agentrl_cli.chat_session.rerun import rerun_calls
from agentrl_cli.chat_session.whatif import rerun_object
from agentrl_cli.envs.tool_env import ToolEnv
from agentrl_cli.tools import as_tool
from agentrl_cli.tools.sql import SqlTool
from agentrl_cli.tui.whatif.view import event_lines
from agentrl_cli.types import Episode, StopReason, Task, ToolCall, Turn
from tests.helpers.sandbox import open_sandbox

SCRIPT = "CREATE TABLE fruit (name, price); INSERT INTO fruit VALUES ('fig', 2);"
ROW = Task("p/1", "p", "", "train", (), data={"database": SCRIPT})


def asks(index: int, *calls: tuple[str, dict[str, str]]) -> Turn:
    made = tuple(ToolCall(str(n), name, arguments, "") for n, (name, arguments) in enumerate(calls))
    return Turn(
        index,
        "assistant",
        ({"role": "assistant", "content": ""},),
        0,
        0,
        made,
        stop_reason=StopReason.STOP,
    )


async def test_a_call_run_again_shows_the_files_and_tables_that_it_changed() -> None:
    episode = Episode("e", "p/1", turns=(
        asks(0, ("bash", {"command": "printf 'one\\ntwo\\n' > notes.txt; touch tmp.txt"})),
        asks(1, ("bash", {"command": "sed -i s/two/2/ notes.txt; rm tmp.txt"})),
        asks(2, ("sql", {"query": "UPDATE fruit SET price = 3"})),
        asks(3, ("sql", {"query": "SELECT 1"})),
    ))  # fmt: skip
    async with await open_sandbox(workers=1) as sandbox:
        env = ToolEnv([as_tool("bash"), SqlTool(writable=True)], open_session=sandbox.session)
        await env.reset(ROW)
        found = (await rerun_calls(episode, env, changes=True)).reruns
        await env.close()
    assert [one.changed for one in found] == [
        ("new notes.txt", "+one", "+two", "new tmp.txt"),
        ("changed notes.txt", "-two", "+2", "deleted tmp.txt"),
        ("changed table fruit", "-fig | 2", "+fig | 3"),
        (),
    ]
    event = {"ev": "rerun", **rerun_object(found[2])}
    assert "    changed table fruit" in [line.plain for line in event_lines(event, 80)]
    assert "changed" not in rerun_object(found[3])


def test_long_differences_are_cut() -> None:
    lines = list(compare_worlds({}, {"a": [str(n) for n in range(30)]}))
    assert len(lines) == 22 and lines[-1] == "… 10 more lines differ"
