"""Gymnasium and MiniGrid environments as worlds."""

from pathlib import Path

import pytest

from agentrl_cli import Outcome
from agentrl_cli.commands import main
from tests.helpers.chat import call
from tests.helpers.cli import Cli
from tests.helpers.programs import check_curve, compare, play_published, python_with

SAME = """
import gymnasium, minigrid
for name, options in (("FrozenLake-v1", {}), ("Taxi-v4", {}), ("Blackjack-v1", {}), ("CartPole-v1", {}),
                      ("MiniGrid-DoorKey-5x5-v0", {"max_steps": 60}), ("BabyAI-GoToObj-v0", {}), ("Pendulum-v1", {})):
    ours = worker(name, **options)
    for seed in range(EPISODES):
        env, rng, world = gymnasium.make(name, **options), random.Random(seed), ours.open(seed)
        twin = world._env
        assert twin is not env
        seen, _ = env.reset(seed=seed)
        over, total, enum = False, 0.0, world.tools[0]["function"]["parameters"]["properties"]["action"].get("enum")
        while not over and total > -400:
            if enum:
                said = rng.choice(enum)
                action = world._names[said]
            else:
                said = [rng.uniform(-2, 2)]
                action = world._action(said)
            if rng.random() < 0.1:
                assert "is not an action" in world.call("act", {"action": "fly"})[0]
            seen, reward, ended, cut, _ = env.step(action)
            text, over = world.call("act", {"action": said})
            total += float(reward)
            same((over, ended or cut), (f"Reward {float(reward):g}." in text, True), (world.reward(), total))
            if world._env.render_mode is None and not isinstance(seen, dict):
                same((text.split("\\n")[0], W.text_of(seen)))
            if isinstance(seen, dict):
                same((text.startswith("\\n".join(W._view(seen))), True))
            if name == "FrozenLake-v1":
                board = text.split("\\nReward")[0].split("\\n")[-4:]
                place = [row.replace("]", "").find("[") for row in board]
                at = max(range(4), key=place.__getitem__)
                same((4 * at + place[at], seen))
world = worker("CartPole-v1").open(0)
for space, ours in ((gymnasium.spaces.MultiDiscrete([3, 3]), [2**70, 0]), (gymnasium.spaces.MultiBinary(2), [300, 0]),
                    (gymnasium.spaces.Box(-1, 1, (2,)), [10**400, 0]), (gymnasium.spaces.MultiDiscrete([3]), [1e999])):
    world._space, world._names = space, {}
    assert "is not an action" in world.call("act", {"action": ours})[0]
W.WORKER({"package": "CartPole-v1", "task": "", "score": "success", "options": {}})
try:
    W.WORKER({"package": "CartPole-v1", "task": "", "score": "sucess", "options": {}})
except LookupError as error:
    same((error.args, ("score", "sucess", ["success"])))
else:
    raise AssertionError
"""
MINE = """
from __future__ import annotations
from dataclasses import dataclass

import gymnasium
from beside import KIND


@dataclass
class Settings:
    kind: str = KIND


class Count(gymnasium.Env):
    goal = "Say the word that is shown."
    action_names = ("Red", "Blue")
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        return "blue", {}

    def step(self, action):
        return "end", float(action == 1), True, False, {}


class Say(Count):
    action_space = gymnasium.spaces.Text(10, charset="blue .")

    def step(self, action):
        return "end", float(action == "blue."), True, False, {}


class Even(gymnasium.Space):
    def __init__(self):
        super().__init__((1,), int)

    def contains(self, x):
        return int(x[0]) % 2 == 0


class Own(Count):
    action_space = Even()

    def step(self, action):
        return "end", float(action[0] == 4), True, False, {}


class Both(Count):
    action_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)])


class Numbered(Count):
    action_names = None
    actions = ["red", "blue"]


def make(kind: str = ""):
    return {"": Count, "own": Own, "both": Both, "numbered": Numbered}[kind]() if kind != "word" else kind
"""


def test_steps_are_the_packages() -> None:
    compare("gym", "gymnasium minigrid", SAME)


async def test_a_lake_is_crossed_by_names_of_actions(tmp_path: Path) -> None:
    source = "gym:FrozenLake-v1?desc=[SF,FG]&is_slippery=false"
    said = [call("act", move="up"), call("act", action="fly"), "down", call("act", action="right")]
    episode = await play_published(source, "gymnasium", said, tmp_path / "lake")
    assert episode.outcome is Outcome.SOLVED, episode.error
    read = [turn.messages[0]["content"] for turn in episode.turns if turn.role in ("tool", "user")]
    assert read[0] == "[S]F\nFG\nCall act with action: right, down, left, up."
    assert "check action, move" in read[1] and "'fly' is not an action" in read[2]
    assert read[3].startswith("  (Down)\nSF\n[F]G\nReward 0.")


async def test_an_environment_of_the_users_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text('KIND = "say"\n')
    source = f"gym:{tmp_path / 'mine.py'}"
    episode = await play_published(source, "gymnasium", ["blue."], tmp_path / "p")
    assert episode.outcome is Outcome.SOLVED, episode.error
    assert episode.turns[0].messages[0]["content"] == "Say the word that is shown."
    said = [call("act", action="red"), " blue."]
    episode = await play_published(f"{source}:Say", "gymnasium", said, tmp_path / "say")
    assert episode.outcome is Outcome.SOLVED, episode.error
    assert any("'red' is not an action" in str(turn.messages) for turn in episode.turns)
    said = [call("act", action=[3]), call("act", action=[4])]
    episode = await play_published(f"{source}?kind=own", "gymnasium", said, tmp_path / "own")
    assert episode.outcome is Outcome.SOLVED, episode.error
    said = [call("act", action="1")]
    episode = await play_published(f"{source}?kind=numbered", "gymnasium", said, tmp_path / "n")
    assert episode.outcome is Outcome.SOLVED, episode.error  # `actions` is its own affair
    python = python_with("gym", "gymnasium")
    line = MINE[: MINE.index("def make")].count("\n") + 1
    cases = {"sort=2": "unexpected keyword", "kind=word": "returned str, without"}
    for query, text in {**cases, "kind=both": "actions of a Tuple space"}.items():
        given = ["--from", f"{source}?{query}", "--python", python]
        assert main(["init", str(tmp_path / "q"), *given]) == 1
        read = " ".join(capsys.readouterr().err.split())
        assert text in read and (f"mine.py:{line}: make" in read or "both" in query)


def test_an_option_that_does_not_exist_is_refused_before_any_episode(cli: Cli) -> None:
    cli("init", "unmade", "--from", "gym:?size=4", code=2, said="--from gym: lacks a name.")
    lake = ("init", "p", "--from", "gym:FrozenLake-v1", "--python", python_with("gym", "gymnasium"))
    cli(*lake[:3], "gym:FrozenLake-v1?is_slipery=false", *lake[4:], code=2, said="is_slippery?")
    cli(*lake)
    agent = cli.folder / "p" / "agent.py"
    agent.write_text(agent.read_text().replace(").solve", ", options={'map': '4x4'}).solve"))
    given = ("--project", "p", "--set", "train.steps=1")
    cli("train", *given, code=2, said="Did you mean map_name")
    cli("check", "--project", "p", code=1, said=("agent.py:solve: No option of", "map_name"))
    assert not cli.json("ls", "--project", "p")


def test_a_shipped_curve_comes_with_its_settings_and_counts_for_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_curve("gym:FrozenLake-v1?desc=[SF,FG]&is_slippery=false", "gymnasium", tmp_path / "lake")
    assert "tiny-tools solved" not in capsys.readouterr().err
