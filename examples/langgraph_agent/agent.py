"""Arithmetic with a calculator, by a graph of LangGraph: a node that asks the model, a node that runs its calls."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agentrl_cli.tools.calculator import calculator as compute

TURNS = 4


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly, e.g. (12 + 3) * 4.5 ** 2."""
    return compute(expression).text


async def solve(task: Any, base_url: str, api_key: str, model: str) -> float:
    """Run the graph; 1.0 if its last message has the answer."""
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key).bind_tools([calculator])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node(
        "tools", ToolNode([calculator])
    )  # a call that it cannot run is answered with the error
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    messages = [(message["role"], message["content"]) for message in task.prompt]
    try:
        end = await graph.compile().ainvoke({"messages": messages}, {"recursion_limit": 2 * TURNS})
    except GraphRecursionError:  # the model's doing: no answer
        return 0.0
    return float(end["messages"][-1].text.strip() == f"Answer: {task.data['answer']}")
