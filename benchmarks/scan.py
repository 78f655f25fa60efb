"""Counts the tasks of other projects' environments that the bundled model solves untrained: where it may learn.

    python benchmarks/scan.py --python PATH [PATTERN …]        only sources that a regular expression finds

Each source has 2 attempts at each of 12 tasks, by `curves.base`, which writes them into the plugins' `bases.json`.
`results/scan.json` has the outcomes, rewards and calls of each; a source that is there already is not repeated.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import curves  # noqa: E402  # works without an installation
from benchmarks.machine import machine  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "scan.json"
EASIEST = {
    "calendar_arithmetic": "tasks=[is_leap_year]",
    "chain_sum": "min_terms=2&max_terms=2&min_digits=1&max_digits=1",
    "circuit_logic": "min_inputs=2&max_inputs=2&num_terms=2",
    "color_cube_rotation": "min_rotations=1&max_rotations=1",
    "course_schedule": "min_num_courses=3&max_num_courses=4",
    "isomorphic_strings": "min_string_length=2&max_string_length=4",
    "letter_counting": "min_words=1&max_words=2",
    "needle_haystack": "min_num_statements=2&max_num_statements=2",
    "number_format": "min_num_candidates=2&max_num_candidates=2",
    "number_sorting": "min_numbers=2&max_numbers=2",
    "ransom_note": "min_note_length=1&max_note_length=3&min_magazine_length=4&max_magazine_length=6",
    "spell_backward": "min_word_len=3&max_word_len=3",
    "word_sequence_reversal": "min_words=2&max_words=2",
    "word_sorting": "min_words=2&max_words=2",
    "zebra_puzzles": "num_people=2&num_characteristics=2",
}
"""Settings of reasoning-gym's families that make them small; the others have their defaults."""
SLOW = {"arc_agi", "codeio", "composite", "futoshiki", "puzzle24", "rearc", "sokoban"}
"""Families that need half a second or more for a question, or other data sets; not counted."""
TURNS = "rollout.max_turns=8"
"""Of all episodes here: those of text worlds are long."""
OTHERS = (
    "gym:FrozenLake-v1?desc=[SF,FG]&is_slippery=false",
    "gym:FrozenLake-v1?desc=[SFF,FFF,FFG]&is_slippery=false",
    "gym:FrozenLake-v1?is_slippery=false",
    "gym:Blackjack-v1",
    "gym:MiniGrid-Empty-5x5-v0",
    "gym:BabyAI-GoToRedBallNoDists-v0",
    "textworld:tw-coin_collector?level=1&tool=true",
    "textworld:tw-coin_collector?level=2&tool=true",
    "textworld:tw-coin_collector?level=3&tool=true",
    "textworld:tw-treasure_hunter?level=1&tool=true",
    "textarena:KuhnPoker-v0?max_rounds=1&tool=true&opponent=random",
    "textarena:Blackjack-v0?tool=true&num_hands=1",
    "textarena:GuessTheNumber-v0?tool=true&min_number=1&max_number=5",
    "textarena:Bandit-v0?tool=true",
    "textarena:Nim-v0?tool=true&piles=[1]&opponent=random",
    "textarena:TicTacToe-v0?tool=true&opponent=random",
    "textarena:ReverseTicTacToe-v0?tool=true&opponent=random",
    "textarena:PigDice-v0-short?tool=true&opponent=random",
    "textarena:IteratedRockPaperScissors-v0?tool=true&opponent=[rock]",
    "textarena:IteratedMatchingPennies-v0?tool=true&opponent=[heads]",
    "textarena:ThreeCardMonte-v0?tool=true&steps=1",
    "textarena:Secretary-v0?tool=true&N=4",
    "textarena:FrozenLake-v0?tool=true&size=2&num_holes=0",
)


def list_families(python: str) -> list[str]:
    """Return a source for each family of the installed reasoning-gym."""
    code = "from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))"
    done = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return [
        "&".join([f"reasoning-gym:{name}?tool=true&size=60", *filter(None, [EASIEST.get(name)])])
        for name in done.stdout.split()
        if name not in SLOW
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="the interpreter with the packages")
    parser.add_argument("patterns", nargs="*", help="regular expressions; of all without")
    given = parser.parse_args()
    for module in ("torch", "transformers", "agentrl_cli.runtime", "agentrl_cli.rollout"):
        importlib.import_module(module)  # once, as each command is a fork of this process
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"sources": {}}
    for source in [*OTHERS, *list_families(given.python)]:
        wanted = not given.patterns or any(re.search(one, source) for one in given.patterns)
        if not wanted or source in kept["sources"]:
            continue
        sets = [TURNS] * (source in OTHERS)
        args = argparse.Namespace(source=source, python=given.python, set=sets, model="tiny-tools")
        with tempfile.TemporaryDirectory(prefix="agentrl-scan-") as folder:
            try:
                found = curves.base(args, Path(folder))
            except subprocess.CalledProcessError as error:
                found = {"error": f"exit status {error.returncode}"}
            except SystemExit as error:
                found = {"error": f"{error}"}
        kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else kept
        kept["sources"][source] = found
        kept |= {"machine": machine(), "date": date.today().isoformat()}
        RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
