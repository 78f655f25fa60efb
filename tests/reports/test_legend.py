"""The words of the screens: one record for the command, the key and the page."""

from typing import get_args

from agentrl_cli.config.train import Stop
from agentrl_cli.reports.legend import LEGEND, RULES_TITLE, find_words
from agentrl_cli.rollout.flags import RULES
from agentrl_cli.tui.common.layers import LAYERS, layer_key
from agentrl_cli.types import Fact, Outcome
from tests.helpers.cli import Cli


def test_every_flag_outcome_fact_and_layer_is_explained() -> None:
    words = {title.partition(":")[0]: section for title, section in LEGEND.items()}
    assert set(words["Flags"]) == {*RULES, "DRIFT"}
    assert set(", ".join(words["Outcomes"]).split(", ")) == {str(one) for one in Outcome}
    assert set(words["Facts"]) == {fact.kind for fact in Fact}
    keys = [name.partition(" ")[0] for name in words["Layers"]]
    assert keys == [layer_key(number) for number in range(len(LAYERS))]


def test_a_word_is_found_whole_before_in_part_and_rules_are_words() -> None:
    assert find_words("notool") == {
        "Flags: anomalies of an episode, by rules": {"NOTOOL": "no tool was called"}
    }
    assert list(find_words("push")["On the screens"]) == ["push"]
    assert "train.lr" in find_words("collapse")[RULES_TITLE]["collapse"]
    for rule in get_args(Stop):
        assert rule in find_words(rule)[RULES_TITLE]


def test_the_command(cli: Cli) -> None:
    assert list(cli.json("words", "adv")["On the screens"]) == ["adv"]
    cli("words", "LOPP", code=2, said="loop")
