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


BYTES = Chat(ByteTokenizer())


THINKS = Chat(ByteTokenizer(THINKING))


REFUSES = Chat(
    ByteTokenizer(
        "{% if messages | length > 5 %}{{ raise_exception('too long') }}{% endif %}"
        f"{ByteTokenizer().chat_template}"
    )
)


# A turn without its end was cut there; a list is one of texts that are encoded one by one.
HALF, LETTERS = ("half",), [*"print", "<|im_end|>"]


Replies = list[str | tuple[str] | list[str]]


# The chat, the turns, the results between them, and what the guard says: kind, turn, tokens into the turn, its text.
EPISODES: dict[str, tuple[Chat, Replies, list[str], list[tuple[str, int, int, str]]]] = {
    "clean": (BYTES, [f"Hm.\n{CALL}", CALL, "done"], ["1", "<|im_end|> in a result"], []),
    "it ends after a result": (BYTES, [CALL], ["1"], []),
    "it ends within a turn": (BYTES, [CALL, ("half an ans",)], ["1"], []),
    "a turn was cut and closed": (BYTES, [HALF, "x"], ["go on"], []),
    "a malformed call": (BYTES, ['<tool_call>\n{"name": ', "x"], ["Malformed"], []),
    "another spelling": (
        BYTES,
        ['Hm. <tool_call>{"name":"run_python",  "arguments":{"code":"1"}}</tool_call>', "x"],
        ["1"],
        [("reserialised", 1, len("Hm.") + 1, "<tool_call>{")],
    ),
    "other tokens": (
        Chat(Tokenizer(bpe_json(), ByteTokenizer().chat_template, {"eos_token": "<|im_end|>"})),
        [LETTERS, "x"],
        ["1"],
        [("resegmented", 1, 0, "")],
    ),
    "dropped thinking": (
        THINKS,
        ["<think>\nhm\n</think>\n\nfirst", "second"],
        ["1"],
        [("by_design", 1, 0, "")],
    ),
    "a template that refuses": (
        REFUSES,
        ["a", "b", "c"],
        ["1", "2"],
        [("by_design", -1, 0, "too long")],
    ),
}


def encoded(chat: Chat, text: str | tuple[str] | list[str]) -> list[int]:
    if isinstance(text, str):
        return list(chat.assistant_ids(text))
    return [id_ for part in text for id_ in chat.tokenizer.encode(part)]


@pytest.mark.parametrize(("chat", "replies", "given", "wanted"), EPISODES.values(), ids=EPISODES)
def test_reports_of_an_episode_and_of_its_first_delta(
    chat: Chat, replies: Replies, given: list[str], wanted: list[tuple[str, int, int, str]]
) -> None:
    one = episode(chat, [encoded(chat, text) for text in replies], given)
    found = check_episode(one, chat, TOOLS)
    starts = {turn.index: turn.start for turn in one.turns}
    places = [(d.kind, d.turn, d.position - starts.get(d.turn, 0)) for d in found]
    assert places == [(kind, turn, offset) for kind, turn, offset, _ in wanted]
    assert all(text in f"{d.expected} {d.got}" for d, (*_, text) in zip(found, wanted, strict=True))
    ids, (_, said, new, *_) = one.tokens.ids, one.turns
    parts = (ids[said.start : said.end], ids[new.start : new.end])
    delta = check_delta(chat, *parts, said.messages[0], new.messages, TOOLS)
    assert [drift.kind for drift in delta] == [kind for kind, turn, _, _ in wanted if turn == 1]


def test_an_empty_episode_and_what_a_template_drops() -> None:
    assert check_episode(Episode("e", "t"), BYTES) == [] and audit(THINKS).thinking_by_design


def test_a_lost_separator_stop_token_or_role_is_structural() -> None:
    clean = episode(BYTES, [BYTES.assistant_ids(CALL), BYTES.assistant_ids("x")], ["1"])
    place = clean.turns[2].start
    (drift,) = check_episode(without(clean, place, place + 1), BYTES, TOOLS)
    assert (drift.kind, drift.position, drift.turn) == ("structural", place, 2)
    assert drift.expected.startswith("\n<|im_start|>user")
    assert drift.got.startswith("<|im_start|>user")
    said, own, new = (
        {"role": "assistant", "content": "x"},
        BYTES.assistant_ids("x"),
        clean.turns[2].messages,
    )
    delta = BYTES.extend([*PROMPT, said], new, TOOLS)
    found = check_delta(BYTES, own, delta.ids[1:], said, new, TOOLS, turn=1, position=50)
    assert [(d.kind, d.turn, d.position) for d in found] == [("structural", 1, 52)]
    for lost in (clean.turns[1].end - 1, place + 2):  # the stop token, and the u of user
        assert worst(check_episode(without(clean, lost, lost + 1), BYTES, TOOLS)) == "structural"


def test_each_branch_is_compared_with_a_rendering_of_its_own() -> None:
    one = episode(BYTES, [BYTES.assistant_ids(CALL), BYTES.assistant_ids("x")], ["1"])
    other = episode(BYTES, [BYTES.assistant_ids(CALL), BYTES.assistant_ids("y")], ["2"])
    tree = grafted(one, other, 2)
    assert check_episode(tree, BYTES, TOOLS) == []
    apart = grafted(one, episode(BYTES, [BYTES.assistant_ids("z")], []), 0, parent=ROOT)
    assert check_episode(apart, BYTES, TOOLS) == []
    flat = apart.with_(turns=tuple(replace(turn, parent=None) for turn in apart.turns))
    assert (
        check_episode(flat, BYTES, TOOLS) != []
    )  # as a chain it is not a conversation that the template writes
    # a fault in what two branches share is reported once, and one in the second branch where it stands
    place = tree.turns[4].start
    broken = replace(
        tree.tokens, ids=np.where(np.arange(len(tree.tokens)) == place, 5, tree.tokens.ids)
    )
    (drift,) = check_episode(tree.with_(tokens=broken), BYTES, TOOLS)
    assert (drift.kind, drift.turn, drift.position) == ("structural", 4, place)
    shared = replace(
        tree.tokens, ids=np.where(np.arange(len(tree.tokens)) == 1, 5, tree.tokens.ids)
    )
    assert [drift.turn for drift in check_episode(tree.with_(tokens=shared), BYTES, TOOLS)] == [0]


def test_a_context_may_have_tools_of_its_own() -> None:
    one = episode(BYTES, [BYTES.assistant_ids("x")], [])
    prompt = BYTES.prompt(PROMPT)
    bare = Episode(
        "b",
        "t",
        turns=(Turn(0, "user", tuple(PROMPT), 0, len(prompt)),),
        tokens=Tokens.from_ids(prompt.ids, prompt.origin),
    )
    tree = grafted(one, bare, 0, parent=ROOT)
    assert [drift.kind for drift in check_episode(tree, BYTES, TOOLS)] == ["structural"]
    assert check_episode(tree, BYTES, contexts={0: TOOLS, 2: None}) == []
    assert check_episode(tree, BYTES, contexts={0: TOOLS}) == [], "the other one is left out"


def test_a_foreign_stop_token_is_structural() -> None:
    other = BYTES.tokenizer.id_of("<|endoftext|>")
    assert other is not None
    own = [*BYTES.tokenizer.encode("x"), other]
    new: list[Message] = [{"role": "user", "content": "y"}]
    message: Message = {"role": "assistant", "content": "x"}
    delta = BYTES.extend([*PROMPT, message], new)
    assert worst(check_delta(BYTES, own, delta.ids, message, new)) == "structural"
