"""Evals of Inspect as agents."""

import sys
from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.errors import EnvError
from agentrl_cli.plugins.inspect.agent import Inspect
from agentrl_cli.types import Outcome, Task
from tests.helpers.chat import call
from tests.helpers.programs import episode_of, play_published, rehearsed

EVAL = '''
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def lookup():
    async def execute(name: str):
        """Look a number up.

        Args:
            name: Whose.
        """
        return str({"Ada": 42}.get(name, 0))

    return execute


@task
def numbers(name: str = "Ada"):
    samples = [Sample(input=f"Which number has {name}?", target="42")]
    return Task(dataset=MemoryDataset(samples), solver=[use_tools(lookup()), generate()], scorer=includes())
'''
REAL = {
    "inspect:inspect_evals@agent_threat_bench_memory_poison": [
        call("memory_read", key="vacation_policy"),
        "20 days",
    ],
    "inspect:inspect_evals@agentdojo?workspace=banking&with_injections=false": [
        call("get_iban"),
        "Done.",
    ],
}


async def test_an_eval_of_a_file_is_played_by_inspect(tmp_path: Path) -> None:
    (tmp_path / "my_eval.py").write_text(EVAL)
    source = f"inspect:{tmp_path / 'my_eval.py'}@numbers?name=Ada"
    said = [call("lookup", name="Ada"), "It is 42."]
    episode = await play_published(source, "inspect_ai", said, tmp_path / "own")
    assert episode.outcome is Outcome.SOLVED and episode.linear, episode.error
    assert episode.tool_calls == 1 and [part.value for part in episode.reward_parts] == [1.0]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", REAL)
async def test_a_published_eval_is_played_by_its_own_loop(source: str, tmp_path: Path) -> None:
    episode = await play_published(
        source, "inspect_ai inspect_evals", REAL[source], tmp_path / "own"
    )
    assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED) and episode.linear, episode.error
    assert episode.tool_calls == 1 and not episode.tool_errors


async def test_init_writes_paths_that_work_from_the_project_and_when_both_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "v" / "bin").mkdir(parents=True)
    worker = rehearsed(tmp_path)
    python = here / "v" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$1" "{worker}" "$3"\n')
    python.chmod(0o755)
    (here / "my_eval.py").write_text("")
    monkeypatch.chdir(here)
    given = ["--from", "inspect:my_eval.py@temps", "--python", "v/bin/python"]
    assert main(["init", "temps", *given]) == 0
    text = (here / "temps" / "agent.py").read_text()
    assert 'HERE / "../my_eval.py"' in text and 'python=HERE / "../v/bin/python"' in text
    monkeypatch.chdir("/")
    assert (await episode_of(here / "temps")).outcome is Outcome.SOLVED
    here.rename(tmp_path / "there")
    assert (await episode_of(tmp_path / "there" / "temps")).outcome is Outcome.SOLVED
    monkeypatch.chdir(tmp_path / "there")
    assert main(["init", str(tmp_path / "far" / "temps"), *given]) == 0, (
        "not beside them: the whole path"
    )
    assert (
        str(tmp_path / "there" / "my_eval.py")
        in (tmp_path / "far" / "temps" / "agent.py").read_text()
    )
    assert (await episode_of(tmp_path / "far" / "temps")).outcome is Outcome.SOLVED


def test_an_agent_of_before_0_1_asks_the_plugin_of_its_name() -> None:
    """An agent.py that `agentrl init --from inspect:…` wrote."""
    with pytest.warns(FutureWarning) as warned:
        from agentrl_cli.compat.programs import Foreign  # type: ignore[import-untyped]
    said = "Foreign is now agentrl_cli.agents.programs.open_program"
    assert any(said in str(one.message) for one in warned)
    found = Foreign("inspect", "evals", task="gsm8k", options={"a": 1}, score="match")
    assert isinstance(found, Inspect)
    with pytest.raises(EnvError, match="has no `sample`"):
        found.solve(Task(id="1", pack="", family="", split="", prompt=[]), "", "", "").send(None)
