"""Tasks of tau2-bench as worlds."""

from pathlib import Path

from agentrl_cli.types import Outcome
from tests.helpers.chat import call
from tests.helpers.programs import compare, play_published

SAME = """
from tau2.data_model.message import AssistantMessage, ToolCall
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.registry import registry
solved = 0
for domain in ("mock", "retail", "airline", "telecom"):
    ours = worker(domain)
    for place, task in enumerate(ours.tasks[: max(2, EPISODES // 4)]):
        rng, world, env = random.Random(place), ours.open(place), registry.get_env_constructor(domain)()
        begun = task.initial_state
        env.set_state(begun.initialization_data if begun else None, begun.initialization_actions if begun else None, [])
        lazy, over, number = rng.random() < 0.3, False, 0
        for action in [] if lazy else task.evaluation_criteria.actions or []:
            if action.requestor == "user":
                before = len(world._said)
                text, over = world.say(f"Please use {action.name}.")
                for said in [one for one in world._said[before:] if one.role == "user" and one.is_tool_call()]:
                    same((env.get_response(said.tool_calls[0]).content in text, True))
            else:
                made = ToolCall(id=f"{number}", name=action.name, arguments=action.arguments)
                number += 1
                same((world.call(action.name, action.arguments)[0], env.get_response(made).content))
        same((world._env.get_db_hash(), env.get_db_hash()), (world._env.get_user_db_hash(), env.get_user_db_hash()))
        for heard in [] if lazy else task.evaluation_criteria.communicate_info or []:
            world.say(heard)
        while not over:
            text, over = world.say("Done.")
        run = SimulationRun(id="", task_id=task.id, start_time="", end_time="", duration=0.0, messages=world._said,
                            termination_reason=TerminationReason.USER_STOP)
        try:
            theirs = evaluate_simulation(run, task, EvaluationType.ALL, False, domain).reward
        except ValueError:
            theirs = 0.0
        same((world.reward(), theirs))
        solved += theirs
assert solved >= EPISODES // 3, solved
try:
    worker("mock", user="gpt")
except LookupError as error:
    assert error.args == ("user without user_url", "gpt", ["script", "self"])
else:
    raise AssertionError
"""


def test_tools_users_and_rewards_are_the_packages() -> None:
    compare("tau2", "tau2", SAME)


async def test_a_domain_becomes_a_project(tmp_path: Path) -> None:
    made = call("create_task", user_id="user_1", title="Important Meeting")
    said = [made, "It is there.", *["Bye."] * 7]
    episode = await play_published("tau2:mock", "tau2", said, tmp_path / "desk")
    assert episode.outcome is Outcome.SOLVED, episode.error
    assert episode.tool_calls == 1 and not episode.tool_errors
