"""Agents of other projects, each written as its own documentation has it: one tool call, then an answer.

`python -m benchmarks.clients` prints how often each forks its history.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.agents.gateway.session import Trace
from tests.helpers.chat import add, call
from tests.helpers.gateway import MODEL, served, world_of

TASK = "What is 17 + 25, and then plus 8?"
REPLIES = (
    "<think>I should add.</think>\n" + call("add", b=25, a=17),
    "Next.\n" + call("add", a=42, b=8),
    "It is 50.",
)
"""Turns of the scripted model: thinking and a call with its keys in another order than a client writes them, text
beside a call, and the answer."""
CODE = (
    "<think>Code.</think>I add.\n<code>\nx = add(17, 25)\nprint(x)\n</code>",
    "Thought: done.\n<code>\nfinal_answer(50)\n</code>",
)
FINAL = (
    'add", "arguments": {"a": 17, "b": 25}}\n</tool_call>',
    'final_answer", "arguments": {"answer": "50"}}\n</tool_call>',
)
"""After the prefix that `tool_choice: required` forces."""
BASH = (
    "I look.\n" + call("bash", command="echo 42"),
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 50"),
)

Run = Callable[[str, str], Any]


@dataclass(frozen=True)
class Client:
    """How to run an agent against (base_url, key), in a thread, and what is expected of it."""

    run: Run
    packages: tuple[str, ...]
    replies: tuple[str, ...] = REPLIES
    calls: int = 3
    forks: int = 0

    @property
    def missing(self) -> str:
        """A package that is not installed; empty if all are."""
        return next((name for name in self.packages if importlib.util.find_spec(name) is None), "")


async def fork_trace(client: Client) -> Trace:
    """Run a client once and return what was recorded."""
    world = world_of(client.replies)
    async with served(world):
        await asyncio.to_thread(client.run, world.base("k"), "k")
        return await world.end("k")


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def openai_chat(base: str, key: str) -> None:
    """The plain SDK; the message goes back as the object that came."""
    from openai import OpenAI

    client = OpenAI(base_url=base, api_key="unused")
    tools: Any = [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
        }
    ]
    messages: Any = [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": TASK},
    ]
    _chat_loop(
        lambda: client.chat.completions.create(model=MODEL, messages=messages, tools=tools),
        messages,
    )


def _chat_loop(ask: Callable[[], Any], messages: Any) -> None:
    import json

    while True:
        message = ask().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            assert message.content == "It is 50."
            return
        for made in message.tool_calls:
            result = add(**json.loads(made.function.arguments))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": str(result)})


def openai_stream(base: str, key: str) -> None:
    """The plain SDK, streaming, with its own accumulation."""
    from openai import OpenAI

    client = OpenAI(base_url=base, api_key="unused")
    tools: Any = [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
        }
    ]
    messages: Any = [{"role": "user", "content": TASK}]

    def ask() -> Any:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            for _ in stream:
                pass
            return stream.get_final_completion()

    _chat_loop(ask, messages)


def openai_responses(base: str, key: str) -> None:
    """Items sent back as they came."""
    import json

    from openai import OpenAI

    client = OpenAI(base_url=base, api_key="unused")
    tools: Any = [
        {
            "type": "function",
            "name": "add",
            "description": "Adds.",
            "parameters": SCHEMA,
            "strict": True,
        }
    ]
    items: Any = [{"role": "user", "content": TASK}]
    while True:
        response = client.responses.create(
            model=MODEL, input=items, tools=tools, instructions="Use the tool."
        )
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            assert response.output_text == "It is 50."
            return
        for made in calls:
            output = str(add(**json.loads(made.arguments)))
            items.append(
                {"type": "function_call_output", "call_id": made.call_id, "output": output}
            )


def openai_previous(base: str, key: str) -> None:
    """Only what is new, after `previous_response_id`; streaming."""
    import json

    from openai import OpenAI

    client = OpenAI(base_url=base, api_key="unused")
    tools: Any = [
        {
            "type": "function",
            "name": "add",
            "description": "Adds.",
            "parameters": SCHEMA,
            "strict": True,
        }
    ]
    items: Any = [{"role": "user", "content": TASK}]
    previous = None
    while True:
        with client.responses.stream(
            model=MODEL, input=items, tools=tools, previous_response_id=previous
        ) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
        previous, items = response.id, []
        for made in (item for item in response.output if item.type == "function_call"):
            output = str(add(**json.loads(made.arguments)))
            items.append(
                {"type": "function_call_output", "call_id": made.call_id, "output": output}
            )
        if not items:
            assert response.output_text == "It is 50."
            return


def openai_agents(base: str, key: str) -> None:
    """The Agents SDK with its default model, which speaks responses."""
    _agents(base, "OpenAIResponsesModel")


def openai_agents_chat(base: str, key: str) -> None:
    """The Agents SDK with its chat-completions model."""
    _agents(base, "OpenAIChatCompletionsModel")


def _agents(base: str, kind: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    model = getattr(agents, kind)(
        model=MODEL, openai_client=AsyncOpenAI(base_url=base, api_key="unused")
    )
    agent: Any = agents.Agent(
        name="Adder", instructions="Use it.", model=model, tools=[agents.function_tool(add)]
    )
    assert agents.Runner.run_sync(agent, TASK).final_output == "It is 50."


def anthropic_messages(base: str, key: str) -> None:
    """The plain SDK; blocks go back as they came."""
    _anthropic(base, lambda client, **given: client.messages.create(**given))


def anthropic_stream(base: str, key: str) -> None:
    """The plain SDK, streaming, with its own accumulation."""

    def ask(client: Any, **given: Any) -> Any:
        with client.messages.stream(**given) as stream:
            for _ in stream:
                pass
            return stream.get_final_message()

    _anthropic(base, ask)


def _anthropic(base: str, ask: Callable[..., Any]) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=base.removesuffix("/v1"), api_key="unused")
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    messages: Any = [{"role": "user", "content": TASK}]
    given: Any = {
        "model": MODEL,
        "max_tokens": 500,
        "system": "Use the tool.",
        "tools": tools,
        "messages": messages,
    }
    assert (
        client.messages.count_tokens(
            **{k: v for k, v in given.items() if k != "max_tokens"}
        ).input_tokens
        > 100
    )
    while True:
        message = ask(client, **given)
        messages.append({"role": "assistant", "content": message.content})
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            assert message.content[-1].text == "It is 50." and message.stop_reason == "end_turn"
            return
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": str(add(**use.input))}
            for use in uses
        ]
        messages.append({"role": "user", "content": results})


def langgraph(base: str, key: str) -> None:
    """A ReAct agent of langgraph over langchain-openai."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model=MODEL, base_url=base, api_key="unused")  # type: ignore[arg-type,unused-ignore]
    agent: Any = create_react_agent(model, [tool(add)], prompt="Use the tool.")
    out = agent.invoke({"messages": [("user", TASK)]})
    assert out["messages"][-1].content == "It is 50."


def pydantic_ai(base: str, key: str) -> None:
    """pydantic-ai's OpenAI chat model."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base, api_key="unused"))
    agent: Any = Agent(model, system_prompt="Use the tool.")
    agent.tool_plain(add)
    assert agent.run_sync(TASK).output == "It is 50."


def smolagents_tools(base: str, key: str) -> None:
    """ToolCallingAgent writes earlier calls as text of its own: the history differs after each."""
    import smolagents

    model = smolagents.OpenAIServerModel(model_id=MODEL, api_base=base, api_key="unused")
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(add)], model=model, verbosity_level=0
    )
    assert agent.run(TASK) == "50"


def smolagents_code(base: str, key: str) -> None:
    """CodeAgent adds the stop text again that the server cut off."""
    import smolagents

    model = smolagents.OpenAIServerModel(model_id=MODEL, api_base=base, api_key="unused")
    agent = smolagents.CodeAgent(tools=[smolagents.tool(add)], model=model, verbosity_level=0)
    assert agent.run(TASK) == 50


def mini_swe_agent(base: str, key: str) -> None:
    """mini-swe-agent with its default model, through LiteLLM."""
    import os

    os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(
        model_name=f"openai/{MODEL}",
        model_kwargs={"api_base": base, "api_key": "unused"},
        cost_tracking="ignore_errors",
        observation_template="{{output.output}}",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template="Use bash.",
        instance_template="{{task}}",
        cost_limit=0,
        step_limit=5,
    )
    result = agent.run(TASK)
    assert "50" in str(result)


CLIENTS: dict[str, Client] = {
    "openai-chat": Client(openai_chat, ("openai",)),
    "openai-stream": Client(openai_stream, ("openai",)),
    "openai-responses": Client(openai_responses, ("openai",)),
    "openai-previous": Client(openai_previous, ("openai",)),
    "openai-agents": Client(openai_agents, ("agents", "openai")),
    "openai-agents-chat": Client(openai_agents_chat, ("agents", "openai")),
    "anthropic": Client(anthropic_messages, ("anthropic",)),
    "anthropic-stream": Client(anthropic_stream, ("anthropic",)),
    "langgraph": Client(langgraph, ("langgraph", "langchain_openai")),
    "pydantic-ai": Client(pydantic_ai, ("pydantic_ai", "openai")),
    "smolagents-tools": Client(smolagents_tools, ("smolagents", "openai"), FINAL, calls=2, forks=1),
    "smolagents-code": Client(smolagents_code, ("smolagents", "openai"), CODE, calls=2),
    "mini-swe-agent": Client(mini_swe_agent, ("minisweagent", "litellm"), BASH, calls=2),
}


async def main(names: Sequence[str] = ()) -> None:
    """Print a line for each client."""
    for name, client in CLIENTS.items():
        if names and name not in names:
            continue
        if client.missing:
            print(f"{name:20} {client.missing} is not installed")
            continue
        try:
            trace = await fork_trace(client)
        except Exception as error:  # noqa: BLE001 - another project's agent, whatever it raises
            print(f"{name:20} FAILED {type(error).__name__}: {str(error)[:600]}")
            continue
        kinds = [drift.kind for drift in trace.drift]
        print(
            f"{name:20} calls {trace.calls} forks {trace.forks} turns {len(trace.turns)} drift {kinds}"
        )


if __name__ == "__main__":
    import sys

    asyncio.run(main(sys.argv[1:]))
