"""Chat templates: rendered as transformers renders them, and the audit on the real ones of many families.

The real templates are read from TRL's wheel, pinned by version and hash; where it was not fetched these tests skip.
"""

from datetime import datetime

import pytest

from agentrl_cli.chat.audit import require_append_only
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.template import ChatTemplate
from agentrl_cli.chat.template_probe import PROBE_TOOL, tool, user
from agentrl_cli.chat.tiny_template import tiny_template
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message
from tests.helpers.chat import tokenizer_for
from tests.helpers.template import kept_templates, templates_of


def trl_chat(name: str, parser: str = "auto") -> Chat:
    return Chat(tokenizer_for(templates_of("trl")[name]), parser, now=datetime(2026, 1, 2))


CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 6*7? "},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {
                "id": "c00000000",
                "type": "function",
                "function": {"name": "probe", "arguments": {"x": "é"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c00000000", "name": "probe", "content": "42"},
    {"role": "assistant", "content": "42"},
]


def test_rendering_equals_that_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    templates = {
        "tiny": tiny_template(),
        **{k: v for k, v in kept_templates("trl").items() if k in WORKING},
    }
    templates.pop(
        "smolvlm", None
    )  # wants content as parts, which we make of a text and transformers does not
    compared = 0
    for name, source in templates.items():
        own = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
        for messages in (CONVERSATION, CONVERSATION[:2], CONVERSATION[1:2]):
            generation = messages is not CONVERSATION
            try:
                text = own.render(messages, [PROBE_TOOL], add_generation_prompt=generation)
            except TemplateError:
                continue
            theirs = render_jinja_template(
                [messages], [PROBE_TOOL], chat_template=source, add_generation_prompt=generation,
                bos_token="<s>", eos_token="</s>",
            )  # fmt: skip
            assert text == theirs[0][0], name
            compared += 1
    assert compared >= 3


def test_a_template_error_carries_the_templates_own_reason() -> None:
    template = ChatTemplate("{{ raise_exception('only one system message') }}")
    with pytest.raises(TemplateError, match="only one system message"):
        template.render([user("x")])
    with pytest.raises(TemplateError, match=r"does not compile.*line 1"):
        ChatTemplate("{% if %}")


def test_templates_run_in_a_sandbox() -> None:
    template = ChatTemplate(
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}"
    )
    with pytest.raises(TemplateError):
        template.render([user("x")])
    with pytest.raises(TemplateError):
        ChatTemplate("{% set _ = messages.append(1) %}").render([user("x")])


def test_the_clock_is_read_once() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", now=datetime(2026, 1, 2))
    assert template.render([]) == "2026-01-02"


def test_arguments_as_json_text_where_the_template_joins_text() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ 'X' + c.function.arguments }}{% endfor %}"
    source = f"{{% for m in messages %}}{calls}{{% endfor %}}"
    assert ChatTemplate(source).render(CONVERSATION) == 'X{"x": "é"}'


def test_content_as_parts_where_the_template_wants_parts() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(source).render([user("ab")]) == "ab"


# name -> (parser that "auto" finds, stop texts, closing, tools, parallel calls, drops earlier thinking)
WORKING: dict[str, tuple[str, tuple[str, ...], bool, bool, bool, bool]] = {
    "qwen2_5": ("hermes", ("<|im_end|>",), True, True, True, False),
    "qwen3": ("hermes", ("<|im_end|>",), True, True, True, True),
    "qwen3_5_nothink": ("qwen3_coder", ("<|im_end|>",), True, True, True, True),
    "llama3": ("hermes", ("<|eot_id|>",), True, False, True, False),
    "llama3_1": ("llama3_json", ("<|eot_id|>",), True, True, False, False),
    "gemma3": ("hermes", ("<end_of_turn>",), True, False, False, False),
    "glm4moe": ("glm", ("<|user|>", "<|observation|>"), False, True, True, True),
    "cohere": ("hermes", ("<|END_OF_TURN_TOKEN|>",), True, False, False, False),
}


@pytest.mark.parametrize("name", WORKING)
def test_audit_of_templates_that_extend_by_appending(name: str) -> None:
    parser, stops, closing, tools, parallel, thinking = WORKING[name]
    chat = trl_chat(name)
    report = require_append_only(chat)
    assert report.ok and not report.problems
    assert chat.parser.name == parser
    assert (chat.stops.texts, chat.stops.closing) == (stops, closing)
    assert (report.supports_tools, report.parallel_calls, report.thinking_by_design) == (
        tools,
        parallel,
        thinking,
    )


def test_glm_stop_token_is_the_start_of_what_follows() -> None:
    chat = trl_chat("glm4moe")
    observation = chat.tokenizer.id_of("<|observation|>")
    said = CONVERSATION[2]
    sampled = chat.extend([user("u"), said], [tool("42")], [PROBE_TOOL], last_id=observation)
    assert sampled.text.startswith("\n<tool_response>\n42")
    cut = chat.extend([user("u"), said], [tool("42")], [PROBE_TOOL], last_id=65)
    assert cut.ids == [observation, *sampled.ids]


MINIMIND = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- if loop.first and tools %}{{- '\n# Tools\n' + tools | tojson }}{% endif %}{{- '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"""
