"""Worlds of other projects, played by the loop in an interpreter of their own."""

from pathlib import Path

import pytest

from agentrl_cli.errors import NotFound
from agentrl_cli.types import Outcome
from tests.helpers.gateway import call
from tests.helpers.programs import agent_of, episode_of

WORLDS = """
class World:
    tools = [{"type": "function", "function": {"name": "act", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}]
    def __init__(self, sample):
        self.prompt, self.sum = [{"role": "user", "content": f"Add to {sample}."}], sample
    def say(self, text):
        return "Call act.", False
    def call(self, name, arguments):
        if arguments["n"] == 13:
            raise RuntimeError("the board broke")
        self.sum += arguments["n"]
        return f"It is {self.sum}.", self.sum > 1
    def reward(self):
        return self.sum / 2

class Worker:
    size = 2
    def __init__(self, config):
        if config["package"] != "sum":
            raise LookupError("game", config["package"], ["sum", "product"])
    def open(self, sample):
        return World(sample)

WORKER, FORKED = Worker, True
"""
AGENT = """from pathlib import Path
from agentrl_cli.agents.programs import ForeignWorld

class Sums(ForeignWorld):
    name, worker, needs, tested = "sums", Path(__file__).with_name("worlds.py"), "", {"pip": "0"}

solve = Sums("sum").solve
"""


async def test_a_world_is_played_to_its_end_or_a_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text('{"id": "r", "prompt": "?", "sample": 0}\n')
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "worlds.py").write_text(WORLDS)
    (tmp_path / "task.yaml").write_text("name: p\nsandbox: false\nagent: agent.py:solve\n")
    bad = '<tool_call>\n{"name": "act", "arguments": {"n": }}\n</tool_call>'
    said = ["Hm.", call("act", m=1), bad, call("act", n=1) + call("act", n=1) + call("act", n=9)]
    episode = await episode_of(tmp_path, said)
    assert episode.outcome is Outcome.SOLVED, episode.error
    read = [turn.messages[0]["content"] for turn in episode.turns if turn.role in ("tool", "user")]
    assert read[:2] == ["Add to 0.", "Call act."] and "check n, m" in read[2]
    assert "are not JSON" in read[3] and len(episode.turns) == 8
    limited = await episode_of(tmp_path, [call("act", n=1), "Hm."], max_turns=2)
    assert limited.outcome is Outcome.TRUNCATED_TURNS and limited.reward == 0.5
    crashed = await episode_of(tmp_path, [call("act", n=13)])
    assert crashed.outcome is Outcome.ENV_ERROR and "the board broke" in crashed.error
    assert [one.message for one in caplog.records if "was tested" in one.message] != []
    kind = agent_of(tmp_path / "worlds.py")
    assert [row["prompt"][0]["content"] for row in kind("sum").rows(9)] == [
        "Add to 0.",
        "Add to 1.",
    ]
    with pytest.raises(NotFound, match="No game named 'sums'") as unknown:
        kind("sums").rows(1)
    assert unknown.value.hint == "Did you mean sum? There are: sum, product."
