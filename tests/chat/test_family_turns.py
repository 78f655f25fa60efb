"""How families end turns, think and call, through the real loop: nothing correct is cut, dropped or skipped, and what
would be skipped is reported before training. The templates are written here, so that nothing is fetched.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli import ByteTokenizer, Chat, Config, Pack, Reward, ScriptedPolicy
from agentrl_cli.chat.audit import Conversations, require_append_only
from agentrl_cli.chat.drift import check_delta, check_episode
from agentrl_cli.chat.template_probe import PROBE_TOOL, tool, user
from agentrl_cli.commands import main
from agentrl_cli.envs.user_simulator import Scripted
from agentrl_cli.errors import TemplateError
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.rehearse import rehearse
from agentrl_cli.runtime import conversations
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tools.schema import tool_schema
from agentrl_cli.types import Episode, Message, Origin, Outcome, StopReason
from tests.chat.test_chat_families import episode_of
from tests.helpers.chat import GPT_OSS_ENDS, add, tokenizer_for
from tests.helpers.cli import Cli
from tests.helpers.family_templates import (
    COHERE2,
    GIVEN,
    GPT_OSS,
    LFM2,
    LFM2_CALLS,
    TEXT_MOVES,
    gemma4,
    mistral,
)
from tests.helpers.train import trainer_of, write_model, write_pack

ANALYSIS = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
GPT_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 5, "b": 7}<|call|>'
GPT_ANSWER = "<|channel|>final<|message|>It is 12<|return|>"


def chat_of(source: str, more: Sequence[str] = (), **options: Any) -> Chat:
    return Chat(tokenizer_for(source, more), "auto", now=datetime(2026, 1, 2), **options)


def results(episode: Episode) -> list[str]:
    return [result.text for turn in episode.turns for result in turn.results]


def sampled(chat: Chat, episode: Episode) -> list[str]:
    own = [episode.tokens.ids[t.start : t.end] for t in episode.turns if t.role == "assistant"]
    return [chat.decode(ids) for ids in own]


# --- gpt-oss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        ANALYSIS + GPT_CALL,
        # as the model writes it: the recipient after the channel, the format as a constraint
        f'{ANALYSIS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a":5,"b":7}}<|call|>',
        f"<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{GPT_CALL}",
        GPT_CALL,
    ],
)
async def test_gpt_oss_goes_on_after_its_analysis(call: str) -> None:
    chat = chat_of(GPT_OSS)
    assert chat.parser.name == "harmony"
    assert {chat.tokenizer.token_text(id_) for id_ in chat.stop_ids} == set(GPT_OSS_ENDS)
    assert require_append_only(chat).ok and await rehearse(chat) == ()
    episode, rollout = await episode_of(chat, [call, ANALYSIS + GPT_ANSWER])
    assert (episode.outcome, results(episode)) == (Outcome.SOLVED, ["12"])
    assert sampled(chat, episode) == [call, ANALYSIS + GPT_ANSWER], "sampled tokens are kept"
    assert set(rollout.drift.values()) <= {"reserialised", "by_design"}


async def test_gpt_oss_has_one_end_after_an_answer_that_the_user_goes_on_from() -> None:
    chat = chat_of(GPT_OSS)
    pack = Pack.of(
        "sums", [{"prompt": "5 + 7?"}], [Reward("right", lambda episode, ctx: 1.0)], tools=[add]
    )
    pack = replace(pack, interactions={"user": lambda: Scripted(["Sure?"])})
    policy = ScriptedPolicy(
        [ANALYSIS + GPT_CALL, GPT_ANSWER, ANALYSIS + GPT_ANSWER], chat.tokenizer
    )
    rollout = Rollout(
        policy, chat, {"sums": pack}, Config.model_validate({"rollout": {"max_tokens": 9000}})
    )
    episode = await rollout.episode(Job(pack.tasks("train")[0], 1, kind="train"))
    text = chat.decode(episode.tokens.ids)
    assert (
        "It is 12<|return|><|start|>user<|message|>Sure?<|end|><|start|>assistant<|channel|>analysis"
        in text
    )
    assert episode.outcome is Outcome.SOLVED and set(rollout.drift.values()) == {"by_design"}
    found = {drift.kind for drift in check_episode(episode, chat, pack.schemas)}
    assert found == {"by_design"}, "the history has <|end|> where <|return|> was sampled"


def test_a_gpt_oss_demonstration_ends_with_what_the_model_samples() -> None:
    chat = chat_of(GPT_OSS)
    call: Message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "c00000000",
                "type": "function",
                "function": {"name": "probe", "arguments": {"x": "1"}},
            }
        ],
    }
    said: Message = {"role": "assistant", "content": "Done."}
    shown = chat.conversation([user("u"), call, tool("r"), said, user("v"), said], [PROBE_TOOL])
    own = [
        chat.decode(shown.ids[start:end]) for role, start, end in shown.spans if role == "assistant"
    ]
    final = "<|channel|>final<|message|>Done.<|return|>"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert own == [
        f'{thought} to=functions.probe<|channel|>commentary json<|message|>{{"x": "1"}}<|call|>',
        *[final] * 2,
    ]
    trained = [
        id_ for id_, origin in zip(shown.ids, shown.origin, strict=True) if origin == Origin.MODEL
    ]
    assert chat.decode(trained) == "".join(own)


def test_an_end_token_that_is_the_models_own_is_not_swapped() -> None:
    """With `<|end|>` as the model's end token, a history with another one is the template's fault."""
    chat = Chat(tokenizer_for(GPT_OSS, ends=("<|end|>",)), "auto", now=datetime(2026, 1, 2))
    assert chat.stops.history == "" and chat.tokenizer.id_of("<|end|>") in chat.stop_ids


# --- Gemma 4 ----------------------------------------------------------------------------------------------------------

GEMMA_CALL = "<|tool_call>call:add{a:5,b:7}<tool_call|><|tool_response>"
GEMMA_THOUGHT = "<|channel>thought\nhm\n<channel|>"


async def test_gemma4_thinks_or_says_something_before_a_call() -> None:
    chat = chat_of(gemma4())
    thinking, rollout = await episode_of(
        chat, [GEMMA_THOUGHT + GEMMA_CALL] * 2 + [GEMMA_THOUGHT + "It is 12"]
    )
    assert (thinking.outcome, results(thinking)) == (Outcome.SOLVED, ["12", "12"])
    assert set(rollout.drift.values()) <= {"reserialised", "by_design"}
    assert thinking.turns[2].messages[0]["reasoning_content"] == "hm"
    hidden, _ = await episode_of(chat, [f"<|channel>thought\n{GEMMA_CALL}\n<channel|>It is 12"])
    assert results(hidden) == [], "a call that is only thought of is none"
    assert await rehearse(chat) == ()
    text, rollout = await episode_of(chat, [f"Let me see.{GEMMA_CALL}", "It is 12"])
    assert text.outcome is Outcome.SOLVED and set(rollout.drift.values()) == {"by_design"}
    spoilt = replace(text.tokens, ids=text.tokens.ids.copy())
    (at,) = np.flatnonzero(spoilt.ids == chat.tokenizer.id_of("<tool_response|>"))
    spoilt.ids[at] = chat.stop_ids[0]
    drifts = check_episode(text.with_(tokens=spoilt), chat, [tool_schema(add)])
    assert "structural" in {drift.kind for drift in drifts}, "what follows the text is compared"


# --- LFM2 -------------------------------------------------------------------------------------------------------------


async def test_the_calls_of_lfm2_are_found_by_its_tokens() -> None:
    chat = chat_of(LFM2, LFM2_CALLS)
    assert chat.parser.name == "lfm2" and not chat.able.calls
    assert chat_of(LFM2).parser.name == "lfm2", (
        "a tokenizer whose tokens for calls are not added tokens"
    )
    (finding,) = await rehearse(Chat(tokenizer_for(LFM2, LFM2_CALLS), "hermes"))
    assert (
        str(finding).startswith("calls in the syntax of lfm2 would not be executed")
        and finding.parser == "lfm2"
    )
    call = "<|tool_call_start|>[add(a=5, b=7)]<|tool_call_end|>"
    episode, rollout = await episode_of(chat, [call, f"I add.\n{call}", "It is 12"])
    assert (episode.outcome, results(episode)) == (Outcome.SOLVED, ["12", "12"])
    assert set(rollout.drift.values()) <= {"reserialised"}


# --- Command R7B ------------------------------------------------------------------------------------------------------


async def test_cohere2_ends_its_text_and_then_its_turn() -> None:
    """The model samples both tokens; only the second one is its end token, and neither is what it says."""
    chat = Chat(tokenizer_for(COHERE2, ends=("<|END_OF_TURN_TOKEN|>",)), "auto")
    assert [chat.decode([id_]) for id_ in chat.stop_ids] == ["<|END_OF_TURN_TOKEN|>"]
    assert await rehearse(chat) == () and require_append_only(chat).ok
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 7}}\n</tool_call>'
    episode, rollout = await episode_of(
        chat, [f"{text}<|END_RESPONSE|>" for text in (call, "It is 12")]
    )
    assert (episode.outcome, results(episode), set(rollout.drift.values())) == (
        Outcome.SOLVED,
        ["12"],
        set(),
    )
    assert sampled(chat, episode)[1] == "It is 12<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    assert episode.messages[-1]["content"] == "It is 12"
    cut_off = [chat.tokenizer.encode(text) for text in ("Cut off", "Cut off<|END_RESPONSE|>")]
    forced = [chat.decode(chat.close_turn(StopReason.LENGTH, ids)) for ids in cut_off]
    assert forced == ["<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"]


# --- thinking that the prompt begins ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", GIVEN)
async def test_given_thinking_that_the_history_has_otherwise_is_by_design(family: str) -> None:
    chat = chat_of(GIVEN[family])
    assert require_append_only(chat).ok
    own = chat.stops.after_call if chat.stops.after_call != chat.stops.texts[0] else ""
    call = chat.parser.example("add", {"a": 5, "b": 7}) + own
    closed = "\n</think>\n\n" if chat.opens else ""
    episode, rollout = await episode_of(chat, [closed + call, closed + call, f"{closed}It is 12"])
    assert (episode.outcome, results(episode)) == (Outcome.SOLVED, ["12", "12"])
    assert set(rollout.drift.values()) <= {"reserialised", "by_design"}


def test_a_lost_result_beside_given_thinking_is_still_structural() -> None:
    chat = chat_of(GIVEN["DeepSeek-V3.2"])
    said = chat.parse(chat.tokenizer.encode("yes")).message
    ids = [*chat.prompt([user("u")]).ids, *chat.assistant_ids(said)]
    more = chat.extend([user("u"), said], [user("v")], last_id=ids[-1]).ids
    lost = [id_ for id_ in more if id_ != chat.tokenizer.encode("v")[0]]
    for delta, kinds in ((more, []), (lost, ["structural"])):
        found = check_delta(chat, chat.assistant_ids(said), delta, said, [user("v")])
        assert [drift.kind for drift in found] == kinds


# --- what a pack's conversations can contain --------------------------------------------------------------------------


# Its prompt changes with a second user message.
MOVING = """\
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- if users | length > 1 %}{{- '<|im_start|>system\\nGo on.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\\n' + {'name': c.function.name, 'arguments': c.function.arguments}|tojson + '\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def pack_of(**changes: Any) -> Pack:
    pack = Pack.of("p", [{"prompt": "Go."}], [Reward("r", lambda episode, ctx: 1.0)], tools=[add])
    return replace(pack, **changes)


def test_a_pack_without_the_training_split_adds_nothing_to_it(tmp_path: Path) -> None:
    other = pack_of(rows=None, dir=tmp_path)
    alone = conversations([pack_of()], "train")
    assert conversations([pack_of(), other], "train") == alone


def test_mistral_is_judged_by_the_conversations_of_the_pack() -> None:
    small, nemo = chat_of(mistral(True)), chat_of(mistral(False))
    plain, spoken = (
        conversations([pack_of()], "train"),
        conversations([pack_of(system="Be brief.")], "train"),
    )
    rows = ({"id": "1", "prompt": [{"role": "system", "content": "s"}, user("u")]},)
    assert conversations([pack_of(rows=rows)], "train") == spoken != plain
    answered = conversations([pack_of(interactions={"user": lambda: Scripted(["So?"])})], "train")
    assert (plain.lacking, answered.users) == ("a second user message or a system text", True)
    assert require_append_only(small, plain).ok and require_append_only(small, spoken).ok
    assert require_append_only(nemo, plain).ok
    for chat, which in (
        (small, answered),
        (nemo, answered),
        (nemo, spoken),
        (small, Conversations()),
    ):
        with pytest.raises(
            TemplateError, match="it rewrites the prompt when the conversation continues"
        ):
            require_append_only(chat, which)


def test_a_training_of_a_moving_template_depends_on_the_pack(tmp_path: Path) -> None:
    project = tmp_path / "p"
    write_pack(project)
    (project / "agentrl.yaml").write_text(
        json.dumps(
            {
                "model": {
                    "name": str(write_model(tmp_path / "m", template=MOVING)),
                    "device": "cpu",
                },
                "rollout": {
                    "group_size": 2,
                    "prompts_per_step": 1,
                    "max_new_tokens": 4,
                    "max_tokens": 96,
                },
                "train": {"steps": 1},
            }
        )
    )
    assert main(["train", "--project", str(project)]) == 0
    task = project / "task.yaml"
    task.write_text(task.read_text() + "interaction:\n  - {name: user, script: [Sure?]}\n")
    assert main(["train", "--project", str(project)]) != 0


# --- reported before it starts ----------------------------------------------------------------------------------------


async def test_a_training_says_at_its_start_what_it_would_skip(tmp_path: Path) -> None:
    project = tmp_path / "p"
    write_pack(project)
    (project / "task.yaml").write_text(
        (project / "task.yaml").read_text() + "tools: [calculator]\n"
    )
    folder = write_model(tmp_path / "m", template=TEXT_MOVES)
    limits = {"max_tokens": 900, "group_size": 2, "prompts_per_step": 1}
    for structural, wanted in (("skip", 1), ("train", 0)):
        narrated: list[str] = []
        drift = {"structural": structural}
        async with trainer_of(
            project, folder, train={"steps": 1}, rollout=limits, drift=drift
        ) as trainer:
            trainer.reporter.narrate = narrated.append
            await trainer.train()
            alerts = {
                a["name"]: a["count"] for a in trainer.store.journal.folded_alerts(trainer.run.id)
            }
        lines = [
            line for line in narrated if "text before a call would be skipped as drift" in line
        ]
        assert (len(lines), alerts.get("drift", 0)) == (wanted, wanted)


def test_doctor_says_what_would_be_skipped_and_what_a_pack_must_lack(
    tmp_path: Path, cli: Cli
) -> None:
    write_model(tmp_path / "m", template=TEXT_MOVES)
    shown = cli("doctor", "--template", "./m")
    assert "! text, thinking and mistakes around a call are trained: False" in shown
    assert "text before a call would be skipped as drift" in shown
    (tmp_path / "m" / "chat_template.jinja").write_text(MOVING)
    report = cli.json("doctor", "--template", "./m")
    assert (report["append_only"], report["append_only_without"]) == (
        False,
        "a second user message",
    )
    assert report["would_skip"] == []


# --- calls of another family ------------------------------------------------------------------------------------------


async def test_calls_that_the_parser_does_not_read_raise_one_alert_a_run(tmp_path: Path) -> None:
    chat = Chat(ByteTokenizer(), "hermes")
    pack = pack_of(rows=tuple({"id": str(n), "prompt": "Go."} for n in range(4)))
    turns = {
        "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 5, "b": 7}}]',
        "lfm2": "Hm. <|tool_call_start|>[add(a=5, b=7",
        "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\n7\n</parameter>\n"
        "</function>\n</tool_call>",
        "": "I would call add(5, 7) now.",
    }
    with Store.open(tmp_path / "s.db") as store:
        for name, text in turns.items():
            run = store.runs.add(RunRow(id="", name=f"run-{name}", kind="train", config={}))
            policy = ScriptedPolicy([text, "ok"], chat.tokenizer)
            rollout = Rollout(policy, chat, {"p": pack}, Config(), store=store, run=run)
            await rollout.run(
                [Job(task, n, run_id=run.id) for n, task in enumerate(pack.tasks("train"))]
            )
            alerts = [
                alert for alert in store.journal.folded_alerts(run.id) if alert["name"] == "parser"
            ]
            assert [alert["count"] for alert in alerts] == [1] * bool(name)
            assert all(f"model.chat.parser={name}." in alert["text"] for alert in alerts)
        policy = ScriptedPolicy(
            [chat.parser.example("add", {"a": 5, "b": 7}), turns["mistral"]], chat.tokenizer
        )
        rollout = Rollout(policy, chat, {"p": replace(pack, tools=())}, Config(), store=store)
        await rollout.episode(Job(pack.tasks("train")[0], 0))
        assert rollout.foreign == "", "without tools nothing has to be read"
