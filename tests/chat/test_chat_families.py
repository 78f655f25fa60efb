"""Every family of models, with tools: its real template if a package ships it, else one after its documented form.

A scripted model answers in the family's own syntax; the real agent loop executes the call, appends the result as the
template's delta, and the drift guard compares each turn and the whole with the template's own rendering.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from agentrl_cli import ByteTokenizer, Chat, Config, Pack, Reward, ScriptedPolicy
from agentrl_cli.chat import families
from agentrl_cli.chat.audit import audit, require_append_only, require_calls_read
from agentrl_cli.chat.parsers import PARSERS, load_parser
from agentrl_cli.chat.template_probe import MARK, PROBE_TOOL, tool, user
from agentrl_cli.chat.template_syntax import Abilities
from agentrl_cli.chat.tiny_template import tiny_template
from agentrl_cli.chat.tokenizer import AddedToken
from agentrl_cli.errors import TemplateError
from agentrl_cli.policies.load import load_policy
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.rehearse import rehearse
from agentrl_cli.tools.schema import tool_schema
from agentrl_cli.types import Episode, Message, Outcome
from tests.chat.test_template import MINIMIND
from tests.helpers.chat import add, tokenizer_for
from tests.helpers.template import templates_of
from tests.helpers.train import write_model

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
