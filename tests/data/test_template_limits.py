"""Chat templates that do not end, or build huge values, are given up; usual ones are untouched."""

import pytest

from disttrain_cli.data import template_limits
from disttrain_cli.data.chat_templates import MOST_ENDLESS, ChatTemplate
from disttrain_cli.errors import SpecError
from tests.cases import mostly_slow

MESSAGES = [{"role": "user", "content": "Hi {}"}, {"role": "assistant", "content": "Yes"}]

TWICE = (
    "{{% set n = namespace(x=(1,), y=(1,)) %}}{{% for a in range(99) %}}"
    "{{% set n.x = {} %}}{{% set n.y = {} %}}{{% endfor %}}"
)
LOOPED = (
    "{{% set t = {1} * 999999 %}}{{% set u = {1} * 999999 %}}"
    "{{% for a in range(99999) %}}{0}{{% endfor %}}"
)

ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "loops over texts": "{% set t = 'x' * 99999 %}{% for a in t %}{% for b in t %}{% endfor %}"
    "{% endfor %}",
    "a condition in loops": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}"
    "{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "recursive loops": "{% for m in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}"
    "{% endfor %}",
    "output": "{% for a in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "powers of powers": "{% set n = namespace(x=9) %}{% for a in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "a repeated text": "{{ ('x' * 10 ** 11) | length }}",
    "a repeated list": "{{ (10 ** 11 * [0]) | length }}",
    "doubled by +": "{% set n = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by ~": "{% set n = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled lists": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled by blocks": "{% set n = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "doubled by replace": "{% set n = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "doubled by the filter replace": "{% set n = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
    "doubled by join": "{% set n = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "doubled by the method join": "{% set n = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set n.x = n.x.join(['', '', '']) %}{% endfor %}",
    "doubled by format": "{% set n = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    "a wide field": "{{ 'a'.ljust(10 ** 11) | length }}",
    "a wide filter": "{{ 'a' | center(10 ** 11) | length }}",
    "a wide format": "{{ '{:99999999999}'.format(1) | length }}",
    "a wide format of fields": "{{ '{:{}}'.format(1, 10 ** 11) | length }}",
    "a wide %": "{{ '%99999999999d' % 1 }}",
    "a wide % by argument": "{{ '%*d' % (10 ** 11, 1) }}",
    "a wide indentation": "{{ [1] | tojson(indent=10 ** 11) }}",
    "lists of lists": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "lists of lists as JSON": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "lists of lists joined": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x ~ 'x' }}",
    "lists of lists in a test": TWICE.format("[n.x, n.x]", "[n.y, n.y]") + "{{ n.x is eq n.y }}",
    "lists of lists compared": TWICE.format("[n.x, n.x]", "[n.y, n.y]") + "{{ n.x == n.y }}",
    "tuples of tuples as keys": TWICE.format("(n.x, n.x)", "1") + "{{ {n.x: 1} | length }}",
    "dicts of dicts": TWICE.format("dict(a=n.x, b=n.x)", "1") + "{{ n.x }}",
    "a long list searched": LOOPED.format("{% if 1 in t %}{% endif %}", "[0]"),
    "a long list searched by a method": LOOPED.format("{% set u = t.count(1) %}", "[0]"),
    "a long list searched by a test": LOOPED.format("{% set u = 1 is in t %}", "[0]"),
    "a long list cut": LOOPED.format("{% set u = t[1:] %}", "[0]"),
    "a long text searched": LOOPED.format("{% set u = t.find('b') %}", "'a'"),
    "long texts compared": LOOPED.format("{% if t == u %}{% endif %}", "'a'"),
    "characters to strip": "{{ ('a' * 9999).strip('b' * 9999) }}",
    "characters to trim": "{{ ('a' * 9999) | trim('b' * 9999) }}",
    "tabs": "{{ ('\\t' * 9999).expandtabs(9999) }}",
    "many long fields": "{{ ('{0}' * 9999).format('x' * 99999) | length }}",
    "many long conversions": "{{ (('%(a)s' * 9999) % {'a': 'x' * 99999}) | length }}",
    "many long texts in a list": "{{ ['x' * 99999] * 9999 }}",
    "replaced by name": "{{ ('a' * 99999) | replace(old='a', new='x' * 99999) | length }}",
    "a wide field in a text": "{{ '{:{}}'.format(1, '99999999999') | length }}",
    "a wide field in two parts": "{{ '{:{}99999999999}'.format(1, 1) | length }}",
    "a precise number": "{{ 1 | round(1000000000, 'ceil') }}",
    "a large batch": "{{ [1] | batch(10 ** 11, 0) | list | length }}",
}


@pytest.mark.parametrize("name", mostly_slow(ENDLESS, *[*ENDLESS][::5]))
def test_a_template_without_end_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ENDLESS[name]
    monkeypatch.setattr(template_limits, "MOST_WORK", 300_000)
    template = ChatTemplate(source, {})
    with pytest.raises(ValueError, match="rejects it: it takes too much work"):
        template.render(MESSAGES)


def test_a_template_that_never_ends_stops_the_command() -> None:
    template = ChatTemplate(ENDLESS["a power"], {})
    for _ in range(MOST_ENDLESS - 1):
        with pytest.raises(ValueError, match="rejects it"):
            template.render(MESSAGES)
    with pytest.raises(SpecError, match="does not terminate"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ ',' if not loop.last }}"
            "{% endfor %}",
            "0/2,1/2",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "Hi {}"),
        (
            "{% for m in messages[::-1] %}{{ m.role ~ ':' ~ loop.revindex }};{% endfor %}",
            "assistant:2;user:1;",
        ),
        (
            "{% for k, v in messages[0].items() | sort %}{{ k }}={{ v }} {% endfor %}",
            "content=Hi {} role=user ",
        ),
        ("{% for x in nothing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for x in ['a', 'b'] %}{{ loop.previtem }}{{ loop.cycle(1, 2) }}{% endfor %}", "1a2"),
        ("{{ messages | map(attribute='role') | join('+') }}", "user+assistant"),
        ("{{ ', '.join(['a', 'b']) }}{{ 'x' * 3 }}{{ 2 ** 10 }}", "a, bxxx1024"),
        ("{{ 'a%sb' % 'c' }}{{ '{:>4}'.format(7) }}{{ 'ab'.replace('a', 'cc') }}", "acb   7ccb"),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "Hi {}"\n}'),
        (
            "{% set ns = namespace(n=0) %}"
            "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
            "{{ ns.n }}",
            "2",
        ),
        (
            "{{ '1234567' | tojson }}{{ 1234567 | tojson }}{{ 'n 1234567' | indent(2) }}",
            '"1234567"1234567n 1234567',
        ),
        (
            "{{ '%d' % 1234567 }}{{ '{} 1234567'.format(7654321) }}{{ 123456 | round | int }}",
            "12345677654321 1234567123456",
        ),
        ("{% set n = namespace(m=namespace(a=1)) %}{{ n.m.a }}{{ n.x is defined }}", "1False"),
        (
            "{{ 'Hi' in messages[0].content }}{{ messages[1:] == [messages[1]] }}"
            "{{ (1, 2) == (1, messages | length) }}{{ {'a': messages[0].role}['a'] }}"
            "{{ messages[0].role is in ['user', 'system'] }}{{ dict(a=1)['a'] }}",
            "TrueTrueTrueuserTrue1",
        ),
        ("{{ 'a**%s**' % 'b' }}{{ '{{x}} {}'.format('{:99999}') }}", "a**b**{x} {:99999}"),
        ("{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}", "b"),
    ],
)
def test_usual_templates_are_rendered_as_ever(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(MESSAGES) == text


def test_a_long_conversation_is_far_from_the_limit() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content %}{{ '<|' ~ m.role ~ '|>' + part.text }}"
        "{% endfor %}{% endfor %}"
    )
    turns = [{"role": "user", "content": [{"text": "word " * 200}] * 4}] * 5_000
    assert len(ChatTemplate(source, {}).render(turns)) > 20_000_000


def test_reasons_hold_no_control_characters_and_are_never_empty() -> None:
    template = ChatTemplate("{{ raise_exception('\\x1b[31mred\\x07') }}", {})
    with pytest.raises(ValueError) as caught:
        template.render(MESSAGES)
    assert "red" in str(caught.value) and str(caught.value).isprintable()
