"""Games of TextArena as worlds."""

from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.types import Outcome
from tests.helpers.gateway import call
from tests.helpers.programs import compare, play_published, python_with

SAME = """
import textarena
def heard(env, me):
    player, seen = env.get_observation()
    names = env.state.role_mapping
    return "\\n".join(f"[{names.get(one, f'Player {one}')}] {text}" for one, text, _ in seen if one != me)
GAMES = {"Sudoku-v0-very-easy": None, "FrozenLake-v0-random": None,
         "GuessTheNumber-v0": [str(n) for n in range(1, 21)],
         "ThreeCardMonte-v0": ["0", "1", "2"], "TicTacToe-v0": None,
         "KuhnPoker-v0": None, "Nim-v0": ["0 1", "1 1", "2 1"]}
for name, moves in GAMES.items():
    script = ["[check]", "[fold]"] if "Kuhn" in name else moves and [f"[{move}]" for move in moves]
    ours = worker(name, opponent=script) if script else worker(name)
    for seed in range(EPISODES):
        env, rng, world = textarena.make(f"{name}-raw"), random.Random(seed), ours.open(seed)
        env = textarena.wrappers.ActionFormattingWrapper(env)
        random.seed(seed)
        env.reset(num_players=1 if len(world._env.state.role_mapping) == 2 else 2, seed=seed)
        text, over, turns = world.prompt[0]["content"], False, 0
        begun = random.getstate()
        theirs, done, twin, number = "", False, W.World.__new__(W.World), 0
        twin._heard, twin._random, twin._games = {}, random.Random(seed), ours
        twin._script = W.itertools.cycle(script or [""])
        while True:
            while not done and env.state.current_player_id != 0:
                player = env.state.current_player_id
                done, _ = env.step(twin._move(player, heard(env, player)))
            if done:
                env.state.current_player_id = 0
            begun, theirs = random.getstate(), heard(env, 0)
            same((text, theirs + "\\nThe game is over." * done), (over, done))
            if done or turns > 30:
                break
            found = W.MOVE.findall(text)
            move = rng.choice(moves) if moves else rng.choice(found or [f"{rng.randint(1, 9)} 1 2"])
            turns += 1
            state = random.getstate()
            text, over = world.say(move)
            random.setstate(state)
            done, _ = env.step(move)
        same((world.reward(), float((env.close()[0] or {}).get(0, 0.0) if done else 0.0)))
"""


def test_moves_are_the_packages() -> None:
    compare("textarena", "textarena", SAME)


async def test_a_game_becomes_a_project(tmp_path: Path) -> None:
    source = "textarena:PigDice-v0-50?tool=true&opponent=[hold]"
    said = [call("act", action="roll"), call("act", action="jump"), call("act", action="jump")]
    episode = await play_published(source, "textarena", said, tmp_path / "dice")
    assert episode.outcome is Outcome.FAILED and episode.reward == -1, episode.error
    read = episode.turns[0].messages[0]["content"]
    assert "Pig Dice" in read and read.endswith("Call act with action: roll, hold.")


@pytest.mark.parametrize(
    ("game", "text"), [("Sudku-v0", "Did you mean Sudoku-v0"), ("Wordle-v0", "nltk.downloader")]
)
def test_games_that_are_not_there(
    game: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = python_with("textarena", "textarena")
    assert main(["init", str(tmp_path / "p"), "--from", f"textarena:{game}", "--python", python])
    assert text in capsys.readouterr().err
