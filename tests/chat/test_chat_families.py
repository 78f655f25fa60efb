"""Every family of models, with tools: its real template if a package ships it, else one after its documented form.

A scripted model answers in the family's own syntax; the real agent loop executes the call, appends the result as the
template's delta, and the drift guard compares each turn and the whole with the template's own rendering.
Nothing correct is cut, dropped or skipped, and what would be skipped is reported before training.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli import ByteTokenizer, Chat, Config, Pack, Reward, ScriptedPolicy
from agentrl_cli.chat import families
from agentrl_cli.chat.audit import Conversations, audit, require_append_only, require_calls_read
from agentrl_cli.chat.drift import check_delta
from agentrl_cli.chat.drift import check_episode as find_drift
from agentrl_cli.chat.parsers import PARSERS, load_parser
from agentrl_cli.chat.template_probe import MARK, PROBE_TOOL, tool, user
from agentrl_cli.chat.template_syntax import Abilities
from agentrl_cli.chat.tiny_template import tiny_template
from agentrl_cli.chat.tokenizer import AddedToken
from agentrl_cli.commands import main
from agentrl_cli.envs.user_simulator import Scripted
from agentrl_cli.errors import TemplateError
from agentrl_cli.policies.load import load_policy
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.rehearse import rehearse
from agentrl_cli.runtime import conversations
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tools.schema import tool_schema
from agentrl_cli.types import Episode, Message, Origin, Outcome, StopReason
from tests.chat.test_template import MINIMIND
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
from tests.helpers.template import templates_of
from tests.helpers.train import trainer_of, write_model, write_pack

# After the documented format (https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct): ChatML, a system text of its
# own if the conversation has none, and no tools.
SMOLLM2 = """{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
WRITTEN = {"minimind": MINIMIND, "SmolLM2": SMOLLM2}

CPP, TRL, AXOLOTL, OWN = "llama-cpp-python", "trl", "axolotl", "written here"
# One of each kind, since test_template_sweep.py plays every shipped one. source, template -> the detected parser, and
# what the template lacks: s(ystem) t(ools) c(alls) r(esults)
FAMILIES: dict[tuple[str, str], tuple[str, str]] = {
    (CPP, "Qwen-Qwen2.5-7B-Instruct"): ("hermes", ""),
    (TRL, "llama3"): ("hermes", "tc"),
    (AXOLOTL, "mistral_v1"): ("hermes", "tcr"),
    (CPP, "google-gemma-2-2b-it"): ("hermes", "stcr"),
    (CPP, "deepseek-ai-DeepSeek-V3.1"): ("deepseek", "t"),
    (CPP, "Kimi-K3"): ("kimi_k3", ""),
    (TRL, "gemma4"): ("gemma4", ""),
    (CPP, "HuggingFaceTB-SmolLM3-3B"): ("hermes", "tc"),
    (OWN, "SmolLM2"): ("hermes", "tc"),
    (CPP, "GLM-4.6"): ("glm", ""),
    (OWN, "minimind"): ("hermes", ""),
}
# The same for families whose parser a plugin brings; they are played with its tests.
OF_PLUGINS = {
    (CPP, "muse-glimmer"): ("muse_glimmer", ""),
    (CPP, "meetkai-functionary-medium-v3.2"): ("functionary_v32", ""),
}
CHANNELS = {"Kimi-K3", "muse-glimmer", "meetkai-functionary-medium-v3.2"}


def template(source: str, name: str) -> str:
    return (WRITTEN if source == OWN else templates_of(source))[name]


def chat_of(source: str, name: str, append_only: bool = False) -> Chat:
    return Chat(
        tokenizer_for(template(source, name)), "auto", append_only, now=datetime(2026, 1, 2)
    )


async def episode_of(chat: Chat, replies: Sequence[str]) -> tuple[Episode, Rollout]:
    right = Reward("right", lambda episode, ctx: ctx.part(float(ctx.final_text.endswith("12"))))
    pack = Pack.of("sums", [{"prompt": "5 + 7?"}], [right], tools=[add], system="Use <tools>.")
    limits = {"max_tokens": 12000, "max_new_tokens": 400, "max_turns": 4}
    policy = ScriptedPolicy(list(replies), chat.tokenizer)
    rollout = Rollout(policy, chat, {"sums": pack}, Config.model_validate({"rollout": limits}))
    return await rollout.episode(Job(pack.tasks("train")[0], 1)), rollout


def called(chat: Chat) -> str:
    """A call in the family's syntax, with its own stop token if that differs from an answer's (GLM)."""
    own = chat.stops.after_call
    return chat.parser.example("add", {"a": 5, "b": 7}) + (
        "" if own == chat.stops.texts[0] else own
    )


@pytest.mark.parametrize(("source", "name"), FAMILIES)
async def test_a_tool_episode_of_every_family(source: str, name: str) -> None:
    await check_episode(source, name, FAMILIES[source, name])


async def check_episode(source: str, name: str, wanted: tuple[str, str]) -> None:
    chat = chat_of(source, name)
    parser, lacks = wanted
    assert chat.parser.name == parser and chat.syntax.reads_calls
    assert replace(chat.able, lone_results=True) == Abilities(
        *(letter not in lacks for letter in "stcr")
    )
    require_append_only(chat)
    call, answer = called(chat), "It is 12"
    thinking = chat.decode(chat.prompt([user("u")], [PROBE_TOOL]).ids).rstrip().endswith("<think>")
    before = "\n</think>\n\n" if thinking else ""
    if name in CHANNELS:  # a turn names its recipient: written as the template does
        schema = tool_schema(add)
        arguments = {"name": "add", "arguments": {"a": 5, "b": 7}}
        message: Message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": arguments}],
        }
        call = chat.assistant_text(message, [schema])
        answer = chat.assistant_text({"role": "assistant", "content": answer}, [schema])
    episode, rollout = await episode_of(chat, [before + call, before + call, before + answer])
    assert (episode.outcome, episode.error) == (Outcome.SOLVED, "")
    results = [result.text for turn in episode.turns for result in turn.results]
    assert results == ["12", "12"] and episode.tool_errors == 0
    text = chat.decode(episode.tokens.ids)
    assert text.count("12") >= 3 and "Add two numbers." in text and "Use <tools>." in text
    said = [
        chat.decode(episode.tokens.ids[t.start : t.end])
        for t in episode.turns
        if t.role == "assistant"
    ]
    assert all(call in one for one in said[:2])
    # Spaces (the script writes as the parser does) and thinking, which some templates drop, may differ; nothing else.
    kinds = set(rollout.drift.values())
    assert kinds <= {"reserialised", "by_design"}
    assert "by_design" not in kinds or "think" in text or audit(chat).thinking_by_design


REFUSED = [
    (TRL, "deepseekv3", "two tool turns"),
    (CPP, "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "it begins an earlier turn differently"),
]


@pytest.mark.parametrize(("source", "name", "reason"), REFUSED)
async def test_refused_with_the_reason_and_trained_if_the_user_insists(
    source: str, name: str, reason: str
) -> None:
    with pytest.raises(TemplateError, match=reason) as caught:
        require_append_only(chat_of(source, name))
    assert "model.chat.append_only=true" in caught.value.hint
    chat = chat_of(source, name, append_only=True)
    require_append_only(chat)
    call = called(chat)
    episode, rollout = await episode_of(chat, [call, f"</think>{call}", "It is 12"])
    assert (episode.outcome, episode.error) == (Outcome.SOLVED, "")
    assert set(rollout.drift.values()) <= {"by_design", "reserialised"}


@pytest.mark.parametrize(
    ("source", "name"),
    [(TRL, "gemma4"), (CPP, "Qwen-Qwen2.5-7B-Instruct"), (CPP, "deepseek-ai-DeepSeek-V4")],
)
async def test_a_malformed_call_is_answered_in_a_role_that_the_template_shows(
    source: str, name: str
) -> None:
    chat = chat_of(source, name)
    call = called(chat)
    marker = chat.parser.markers[-1 if name != "gemma4" else 1]
    broken = chat.parser.example("add", {"a": 5, "b": 7}).replace(marker, "", 1)
    episode, rollout = await episode_of(chat, [broken, call, "It is 12"])
    assert (episode.outcome, episode.error, episode.tool_errors) == (Outcome.SOLVED, "", 1)
    assert "Malformed tool call: " in chat.decode(episode.tokens.ids)
    assert set(rollout.drift.values()) <= {"reserialised", "by_design"}
    assert chat.able.lone_results == (name != "gemma4")


WOULD_SKIP: dict[tuple[str, str], list[str]] = {
    (TRL, "gemma4"): [],
    (CPP, "openai-gpt-oss-120b"): [],
    (CPP, "deepseek-ai-DeepSeek-V3.2"): [],
    (CPP, "Qwen-Qwen3-0.6B"): [],
}


@pytest.mark.parametrize(("source", "name"), WOULD_SKIP)
async def test_what_a_training_would_skip_of_a_family_is_said(source: str, name: str) -> None:
    await check_would_skip(source, name, WOULD_SKIP[source, name])


async def check_would_skip(source: str, name: str, wanted: list[str]) -> None:
    assert [finding.what for finding in await rehearse(chat_of(source, name))] == wanted


# --- what a template lacks --------------------------------------------------------------------------------------------


def test_messages_in_the_roles_that_a_template_has() -> None:
    chat = chat_of(CPP, "google-gemma-2-2b-it")
    text = chat.decode(
        chat.prompt([{"role": "system", "content": "Be brief."}, user("u")], [PROBE_TOOL]).ids
    )
    schema = json.dumps(PROBE_TOOL["function"])
    example = '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
    assert text == (
        "<s><start_of_turn>user\nBe brief.\n\n# Tools\n\nYou may call these functions; each line describes one as JSON"
        f" Schema:\n{schema}\n\nTo call a function, write exactly this, with its name and arguments:\n{example}"
        "\n\nu<end_of_turn>\n<start_of_turn>model\n"
    )
    said = chat.parse(chat.tokenizer.encode(chat.parser.example("probe", {"x": "1"})), [PROBE_TOOL])
    both: list[Message] = [tool("42"), tool("<end_of_turn>", "c00000001")]
    delta = chat.extend([user("u"), said.message], both, [PROBE_TOOL])
    assert delta.text == (
        "\n<start_of_turn>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n<end_of_turn>\n</tool_response>"
        "<end_of_turn>\n<start_of_turn>model\n"
    )
    assert delta.ids.count(chat.stop_ids[0]) == 1, "a result cannot write the stop token"
    alone = chat.decode(chat.prompt([user("u")]).ids)
    assert alone == "<s><start_of_turn>user\nu<end_of_turn>\n<start_of_turn>model\n"


# --- the parser that fits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARSERS)
def test_the_parser_is_found_by_reading_what_the_template_writes(name: str) -> None:
    check_detection(name)


def check_detection(name: str) -> None:
    """A template whose source has no telling text writes calls as `name` does: that parser is chosen."""
    written = load_parser(name).example("probe", {"x": MARK}).split(MARK)
    head, tail = (json.dumps(part, ensure_ascii=False) for part in written)
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.tool_calls %}{{ "
        + head
        + " + m.tool_calls[0].function.arguments.x + "
        + tail
        + " }}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat = Chat(tokenizer_for(source), "auto")
    assert (
        chat.syntax.reads_calls
        and chat.parser.parse(load_parser(name).example("probe", {"x": "1"}), [PROBE_TOOL]).calls
    )


def test_a_syntax_without_a_parser_is_refused_for_tools() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ 'CALL ' + c.function.name + ' ' + c.function.arguments.x }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat = Chat(tokenizer_for(source), "auto")
    with pytest.raises(TemplateError, match="hermes does not read the tool calls"):
        require_calls_read(chat)
    report = audit(chat)
    assert (
        report.ok
        and not report.reads_calls
        and any("model.chat.parser" in note for note in report.notes)
    )


def test_template_variables_of_the_configuration_reach_the_template(tmp_path: Path) -> None:
    source = (
        "{% if enable_thinking is defined %}{{ 'thinking ' + enable_thinking | string }}{% endif %}"
        + tiny_template()
    )
    model = {
        "name": str(write_model(tmp_path, template=source)),
        "template_variables": {"enable_thinking": False},
    }
    for given, begins in (
        (model, "thinking False<|im_start|>"),
        ({"name": model["name"]}, "<|im_start|>"),
    ):
        loaded = load_policy(None, Config.model_validate({"model": given}), base=tmp_path)
        asyncio.run(loaded.policy.close())
        assert loaded.chat.decode(loaded.chat.prompt([user("u")]).ids).startswith(begins)


BASE = {
    "chatml": (ByteTokenizer.CONTROL, "<|im_end|>", ""),
    "llama3": (
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        "<|end_of_text|>",
        "<|begin_of_text|>",
    ),
    "gemma": (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>"),
    "plain": (("<s>", "</s>"), "</s>", "<s>"),
}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_base_model_gets_a_template_of_its_family_that_can_be_trained_with(name: str) -> None:
    control, eos, bos = BASE[name]
    tokenizer = ByteTokenizer("", control=control, words=(), eos=eos, bos=bos)
    with pytest.raises(TemplateError) as error:
        Chat(tokenizer)
    assert f"model.chat.template={name}," in error.value.hint
    tokenizer.chat_template = families.family_template(name)
    chat = Chat(tokenizer, "auto")
    report = audit(chat)
    assert (
        report.append_only
        and report.stop_token_trained
        and report.reads_calls
        and not report.problems
    )
    assert report.supports_tools and report.supports_system and report.parallel_calls
    assert chat.prompt([user("Hi.")]).text.startswith(bos + families.FAMILIES[name].token)


def test_a_family_is_known_by_a_token_that_is_the_first_of_its_vocabulary() -> None:
    tokenizer = ByteTokenizer("")
    tokenizer.added = (AddedToken(0, "<|im_start|>", True),)
    assert families.family_of(tokenizer) == "chatml"


# --- how families end turns, think and call, with templates that are written here ---

ANALYSIS = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
GPT_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 5, "b": 7}<|call|>'
GPT_ANSWER = "<|channel|>final<|message|>It is 12<|return|>"


def chat_by(source: str, more: Sequence[str] = (), **options: Any) -> Chat:
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
    chat = chat_by(GPT_OSS)
    assert chat.parser.name == "harmony"
    assert {chat.tokenizer.token_text(id_) for id_ in chat.stop_ids} == set(GPT_OSS_ENDS)
    assert require_append_only(chat).ok and await rehearse(chat) == ()
    episode, rollout = await episode_of(chat, [call, ANALYSIS + GPT_ANSWER])
    assert (episode.outcome, results(episode)) == (Outcome.SOLVED, ["12"])
    assert sampled(chat, episode) == [call, ANALYSIS + GPT_ANSWER], "sampled tokens are kept"
    assert set(rollout.drift.values()) <= {"reserialised", "by_design"}


async def test_gpt_oss_has_one_end_after_an_answer_that_the_user_goes_on_from() -> None:
    chat = chat_by(GPT_OSS)
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
    found = {drift.kind for drift in find_drift(episode, chat, pack.schemas)}
    assert found == {"by_design"}, "the history has <|end|> where <|return|> was sampled"


def test_a_gpt_oss_demonstration_ends_with_what_the_model_samples() -> None:
    chat = chat_by(GPT_OSS)
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
    said: Message = {"role": "assistant", "content": "Done.", "tool_calls": []}
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
    chat = chat_by(gemma4())
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
    drifts = find_drift(text.with_(tokens=spoilt), chat, [tool_schema(add)])
    assert "structural" in {drift.kind for drift in drifts}, "what follows the text is compared"


# --- LFM2 -------------------------------------------------------------------------------------------------------------


async def test_the_calls_of_lfm2_are_found_by_its_tokens() -> None:
    chat = chat_by(LFM2, LFM2_CALLS)
    assert chat.parser.name == "lfm2" and not chat.able.calls
    assert chat_by(LFM2).parser.name == "lfm2", (
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
    chat = chat_by(GIVEN[family])
    assert require_append_only(chat).ok
    own = chat.stops.after_call if chat.stops.after_call != chat.stops.texts[0] else ""
    call = chat.parser.example("add", {"a": 5, "b": 7}) + own
    closed = "\n</think>\n\n" if chat.opens else ""
    episode, rollout = await episode_of(chat, [closed + call, closed + call, f"{closed}It is 12"])
    assert (episode.outcome, results(episode)) == (Outcome.SOLVED, ["12", "12"])
    assert set(rollout.drift.values()) <= {"reserialised", "by_design"}


def test_a_lost_result_beside_given_thinking_is_still_structural() -> None:
    chat = chat_by(GIVEN["DeepSeek-V3.2"])
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
    small, nemo = chat_by(mistral(True)), chat_by(mistral(False))
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
