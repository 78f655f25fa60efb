"""The drift guard: each kind of difference is found, classified and located; equal ids report nothing."""

from dataclasses import replace

import numpy as np
import pytest

from agentrl_cli import ByteTokenizer, Chat, Tokenizer
from agentrl_cli.chat.audit import audit
from agentrl_cli.chat.drift import check_delta, check_episode, worst
from agentrl_cli.types import ROOT, Episode, Message, Origin, StopReason, Tokens, Turn
from tests.helpers.chat import bpe_json, schema
from tests.helpers.trees import grafted

TOOLS = [schema("run_python", {"code": "string"})]
PROMPT: list[Message] = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
CALL = '<tool_call>\n{"name": "run_python", "arguments": {"code": "1"}}\n</tool_call>'

THINKING = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and '</think>' in m.content and not loop.last -%}
{{ m.content.split('</think>')[-1].lstrip() }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.fixture
def chat() -> Chat:
    return Chat(ByteTokenizer())


def episode(chat: Chat, replies: list[list[int]], results: list[str]) -> Episode:
    prompt = chat.prompt(PROMPT, TOOLS)
    parts = [Tokens.from_ids(prompt.ids, prompt.origin)]
    turns = [Turn(0, "user", tuple(PROMPT), 0, len(prompt))]
    messages = list(PROMPT)
    place = len(prompt)

    def add(role: str, said: list[Message], ids: list[int], origin: list[int]) -> None:
        nonlocal place
        parts.append(Tokens.from_ids(ids, origin))
        turns.append(Turn(len(turns), role, tuple(said), place, place + len(ids)))
        place += len(ids)
        messages.extend(said)

    for number, own in enumerate(replies):
        parsed = chat.parse(own, TOOLS, turn=number)
        closing = chat.close_turn(StopReason.LENGTH, own) if number < len(results) else []
        origin = [int(Origin.MODEL)] * len(own) + [int(Origin.FORCED)] * len(closing)
        add("assistant", [parsed.message], own + closing, origin)
        if number < len(results):
            new: list[Message] = [
                {"role": "tool", "tool_call_id": "c", "name": "t", "content": results[number]}
            ]
            delta = chat.extend(messages, new, TOOLS)
            add("tool", new, delta.ids, delta.origin)
    return Episode("e", "t", turns=tuple(turns), tokens=Tokens.concat(parts))


def without(subject: Episode, start: int, end: int) -> Episode:
    """The episode with some tokens lost; turns keep their spans as far as they can."""
    keep = [i for i in range(len(subject.tokens)) if not start <= i < end]
    tokens = Tokens.from_ids(subject.tokens.ids[keep], subject.tokens.origin[keep])
    return subject.with_(tokens=tokens)


def test_a_clean_episode_is_quiet(chat: Chat) -> None:
    replies = [
        chat.assistant_ids(f"Hm.\n{CALL}"),
        chat.assistant_ids(CALL),
        chat.assistant_ids("done"),
    ]
    clean = episode(chat, replies, ["1", "<|im_end|> in a result"])
    assert check_episode(clean, chat, TOOLS) == []
    turn, tool = clean.turns[1], clean.turns[2]
    ids = clean.tokens.ids
    assert (
        check_delta(
            chat,
            ids[turn.start : turn.end],
            ids[tool.start : tool.end],
            turn.messages[0],
            tool.messages,
            TOOLS,
        )
        == []
    )


def test_an_episode_may_end_anywhere(chat: Chat) -> None:
    after_result = episode(chat, [chat.assistant_ids(CALL)], ["1"])
    assert check_episode(after_result, chat, TOOLS) == []
    cut = episode(chat, [chat.assistant_ids(CALL), chat.tokenizer.encode("half an ans")], ["1"])
    assert check_episode(cut, chat, TOOLS) == []
    closed = episode(chat, [chat.tokenizer.encode("half"), chat.assistant_ids("x")], ["go on"])
    assert closed.tokens.origin.tolist().count(Origin.FORCED) == 1
    assert check_episode(closed, chat, TOOLS) == []
    malformed = episode(
        chat, [chat.assistant_ids('<tool_call>\n{"name": '), chat.assistant_ids("x")], ["Malformed"]
    )
    assert check_episode(malformed, chat, TOOLS) == []
    assert check_episode(Episode("e", "t"), chat) == []


def test_a_lost_separator_stop_token_or_role_is_structural(chat: Chat) -> None:
    clean = episode(chat, [chat.assistant_ids(CALL), chat.assistant_ids("x")], ["1"])
    place = clean.turns[2].start
    (drift,) = check_episode(without(clean, place, place + 1), chat, TOOLS)
    assert (drift.kind, drift.position, drift.turn) == ("structural", place, 2)
    assert drift.expected.startswith("\n<|im_start|>user")
    assert drift.got.startswith("<|im_start|>user")
    delta = chat.extend(
        [*PROMPT, {"role": "assistant", "content": "x"}], clean.turns[2].messages, TOOLS
    )
    found = check_delta(
        chat,
        chat.assistant_ids("x"),
        delta.ids[1:],
        {"role": "assistant", "content": "x"},
        clean.turns[2].messages,
        TOOLS,
        turn=1,
        position=50,
    )
    assert [(d.kind, d.turn, d.position) for d in found] == [("structural", 1, 52)]
    stop = clean.turns[1].end - 1
    assert worst(check_episode(without(clean, stop, stop + 1), chat, TOOLS)) == "structural"
    role = clean.turns[2].start + 2  # the u of user
    assert worst(check_episode(without(clean, role, role + 1), chat, TOOLS)) == "structural"


def test_each_branch_is_compared_with_a_rendering_of_its_own(chat: Chat) -> None:
    one = episode(chat, [chat.assistant_ids(CALL), chat.assistant_ids("x")], ["1"])
    other = episode(chat, [chat.assistant_ids(CALL), chat.assistant_ids("y")], ["2"])
    tree = grafted(one, other, 2)
    assert check_episode(tree, chat, TOOLS) == []
    apart = grafted(one, episode(chat, [chat.assistant_ids("z")], []), 0, parent=ROOT)
    assert check_episode(apart, chat, TOOLS) == []
    flat = apart.with_(turns=tuple(replace(turn, parent=None) for turn in apart.turns))
    assert (
        check_episode(flat, chat, TOOLS) != []
    )  # as a chain it is not a conversation that the template writes
    # a fault in what two branches share is reported once, and one in the second branch where it stands
    place = tree.turns[4].start
    broken = replace(
        tree.tokens, ids=np.where(np.arange(len(tree.tokens)) == place, 5, tree.tokens.ids)
    )
    (drift,) = check_episode(tree.with_(tokens=broken), chat, TOOLS)
    assert (drift.kind, drift.turn, drift.position) == ("structural", 4, place)
    shared = replace(
        tree.tokens, ids=np.where(np.arange(len(tree.tokens)) == 1, 5, tree.tokens.ids)
    )
    assert [drift.turn for drift in check_episode(tree.with_(tokens=shared), chat, TOOLS)] == [0]


def test_a_context_may_have_tools_of_its_own(chat: Chat) -> None:
    one = episode(chat, [chat.assistant_ids("x")], [])
    prompt = chat.prompt(PROMPT)
    bare = Episode(
        "b",
        "t",
        turns=(Turn(0, "user", tuple(PROMPT), 0, len(prompt)),),
        tokens=Tokens.from_ids(prompt.ids, prompt.origin),
    )
    tree = grafted(one, bare, 0, parent=ROOT)
    assert [drift.kind for drift in check_episode(tree, chat, TOOLS)] == ["structural"]
    assert check_episode(tree, chat, TOOLS, others={2: None}) == []


def test_a_foreign_stop_token_is_structural(chat: Chat) -> None:
    other = chat.tokenizer.id_of("<|endoftext|>")
    assert other is not None
    own = [*chat.tokenizer.encode("x"), other]
    new: list[Message] = [{"role": "user", "content": "y"}]
    message: Message = {"role": "assistant", "content": "x"}
    delta = chat.extend([*PROMPT, message], new)
    assert worst(check_delta(chat, own, delta.ids, message, new)) == "structural"


def test_another_spelling_of_the_same_call_is_reserialised(chat: Chat) -> None:
    spaced = '<tool_call>{"name":"run_python",  "arguments":{"code":"1"}}</tool_call>'
    odd = episode(chat, [chat.assistant_ids(f"Hm. {spaced}"), chat.assistant_ids("x")], ["1"])
    (drift,) = check_episode(odd, chat, TOOLS)
    assert (drift.kind, drift.turn) == ("reserialised", 1)
    assert drift.position == odd.turns[1].start + len("Hm.") + 1
    assert drift.got.startswith("<tool_call>{")
    turn, tool = odd.turns[1], odd.turns[2]
    ids = odd.tokens.ids
    found = check_delta(
        chat,
        ids[turn.start : turn.end],
        ids[tool.start : tool.end],
        turn.messages[0],
        tool.messages,
        TOOLS,
    )
    assert [d.kind for d in found] == ["reserialised"]


def test_other_tokens_for_the_same_text_are_resegmented() -> None:
    chat = Chat(Tokenizer(bpe_json(), ByteTokenizer().chat_template, {"eos_token": "<|im_end|>"}))
    whole = chat.tokenizer.encode("print")
    letters = [id_ for letter in "print" for id_ in chat.tokenizer.encode(letter)]
    assert len(whole) < len(letters)
    odd = episode(chat, [[*letters, chat.stop_ids[0]], chat.assistant_ids("x")], ["1"])
    (drift,) = check_episode(odd, chat, TOOLS)
    assert (drift.kind, drift.turn, drift.position) == ("resegmented", 1, odd.turns[1].start)


def test_dropped_thinking_is_by_design() -> None:
    chat = Chat(ByteTokenizer(THINKING))
    assert audit(chat).thinking_by_design
    ids = chat.assistant_ids("<think>\nhm\n</think>\n\nfirst")
    odd = episode(chat, [ids, chat.assistant_ids("second")], ["1"])
    (drift,) = check_episode(odd, chat, TOOLS)
    assert (drift.kind, drift.turn) == ("by_design", 1)


def test_a_conversation_the_template_refuses_is_by_design() -> None:
    refusing = ByteTokenizer().chat_template
    assert refusing is not None
    chat = Chat(
        ByteTokenizer(
            "{% if messages | length > 5 %}{{ raise_exception('too long') }}{% endif %}" + refusing
        )
    )
    odd = episode(
        chat,
        [chat.assistant_ids("a"), chat.assistant_ids("b"), chat.assistant_ids("c")],
        ["1", "2"],
    )
    (drift,) = check_episode(odd, chat, TOOLS)
    assert drift.kind == "by_design" and "too long" in drift.expected
