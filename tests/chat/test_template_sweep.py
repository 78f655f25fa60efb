"""Every chat template that a package ships (TRL, axolotl, llama.cpp): calls are parsed as they were written, and turns
that are appended one by one equal the template's own rendering, or the template is refused with the reason.

Where the templates were not fetched these tests skip (tests/helpers/template.py).
"""

import json
import re
from datetime import datetime
from functools import cache
from typing import Any

import pytest

from agentrl_cli.chat.audit import require_append_only, require_calls_read
from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.parsers import PARSERS, load_parser
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.spans import shared_prefix
from agentrl_cli.chat.template_probe import tool, user
from agentrl_cli.errors import TemplateError
from agentrl_cli.tools.schema import tool_schema
from agentrl_cli.types import Message, Outcome
from tests.chat.test_chat_families import episode_of
from tests.helpers.chat import add, schema, tokenizer_for
from tests.helpers.template import SHIPPED, templates_of

# Templates whose parser a plugin brings; they are played with its tests.
OF_PLUGINS = {
    "trl/muse_glimmer",
    "trl/muse_glimmer_training",
    "axolotl/command_a_rag",
    "axolotl/command_a_tool_use",
    "axolotl/jamba",
} | {
    f"llama-cpp-python/{name}"
    for name in """
        Apertus-8B-Instruct Apriel-1.6-15b-Thinker-fixed ByteDance-Seed-OSS Cohere2MoE GigaChat3-10B-A1.8B
        CohereForAI-c4ai-command-r-plus-tool_use CohereForAI-c4ai-command-r7b-12-2024-tool_use GigaChat3.1-10B-A1.8B
        MiniMax-M1 NVIDIA-Nemotron-Nano-v2 fireworks-ai-llama-3-firefunction-v2 meetkai-functionary-medium-v3.1
        meetkai-functionary-medium-v3.2 muse-glimmer openbmb-MiniCPM5-1B tencent-Hy3 unsloth-Apriel-1.5
        upstage-Solar-Open-100B
    """.split()
}
# A template that two packages ship, to the byte, is played once: the copy, and the one that is played.
COPIES = {
    "axolotl/gemma4_unified": "axolotl/gemma4",
    "axolotl/qwen2_vl": "trl/qwen2_5_vl",
    "axolotl/qwen_25": "trl/qwen2_5",
} | {
    f"llama-cpp-python/{name}": other
    for name, other in {
        "LFM2.5-8B-A1B": "trl/lfm2_2_5",
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "trl/nemotron_3_nano",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "llama-cpp-python/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "Qwen-Qwen2.5-7B-Instruct": "trl/qwen2_5",
        "Qwen3.5-4B": "trl/qwen3_5_think",
        "google-gemma-2-2b-it": "trl/gemma",
        "meta-llama-Llama-3.1-8B-Instruct": "trl/llama3_1",
        "meta-llama-Llama-3.2-3B-Instruct": "trl/llama3_2",
        "meta-llama-Llama-3.3-70B-Instruct": "trl/llama3_1",
        "microsoft-Phi-3.5-mini-instruct": "trl/phi3_5",
        "openai-gpt-oss-120b": "trl/gptoss",
    }.items()
}
EVERY = [f"{package}/{name}" for package, names in SHIPPED.items() for name in names]
NAMES = [name for name in EVERY if name not in OF_PLUGINS and name not in COPIES]
TOOLS = [
    schema("add", {"a": "integer", "b": "number"}),
    schema("say", {"text": "string", "how": "object", "many": "array", "loud": "boolean"}),
]
for one in TOOLS:  # as real tools have them, and some templates want them
    for name, value in one["function"]["parameters"]["properties"].items():
        value |= {"description": f"The {name}."} | (
            {"additionalProperties": {}} if value["type"] == "object" else {}
        )
ADD: tuple[str, dict[str, Any]] = ("add", {"a": 1, "b": 2.5})
SAY: tuple[str, dict[str, Any]] = (
    "say",
    {
        "text": "naïve “λ” 漢字 🎈",
        "how": {"to": ["x", {"y": 1.5}], "n": 3},
        "many": [1, 2],
        "loud": True,
    },
)

ADD_SCHEMA = tool_schema(add)

# Control tokens that cannot be recognised by the form of their names.
CONTROL: dict[str, tuple[str, ...]] = {
    "axolotl/exaone": ("[|endofturn|]", "[|user|]", "[|assistant|]", "[|system|]"),
    "axolotl/exaone4": ("[|endofturn|]", "[|user|]", "[|assistant|]", "[|system|]", "[|tool|]"),
    "llama-cpp-python/ByteDance-Seed-OSS": (
        "<seed:bos>",
        "<seed:eos>",
        "<seed:tool_call>",
        "</seed:tool_call>",
    ),
    "llama-cpp-python/MiniMax-M1": ("<beginning_of_sentence>", "<end_of_sentence>"),
    "llama-cpp-python/MiniMax-M2": ("]~!b[", "]~b]", "[e~["),
    "llama-cpp-python/MiniMax-M3": ("]~!b[", "]~b]", "[e~[", "]<]minimax[>["),
    "llama-cpp-python/NVIDIA-Nemotron-Nano-v2": ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    "llama-cpp-python/Reka-Edge": ("<sep>",),
    "llama-cpp-python/tencent-Hy3": (
        "<｜hy_eos:opensource｜>",
        "<｜hy_User:opensource｜>",
        "<｜hy_Assistant:opensource｜>",
    ),
    "llama-cpp-python/poolside-Laguna-S-2.1": ("</assistant>", "</user>"),
    "llama-cpp-python/poolside-Laguna-XS-2.1": ("</assistant>", "</user>"),
    "llama-cpp-python/poolside-Laguna-XS.2": ("</assistant>", "</user>"),
}
# Templates for conversations with tools alone, and axolotl's of the same family for those without.
WITH_TOOLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "cohere",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "chatml",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "chatml",
}
VARIABLES = {
    "fireworks-ai-llama-3-firefunction-v2": {
        "functions": json.dumps(TOOLS),
        "datetime": "2026-01-02",
    }
}
# They write no control token at all, so they are refused.
NO_END = {"axolotl/llava", "llama-cpp-python/llama-cpp-rwkv-world"}
PARTS = {"gptoss": "harmony", "gptoss_training": "harmony", "openai-gpt-oss-120b": "harmony"}
# Templates that write text, or a call, as a message of its own, after their own stop token; and
# the parser.
PARTS |= {"GigaChat3-10B-A1.8B": "gigachat3", "NVIDIA-Nemotron-Nano-v2": "nemotron_v2"}
# Templates that silently drop every call of a turn but the first.
FIRST_ALONE = {
    "gptoss",
    "gptoss_training",
    "openai-gpt-oss-120b",
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
}

# Why turns cannot be appended, in the audit's words, and the templates concerned.
REFUSED: dict[str, tuple[str, ...]] = {
    "it begins an earlier turn differently from its generation prompt": (
        "llama-cpp-python/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "llama-cpp-python/Cohere2MoE",
        "trl/deepseek_r1_distill",
        "trl/deepseek_r1_distill_training",
        "trl/deepseekv3",
        "trl/deepseekv3_training",
        "trl/diffusion_gemma",
        "trl/diffusion_gemma_training",
        "axolotl/deepseek_v3",
        "llama-cpp-python/NVIDIA-Nemotron-Nano-v2",
        "llama-cpp-python/deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    ),
    "it rewrites what the model wrote": (
        "llama-cpp-python/CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "axolotl/command_a_rag",
        "axolotl/command_a_tool_use",
        "llama-cpp-python/unsloth-Apriel-1.5",
    ),
    "not how its assistant turns begin": (
        "axolotl/pixtral",
        "llama-cpp-python/Apriel-1.6-15b-Thinker-fixed",
        "llama-cpp-python/CohereForAI-c4ai-command-r-plus-tool_use",
    ),
    "it rewrites the prompt when the conversation continues": (
        "axolotl/mistral_v2v3",
        "axolotl/mistral_v3_tekken",
        "llama-cpp-python/Mistral-Small-3.2-24B-Instruct-2506",
        "llama-cpp-python/mistralai-Mistral-Nemo-Instruct-2407",
    ),
    "writes no stop token between an assistant turn and what follows": (
        "llama-cpp-python/Apertus-8B-Instruct",
    ),
    "what it writes between turns depends on the rest of the conversation": (
        "llama-cpp-python/Bielik-11B-v3.0-Instruct",
        "llama-cpp-python/GigaChat3-10B-A1.8B",
        "llama-cpp-python/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "llama-cpp-python/NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    ),
}
# Their source mentions calls, but they write none: only if a content is null, by `append` (which
# transformers refuses too), or by a filter that does not accept its argument. Calls are written in
# the text, in the detected syntax.
WRITES_NONE = {
    "axolotl/command_a",
    "trl/deepseek_r1_distill",
    "trl/deepseek_r1_distill_training",
} | {
    f"llama-cpp-python/{name}"
    for name in (
        "Kimi-K2-Instruct",
        "Kimi-K2-Thinking",
        "llama-cpp-deepseek-r1",
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    )
}


def source_of(name: str) -> str:
    package, _, short = name.partition("/")
    return templates_of(package)[short].strip()


@cache
def chat_of(name: str) -> Chat:
    package, _, short = name.partition("/")
    source = templates_of(package)[short]
    tokenizer = tokenizer_for(source, CONTROL.get(name, ()))
    if short in WITH_TOOLS:
        tokenizer.tool_template = source
        tokenizer.chat_template = templates_of("axolotl")[WITH_TOOLS[short]]
    return Chat(tokenizer, "auto", variables=VARIABLES.get(short), now=datetime(2026, 1, 2))


def said(text: str, *calls: tuple[str, dict[str, Any]], turn: int = 0) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"c{turn:04d}{n:04d}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for n, (name, arguments) in enumerate(calls)
        ]
    return message


def written(chat: Chat, message: Message, whole: bool = False) -> str:
    """The template's text of a turn; if that does not begin as the generation prompt (or `whole`), all that it adds."""
    try:
        if not whole:
            return chat.assistant_text(message, TOOLS, thinking=False)
    except TemplateError as error:
        if "not how its assistant turns begin" not in error.message:
            raise
    before, after = (
        chat.decode(chat.rendered_ids([user("u"), *more], TOOLS)) for more in ([], [message])
    )
    text = after[shared_prefix(before, after) :]
    stops = (
        [] if whole else [at for at in (text.find(stop) for stop in chat.stops.texts) if at >= 0]
    )
    return text[: min(stops, default=len(text))]


@pytest.mark.parametrize("name", NAMES)
async def test_calls_come_back_and_turns_are_appended_as_the_template_writes_them(
    name: str,
) -> None:
    await check_template(name)


async def check_template(name: str) -> None:
    """Check its calls, its turns, and an episode by the real loop; or that it is refused with the reason."""
    check_calls(name)
    if name in NO_END:
        return
    check_appended(name)
    if not any(name in names for names in REFUSED.values()):
        await check_episode(name)


def check_calls(name: str) -> None:
    """One call, nested arguments, two calls, and text before a call: parsed by the parser that `auto` chooses."""
    if name in NO_END:
        with pytest.raises(TemplateError, match="writes no control token after an assistant turn"):
            chat_of(name)
        return
    chat, short = chat_of(name), name.partition("/")[2]
    if not chat.able.calls:
        assert "tool_calls" not in chat.source or name in WRITES_NONE
        assert chat.syntax.reads_calls, "they are written into the text, as the parser reads them"
        return
    parser = load_parser(PARTS.get(short, chat.parser.name))
    if short == "GigaChat3-10B-A1.8B":
        with pytest.raises(TemplateError, match="does not read the tool calls"):
            require_calls_read(chat)
    else:
        require_calls_read(chat)
        assert parser is chat.parser
    for text, calls in (("", [ADD]), ("", [SAY]), ("", [ADD, SAY]), ("Let me see.", [SAY])):
        try:
            shown = written(chat, said(text, *calls), whole=short in PARTS)
        except TemplateError as error:
            assert len(calls) == 2 and "single tool-calls at once" in error.message
            continue
        found = parse_text(shown, parser, TOOLS)
        wanted = calls[:1] if short in FIRST_ALONE else calls
        assert [(call.name, call.arguments, call.error) for call in found.calls] == [
            (*call, None) for call in wanted
        ]
        assert (
            short in PARTS or found.content.endswith(text) or text not in shown
        )  # many drop the text beside a call


def check_appended(name: str) -> None:
    chat = chat_of(name)
    trait = next((trait for trait, names in REFUSED.items() if name in names), None)
    if trait is not None:
        with pytest.raises(TemplateError, match=re.escape(trait)) as caught:
            require_append_only(chat)
        assert "model.chat.append_only=true" in caught.value.hint
        return
    report = require_append_only(chat)
    result = [tool("4", "c00000000", "add"), tool("5", "c00010000", "add")]
    messages = [
        user("1 + 2.5?"),
        said("", ADD),
        result[0],
        said("", ADD, turn=1),
        result[1],
        said("It is 5."),
    ]
    appended, full = chat.conversation(messages, TOOLS), chat.render(messages, TOOLS)
    assert [role for role, _, _ in appended.spans] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    got = appended.ids if chat.stops.closing else appended.ids[:-1]
    if full.ids[: len(got)] == got:
        return
    given = r"\s|(?:(?:<think>|<\|channel>thought)\s*)?(?:</think>|<channel\|>)"
    texts = [re.sub(given, "", chat.decode(ids)) for ids in (full.ids, got)]
    assert re.search(given.removeprefix(r"\s|"), chat.decode(got)) and texts[0].startswith(
        texts[1]
    ), report


# It finds a result's tool by its call, and a malformed call, or one with a repeated id, does not
# count.
LOOKED_UP = {"llama-cpp-python/upstage-Solar-Open-100B"}


async def check_episode(name: str) -> None:
    """A malformed call and its answer, a call and its result, a final answer: as the template writes them."""
    chat, arguments = chat_of(name), {"a": 5, "b": 7}
    call = chat.assistant_text(said("", ("add", arguments)), [ADD_SCHEMA])
    answer = chat.assistant_text(said("It is 12"), [ADD_SCHEMA])
    own = chat.stops.after_call if chat.stops.after_call != chat.stops.texts[0] else ""
    example = chat.parser.example("add", arguments)
    broken = (
        call[: max(0, call.find(example[:12]))] + example[:-3] + ("" if chat.stops.closing else own)
    )
    episode, rollout = await episode_of(chat, [broken, call + own, answer])
    assert episode.outcome is not None and not episode.outcome.is_error and episode.tool_errors <= 1
    results = [result.text for turn in episode.turns for result in turn.results]
    assert results[-1:] == ["12"] or not chat.able.calls
    assert name in LOOKED_UP or set(rollout.drift.values()) <= {
        "resegmented",
        "reserialised",
        "by_design",
    }


async def test_thinking_that_the_prompt_opened_is_not_drift() -> None:
    """Nemotron's prompt ends with `<think>` and its history repeats contents unchanged, so they begin with it."""
    for name in ("trl/nemotron_3_nano", "trl/qwen3_5_think", "llama-cpp-python/StepFun3.5-Flash"):
        chat = chat_of(name)
        assert chat.opens.startswith("<think>") and chat_of("trl/qwen3").opens == ""
        call = f"Hm.\n</think>\n\n{chat.parser.example('add', {'a': 5, 'b': 7})}"
        episode, rollout = await episode_of(chat, [call, call, "So.\n</think>\n\nIt is 12"])
        assert (episode.outcome, episode.error) == (Outcome.SOLVED, "")
        assert set(rollout.drift.values()) <= {"reserialised", "by_design"}
        said = [turn.messages[0] for turn in episode.turns if turn.role == "assistant"]
        assert (
            all(message["content"].startswith("<think>") for message in said)
            and len(said[0]["tool_calls"]) == 1
        )
        unclosed = chat.parse(
            chat.tokenizer.encode(chat.parser.example("add", {"a": 5, "b": 7})), TOOLS
        )
        assert unclosed.calls and unclosed.content == "", (
            "a block that is not closed stays what it was"
        )


@pytest.mark.parametrize("package", SHIPPED)
def test_the_names_are_those_that_the_package_ships(package: str) -> None:
    assert sorted(templates_of(package)) == SHIPPED[package]


def test_the_sweep_covers_every_syntax_that_a_template_writes() -> None:
    assert [name for name, other in COPIES.items() if source_of(name) != source_of(other)] == []
    found = {
        chat_of(name).parser.name
        for name in NAMES
        if name not in NO_END and chat_of(name).able.calls
    }
    assert set(PARSERS) - found == {
        "gemma3_function",
        "llama3_pythonic",
    }  # see PARTS and test_parsers.py
    refused = [name for names in REFUSED.values() for name in names]
    assert len(refused) == len(set(refused)) and {*refused, *NO_END, *CONTROL, *WRITES_NONE} <= set(
        EVERY
    )
