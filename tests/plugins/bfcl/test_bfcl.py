"""Multi-turn tasks of the Berkeley Function Calling Leaderboard as worlds."""

from pathlib import Path

import pytest

from agentrl_cli.types import Outcome
from tests.helpers.chat import call
from tests.helpers.programs import compare, play_published

SAME = """
import ast
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call as execute
for category in W.CATEGORIES:
    ours, played = worker(category), 0
    for place in range(0, ours.size, max(1, 4 * ours.size // EPISODES)):
        entry, rng, world = ours.entries[place], random.Random(place), ours.open(place)
        skipped, steps = rng.random() < 0.3, []
        for turn, right in enumerate(ours.truths[entry["id"]]):
            offered = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in world.tools}
            steps.append([])
            for text in right[skipped:]:
                node = ast.parse(text, mode="eval").body
                given = dict(zip(offered[node.func.id], map(ast.literal_eval, node.args)))
                given |= {one.arg: ast.literal_eval(one.value) for one in node.keywords}
                made = f"{node.func.id}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
                steps[-1].append([made])
                theirs, _ = execute([made], entry["initial_config"], entry["involved_classes"], f"d{place}",
                                    entry["id"], "long_context" in category)
                same((world.call(node.func.id, given), (theirs[0], False)))
            text, over = world.say("Done.")
            more = entry["question"][turn + 1 : turn + 2]
            same((over, not more), (text, "".join(one["content"] for one in more[0])) if more and more[0] else (1, 1))
        checked = multi_turn_checker(steps, ours.truths[entry["id"]], entry, category, f"c{place}")["valid"]
        same((world.reward(), float(checked)), (checked or skipped, True))
        played += 1
    assert played >= EPISODES // 4
same((refusal("multi_turn_base", tools="neded").args, ("tools of multi_turn_base", "neded", ["all", "needed"])))
assert "is a number from 1, not -1" in str(refusal("multi_turn_base", turns=-1))
"""


def test_calls_and_the_check_are_the_packages() -> None:
    compare("bfcl", "bfcl_eval", SAME)


@pytest.mark.parametrize("right", [True, False])
async def test_a_category_becomes_a_project(right: bool, tmp_path: Path) -> None:
    said = [call("cd", folder="document"), call("mkdir", dir_name="temp")]
    said += [call("mv", source="final_report.pdf", destination="temp")] * right + ["Done."]
    source = "bfcl:multi_turn_base?turns=1&tools=needed"
    episode = await play_published(source, "bfcl_eval", said, tmp_path / "files")
    assert episode.outcome is (Outcome.SOLVED if right else Outcome.FAILED), episode.error
