"""Process that renders chat templates, started and limited by `renderer.py`:

python -I -S sandbox.py FOLDER...

Jinja's sandbox restricts access but not work: one expression can allocate gigabytes. The kernel kills this process at a limit of memory or
CPU time. It imports Jinja from the given folders, nothing of this package, and communicates over descriptor 0.

A request is two JSON lines: limits with the template's slot, and the task; a template is sent once. A reply is one line; at a limit there
is none.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime

if __name__ == "__main__":
    sys.path += sys.argv[1:]

from jinja2 import TemplateSyntaxError, Undefined, UndefinedError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import SandboxedEnvironment, SecurityError

KEPT = 8  # compiled templates
SPARE = 32 << 20  # bytes of growth after which the process is replaced
WARM = (  # triggers Jinja's lazy imports
    r"{% for x in [{'a': '\n\u00e4'}] %}{{ x | tojson(indent=1) }}{{ '{:>3} %d'.format(1) % 1 }}{{ strftime_now('%d %b %Y') }}{{ no.no }}{% endfor %}",
    "{{ 'a' | wordwrap(1) | striptags | pprint }}{{ lipsum(1) }}",
)


class Refusal(Exception):
    """The template called raise_exception."""


class TooLong(Exception):
    """The rendering exceeds its length limit."""


FAILURES = {TemplateSyntaxError: "syntax", SecurityError: "security", Refusal: "refuses", TooLong: "long", UndefinedError: "undefined"}


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}, used in training: only the contents count."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it for instances)

    def parse(self, parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Lenient(Undefined):
    """Undefined plus text is the text, as in llama.cpp; otherwise Jinja's undefined."""

    def __add__(self, other):
        return other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other):
        return other if isinstance(other, str) else super().__radd__(other)


class Sandbox(SandboxedEnvironment):
    """Jinja as transformers configures it, without constant folding. Lists and mappings may be changed: they are copies."""

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], optimized=False, undefined=Lenient)
        self.filters |= {"tojson": tojson, "from_json": json.loads, "safe": str}
        self.globals |= {"raise_exception": _refuse, "strftime_now": self._strftime_now}
        self.now = datetime.fromtimestamp(0).astimezone()

    def unsafe_undefined(self, obj, attribute):
        raise SecurityError(f"it reads the attribute {attribute!r}")

    def _strftime_now(self, form: str) -> str:
        return self.now.strftime(form)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON without HTML escapes and with non-ASCII characters, as in transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed)


def _listed(value) -> list:
    """Iterators, which filters like map return, as lists."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no value of JSON")


def _refuse(message):
    raise Refusal(str(message))


class Compiled:
    """One template."""

    def __init__(self, source: str):
        self._environment = Sandbox()
        self._template = self._environment.from_string(source)

    def render(self, values: dict, now: str, limit: int) -> str:
        self._environment.now, pieces, size = datetime.fromisoformat(now), [], 0
        for piece in self._template.generate(values):
            size += len(piece)
            if size > limit:
                raise TooLong(f"it makes more than {limit} characters")
            pieces.append(piece)
        return "".join(pieces)


def answer(request: dict, limit: int, compiled: dict[str, Compiled]) -> dict:
    """The rendering, or how the template failed; without "values" it is compiled only."""
    source, failed = request["source"], "fails"
    try:
        if source not in compiled:
            failed = "compile"
            new = Compiled(source)
            failed = "fails"
            while len(compiled) >= KEPT:
                del compiled[next(iter(compiled))]
            compiled[source] = new
        return {"text": compiled[source].render(request["values"], request["now"], limit) if "values" in request else ""}
    except MemoryError:
        raise
    except Exception as error:  # any exception of an expression, and of Python's compiler at extreme nesting
        known = next((name for kind, name in FAILURES.items() if isinstance(error, kind)), None)
        what = str(error) if known or failed == "compile" else f"{type(error).__name__} {error}"
        line = 0
        if isinstance(error, TemplateSyntaxError):
            line, what = error.lineno, str(error.message)
        return {"failed": known or failed, "line": line, "what": what[:1000]}


class Memory:
    """Mapped bytes of this process and their limit, where the kernel enforces it."""

    def __init__(self):
        self._file = os.open("/proc/self/statm", os.O_RDONLY) if os.path.exists("/proc/self/statm") else None
        self._base = self._mapped()

    def _mapped(self) -> int:
        return int(os.pread(self._file, 100, 0).split()[0]) * resource.getpagesize() if self._file is not None else 0

    def allow(self, size: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = self._base + size
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

    def grown(self) -> bool:
        return self._mapped() - self._base > SPARE


def serve() -> None:
    """Serves requests until descriptor 0 is closed."""
    compiled: dict[str, Compiled] = {}
    sources: dict[int, str] = {}  # by slot
    for source in WARM:
        answer({"source": source, "values": {"messages": []}, "now": "2000-01-01"}, 1 << 20, {})
    memory = Memory()
    requests, replies = os.fdopen(0, "rb", 1 << 16), os.fdopen(os.dup(0), "wb")
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):  # no files written or opened, no core dumps
        resource.setrlimit(what, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # both are inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    reply = {"ready": True, "last": False}
    while True:
        replies.write(json.dumps(reply, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        replies.flush()
        if reply["last"] or not (line := requests.readline()):
            return
        limits = json.loads(line)
        if "source" in limits:
            sources[limits["place"]] = limits["source"]
        if limits["memory"] is not None:
            memory.allow(limits["memory"])
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])  # the signal kills the process anywhere
        reply = answer(json.loads(requests.readline()) | {"source": sources[limits["place"]]}, limits["characters"], compiled)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply["last"] = memory.grown()


if __name__ == "__main__":
    try:
        serve()
    except MemoryError:
        os._exit(os.EX_OSERR)
    except ConnectionError:
        os._exit(0)
