"""`agentrl doctor --model`: what a model does with tools that it has never seen, and whether RL can begin."""

import asyncio
import json
import re
from collections.abc import Sequence

from agentrl_cli import ByteTokenizer, Chat, Config, ScriptedPolicy
from agentrl_cli.evaluate.abilities import ABILITIES, Found, measure, verdict
from agentrl_cli.policies.load import Loaded
from recipes.tiny_tools.words import HELD_OUT
from tests.helpers.cli import Cli

TOKENIZER = ByteTokenizer()


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def able(key: str, ids: Sequence[int]) -> str:
    """Does everything: calls, copies, corrects, takes a second step, chooses, and says hello without a call."""
    user = TOKENIZER.decode(ids).partition("<|im_start|>user\n")[2]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", user, re.DOTALL)
    if found := re.search(r"mean (p-\w+)", results[-1] if results else ""):
        return call("seat_of", passenger=found[1])
    if "badge" in user and len(results) == 1:
        return call("badge_of", driver=results[0])
    if results:
        return f"Answer: {results[-1]}"
    rules = {
        r"When is the (\w+) open": "opening_hours shop",
        r"parcel (\S+)\?": "parcel_status code",
        r"seat has (\w+)": "seat_of passenger",
        r"route (\d+)": "driver_of route",
    }
    for pattern, named in rules.items():
        if match := re.search(pattern, user):
            name, parameter = named.split()
            return call(name, **{parameter: match[1]})
    if "ferry" in user:
        return call("ferry_fare", passengers=6)
    return call("museum_fee", age=41) if "museum" in user else "Hello!"


def shares(policy: ScriptedPolicy, seconds: float = 60.0) -> dict[str, Found]:
    loaded = Loaded(policy, Chat(TOKENIZER), None, "scripted", None)
    return {one.name: one for one in asyncio.run(measure(loaded, Config(), seconds))}


def test_a_model_that_does_everything_shows_every_ability() -> None:
    found = shares(ScriptedPolicy(able, TOKENIZER))
    assert {name: one.share for name, one in found.items()} == {
        ability.name: 1.0 for ability in ABILITIES
    }
    assert all(one.attempts >= 20 for one in found.values())
    assert verdict(list(found.values())).startswith("RL can begin:")


def test_a_model_that_guesses_shows_none_but_abstention() -> None:
    found = shares(ScriptedPolicy(lambda key, ids: "Answer: 3", TOKENIZER))
    assert {name for name, one in found.items() if one.share} == {"abstains"}
    assert "cannot begin" in verdict(list(found.values()))


def test_a_model_that_takes_one_step_alone_is_named() -> None:
    def one_step(key: str, ids: Sequence[int]) -> str:
        text = able(key, ids)
        return "Answer: 3" if "badge_of" in text or '"p-' in text else text

    found = shares(ScriptedPolicy(one_step, TOKENIZER))
    assert found["two steps"].share == found["corrects a call"].share == 0.0
    assert "one call" in verdict(list(found.values())) and "two steps" in verdict(
        list(found.values())
    )


def test_the_time_limit_holds() -> None:
    found = shares(ScriptedPolicy(able, TOKENIZER, delay=5.0), 0.2)
    assert all(one.share is None for one in found.values())
    assert verdict(list(found.values())).startswith("Nothing is known")


def test_no_bundled_model_was_trained_on_these_tools() -> None:
    assert {tool.__name__ for ability in ABILITIES for tool in ability.tools} <= HELD_OUT


def test_the_command_reports_each_ability_and_a_verdict(cli: Cli) -> None:
    lines = {one["name"]: one for one in cli.json("doctor", "--model", "scripted", code=3)}
    assert [*lines] == [*(ability.name for ability in ABILITIES), "verdict"]
    assert lines["calls a new tool"]["status"] == "warn" and lines["abstains"]["status"] == "ok"
    assert "RL cannot begin" in lines["verdict"]["detail"]
