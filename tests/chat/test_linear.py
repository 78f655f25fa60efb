"""Hostile and absurd texts are read in time proportional to their length."""

import pytest

from agentrl_cli.agents.gateway.messages import assistant_message, without_echo
from agentrl_cli.agents.gateway.request import RequestError, read_tools
from agentrl_cli.chat.thinking import drop_empty, drop_empty_lines
from tests.helpers.growth import exponent


def test_white_space_is_read_in_linear_time() -> None:
    for work in (
        drop_empty,
        drop_empty_lines,
        lambda text: without_echo(assistant_message(text, (), None)),
    ):
        assert exponent(lambda n, work=work: work(" " * n + "x"), 1000) < 1.5  # type: ignore[misc]


def test_names_of_tools_are_compared_in_linear_time() -> None:
    tools = [{"name": f"t{n}"} for n in range(16 * 400)]
    assert exponent(lambda n: read_tools(tools[:n]), 400) < 1.5
    with pytest.raises(RequestError, match="two functions named 't3'"):
        read_tools([*tools[:9], tools[3]])


def test_an_echo_of_calls_is_taken_off() -> None:
    listed = "Calling tools:\n[{'id': '1', 'function': {}}]"
    said = assistant_message(f"I add.\n \n{listed} \n", (), None)
    assert without_echo(said) == {**said, "content": "I add."}
    for text in (listed, "I add.", f"I add.\n{listed} and more"):
        assert without_echo(assistant_message(text, (), None)) is None


def test_empty_thinking_goes_with_the_white_space_around_it() -> None:
    text = "a \n<think> \n</think>\n\n</think> b <think>c</think>"
    assert drop_empty(text) == "ab <think>c"
    assert drop_empty_lines(text) == "a\nb <think>c\n"
