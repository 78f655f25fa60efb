"""Every old name of a command or an option still parses, with all its options, and prints its new form."""

import shlex

import pytest

from agentrl_cli.commands import load_command
from agentrl_cli.commands.renamed import COMMANDS, OPTIONS, translate
from agentrl_cli.store import RunRow, Store
from tests.helpers.cli import Cli

OLD = {
    "query": "--param 1 -n 5 --timeout 3 --schema --format csv --json -p . --db a.db 'select ?'",
    "grep": "-i --role tool -f outcome:failed -r fox -n 3 -l --json -p . --db a.db pattern",
    "runs": "--json -p . --db a.db",
    "runs list": "--json -p . --db a.db",
    "runs rename": "fox hare --json -p . --db a.db",
    "runs delete": "fox hare -y --keep-files --force --json -p . --db a.db",
    "bench": "-m tiny --endpoint a@http://b --svg a.svg -k 2 -n 3 -T 0.5 --resume --seed 1 -p . --db a.db"
    " -c a.yaml --set train.lr=1 --json math",
    "report": "fox -o a.html --format html --force --no-mask --json -p . --db a.db",
    "rescore": "fox --set rewards.a=1 --reward a=b.py:c --advantage rloo -f step:1 --name a --no-keep -n 3"
    " -p . --db a.db --json",
    "sandbox attack": "--level ns --json",  # --only chose among the 88 programs, which are the tests' now
    "eval --checkpoint": "best --json",
    "eval --families": "a,b --json",
    "export --html": "-o a.html",
    "sft --teacher-model": "big --teacher http://a out",
}
"""Every option that the old form had."""


def test_the_table_is_tested() -> None:
    assert OLD.keys() == COMMANDS.keys() | {f"{name} {option}" for name, option in OPTIONS}


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_parses_with_all_its_options(old: str) -> None:
    words, said = translate(shlex.split(f"{old} {OLD[old]}"), load_command)
    command, rest = load_command(words[0]), words[1:]
    if hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    given = command.make_context(words[0], rest).params
    assert said.startswith(f"`agentrl {old}` is now `agentrl {words[0]}") and "\n" not in said
    first = {"query": ("sql", "select ?"), "grep": ("grep", "pattern"), "bench": ("bench", "math")}
    if old in first:
        name, value = first[old]
        assert given[name] == value


def test_the_first_argument_is_found_behind_options_and_dashes() -> None:
    def words(*args: str) -> list[str]:
        return translate(args, load_command)[0]

    assert words("grep", "-n", "3", "--", "-x") == ["ls", "-n", "3", "--grep=-x"]
    assert words("query", "-", "--json") == ["ls", "--sql=-", "--json"]
    assert words("query", "--schema") == ["ls", "--schema"]
    assert words("grep", "--help") == ["ls", "--help"] and words("grep") == ["ls", "--grep"]
    assert words("eval", "--families=a,b") == ["eval", "--set", "task.families=[a,b]"]
    assert words("chat", "--say", "query") == ["chat", "--say", "query"]
    assert translate(["ls"], load_command) == (["ls"], "")


def test_an_old_name_runs_and_prints_one_line(cli: Cli) -> None:
    with Store.open(cli.folder / "a.db") as store:
        store.runs.add(RunRow("r", "fox", status="finished"))
    words = ("query", "select name from runs", "--format", "csv", "--db", "a.db")
    assert cli(*words) == "name\nfox\n"
    assert cli.err == "`agentrl query` is now `agentrl ls --sql`.\n"
