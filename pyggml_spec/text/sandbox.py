"""The environment that chat templates run in: no way out, and no way to spend more than a limit of time or memory.

Jinja's immutable sandbox closes the ways out. It does not bound work: a few doublings of a string, `'x' * 10**10` or two nested loops
end a process just as well. So everything that makes text larger is measured before it happens, loops and calls look at the clock, and
filters and methods of strings are those on a list.
"""

import datetime
import json
import re
import time

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import loopcontrols
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

FILTER_NAMES = [
    "abs",
    "bool",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "int",
    "items",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "sort",
    "sum",
    "title",
    "trim",
    "unique",
    "upper",
]
STRING_METHODS = [
    "capitalize",
    "count",
    "endswith",
    "find",
    "index",
    "isalnum",
    "isalpha",
    "isdigit",
    "islower",
    "isnumeric",
    "isspace",
    "isupper",
    "join",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "title",
    "upper",
]
MAX_DATE_FORMAT = 200
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")
_DATE = re.compile(r"(%-?[A-Za-z%]|[^%])*")


class LimitExceeded(Exception):
    """The template used more time or text than it may; the message says which."""


class _Generator(CodeGenerator):
    def visit_Concat(self, node, frame):  # a ~ b: the only growth of text that no other hook sees
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """One per template. ``begin`` starts the clock and sets the limits of one rendering."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self):
        # the optimiser would compute constants while compiling, outside of the limits
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False, finalize=self._finalized)
        self.concat = self.joined
        self.filters = {name: FILTERS[name] for name in FILTER_NAMES if name in FILTERS}
        self.filters |= {"tojson": self.tojson, "from_json": json.loads, "string": self.text}
        self.filters |= {"replace": self._replace, "join": self._join, "indent": self._indent, "sum": self._sum}
        kept = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals.clear()
        self.globals.update(kept, raise_exception=self._raise, strftime_now=self._strftime)
        self.refusal: str | None = None
        self.begin(60.0, 1 << 20)

    def begin(self, seconds: float, characters: int) -> None:
        self._deadline, self.limit, self.refusal = time.monotonic() + seconds, characters, None

    # -- time

    def tick(self) -> str:
        if time.monotonic() > self._deadline:
            raise LimitExceeded("it runs for too long")
        return ""

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(call, lineno=loop.lineno))
        return tree

    # -- text

    def measure(self, value, left: int | None = None) -> int:
        """Characters that ``value`` can become, at least; LimitExceeded above the limit."""
        left = self.limit if left is None else left
        if isinstance(value, str):
            size = len(value)
        elif isinstance(value, int):
            size = value.bit_length() // 3 + 1
        elif isinstance(value, dict):
            size = 0
            for key, item in value.items():
                size += 4 + self.measure(key, left - size) + self.measure(item, left - size)
        elif isinstance(value, (list, tuple, set, frozenset)):
            size = 0
            for item in value:
                size += 2 + self.measure(item, left - size)
        else:
            size = 32
        if size > left:
            raise LimitExceeded(f"it makes more than {self.limit} characters")
        return size

    def text(self, value) -> str:
        self.measure(value)
        return str(value)

    def _finalized(self, value):
        if not isinstance(value, str):
            self.measure(value)
        return value

    def joined(self, parts) -> str:
        out = list(parts)
        self.measure(out, self.limit + 2 * len(out))
        return "".join(part if isinstance(part, str) else str(part) for part in out)

    def tojson(self, value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        """As the ecosystem's renderers have it: not escaped for HTML, not ASCII only."""
        self.measure(value)
        indent = min(indent, 16) if isinstance(indent, int) else None
        return json.dumps(value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys))

    def _replace(self, text, old, new, count=-1) -> str:
        text, old, new = self.text(text), str(old), str(new)
        grown = len(text) + (text.count(old) if old else len(text) + 1) * len(new)
        if grown > self.limit:
            raise LimitExceeded(f"it makes more than {self.limit} characters")
        return text.replace(old, new, -1 if count is None else count)

    def _join(self, value, d="", attribute=None) -> str:
        parts = list(value) if attribute is None else [self.getitem(item, attribute) for item in value]
        self.measure(parts)
        if len(parts) * len(str(d)) > self.limit:
            raise LimitExceeded(f"it makes more than {self.limit} characters")
        return str(d).join(map(str, parts))

    def _sum(self, value, attribute=None, start=0):
        items = [item if attribute is None else self.getitem(item, attribute) for item in value]
        self.measure([start, *items])  # a sum of lists is as long as all of them
        return sum(items, start)

    def _indent(self, text, width=4, first=False, blank=False) -> str:
        fill = width if isinstance(width, str) else " " * min(int(width), 1000)
        lines = self.text(text).splitlines(keepends=True)
        if len(lines) * len(fill) > self.limit:
            raise LimitExceeded(f"it makes more than {self.limit} characters")
        return "".join(line if (i == 0 and not first) or not (blank or line.strip()) else fill + line for i, line in enumerate(lines))

    # -- operators and calls

    def call_binop(self, context, operator, left, right):
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**" and not (numbers and abs(left) <= 1 << 32 and abs(right) <= 64):
            raise LimitExceeded("it computes a power that is too large")
        if operator == "*" and not numbers:
            many, one = (left, right) if isinstance(right, int) else (right, left)
            if not isinstance(one, int) or self.measure(many) * max(one, 0) > self.limit:
                raise LimitExceeded(f"it makes more than {self.limit} characters")
        elif operator == "*" and isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 512:
            raise LimitExceeded("it computes a product that is too large")
        elif operator == "+" and not numbers:
            self.measure((left, right), self.limit + 4)
        elif operator == "%" and isinstance(left, str):
            self.measure((left, right))
            if _WIDE.search(left):
                raise SecurityError("it formats with a width")
        return super().call_binop(context, operator, left, right)

    def call(self, context, obj, *args, **kwargs):
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name not in STRING_METHODS:
                raise SecurityError(f"it calls the string method {name}")
            if name == "replace":
                return self._replace(owner, *args)
            if name == "join":
                return self._join(*args, d=owner)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value):
        if isinstance(getattr(value, "__self__", None), str) and getattr(value, "__name__", "") in ("format", "format_map"):
            raise SecurityError(f"it calls the string method {value.__name__}")

    def unsafe_undefined(self, obj, attribute):
        raise SecurityError(f"it reads the attribute {attribute!r}")

    # -- helpers of templates

    def _raise(self, message):
        self.refusal = str(message)
        raise LimitExceeded(self.refusal)

    def _strftime(self, form):
        if not isinstance(form, str) or len(form) > MAX_DATE_FORMAT or not _DATE.fullmatch(form):
            raise SecurityError("it formats the date in an unusual way")
        return datetime.datetime.now().astimezone().strftime(form)
