"""Chat templates of strangers: whatever they do ends, in a sentence, and common ones are rendered as before."""

import pytest

from agentrl_cli.chat import template_limits
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.template import ChatTemplate
from agentrl_cli.chat.template_limits import MOST_STEPS, MOST_TEXT
from agentrl_cli.chat.tiny_template import tiny_template
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Message

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
    """A model whose template does too much does not load either."""
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
    """Operators, filters, tests and loops give what Jinja gives without limits."""
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
    wanted = plain.from_string(source).render(messages=HI)
    assert ChatTemplate(source).render(HI) == wanted


def test_a_long_conversation_is_rendered() -> None:
    turns: list[Message] = [
        {"role": "user", "content": "word " * 200},
        {"role": "assistant", "content": "Yes."},
    ]
    text = ChatTemplate(tiny_template()).render(turns * 1000)
    assert text.count("word ") == 200_000
