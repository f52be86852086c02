"""Templates that compile, and mostly run: loops, macros and calls over texts, numbers and lists that grow; now and then anything with anything."""

import random

from jinja2.filters import FILTERS

# {t} a text, {n} a number, {l} a list, {x} anything
FORMS = {
    "t": ["''", "'ab'", "messages[0].content", "bos_token", "t", "ns.t", "strftime_now('%d %b %Y')", "{t} + {t}", "{t} ~ {x}", "{t} * {n}", "{t} | upper",
          "{t} | trim", "{t} | replace('a', {t})", "{t}.replace('', {t})", "{t} | indent({n})", "{t} | center({n})", "{t}.ljust({n})", "{t}.zfill({n})", "{t}[1:]",
          "{l} | join({t})", "{t}.join({t})", "{x} | tojson", "{x} | tojson(indent=16)", "{l} | tojson(separators=({t}, ':'))", "{x} | string", "{t} | escape",
          "'%s' % {t}", "'%(a){w}s' % {{'a': {n}}}", "'%(a).{w}f' % {{'a': {n}}}", "'{{:>{w}}}'.format({n})", "{t} | format({x})", "{t} | wordwrap(3)",
          "{t} | urlize", "{t} | title", "{t}.expandtabs({n})", "{x} | pprint", "{x} | xmlattr", "m ~ ''", "{n} | filesizeformat"],
    "n": ["0", "1", "3", "-1", "7.5", "{w}", "n", "ns.n", "{t} | length", "{l} | length", "{n} + {n}", "{n} * {n}", "{n} ** 2", "2 ** {n}", "{n} // 3", "{n} % 7",
          "{l} | sum(start={n})", "{n} | round(2)", "{n} | round({w}, 'floor')", "{n} | abs", "{t} | int", "{n} | float"],
    "l": ["[]", "[1]", "messages", "l", "ns.l", "range(9) | list", "range(9999) | list", "{l} + {l}", "{l} * {n}", "[{x}, {x}]", "{t}.split('a')", "{t} | list",
          "{l} | map('string') | list", "{l} | map(attribute='content') | list", "{l} | select('defined') | list", "{l} | reverse | list", "{l} | sort(attribute='role')",
          "{l} | unique | list", "{l} | batch({n}) | list", "{l} | slice(3) | list", "{l}[::2]", "[{l}, {l}] | sum(start=[])", "{{'a': {x}}} | items | list",
          "{l} | groupby('role') | list", "{t}.splitlines()"],
}  # fmt: skip
WILD = ["missing", "self", "cycler", "joiner()", "loop", "{x}.__class__", "{x}['__init__']", "{x}.append({x})", "namespace(v={x})", "{x} | attr('__class__')", "varargs",
        "{x} | from_json", "dict(a={x})", "{l}.extend({l})", "{x}.update({x})", "{t}.format_map({{'a': {x}}})", "{x} in {x}", "{x} is mapping", "{x} | random",
        *(f"{{x}} | {name}" for name in sorted(FILTERS))]  # fmt: skip
WIDTHS = [*["3"] * 12, "99", "99999", "300000000", "999999999"]


def expression(rng: random.Random, kind: str, depth: int = 3) -> str:
    if kind == "w":
        return rng.choice(WIDTHS)
    if kind == "x":
        kind = rng.choice("tnl")
    form = rng.choice(WILD) if rng.random() < 0.02 else rng.choice(FORMS[kind] if depth else FORMS[kind][:6])
    parts = {}
    for name in "tnlxw":
        parts[name] = _Each(rng, name, depth - 1)
    return f"({form.format(**parts)})"


class _Each:
    """A new expression wherever a form names one."""

    def __init__(self, rng: random.Random, kind: str, depth: int):
        self.rng, self.kind, self.depth = rng, kind, depth

    def __format__(self, spec: str) -> str:
        return expression(self.rng, self.kind, max(0, self.depth))


def statement(rng: random.Random, depth: int = 2) -> str:
    kind, name = rng.random() if depth else 0, rng.choice("tnl")
    if kind < 0.3:
        return f"{{{{ {expression(rng, 'x')} }}}}"
    if kind < 0.55:
        return f"{{% set {rng.choice(['', 'ns.'])}{name} = {expression(rng, name)} %}}"
    body = "".join(statement(rng, depth - 1) for _ in range(rng.randint(1, 3)))
    if kind < 0.75:
        return f"{{% for m in {rng.choice(['messages', 'range(40)', 'range(99999)', expression(rng, 'l')])} %}}{body}{rng.choice(['', '{% break %}'])}{{% endfor %}}"
    if kind < 0.85:
        return f"{{% if {expression(rng, 'x')} %}}{body}{{% else %}}x{{% endif %}}"
    if kind < 0.9:
        return f"{{% macro f(t, n=1) %}}{body}{rng.choice(['', '', '{{ f(t) }}'])}{{% endmacro %}}{{{{ f(t) }}}}"
    return rng.choice(
        ["{% set t %}BODY{% endset %}", "{% generation %}BODY{% endgeneration %}", "{% filter upper %}BODY{% endfilter %}"]
    ).replace("BODY", body)


def template(rng: random.Random) -> str:
    begin = "{% set ns = namespace(t='ab', n=2, l=[1]) %}{% set t, n, l, m = 'xy', 3, ['a', 'b'], 1 %}"
    return begin + "".join(statement(rng) for _ in range(rng.randint(1, 5)))
