"""Chat templates: rendered as transformers renders them, and the audit on the real ones of many families.

The real templates are read from TRL's wheel, pinned by version and hash; where it was not fetched these tests skip.
Whatever a stranger's template does ends, in a sentence, and common ones are rendered as before.
"""

from datetime import datetime

import pytest

from agentrl_cli import ByteTokenizer, Chat
from agentrl_cli.chat import template_limits
from agentrl_cli.chat.audit import require_append_only
from agentrl_cli.chat.template import ChatTemplate
from agentrl_cli.chat.template_limits import MOST_STEPS, MOST_TEXT
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


CALLS = "{% for c in m.tool_calls or [] %}{{ 'X' + c.function.arguments }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        ("{{ strftime_now('%Y-%m-%d') }}", [], "2026-01-02"),  # the clock is read once
        # arguments as JSON text where the template joins text
        (f"{{% for m in messages %}}{CALLS}{{% endfor %}}", CONVERSATION, 'X{"x": "é"}'),
        # content as parts where the template wants parts
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
            [user("ab")],
            "ab",
        ),
    ],
)
def test_what_a_template_is_given(source: str, messages: list[Message], text: str) -> None:
    assert ChatTemplate(source, now=datetime(2026, 1, 2)).render(messages) == text


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


HI: list[Message] = [{"role": "user", "content": "Hi \t there"}]
GROW = (
    "{{% set n = namespace(x={start}) %}}{{% for i in range(99) %}}{{% set n.x = {next} %}}{{% endfor %}}"
    "{{{{ {end} }}}}"
)
LISTS = {"start": "['ha']", "next": "[n.x, n.x]"}
BIG = "{% set x = 'a' * 10**7 %}"
EVERY = "{% for i in range(99999) %}{% for j in range(99999) BODY %}{% endfor %}{% endfor %}"

HOSTILE = {
    "loops": (EVERY.replace(" BODY %}", "%}x"), "steps"),
    "loops whose items do not pass": (EVERY.replace("BODY", "if false"), "steps"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "a tree of calls": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "steps",
    ),
    "a recursive loop": (
        "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "calls itself",
    ),
    "nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
    "blocks": ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "does not compile"),
    "doubling": (GROW.format(start="'a'", next="n.x ~ n.x", end="n.x"), "a text of more"),
    "adding": (GROW.format(start="'a'", next="n.x + n.x", end="n.x"), "a text of more"),
    "lists": (GROW.format(start="[1]", next="n.x + n.x", end="1"), "a list of more"),
    "squares": (GROW.format(start="9", next="n.x * n.x", end="1"), "a number of more"),
    "times": ("{{ 'a' * 10**10 }}", "a text of more"),
    "a list times": ("{{ ([0] * 10**9)|length }}", "a list of more"),
    "power": ("{{ 9 ** (9 ** 9) }}", "a number of more"),
    "lists in lists": (GROW.format(**LISTS, end="n.x"), "a text of more"),
    "lists in lists, joined": (GROW.format(**LISTS, end="n.x ~ ''"), "a text of more"),
    "lists in lists, as JSON": (GROW.format(**LISTS, end="n.x|tojson"), "a text of more"),
    "lists in lists, as text": (GROW.format(**LISTS, end="n.x|string"), "a text of more"),
    "output": (BIG + "{% for i in range(99999) %}{{ x }}{% endfor %}", "a text of more"),
    "replace": (BIG + "{{ x.replace('a', x)|length }}", "a text of more"),
    "the filter replace": (BIG + "{{ x|replace('a', x)|length }}", "a text of more"),
    "join": (BIG + "{{ x.join(range(999)|map('string'))|length }}", "a text of more"),
    "the filter join": (BIG + "{{ range(999)|join(x)|length }}", "a text of more"),
    "center": ("{{ 'a'.center(10**10) }}", "a text of more"),
    "the filter center": ("{{ 'a'|center(10**10) }}", "more than"),
    "zfill": ("{{ 'a'.zfill(10**10)|length }}", "a text of more"),
    "expandtabs": ("{{ messages[0].content.expandtabs(10**10)|length }}", "a text of more"),
    "percent": ("{{ '%1000000000d' % 1 }}", "a text of more"),
    "format": ("{{ '{:>1000000000}'.format(1)|length }}", "a text of more"),
    "format with a width": ("{{ '{:>{w}}'.format(1, w=10**10)|length }}", "a text of more"),
    "the filter format": ("{{ '%*d'|format(10**9, 1) }}", "more than"),
    "indent": ("{{ 'a'|indent(10**9, true) }}", "more than"),
    "indented JSON": ("{{ [1]|tojson(indent=10**9) }}", "more than"),
    "batches": ("{{ [1]|batch(10**9, 'x')|list }}", "more than"),
    "digits": ("{{ 1.5|round(10**9, 'ceil') }}", "more than"),
    "bytes": ("{{ ('a'.encode() * 10**10)|length }}", "bytes"),
    "slices": (BIG + EVERY.replace(" BODY %}", "%}{% set y = x[1:] %}"), "steps"),
    "searches": (BIG + EVERY.replace(" BODY %}", "%}{% set y = 'b' in x %}"), "steps"),
    "comparisons": (BIG + EVERY.replace(" BODY %}", "%}{% set y = x is eq(x ~ '') %}"), "steps"),
    "lorem ipsum": ("{{ lipsum(10**6) }}", "lipsum"),
    "arithmetic": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "a long number": ("{{ 10**4000 * 10**900 }}", "failed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_does_too_much_is_refused_in_a_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, words = HOSTILE[name]
    if words == "steps":  # what is counted is counted as well in a tenth of the time
        monkeypatch.setattr(template_limits, "MOST_STEPS", MOST_STEPS // 10)
    elif name.startswith("lists in lists"):  # each item of a text that is never made is looked at
        monkeypatch.setattr(template_limits, "MOST_TEXT", MOST_TEXT // 10)
    with pytest.raises(TemplateError, match=words) as caught:
        ChatTemplate(source).render(HI)
    assert "\n" not in caught.value.message and caught.value.message.startswith(
        "The chat template "
    )


def test_counting_is_by_rendering_and_hidden_by_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_STEPS <= 2_000_000, "a few seconds"
    most = MOST_STEPS // 10
    monkeypatch.setattr(template_limits, "MOST_STEPS", most)
    hides = "{% set environment = 1 %}{% set step = 1 %}{% macro joined() %}{% endmacro %}"
    with pytest.raises(TemplateError, match="steps"):
        ChatTemplate(hides + HOSTILE["loops"][0]).render(HI)
    with pytest.raises(TemplateError, match="steps"):
        Chat(ByteTokenizer(HOSTILE["loops"][0]))
    template = ChatTemplate("{% for i in range(9999) %}{% endfor %}{{ messages[0].content }}")
    for _ in range(most // 9999 + 2):
        assert template.render(HI) == HI[0]["content"]


def test_counting_changes_no_value() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = (
        "{% for m in messages if m.role != 'x' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.content|trim }}"
        "{{ m.content[1:3] ~ 1 ~ none ~ [1, 'a'] }}{{ m.content.split(' ')|join('-') }}{{ 'i' in m.content }}"
        "{{ m.content is string and m.content is eq('Hi') }}{{ '%s|%3d' % ('a', 4) }}{{ '{}-{x:>4}'.format(1, x='b') }}"
        "{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'eq', 'user')|list|length }}"
        "{{ [3, 1]|sort|last + 2 ** 3 * 2 }}{{ 'ab' * 2 }}{{ ', '.join(['a', 'b']) }}{{ 'a\nb'|indent(2) }}"
        "{% for c in m.content recursive %}{% if c == 'H' %}{{ loop('xy') }}{% endif %}{{ c }}{% endfor %}"
        "{% macro r() %}[{{ caller('z') }}]{% endmacro %}{% call(a) r() %}{{ a }}{% endcall %}{{ m.none }}"
        "{{ 1 < 2 < 3 }}{{ m|items|list }}{{ m|tojson }}{{ 1.256|round(2) }}{{ range(3)|list }}"
        "{{ m.content|replace('H', 'J') }}"
        "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}"
        "{{ m.content|default('x')|truncate(3, true, '') }}"
        "{% endfor %}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = ChatTemplate(source)._environment.filters["tojson"]
    assert ChatTemplate(source).render(HI) == plain.from_string(source).render(messages=HI)


def test_a_long_conversation_is_rendered() -> None:
    turns: list[Message] = [
        {"role": "user", "content": "word " * 200},
        {"role": "assistant", "content": "Yes."},
    ]
    text = ChatTemplate(tiny_template()).render(turns * 1000)
    assert text.count("word ") == 200_000
