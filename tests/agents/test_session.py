"""A session over time, and its message tree: what matches, what forks; a branch is exactly what the model saw."""

import asyncio
import json
from typing import Any

import pytest

from agentrl_cli.agents.gateway.dialects import chat
from agentrl_cli.agents.gateway.request import ModelRequest, RequestError
from agentrl_cli.agents.gateway.session import Session
from agentrl_cli.agents.gateway.sessions import Sessions
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.types import ROOT, Generation, Origin, Sampling
from tests.helpers.chat import CHAT, call, schema
from tests.helpers.gateway import Held, session_of


def ask(messages: Any = ({"role": "user", "content": "Hi."},), **more: Any) -> ModelRequest:
    return chat.parse({"messages": list(messages), **more})


async def test_a_retry_is_answered_from_what_is_stored() -> None:
    session = session_of(lambda key, ids: "Once.")
    first = await session.complete(ask())
    assert await session.complete(ask(), retry=True) is first
    fresh = await session.complete(ask())  # the same body without being a retry is a new turn
    assert fresh is not first and session.replayed == 1
    assert (await session.seal()).calls == 2


async def test_equal_requests_in_flight_are_one() -> None:
    policy = Held()
    session = session_of(policy)
    asked = [ask(), ask(), ask(seed=1), ask(seed=2)]
    leaves, stays, *others = [asyncio.create_task(session.complete(one)) for one in asked]
    await policy.until(3)
    leaves.cancel()  # one of two clients leaves: the other still gets its answer
    await asyncio.sleep(0.01)
    policy.open.set()
    assert (await stays).choices[0].text.startswith("Number")
    assert all(len(one.choices[0].generation.ids) > 0 for one in await asyncio.gather(*others))
    assert (policy.begun, policy.cancelled, len(session.tree.turns)) == (3, 0, 1 + 3)


async def test_parallel_calls_keep_to_the_limit_of_answers() -> None:
    policy = Held()
    session = session_of(policy, max_turns=4, choices=4)
    left = asyncio.create_task(session.complete(ask(seed=0)))
    await policy.until(1)
    left.cancel()  # what leaves no trace does not count
    await asyncio.wait([left])
    asked = [asyncio.create_task(session.complete(ask(seed=n))) for n in range(1, 6)]
    await policy.until(1 + 4)
    asked.append(asyncio.create_task(session.complete(ask(n=2))))
    policy.open.set()
    made = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one.code for one in made if isinstance(one, RequestError)]
    assert refused == ["max_turns"] * 2 and session.calls == 4
    several = session_of(["x"], max_turns=4, choices=4)
    await several.complete(ask(n=3))
    with pytest.raises(RequestError, match="at most 4 answers"):
        await several.complete(ask(n=2))
    assert (await several.complete(ask())).choices and several.calls == 4


async def test_a_mistake_counts_until_a_call_that_follows_it() -> None:
    policy = Held()
    session = session_of(policy)
    policy.replies = lambda key, ids: "Well." if "Two" in CHAT.decode(ids) else call("unknown")
    asked = [ask([{"role": "user", "content": text}], tools=[ADD]) for text in ("One", "Two")]
    both = [asyncio.create_task(session.complete(one)) for one in asked]
    policy.open.set()
    await asyncio.gather(*both)  # the mistake is answered first
    assert "unknown" in session.mistake
    await session.complete(asked[1])
    assert not session.mistake


async def test_sampling_stops_when_the_last_client_leaves() -> None:
    policy = Held()
    session = session_of(policy)
    both = [asyncio.create_task(session.complete(ask())) for _ in range(2)]
    await policy.until(1)
    for task in both:
        task.cancel()
    await asyncio.sleep(0)
    # It must not join what is being cancelled.
    again = asyncio.create_task(session.complete(ask(), retry=True))
    await asyncio.wait(both)
    await policy.until(2)
    assert (policy.begun, policy.cancelled, session.tree.nodes) == (2, 1, [])
    policy.open.set()
    await again
    assert (await session.seal()).calls == 1


async def test_after_the_end_every_call_is_refused_even_one_in_flight() -> None:
    policy = Held()
    sessions = Sessions(lambda key: session_of(policy, key))
    flying = asyncio.create_task(sessions.find("a").complete(ask()))
    await policy.until(1)
    trace = await sessions.end("a")
    assert (trace.turns, policy.cancelled) == ((), 1)

    async def find(open_it: bool) -> None:
        sessions.open(session_of(policy, "a")) if open_it else sessions.find("a")

    for refused in (flying, find(True), find(False), sessions.end("a")):
        with pytest.raises(RequestError) as error:
            await refused
        assert error.value.status == 409


async def test_idle_sessions_end_and_only_so_many_are_open() -> None:
    ended: list[str] = []
    sessions = Sessions(
        lambda key: session_of(["x"], key),
        lambda session, trace, reward: ended.append(session.key),
        most=2,
    )
    first, _ = sessions.find("a"), sessions.find("b")
    with pytest.raises(RequestError) as error:
        sessions.find("c")
    assert error.value.status == 429
    own = Sessions()
    for idle in (first, own.open(session_of(["x"], "p"))):
        idle.used -= 100
    assert await own.sweep(50) == 0 and len(own) == 1  # opened here, and ended here
    await own.close()
    assert await sessions.sweep(50) == 1 and ended == ["a"] and len(sessions) == 1
    sessions.find("c")
    await sessions.close()
    assert sorted(ended) == ["a", "b", "c"] and len(sessions) == 0


async def test_slots_of_parallel_requests_are_released() -> None:
    keys: set[str] = set()
    together = asyncio.Barrier(3)

    class Watched(ScriptedPolicy):
        async def generate(self, key: str, *given: Any, **more: Any) -> Generation:
            keys.add(key)
            if len(session.tree.nodes) == 0:  # the first three
                await together.wait()
            return await super().generate(key, *given, **more)

        async def release(self, key: str) -> None:
            keys.discard(key)
            await super().release(key)

    session = session_of(Watched(lambda key, ids: "x", CHAT.tokenizer))
    await asyncio.gather(*(session.complete(ask(user=str(n))) for n in range(3)))
    await session.complete(ask())
    assert keys == {"k", "k#1", "k#2"}
    await session.seal()
    assert keys == set()


async def test_what_a_server_without_token_ids_says_is_context() -> None:
    class Upstream(ScriptedPolicy):
        """Renders the messages itself; its ids are guessed from its text."""

        untrainable = "its token ids are guessed"
        seen: list[Any]

        def observe(self, key: str, messages: Any, tools: Any = (), choice: Any = "auto") -> bool:
            self.seen = list(messages)
            return False

    policy = Upstream(["Hello."], CHAT.tokenizer)
    session = session_of(policy)
    await session.complete(ask())
    trace = await session.seal()
    assert policy.seen == [{"role": "user", "content": "Hi."}]
    assert trace.calls == 1 and not trace.tokens.trained_mask.any()


ADD = schema("add", {"a": "number", "b": "number"})
USER: dict[str, Any] = {"role": "user", "content": "1 + 2?"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}


async def say(session: Session, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    request = ask(messages, **more)
    message: dict[str, Any] = chat.answer(request, await session.complete(request))["choices"][0][
        "message"
    ]
    return message


async def test_a_conversation_keeps_its_ids_and_renders_only_what_is_new() -> None:
    # Written with other spaces and key order than any client would: a re-rendering would change the ids.
    written = '<tool_call>\n{"arguments":{"b":2,"a":1},  "name": "add"}\n</tool_call>'
    session = session_of([written, "3."])
    sent = (await say(session, [SYSTEM, USER], tools=[ADD]))["tool_calls"][0]
    # The client writes the message in its own way: arguments in another order, an extra key, content as null.
    sent = {**sent, "index": 0, "function": {"name": "add", "arguments": '{"b": 2,   "a": 1}'}}
    back = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [sent]}
    three, brief = ([{"type": "text", "text": text}] for text in ("3", "Be brief."))
    answer = {"role": "tool", "tool_call_id": sent["id"], "content": three}
    parts = [{"role": "system", "content": brief}, USER, back, answer]
    assert (await say(session, parts, tools=[ADD]))["content"] == "3."
    trace = await session.seal()
    assert trace.forks == 0 and [turn.parent for turn in trace.turns] == [None] * 5
    assert " ".join(turn.role for turn in trace.turns) == "system user assistant tool assistant"
    text = CHAT.decode(trace.tokens.ids)
    assert written in text and text.count("<tool_call>") == 1
    assert [drift.kind for drift in trace.drift] == ["reserialised"]
    assert trace.turns[3].results[0].text == "3"
    assert trace.turns[2].calls[0].arguments == {"a": 1, "b": 2}


async def test_a_message_that_was_split_in_two_is_joined() -> None:
    session = session_of(["Let me see.\n" + call("add", a=1, b=2), "3."])
    first = await say(session, [USER], tools=[ADD])
    assert first["content"] == "Let me see."
    halves = [{"role": "assistant", "content": "Let me see."}, {**first, "content": ""}]
    answer = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
    await say(session, [USER, *halves, answer], tools=[ADD])
    assert (await session.seal()).forks == 0


async def test_thinking_may_be_left_out_but_not_changed() -> None:
    session = session_of(["<think>Hm.</think>Yes.", "A.", "B.", "C."])
    first = await say(session, [USER])
    assert first["content"] == "Yes." and first["reasoning"] == first["reasoning_content"] == "Hm."
    for number, back in enumerate(
        ({"content": "Yes."}, {**first}, {"content": "Yes.", "reasoning": "Other."})
    ):
        await say(
            session,
            [USER, {"role": "assistant", **back}, {"role": "user", "content": f"{number}?"}],
        )
    turns = session.tree.turns
    # user, assistant; then twice a user after that assistant; the last one is after another assistant message.
    assert [turn.parent for turn in turns] == [None, None, None, None, 1, None, 0, None, None]
    assert session.tree.nodes[6].spoken is not None and not session.tree.nodes[6].sampled


async def test_a_summary_and_a_sub_agent_fork_and_share_what_is_equal() -> None:
    session = session_of(lambda key, ids: f"Answer to {len(ids)}.")
    first = await say(session, [SYSTEM, USER])
    more = [SYSTEM, USER, first, {"role": "user", "content": "More."}]
    await say(session, more)
    await say(session, [SYSTEM, {"role": "user", "content": "So far: 3. More."}])
    # Other tools are written at the start: another root.
    await say(session, [SYSTEM, USER], tools=[ADD])
    await say(session, [*more[:3], {"role": "user", "content": "Else."}])
    trace = await session.seal()
    parents = [turn.parent for turn in trace.turns]
    assert parents == [None, None, None, None, None, 0, None, ROOT, None, None, 2, None]
    assert (trace.forks, trace.drift) == (3, ())
    assert sum(turn.role == "system" for turn in trace.turns) == 2
    sampled = [trace.tokens.slice(t.start, t.end).trained_mask.any() for t in trace.turns]
    assert sum(sampled) == trace.calls == 5
    text = CHAT.decode(session.tree.nodes[6].ids)
    assert text.startswith("<|im_start|>system\nBe brief.")
    assert "So far: 3." in text and "1 + 2?" not in text


async def test_an_answer_that_the_client_made_up_is_context() -> None:
    session, go_on = session_of(["Fine."]), {"role": "user", "content": "Go on."}
    made_up, fine = ({"role": "assistant", "content": text} for text in ("I am made up.", "Fine."))
    await say(session, [USER, made_up, go_on])
    trace = await session.seal()
    turn, last = trace.turns[1], trace.turns[-1]
    assert set(trace.tokens.origin[turn.start : turn.end].tolist()) == {int(Origin.FORCED)}
    assert int(trace.tokens.trained_mask.sum()) == last.end - last.start
    whole = CHAT.rendered_ids([USER, made_up, go_on, fine])
    assert CHAT.decode(trace.tokens.ids) == CHAT.decode(whole).removesuffix("\n")


async def test_of_equal_answers_the_newest_is_continued() -> None:
    session = session_of(lambda key, ids: "Same.")
    first, again = [await say(session, [USER]) for _ in range(2)]
    assert first == again
    await say(session, [USER, again, {"role": "user", "content": "And?"}])
    assert [turn.parent for turn in session.tree.turns] == [None, None, 0, None, None]


class Noting(ScriptedPolicy):
    """Keeps how each answer was to be sampled."""

    def __init__(self, replies: list[str], tokenizer: Any) -> None:
        super().__init__(replies, tokenizer)
        self.seen: list[Sampling] = []

    async def generate(self, key: str, ids: Any, sampling: Sampling, **more: Any) -> Generation:
        self.seen.append(sampling)
        return await super().generate(key, ids, sampling, **more)


async def test_several_choices_are_siblings() -> None:
    texts = ["One.", "Two."]
    session = session_of(lambda key, ids: texts.pop(), choices=2)
    reply = await session.complete(ask([USER], n=2))
    assert sorted(choice.text for choice in reply.choices) == ["One.", "Two."]
    assert [turn.parent for turn in session.tree.turns] == [None, None, 0]
    with pytest.raises(RequestError, match="n = 3"):
        await session.complete(ask([USER], n=3))
    policy = Noting(["One."], CHAT.tokenizer)
    again = session_of(policy, choices=2, retries=False)
    for _ in range(2):
        await again.complete(ask([USER], n=2, seed=7))
    seeds = [sampling.seed for sampling in policy.seen]
    assert seeds[:2] == seeds[2:] and len({*seeds}) == 2


async def test_no_call_can_be_written_where_none_is_wanted() -> None:
    policy = Noting(["Hello."], CHAT.tokenizer)
    for choice in ("none", "auto"):
        await session_of(policy).complete(ask([USER], tools=[ADD], tool_choice=choice))
    opening, closing = map(CHAT.tokenizer.id_of, ("<tool_call>", "</tool_call>"))
    assert [sampling.bad_ids for sampling in policy.seen] == [(opening, closing), ()]


async def test_a_raw_prompt_continues_what_it_repeats() -> None:

    session = session_of(["b c", "d"])
    first = await session.complete(chat.parse_completion({"prompt": "a ", "max_tokens": 50}))
    assert first.choices[0].text == "b c"
    ids = [*first.prompt_ids, *first.choices[0].generation.ids.tolist(), 65]
    second = await session.complete(chat.parse_completion({"prompt": ids, "max_tokens": 50}))
    assert list(second.prompt_ids) == ids and second.cached == len(ids) - 1
    trace = await session.seal()
    assert [turn.parent for turn in trace.turns] == [None] * 4 and trace.drift == ()


async def test_a_malformed_call_reaches_the_agents_own_validation() -> None:
    session = session_of([NAMED, "Sorry."])
    first = await say(session, [USER], tools=[ADD])
    (made,) = first["tool_calls"]
    assert made["function"]["name"] == "add"
    arguments = made["function"]["arguments"]
    assert '"_raw_arguments"' in arguments and '{\\"a\\": 1,}' in arguments
    answer = {"role": "tool", "tool_call_id": made["id"], "content": "bad arguments"}
    await say(session, [USER, first, answer], tools=[ADD])
    trace = await session.seal()
    assert trace.forks == 0 and trace.turns[1].calls[0].error
    assert "structural" not in {drift.kind for drift in trace.drift}


WELL, NAMED = (
    call("add", a=1, b=2),
    '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>',
)
OTHER = NAMED.replace("add", "zzz")


@pytest.mark.parametrize(
    "beside", [[], [{**ADD, "function": {**ADD["function"], "name": "other"}}]]
)
@pytest.mark.parametrize(
    "text", ["Answer: 6\n</tool_call>", "Use <tool_call> to call.", OTHER, "<tool_call>{"]
)
async def test_a_text_that_calls_no_tool_of_the_request_stays_text(
    text: str, beside: list[Any]
) -> None:
    said = await say(session_of([text]), [USER], tools=[ADD, *beside])
    assert (said["content"], said.get("tool_calls")) == (text, None)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"Both.\n{WELL}\n{OTHER}", 1, 'Both.\n{"name": "zzz", "arguments": {"a": 1,}}'),
        (f"{OTHER}\n{WELL}", 1, '{"name": "zzz", "arguments": {"a": 1,}}'),
        (f"{WELL}\n{NAMED}", 2, None),
    ],
)
async def test_a_valid_call_is_sent_beside_an_unreadable_one(
    text: str, calls: int, content: str | None
) -> None:
    session = session_of([text, "3"])
    said = await say(session, [USER], tools=[ADD])
    assert len(said["tool_calls"]) == calls and said["content"] == content
    made = [json.loads(one["function"]["arguments"]) for one in said["tool_calls"]]
    assert made[0] == {"a": 1, "b": 2}
    answers = [
        {"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in said["tool_calls"]
    ]
    assert (await say(session, [USER, said, *answers], tools=[ADD]))["content"] == "3"
    assert (await session.seal()).forks == 0


async def test_results_of_made_up_calls_have_the_calls_they_answer_in_their_order() -> None:
    session = session_of(["3."])
    calls = [
        {"id": id, "type": "function", "function": {"name": "add", "arguments": text}}
        for id, text in (("x", '{"b": 2, "a": 1}'), ("y", "{}"))
    ]
    answers = [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in "yx"]
    back = {"role": "assistant", "content": "", "tool_calls": calls}
    await say(session, [USER, back, *answers], tools=[ADD])
    turns = (await session.seal()).turns
    assert [call.arguments for call in turns[1].calls] == [{"a": 1, "b": 2}, {}]
    assert [one.text for one in turns[2].results] == ["of x", "of y"]
    assert turns[2].messages[0]["name"] == "add"
