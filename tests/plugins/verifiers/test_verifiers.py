"""Tasksets of verifiers as agents."""

import json
from pathlib import Path

import pytest

from agentrl_cli.types import Outcome
from tests.helpers.chat import call
from tests.helpers.programs import play_published

TASKSET = """
import verifiers.v1 as vf


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)


class Words(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for word in ("red", "blue"):
            yield WordTask(WordData(prompt=f"Say {word}.", answer=word), self.config.task)


__all__ = ["Words"]
"""
FROZEN = """
class Game(vf.SingleAgentEnv):
    async def setup(self, agents):
        agents.agent.trainable = False


__all__ = ["Words", "Game"]
"""
REAL = {
    "verifiers:glossary": [call("facts_lookup", name="Ada Lovelace"), "<answer>{}</answer>"],
    "verifiers:scratchpad": [call("scratchpad_roundtrip", word="alpha"), "alpha"],
}


async def test_a_taskset_of_a_file_is_played_by_verifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agentrl_words.py").write_text(TASKSET)
    (tmp_path / "agentrl_frozen.py").write_text(TASKSET + FROZEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for said, reward in (("red", 1.0), ("green", 0.0)):
        folder = tmp_path / said
        episode = await play_published("verifiers:agentrl_words", "verifiers", [said], folder)
        assert [part.value for part in episode.reward_parts] == [reward], episode.error
        rows = (folder / "data").glob("*.jsonl")
        assert {"Say red.", "Say blue."} <= {
            json.loads(line)["prompt"][-1]["content"]
            for path in rows
            for line in path.read_text().splitlines()
        }
    frozen = await play_published("verifiers:agentrl_frozen", "verifiers", ["red"], tmp_path / "f")
    assert (frozen.outcome, frozen.reward) == (Outcome.UNGRADED, None), frozen.error


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("source", REAL)
async def test_a_published_taskset_is_played_by_its_own_loop(source: str, tmp_path: Path) -> None:
    modules = f"verifiers {source.rpartition(':')[2]}"
    episode = await play_published(source, modules, REAL[source], tmp_path / "own")
    assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED) and episode.linear, episode.error
    assert episode.tool_calls == 1 and not episode.tool_errors
    assert episode.solved or source != "verifiers:scratchpad"
