"""Templates that mean harm, and a program that renders each where a mistake costs only itself."""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import NoReturn

BIG = "{% set big = 'x' * 1000000 %}"
LONG = "{% set l = [0] * 2000000 %}"
GROW = "{% set ns = namespace(x='x') %}"

HOSTILE = {
    # Time.
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filters in filters": "{% set r = [range(99999)] %}{{ (r * 10000) | map('sum') | sum }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "loop tree": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "many numbers": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "product": GROW + "{% set ns.x = 3 %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "rounding": "{{ 1.5 | round(999999999, 'ceil') }}",
    "rounding down": "{{ 15 | round(-999999999) }}",
    "sorting": BIG + "{{ ([big, big ~ 'y'] * 50000) | sort | first }}",
    "searching": LONG + "{% if 1 in l %}{% endif %}" * 1000,
    "comparing": LONG + "{% set m = l[:] %}" + "{% if l == m %}{% endif %}" * 1000,
    "testing": LONG + "{% if 1 is in l %}{% endif %}" * 1000,
    "slicing": LONG + "{% set m = l[::-1] %}" * 1000,
    "adding lists up": "{{ ([[0] * 100] * 20000) | sum(start=[]) | length }}",
    # Memory.
    "long text": "{{ 'x' * 10 ** 10 }}",
    "long text, other way": "{{ 10 ** 10 * 'x' }}",
    "long list": "{{ [0] * 10 ** 10 }}",
    "doubled by tilde": GROW + "{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled by plus": GROW + "{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "tripled by plus": GROW + "{% for a in range(60) %}{% set ns.x = ns.x + ns.x + ns.x %}{% endfor %}",
    "tripled lists": GROW
    + "{% set ns.x = [1] %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x + ns.x %}{% endfor %}",
    "doubled lists": GROW
    + "{% set ns.x = [1] %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled by join": GROW + "{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "doubled by format": GROW + "{% for a in range(60) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubled by str.format": GROW
    + "{% for a in range(60) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubled by replace": GROW
    + "{% for a in range(60) %}{% set ns.x = ns.x.replace('x', 'xx') %}{% endfor %}",
    "doubled by a macro": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}"
    + GROW
    + "{% for a in range(60) %}{% set ns.x = f(ns.x) %}{% endfor %}",
    "doubled by a block": GROW
    + "{% for a in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "nested lists, shown": GROW
    + "{% for a in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested tuples, hashed": GROW
    + "{% for a in range(50) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} | length }}",
    "nested dicts, as JSON": GROW
    + "{% for a in range(50) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "nested dicts, shown": GROW
    + "{% for a in range(50) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x }}",
    "nested by dict()": GROW
    + "{% for a in range(50) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "nested by varargs": "{% macro f() %}{% set ns.x = varargs %}{% endmacro %}"
    + GROW
    + "{% for a in range(50) %}{{ f(ns.x, ns.x) }}{% endfor %}{{ ns.x }}",
    "much output": BIG + "{% for a in range(99999) %}{{ big }}{% endfor %}",
    "much static output": "{% for a in range(99999) %}" + "x" * 10000 + "{% endfor %}",
    "much static in a macro": "{% macro f() %}{% for a in range(99999) %}"
    + "x" * 10000
    + "{% endfor %}{% endmacro %}{{ f() | length }}",
    "much in a block": BIG + "{% set y %}{% for a in range(99999) %}{{ big }}{% endfor %}{% endset %}",
    "kept texts": BIG
    + GROW
    + "{% set ns.x = [] %}{% for a in range(99999) %}{% set ns.x = ns.x + [big ~ a] %}{% endfor %}",
    "kept slices": BIG
    + GROW
    + "{% set ns.x = [] %}{% for a in range(99999) %}{% set ns.x = ns.x + [big[1:]] %}{% endfor %}",
    "kept by filters": BIG
    + GROW
    + "{% set ns.x = [] %}{% for a in range(99999) %}{% set ns.x = ns.x + [big | upper] %}{% endfor %}",
    "kept by methods": BIG
    + GROW
    + "{% set ns.x = [] %}{% for a in range(99999) %}{% set ns.x = ns.x + [big.upper()] %}{% endfor %}",
    "kept by map": BIG + "{{ ([big] * 3) | map('center', 9999999) | list | length }}",
    "sorted in lower case": BIG + "{{ ([big] * 99999) | sort | length }}",
    "centred": "{{ 'x' | center(10 ** 10) }}",
    "centred by method": "{{ 'x'.center(10 ** 10) }}",
    "filled": "{{ 'x'.zfill(10 ** 10) ~ 'x'.ljust(10 ** 10) ~ 'x'.rjust(10 ** 10) }}",
    "tabs": "{{ '\t\t'.expandtabs(10 ** 10) }}",
    "indented": "{{ ('\n' * 100000) | indent(1000000, true, true) }}",
    "wrapped": BIG + "{{ big | wordwrap(1, true, big) }}",
    "replaced": BIG + "{{ big | replace('', big) }}",
    "replaced by method": BIG + "{{ big.replace('x', big) }}",
    "joined": BIG + "{{ range(99999) | join(big) }}",
    "joined by method": BIG + "{{ big.join(range(99999) | map('string')) }}",
    "split": BIG + "{{ (big * 4).split('x') | length }}",
    "batched": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "sliced": "{{ [1] | slice(10 ** 9, 0) | list }}",
    "wide format": "{{ '%1000000000d' % 1 }}",
    "wide format by filter": "{{ '%1000000000d' | format(1) }}",
    "wide format by argument": "{{ '%*d' % (1000000000, 1) }}",
    "wide str.format": "{{ '{:1000000000}'.format(1) }}",
    "wide str.format by argument": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "wide JSON": "{{ [[1]] | tojson(indent=1000000000) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "lorem": "{{ lipsum(n=100000000) }}",
    "range": "{{ range(1000000000) | list }}",
    "compiled": "{{ 'x' * 9999999999 if false else 9 ** (9 ** 9) }}",
    # Depth.
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two macros": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "namespace in itself": "{% set a = namespace() %}{% set a.a = [a, a] %}{{ [a.a] | tojson }}",
    "deep list": GROW + "{% for a in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "deep source": "{% if 1 %}" * 150 + "{% endif %}" * 150,
    "many operators": "{{ 1" + " + 1" * 5000 + " }}",
    # Out of the sandbox.
    "class": "{{ ''.__class__.__mro__ }}",
    "class by filter": "{{ ''|attr('__class__') }}" + "{{ (''|attr('__class__')).__mro__ }}",
    "class by item": "{{ ''['__class__']['__mro__'] }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "class by format map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "class by map": "{{ [''] | map(attribute='__class__.__mro__') | list }}{{ raise_exception('safe') }}",
    "globals": "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.sys }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f._func.__globals__.x }}",
    "globals of a cycler": "{{ cycler.__init__.__globals__.os }}",
    "globals of a namespace": "{{ namespace.__init__.__globals__.os }}",
    "environment": "{{ self._TemplateReference__context.environment }}",
    "code of a function": "{{ strftime_now.__code__.co_consts }}",
    "mutation": "{{ messages.append(1) }}",
    "a list without end": "{% set l = [] %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% set _ = l.append(i) %}{% endfor %}{% endfor %}",
    "mutation of a message": "{{ messages[0].update({'content': 'x'}) }}",
    "subclass list": "{{ ().__class__.__base__.__subclasses__() }}",
    "type of dict": "{{ dict.__class__.__mro__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
}


def stopped(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    from perdure import TemplateError
    from perdure.chat.message import Message
    from perdure.chat.template import limits
    from perdure.chat.template.template import Template

    # Eight of them last until the limit.
    limits.SECONDS = 0.5
    messages = [Message(role="user", content="Hi")]
    Template("a").render(messages)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    room = 2 << 30
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    # By processor time: on a busy machine it is no hang that others had it.
    signal.signal(signal.SIGPROF, stopped)
    outcomes = {}
    for name in sys.argv[1:] or HOSTILE:
        source = HOSTILE[name]
        signal.setitimer(signal.ITIMER_PROF, 20)
        try:
            text = Template(source).render(messages)
            outcomes[name] = f"gave {len(text)} characters: {text[:60]}"
        except TemplateError as error:
            outcomes[name] = "refused" if "MemoryError" not in str(error) else "out of memory"
        except BaseException as error:
            outcomes[name] = f"raised {type(error).__name__}: {str(error)[:60]}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
    json.dump({"outcomes": outcomes, "megabytes": used >> 10}, sys.stdout)


if __name__ == "__main__":
    main()
