"""Challenges of TextWorld as worlds."""

from pathlib import Path

import pytest

from agentrl_cli.types import Outcome
from tests.helpers.chat import call
from tests.helpers.programs import check_curve, compare, play_published

SAME = """
import textworld
from textworld.challenges import CHALLENGES
games = (("tw-cooking", {"take": 1}), ("tw-simple", {"goal": "brief"}), ("tw-coin_collector", {"level": 3}),
         ("tw-treasure_hunter", {"level": 1}))
for name, settings in games[:max(1, EPISODES // 25)]:  # each is compiled twice, in seconds
    ours = worker(name, **settings)
    for seed in range(max(1, EPISODES // 10)):
        options = textworld.GameOptions()
        options.seeds, options.path = seed, f"{sys.argv[3]}/{name}-{seed}.z8"
        file = textworld.generator.compile_game(CHALLENGES[name][1]({**W.DEFAULTS[name], **settings}, options), options)
        env = textworld.start(file, textworld.EnvInfos(admissible_commands=True, score=True, max_score=True))
        for again in range(min(10, EPISODES // 3)):
            rng, world, state = random.Random(again), ours.open(seed), env.reset()
            text, over, done = world.prompt[0]["content"], False, False
            for _ in range(40):
                hints = "" if done else f"\\nCommands: {', '.join(W.known(state))}."
                same((text, W.plain(state.feedback) + hints), (over, done))
                same((world.reward(), (state.score or 0) / state.max_score))
                if done:
                    break
                command = rng.choice([*state.admissible_commands, "fly home"])
                state, _, done = env.step(command)
                text, over = world.say(command)
            world.close()
world = worker("tw-cooking", take=1).open(0)
for said, answer in (("\\\\boxed{look}", "verb I recognise"), ("a" + "中文" * 100, "verb I rec"),
                     ("look\\ninventory", "Kitchen"), ("examine table", "The table is"), ("save", "Save failed"),
                     ("restore", "Restore failed")):
    assert answer in world.say(said)[0], said
for name, options, said in (("tw-coin_collector", {"level": 180}, "is 1-150 or 201-233, not 180"),
                            ("tw-cooking", {"go": 7}, "is 1 or 6 or 9 or 12, not 7"),
                            ("tw-cooking", {"split": "trian"}, "'trian', ['train', 'valid', 'test']"),
                            ("tw-simple", {"test": 1}, "is true or false")):
    assert said in str(refusal(name, **options)), said
"""


def test_commands_are_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compare("textworld", "textworld", SAME, str(tmp_path))
    assert list((tmp_path / "cache" / "agentrl" / "textworld").rglob("0.z8"))


async def test_a_challenge_becomes_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = [call("act", action="dance"), call("act", action="take coin")]
    source = "textworld:tw-coin_collector?level=1&tool=true"
    episode = await play_published(source, "textworld", said, tmp_path / "coin")
    assert episode.outcome is Outcome.SOLVED, episode.error
    read = str(episode.turns[0].messages[0]["content"])
    assert "Call act with action: take coin, examine coin" in read and "$$" not in read


def test_the_shipped_curve_counts_for_its_rows(tmp_path: Path) -> None:
    check_curve("textworld:tw-coin_collector?level=1&tool=true", "textworld", tmp_path / "coin")
