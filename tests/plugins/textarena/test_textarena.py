"""Games of TextArena as worlds."""

import json
from pathlib import Path

import pytest
import yaml

from agentrl_cli import Config, Episode, Outcome, Pack, ScriptedPolicy, load_pack
from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.commands import main
from agentrl_cli.reports.reference import FILE
from agentrl_cli.rollout import Job
from tests.helpers.chat import CHAT, call
from tests.helpers.cli import Cli
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
    several = {"opponent": script or "random"} if name.split("-")[0] in ("TicTacToe", "KuhnPoker", "Nim") else {}
    ours = worker(name, **several)
    for seed in range(EPISODES):
        env, rng, world = textarena.make(f"{name}-raw"), random.Random(seed), ours.open(seed)
        (mine,) = getattr(world, "players", [world])
        env, players = textarena.wrappers.ActionFormattingWrapper(env), 2 if several else 1
        me = seed % players
        assert mine.name == f"player_{me}"
        random.seed(seed)
        env.reset(num_players=players, seed=seed)
        twin = W.Game(env, False, {}, script or [], random.Random(f"{seed}/0"))
        begun = random.getstate()
        over, text = not mine.prompt, "" if not mine.prompt else mine.prompt[0]["content"]
        theirs, done, turns = "", False, 0
        random.setstate(begun)
        while True:
            while not done and env.state.current_player_id != me:
                player = env.state.current_player_id
                done, _ = env.step(twin.move(player, heard(env, player)))
            if done:
                env.state.current_player_id = me
            theirs = heard(env, me)
            same((over, done), *[(text, theirs + "\\nThe game is over." * done)] * bool(turns or not done))
            if done or turns > 30:
                break
            found = W.MOVE.findall(text)
            move = rng.choice(moves) if moves else rng.choice(found or [f"{rng.randint(1, 9)} 1 2"])
            turns += 1
            state = random.getstate()
            text, over = mine.say(move)
            random.setstate(state)
            done, _ = env.step(move)
        same((mine.reward(), float((env.close()[0] or {}).get(me, 0.0) if done else 0.0)))
unknown = refusal("Sudku-v0").args
same((unknown[:2], ("game of TextArena", "Sudku-v0")), ("Sudoku-v0" in unknown[2], True))
for name, options, said in (("Wordle-v0", {}, "nltk.downloader"),
                            ("KuhnPoker-v0", {"opponent": 3}, "an opponent is self"),
                            ("Sudoku-v0-very-easy", {"opponent": "random"}, "has one player: leave out opponent")):
    assert said in str(refusal(name, **options)), said
"""


def test_moves_are_the_packages() -> None:
    compare("textarena", "textarena", SAME)


DUEL = "textarena:KuhnPoker-v0?tool=true&max_rounds=1"
BET, FOLD = call("act", action="bet"), call("act", action="fold")


def begin(source: str, folder: Path) -> Pack:
    python = python_with("textarena", "textarena")
    assert main(["init", str(folder), "--from", source, "--python", python]) == 0
    return load_pack(folder)


async def play(pack: Pack, said: list[str], split: str = "train", attempt: int = 0) -> Episode:
    config = Config.model_validate({"rollout": {"max_tokens": 32000, "max_new_tokens": 400}})
    rollout = AgentRollout(ScriptedPolicy(said, CHAT.tokenizer), CHAT, {pack.name: pack}, config)
    task = next(t for t in pack.tasks(split) if t.data["sample"] % 2 == 0)
    return await rollout.episode(Job(task, attempt, attempt))


async def test_both_players_of_a_game_are_played(tmp_path: Path) -> None:
    pack = begin(DUEL, tmp_path / "duel")
    episode = await play(pack, [BET, FOLD])
    assert (episode.outcome, episode.reward, episode.error) == (Outcome.FAILED, 0.0, "")
    assert episode.players == {"player_0": -1.0, "player_1": 1.0}
    players = [tuple(episode.turns[n].player for n in branch) for branch in episode.branches]
    assert sorted(players) == [("player_0",) * 2, ("player_1",) * 2]
    for turn in episode.turns:
        if turn.role == "user":
            read = turn.messages[0]["content"]
            assert f"You are Player {turn.player[-1]}" in read
            moves = {"player_0": "fold, call", "player_1": "check, bet"}[turn.player]  # 1 begins
            assert read.endswith(f"Call act with action: {moves}.")
    text = (tmp_path / "duel" / "task.yaml").read_text()
    assert yaml.safe_load(text)["defaults"]["algo"] == {"advantage": "rae"}
    episode = await play(pack, [BET, BET, BET])  # player 0 may call or fold, and is asked once more
    assert episode.players == {"player_0": -1.0, "player_1": 1.0} and len(episode.turns) == 6


async def test_against_an_opponent_the_player_alternates_by_attempt(tmp_path: Path) -> None:
    pack, found = begin(f"{DUEL}&opponent=[bet,call]", tmp_path / "duel"), []
    for split in ("train", "test"):
        for attempt in range(2):
            episode = await play(pack, [FOLD], split, attempt)
            (player,) = {turn.player for turn in episode.turns}
            found.append((split, player))
            assert episode.outcome is not Outcome.ENV_ERROR, episode.error
            assert episode.reward == episode.players[player] and episode.linear
            assert split == "test" or ("[bet]" in str(episode.messages) and episode.reward == -1)
    assert found == [(s, f"player_{n}") for s in ("train", "test") for n in (0, 1)]


async def test_a_game_becomes_a_project(tmp_path: Path) -> None:
    source = "textarena:PigDice-v0-50?tool=true&opponent=[hold]"
    said = [call("act", action="roll"), call("act", action="jump"), call("act", action="jump")]
    episode = await play_published(source, "textarena", said, tmp_path / "dice")
    assert episode.outcome is Outcome.FAILED and episode.reward == -1, episode.error
    read = episode.turns[0].messages[0]["content"]
    assert "Pig Dice" in read and read.endswith("Call act with action: roll, hold.")


@pytest.mark.parametrize(
    ("source", "move", "asked"),
    [
        ("Secretary-v0?N=4", "continue", "accept, continue"),
        ("GuessTheNumber-v0?min_number=1&max_number=5", "9", "your move, like 5"),
    ],
)
async def test_moves_that_were_listed_once_are_asked_for_again(
    source: str, move: str, asked: str, tmp_path: Path
) -> None:
    said = [call("act", action=move)]
    source = f"textarena:{source}&tool=true"
    episode = await play_published(source, "textarena", said, tmp_path / "game")
    for turn in (episode.turns[0], episode.turns[2]):
        assert turn.messages[0]["content"].endswith(f"\nCall act with action: {asked}.")


@pytest.mark.parametrize(
    ("option", "text"),
    [("eval_opponent=randm", "Did you mean random"), ("max_round=1", "Did you mean max_rounds")],
)
def test_options_that_do_not_exist_are_refused(option: str, text: str, cli: Cli) -> None:
    source = f"textarena:KuhnPoker-v0?{option}"
    python = python_with("textarena", "textarena")
    cli("init", "p", "--from", source, "--python", python, code=2, said=text)


def test_a_game_at_which_the_bundled_model_learns_nothing_is_reported(cli: Cli) -> None:
    source = ("--from", "textarena:Bandit-v0", "--python", python_with("textarena", "textarena"))
    cli("init", "tiny", *source)
    said = "tiny-tools solved 0 of 24 of `Bandit-v0?tool=true` when this was measured"
    assert said in " ".join(cli.err.split())
    cli("init", "real", *source, "--model", "smollm2")
    assert "tiny-tools solved" not in cli.err
    kuhn = ("--from", "textarena:KuhnPoker-v0?max_rounds=1&opponent=random", *source[2:])
    cli("init", "small", *kuhn, said="learned it, from 0.1")
    cli("init", "large", *kuhn, "--model", "smollm2")
    assert "learned it" not in cli.err and not (cli.folder / "small" / FILE).exists()
    settings = yaml.safe_load((cli.folder / "large" / "task.yaml").read_text())["defaults"]
    assert (settings["rollout"]["max_new_tokens"], settings["adapter"]) == (40, {"enabled": True})
    assert json.loads((cli.folder / "large" / FILE).read_text())["model"] == "smollm2"
